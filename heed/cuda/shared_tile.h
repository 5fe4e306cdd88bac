// Tiles in shared memory that tensor core products read: of 16-bit elements, or of f32, which are split into bf16 on
// load.
//
// The swizzle permutes 16-byte units: unit i of row r is at index i ^ Swizzle(r). It spreads what a warp reads at once
// over all banks: for 16 bits, units of the same columns of eight rows (ldmatrix); for f32, eight columns of rows 0 to
// 3 or 4 to 7, two words per thread, or of every other one of eight rows, one word per thread.
//
// Tiles of 16 bits consist of swizzle atoms of 64 columns (128 bytes) by all rows, one after the other. From an address
// that is a multiple of 1024 bytes on, this is the 128-byte swizzle of WGMMA and TMA.
#ifndef HEED_CUDA_SHARED_TILE_H_
#define HEED_CUDA_SHARED_TILE_H_

#include <cstdint>
#include <type_traits>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"
#include "heed/cuda/bf16_split.h"

namespace heed::cuda {

inline constexpr int kUnitBytes = 16;
inline constexpr int kAtomColumns = 64;  // 16-bit elements

template <int kRows, int kColumns, class Element = uint16_t>
class SharedTile {
  static_assert(kColumns % kAtomColumns == 0);
  static constexpr bool kIsWide = std::is_same_v<Element, float>;
  static constexpr int kUnit = kUnitBytes / sizeof(Element), kUnits = kColumns / kUnit;
  static constexpr int kPitch = kIsWide ? kColumns : kAtomColumns;                // elements between rows
  static constexpr int kAtomStride = kIsWide ? 8 * kUnit : kRows * kAtomColumns;  // elements from one atom to the next

 public:
  static constexpr int kBytes = kRows * kColumns * static_cast<int>(sizeof(Element));

  HEED_DEVICE explicit SharedTile(char* at) : at_(reinterpret_cast<Element*>(at)) {}

  HEED_DEVICE Element* At(int row, int column) const {
    const int unit = column / kUnit;
    return at_ + row * kPitch + unit / 8 * kAtomStride + (unit % 8 ^ Swizzle(row)) * kUnit + column % kUnit;
  }

  // Begins to copy rows row(i), for i < `rows`, of `columns` <= kColumns elements, and fills the rest with zeros.
  // `aligned` says that rows begin at multiples of 16 bytes.
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

  // Copies rows that are `stride` elements apart, with kThreads threads. If kThreads is a multiple of the units of a
  // row, each thread keeps its column and its addresses differ by constants, so that a copy takes few instructions;
  // some f32 tiles compute each address.
  template <int kThreads, class M>
  HEED_DEVICE void CopyRows(M& m, bool aligned, int columns, int rows, const Element* first, int64_t stride) const {
    constexpr int kStep = kThreads / kUnits;  // rows that all threads copy at once
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
          m.CopyAsync(place, from, i * kStep < left);  // cp.async does not read `from` past the last row
          from += kStep * stride;
        }
        return;
      }
    }
    Copy(m, aligned, columns, rows, [&](int row) { return first + row * stride; });
  }

  // Stores rows to row(i), the inverse of Copy(), after a barrier. Rows with a null row(i) are left out.
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
  // Puts two 16-bit elements, from an even column on.
  HEED_DEVICE void PutPair(int row, int column, uint32_t pair) const {
    *reinterpret_cast<uint32_t*>(At(row, column)) = pair;
  }

  // Loads 16 rows by 16 columns as a first operand.
  template <class M>
  HEED_DEVICE void LoadRows(M& m, int row, int column, uint32_t (&r)[4]) const {
    const int lane = m.thread() % kWarp, matrix = lane / 8;
    m.template LdMatrix<false>(Near(row, column, matrix % 2 * 8 + lane % 8, matrix / 2 * 8), r);
  }
  // Loads 16 rows by 16 columns as two second operands of eight rows each, whose columns these rows are.
  template <class M>
  HEED_DEVICE void LoadColumns(M& m, int row, int column, uint32_t (&r)[4]) const {
    const int lane = m.thread() % kWarp, matrix = lane / 8;
    m.template LdMatrix<false>(Near(row, column, matrix / 2 * 8 + lane % 8, matrix % 2 * 8), r);
  }
  // Loads 16 rows by 16 columns as two second operands of eight columns each.
  template <class M>
  HEED_DEVICE void LoadTransposed(M& m, int row, int column, uint32_t (&r)[4]) const {
    const int lane = m.thread() % kWarp, matrix = lane / 8;
    m.template LdMatrix<true>(Near(row, column, matrix % 2 * 8 + lane % 8, matrix / 2 * 8), r);
  }

  // The functions below load bf16 splits; 16-bit elements have one term. An element that does not fit a split gives NaN
  // in one of the terms.
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

  // Loads up to 64 rows of a head by TMA. One thread calls this, after it has announced kBytes to the mbarrier.
  template <class M>
  HEED_DEVICE void TmaLoad(M& m, const TensorMap& map, int64_t token, int head, int batch, uint64_t* barrier) const {
    static_assert(!kIsWide && kRows == 64);
    HEED_DEVICE_UNROLL
    for (int column = 0; column < kColumns; column += kAtomColumns) {
      m.TmaLoad(map, column, static_cast<int>(token), head, batch, at_ + column / kAtomColumns * kAtomStride, barrier);
    }
  }

  // A K-major WGMMA operand: rows from `row` on, a multiple of 8, by 16 of their columns.
  HEED_DEVICE WgmmaOperand KMajor(int row, int column) const {
    return {at_ + row * kPitch + column / kAtomColumns * kAtomStride + column % kAtomColumns,
            kUnitBytes};  // within one atom
  }
  // An MN-major WGMMA operand: 16 rows by all columns.
  HEED_DEVICE WgmmaOperand MnMajor(int row) const { return {at_ + row * kPitch, kAtomBytes}; }

  // Sets marks[r], of kRows, for rows with an element that is not finite or does not fit a split, and returns whether
  // there is any. If not, marks may be unset. Called by all threads of the block; has barriers.
  template <DType kDType, class M>
  HEED_DEVICE bool FindNotFinite(M& m, char* marks) const {
    if constexpr (kIsWide) {  // called for every tile, so a cheap test comes first
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

  // At(row + r, column + c), for multiples of 8 and 16 plus r and c below 16. Terms that depend on the thread are added
  // first; they take at most eight values, so that constants become part of instructions and addresses take 8 registers
  // instead of one each.
  HEED_DEVICE Element* Near(int row, int column, int r, int c) const {
    constexpr int kPeriod = 8 * kUnit;
    Element* const own = at_ + r * kPitch + (column % kPeriod ^ (Swizzle(r) ^ c / kUnit) * kUnit) + c % kUnit;
    return own + (row * kPitch + column / kPeriod * kAtomStride);
  }
  // g and 2 t of fragments (machine.h).
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
