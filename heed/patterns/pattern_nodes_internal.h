// The nodes of patterns, each of which describes the pairs it keeps, tile by tile.
#ifndef HEED_PATTERNS_PATTERN_NODES_INTERNAL_H_
#define HEED_PATTERNS_PATTERN_NODES_INTERNAL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/core/philox.h"
#include "heed/patterns/pattern_internal.h"

namespace heed::patterns {

inline constexpr uint64_t kAllKeys = ~uint64_t{0};

using NodePtr = std::shared_ptr<Node>;

inline int64_t FloorDivide(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0); }
inline int64_t Modulo(int64_t a, int64_t b) { return a - FloorDivide(a, b) * b; }

// A table with one batch entry applies to all entries of a call. Throws InvalidArgument of `op`; `what` describes the
// entries in its message.
inline void CheckBatches(const char* op, const char* what, int64_t batches, const PatternCall& call) {
  if (batches == 1 || batches == call.batches) return;
  throw InvalidArgument(std::string(op) + ": pattern has " + what + " of " + std::to_string(batches) +
                        " batch entries, expected 1" +
                        (call.batches == 1 ? "" : " or " + std::to_string(call.batches)));
}

// Bits of keys [first, end) of the tile that begins at key `begin`.
inline uint64_t Bits(int64_t first, int64_t end, int64_t begin) {
  const int64_t low = std::clamp<int64_t>(first - begin, 0, kTile);
  const int64_t high = std::clamp<int64_t>(end - begin, 0, kTile);
  return low >= high ? 0 : (kAllKeys >> (kTile - (high - low))) << low;
}

struct Run {
  int64_t begin, end;
};

// Keys run(p, Tk) of position p, an interval whose ends do not decrease with p.
template <class F>
class RunNode : public Node {
 public:
  explicit RunNode(F run) : run_(run) {}

  void Tiles(const Place& place, const RowRange& rows, TileSet& tiles) const override {
    tiles.AddKeys(run_(rows.position, place.Tk).begin, run_(rows.last(), place.Tk).end);
  }
  Share ShareOf(const Place& place, const RowRange& rows, int64_t begin, int64_t end) const override {
    const Run first = run_(rows.position, place.Tk), last = run_(rows.last(), place.Tk);
    if (last.begin <= begin && end <= first.end) return Share::kAll;
    return first.begin < end && begin < last.end ? Share::kSome : Share::kNone;
  }
  void Words(const Place& place, const RowRange& rows, int64_t begin, uint64_t* words) const override {
    for (int64_t i = 0; i < rows.count; ++i) {
      const Run run = run_(rows.position + i, place.Tk);
      words[i] = Bits(run.begin, run.end, begin);
    }
  }

 private:
  F run_;
};
template <class F>
NodePtr MakeRun(F run) {
  return std::make_shared<RunNode<F>>(run);
}

inline NodePtr Window(int64_t left, int64_t right) {
  return MakeRun([=](int64_t p, int64_t) { return Run{p - left, p + right + 1}; });
}

// j = p + step c, |j - p| <= reach.
class StepsNode : public Node {
 public:
  StepsNode(int64_t step, int64_t reach) : step_(step), reach_(reach) {
    for (int64_t bit = 0; bit < kTile; bit += step) comb_ |= uint64_t{1} << bit;
  }

  void Tiles(const Place& place, const RowRange& rows, TileSet& tiles) const override {
    const int64_t begin = std::max<int64_t>(rows.position - reach_, 0);
    const int64_t end = std::min(rows.last() + reach_ + 1, place.Tk);
    if (step_ < 2 * kTile) return tiles.AddKeys(begin, end);
    // Begins with the first shifted copy of these rows that reaches a key.
    const int64_t copy = FloorDivide(begin - rows.last() + step_ - 1, step_);
    for (int64_t at = rows.position + copy * step_; at < end; at += step_) {
      tiles.AddKeys(std::max(at, begin), std::min(at + rows.count, end));
    }
  }
  void Words(const Place&, const RowRange& rows, int64_t begin, uint64_t* words) const override {
    for (int64_t i = 0; i < rows.count; ++i) {
      const int64_t position = rows.position + i, phase = Modulo(position - begin, step_);
      words[i] = phase >= kTile ? 0 : (comb_ << phase) & Bits(position - reach_, position + reach_ + 1, begin);
    }
  }

 private:
  int64_t step_, reach_;
  uint64_t comb_ = 0;
};

