// Format: the only file that compiles fmt's formatting functions.
#include "cli/format.h"

namespace heed {

std::string FormatArguments(fmt::string_view text, fmt::format_args values) { return fmt::vformat(text, values); }

}  // namespace heed
