// Converts bytes to sizes, layouts, values and options. The expected refusals are decided here from the header's text,
// not by asking the library.
#include "tests/fuzz/attention_call.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

#include "heed/ops/exact/attention/attention_options_internal.h"
#include "heed/patterns/pattern_case.h"
#include "tests/fuzz/tensors.h"

namespace heed::fuzz {
namespace {

using attention::Align;
using attention::Options;
using attention::Precision;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kMaxPosition = int64_t{1} << 61;
// One execution should take tens of microseconds; one in eight may be larger.
constexpr int64_t kMaxPairs = 80, kMaxProducts = 600, kLarger = 8;

// Mistakes in the tensors themselves; most calls have none.
enum class Mistake {
  kNone,
  kShape,
  kRank,
  kDType,
  kStride,
  kDevice,
  kAlignment,
  kNull,
  kAbsent,
  kOverlap,
  kSelfOverlap,
  kCount
};

class Maker {
 public:
  Maker(Input& input, Slots& slots) : in_(input), slots_(slots) {}

  Call Make() {
    ChooseSizes();
    ChooseMistake();
    MakeTensors();
    ChooseScalars();
    ChoosePositions();
    if (packed_) MakePacking();
    MakePaddedOptions();
    MakeTerms();
    if (in_.OneIn(6)) MakePattern();
    call_.problem.note = call_.mistake.empty() ? "" : "mistake: " + call_.mistake;
    return call_;
  }

 private:
  Options& options() { return call_.problem.options; }
  void Wrong(const char* what) { call_.mistake = what; }
  void WrongUnless(bool right, const char* what) {
    if (!right) Wrong(what);
  }

  void ChooseSizes() {
    constexpr int64_t kTokens[] = {1, 2, 3, 4, 5, 7, 8, 9, 0, 15, 16, 17, 31, 33, 63, 64, 65, 66, 128, 130, 513, 520};
    constexpr int64_t kChannels[] = {1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 33, 64};
    constexpr int64_t kBatches[] = {1, 2, 1, 3, 1, 2, 0, 5};
    constexpr int64_t kHeads[] = {1, 2, 3, 1, 2, 1, 3, 0};
    constexpr int64_t kGroups[] = {1, 2, 1, 3, 4, 8, 1, 5};
    B_ = in_.Pick(kBatches);
    Tq_ = in_.Pick(kTokens);
    Tk_ = in_.OneIn(3) ? Tq_ : in_.Pick(kTokens);
    Hkv_ = in_.Pick(kHeads);
    group_ = in_.Pick(kGroups);
    D_ = in_.Pick(kChannels);
    Dv_ = in_.OneIn(2) ? D_ : in_.Pick(kChannels);
    size_ = in_.OneIn(8) ? kLarger : 1;
    // Shrinks the problem until it is cheap: batch, heads, then tokens and channels.
    while (Cost() > static_cast<double>(size_)) {
      if (B_ > 1) {
        --B_;
      } else if (group_ > 1) {
        --group_;
      } else if (Hkv_ > 1) {
        --Hkv_;
      } else if (std::max(Tq_, Tk_) > 3 * std::max(D_, Dv_)) {
        (Tq_ > Tk_ ? Tq_ : Tk_) /= 2;
      } else {
        (D_ > Dv_ ? D_ : Dv_) /= 2;
      }
    }
    packed_ = in_.OneIn(5);
    flat_ = packed_ && in_.OneIn(2);  // lacks the axis of size 1
    if (packed_) sequences_ = in_.Below(4);
    constexpr DType kDTypes[] = {DType::kF32, DType::kF64, DType::kF32, DType::kBF16,
                                 DType::kF32, DType::kF64, DType::kF16, DType::kF32};
    dtype_ = in_.Pick(kDTypes);
  }

  double Cost() const {
    const double heads = static_cast<double>(B_ * Hkv_ * group_);
    const double pairs = heads * static_cast<double>(std::max<int64_t>(Tq_, 1) * std::max<int64_t>(Tk_, 1));
    return std::max(pairs / kMaxPairs, pairs * static_cast<double>(D_ + Dv_) / kMaxProducts);
  }

