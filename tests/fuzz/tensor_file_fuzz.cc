// Any bytes as an input of `heed run` and similar verbs: a file of tensors with metadata about its layers, and the
// user's choice of a layer and heads.
#include <cstdint>
#include <string>
#include <vector>

#include "cli/options.h"
#include "cli/token_labels.h"
#include "heed/core/error.h"
#include "heed/harness/tensor_file.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/tensors.h"

namespace heed::fuzz {
namespace {

void CheckSet(const TensorSet& set) {
  for (const ConstTensorView& view : {set.q, set.k, set.v}) {
    Require(view.rank() == 4 && view.dtype() == set.dtype, "not [B, T, H, D]");
    ReadAll(view);
  }
  Require(set.q.size(3) == set.k.size(3) && set.k.size(2) == set.v.size(2) && set.k.size(1) == set.v.size(1),
          "shapes do not fit");
  std::vector<std::string> notes;
  const attention::Options options = cli::MathOptions().Resolve(set, notes);
  Require(options.window.left >= -1 && options.window.right >= -1 && options.softcap >= 0, "a fact is out of range");
  cli::TokenLabels(set, notes).dump();  // throws if it is not UTF-8
}

void Run(Input input) {
  constexpr DType kDTypes[] = {DType::kF32, DType::kF64};
  TensorChoice choice;
  if (input.OneIn(4)) choice.layer = input.Text();
  if (input.OneIn(4)) choice.heads = input.Text();
  if (input.OneIn(4)) choice.dtype = input.Pick(kDTypes);
  try {
    CheckSet(LoadTensors("F", input.rest(), choice));
  } catch (const FileError& e) {
    Require(std::string_view(e.what()).starts_with("F: "), "no file named");
  } catch (const InvalidArgument&) {
  } catch (const Unsupported&) {
  }
}

}  // namespace
}  // namespace heed::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  heed::fuzz::Run({data, size});
  return 0;
}
