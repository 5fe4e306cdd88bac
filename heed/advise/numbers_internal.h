// Generated tensors for mechanisms if none were given.
#ifndef HEED_ADVISE_NUMBERS_INTERNAL_H_
#define HEED_ADVISE_NUMBERS_INTERNAL_H_

#include <map>
#include <span>
#include <string>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"

namespace heed::advise {

// Inputs of mechanisms at one size and in one dtype: generated on first use, and shared by all that have a tensor of
// that name and shape. Keys are short, so that delta rules stay finite, decays are weak, factors are between 0 and 1,
// and regularisations are larger than 0.5.
class Numbers {
 public:
  Numbers(const Sizes& sizes, DType dtype) : sizes_(sizes), dtype_(dtype) {}

  // True if all axes of the required inputs have sizes here.
  static bool Know(std::span<const InputSpec> inputs);

  // Views of the required inputs, valid as long as this object.
  TensorMap For(std::span<const InputSpec> inputs);

 private:
  Sizes sizes_;
  DType dtype_;
  std::map<std::string, Buffer> made_;
};

}  // namespace heed::advise

#endif  // HEED_ADVISE_NUMBERS_INTERNAL_H_
