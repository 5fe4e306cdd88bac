// Block masks: lists of blocks, some with a bit per pair.
#include "heed/patterns/pattern_block_mask.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "heed/core/error.h"
#include "heed/patterns/pattern_internal.h"
#include "heed/patterns/pattern_nodes_internal.h"

namespace heed::patterns {
namespace {

class BlockMaskNode : public Node {
 public:
  explicit BlockMaskNode(const BlockMaskInputs& in) : rows_(in.rows), keys_(in.keys), Tq_(in.Tq), Tk_(in.Tk) {
    builder = "block_mask";
    values = {Copied("block_mask", "row_ptr", in.row_ptr, false), Copied("block_mask", "columns", in.columns, false),
              Copied("block_mask", "parts", in.parts, false), Copied("block_mask", "bits", in.bits, false),
              Table{{2}, {rows_, keys_}}};
    CheckTables();
    const auto in_part = std::ranges::count_if(parts().values, [](int64_t part) { return part >= 0; });
    text = "block_mask(<" + std::to_string(Tq_) + " x " + std::to_string(Tk_) + " in blocks of " +
           std::to_string(rows_) + " x " + std::to_string(keys_) + ": " + std::to_string(parts().size(0) - in_part) +
           " whole, " + std::to_string(in_part) + " in part>)";
    key = OwnKey(text);
  }

  void Check(const char* op, const PatternCall& call) const override {
    const auto refuse = [&](const std::string& got, const std::string& expected) {
      throw InvalidArgument(std::string(op) + ": pattern has a block mask of " + got + ", expected " + expected);
    };
    if (call.Tq != Tq_ || call.Tk != Tk_) {
      refuse(std::to_string(Tq_) + " rows and " + std::to_string(Tk_) + " keys",
             std::to_string(call.Tq) + " and " + std::to_string(call.Tk));
    }
    CheckBatches(op, "a block mask", row_ptr().size(0), call);
    if (by_head() && row_ptr().size(1) != call.query_heads) {
      refuse(std::to_string(row_ptr().size(1)) + " heads", "1 or " + std::to_string(call.query_heads) + " as q");
    }
  }
  bool by_batch() const override { return row_ptr().size(0) != 1; }
  bool by_head() const override { return row_ptr().size(1) != 1; }

  void Tiles(const Place& place, const RowRange& rows, TileSet& tiles) const override {
    ForLists(place, rows, [&](int64_t, int64_t, int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end; ++at) tiles.AddKeys(KeyOf(at), KeyOf(at) + keys_);
    });
  }
  Share ShareOf(const Place& place, const RowRange& rows, int64_t begin, int64_t end) const override {
    const uint64_t wanted = Bits(begin, end, begin);
    bool some = false, all = true;
    ForLists(place, rows, [&](int64_t, int64_t, int64_t first, int64_t last) {
      uint64_t whole = 0;
      ForBlocks(first, last, begin, [&](int64_t at, uint64_t own) {
        some = some || (own & wanted) != 0;
        if (parts().values[static_cast<size_t>(at)] < 0) whole |= own;
      });
      all = all && (whole & wanted) == wanted;
    });
    return !some ? Share::kNone : all ? Share::kAll : Share::kSome;
  }
  void Words(const Place& place, const RowRange& rows, int64_t begin, uint64_t* words) const override {
    std::fill_n(words, rows.count, 0);
    ForLists(place, rows, [&](int64_t row, int64_t end_row, int64_t first, int64_t last) {
      ForBlocks(first, last, begin, [&](int64_t at, uint64_t own) {
        const int64_t part = parts().values[static_cast<size_t>(at)];
        for (int64_t i = row; i < end_row; ++i) {
          words[i] |= own & (part < 0 ? kAllKeys : PartBits(part, (rows.row + i) % rows_, begin - KeyOf(at)));
        }
      });
    });
  }

 private:
  const Table& row_ptr() const { return std::get<Table>(values[0]); }
  const Table& columns() const { return std::get<Table>(values[1]); }
  const Table& parts() const { return std::get<Table>(values[2]); }
  const Table& bits() const { return std::get<Table>(values[3]); }