  // Outer axes in any order, with gaps, repeated or reversed; the last axis has stride 1 where that is required.
  std::vector<int64_t> Strides(const std::vector<int64_t>& sizes, bool is_input, bool rows) {
    const size_t rank = sizes.size();
    std::vector<int64_t> strides(rank);
    std::vector<size_t> order(rank);
    for (size_t i = 0; i < rank; ++i) order[i] = rank - 1 - i;
    const bool any = in_.OneIn(3);
    const size_t first = rows ? 1 : 0;
    if (any && rank > first + 1) {
      const auto begin = order.begin() + static_cast<ptrdiff_t>(first);
      std::rotate(begin, begin + in_.Below(static_cast<int64_t>(rank - first)), order.end());
    }
    int64_t next = 1;
    for (size_t i = 0; i < rank; ++i) {
      const size_t axis = order[i];
      const int64_t choice = any && i >= first ? in_.Below(16) : 0;
      if (choice >= 10) next += choice - 9;
      strides[axis] = next;
      next *= std::max<int64_t>(sizes[axis], 1);
      if (is_input && choice == 8) strides[axis] = 0;
      if (is_input && choice == 9) strides[axis] = -strides[axis];
    }
    return strides;
  }

  TensorView Place(DType dtype, const std::vector<int64_t>& sizes, bool is_input = true, bool rows = false) {
    const auto strides = Strides(sizes, is_input, rows);
    return slots_.Next().Place(dtype, sizes, strides, !in_.OneIn(3));
  }

  uint32_t Word() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 32);
  }

  // A cheap number with about the spread of N(0, 1): a sum of two uniform numbers.
  double Value() {
    const uint32_t word = Word();
    return (static_cast<double>(word & 0xFFFF) + (word >> 16)) / 26755 - 2.4494;
  }

  std::vector<int64_t> Shape(int64_t T, int64_t H, int64_t D) const {
    if (flat_) return {T, H, D};
    return {packed_ ? 1 : B_, T, H, D};
  }

  void ChooseMistake() {
    if (!in_.OneIn(4)) return;
    mistake_ = static_cast<Mistake>(in_.Below(static_cast<int64_t>(Mistake::kCount)));
    victim_ = static_cast<int>(in_.Below(5));  // q, k, v, o, lse
  }

  // Applies this call's mistake to `view`, if it is the victim and the mistake is possible.
  TensorView Spoil(const char* name, int number, const TensorView& view) {
    if (victim_ != number) return view;
    std::vector<int64_t> sizes(view.sizes().begin(), view.sizes().end());
    std::vector<int64_t> strides(view.strides().begin(), view.strides().end());
    DType dtype = view.dtype();
    uint8_t* data = view.as<uint8_t>();
    Device device;
    const bool empty = view.num_elements() == 0;
    switch (mistake_) {
      case Mistake::kShape: sizes[static_cast<size_t>(in_.Below(view.rank()))] += 1; break;
      case Mistake::kRank:
        sizes.push_back(1);
        strides.push_back(1);
        break;
      case Mistake::kDType:  // any other size of element, or an integer
        dtype = dtype == DType::kI32 || in_.OneIn(2) ? DType::kBool : DType::kI32;
        break;
      case Mistake::kStride:
        if (sizes.back() < 2 || number == 4) return view;
        strides.back() = 2;
        break;
      case Mistake::kDevice: device.type = DeviceType::kCuda; break;
      case Mistake::kAlignment:
        if (empty) return view;
        ++data;
        break;
      case Mistake::kNull:
        if (empty) return view;
        data = nullptr;
        break;
      case Mistake::kAbsent:
        if (number == 4) return view;
        Wrong(name);
        return {};
      case Mistake::kOverlap:
        if (empty || number < 3 || call_.problem.in.q.num_elements() == 0) {
          return view;
        }
        data = const_cast<uint8_t*>(call_.problem.in.q.as<uint8_t>());
        break;
      case Mistake::kSelfOverlap: {
        const size_t axis = static_cast<size_t>(in_.Below(view.rank()));
        if (empty || number < 3 || sizes[axis] < 2) return view;
        strides[axis] = 0;
        break;
      }
      default: return view;
    }
    Wrong(name);
    return TensorView(data, dtype, sizes, strides, device);
  }

