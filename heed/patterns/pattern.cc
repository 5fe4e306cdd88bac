// Pattern values: arguments of builders, expressions, masks.
#include "heed/patterns/pattern.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "heed/core/error.h"
#include "heed/patterns/pattern_internal.h"

namespace heed {
namespace patterns {
namespace {

// --- arguments ---------------------------------------------------------------------------------

[[noreturn]] void Refuse(const Builder& builder, const Parameter& parameter, const std::string& got,
                         const std::string& expected) {
  throw InvalidArgument(std::string(builder.name) + ": " + parameter.name + " " + got + ", expected " + expected);
}

void CheckSize(const Builder& builder, const Parameter& parameter, int64_t size, int64_t least) {
  if (size >= least && size <= kLargest) return;
  Refuse(builder, parameter, "is " + std::to_string(size),
         size < least ? std::to_string(least) + " or more" : "at most " + std::to_string(kLargest));
}

// Converts a value to the form its builder takes: a block of one size becomes a block of two.
void CheckValue(const Builder& builder, const Parameter& parameter, Value& value) {
  const Table* table = std::get_if<Table>(&value);
  switch (parameter.kind) {
    case Parameter::kSize:
    case Parameter::kCount:
    case Parameter::kSeed: {
      const int64_t* size = std::get_if<int64_t>(&value);
      if (size == nullptr) Refuse(builder, parameter, "is not a number", "an int");
      if (parameter.kind != Parameter::kSeed) {
        CheckSize(builder, parameter, *size, parameter.kind == Parameter::kCount ? 1 : 0);
      }
      return;
    }
    case Parameter::kBlock: {
      if (const int64_t* size = std::get_if<int64_t>(&value)) value = Table{{2}, {*size, *size}};
      table = std::get_if<Table>(&value);
      if (table == nullptr || table->is_bool || table->shape != std::vector<int64_t>{2}) {
        Refuse(builder, parameter, "is no size", "an int, or two: rows and columns");
      }
      for (const int64_t size : table->values) CheckSize(builder, parameter, size, 1);
      return;
    }
    case Parameter::kInts:
      if (table == nullptr || (table->is_bool && !table->values.empty())) {
        Refuse(builder, parameter, "is no table of numbers", "ints");
      }
      for (const int64_t x : table->values) {
        if (x < -1 || x >= kLargest) Refuse(builder, parameter, "has " + std::to_string(x), "0 or more, or -1");
      }
      return;
    case Parameter::kBools:
      if (table == nullptr || (!table->is_bool && !table->values.empty())) {
        Refuse(builder, parameter, "is no table of bools", "True and False");
      }
      return;
    case Parameter::kPatterns: {
      const auto* heads = std::get_if<std::vector<Pattern>>(&value);
      const bool whole = heads != nullptr && std::ranges::all_of(*heads, &Pattern::present);
      if (!whole) Refuse(builder, parameter, "is no list of patterns", "a pattern for each head");
      return;
    }
  }
}

// --- expressions -------------------------------------------------------------------------------

std::string ListText(const Table& table, size_t axis, const int64_t*& at) {
  std::string text = "[";
  for (int64_t i = 0; i < table.shape[axis]; ++i) {
    if (i > 0) text += ", ";
    if (axis + 1 < table.shape.size()) {
      text += ListText(table, axis + 1, at);
    } else {
      text += table.is_bool ? (*at != 0 ? "True" : "False") : std::to_string(*at);
      ++at;
    }
  }
  return text + "]";
}

std::string TextOf(const Parameter& parameter, const Value& value, bool& complete) {
  if (const int64_t* size = std::get_if<int64_t>(&value)) {
    return parameter.kind == Parameter::kSeed ? std::to_string(static_cast<uint64_t>(*size)) : std::to_string(*size);
  }
  if (const auto* heads = std::get_if<std::vector<Pattern>>(&value)) {
    std::string text = "[";
    for (const Pattern& head : *heads) {
      text += (text.size() > 1 ? ", " : "") + head.node()->text;
      complete = complete && head.node()->text == head.node()->key;
    }
    return text + "]";
  }
  const Table& table = std::get<Table>(value);
  if (parameter.kind == Parameter::kBlock) {
    const std::string rows = std::to_string(table.values[0]), columns = std::to_string(table.values[1]);
    return rows == columns ? rows : "(" + rows + ", " + columns + ")";
  }
  if (table.values.size() <= kMostWritten) {
    // Empty axes do not determine the sizes of the axes inside them.
    const int64_t* at = table.values.data();
    const bool hidden = table.values.empty() && table.rank() > 1;
    if (!hidden) return ListText(table, 0, at);
  }
  complete = false;
  return std::string("<") + (table.is_bool ? "bool" : "int") + ShapeString(table.shape) + ">";
}

// Sets the depth to one more than the deepest part.
void SetDepth(Node& node, const std::vector<Pattern>& parts) {
  for (const Pattern& part : parts) node.depth = std::max(node.depth, part.node()->depth + 1);
  if (node.depth > kMostDepth) {
    throw InvalidArgument("pattern: has more than " + std::to_string(kMostDepth) +
                          " patterns one inside the other, expected fewer");
  }
  if (node.text.size() > kMostText) {
    throw InvalidArgument("pattern: its expression has more than 2^20 characters, expected fewer");
  }
}

Pattern Combined(const char* sign, const Pattern& a, const Pattern& b) {
  if (!a.present() || !b.present()) {
    throw InvalidArgument(std::string("pattern: one side of ") + sign + " is absent, expected two patterns");
  }
  const bool is_union = sign[0] == '|';
  const std::shared_ptr<Node> node = Pair(is_union, a, b);
  const auto side = [&](const Pattern& pattern, std::string Node::* member) {
    const Node& of = *pattern.node();
    return !is_union && of.builder == "|" ? "(" + of.*member + ")" : of.*member;
  };
  const std::string between = std::string(" ") + sign + " ";
  node->builder = sign;
  node->values = {std::vector<Pattern>{a, b}};
  node->text = side(a, &Node::text) + between + side(b, &Node::text);
  node->key = side(a, &Node::key) + between + side(b, &Node::key);
  SetDepth(*node, {a, b});
  return Pattern(node);
}

}  // namespace

std::string OwnKey(const std::string& text) {
  static std::atomic<uint64_t> made{0};
  return text + "#" + std::to_string(made.fetch_add(1) + 1);
}

Table Copied(const char* builder, const char* name, const ConstTensorView& t, bool is_bool) {
  const auto refuse = [&](const std::string& got, const char* expected) {
    throw InvalidArgument(std::string(builder) + ": " + name + " " + got + ", expected " + expected);
  };
  if (!t.present()) refuse("is absent", "a tensor");
  const bool fits = is_bool ? t.dtype() == DType::kBool : t.dtype() == DType::kI32 || t.dtype() == DType::kI64;
  if (!fits) refuse(std::string("has dtype ") + heed::Name(t.dtype()), is_bool ? "bool" : "i32 or i64");
  if (t.device().type != DeviceType::kCpu) refuse("is on another device", "the CPU");
  Table table;
  table.is_bool = is_bool;
  table.shape.assign(t.sizes().begin(), t.sizes().end());
  const int64_t count = t.num_elements();
  if (count > 0 && t.data() == nullptr) refuse("has no data", "a pointer to its elements");
  table.values.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, at = 0;
    for (int axis = t.rank() - 1; axis >= 0; --axis) {
      at += rest % t.size(axis) * t.stride(axis);
      rest /= t.size(axis);
    }
    table.values.push_back(LoadAsInt64(t.dtype(), t.data(), at));
  }
  return table;
}

void TileSet::AddKeys(int64_t begin, int64_t end) {
  begin = std::max<int64_t>(begin, 0);
  end = std::min(end, Tk_);
  if (begin >= end) return;
  const Range range = {begin / kTile, (end - 1) / kTile + 1};
  if (!ranges_.empty() && range.begin >= ranges_.back().begin) {
    if (range.begin <= ranges_.back().end) {
      ranges_.back().end = std::max(ranges_.back().end, range.end);
      return;
    }
  } else if (!ranges_.empty()) {
    sorted_ = false;
  }
  ranges_.push_back(range);
}

std::span<const TileSet::Range> TileSet::Ranges() {
  if (sorted_) return ranges_;
  std::ranges::sort(ranges_, {}, &Range::begin);
  std::vector<Range> merged;
  for (const Range& range : ranges_) {
    if (!merged.empty() && range.begin <= merged.back().end) {
      merged.back().end = std::max(merged.back().end, range.end);
    } else {
      merged.push_back(range);
    }
  }
  ranges_ = std::move(merged);
  sorted_ = true;
  return ranges_;
}

void TileSet::AddCommon(TileSet& a, TileSet& b) {
  const std::span<const Range> of_a = a.Ranges(), of_b = b.Ranges();
  for (size_t i = 0, j = 0; i < of_a.size() && j < of_b.size();) {
    const int64_t begin = std::max(of_a[i].begin, of_b[j].begin), end = std::min(of_a[i].end, of_b[j].end);
    if (begin < end) AddKeys(begin * kTile, end * kTile);
    (of_a[i].end < of_b[j].end ? i : j) += 1;
  }
}

const Builder* FindBuilder(std::string_view name) {
  const auto all = Builders();
  const auto found = std::ranges::find(all, name, [](const Builder& b) { return std::string_view(b.name); });
  return found == all.end() ? nullptr : &*found;
}

Pattern Build(const Builder& builder, std::vector<Value> values) {
  for (size_t i = values.size(); i < builder.parameters.size(); ++i) {
    const Parameter& parameter = builder.parameters[i];
    if (!parameter.otherwise) Refuse(builder, parameter, "is missing", "it to be given");
    values.emplace_back(*parameter.otherwise);
  }
  bool complete = true;
  std::string text;
  for (size_t i = 0; i < values.size(); ++i) {
    const Parameter& parameter = builder.parameters[i];
    CheckValue(builder, parameter, values[i]);
    text += (text.empty() ? "" : ", ") + std::string(parameter.name) + "=" + TextOf(parameter, values[i], complete);
  }
  const std::shared_ptr<Node> node = builder.make(values);
  node->builder = builder.name;
  node->values = std::move(values);
  node->text = std::string(builder.name) + "(" + text + ")";
  node->key = complete ? node->text : OwnKey(node->text);
  for (const Value& value : node->values) {
    if (const auto* heads = std::get_if<std::vector<Pattern>>(&value)) SetDepth(*node, *heads);
  }
  return Pattern(node);
}

Pattern Build(std::string_view builder, std::vector<Value> values) {
  return Build(*FindBuilder(builder), std::move(values));
}

void CheckPattern(const char* op, const Pattern& pattern, const PatternCall& call) {
  PatternCall whole = call;
  if (whole.batches < 0) whole.batches = static_cast<int64_t>(call.starts.size());
  pattern.node()->Check(op, whole);
}

Pattern SlidingWindow(int64_t left, int64_t right) { return Build("sliding_window", {left, right}); }
Pattern Dilated(int64_t reach, int64_t step) { return Build("dilated", {reach, step}); }
Pattern Atrous(int64_t step) { return Build("atrous", {step}); }
Pattern Strided(int64_t step) { return Build("strided", {step}); }
Pattern Fixed(int64_t block, int64_t summary) { return Build("fixed", {block, summary}); }
Pattern GlobalTokens(const ConstTensorView& tokens) {
  return Build("global_tokens", {Copied("global_tokens", "tokens", tokens, false)});
}
Pattern Longformer(int64_t window, const ConstTensorView& tokens) {
  return Build("longformer", {window, Copied("longformer", "tokens", tokens, false)});
}
Pattern RandomBlocks(int64_t count, int64_t block, uint64_t seed) {
  return Build("random_blocks", {count, block, static_cast<int64_t>(seed)});
}
Pattern BigBird(int64_t block, int64_t random, uint64_t seed) {
  return Build("bigbird", {block, random, static_cast<int64_t>(seed)});
}
Pattern Streaming(int64_t sinks, int64_t window) { return Build("streaming", {sinks, window}); }
Pattern Neighborhood(int64_t window) { return Build("neighborhood", {window}); }
Pattern Blocks(const ConstTensorView& keep, int64_t rows, int64_t columns) {
  return Build("blocks", {Copied("blocks", "keep", keep, true), Table{{2}, {rows, columns}}});
}
Pattern Csr(const ConstTensorView& row_ptr, const ConstTensorView& columns, int64_t rows, int64_t columns_of_block) {
  return Build("csr", {Copied("csr", "row_ptr", row_ptr, false), Copied("csr", "columns", columns, false),
                       Table{{2}, {rows, columns_of_block}}});
}
Pattern RowBlocks(const ConstTensorView& index, int64_t block) {
  return Build("row_blocks", {Copied("row_blocks", "index", index, false), block});
}
Pattern Keys(const ConstTensorView& index) { return Build("keys", {Copied("keys", "index", index, false)}); }
Pattern PerHead(const std::vector<Pattern>& heads) { return Build("per_head", {heads}); }

}  // namespace patterns

