// Arguments of attention launches: a problem as launch parameters, and device memory for what does not fit a launch.
#ifndef HEED_ENGINES_SOFTMAX_CUDA_ARGUMENTS_H_
#define HEED_ENGINES_SOFTMAX_CUDA_ARGUMENTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "heed/cuda/calls.h"
#include "heed/cuda/shared_tile.h"
#include "heed/engines/softmax/cuda/forward_params.h"
#include "heed/engines/softmax/cuda/tile_lists.h"
#include "heed/engines/softmax/problem.h"

namespace heed::softmax::cuda {

inline constexpr char kName[] = "softmax_cuda";

// The batch entry that holds a sequence's rows. Packed sequences, and sequences that share rows, use the first.
inline int32_t BatchOf(const Rows& rows, const Sequence& s) {
  return rows.batch_stride == 0 ? 0 : static_cast<int32_t>(s.batch);
}

class Arguments {
 public:
  // Uploads what a call for these sequences needs. Throws Unsupported if the device has too little memory.
  Arguments(const heed::cuda::Call& call, const Problem& p, std::span<const Sequence> sequences);

  // Returns the parameters of a launch for some of the sequences, at most kMostSequences.
  ForwardParams Of(std::span<const Sequence> launched) const;
  DeviceSequence OnDevice(const Sequence& sequence) const;
  // Encodes tensor maps of keys and values, if TMA can load them.
  void EncodeTensorMaps(const heed::cuda::Call& call, ForwardParams& params) const;

 private:
  DeviceNumbers NumbersOf(const std::vector<double>& here, const HeadNumbers& there);
  void ListPages();
  void UploadTileLists();

  const Problem& p_;
  const std::span<const Sequence> all_;
  heed::cuda::Uploads uploads_;
  const DeviceNumbers slopes_, sinks_;
  const std::byte* const* pages_ = nullptr;
  std::vector<int64_t> first_pages_;  // by sequence
  const int32_t* list_begins_ = nullptr;
  const ListedTile* list_tiles_ = nullptr;
  const uint64_t* mask_words_ = nullptr;
  std::vector<TileLists::Place> list_places_;  // by sequence
  bool aligned_;
};

inline Strides StridesOf(const Rows& rows) { return {rows.token_stride, rows.head_stride}; }

// True if each row begins at a multiple of 16 bytes.
inline bool IsAligned(const Rows& rows, DType dtype) {
  const auto address = reinterpret_cast<uintptr_t>(rows.data);
  const auto strides = static_cast<uintptr_t>(rows.batch_stride | rows.token_stride | rows.head_stride);
  return (address | strides * SizeOf(dtype)) % heed::cuda::kUnitBytes == 0;
}

inline int64_t Blocks(int64_t rows, int64_t lanes) { return (rows + lanes - 1) / lanes; }

// Calls f(sequences, longest queries, longest keys) for each launch's sequences.
template <class F>
void ForLaunches(std::span<const Sequence> all, const F& f) {
  for (size_t first = 0; first < all.size(); first += kMostSequences) {
    const size_t count = std::min<size_t>(kMostSequences, all.size() - first);
    const std::span sequences = all.subspan(first, count);
    int64_t queries = 0, keys = 0;
    for (const Sequence& s : sequences) {
      queries = std::max(queries, s.num_queries);
      keys = std::max(keys, s.num_keys);
    }
    f(sequences, queries, keys);
  }
}

}  // namespace heed::softmax::cuda

#endif  // HEED_ENGINES_SOFTMAX_CUDA_ARGUMENTS_H_