// j mod block >= block - summary.
class SummariesNode : public Node {
 public:
  SummariesNode(int64_t block, int64_t summary) : block_(block), summary_(summary) {}

  void Tiles(const Place& place, const RowRange&, TileSet& tiles) const override {
    if (summary_ == 0) return;
    if (block_ <= kTile) return tiles.AddAll();
    for (int64_t end = block_; end - summary_ < place.Tk; end += block_) {
      tiles.AddKeys(end - summary_, end);
    }
  }
  void Words(const Place&, const RowRange& rows, int64_t begin, uint64_t* words) const override {
    uint64_t bits = 0;
    for (int64_t end = (begin / block_ + 1) * block_; end - summary_ < begin + kTile; end += block_) {
      bits |= Bits(end - summary_, end, begin);
    }
    std::fill_n(words, rows.count, bits);
  }

 private:
  int64_t block_, summary_;
};

class GlobalNode : public Node {
 public:
  explicit GlobalNode(const Table& tokens) : tokens_(AscendingTokens(tokens)) {}

  void Check(const char* op, const PatternCall& call) const override {
    CheckBatches(op, "global tokens", std::ssize(tokens_), call);
  }
  bool by_batch() const override { return tokens_.size() != 1; }

  void Tiles(const Place& place, const RowRange& rows, TileSet& tiles) const override {
    if (!Within(place, rows.position, rows.last() + 1).empty()) return tiles.AddAll();
    for (const int64_t token : Of(place)) tiles.AddKeys(token, token + 1);
  }
  void Words(const Place& place, const RowRange& rows, int64_t begin, uint64_t* words) const override {
    uint64_t columns = 0;
    for (const int64_t token : Within(place, begin, begin + kTile)) {
      columns |= uint64_t{1} << (token - begin);
    }
    std::fill_n(words, rows.count, columns);
    for (const int64_t token : Within(place, rows.position, rows.last() + 1)) {
      words[token - rows.position] = kAllKeys;
    }
  }

 protected:
  std::span<const int64_t> Within(const Place& place, int64_t begin, int64_t end) const {
    const std::vector<int64_t>& own = Of(place);
    return {std::ranges::lower_bound(own, begin), std::ranges::lower_bound(own, end)};
  }

 private:
  const std::vector<int64_t>& Of(const Place& place) const {
    return tokens_[static_cast<size_t>(by_batch() ? place.batch : 0)];
  }
  std::vector<std::vector<int64_t>> tokens_;
};

// Keeps all keys of the rows that are not global tokens.
class OtherRowsNode : public GlobalNode {
 public:
  using GlobalNode::GlobalNode;

  void Tiles(const Place& place, const RowRange& rows, TileSet& tiles) const override {
    if (NumTokens(place, rows) < rows.count) tiles.AddAll();
  }
  Share ShareOf(const Place& place, const RowRange& rows, int64_t, int64_t) const override {
    const int64_t tokens = NumTokens(place, rows);
    return tokens == 0 ? Share::kAll : tokens == rows.count ? Share::kNone : Share::kSome;
  }
  void Words(const Place& place, const RowRange& rows, int64_t, uint64_t* words) const override {
    std::fill_n(words, rows.count, kAllKeys);
    for (const int64_t token : Within(place, rows.position, rows.last() + 1)) words[token - rows.position] = 0;
  }

 private:
  int64_t NumTokens(const Place& place, const RowRange& rows) const {
    return std::ssize(Within(place, rows.position, rows.last() + 1));
  }
};

// Blocks of keys by blocks of rows.
class BlocksNode : public Node {
 public:
  using Columns = std::vector<int64_t>;  // ascending

  BlocksNode(int64_t rows, int64_t columns) : rows_(rows), columns_(columns) {}

  void Tiles(const Place& place, const RowRange& rows, TileSet& tiles) const override {
    ForBlocks(place, rows, [&](int64_t, int64_t, const auto& blocks) {
      for (const int64_t block : blocks) tiles.AddKeys(block * columns_, (block + 1) * columns_);
    });
  }
  Share ShareOf(const Place& place, const RowRange& rows, int64_t begin, int64_t end) const override {
    if (columns_ < kTile) return Share::kSome;
    bool some = false, all = true;
    ForBlocks(place, rows, [&](int64_t, int64_t, const auto& blocks) {
      const uint64_t kept = BitsOf(blocks, begin), wanted = Bits(begin, end, begin);
      some = some || (kept & wanted) != 0;
      all = all && (kept & wanted) == wanted;
    });
    return !some ? Share::kNone : all ? Share::kAll : Share::kSome;
  }
  void Words(const Place& place, const RowRange& rows, int64_t begin, uint64_t* words) const override {
    ForBlocks(place, rows, [&](int64_t first, int64_t end, const auto& blocks) {
      std::fill(words + first, words + end, BitsOf(blocks, begin));
    });
  }

