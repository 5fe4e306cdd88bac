// Numbers to run mechanisms on where nobody gave tensors.
#ifndef HEED_ADVISE_NUMBERS_INTERNAL_H_
#define HEED_ADVISE_NUMBERS_INTERNAL_H_

#include <map>
#include <span>
#include <string>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"

namespace heed::advise {

// What mechanisms take at one size and in one dtype: made when first asked for, the same for each that has a tensor of
// that name and shape. Keys are short, so that delta rules stay finite, decays weak, factors between 0 and 1.
class Numbers {
 public:
  Numbers(const Sizes& sizes, DType dtype) : sizes_(sizes), dtype_(dtype) {}

  // Whether all axes of what is not optional have sizes here.
  static bool Know(std::span<const InputSpec> inputs);

  // Views of what is not optional, as long as this lives.
  TensorMap For(std::span<const InputSpec> inputs);

 private:
  Sizes sizes_;
  DType dtype_;
  std::map<std::string, Buffer> made_;
};

}  // namespace heed::advise

#endif  // HEED_ADVISE_NUMBERS_INTERNAL_H_
