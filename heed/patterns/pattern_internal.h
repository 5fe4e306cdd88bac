// Internals of a pattern: a tree of nodes, and lists of tiles compiled from it.
//
// A node returns the keys of a tile of 64 that a row keeps, as bits: | and & of sets are | and & of words.
#ifndef HEED_PATTERNS_PATTERN_INTERNAL_H_
#define HEED_PATTERNS_PATTERN_INTERNAL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "heed/engines/softmax/block_sparse_mask.h"
#include "heed/patterns/pattern.h"

namespace heed::patterns {

inline constexpr int64_t kLargest = int64_t{1} << 61;  // bound of sizes, and of positions of either sign

inline constexpr int64_t kTile = softmax::BlockSparseMask::kKeys, kBlockRows = softmax::BlockSparseMask::kRows;

// The blocks of keys drawn last, cached since a node is evaluated tile by tile.
struct Drawn {
  const void* node = nullptr;
  int64_t head = 0, block = 0;
  std::vector<int64_t> blocks;
};

// A head of a call, and the sizes that its patterns depend on.
struct Place {
  int64_t batch = 0, head = 0;
  int64_t query_heads = 1, key_heads = 1;
  int64_t Tk = 0;
  Drawn* drawn = nullptr;  // cache of this call
};

// Up to kBlockRows rows of one head: those of the call from `row` on, at `position` and following.
struct RowRange {
  int64_t row = 0, position = 0, count = 0;
  int64_t last() const { return position + count - 1; }
};

// Disjoint ascending ranges of tiles, from ranges of keys in any order.
class TileSet {
 public:
  struct Range {
    int64_t begin, end;
  };
  explicit TileSet(int64_t Tk) : Tk_(Tk) {}
  void AddKeys(int64_t begin, int64_t end);  // clamps the range to existing keys
  void AddAll() { AddKeys(0, Tk_); }
  void AddCommon(TileSet& a, TileSet& b);
  std::span<const Range> Ranges();

 private:
  int64_t Tk_;
  std::vector<Range> ranges_;
  bool sorted_ = true;
};

// Numbers with a shape, copied from a tensor or read from an expression.
struct Table {
  std::vector<int64_t> shape;
  std::vector<int64_t> values;
  bool is_bool = false;
  int64_t size(int64_t axis) const {
    return shape[static_cast<size_t>(axis < 0 ? axis + static_cast<int64_t>(shape.size()) : axis)];
  }
  int64_t rank() const { return static_cast<int64_t>(shape.size()); }
};

// An argument of a builder.
using Value = std::variant<int64_t, Table, std::vector<Pattern>>;

enum class Share { kNone, kSome, kAll };

class Node {
 public:
  virtual ~Node() = default;

  // Throws InvalidArgument of `op` if it does not fit the call.
  virtual void Check(const char* /*op*/, const PatternCall& /*call*/) const {}
  virtual bool by_head() const { return false; }
  virtual bool by_batch() const { return false; }

  // Adds the tiles outside of which these rows keep nothing.
  virtual void Tiles(const Place& place, const RowRange& rows, TileSet& tiles) const = 0;
  // Says whether these rows keep all, some or none of the keys [begin, end), as far as is known cheaply.
  virtual Share ShareOf(const Place& /*place*/, const RowRange& /*rows*/, int64_t /*begin*/, int64_t /*end*/) const {
    return Share::kSome;
  }
  // For each row, the bits of the keys [begin, begin + 64) that it keeps; bits of keys that do not exist may be set.
  virtual void Words(const Place& place, const RowRange& rows, int64_t begin, uint64_t* words) const = 0;

  // For a node that lists blocks of keys for each row of the call: the keys per block, else 0; and the blocks of a row
  // that have some of the keys [begin, end), ascending.
  virtual int64_t listed_block() const { return 0; }
  virtual int64_t listed_heads() const { return 1; }  // heads that it has lists for: 1, key heads or query heads
  virtual std::span<const int64_t> Listed(const Place& /*place*/, int64_t /*row*/, int64_t /*begin*/,
                                          int64_t /*end*/) const {
    return {};
  }

