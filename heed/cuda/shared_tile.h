// Rows of elements in a block's shared memory, as products of matrices read them: of 16 bits, or of f32 in pieces of
// bf16.
//
// Sixteen bytes of a row are a unit, what a thread copies at once. Unit i of row r stands at i xor Swizzle(r), which
// puts what a warp reads at once into different banks: of 16 bits, the units of the same columns of eight rows; of f32,
// eight columns of rows 0 to 3 or 4 to 7, a word pair per thread, or of every other one of eight rows, a word per
// thread.
//
// Elements of 16 bits stand in panels of 64 columns, one behind the other, whose rows are 128 bytes: turned so, and
// from a multiple of 1024 bytes on, they are what products of groups and bulk copies call a swizzle of 128 bytes.
#ifndef HEED_CUDA_SHARED_TILE_H_
#define HEED_CUDA_SHARED_TILE_H_

#include <cstdint>
#include <type_traits>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/bf16_split.h"

namespace heed::cuda {

inline constexpr int kUnitBytes = 16;
inline constexpr int kAtomColumns = 64;  // of 16 bits

template <int kRows, int kColumns, class Element = uint16_t>
class SharedTile {
  static_assert(kColumns % kAtomColumns == 0);
  static constexpr bool kIsWide = std::is_same_v<Element, float>;
  static constexpr int kUnit = kUnitBytes / sizeof(Element), kUnits = kColumns / kUnit;
  static constexpr int kPitch = kIsWide ? kColumns : kAtomColumns;  // elements from row to row
  static constexpr int kAtomStride =
      kIsWide ? 8 * kUnit : kRows * kAtomColumns;  // from eight units of a row to the next eight

 public:
  static constexpr int kBytes = kRows * kColumns * static_cast<int>(sizeof(Element));

  HEED_DEVICE explicit SharedTile(char* at) : at_(reinterpret_cast<Element*>(at)) {}

  HEED_DEVICE Element* At(int row, int column) const {
    const int unit = column / kUnit;
    return at_ + row * kPitch + unit / 8 * kAtomStride + (unit % 8 ^ Swizzle(row)) * kUnit + column % kUnit;
  }

  // Begins to copy rows row(i) of `columns` elements, i below `rows`, `columns` being at most kColumns; what they do
  // not fill is 0. `aligned`: they begin at multiples of 16 bytes.
  template <class M, class Row>
  HEED_DEVICE void Copy(M& m, bool aligned, int columns, int rows, const Row& row) const {
    const bool asynchronous = aligned && columns % kUnit == 0;
    for (int i = m.thread(); i < kRows * kUnits; i += m.num_threads()) {
      const int r = i / kUnits, column = i % kUnits * kUnit;
      const int count = r >= rows || column >= columns ? 0 : columns - column < kUnit ? columns - column : kUnit;
      Element* to = At(r, column);
      const Element* from = row(count == 0 ? 0 : r) + (count == 0 ? 0 : column);
      if (asynchronous) {
        m.CopyAsync(to, from, count != 0);
        continue;
      }
      for (int e = 0; e < kUnit; ++e) to[e] = e < count ? from[e] : Element{0};
    }
  }

  // The same of rows `stride` elements apart, by a block of kThreads. Where these are a multiple of a row's units, each
  // has a column of its own and places that differ by constants, all or, of f32, one by one: a copy is a handful of
  // instructions.
  template <int kThreads, class M>
  HEED_DEVICE void CopyRows(M& m, bool aligned, int columns, int rows, const Element* first, int64_t stride) const {
    constexpr int kStep = kThreads / kUnits;  // rows of all threads
    if constexpr (kThreads % kUnits == 0 && (kStep % 8 == 0 || kIsWide) && kRows % kStep == 0) {
      if (aligned && columns % kUnit == 0) {
        const auto thread = static_cast<unsigned>(m.thread());
        const int own = static_cast<int>(thread / kUnits), column = static_cast<int>(thread % kUnits) * kUnit;
        Element* const to = At(own, column);
        const Element* from = first + own * stride + column;
        const int left = column < columns ? rows - own : 0;
        HEED_DEVICE_UNROLL
        for (int i = 0; i < kRows / kStep; ++i) {
          Element* const place = kStep % 8 == 0 ? to + i * kStep * kPitch : At(own + i * kStep, column);
          m.CopyAsync(place, from, i * kStep < left);  // `from` is not looked at beyond the last row
          from += kStep * stride;
        }
        return;
      }
    }
    Copy(m, aligned, columns, rows, [&](int row) { return first + row * stride; });
  }

