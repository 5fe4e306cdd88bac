// One call of any mechanism but exact attention on the tensors of a file: memory
// for what it computes, and what it plans.
#ifndef CLI_MECHANISM_CALL_H_
#define CLI_MECHANISM_CALL_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/io/safetensors.h"

namespace heed::cli {

class MechanismCall {
 public:
  // `file` stands in messages. Throws FileError if the tensors do not fit.
  MechanismCall(const Context& ctx, const OpEntry& op, const std::string& file, const TensorMap& tensors,
                std::optional<double> scale);

  void Forward(Context& ctx) const;

  const TensorCall& plan() const { return call_; }
  ConstTensorView o() const { return outputs_[0].view(); }

  // o, then what is remembered; without the first axis where the file has none.
  std::vector<NamedTensor> Outputs(bool batched) const;
  int64_t StateBytes() const;

 private:
  std::string file_;
  TensorCall call_;
  std::vector<Buffer> outputs_;
};

}  // namespace heed::cli

#endif  // CLI_MECHANISM_CALL_H_
