// Patterns evaluated pair by pair, from the definitions in pattern.h.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <string_view>
#include <variant>
#include <vector>

#include "heed/core/philox.h"
#include "heed/patterns/pattern_internal.h"

namespace heed::patterns {
namespace {

struct Pair {
  const PatternCall& call;
  int64_t batch, head, row, p, j;
};

int64_t FloorOf(int64_t a, int64_t b) {
  int64_t quotient = a / b;
  while (quotient * b > a) --quotient;
  return quotient;
}

// An element of a table, whose missing leading axes are skipped.
int64_t ElementOf(const Table& table, const std::vector<int64_t>& index) {
  int64_t at = 0;
  for (size_t axis = 0; axis < index.size(); ++axis) at = at * table.shape[axis] + index[axis];
  return table.values[static_cast<size_t>(at)];
}

// The row of a table for a batch entry: the first one if the table has one for all.
int64_t EntryOf(const Table& table, const Pair& pair) { return table.shape[0] == 1 ? 0 : pair.batch; }

bool IsToken(const Table& tokens, const Pair& pair, int64_t at) {
  if (at < 0) return false;
  const int64_t n = tokens.shape.back(), first = tokens.rank() == 1 ? 0 : EntryOf(tokens, pair) * n;
  for (int64_t i = 0; i < n; ++i) {
    if (tokens.values[static_cast<size_t>(first + i)] == at) return true;
  }
  return false;
}

// The first `count` blocks after a shuffle.
std::set<int64_t> Drawn(std::vector<int64_t> blocks, int64_t count, uint64_t seed, int64_t row, int64_t head) {
  std::set<int64_t> drawn;
  for (size_t i = 0; i < blocks.size() && static_cast<int64_t>(i) < count; ++i) {
    const uint64_t word =
        Philox({static_cast<uint32_t>(i), static_cast<uint32_t>(row), static_cast<uint32_t>(head), 1u << 30},
               {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)})[0];
    std::swap(blocks[i], blocks[i + static_cast<size_t>((word * (blocks.size() - i)) >> 32)]);
    drawn.insert(blocks[i]);
  }
  return drawn;
}

bool RandomKeeps(const Pair& pair, int64_t count, int64_t block, int64_t seed, bool big_bird) {
  const int64_t all = (pair.call.Tk + block - 1) / block, row = FloorOf(pair.p, block), column = pair.j / block;
  std::vector<int64_t> others;
  for (int64_t k = 0; k < all; ++k) {
    const bool fixed = big_bird && (k == 0 || k == all - 1 || std::abs(k - row) <= 1);
    if (fixed && k == column) return true;
    if (!fixed) others.push_back(k);
  }
  if (big_bird && (row == 0 || row == all - 1 || all <= 5 + 2 * count)) return true;
  return Drawn(others, count, static_cast<uint64_t>(seed), row, pair.head).contains(column);
}

int64_t HeadOf(const Pair& pair, int64_t heads) {
  if (heads == 1) return 0;
  return heads == pair.call.query_heads ? pair.head : pair.head / (pair.call.query_heads / pair.call.key_heads);
}

bool BlocksKeep(const Pair& pair, const Table& keep, const Table& block) {
  const int64_t row = FloorOf(pair.p, block.values[0]), column = pair.j / block.values[1];
  const int64_t nq = keep.shape[keep.shape.size() - 2], nk = keep.shape.back();
  if (row < 0 || row >= nq || column >= nk) return false;
  std::vector<int64_t> index = {row, column};
  if (keep.rank() > 2) index.insert(index.begin(), HeadOf(pair, keep.shape[keep.shape.size() - 3]));
  if (keep.rank() > 3) index.insert(index.begin(), EntryOf(keep, pair));
  return ElementOf(keep, index) != 0;
}

bool CsrKeeps(const Pair& pair, const Table& row_ptr, const Table& columns, const Table& block) {
  const int64_t row = FloorOf(pair.p, block.values[0]), column = pair.j / block.values[1];
  if (row < 0 || row >= row_ptr.shape.back() - 1) return false;
  const auto boundary = [&](int64_t i) {
    return row_ptr.rank() == 1 ? ElementOf(row_ptr, {i}) : ElementOf(row_ptr, {HeadOf(pair, row_ptr.shape[0]), i});
  };
  for (int64_t k = boundary(row); k < boundary(row + 1); ++k) {
    if (ElementOf(columns, {k}) == column) return true;
  }
  return false;
}

bool ListsKeep(const Pair& pair, const Table& index, int64_t block) {
  int64_t list = EntryOf(index, pair) * index.shape[1] + pair.row;
  if (index.rank() == 4) list = list * index.shape[2] + HeadOf(pair, index.shape[2]);
  const int64_t count = index.shape.back();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t listed = index.values[static_cast<size_t>(list * count + i)];
    if (listed >= 0 && listed * block <= pair.j && pair.j < (listed + 1) * block) return true;
  }
  return false;
}