 protected:
  // The blocks of keys that a block of rows keeps, for any block number; valid until the next call.
  virtual std::span<const int64_t> Of(const Place& place, int64_t block) const = 0;
  int64_t columns() const { return columns_; }

 private:
  // Calls f(first, end, blocks) for runs [first, end) of these rows and the blocks of keys that they keep.
  template <class F>
  void ForBlocks(const Place& place, const RowRange& rows, const F& f) const {
    for (int64_t first = 0; first < rows.count;) {
      const int64_t block = FloorDivide(rows.position + first, rows_);
      const int64_t end = std::min((block + 1) * rows_ - rows.position, rows.count);
      f(first, end, Of(place, block));
      first = end;
    }
  }
  uint64_t BitsOf(std::span<const int64_t> blocks, int64_t begin) const {
    uint64_t bits = 0;
    for (auto at = std::ranges::lower_bound(blocks, begin / columns_);
         at != blocks.end() && *at * columns_ < begin + kTile; ++at) {
      bits |= Bits(*at * columns_, (*at + 1) * columns_, begin);
    }
    return bits;
  }

  int64_t rows_, columns_;
};

// Blocks of keys that a table lists.
class TableNode : public BlocksNode {
 public:
  TableNode(int64_t rows, int64_t columns, int64_t batches, int64_t heads, int64_t blocks)
      : BlocksNode(rows, columns), batches_(batches), heads_(heads), blocks_(blocks) {}

  void Check(const char* op, const PatternCall& call) const override {
    CheckBatches(op, "blocks", batches_, call);
    if (heads_ != 1 && heads_ != call.key_heads && heads_ != call.query_heads) {
      throw InvalidArgument(std::string(op) + ": pattern has blocks of " + std::to_string(heads_) +
                            " heads, expected 1, " + std::to_string(call.key_heads) + " or " +
                            std::to_string(call.query_heads));
    }
  }
  bool by_head() const override { return heads_ != 1; }
  bool by_batch() const override { return batches_ != 1; }

  // Begins the next list; lists are in the order of batch entries, heads and blocks of rows.
  void Begin() { begins_.push_back(static_cast<int64_t>(lists_.size())); }
  void Add(int64_t column) { lists_.push_back(column); }

 protected:
  std::span<const int64_t> Of(const Place& place, int64_t block) const override {
    if (block < 0 || block >= blocks_) return {};
    const int64_t head = heads_ == 1                   ? 0
                         : heads_ == place.query_heads ? place.head
                                                       : place.head / (place.query_heads / heads_);
    const int64_t list = ((by_batch() ? place.batch : 0) * heads_ + head) * blocks_ + block;
    const auto at = static_cast<size_t>(list);
    const int64_t end = at + 1 < begins_.size() ? begins_[at + 1] : static_cast<int64_t>(lists_.size());
    return std::span(lists_).subspan(static_cast<size_t>(begins_[at]), static_cast<size_t>(end - begins_[at]));
  }

 private:
  int64_t batches_, heads_, blocks_;
  std::vector<int64_t> begins_, lists_;
};

// Random blocks, and with them BigBird's fixed ones.
class RandomNode : public BlocksNode {
 public:
  RandomNode(int64_t count, int64_t block, int64_t seed, bool big_bird)
      : BlocksNode(block, block), count_(count), seed_(static_cast<uint64_t>(seed)), big_bird_(big_bird) {}
  bool by_head() const override { return true; }

 protected:
  std::span<const int64_t> Of(const Place& place, int64_t block) const override {
    Drawn& drawn = *place.drawn;
    if (drawn.node != this || drawn.head != place.head || drawn.block != block) {
      Choose(place, block, drawn.blocks);
      drawn.node = this;
      drawn.head = place.head;
      drawn.block = block;
    }
    return drawn.blocks;
  }