  // The first key of a block.
  int64_t KeyOf(int64_t at) const { return columns().values[static_cast<size_t>(at)] * keys_; }

  // Calls f(first row, end row, begin, end) for runs of rows with the same list of blocks, and that list.
  template <class F>
  void ForLists(const Place& place, const RowRange& rows, const F& f) const {
    const int64_t batch = by_batch() ? place.batch : 0, head = by_head() ? place.head : 0;
    for (int64_t first = 0; first < rows.count;) {
      const int64_t block = (rows.row + first) / rows_;
      const int64_t end = std::min((block + 1) * rows_ - rows.row, rows.count);
      const auto at = static_cast<size_t>((batch * row_ptr().size(1) + head) * row_ptr().size(2) + block);
      f(first, end, row_ptr().values[at], row_ptr().values[at + 1]);
      first = end;
    }
  }
  // Calls f(at, bits of its keys) for the blocks that have some of the keys [from, from + 64).
  template <class F>
  void ForBlocks(int64_t begin, int64_t end, int64_t from, const F& f) const {
    const auto lists = columns().values.begin();
    for (int64_t at = std::lower_bound(lists + begin, lists + end, from / keys_) - lists;
         at < end && KeyOf(at) < from + kTile; ++at) {
      f(at, Bits(KeyOf(at), KeyOf(at) + keys_, from));
    }
  }
  // 64 bits of a row of a block from its key `from` on, which may be negative.
  uint64_t PartBits(int64_t part, int64_t row, int64_t from) const {
    const int64_t words = bits().size(2);
    const int64_t* own = bits().values.data() + (part * bits().size(1) + row) * words;
    const auto word = [&](int64_t i) { return i >= 0 && i < words ? static_cast<uint64_t>(own[i]) : 0; };
    const int64_t i = FloorDivide(from, kTile), shift = Modulo(from, kTile);
    return shift == 0 ? word(i) : word(i) >> shift | word(i + 1) << (kTile - shift);
  }

  void CheckTables() const {
    const auto refuse = [](const std::string& what) { throw InvalidArgument("block_mask: " + what); };
    const auto expect = [&](const char* name, const Table& table, const std::vector<int64_t>& shape) {
      if (table.shape != shape) {
        refuse(std::string(name) + " has shape " + ShapeString(table.shape) + ", expected " + ShapeString(shape));
      }
    };
    const std::pair<const char*, int64_t> sizes[] = {{"rows", rows_}, {"keys", keys_}, {"Tq", Tq_}, {"Tk", Tk_}};
    for (const auto& [name, size] : sizes) {
      const int64_t least = name[0] == 'T' ? 0 : 1;
      if (size < least || size > kLargest) {
        refuse(std::string(name) + " is " + std::to_string(size) + ", expected " + std::to_string(least) + " or more");
      }
    }
    const int64_t nq = Tq_ / rows_ + (Tq_ % rows_ != 0), nk = Tk_ / keys_ + (Tk_ % keys_ != 0);
    if (row_ptr().rank() != 3 || row_ptr().size(2) != nq + 1) {
      refuse("row_ptr has shape " + ShapeString(row_ptr().shape) + ", expected [B, Hp, " + std::to_string(nq + 1) +
             "]");
    }
    if (columns().rank() != 1) refuse("columns has shape " + ShapeString(columns().shape) + ", expected [n]");
    const int64_t n = columns().size(0);
    expect("parts", parts(), {n});
    if (bits().rank() != 3) refuse("bits has shape " + ShapeString(bits().shape) + ", expected [m, rows, words]");
    expect("bits", bits(), {bits().size(0), rows_, keys_ / kTile + (keys_ % kTile != 0)});
    for (const int64_t part : parts().values) {
      if (part < -1 || part >= bits().size(0)) {
        refuse("parts has " + std::to_string(part) + ", expected -1 to " + std::to_string(bits().size(0) - 1));
      }
    }
    CheckBlockRows("block_mask", row_ptr(), columns(), nk);
  }

  int64_t rows_, keys_, Tq_, Tk_;
};

}  // namespace

Pattern BlockMask(const BlockMaskInputs& in) { return Pattern(std::make_shared<BlockMaskNode>(in)); }

}  // namespace heed::patterns