std::string Pattern::ToString() const { return present() ? node_->text : ""; }

bool operator==(const Pattern& a, const Pattern& b) {
  if (!a.present() || !b.present()) return a.present() == b.present();
  return a.node()->key == b.node()->key;
}
Pattern operator|(const Pattern& a, const Pattern& b) { return patterns::Combined("|", a, b); }
Pattern operator&(const Pattern& a, const Pattern& b) { return patterns::Combined("&", a, b); }

namespace {

// Throws InvalidArgument of `op` unless the numbers of a call are valid and the pattern fits it.
void CheckCall(const char* op, const Pattern& pattern, const PatternCall& call) {
  const auto refuse = [&](const char* name, const std::string& got, const std::string& expected) {
    throw InvalidArgument(std::string(op) + ": " + name + " " + got + ", expected " + expected);
  };
  const auto check = [&](const char* name, int64_t x, int64_t least) {
    const std::string most = " to " + std::to_string(patterns::kLargest);
    if (x < least || x > patterns::kLargest) refuse(name, "is " + std::to_string(x), std::to_string(least) + most);
  };
  if (!pattern.present()) refuse("pattern", "is absent", "one");
  check("Tq", call.Tq, 0);
  check("Tk", call.Tk, 0);
  check("query_heads", call.query_heads, 1);
  check("key_heads", call.key_heads, 1);
  if (call.query_heads % call.key_heads != 0) {
    refuse("query_heads", "is " + std::to_string(call.query_heads), "a multiple of " + std::to_string(call.key_heads));
  }
  for (const int64_t start : call.starts) check("starts", start, -patterns::kLargest);
  check("batch", call.batch, 0);
  const int64_t entries = call.batch + std::ssize(call.starts);
  if (call.batches != -1) check("batches", call.batches, entries);
  patterns::CheckPattern(op, pattern, call);
}

// Calls f(batch, head, row, tile's first key, word) for rows of the call and tiles in which they keep a key.
template <class F>
void ForWords(const softmax::BlockSparseMask& mask, const PatternCall& call, const F& f) {
  for (int64_t b = 0; b < static_cast<int64_t>(call.starts.size()); ++b) {
    for (int64_t head = 0; head < call.query_heads; ++head) {
      for (int64_t row = 0; row < call.Tq; ++row) {
        for (const softmax::MaskTile& entry : mask.Of(b, head, row)) {
          f(b, head, row, entry.tile * patterns::kTile, mask.WordOf(entry, row));
        }
      }
    }
  }
}

// The bits of keys up to Tk, and up to the row's own position if `causal`.
uint64_t Allowed(const PatternCall& call, int64_t batch, int64_t row, int64_t begin, bool causal) {
  const int64_t position = call.starts[static_cast<size_t>(batch)] + row;
  const int64_t end = std::min({begin + patterns::kTile, call.Tk, causal ? position + 1 : call.Tk});
  return end <= begin ? 0 : ~uint64_t{0} >> (begin + patterns::kTile - end);
}

}  // namespace