  void MakeTensors() {
    state_ = in_.Raw<uint16_t>();
    constexpr double kDeviations[] = {1, 1, 4, 0.01, 1, 12, 0, 1};
    const double deviation = in_.Pick(kDeviations);
    const int64_t Hq = Hkv_ * group_;
    // Slots 0 and 1 belong to the outputs.
    const auto o_shape = Shape(Tq_, Hq, Dv_);
    const auto lse_shape = packed_ ? std::vector<int64_t>{Hq, Tq_} : std::vector<int64_t>{B_, Hq, Tq_};
    const DType wide = dtype_ == DType::kF64 ? DType::kF64 : DType::kF32;
    call_.o = Place(dtype_, o_shape, false, true);
    call_.lse = Place(wide, lse_shape, false, false);
    const TensorView q = Place(dtype_, Shape(Tq_, Hq, D_), true, true);
    const TensorView k = Place(dtype_, Shape(Tk_, Hkv_, D_), true, true);
    const TensorView v = Place(dtype_, Shape(Tk_, Hkv_, Dv_), true, true);
    Each(q, [&] { return deviation * Value(); });
    Each(k, [&] { return Value(); });
    Each(v, [&] { return Value(); });
    if (in_.OneIn(10)) {  // one element that is not finite
      const TensorView views[] = {q, k, v};
      const int64_t which = in_.Below(3);
      const TensorView& view = views[which];
      std::vector<int64_t> at;
      for (const int64_t size : view.sizes()) {
        at.push_back(size > 0 ? in_.Below(size > 256 ? 256 : size) : 0);
      }
      constexpr double kSpecial[] = {kNaN, kInfinity, -kInfinity};
      // An infinite v times a weight that underflows in f32 alone would give different results.
      const double value = which == 2 ? kNaN : in_.Pick(kSpecial);
      if (view.num_elements() > 0) SetElement(view, at, value);
    }
    attention::Inputs& in = call_.problem.in;
    in.q = q;
    in.q = Spoil("q", 0, q);
    in.k = Spoil("k", 1, k);
    in.v = Spoil("v", 2, v);
    call_.o = Spoil("o", 3, call_.o);
    if (in_.OneIn(6)) {
      call_.lse = TensorView();
    } else {
      call_.lse = Spoil("lse", 4, call_.lse);
    }
    call_.problem.o = {"o", dtype_, o_shape, {}};
    if (call_.lse) call_.problem.lse = {"lse", wide, lse_shape, {}};
  }

  // A small number, rarely any number.
  int64_t Integer(int64_t low, int64_t high) {
    if (in_.OneIn(12)) {
      constexpr auto kLimits = std::numeric_limits<int64_t>();
      const int64_t edges[] = {-2, low - 1, high + 1, kLimits.min(), kLimits.max(), kMaxPosition + 1, -1, 0};
      return in_.OneIn(2) ? in_.Raw<int64_t>() : in_.Pick(edges);
    }
    return low + in_.Below(std::min<int64_t>(high - low + 1, 256));
  }

  // Mostly a value that is also tried elsewhere, sometimes any. For an option that is not handled below, acceptance and
  // refusal are both right.
  void ChooseNumber(const attention::OptionRow& row) {
    if (!in_.OneIn(5)) return;
    double value = row.tried[static_cast<size_t>(in_.Below(std::ssize(row.tried)))];
    if (in_.OneIn(3)) {
      value = in_.Raw<double>();
      WrongUnless(std::isfinite(value), row.name);
      const std::string_view name = row.name;
      if (name != "scale" && name != "softcap" && name != "dropout") call_.doubtful = call_.extreme = true;
    }
    attention::SetNumber(row, value, &options());
  }

  void ChooseScalars() {
    Options& o = options();
    const bool wide = dtype_ == DType::kF64;
    const double limit = wide ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
    const double smallest = wide ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
    for (const attention::OptionRow& row : attention::kOptionRows) {
      if (row.takes_number()) ChooseNumber(row);
    }
    // Numbers that are invalid or extreme although they are finite.
    if (o.scale && std::abs(*o.scale) > limit) call_.doubtful = true;
    const double size = std::abs(o.scale.value_or(1));
    if (size > 4 || (size > 0 && size < 1e-20)) call_.extreme = true;
    WrongUnless(o.softcap >= 0, "softcap");
    if (o.softcap != 0 && (o.softcap < smallest || o.softcap > limit)) call_.doubtful = true;
    if (o.softcap != 0 && (o.softcap < 0.25 || o.softcap > 1e4)) call_.extreme = true;
    WrongUnless(o.dropout >= 0 && o.dropout < 1, "dropout");
    if (o.dropout != 0) {
      o.seed = in_.Raw<uint64_t>();
      o.dropout_offset = in_.Raw<uint32_t>();
    }
    o.causal = in_.OneIn(2);
    if (in_.OneIn(3)) o.align = Align::kTopLeft;
    if (in_.OneIn(3)) o.window.left = Integer(0, in_.OneIn(3) ? 70 : 5);
    if (in_.OneIn(3)) o.window.right = Integer(0, in_.OneIn(3) ? 70 : 5);
    WrongUnless(o.window.left >= -1 && o.window.right >= -1, "window");
    if (in_.OneIn(5)) o.sink_tokens = Integer(0, 9);
    WrongUnless(o.sink_tokens >= 0, "sink_tokens");
    if (in_.OneIn(5)) o.chunk = Integer(1, 20);
    WrongUnless(o.chunk >= 0, "chunk");
    if (in_.OneIn(5)) o.precision = Precision::kHigh;
    o.invariant = in_.OneIn(4);
  }

