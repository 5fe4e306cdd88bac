// The options of attention as keywords of Python and as arguments of PyTorch's operators. Readers, types and defaults
// of both follow from the options' rows: attention_options_internal.h.
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
  std::string type, value;  // its annotation, or its type in a schema, and its default
};

// Python's keywords, one for each option or union of two, in the order of the rows.
const std::vector<OptionArgument>& OptionKeywords();

// The arguments of an operator, one for each option, in the order of its schema.
const std::vector<OptionArgument>& TorchOptions();

// What heed.torch knows of each of these, and of threads, which every operator has: (name, "type name=default", whether
// lists are taken, whether a gradient reaches it, whether caches have it).
nanobind::tuple ForTorch(const std::vector<OptionArgument>& options);

// Lists of vectors may be given for these, as Python's lists.
bool TakesNumbers(const OptionRow& row);

// A signature in which the keywords of the options that are taken, "scale: float | None = None, causal: ...", and
// `more` stand for its word "**options". The text lives as long as the module.
using Takes = bool (*)(const OptionRow& row);
inline bool TakesAll(const OptionRow&) { return true; }
inline bool TakesPadded(const OptionRow& row) { return row.axes != "N"; }
const char* Spelled(std::string signature, Takes takes, const std::string& more = "");

inline constexpr char kThreads[] = "threads: int | None = None";
inline constexpr char kOutAndThreads[] = "out: OutArray | None = None, threads: int | None = None";

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_OPTIONS_PY_H_
