// The options of attention, one row each, in the order of Python's keywords: the properties of every option that
// checks, cases, bindings and fuzzing use. A field of Options without a row does not compile.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTENTION_OPTIONS_INTERNAL_H_
#define HEED_OPS_EXACT_ATTENTION_ATTENTION_OPTIONS_INTERNAL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "heed/ops/exact/attention/attention.h"

namespace heed::attention {

// A field by its type, which determines its keyword, default, schema and title.
using OptionField =
    std::variant<bool Options::*, double Options::*, std::optional<double> Options::*, int64_t Options::*,
                 uint32_t Options::*, uint64_t Options::*, Align Options::*, Window Options::*, Precision Options::*,
                 Pattern Options::*, ConstTensorView Options::*>;

// Rules that hold for some options; the opposite holds for the others.
enum OptionRule : unsigned {
  kZeroIsNone = 1,  // the number 0 stands for an absent option
  kPadded = 2,      // packed calls refuse it
  kByPlace = 4,     // depends on key positions, which a ring that rotates keys by index does not store
  kAnyResidue = 8,  // unchanged where only every n-th position remains
};

enum class Holds { kNoTensor, kBools, kInts, kFloats };

struct OptionRow {
  const char* name;
  OptionField field;
  unsigned rules = 0;
  int place = 1000;  // place in PyTorch's schema; saved programs depend on it, so new options have none and come last
  // Contents of a tensor and its axes, which are the last ones: leading ones may be absent, and any of BHQK may be 1. B
  // sequences, Q queries, K keys, H query heads, N boundaries between sequences, D distances.
  Holds holds = Holds::kNoTensor;
  std::string_view axes = "";
  const char* not_on_cache = nullptr;   // why a cache refuses it
  const char* gradient_name = nullptr;  // name of the gradient, if the tensor has one
  TensorView Gradients::* gradient = nullptr;
  std::array<double, 5> tried = {};  // values that random calls use; all 0 for options that are not a number