  DType IntegerType() { return in_.OneIn(2) ? DType::kI32 : DType::kI64; }
  int64_t Sequences() const { return packed_ ? sequences_ : B_; }

  // [B] integers, nearly always in [low, high], the allowed range.
  TensorView PerSequence(const char* name, DType dtype, int64_t low, int64_t high, int64_t usual_low,
                         int64_t usual_high) {
    int64_t count = Sequences();
    if (in_.OneIn(40)) {
      ++count;
      Wrong(name);
    }
    if (in_.OneIn(40)) {
      dtype = DType::kF32;
      Wrong(name);
    }
    const TensorView view = Place(dtype, {count});
    std::vector<int64_t> values;
    const bool repeats = count > 0 && view.stride(0) == 0;
    for (int64_t i = 0; i < count; ++i) {
      int64_t value = Integer(usual_low, usual_high);
      if (dtype == DType::kI32) value = static_cast<int32_t>(value);
      if (repeats && i > 0) value = values[0];
      values.push_back(value);
      if (dtype != DType::kF32) {
        WrongUnless(value >= low && value <= high, name);
        StoreInteger(view, i, value);
      }
    }
    return view;
  }

  void ChoosePositions() {
    if (!in_.OneIn(6)) return;
    DType dtype = DType::kI64;
    if (in_.OneIn(40)) {
      dtype = DType::kI32;
      Wrong("query_starts");
    }
    const TensorView starts = PerSequence("query_starts", dtype, -kMaxPosition, kMaxPosition, -Tq_ - 3, Tk_ + 3);
    options().query_starts = starts;
    if (starts.dtype() != DType::kI64) return;
    for (int64_t b = 0; b < starts.size(0); ++b) {
      far_ = far_ || std::abs(starts.as<int64_t>()[b * starts.stride(0)] / 2) > 100000;
    }
  }

  TensorView Boundaries(const char* name, int64_t total) {
    int64_t count = sequences_ + 1;
    if (in_.OneIn(40)) {
      ++count;
      Wrong(name);  // one more than the other has, or than the other tensors' B
      mismatch_ = true;
    }
    const int64_t stride = in_.OneIn(4) ? 2 : 1;
    const TensorView view = slots_.Next().Place(IntegerType(), {count}, {stride}, !in_.OneIn(3));
    std::vector<int64_t> cuts = {0};
    while (static_cast<int64_t>(cuts.size()) < count) {
      cuts.push_back(in_.Below(std::min<int64_t>(total, 255) + 1));
    }
    std::sort(cuts.begin(), cuts.end());
    if (in_.OneIn(30)) {
      int64_t& cut = cuts[static_cast<size_t>(in_.Below(count))];
      cut = in_.Raw<int64_t>();
      if (view.dtype() == DType::kI32) cut = static_cast<int32_t>(cut);
    }
    WrongUnless(cuts[0] == 0 && cuts.back() <= total && std::is_sorted(cuts.begin(), cuts.end()), name);
    for (int64_t i = 0; i < count; ++i) StoreInteger(view, i, cuts[static_cast<size_t>(i)]);
    return view;
  }

  void MakePacking() {
    Options& o = options();
    const bool same = Tq_ == Tk_ && in_.OneIn(2);
    o.cu_seqlens_q = Boundaries("cu_seqlens_q", Tq_);
    if (!same) {
      const bool before = mismatch_;
      o.cu_seqlens_k = Boundaries("cu_seqlens_k", Tk_);
      if (before && o.cu_seqlens_q.size(0) == o.cu_seqlens_k.size(0)) {
        call_.doubtful = true;  // both are longer, and equal
      }
    } else if (mismatch_) {
      call_.doubtful = true;  // B follows from it
    }
    if (in_.OneIn(60)) {
      o.cu_seqlens_q = {};
      if (o.cu_seqlens_k) {
        Wrong("cu_seqlens_k");
      } else {
        call_.doubtful = true;
      }
    }
  }

