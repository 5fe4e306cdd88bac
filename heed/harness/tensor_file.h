// TensorSet: q, k and v of one layer, from a .safetensors file or three .npy files, for the command line and the
// benchmarks. NamedTensors: the inputs of any mechanism, by name, read in the same way.
#ifndef HEED_HARNESS_TENSOR_FILE_H_
#define HEED_HARNESS_TENSOR_FILE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/harness/case.h"

namespace heed {

// Paths of the input: `file`, or all of q, k and v.
struct TensorPaths {
  std::string file, q, k, v;
};

// The chosen layer, heads and tokens, and their dtype.
struct TensorChoice {
  std::string layer;                   // name or index; empty is the first
  std::string heads;                   // indices of query heads "0,3"; empty is all
  std::optional<DType> dtype;          // default: f32 for 16-bit files, else the file's
  std::optional<int64_t> tokens = {};  // the number of leading tokens of named tensors; default: all
};

// Information about a layer besides its tensors.
struct LayerOfFile {
  std::string file;                 // path, or the three joined by ", "
  std::string layer;                // "layers.0", or "" if tensors have no prefix
  std::vector<std::string> layers;  // all layers, in order
  bool batched = true;              // false: the file has no axis B
  DType file_dtype = DType::kF32, dtype = DType::kF32;

  // Metadata of this layer: "layers.0.scale" is `scale` here, and takes precedence over a plain "scale".
  std::map<std::string, std::string> facts;

  std::vector<std::shared_ptr<const void>> owners;  // owners of the views' memory
};

struct TensorSet : LayerOfFile {
  ConstTensorView q, k, v;  // [B, T, H, D], in `dtype`
};

struct NamedTensors : LayerOfFile {
  TensorMap tensors;  // with all axes of their InputSpec, in `dtype` or wider
};

// Reads one layer. Views point into the mapped file if dtype, alignment and heads allow it, else into converted copies.
// With chosen heads, query head h comes with the key head that it reads, so that Hkv = Hq.
//
// Throws FileError, "PATH: what is wrong, expected what", and InvalidArgument of the same form if `choice` names
// something that the file does not have.
TensorSet LoadTensors(const TensorPaths& paths, const TensorChoice& choice);

// Reads the inputs of a mechanism in the same way, from .npy files if it has none but q, k and v. `file_dtype` is that
// of the first. The mechanism checks that shapes agree. A tensor of fewer heads than the first has is shared, like k
// and v among the heads of q.
NamedTensors LoadNamed(const TensorPaths& paths, std::span<const InputSpec> inputs, const TensorChoice& choice);

// Makes the inputs of a mechanism from tensors in memory, by name, which must outlive the result. `name` replaces the
// path in messages.
NamedTensors NamedOf(const std::string& name, const TensorMap& given, std::span<const InputSpec> inputs,
                     const TensorChoice& choice);

// True if LoadNamed would find all required inputs, of any shape, in some layer. Throws FileError if it is not a file
// of tensors.
bool Holds(const TensorPaths& paths, std::span<const InputSpec> inputs);

// LoadTensors for a .safetensors file in memory, which must outlive the result. `path` is used in messages only.
TensorSet LoadTensors(const std::string& path, std::span<const uint8_t> bytes, const TensorChoice& choice);

}  // namespace heed

#endif  // HEED_HARNESS_TENSOR_FILE_H_
