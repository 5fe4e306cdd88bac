// The builders of patterns: their arguments, and the nodes that they build.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "heed/core/error.h"
#include "heed/patterns/pattern_internal.h"
#include "heed/patterns/pattern_nodes_internal.h"

namespace heed::patterns {
namespace {

int64_t Size(const Value& value) { return std::get<int64_t>(value); }
const Table& TableOf(const Value& value) { return std::get<Table>(value); }

[[noreturn]] void Refuse(const char* builder, const std::string& text) {
  throw InvalidArgument(std::string(builder) + ": " + text);
}

constexpr int64_t kFar = int64_t{1} << 61;  // beyond every key

NodePtr MakeDilated(const std::vector<Value>& v) {
  const int64_t reach = Size(v[0]), step = Size(v[1]);
  return std::make_shared<StepsNode>(step, reach > kFar / step ? kFar : reach * step);
}

NodePtr MakeFixed(const std::vector<Value>& v) {
  const int64_t block = Size(v[0]), summary = Size(v[1]);
  if (summary > block) {
    Refuse("fixed", "summary is " + std::to_string(summary) + ", expected 0 to block = " + std::to_string(block));
  }
  return United(MakeRun([=](int64_t p, int64_t) {
                  const int64_t begin = FloorDivide(p, block) * block;
                  return Run{begin, begin + block};
                }),
                std::make_shared<SummariesNode>(block, summary));
}

void CheckRank(const char* builder, const char* name, const Table& table, int64_t least, int64_t most,
               const char* expected) {
  if (table.rank() >= least && table.rank() <= most) return;
  Refuse(builder, std::string(name) + " has shape " + ShapeString(table.shape) + ", expected " + expected);
}

NodePtr MakeGlobal(const Value& tokens, const char* builder) {
  CheckRank(builder, "tokens", TableOf(tokens), 1, 2, "[n] or [B, n]");
  return std::make_shared<GlobalNode>(TableOf(tokens));
}

void CheckHeads(const char* builder, const char* name, const Table& table, int64_t heads) {
  if (heads >= 1) return;
  Refuse(builder, std::string(name) + " has shape " + ShapeString(table.shape) + ", expected 1 head or more");
}

NodePtr MakeBlocks(const std::vector<Value>& v) {
  const Table &keep = TableOf(v[0]), &block = TableOf(v[1]);
  CheckRank("blocks", "keep", keep, 2, 4, "[nq, nk], [Hp, nq, nk] or [B, Hp, nq, nk]");
  const int64_t batches = keep.rank() == 4 ? keep.size(0) : 1;
  const int64_t heads = keep.rank() > 2 ? keep.size(-3) : 1, nq = keep.size(-2), nk = keep.size(-1);
  CheckHeads("blocks", "keep", keep, heads);
  if (nk > 0 && block.values[1] > kFar / nk) {
    Refuse("blocks", "block has " + std::to_string(block.values[1]) + " columns, expected at most " +
                         std::to_string(kFar / nk) + " for a table of " + std::to_string(nk));
  }
  auto node = std::make_shared<TableNode>(block.values[0], block.values[1], batches, heads, nq);
  const int64_t lists = batches * heads * nq;
  for (int64_t list = 0; list < lists; ++list) {
    node->Begin();
    for (int64_t k = 0; k < nk; ++k) {
      if (keep.values[static_cast<size_t>(list * nk + k)] != 0) node->Add(k);
    }
  }
  return node;
}

NodePtr MakeCsr(const std::vector<Value>& v) {
  const Table &row_ptr = TableOf(v[0]), &columns = TableOf(v[1]), &block = TableOf(v[2]);
  CheckRank("csr", "row_ptr", row_ptr, 1, 2, "[nq + 1] or [Hp, nq + 1]");
  CheckRank("csr", "columns", columns, 1, 1, "[n]");
  const int64_t heads = row_ptr.rank() == 2 ? row_ptr.size(0) : 1, nq = row_ptr.size(-1) - 1;
  CheckHeads("csr", "row_ptr", row_ptr, heads);
  auto node = std::make_shared<TableNode>(block.values[0], block.values[1], 1, heads, nq);
  CheckBlockRows("csr", row_ptr, columns, kFar / block.values[1]);
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t* own = row_ptr.values.data() + h * (nq + 1);
    for (int64_t i = 0; i < nq; ++i) {
      node->Begin();
      for (int64_t at = own[i]; at < own[i + 1]; ++at) node->Add(columns.values[static_cast<size_t>(at)]);
    }
  }
  return node;
}

// Lists of keys or blocks of keys for each row of the call.
NodePtr MakeLists(const char* builder, const char* one, const char* shapes, const Table& index, int64_t block) {
  CheckRank(builder, "index", index, 3, 4, shapes);
  if (index.rank() == 4) CheckHeads(builder, "index", index, index.size(2));
  const auto n = static_cast<size_t>(index.size(-1));
  bool all_ascend = true;
  std::vector<int64_t> sorted;
  for (size_t at = 0; n > 0 && at < index.values.size(); at += n) {
    std::span<const int64_t> row = std::span(index.values).subspan(at, n);
    if (std::ranges::adjacent_find(row, [](int64_t a, int64_t b) { return a >= b && a >= 0; }) != row.end()) {
      all_ascend = false;
      sorted.assign(row.begin(), row.end());
      std::ranges::sort(sorted);
      row = sorted;
      const auto twice = std::ranges::adjacent_find(row, [](int64_t a, int64_t b) { return a == b && a >= 0; });
      if (twice != row.end()) {
        Refuse(builder, std::string("index has ") + one + " " + std::to_string(*twice) + " twice, expected it once");
      }
    }
    if (row.back() >= kFar / block) {
      Refuse(builder, std::string("index has ") + one + " " + std::to_string(row.back()) + ", expected one below " +
                          std::to_string(kFar / block));
    }
  }
  return std::make_shared<RowBlocksNode>(index, block, all_ascend);
}

NodePtr MakeKeys(const std::vector<Value>& v) {
  return MakeLists("keys", "key", "[B, Tq, n] or [B, Tq, Hkv, n]", TableOf(v[0]), 1);
}

NodePtr MakeRowBlocks(const std::vector<Value>& v) {
  return MakeLists("row_blocks", "block", "[B, Tq, n] or [B, Tq, Hp, n]", TableOf(v[0]), Size(v[1]));
}

const Builder kBuilders[] = {
    {"sliding_window",
     {{"left", Parameter::kSize}, {"right", Parameter::kSize, 0}},
     [](const std::vector<Value>& v) { return Window(Size(v[0]), Size(v[1])); }},
    {"dilated", {{"reach", Parameter::kSize}, {"step", Parameter::kCount}}, &MakeDilated},
    {"atrous",
     {{"step", Parameter::kCount}},
     [](const std::vector<Value>& v) -> NodePtr { return std::make_shared<StepsNode>(Size(v[0]), kFar); }},
    {"strided",
     {{"step", Parameter::kCount}},
     [](const std::vector<Value>& v) {
       return United(Window(Size(v[0]) - 1, 0), std::make_shared<StepsNode>(Size(v[0]), kFar));
     }},
    {"fixed", {{"block", Parameter::kCount}, {"summary", Parameter::kSize}}, &MakeFixed},
    {"global_tokens",
     {{"tokens", Parameter::kInts}},
     [](const std::vector<Value>& v) { return MakeGlobal(v[0], "global_tokens"); }},
    {"longformer",
     {{"window", Parameter::kSize}, {"tokens", Parameter::kInts}},
     [](const std::vector<Value>& v) {
       const int64_t half = Size(v[0]) / 2;
       return United(Window(half, half), MakeGlobal(v[1], "longformer"));
     }},
    {"random_blocks",
     {{"count", Parameter::kCount}, {"block", Parameter::kCount, 64}, {"seed", Parameter::kSeed, 0}},
     [](const std::vector<Value>& v) -> NodePtr {
       return std::make_shared<RandomNode>(Size(v[0]), Size(v[1]), Size(v[2]), false);
     }},
    {"bigbird",
     {{"block", Parameter::kCount, 64}, {"random", Parameter::kSize, 3}, {"seed", Parameter::kSeed, 0}},
     [](const std::vector<Value>& v) -> NodePtr {
       return std::make_shared<RandomNode>(Size(v[1]), Size(v[0]), Size(v[2]), true);
     }},
    {"streaming",
     {{"sinks", Parameter::kSize}, {"window", Parameter::kCount}},
     [](const std::vector<Value>& v) {
       const int64_t sinks = Size(v[0]);
       return United(Window(Size(v[1]) - 1, 0), MakeRun([=](int64_t, int64_t) { return Run{0, sinks}; }));
     }},
    {"neighborhood",
     {{"window", Parameter::kCount}},
     [](const std::vector<Value>& v) {
       const int64_t window = Size(v[0]);
       return MakeRun([=](int64_t p, int64_t Tk) {
         const int64_t begin = std::clamp<int64_t>(p - window / 2, 0, std::max<int64_t>(Tk - window, 0));
         return Run{begin, begin + window};
       });
     }},
    {"blocks", {{"keep", Parameter::kBools}, {"block", Parameter::kBlock, 64}}, &MakeBlocks},
    {"csr", {{"row_ptr", Parameter::kInts}, {"columns", Parameter::kInts}, {"block", Parameter::kBlock, 64}}, &MakeCsr},
    {"row_blocks", {{"index", Parameter::kInts}, {"block", Parameter::kCount, 64}}, &MakeRowBlocks},
    {"keys", {{"index", Parameter::kInts}}, &MakeKeys},
    {"per_head",
     {{"heads", Parameter::kPatterns}},
     [](const std::vector<Value>& v) -> NodePtr {
       const auto& heads = std::get<std::vector<Pattern>>(v[0]);
       if (heads.empty()) Refuse("per_head", "heads is empty, expected a pattern for each head");
       return std::make_shared<PerHeadNode>(heads);
     }},
};

}  // namespace

