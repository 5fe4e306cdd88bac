// TensorSet: q, k and v of one layer, from a .safetensors file or three .npy
// files, as the command line and the benchmarks want them.
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

namespace heed {

// Where: `file`, or all of q, k and v.
struct TensorPaths {
  std::string file, q, k, v;
};

// Which part of it, and as what.
struct TensorChoice {
  std::string layer;           // name or index; empty is the first
  std::string heads;           // indices of query heads "0,3"; empty is all
  std::optional<DType> dtype;  // default: f32 for 16-bit files, else the file's
};

struct TensorSet {
  std::string file;   // path, or the three joined by ", "
  std::string layer;  // "layers.0", or "" where tensors have no prefix
  std::vector<std::string> layers;  // all there are, in order
  ConstTensorView q, k, v;          // [B, T, H, D], in `dtype`
  bool batched = true;              // false: the file has no axis B
  DType file_dtype = DType::kF32, dtype = DType::kF32;

  // Metadata that concerns this layer: "layers.0.scale" is `scale` here, and
  // outranks a plain "scale".
  std::map<std::string, std::string> facts;

  std::vector<std::shared_ptr<const void>> owners;  // of the views' memory
};

// Reads one layer. Views point into the mapped file where dtype, alignment and
// heads allow it, else into converted copies. With chosen heads, query head h
// comes with the key head that it reads, so that Hkv = Hq.
//
// Throws FileError, "PATH: what is wrong, expected what", and InvalidArgument
// with the same form if `choice` names what the file does not have.
TensorSet LoadTensors(const TensorPaths& paths, const TensorChoice& choice);

// The same for a .safetensors file in memory, which must outlive the result.
// `path` stands in messages only.
TensorSet LoadTensors(const std::string& path, std::span<const uint8_t> bytes,
                      const TensorChoice& choice);

}  // namespace heed

#endif  // HEED_HARNESS_TENSOR_FILE_H_