 private:
  void Choose(const Place& place, int64_t block, Columns& own) const {
    const int64_t all = (place.Tk + columns() - 1) / columns();
    own.clear();
    if (big_bird_) {
      if (block == 0 || block == all - 1 || all - 5 <= 2 * count_) {
        for (int64_t i = 0; i < all; ++i) own.push_back(i);
        return;
      }
      for (const int64_t fixed : {int64_t{0}, block - 1, block, block + 1, all - 1}) {
        if (fixed >= 0 && fixed < all) own.push_back(fixed);
      }
      std::ranges::sort(own);
      const auto [first, last] = std::ranges::unique(own);
      own.erase(first, last);
    }
    Draw(place.head, block, all, own);
  }

  // Draws the first `count` of a shuffle of all blocks that are not yet in `own`.
  void Draw(int64_t head, int64_t block, int64_t all, Columns& own) const {
    const Columns fixed = own;
    const int64_t left = all - static_cast<int64_t>(fixed.size());
    std::vector<std::pair<int64_t, int64_t>> moved;  // shuffled entries that differ from their index
    const auto at = [&](int64_t place) {
      const auto found = std::ranges::find(moved, place, &std::pair<int64_t, int64_t>::first);
      return found == moved.end() ? place : found->second;
    };
    for (int64_t i = 0; i < std::min(count_, left); ++i) {
      const auto words = Philox(
          {static_cast<uint32_t>(i), static_cast<uint32_t>(block), static_cast<uint32_t>(head), uint32_t{1} << 30},
          {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)});
      const uint64_t range = static_cast<uint64_t>(left - i);
      const int64_t place = i + static_cast<int64_t>((words[0] * range) >> 32);
      int64_t drawn = at(place);
      moved.insert(moved.begin(), {place, at(i)});
      for (const int64_t taken : fixed) drawn += drawn >= taken;
      own.push_back(drawn);
    }
    std::ranges::sort(own);
  }

  int64_t count_;
  uint64_t seed_;
  bool big_bird_;
};

// Lists of blocks of keys per row of the call; blocks of one key are keys.
class RowBlocksNode : public Node {
 public:
  // `ascends`: each row ascends, so the table among the node's values is used without a copy.
  RowBlocksNode(const Table& index, int64_t block, bool ascends)
      : batches_(index.size(0)), rows_(index.size(1)), heads_(index.rank() == 4 ? index.size(2) : 0),
        count_(index.size(-1)), block_(block) {
    if (ascends) return;
    sorted_ = index.values;
    for (auto at = sorted_.begin(); at != sorted_.end(); at += count_) std::sort(at, at + count_);
  }

  void Check(const char* op, const PatternCall& call) const override {
    const bool heads_fit =
        heads_ == 0 || heads_ == call.key_heads || (builder != "keys" && (heads_ == 1 || heads_ == call.query_heads));
    if ((batches_ == 1 || batches_ == call.batches) && rows_ == call.Tq && heads_fit) return;
    const auto shape = [](int64_t b, int64_t t, int64_t h) {
      std::string sizes = std::to_string(b) + "," + std::to_string(t);
      if (h > 0) sizes += "," + std::to_string(h);
      return "[" + sizes + ",n]";
    };
    std::string expected = shape(call.batches, call.Tq, 0);
    if (builder != "keys" && call.query_heads != call.key_heads) {
      expected += ", " + shape(call.batches, call.Tq, call.query_heads);
    }
    throw InvalidArgument(std::string(op) + ": pattern has " + (builder == "keys" ? "keys" : "row blocks") +
                          " of shape " + shape(batches_, rows_, heads_) + ", expected " + expected + " or " +
                          shape(call.batches, call.Tq, call.key_heads));
  }
  bool by_head() const override { return heads_ > 1; }
  bool by_batch() const override { return batches_ != 1; }
  int64_t listed_block() const override { return block_; }
  int64_t listed_heads() const override { return std::max<int64_t>(heads_, 1); }

  void Tiles(const Place& place, const RowRange& rows, TileSet& tiles) const override {
    for (int64_t i = 0; i < rows.count; ++i) {
      for (const int64_t block : Listed(place, rows.row + i, 0, place.Tk))
        tiles.AddKeys(block * block_, (block + 1) * block_);
    }
  }
  void Words(const Place& place, const RowRange& rows, int64_t begin, uint64_t* words) const override {
    for (int64_t i = 0; i < rows.count; ++i) {
      words[i] = 0;
      for (const int64_t block : Listed(place, rows.row + i, begin, begin + kTile)) {
        words[i] |= Bits(block * block_, (block + 1) * block_, begin);
      }
    }
  }