  bool Is(OptionRule rule) const { return (rules & rule) != 0; }
  bool Has(char axis) const { return axes.find(axis) != axes.npos; }
  bool Broadcasts() const { return axes == "BHQK"; }
  bool takes_number() const { return tried != decltype(tried)(); }
};

#define HEED_OPTION(x) .name = #x, .field = &Options::x
#define HEED_GRADIENT(x) .gradient_name = #x, .gradient = &Gradients::x
inline constexpr char kCacheKnows[] = "the cache knows it", kNotTrained[] = "nothing is trained on a cache";
inline constexpr OptionRow kOptionRows[] = {
    {HEED_OPTION(scale), .rules = kAnyResidue, .place = 0, .tried = {1, -0.3, 0, 0.125, 2.5}},
    {HEED_OPTION(causal), .rules = kAnyResidue, .place = 1},
    {HEED_OPTION(align), .rules = kAnyResidue, .place = 2, .not_on_cache = kCacheKnows},
    {HEED_OPTION(query_starts), .rules = kAnyResidue, .place = 4, .holds = Holds::kInts, .axes = "B",
     .not_on_cache = kCacheKnows},
    {HEED_OPTION(window), .place = 3},
    {HEED_OPTION(sink_tokens), .rules = kAnyResidue, .place = 17},
    {HEED_OPTION(prefix), .rules = kPadded | kByPlace, .place = 15, .holds = Holds::kInts, .axes = "B"},
    {HEED_OPTION(chunk), .rules = kZeroIsNone | kByPlace, .place = 16},
    {HEED_OPTION(segments_q), .rules = kPadded | kByPlace, .place = 13, .holds = Holds::kInts, .axes = "BQ"},
    {HEED_OPTION(segments_k), .rules = kPadded | kByPlace, .place = 14, .holds = Holds::kInts, .axes = "BK"},
    {HEED_OPTION(key_lengths), .rules = kPadded | kAnyResidue, .place = 9, .holds = Holds::kInts, .axes = "B",
     .not_on_cache = kCacheKnows},
    {HEED_OPTION(key_starts), .rules = kPadded | kByPlace | kAnyResidue, .place = 10, .holds = Holds::kInts,
     .axes = "B"},
    {HEED_OPTION(query_lengths), .rules = kPadded | kAnyResidue, .place = 11, .holds = Holds::kInts, .axes = "B",
     .not_on_cache = kCacheKnows},
    {HEED_OPTION(mask), .rules = kPadded | kByPlace, .place = 12, .holds = Holds::kBools, .axes = "BHQK"},
    {HEED_OPTION(bias), .rules = kPadded | kByPlace, .place = 5, .holds = Holds::kFloats, .axes = "BHQK",
     HEED_GRADIENT(dbias)},
    {HEED_OPTION(alibi), .rules = kByPlace, .place = 7, .holds = Holds::kFloats, .axes = "BH", HEED_GRADIENT(dalibi)},
    {HEED_OPTION(relative_bias), .rules = kByPlace, .holds = Holds::kFloats, .axes = "HD",
     HEED_GRADIENT(drelative_bias)},
    {HEED_OPTION(softcap), .rules = kZeroIsNone | kAnyResidue, .place = 8, .tried = {1, 5, 30, 50, 30}},
    {HEED_OPTION(sinks), .rules = kAnyResidue, .place = 6, .holds = Holds::kFloats, .axes = "H", HEED_GRADIENT(dsinks)},
    {HEED_OPTION(log_decay), .place = 21, .holds = Holds::kFloats, .axes = "BKH",
     .not_on_cache = "a cache with log_decay_heads keeps them", HEED_GRADIENT(dlog_decay)},
    {HEED_OPTION(pattern), .rules = kAnyResidue, .place = 24},
    {HEED_OPTION(dropout), .place = 18, .not_on_cache = kNotTrained, .tried = {0.1, 0.5, 0.9, 1e-3, 1e-12}},
    {HEED_OPTION(seed), .rules = kAnyResidue, .place = 19, .not_on_cache = kNotTrained},
    {HEED_OPTION(dropout_offset), .rules = kAnyResidue, .place = 20, .not_on_cache = kNotTrained},
    {HEED_OPTION(cu_seqlens_q), .rules = kAnyResidue, .place = 22, .holds = Holds::kInts, .axes = "N",
     .not_on_cache = kCacheKnows},
    {HEED_OPTION(cu_seqlens_k), .rules = kAnyResidue, .place = 23, .holds = Holds::kInts, .axes = "N",
     .not_on_cache = kCacheKnows},
    {HEED_OPTION(precision), .rules = kAnyResidue, .place = 25},
    {HEED_OPTION(invariant), .place = 26},
};
#undef HEED_OPTION
#undef HEED_GRADIENT

namespace internal {

struct AnyField {
  template <class T>
    requires(!std::is_same_v<T, Options>)
  operator T() const;
};

template <size_t... I>
constexpr bool OptionsHave(std::index_sequence<I...>) {
  return requires { Options{(static_cast<void>(I), AnyField())...}; };
}

constexpr bool AllDiffer() {
  for (const OptionRow& a : kOptionRows) {
    for (const OptionRow& b : kOptionRows) {
      if (&a != &b && std::string_view(a.name) == b.name) return false;
    }
  }
  return true;
}

constexpr size_t kNumRows = std::size(kOptionRows);
static_assert(OptionsHave(std::make_index_sequence<kNumRows>()) && AllDiffer() &&
                  !OptionsHave(std::make_index_sequence<kNumRows + 1>()),
              "kOptionRows has one row for each field of Options");

}  // namespace internal

// True if an option differs from its default. A seed or offset belongs to dropout and does not count alone.
inline bool IsGiven(const OptionRow& row, const Options& options) {
  return std::visit(
      [&]<class T>(T Options::* field) {
        const T& value = options.*field;
        if constexpr (std::is_same_v<T, Window>) {
          return value.left >= 0 || value.right >= 0;
        } else if constexpr (std::is_same_v<T, ConstTensorView> || std::is_same_v<T, Pattern>) {
          return value.present();
        } else if constexpr (std::is_same_v<T, uint64_t> || std::is_same_v<T, uint32_t>) {
          return false;
        } else {
          return value != T();
        }
      },
      row.field);
}

inline void SetNumber(const OptionRow& row, double value, Options* options) {
  std::visit(
      [&]<class T>(T Options::* field) {
        if constexpr (std::is_same_v<T, double> || std::is_same_v<T, std::optional<double>>) options->*field = value;
      },
      row.field);
}

// Calls f(row, view) for every tensor of some options, present or not.
template <class AnyOptions, class F>
void ForEachTensor(AnyOptions& options, const F& f) {
  for (const OptionRow& row : kOptionRows) {
    if (const auto* field = std::get_if<ConstTensorView Options::*>(&row.field)) f(row, options.**field);
  }
}

// The rows in the order of PyTorch's schema, which is also the order of gradients.
inline const auto& OptionsInSchema() {
  static const auto rows = [] {
    std::array<const OptionRow*, std::size(kOptionRows)> all;
    for (size_t i = 0; i < all.size(); ++i) all[i] = &kOptionRows[i];
    std::ranges::stable_sort(all, {}, &OptionRow::place);
    return all;
  }();
  return rows;
}

// Calls f(name, gradient, name of its input, input) for every gradient of a call, whether its input is present or not.
template <class F>
void ForEachGradient(const Inputs& in, const Options& options, const F& f) {
  f("dq", &Gradients::dq, "q", in.q);
  f("dk", &Gradients::dk, "k", in.k);
  f("dv", &Gradients::dv, "v", in.v);
  for (const OptionRow* row : OptionsInSchema()) {
    if (row->gradient == nullptr) continue;
    f(row->gradient_name, row->gradient, row->name, options.*std::get<ConstTensorView Options::*>(row->field));
  }
}

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_OPTIONS_INTERNAL_H_