bool VerticalSlashKeeps(const Pair& pair, const Table& columns, const Table& slashes) {
  if (pair.j > pair.p) return false;
  const auto has = [&](const Table& table, int64_t number) {
    for (int64_t i = 0; i < table.shape[2]; ++i) {
      if (ElementOf(table, {EntryOf(table, pair), pair.head, i}) == number) return true;
    }
    return false;
  };
  return has(columns, pair.j) || has(slashes, pair.p - pair.j);
}

bool BlockMaskKeeps(const Pair& pair, const Node& node) {
  const auto table = [&](size_t i) -> const Table& { return std::get<Table>(node.values[i]); };
  const Table &row_ptr = table(0), &columns = table(1), &block = table(4);
  const int64_t b = row_ptr.shape[0] == 1 ? 0 : pair.batch, h = row_ptr.shape[1] == 1 ? 0 : pair.head;
  const int64_t i = pair.row / block.values[0], row = pair.row % block.values[0];
  for (int64_t at = ElementOf(row_ptr, {b, h, i}); at < ElementOf(row_ptr, {b, h, i + 1}); ++at) {
    if (ElementOf(columns, {at}) != pair.j / block.values[1]) continue;
    const int64_t part = ElementOf(table(2), {at}), key = pair.j % block.values[1];
    return part < 0 || (ElementOf(table(3), {part, row, key / 64}) >> (key % 64) & 1) != 0;
  }
  return false;
}

bool Keeps(const Node& node, const Pair& pair) {
  const std::string_view name = node.builder;
  const auto size = [&](size_t i) { return std::get<int64_t>(node.values[i]); };
  const auto table = [&](size_t i) -> const Table& { return std::get<Table>(node.values[i]); };
  const auto part = [&](size_t i) -> const Node& { return *std::get<std::vector<Pattern>>(node.values[0])[i].node(); };
  const int64_t p = pair.p, j = pair.j, Tk = pair.call.Tk;
  const auto within = [&](int64_t left, int64_t right) { return p - left <= j && j <= p + right; };
  const auto global = [&](const Table& tokens) { return IsToken(tokens, pair, p) || IsToken(tokens, pair, j); };
  if (name == "|") return Keeps(part(0), pair) || Keeps(part(1), pair);
  if (name == "&") return Keeps(part(0), pair) && Keeps(part(1), pair);
  if (name == "per_head") return Keeps(part(static_cast<size_t>(pair.head)), pair);
  if (name == "sliding_window") return within(size(0), size(1));
  if (name == "dilated") return (p - j) % size(1) == 0 && std::abs(p - j) / size(1) <= size(0);
  if (name == "atrous") return (p - j) % size(0) == 0;
  if (name == "strided") return within(size(0) - 1, 0) || (p - j) % size(0) == 0;
  if (name == "fixed") return FloorOf(p, size(0)) == j / size(0) || j % size(0) >= size(0) - size(1);
  if (name == "global_tokens") return global(table(0));
  if (name == "longformer") return within(size(0) / 2, size(0) / 2) || global(table(1));
  if (name == "random_blocks") return RandomKeeps(pair, size(0), size(1), size(2), false);
  if (name == "bigbird") return RandomKeeps(pair, size(1), size(0), size(2), true);
  if (name == "streaming") return j < size(0) || within(size(1) - 1, 0);
  if (name == "neighborhood") {
    int64_t begin = p - size(0) / 2;
    if (begin + size(0) > Tk) begin = Tk - size(0);
    if (begin < 0) begin = 0;
    return begin <= j && j < begin + size(0);
  }
  if (name == "blocks") return BlocksKeep(pair, table(0), table(1));
  if (name == "block_mask") return BlockMaskKeeps(pair, node);
  if (name == "csr") return CsrKeeps(pair, table(0), table(1), table(2));
  if (name == "vertical_slash") return VerticalSlashKeeps(pair, table(0), table(1));
  if (name == "row_blocks") return ListsKeep(pair, table(0), size(1));
  return ListsKeep(pair, table(0), 1);
}

}  // namespace

bool Keeps(const Pattern& pattern, const PatternCall& call, int64_t batch, int64_t head, int64_t row, int64_t key) {
  const int64_t position = call.starts[static_cast<size_t>(batch)] + row;
  return Keeps(*pattern.node(), {call, call.batch + batch, head, row, position, key});
}

}  // namespace heed::patterns
