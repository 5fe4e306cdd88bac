// The options of attention as keywords of Python and as arguments of PyTorch's operators. Both get readers, types and
// defaults from the rows of options in attention_options_internal.h.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTENTION_OPTIONS_PY_H_
#define HEED_OPS_EXACT_ATTENTION_ATTENTION_OPTIONS_PY_H_

#include <string>
#include <vector>

#include "heed/ops/exact/attention/attention_call_py.h"
#include "heed/ops/exact/attention/attention_options_internal.h"
#include "python/arguments.h"

namespace heed::attention {

struct OptionArgument {
  const OptionRow* row;
  python::Keyword<Call> keyword;
  std::string type, value;  // annotation, or type in a schema, and default
};

// Python's keywords, one for each option or union of two, in the order of the rows.
const std::vector<OptionArgument>& OptionKeywords();

// The arguments of an operator, one for each option, in the order of its schema.
const std::vector<OptionArgument>& TorchOptions();

// Describes each option, and threads, which every operator has, for heed.torch: (name, "type name=default", whether
// lists are taken, whether a gradient reaches it, whether caches have it).
nanobind::tuple ForTorch(const std::vector<OptionArgument>& options);

// True if the option takes lists of numbers, as Python's lists.
bool TakesNumbers(const OptionRow& row);

// Returns the signature with the keywords of the options taken, "scale: float | None = None, causal: ...", and `more`
// in place of its word "**options". The text lives as long as the module.
using Takes = bool (*)(const OptionRow& row);
inline bool TakesAll(const OptionRow&) { return true; }
inline bool TakesPadded(const OptionRow& row) { return row.axes != "N"; }
const char* Spelled(std::string signature, Takes takes, const std::string& more = "");

inline constexpr char kThreads[] = "threads: int | None = None";
inline constexpr char kOutAndThreads[] = "out: OutArray | None = None, threads: int | None = None";
// Keywords for the processes of a communicator: of a cache's attend, and of attention and attention_backward.
inline constexpr char kComm[] = "comm: typing.Any | None = None, ";
inline constexpr char kDivided[] =
    "comm: typing.Any | None = None, method: typing.Literal['auto', 'all_gather', 'ulysses', 'ring'] = 'auto', "
    "order: typing.Literal['contiguous', 'zigzag'] = 'contiguous', ";

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_OPTIONS_PY_H_