std::span<const Builder> Builders() { return kBuilders; }

void CheckBlockRows(const char* builder, const Table& row_ptr, const Table& columns, int64_t most) {
  const auto text = [](int64_t x) { return std::to_string(x); };
  const int64_t numbers = row_ptr.size(-1), all = columns.size(0);
  if (numbers < 1)
    Refuse(builder, "row_ptr has shape " + ShapeString(row_ptr.shape) + ", expected nq + 1 numbers, nq >= 0");
  int64_t begin = 0;
  for (int64_t i = 0; i < std::ssize(row_ptr.values); ++i) {
    const int64_t end = row_ptr.values[static_cast<size_t>(i)], row = i % numbers - 1;
    if (row < 0 && end != begin) {
      Refuse(builder, "row_ptr begins with " + text(end) + ", expected " + text(begin) +
                          (i > 0 ? " as the head before ends" : ""));
    }
    if (end < begin || end > all) {
      Refuse(builder, "row_ptr goes from " + text(begin) + " to " + text(end) + " at " + text(row) +
                          ", expected numbers that ascend from 0 to " + text(all));
    }
    for (int64_t at = begin, before = -1; at < end; ++at) {
      const int64_t column = columns.values[static_cast<size_t>(at)];
      if (column <= before || column >= most) {
        Refuse(builder, "columns has " + text(column) + " behind " + text(before) + " in row " + text(row) +
                            ", expected columns that ascend from 0 to " + text(most - 1));
      }
      before = column;
    }
    begin = end;
  }
  if (begin != all)
    Refuse(builder, "row_ptr ends with " + text(begin) + ", expected " + text(all) + ", the size of columns");
}