  std::span<const int64_t> Listed(const Place& place, int64_t row, int64_t begin, int64_t end) const override {
    const int64_t heads = std::max<int64_t>(heads_, 1);
    const int64_t head = heads == 1                   ? 0
                         : heads == place.query_heads ? place.head
                                                      : place.head / (place.query_heads / heads);
    const auto at = static_cast<size_t>((((by_batch() ? place.batch : 0) * rows_ + row) * heads + head) * count_);
    const std::vector<int64_t>& all = sorted_.empty() ? std::get<Table>(values[0]).values : sorted_;
    const auto own = std::span(all).subspan(at, static_cast<size_t>(count_));
    // Skips -1, which is absent; blocks that overlap [begin, end) begin after begin - block.
    return {std::ranges::lower_bound(own, begin / block_), std::ranges::lower_bound(own, (end + block_ - 1) / block_)};
  }

 private:
  int64_t batches_, rows_, heads_, count_, block_;  // heads 0: no such axis
  std::vector<int64_t> sorted_;
};

// Columns and diagonals of each head, up to a row's position.
class VerticalSlashNode : public Node {
 public:
  VerticalSlashNode(const Table& columns, const Table& slashes) : batches_(columns.size(0)), heads_(columns.size(1)) {
    for (int64_t list = 0; list < batches_ * heads_; ++list) {
      columns_.push_back(SetOf(columns, list));
      slashes_.push_back(SetOf(slashes, list));
    }
  }

  void Check(const char* op, const PatternCall& call) const override {
    CheckBatches(op, "columns and slashes", batches_, call);
    if (heads_ == call.query_heads) return;
    throw InvalidArgument(std::string(op) + ": pattern has columns and slashes of " + std::to_string(heads_) +
                          " heads, expected " + std::to_string(call.query_heads));
  }
  bool by_head() const override { return true; }
  bool by_batch() const override { return batches_ != 1; }

  void Tiles(const Place& place, const RowRange& rows, TileSet& tiles) const override {
    const std::vector<uint64_t>&columns = Of(columns_, place), &slashes = Of(slashes_, place);
    for (int64_t word = 0; word < std::ssize(columns) && word * kTile <= rows.last(); ++word) {
      if (columns[static_cast<size_t>(word)] != 0) tiles.AddKeys(word * kTile, (word + 1) * kTile);
    }
    for (int64_t word = std::ssize(slashes) - 1; word >= 0; --word) {  // reversed, so that keys ascend
      if (slashes[static_cast<size_t>(word)] == 0) continue;
      tiles.AddKeys(rows.position - word * kTile - (kTile - 1), rows.last() - word * kTile + 1);
    }
  }
  void Words(const Place& place, const RowRange& rows, int64_t begin, uint64_t* words) const override {
    const std::vector<uint64_t>&columns = Of(columns_, place), &slashes = Of(slashes_, place);
    const uint64_t all = WordAt(columns, begin / kTile);
    for (int64_t i = 0; i < rows.count; ++i) {
      // The bits of slashes from `least`, the slash of the tile's last key, in reversed order.
      const int64_t p = rows.position + i, least = p - begin - (kTile - 1), shift = Modulo(least, kTile);
      const int64_t word = FloorDivide(least, kTile);
      uint64_t bits = WordAt(slashes, word) >> shift;
      if (shift != 0) bits |= WordAt(slashes, word + 1) << (kTile - shift);
      words[i] = (all & Bits(0, p + 1, begin)) | Reversed(bits);
    }
  }

 private:
  using Set = std::vector<uint64_t>;  // a bit for each number