  // Stores rows as Copy() brings them, once all threads have met; none where row(i) is null.
  template <class M, class Row>
  HEED_DEVICE void Store(M& m, bool aligned, int columns, int rows, const Row& row) const {
    for (int i = m.thread(); i < rows * kUnits; i += m.num_threads()) {
      const int r = i / kUnits, column = i % kUnits * kUnit;
      if (column >= columns) continue;
      Element* const begin = row(r);
      if (begin == nullptr) continue;
      const Element* from = At(r, column);
      Element* to = begin + column;
      if (aligned && column + kUnit <= columns) {
        *reinterpret_cast<Unit*>(to) = *reinterpret_cast<const Unit*>(from);
        continue;
      }
      for (int e = 0; e < kUnit && column + e < columns; ++e) to[e] = from[e];
    }
  }
  HEED_DEVICE void Put(int row, int column, Element element) const { *At(row, column) = element; }
  // Two of 16 bits, from an even column on.
  HEED_DEVICE void PutPair(int row, int column, uint32_t pair) const {
    *reinterpret_cast<uint32_t*>(At(row, column)) = pair;
  }

  // 16 rows from `row` on, of 16 columns: the first operand of a product.
  template <class M>
  HEED_DEVICE void LoadRows(M& m, int row, int column, uint32_t (&r)[4]) const {
    const int lane = m.thread() % kWarp, matrix = lane / 8;
    m.template LdMatrix<false>(Near(row, column, matrix % 2 * 8 + lane % 8, matrix / 2 * 8), r);
  }
  // The same rows as columns: two second operands, of eight rows each.
  template <class M>
  HEED_DEVICE void LoadColumns(M& m, int row, int column, uint32_t (&r)[4]) const {
    const int lane = m.thread() % kWarp, matrix = lane / 8;
    m.template LdMatrix<false>(Near(row, column, matrix / 2 * 8 + lane % 8, matrix % 2 * 8), r);
  }
  // Two second operands, of eight columns each, whose rows are these 16.
  template <class M>
  HEED_DEVICE void LoadTransposed(M& m, int row, int column, uint32_t (&r)[4]) const {
    const int lane = m.thread() % kWarp, matrix = lane / 8;
    m.template LdMatrix<true>(Near(row, column, matrix % 2 * 8 + lane % 8, matrix / 2 * 8), r);
  }

  // The same in pieces, of which elements of 16 bits are one; what does not fit pieces is NaN in one of them.
  template <class M, int kCount>
  HEED_DEVICE void LoadRows(M& m, int row, int column, uint32_t (&split)[kCount][4]) const {
    if constexpr (kIsWide) {
      SplitPairs<M>([&](int i) { return Near(row + i % 2 * 8, column + i / 2 * 8, Group(m), Pair(m)); }, split);
    } else {
      LoadRows(m, row, column, split[0]);
    }
  }
  template <class M, int kCount>
  HEED_DEVICE void LoadColumns(M& m, int row, int column, uint32_t (&split)[kCount][4]) const {
    if constexpr (kIsWide) {
      SplitPairs<M>([&](int i) { return Near(row + i / 2 * 8, column + i % 2 * 8, Group(m), Pair(m)); }, split);
    } else {
      LoadColumns(m, row, column, split[0]);
    }
  }
  template <class M, int kCount>
  HEED_DEVICE void LoadTransposed(M& m, int row, int column, uint32_t (&split)[kCount][4]) const {
    if constexpr (kIsWide) {
      HEED_DEVICE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const auto next = [&](int r) { return *Near(row + i % 2 * 8, column + i / 2 * 8, Pair(m) + r, Group(m)); };
        Split<M, DType::kBF16, /*kFinite=*/true>(next(0), next(1), i, split);
      }
    } else {
      LoadTransposed(m, row, column, split[0]);
    }
  }