void Mask(const Pattern& pattern, const PatternCall& call, bool causal, const TensorView& keep) {
  CheckCall("mask", pattern, call);
  const std::vector<int64_t> shape = {static_cast<int64_t>(call.starts.size()), call.query_heads, call.Tq, call.Tk};
  if (keep.dtype() != DType::kBool || !std::ranges::equal(keep.sizes(), shape)) {
    throw InvalidArgument("mask: keep has shape " + keep.ShapeString() + " and dtype " + Name(keep.dtype()) +
                          ", expected " + ShapeString(shape) + " and bool");
  }
  const auto at = [&](int64_t b, int64_t head, int64_t row, int64_t key) {
    return static_cast<uint8_t*>(keep.data()) + b * keep.stride(0) + head * keep.stride(1) + row * keep.stride(2) +
           key * keep.stride(3);
  };
  for (int64_t b = 0; b < shape[0]; ++b) {
    for (int64_t head = 0; head < shape[1]; ++head) {
      for (int64_t row = 0; row < call.Tq; ++row) {
        for (int64_t key = 0; key < call.Tk; ++key) *at(b, head, row, key) = 0;
      }
    }
  }
  ForWords(*patterns::Compile(pattern, call), call,
           [&](int64_t b, int64_t head, int64_t row, int64_t begin, uint64_t word) {
             word &= Allowed(call, b, row, begin, causal);
             for (; word != 0; word &= word - 1) *at(b, head, row, begin + std::countr_zero(word)) = 1;
           });
}

double Density(const Pattern& pattern, const PatternCall& call, bool causal) {
  CheckCall("density", pattern, call);
  double kept = 0, all = 0;
  ForWords(*patterns::Compile(pattern, call), call, [&](int64_t b, int64_t, int64_t row, int64_t begin, uint64_t word) {
    kept += std::popcount(word & Allowed(call, b, row, begin, causal));
  });
  for (const int64_t start : call.starts) {
    for (int64_t row = 0; row < call.Tq; ++row) {
      all += static_cast<double>(causal ? std::clamp<int64_t>(start + row + 1, 0, call.Tk) : call.Tk);
    }
  }
  all *= static_cast<double>(call.query_heads);
  return all > 0 ? kept / all : 0;
}

}  // namespace heed
