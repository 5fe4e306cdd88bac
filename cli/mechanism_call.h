// One call of any mechanism but exact attention on the tensors of a file: the memory of its outputs, and its plan.
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
  // `file` is used in messages. Throws FileError if the mechanism does not accept the tensors.
  MechanismCall(const Context& ctx, const OpEntry& op, const std::string& file, const TensorMap& tensors,
                std::optional<double> scale);

  void Forward(Context& ctx) const;

  const TensorCall& plan() const { return call_; }
  ConstTensorView o() const { return outputs_[0].view(); }

  // o, then the state, without the first axis if the file has none.
  std::vector<NamedTensor> Outputs(bool batched) const;
  int64_t StateBytes() const;

 private:
  std::string file_;
  TensorCall call_;
  std::vector<Buffer> outputs_;
};

}  // namespace heed::cli

#endif  // CLI_MECHANISM_CALL_H_
