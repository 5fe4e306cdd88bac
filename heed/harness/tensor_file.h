// TensorSet: q, k and v of one layer, from a .safetensors file or three .npy
// files, as the command line and the benchmarks want them. NamedTensors: the
// same of what a mechanism calls its inputs.
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

// Where: `file`, or all of q, k and v.
struct TensorPaths {
  std::string file, q, k, v;
};

// Which part of it, and as what.
struct TensorChoice {
  std::string layer;                   // name or index; empty is the first
  std::string heads;                   // indices of query heads "0,3"; empty is all
  std::optional<DType> dtype;          // default: f32 for 16-bit files, else the file's
  std::optional<int64_t> tokens = {};  // of named tensors the first so many; default: all
};

// What is known of a layer besides its tensors.
struct LayerOfFile {
  std::string file;                 // path, or the three joined by ", "
  std::string layer;                // "layers.0", or "" where tensors have no prefix
  std::vector<std::string> layers;  // all there are, in order
  bool batched = true;              // false: the file has no axis B
  DType file_dtype = DType::kF32, dtype = DType::kF32;

  // Metadata that concerns this layer: "layers.0.scale" is `scale` here, and
  // outranks a plain "scale".
  std::map<std::string, std::string> facts;

  std::vector<std::shared_ptr<const void>> owners;  // of the views' memory
};

struct TensorSet : LayerOfFile {
  ConstTensorView q, k, v;  // [B, T, H, D], in `dtype`
};

struct NamedTensors : LayerOfFile {
  TensorMap tensors;  // with all axes of their InputSpec, in `dtype` or wider
};

// Reads one layer. Views point into the mapped file where dtype, alignment and
// heads allow it, else into converted copies. With chosen heads, query head h
// comes with the key head that it reads, so that Hkv = Hq.
//
// Throws FileError, "PATH: what is wrong, expected what", and InvalidArgument
// with the same form if `choice` names what the file does not have.
TensorSet LoadTensors(const TensorPaths& paths, const TensorChoice& choice);

// Reads the inputs of a mechanism in the same way, .npy files where it has none
// but q, k and v. `file_dtype` is that of the first; how shapes fit together is
// for the mechanism to say. A tensor of fewer heads than the first is read by
// several, as q reads k and v.
NamedTensors LoadNamed(const TensorPaths& paths, std::span<const InputSpec> inputs, const TensorChoice& choice);

// The same of tensors in memory, by name, which outlive the result; `name` stands in messages where a path does.
NamedTensors NamedOf(const std::string& name, const TensorMap& given, std::span<const InputSpec> inputs,
                     const TensorChoice& choice);

// Whether LoadNamed would find all that are not optional, of whatever shape, in some layer.
// Throws FileError for what is not a file of tensors.
bool Holds(const TensorPaths& paths, std::span<const InputSpec> inputs);

// LoadTensors for a .safetensors file in memory, which must outlive the result.
// `path` stands in messages only.
TensorSet LoadTensors(const std::string& path, std::span<const uint8_t> bytes, const TensorChoice& choice);

}  // namespace heed

#endif  // HEED_HARNESS_TENSOR_FILE_H_