  // The builder, with its arguments in `values`; or "|" or "&" of two patterns, `values[0]`.
  std::string_view builder;
  std::vector<Value> values;
  std::string text;  // the expression
  std::string key;   // the expression, or for large tables a unique key
  int depth = 1;     // of nested patterns
};

struct Parameter {
  enum Kind { kSize, kCount, kSeed, kBlock, kInts, kBools, kPatterns };
  const char* name;
  Kind kind;  // kSize: 0 or more, kCount: 1 or more, kBlock: a count, or two, of rows and columns
  std::optional<int64_t> otherwise = {};
};

// Builders by name, for expressions and Python.
struct Builder {
  const char* name;
  std::vector<Parameter> parameters;
  std::shared_ptr<Node> (*make)(const std::vector<Value>& values);
};
std::span<const Builder> Builders();
const Builder* FindBuilder(std::string_view name);  // null if it does not exist

// Copies the numbers of a tensor in order. Throws InvalidArgument of this builder and argument if the tensor is absent
// or of another dtype.
Table Copied(const char* builder, const char* name, const ConstTensorView& t, bool is_bool);

// Builds a pattern; checks the arguments, where trailing ones that are missing have their defaults.
Pattern Build(const Builder& builder, std::vector<Value> values);
Pattern Build(std::string_view builder, std::vector<Value> values);

// Returns a key for a pattern that is equal to no other.
std::string OwnKey(const std::string& text);

// Row i of blocks keeps the blocks of keys [row_ptr[i], row_ptr[i + 1]) of `columns`; row_ptr is [..., nq + 1], where a
// head begins at the end of the previous one. Throws InvalidArgument of `builder` unless row_ptr ascends from 0 to the
// size of `columns`, and the columns of each row ascend and are below `most`.
void CheckBlockRows(const char* builder, const Table& row_ptr, const Table& columns, int64_t most);

// Converts tokens [n] or [B, n] to lists per batch entry, or one for all; each is ascending, without -1 and duplicates.
std::vector<std::vector<int64_t>> AscendingTokens(const Table& tokens);

// Keeps all keys of the rows that are not global tokens. No expression describes it.
Pattern OtherRows(const Table& tokens);

// Keys are windows of `length` tokens, one every `stride` tokens from 0 on; keeps those whose window ends at or before
// p. No expression describes it.
Pattern CompleteWindows(int64_t length, int64_t stride);

// The number of windows that end at or before p.
inline int64_t NumCompleteWindows(int64_t p, int64_t length, int64_t stride) {
  return p + 1 < length ? 0 : (p + 1 - length) / stride + 1;
}

// Columns and diagonals of each head: pairs with 0 <= j <= p where j is one of `columns`, or p - j one of `slashes`.
// Both are [B, Hq, n], rows ascend, -1 is absent. select::VerticalSlash returns it; no expression describes it.
Pattern VerticalSlash(Table columns, Table slashes);

// The union or intersection of two patterns.
std::shared_ptr<Node> Pair(bool is_union, const Pattern& a, const Pattern& b);

// Larger tables are not written as text, and deeper patterns are refused, because functions recurse into them.
inline constexpr size_t kMostWritten = 4096, kMostText = size_t{1} << 20;
inline constexpr int kMostDepth = 256;

// Throws InvalidArgument that begins with `op` if the pattern does not fit.
void CheckPattern(const char* op, const Pattern& pattern, const PatternCall& call);

// Lists the tiles that rows of the call compute, by blocks of 64 rows. Recently compiled lists are cached for all
// threads.
std::shared_ptr<const softmax::BlockSparseMask> Compile(const Pattern& pattern, const PatternCall& call);

// Lists the rows of each tile instead, for a pattern of blocks listed by row; null where adjacent rows keep the same
// tiles, so that this would not be faster.
std::shared_ptr<const softmax::TileRows> CompileTileRows(const Pattern& pattern, const PatternCall& call);

// True if a pair is kept, from the definitions, for tests. `row` is a row of the call.
bool Keeps(const Pattern& pattern, const PatternCall& call, int64_t batch, int64_t head, int64_t row, int64_t key);

}  // namespace heed::patterns

#endif  // HEED_PATTERNS_PATTERN_INTERNAL_H_