  static Set SetOf(const Table& table, int64_t list) {
    Set set;
    for (int64_t i = 0; i < table.size(2); ++i) {
      const int64_t number = table.values[static_cast<size_t>(list * table.size(2) + i)];
      if (number < 0) continue;
      const auto word = static_cast<size_t>(number / kTile);
      if (word >= set.size()) set.resize(word + 1);
      set[word] |= uint64_t{1} << (number % kTile);
    }
    return set;
  }
  const Set& Of(const std::vector<Set>& sets, const Place& place) const {
    return sets[static_cast<size_t>((by_batch() ? place.batch : 0) * heads_ + place.head)];
  }
  static uint64_t WordAt(const Set& set, int64_t word) {
    return word < 0 || word >= std::ssize(set) ? 0 : set[static_cast<size_t>(word)];
  }
  static uint64_t Reversed(uint64_t x) {
    x = (x >> 1 & 0x5555555555555555) | (x & 0x5555555555555555) << 1;
    x = (x >> 2 & 0x3333333333333333) | (x & 0x3333333333333333) << 2;
    x = (x >> 4 & 0x0F0F0F0F0F0F0F0F) | (x & 0x0F0F0F0F0F0F0F0F) << 4;
    x = (x >> 8 & 0x00FF00FF00FF00FF) | (x & 0x00FF00FF00FF00FF) << 8;
    x = (x >> 16 & 0x0000FFFF0000FFFF) | (x & 0x0000FFFF0000FFFF) << 16;
    return x >> 32 | x << 32;
  }

  int64_t batches_, heads_;
  std::vector<Set> columns_, slashes_;
};

class PerHeadNode : public Node {
 public:
  explicit PerHeadNode(std::vector<Pattern> heads) : heads_(std::move(heads)) {}

  void Check(const char* op, const PatternCall& call) const override {
    if (static_cast<int64_t>(heads_.size()) != call.query_heads) {
      throw InvalidArgument(std::string(op) + ": pattern has " + std::to_string(heads_.size()) + " heads, expected " +
                            std::to_string(call.query_heads) + " as q");
    }
    for (const Pattern& head : heads_) head.node()->Check(op, call);
  }
  bool by_head() const override { return true; }
  bool by_batch() const override {
    return std::ranges::any_of(heads_, [](const Pattern& head) { return head.node()->by_batch(); });
  }
  void Tiles(const Place& place, const RowRange& rows, TileSet& tiles) const override {
    Of(place).Tiles(place, rows, tiles);
  }
  Share ShareOf(const Place& place, const RowRange& rows, int64_t begin, int64_t end) const override {
    return Of(place).ShareOf(place, rows, begin, end);
  }
  void Words(const Place& place, const RowRange& rows, int64_t begin, uint64_t* words) const override {
    Of(place).Words(place, rows, begin, words);
  }

 private:
  const Node& Of(const Place& place) const { return *heads_[static_cast<size_t>(place.head)].node(); }

  std::vector<Pattern> heads_;
};

// The union or intersection of two patterns.
template <bool kUnion>
class PairNode : public Node {
 public:
  PairNode(std::shared_ptr<const Node> a, std::shared_ptr<const Node> b) : a_(std::move(a)), b_(std::move(b)) {}

  void Check(const char* op, const PatternCall& call) const override {
    a_->Check(op, call);
    b_->Check(op, call);
  }
  bool by_head() const override { return a_->by_head() || b_->by_head(); }
  bool by_batch() const override { return a_->by_batch() || b_->by_batch(); }
  void Tiles(const Place& place, const RowRange& rows, TileSet& tiles) const override {
    if constexpr (kUnion) {
      a_->Tiles(place, rows, tiles);
      b_->Tiles(place, rows, tiles);
    } else {
      TileSet of_a(place.Tk), of_b(place.Tk);
      a_->Tiles(place, rows, of_a);
      b_->Tiles(place, rows, of_b);
      tiles.AddCommon(of_a, of_b);
    }
  }
  Share ShareOf(const Place& place, const RowRange& rows, int64_t begin, int64_t end) const override {
    constexpr Share kDecides = kUnion ? Share::kAll : Share::kNone;
    const Share a = a_->ShareOf(place, rows, begin, end);
    if (a == kDecides) return a;
    const Share b = b_->ShareOf(place, rows, begin, end);
    return b == kDecides || a == b ? b : Share::kSome;
  }
  void Words(const Place& place, const RowRange& rows, int64_t begin, uint64_t* words) const override {
    uint64_t others[kBlockRows];
    a_->Words(place, rows, begin, words);
    b_->Words(place, rows, begin, others);
    for (int64_t i = 0; i < rows.count; ++i) words[i] = kUnion ? words[i] | others[i] : words[i] & others[i];
  }

 private:
  std::shared_ptr<const Node> a_, b_;
};

inline NodePtr United(NodePtr a, NodePtr b) { return std::make_shared<PairNode<true>>(std::move(a), std::move(b)); }

}  // namespace heed::patterns

#endif  // HEED_PATTERNS_PATTERN_NODES_INTERNAL_H_
