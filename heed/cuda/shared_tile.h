// Rows of 16-bit elements in a block's shared memory, as products of matrices read them.
//
// Sixteen bytes of a row, eight elements, are a piece. Eight rows' pieces of the same columns are what a warp reads at once,
// so that piece i of row r stands at i xor r % 8, which puts them into different banks.
#ifndef HEED_CUDA_SHARED_TILE_H_
#define HEED_CUDA_SHARED_TILE_H_

#include <cstdint>

#include "heed/core/dtype.h"
#include "heed/cuda/machine.h"

namespace heed::cuda {

inline constexpr int kPiece = 8;  // elements

template <int kRows, int kColumns>
class SharedTile {
  static_assert(kColumns % 64 == 0);
  static constexpr int kPieces = kColumns / kPiece;

 public:
  static constexpr int kBytes = kRows * kColumns * 2;

  HEED_DEVICE explicit SharedTile(char* at) : at_(reinterpret_cast<uint16_t*>(at)) {}

  HEED_DEVICE uint16_t* At(int row, int column) const {
    const int piece = column / kPiece;
    return at_ + (row * kPieces + (piece ^ row % 8)) * kPiece + column % kPiece;
  }

  // Begins to copy rows row(i) of `columns` elements, i below `rows`, `columns` being at most kColumns; what they do not
  // fill is 0. `aligned`: they begin at multiples of 16 bytes.
  template <class M, class Row>
  HEED_DEVICE void Copy(M& m, bool aligned, int columns, int rows, const Row& row) const {
    for (int i = m.thread(); i < kRows * kPieces; i += m.num_threads()) {
      const int r = i / kPieces, column = i % kPieces * kPiece;
      const int count = r >= rows || column >= columns ? 0 : columns - column < kPiece ? columns - column : kPiece;
      uint16_t* to = At(r, column);
      if (aligned) {
        const uint16_t* from = row(count == 0 ? 0 : r);
        m.CopyAsync(to, count == 0 ? from : from + column, 2 * count);
        continue;
      }
      const uint16_t* from = count == 0 ? nullptr : row(r) + column;
      for (int e = 0; e < kPiece; ++e) to[e] = e < count ? from[e] : uint16_t{0};
    }
  }

  // Stores rows as Copy() brings them, once all threads have met; none where row(i) is null.
  template <class M, class Row>
  HEED_DEVICE void Store(M& m, bool aligned, int columns, int rows, const Row& row) const {
    for (int i = m.thread(); i < rows * kPieces; i += m.num_threads()) {
      const int r = i / kPieces, column = i % kPieces * kPiece;
      if (column >= columns) continue;
      uint16_t* const begin = row(r);
      if (begin == nullptr) continue;
      const uint16_t* from = At(r, column);
      uint16_t* to = begin + column;
      if (aligned && column + kPiece <= columns) {
        *reinterpret_cast<Piece*>(to) = *reinterpret_cast<const Piece*>(from);
        continue;
      }
      for (int e = 0; e < kPiece && column + e < columns; ++e) to[e] = from[e];
    }
  }
  HEED_DEVICE void Put(int row, int column, uint16_t element) const { *At(row, column) = element; }
  // Two, from an even column on.
  HEED_DEVICE void PutPair(int row, int column, uint32_t pair) const { *reinterpret_cast<uint32_t*>(At(row, column)) = pair; }

  // 16 rows from `row` on, of 16 columns: the first operand of a product.
  template <class M>
  HEED_DEVICE void LoadRows(M& m, int row, int column, uint32_t (&r)[4]) const {
    const int lane = m.thread() % kWarp, matrix = lane / 8;
    m.template LoadMatrices<false>(At(row + matrix % 2 * 8 + lane % 8, column + matrix / 2 * 8), r);
  }
  // The same rows as columns: two second operands, of eight rows each.
  template <class M>
  HEED_DEVICE void LoadColumns(M& m, int row, int column, uint32_t (&r)[4]) const {
    const int lane = m.thread() % kWarp, matrix = lane / 8;
    m.template LoadMatrices<false>(At(row + matrix / 2 * 8 + lane % 8, column + matrix % 2 * 8), r);
  }
  // Two second operands, of eight columns each, whose rows are these 16.
  template <class M>
  HEED_DEVICE void LoadTransposed(M& m, int row, int column, uint32_t (&r)[4]) const {
    const int lane = m.thread() % kWarp, matrix = lane / 8;
    m.template LoadMatrices<true>(At(row + matrix % 2 * 8 + lane % 8, column + matrix / 2 * 8), r);
  }

  // Marks rows that have an element that is not finite, [kRows], once all threads have met; true if this thread found one.
  template <DType kDType, class M>
  HEED_DEVICE bool FindNotFinite(M& m, char* marks) const {
    constexpr uint16_t kExponent = kDType == DType::kBF16 ? 0x7F80 : 0x7C00;
    bool found = false;
    for (int r = m.thread(); r < kRows; r += m.num_threads()) {
      bool mark = false;
      for (int column = 0; column < kColumns; ++column) mark |= (*At(r, column) & kExponent) == kExponent;
      marks[r] = mark;
      found |= mark;
    }
    return found;
  }
  template <class M>
  HEED_DEVICE void ZeroRows(M& m, const char* marks) const {
    for (int i = m.thread(); i < kRows * kColumns; i += m.num_threads()) {
      if (marks[i / kColumns] != 0) *At(i / kColumns, i % kColumns) = 0;
    }
  }

 private:
  struct alignas(16) Piece {
    uint16_t elements[kPiece];
  };

  uint16_t* const at_;
};

}  // namespace heed::cuda

#endif  // HEED_CUDA_SHARED_TILE_H_