  // True if an option of padded calls is set. Packed calls must refuse it, so they seldom set it.
  bool Chosen(int64_t n, const char* name) {
    if (!in_.OneIn(packed_ ? 60 : n)) return false;
    if (packed_) Wrong(name);
    return true;
  }

  void MakePaddedOptions() {
    Options& o = options();
    if (Chosen(5, "key_lengths")) {
      o.key_lengths = PerSequence("key_lengths", IntegerType(), 0, Tk_, 0, Tk_);
    }
    if (Chosen(5, "key_starts")) {
      o.key_starts = PerSequence("key_starts", IntegerType(), 0, Tk_, 0, Tk_);
    }
    if (Chosen(6, "query_lengths")) {
      o.query_lengths = PerSequence("query_lengths", IntegerType(), 0, Tq_, 0, Tq_);
    }
    if (Chosen(6, "prefix")) {
      o.prefix = PerSequence("prefix", IntegerType(), 0, kMaxPosition, 0, Tk_ + 2);
    }
    if (Chosen(6, "segments")) MakeSegments();
    if (Chosen(5, "mask")) {
      DType dtype = DType::kBool;
      if (in_.OneIn(40)) {
        dtype = DType::kF32;
        Wrong("mask");
      }
      const TensorView mask = Broadcast("mask", dtype);
      const int64_t keep = in_.Below(16);
      Each(mask, [&] { return Value() < 0.4 * static_cast<double>(keep - 8); });
      o.mask = mask;
    }
    if (Chosen(4, "bias")) MakeBias();
  }

  void MakeSegments() {
    const auto ids = [&](int64_t T) {
      std::vector<int64_t> sizes = {B_, T};
      if (in_.OneIn(40)) {
        ++sizes[1];
        Wrong("segments");
      }
      const TensorView view = Place(IntegerType(), sizes);
      Each(view, [&] { return std::floor(Value()) + 1; });
      if (in_.OneIn(12) && view.num_elements() > 0) {
        const int64_t id = in_.Raw<int32_t>() * (int64_t{1} << in_.Below(3));
        if (view.dtype() == DType::kI64 && std::abs(id) < (int64_t{1} << 33)) {
          view.as<int64_t>()[0] = id;
          WrongUnless(id < (int64_t{1} << 31), "segments");
        }
      }
      return view;
    };
    options().segments_q = ids(Tq_);
    options().segments_k = ids(Tk_);
    if (in_.OneIn(40)) {
      (in_.OneIn(2) ? options().segments_q : options().segments_k) = {};
      Wrong("segments");
    }
  }

