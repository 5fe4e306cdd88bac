// Slots: placing tensors, and detecting writes outside of them.
#include "tests/fuzz/slots.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <new>

#include "heed/harness/buffer.h"

namespace heed::fuzz {

TensorView Slot::Place(DType dtype, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                       bool at_end) {
  int64_t below = 0, above = 1;  // offsets from the first element
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) below = above = 0;
  }
  for (size_t i = 0; above > 0 && i < sizes.size(); ++i) {
    const int64_t reach = strides[i] * (sizes[i] - 1);
    (reach < 0 ? below : above) += std::abs(reach);
  }
  const size_t element = SizeOf(dtype);
  const size_t num_bytes = static_cast<size_t>(below + above) * element;
  constexpr size_t kSlack = 64;
  if (num_bytes + kSlack > kBytes) throw std::bad_alloc();
  uint8_t* const all = memory_.data();
  begin_ = at_end ? all + kBytes - num_bytes - kSlack : all;
  end_ = begin_ + num_bytes + kSlack;
  std::fill(begin_, end_, uint8_t{0xFF});
  uint8_t* const first = (at_end ? end_ - num_bytes : begin_) + static_cast<size_t>(below) * element;
  return TensorView(first, dtype, sizes, strides);
}

bool Slot::Unchanged() const { return std::equal(begin_, end_, copy_.begin(), copy_.end()); }

bool Slot::UnchangedExcept(const ConstTensorView& written) const {
  std::vector<uint8_t> before = copy_;
  if (written.num_elements() > 0) {
    const size_t element = SizeOf(written.dtype());
    const ptrdiff_t first = written.as<uint8_t>() - begin_;
    std::array<int64_t, kMaxRank> index{};
    const std::span<int64_t> at(index.data(), written.sizes().size());
    do {
      int64_t offset = 0;
      for (size_t i = 0; i < at.size(); ++i) {
        offset += at[i] * written.strides()[i];
      }
      const size_t byte = static_cast<size_t>(first) + static_cast<size_t>(offset) * element;
      std::copy_n(begin_ + byte, element, before.begin() + static_cast<ptrdiff_t>(byte));
    } while (NextIndex(written.sizes(), at));
  }
  return std::equal(begin_, end_, before.begin(), before.end());
}

}  // namespace heed::fuzz