  // Copies of 64 rows of a head, as far as they exist, by one thread, which has said how many bytes they are: kBytes.
  template <class M>
  HEED_DEVICE void TmaLoad(M& m, const TensorMap& map, int64_t token, int head, int batch, uint64_t* barrier) const {
    static_assert(!kIsWide && kRows == 64);
    HEED_DEVICE_UNROLL
    for (int column = 0; column < kColumns; column += kAtomColumns) {
      m.TmaLoad(map, column, static_cast<int>(token), head, batch, at_ + column / kAtomColumns * kAtomStride, barrier);
    }
  }

  // Operands of products of groups (machine.h), of rows from `row` on, a multiple of 8: they by 16 of their columns.
  HEED_DEVICE WgmmaOperand KMajor(int row, int column) const {
    return {at_ + row * kPitch + column / kAtomColumns * kAtomStride + column % kAtomColumns,
            kUnitBytes};  // of one panel
  }
  // Sixteen of them by all columns.
  HEED_DEVICE WgmmaOperand MnMajor(int row) const { return {at_ + row * kPitch, kAtomBytes}; }

  // Marks rows that have an element that is not finite, or does not fit pieces, [kRows]; true if there are any. All
  // threads of the block come here and meet; marks are made if there are any.
  template <DType kDType, class M>
  HEED_DEVICE bool FindNotFinite(M& m, char* marks) const {
    if constexpr (kIsWide) {  // asked of every tile, so that all look first
      bool found = false;
      for (int i = m.thread(); i < kRows * kUnits; i += m.num_threads()) {
        const Unit unit = reinterpret_cast<const Unit*>(at_)[i];
        for (const float x : unit.elements) found |= !FitsSplit(x);
      }
      if (!m.SyncOr(found)) return false;
    }
    bool found = false;
    for (int r = m.thread(); r < kRows; r += m.num_threads()) {
      bool mark = false;
      for (int column = 0; column < kColumns; ++column) mark |= !Fits<kDType>(*At(r, column));
      marks[r] = mark;
      found |= mark;
    }
    return m.SyncOr(found);
  }
  template <class M>
  HEED_DEVICE void ZeroRows(M& m, const char* marks) const {
    for (int i = m.thread(); i < kRows * kColumns; i += m.num_threads()) {
      if (marks[i / kColumns] != 0) *At(i / kColumns, i % kColumns) = 0;
    }
  }

 private:
  static constexpr int kAtomBytes = kAtomStride * static_cast<int>(sizeof(Element));

  struct alignas(kUnitBytes) Unit {
    Element elements[kUnit];
  };
  struct alignas(8) WordPair {
    float low, high;
  };

  static HEED_DEVICE int Swizzle(int row) {
    if constexpr (kIsWide) {
      return (row & 2) * 2 | ((row ^ row >> 2) & 1) * 2;
    } else {
      return row % 8;
    }
  }

  // At(row + r, column + c) of multiples of 8 and 16 and r and c below 16. What depends on the thread is added up
  // first, in the eight values that it has at most: constants behind it are part of instructions, and addresses take 8
  // registers and not one each.
  HEED_DEVICE Element* Near(int row, int column, int r, int c) const {
    constexpr int kPeriod = 8 * kUnit;
    Element* const own = at_ + r * kPitch + (column % kPeriod ^ (Swizzle(r) ^ c / kUnit) * kUnit) + c % kUnit;
    return own + (row * kPitch + column / kPeriod * kAtomStride);
  }
  // Of fragments (machine.h): g, and 2 t.
  template <class M>
  static HEED_DEVICE int Group(M& m) {
    return m.thread() % kWarp / 4;
  }
  template <class M>
  static HEED_DEVICE int Pair(M& m) {
    return m.thread() % 4 * 2;
  }
  template <class M, class Place, int kCount>
  static HEED_DEVICE void SplitPairs(const Place& place, uint32_t (&split)[kCount][4]) {
    HEED_DEVICE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const WordPair pair = *reinterpret_cast<const WordPair*>(place(i));
      Split<M, DType::kBF16, /*kFinite=*/true>(pair.low, pair.high, i, split);
    }
  }

  template <DType kDType>
  static HEED_DEVICE bool Fits(Element x) {
    if constexpr (kIsWide) {
      return FitsSplit(x);
    } else {
      constexpr uint16_t kExponent = kDType == DType::kBF16 ? 0x7F80 : 0x7C00;
      return (x & kExponent) != kExponent;
    }
  }

  Element* const at_;
};

}  // namespace heed::cuda

#endif  // HEED_CUDA_SHARED_TILE_H_
