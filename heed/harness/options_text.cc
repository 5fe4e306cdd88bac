// The options of attention in one line.
#include "heed/harness/options_text.h"

#include <sstream>

#include "heed/ops/exact/attention/attention_options_internal.h"

namespace heed {

std::string Brief(const Pattern& pattern, size_t most) {
  const std::string text = pattern.ToString();
  return text.size() <= most ? text : text.substr(0, most) + "...";
}

std::string ToString(const attention::Options& options) {
  std::ostringstream text;  // writes six digits of a number
  if (options.causal) text << " causal";
  if (options.align == attention::Align::kTopLeft) text << " top_left";
  const auto [left, right] = options.window;
  if (left >= 0 || right >= 0) text << " window " << left << "," << right;
  if (options.sink_tokens > 0) text << " sink_tokens " << options.sink_tokens;
  if (options.chunk > 0) text << " chunk " << options.chunk;
  attention::ForEachTensor(options, [&](const attention::OptionRow& row, const ConstTensorView& tensor) {
    if (tensor.present()) text << " " << row.name;
  });
  if (text.str().empty() && !options.pattern.present()) text << " full";
  if (options.softcap > 0) text << " softcap " << options.softcap;
  if (options.pattern.present()) text << " " << Brief(options.pattern);
  return text.str().substr(1);
}

}  // namespace heed
