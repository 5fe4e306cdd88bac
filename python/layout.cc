// The warning that tokens and heads may be exchanged.
#include "python/layout.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <string>

#include "python/runtime.h"

namespace heed::python {

void WarnOfHeadsBeforeTokens(const char* operation, const ConstTensorView& q, const ConstTensorView& k,
                             const ConstTensorView& v) {
  static std::atomic<bool> warned = false;
  if (!Checks() || warned) return;
  int64_t tokens = 0, heads = std::numeric_limits<int64_t>::max();
  for (const ConstTensorView* x : {&q, &k, &v}) {
    if (!x->present() || x->rank() != 4) continue;
    tokens = std::max(tokens, x->size(1));
    heads = std::min(heads, x->size(2));
  }
  if (tokens <= 1 || tokens >= heads || warned.exchange(true)) return;
  const std::string text = std::string(operation) + ": as [B, T, H, D] these tensors are " + std::to_string(tokens) +
                           " tokens of " + std::to_string(heads) +
                           " heads; if they are [B, H, T, D], swap these two axes";
  if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1) != 0) throw nanobind::python_error();
}

}  // namespace heed::python
