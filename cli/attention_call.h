// One call of exact attention on the tensors of a file: memory for its outputs, its time, and its distance from a
// reference.
#ifndef CLI_ATTENTION_CALL_H_
#define CLI_ATTENTION_CALL_H_

#include <cstdint>
#include <functional>
#include <string>

#include "cli/print.h"
#include "heed/core/context.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/options_text.h"
#include "heed/harness/output_error.h"
#include "heed/harness/tensor_file.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::cli {

class AttentionCall {
 public:
  // Outputs have the dtype `out_dtype`, which differs from q's for references only.
  AttentionCall(const TensorSet& tensors, const attention::Options& options, DType out_dtype);

  void Forward(Context& ctx) const;
  void Reference() const;

  // The error of o, after it was computed, against the scalar reference on `num_rows` queries at the start, in the
  // middle and at the end.
  OutputError SpotCheck(int64_t num_rows) const;

  attention::Explanation Explain(const Context& ctx) const;
  int64_t Workspace(const Context& ctx) const;

  // Outputs with the axes of the file: [B, T, H, D] or [T, H, D]; [B, H, T] or [H, T].
  ConstTensorView o() const;
  ConstTensorView lse() const;

 private:
  std::string file_;
  bool batched_;
  attention::Inputs in_;
  attention::Options options_;
  Buffer o_, lse_;
};

// Drops the first axis, of size 1, if the file has none.
ConstTensorView DropBatch(const TensorView& x, bool batched);

// Returns f(). An exception is the fault of the file, not of the library's caller: the file's name is put before its
// message.
template <class F>
auto Named(const std::string& file, F&& f) {
  try {
    return f();
  } catch (const InvalidArgument& e) {
    throw FileError(file + ": " + e.what());
  } catch (const Unsupported& e) {
    throw Unsupported(file + ": " + e.what());
  }
}

// Median seconds of a call: one call to warm up, then up to seven within a second. A longer call is measured once.
double MedianSeconds(const Context& ctx, const std::function<void()>& call);

// The options that differ from the default, {"causal": true, "window": [127, 0]}.
Json ToJson(const attention::Options& options);

}  // namespace heed::cli

#endif  // CLI_ATTENTION_CALL_H_