std::vector<std::vector<int64_t>> AscendingTokens(const Table& tokens) {
  const int64_t batches = tokens.rank() == 2 ? tokens.size(0) : 1, n = tokens.size(-1);
  std::vector<std::vector<int64_t>> all;
  for (int64_t b = 0; b < batches; ++b) {
    std::vector<int64_t>& own = all.emplace_back();
    for (int64_t i = 0; i < n; ++i) {
      const int64_t token = tokens.values[static_cast<size_t>(b * n + i)];
      if (token >= 0) own.push_back(token);
    }
    std::ranges::sort(own);
    const auto [first, last] = std::ranges::unique(own);
    own.erase(first, last);
  }
  return all;
}

Pattern OtherRows(const Table& tokens) {
  static const Builder builder = {
      "other_rows", {{"tokens", Parameter::kInts}}, [](const std::vector<Value>& v) -> NodePtr {
        return std::make_shared<OtherRowsNode>(TableOf(v[0]));
      }};
  return Build(builder, {tokens});
}

Pattern CompleteWindows(int64_t length, int64_t stride) {
  static const Builder builder = {
      "complete_windows",
      {{"length", Parameter::kCount}, {"stride", Parameter::kCount}},
      [](const std::vector<Value>& v) {
        const int64_t of = Size(v[0]), every = Size(v[1]);
        return MakeRun([=](int64_t p, int64_t) { return Run{0, NumCompleteWindows(p, of, every)}; });
      }};
  return Build(builder, {length, stride});
}

Pattern VerticalSlash(Table columns, Table slashes) {
  static const Builder builder = {"vertical_slash",
                                  {{"columns", Parameter::kInts}, {"slashes", Parameter::kInts}},
                                  [](const std::vector<Value>& v) -> NodePtr {
                                    return std::make_shared<VerticalSlashNode>(TableOf(v[0]), TableOf(v[1]));
                                  }};
  std::vector<Value> values;
  values.emplace_back(std::move(columns));
  values.emplace_back(std::move(slashes));
  return Build(builder, std::move(values));
}

std::shared_ptr<Node> Pair(bool is_union, const Pattern& a, const Pattern& b) {
  if (is_union) return std::make_shared<PairNode<true>>(a.node(), b.node());
  return std::make_shared<PairNode<false>>(a.node(), b.node());
}

}  // namespace heed::patterns
