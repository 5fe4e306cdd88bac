// Random patterns that fit a call.
#include "heed/patterns/pattern_case.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <vector>

#include "heed/patterns/pattern_block_mask.h"

namespace heed::patterns {
namespace {

ConstTensorView View(const std::vector<int64_t>& values, const std::vector<int64_t>& shape) {
  return {values.data(), DType::kI64, shape};
}
ConstTensorView View(const std::vector<uint8_t>& values, const std::vector<int64_t>& shape) {
  return {values.data(), DType::kBool, shape};
}

class Random {
 public:
  Random(const PatternCall& of, const std::function<int64_t(int64_t)>& below) : call_(of), below_(below) {}

  Pattern Any(int depth) {
    if (depth > 0 && Below(2) == 0) {
      const Pattern a = Any(depth - 1), b = Any(depth - 1);
      return Below(2) == 0 ? a | b : a & b;
    }
    switch (Below(depth > 0 ? 17 : 16)) {
      case 0: return SlidingWindow(Size(), Size());
      case 1: return Dilated(Size(), 1 + Size());
      case 2: return Atrous(1 + Size());
      case 3: return Strided(1 + Size());
      case 4: {
        const int64_t block = 1 + Size();
        return Fixed(block, Below(block + 1));
      }
      case 5: return GlobalTokens(Tokens());
      case 6: return Longformer(Size(), Tokens());
      case 7: return RandomBlocks(1 + Below(3), 1 + Size(), Seed());
      case 8: return BigBird(1 + Size(), Below(3), Seed());
      case 9: return Streaming(Below(80), 1 + Size());
      case 10: return Neighborhood(1 + Size());
      case 11: return AnyBlocks();
      case 12: return AnyCsr();
      case 13: return call_.Tq < 0 ? Atrous(2) : AnyKeys();
      case 14: return call_.Tq < 0 ? Atrous(2) : AnyBlockMask();
      case 15: return call_.Tq < 0 ? Atrous(2) : AnyRowBlocks();
      default: {
        std::vector<Pattern> heads;
        for (int64_t h = 0; h < call_.query_heads; ++h) heads.push_back(Any(depth - 1));
        return PerHead(heads);
      }
    }
  }

 private:
  int64_t Below(int64_t n) { return below_(n); }
  uint64_t Seed() { return static_cast<uint64_t>(Below(int64_t{1} << 32)) << 31; }
  int64_t Size() { return Below(3) == 0 ? Below(4) : Below(5) == 0 ? 64 * Below(4) : Below(200); }
  int64_t AnyBatches() { return Below(3) == 0 ? 1 : call_.batches; }
  int64_t AnyHeads() { return Below(3) == 0 ? 1 : Below(2) == 0 ? call_.key_heads : call_.query_heads; }

  ConstTensorView Tokens() {
    const int64_t n = Below(4);
    const bool by_batch = Below(2) == 0;
    const int64_t batches = by_batch ? AnyBatches() : 1;
    ints_.assign(static_cast<size_t>(n * batches), 0);
    for (int64_t& x : ints_) x = Below(4) == 0 ? -1 : Below(350);
    return View(ints_, by_batch ? std::vector<int64_t>{batches, n} : std::vector<int64_t>{n});
  }
  Pattern AnyBlocks() {
    const int64_t rows = 1 + Size(), columns = 1 + Size(), nq = Below(8), nk = Below(8);
    std::vector<int64_t> shape = {nq, nk};
    if (Below(2) == 0) {
      shape.insert(shape.begin(), AnyHeads());
      if (Below(2) == 0) shape.insert(shape.begin(), AnyBatches());
    }
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    bools_.assign(static_cast<size_t>(count), 0);
    for (uint8_t& x : bools_) x = Below(3) == 0;
    return Blocks(View(bools_, shape), rows, columns);
  }
  Pattern AnyCsr() {
    const int64_t heads = AnyHeads(), nq = Below(8), nk = 1 + Below(8);
    ints_.clear();
    std::vector<int64_t> columns;
    for (int64_t h = 0; h < heads; ++h) {
      ints_.push_back(static_cast<int64_t>(columns.size()));
      for (int64_t i = 0; i < nq; ++i) {
        for (int64_t k = 0; k < nk; ++k) {
          if (Below(3) == 0) columns.push_back(k);
        }
        ints_.push_back(static_cast<int64_t>(columns.size()));
      }
    }
    const int64_t n = static_cast<int64_t>(columns.size());
    return Csr(View(ints_, {heads, nq + 1}), View(columns, {n}), 1 + Size(), 1 + Size());
  }
  // Distinct numbers below `most` for each row; 0 heads: no such axis.
  ConstTensorView Lists(int64_t heads, int64_t n, int64_t most) {
    const int64_t batches = AnyBatches();
    std::vector<int64_t> shape = {batches, call_.Tq, n};
    if (heads > 0) shape.insert(shape.begin() + 2, heads);
    ints_.clear();
    for (int64_t row = 0; row < batches * call_.Tq * std::max<int64_t>(heads, 1); ++row) {
      std::set<int64_t> own;
      while (static_cast<int64_t>(own.size()) < n) own.insert(Below(most + 1) - 1);
      ints_.insert(ints_.end(), own.rbegin(), own.rend());
    }
    return View(ints_, shape);
  }
  Pattern AnyKeys() {
    const int64_t n = Below(5);
    return Keys(Lists(Below(2) == 0 ? 0 : call_.key_heads, n, 330));
  }
  Pattern AnyRowBlocks() {
    const int64_t n = Below(5), block = Below(2) == 0 ? 64 : 1 + Below(150);
    const int64_t heads = Below(2) == 0 ? 0 : AnyHeads();
    return RowBlocks(Lists(heads, n, 4 + 300 / block), block);
  }
  Pattern AnyBlockMask() {
    const int64_t rows = 1 + Size(), keys = 1 + Size(), words = (keys + 63) / 64;
    const int64_t nq = (call_.Tq + rows - 1) / rows, nk = (call_.Tk + keys - 1) / keys;
    const int64_t batches = Below(2) == 0 ? 1 : call_.batches, heads = Below(2) == 0 ? 1 : call_.query_heads;
    ints_.clear();
    std::vector<int64_t> columns, parts, bits;
    int64_t m = 0;
    for (int64_t list = 0; list < batches * heads; ++list) {
      ints_.push_back(static_cast<int64_t>(columns.size()));
      for (int64_t i = 0; i < nq; ++i) {
        for (int64_t k = 0; k < nk; ++k) {
          if (Below(3) != 0) continue;
          columns.push_back(k);
          parts.push_back(Below(2) == 0 ? -1 : m++);
        }
        ints_.push_back(static_cast<int64_t>(columns.size()));
      }
    }
    // Bits after a block's last key have no meaning.
    for (int64_t i = 0; i < m * rows * words; ++i) bits.push_back(static_cast<int64_t>(Seed() ^ Seed() << 32));
    const int64_t n = static_cast<int64_t>(columns.size());
    return BlockMask({View(ints_, {batches, heads, nq + 1}), View(columns, {n}), View(parts, {n}),
                      View(bits, {m, rows, words}), rows, keys, call_.Tq, call_.Tk});
  }

  const PatternCall& call_;
  const std::function<int64_t(int64_t)>& below_;
  std::vector<int64_t> ints_;
  std::vector<uint8_t> bools_;
};

}  // namespace

Pattern RandomPattern(const PatternCall& call, int depth, const std::function<int64_t(int64_t)>& below) {
  return Random(call, below).Any(depth);
}

}  // namespace heed::patterns