  TensorView Broadcast(const char* name, DType dtype) {
    std::vector<int64_t> sizes = {packed_ ? 1 : B_, Hkv_ * group_, Tq_, Tk_};
    sizes.erase(sizes.begin(), sizes.begin() + in_.Pick({0, 0, 1, 2, 3, 4}));
    const auto whole = sizes;
    const auto ones = in_.Raw<uint8_t>();
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (ones >> i & 1) sizes[i] = 1;
    }
    if (in_.OneIn(40) && !sizes.empty()) {
      const auto axis = static_cast<size_t>(in_.Below(static_cast<int64_t>(sizes.size())));
      sizes[axis] = whole[axis] + 2;  // neither 1 nor the right size
      Wrong(name);
    }
    return Place(dtype, sizes);
  }

  DType FloatType() {
    constexpr DType kDTypes[] = {DType::kF32, DType::kF64, DType::kBF16, DType::kF16};
    return in_.OneIn(2) ? dtype_ : in_.Pick(kDTypes);
  }

  // Sometimes a dtype that is not a float.
  DType TermType(const char* name) {
    if (!in_.OneIn(40)) return FloatType();
    Wrong(name);
    return DType::kI32;
  }

  void MakeBias() {
    const DType dtype = TermType("bias");
    const TensorView bias = Broadcast("bias", dtype);
    options().bias = bias;
    if (!IsFloat(dtype)) return;
    // The most negative number of the narrower of the bias and the computation.
    double lowest = -std::numeric_limits<float>::max();
    if (dtype == DType::kF64 && dtype_ == DType::kF64) {
      lowest = -std::numeric_limits<double>::max();
    }
    if (dtype == DType::kBF16) lowest = -0x1.FEp127;
    if (dtype == DType::kF16) lowest = -65504;
    constexpr double kBelow[] = {-9, -1, 0.5, 1};
    const double masked = in_.Pick(kBelow);
    const double special = in_.OneIn(3) ? lowest : -kInfinity;
    Each(bias, [&] {
      const double x = Value();
      return x < masked ? special : 3 * x;
    });
    if (in_.OneIn(30)) {
      call_.extreme = true;
      const double wild = in_.Raw<double>();
      Each(bias, [&] { return Value() < 0 ? wild : 0; });
    }
  }

  // Numbers per head: mostly some of `values`, sometimes any.
  TensorView PerHead(const char* name, std::vector<int64_t> sizes, std::span<const double> values) {
    const DType dtype = TermType(name);
    if (in_.OneIn(40)) {
      ++sizes.back();
      Wrong(name);
    }
    const TensorView view = Place(dtype, sizes);
    if (!IsFloat(dtype)) return view;
    Each(view, [&] { return values[static_cast<size_t>(in_.Below(static_cast<int64_t>(values.size())))]; });
    if (in_.OneIn(30)) {
      call_.extreme = true;
      Each(view, [&] { return in_.Raw<float>(); });
    }
    return view;
  }

  void MakeTerms() {
    constexpr double kSlopes[] = {0.5, 0.0625, 0.00390625, -0.03, 0.707, 0};
    constexpr double kDecays[] = {0, -0.001, -0.1, -3, -100, -1e4, -0.5, -kInfinity};
    constexpr double kSinks[] = {0, 1, -2.5, 5, kInfinity, -kInfinity, 40, -9};
    Options& o = options();
    const int64_t Hq = Hkv_ * group_;
    if (in_.OneIn(5) && !far_) {
      std::vector<int64_t> sizes = {Hq};
      if (in_.OneIn(3)) sizes.insert(sizes.begin(), Sequences());
      o.alibi = PerHead("alibi", sizes, kSlopes);
    }
    if (in_.OneIn(5)) {
      WrongUnless(o.causal, "log_decay");
      std::vector<int64_t> sizes = {Tk_, Hq};
      if (!packed_ || in_.OneIn(2)) sizes.insert(sizes.begin(), packed_ ? 1 : B_);
      o.log_decay = PerHead("log_decay", sizes, kDecays);
    }
    if (in_.OneIn(5)) o.sinks = PerHead("sinks", {Hq}, kSinks);
    if (in_.OneIn(5)) {
      const int64_t span = in_.OneIn(40) ? 0 : 1 + in_.Below(in_.OneIn(3) ? 90 : 9);
      WrongUnless(span > 0, "relative_bias");
      const TensorView view = Place(TermType("relative_bias"), {Hq, span});
      if (IsFloat(view.dtype())) Each(view, [&] { return kDecays[static_cast<size_t>(in_.Below(8))]; });
      o.relative_bias = view;
    }
  }

  void MakePattern() {
    const int64_t Hq = Hkv_ * group_;
    if (Hq == 0) return;
    // Packed calls refuse key lists by row.
    const PatternCall call = {packed_ ? -1 : Tq_, Tk_, Hq, Hkv_, {}, 0, Sequences()};
    state_ += in_.Raw<uint16_t>();
    options().pattern = patterns::RandomPattern(call, 2, [&](int64_t n) { return Word() % n; });
  }

  Input& in_;
  Slots& slots_;
  Call call_;
  int64_t B_ = 1, Tq_ = 1, Tk_ = 1, Hkv_ = 1, group_ = 1, D_ = 1, Dv_ = 1;
  int64_t sequences_ = 1, size_ = 1;
  bool packed_ = false, flat_ = false, mismatch_ = false;
  bool far_ = false;  // positions so large that a logit with ALiBi has no accurate digits
  DType dtype_ = DType::kF32;
  Mistake mistake_ = Mistake::kNone;
  int victim_ = 0;
  uint64_t state_ = 0;
};

}  // namespace

Call MakeCall(Input& input, Slots& slots) {
  slots.Clear();
  return Maker(input, slots).Make();
}

}  // namespace heed::fuzz
