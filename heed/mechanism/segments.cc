// Segments of tokens as maps of states. Everything here is as large as a state, and computed in f64.
#include "heed/mechanism/table_internal.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/mechanism/call_internal.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/define_internal.h"
#include "heed/mechanism/segments_internal.h"

namespace heed::mechanism {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The ways in which a segment changes a state.
enum class Kind {
  kDiagonal,  // every element has a factor; columns of S may share theirs
  kComplex,   // as above, for pairs of a real and an imaginary part
  kMatrix,    // delta rules: M S
  kRelative,  // a sum relative to the running maximum
  kMaximum,   // the running maximum itself, whose transition is a sum of log decays
  kTail,      // the last inputs of a filter: older ones are shifted out
};

bool HasMaximum(const Table& table) {
  return std::ranges::any_of(table.states, [](const StateTensor& s) { return s.role == StateTensor::kMaximum; });
}

Kind KindOf(const Table& table, const StateTensor& state) {
  const std::string_view axes = state.axes;
  if (axes.find('w') != std::string_view::npos) return Kind::kTail;
  if (state.role == StateTensor::kMaximum) return Kind::kMaximum;
  if (HasMaximum(table)) return Kind::kRelative;
  if (axes.back() == '2') return Kind::kComplex;
  return IsDelta(table) ? Kind::kMatrix : Kind::kDiagonal;
}

// The tensor whose rows are written to the state.
const Tensor& ValueOf(const Table& table) {
  if (const Tensor* const value = table.Find(Role::kValue)) return *value;
  const Tensor* const input = table.Find(Role::kInput);
  return input == nullptr ? table.tensors[0] : *input;
}

bool HasColumns(const Tensor& tensor) {
  return std::string_view(tensor.axes).find_first_of("VP") != std::string_view::npos;
}

std::vector<int64_t> SizesOf(const ConstTensorView& t) { return {t.sizes().begin(), t.sizes().end()}; }

// A tensor in f64, row-major.
struct Dense {
  std::vector<int64_t> sizes;
  std::vector<double> at;

  Dense() = default;
  explicit Dense(const std::vector<int64_t>& of)
      : sizes(of), at(static_cast<size_t>(std::accumulate(of.begin(), of.end(), int64_t{1}, std::multiplies<>()))) {}
  explicit Dense(const ConstTensorView& t) : Dense(SizesOf(t)) {
    ForEach(t, [&](size_t i, int64_t offset) { at[i] = LoadAsDouble(t.dtype(), t.data(), offset); });
  }
  void Store(const TensorView& t) const {
    ForEach(t, [&](size_t i, int64_t offset) { StoreDouble(t.dtype(), t.data(), offset, at[i]); });
  }
  size_t size() const { return at.size(); }
  // The product of the sizes of these axes.
  size_t Count(size_t begin, size_t end) const {
    size_t count = 1;
    for (size_t i = begin; i < end; ++i) count *= static_cast<size_t>(sizes[i]);
    return count;
  }

 private:
  // Calls f(index in row-major order, offset of the element).
  template <class F>
  static void ForEach(const ConstTensorView& t, const F& f) {
    const auto count = static_cast<size_t>(t.num_elements());
    std::vector<int64_t> index(static_cast<size_t>(t.rank()));
    int64_t offset = 0;
    for (size_t i = 0; i < count; ++i) {
      f(i, offset);
      for (int axis = t.rank() - 1; axis >= 0; --axis) {
        int64_t& of_axis = index[static_cast<size_t>(axis)];
        offset += t.stride(axis);
        if (++of_axis < t.size(axis)) break;
        offset -= of_axis * t.stride(axis);
        of_axis = 0;
      }
    }
  }
};

// Returns T .* x, where T may have one column for all columns of x.
Dense Scaled(const Dense& T, Dense x) {
  size_t columns = 1, inner = 1;  // of x, that share an element of T; elements after them
  for (size_t i = 0; i < x.sizes.size(); ++i) {
    if (T.sizes[i] == x.sizes[i]) continue;
    columns = static_cast<size_t>(x.sizes[i]);
    inner = x.Count(i + 1, x.sizes.size());
  }
  for (size_t i = 0; i < x.size(); ++i) x.at[i] *= T.at[i / (columns * inner) * inner + i % inner];
  return x;
}

// Returns T .* x of pairs, or conj(T) .* x.
Dense ComplexScaled(const Dense& T, Dense x, bool conjugate) {
  for (size_t i = 0; i + 1 < x.size(); i += 2) {
    const double re = T.at[i], im = conjugate ? -T.at[i + 1] : T.at[i + 1];
    const double x_re = x.at[i], x_im = x.at[i + 1];
    x.at[i] = re * x_re - im * x_im;
    x.at[i + 1] = re * x_im + im * x_re;
  }
  return x;
}

// Returns M x or M^T x of each head, for [.., K, K] and [.., K, V].
Dense Multiplied(const Dense& M, const Dense& x, bool transposed) {
  const size_t rank = x.sizes.size(), K = x.Count(rank - 2, rank - 1), V = x.Count(rank - 1, rank);
  Dense y(x.sizes);
  for (size_t head = 0; head < x.Count(0, rank - 2); ++head) {
    for (size_t i = 0; i < K; ++i) {
      double* const row = y.at.data() + (head * K + i) * V;
      for (size_t j = 0; j < K; ++j) {
        const double factor = M.at[head * K * K + (transposed ? j * K + i : i * K + j)];
        const double* const from = x.at.data() + (head * K + j) * V;
        for (size_t v = 0; v < V; ++v) row[v] += factor * from[v];
      }
    }
  }
  return y;
}

// Rows of a tail: the axis w, oldest first.
struct TailAxis {
  TailAxis(const StateTensor& state, const Dense& tail) {
    const size_t axis = std::string_view(state.axes).find('w');
    size = tail.Count(axis, axis + 1);
    inner = tail.Count(axis + 1, tail.sizes.size());
    outer = tail.Count(0, axis);
  }
  // Calls f(element, the one to whose place the segment shifts it) for those that stay.
  template <class F>
  void ForShifted(const Dense& stays, const F& f) const {
    for (size_t o = 0; o < outer; ++o) {
      for (size_t i = 0; i < inner; ++i) {
        const auto at = [&](size_t row) { return (o * size + row) * inner + i; };
        size_t kept = 0;
        while (kept < size && stays.at[at(kept)] != 0) ++kept;
        for (size_t row = 0; row < kept; ++row) f(at(row + size - kept), at(row));
      }
    }
  }
  size_t size, inner, outer;
};

// The factor of sums relative to `from` once they are relative to `to`.
double Factor(double from, double to) { return from == -kInfinity ? 0 : std::exp(from - to); }

// A segment's linear part, applied to states or to the transition of the segment before it. The maxima before and after
// it are needed for sums relative to them.
class Linear {
 public:
  Linear(const Table& table, const Segment& segment, StateViews before) : table_(table) {
    for (size_t i = 0; i < table.states.size(); ++i) {
      if (table.states[i].role == StateTensor::kMaximum && At(before, i).present()) {
        decays_ = Dense(At(segment.transition, i));
        before_ = Dense(At(before, i));
        after_ = Dense(At(segment.state, i));
        for (size_t g = 0; g < after_.size(); ++g) {
          after_.at[g] = std::max(after_.at[g], before_.at[g] + decays_.at[g]);
        }
      }
      if (table.states[i].role == StateTensor::kState && At(segment.transition, i).present()) {
        of_state_ = Dense(At(segment.transition, i));
      }
    }
    transition_ = segment.transition;
  }

  // The part of state i that comes from x, the state before, or its transpose for gradients.
  Dense Of(size_t i, Dense x, bool transposed) const {
    const StateTensor& state = table_.states[i];
    switch (KindOf(table_, state)) {
      case Kind::kComplex: return ComplexScaled(Dense(transition_[i]), std::move(x), transposed);
      case Kind::kMatrix: return Multiplied(Dense(transition_[i]), x, transposed);
      case Kind::kTail: {
        const Dense stays(transition_[i]);
        Dense y(x.sizes);
        TailAxis(state, stays).ForShifted(stays, [&](size_t from, size_t to) {
          transposed ? y.at[from] = x.at[to] : y.at[to] = x.at[from];
        });
        return y;
      }
      case Kind::kRelative: {
        const size_t inner = after_.size() == 0 ? 1 : x.size() / after_.size();
        for (size_t e = 0; e < x.size(); ++e) {
          const size_t g = e / inner;
          x.at[e] *= Factor(before_.at[g] + decays_.at[g], after_.at[g]);
        }
        return x;
      }
      default: break;
    }
    if (state.role != StateTensor::kNormaliser) return Scaled(Dense(transition_[i]), std::move(x));
    Dense rows = of_state_;  // [.., K, 1], as [.., K]
    rows.sizes.pop_back();
    return Scaled(rows, std::move(x));
  }

  // Adds the segment's own part, from zeros, to the one that came from the state before.
  void AddOwn(size_t i, const Dense& own, Dense& y) const {
    const Kind kind = KindOf(table_, table_.states[i]);
    Dense stays;
    if (kind == Kind::kTail) stays = Dense(transition_[i]);
    const size_t inner = after_.size() == 0 ? 1 : y.size() / after_.size();
    for (size_t e = 0; e < y.size(); ++e) {
      if (kind == Kind::kTail) {
        if (stays.at[e] == 0) y.at[e] = own.at[e];
      } else {
        y.at[e] +=
            kind == Kind::kRelative ? Factor(own_max_.at[e / inner], after_.at[e / inner]) * own.at[e] : own.at[e];
      }
    }
  }

  const Dense& after() const { return after_; }
  void set_own_max(Dense own) { own_max_ = std::move(own); }

 private:
  const Table& table_;
  std::span<const TensorView> transition_;
  Dense of_state_, decays_, before_, after_, own_max_;
};

void CheckAlike(const char* op, const char* what, const Table& table, StateViews views, StateViews as) {
  for (size_t i = 0; i < table.states.size(); ++i) {
    const TensorView &t = At(views, i), &other = At(as, i);
    if (!t.present() && !other.present()) continue;
    const StateName name(what, table.states[i], table.states.size() > 1);
    if (!t.present() || !other.present()) Fail(op, name, t.present() ? "is given" : "is absent", "both or neither");
    CheckTensor(op, name, t, Axes(other.sizes()), other.dtype(), true);
  }
}

void CheckTransitions(const char* op, const char* what, const Table& table, const Segment& segment) {
  for (size_t i = 0; i < table.states.size(); ++i) {
    const StateTensor& state = table.states[i];
    const Kind kind = KindOf(table, state);
    const bool has = kind != Kind::kRelative && state.role != StateTensor::kNormaliser;
    const TensorView& t = At(segment.transition, i);
    const StateName name(what, state, table.states.size() > 1);
    if (has != t.present() && At(segment.state, i).present()) {
      Fail(op, name, t.present() ? "is given" : "is absent", has ? "a tensor" : "none: it follows from the others");
    }
    if (!t.present()) continue;
    CheckReadable(op, name, t);
    std::vector<int64_t> shape = SizesOf(At(segment.state, i));
    const size_t columns = ColumnsOf(state);
    if (columns != std::string_view::npos && columns < shape.size() && t.rank() == static_cast<int>(shape.size())) {
      const int64_t size = t.size(static_cast<int>(columns));
      shape[columns] = kind == Kind::kMatrix ? shape[columns - 1] : size == 1 ? 1 : shape[columns];
    }
    CheckTensor(op, name, t, Axes(std::span<const int64_t>(shape)), At(segment.state, i).dtype(), true);
  }
}

// Returns 1 + 0i for every pair, the identity for every head, or ones.
ConstTensorView Basis(Kind kind, DType dtype, const std::vector<int64_t>& sizes, Constants& constants) {
  const size_t rank = sizes.size();
  if (kind == Kind::kComplex) {
    void* const data = constants.Next(dtype, 2);
    StoreDouble(dtype, data, 0, 1);
    StoreDouble(dtype, data, 1, 0);
    std::vector<int64_t> strides(rank);
    strides.back() = 1;
    return {data, dtype, sizes, strides};
  }
  if (kind == Kind::kMatrix) {
    const int64_t K = sizes[rank - 1];
    void* const data = constants.Next(dtype, K * K);
    for (int64_t i = 0; i < K * K; ++i) StoreDouble(dtype, data, i, i % (K + 1) == 0 ? 1 : 0);
    std::vector<int64_t> strides(rank);
    strides[rank - 2] = K;
    strides[rank - 1] = 1;
    return {data, dtype, sizes, strides};
  }
  void* const data = constants.Next(dtype, 1);
  StoreDouble(dtype, data, 0, 1);
  return {data, dtype, sizes, std::vector<int64_t>(rank)};
}

// The inputs of a pass that writes nothing to states of `columns` columns: values are 0, and gates that write closed.
std::vector<ConstTensorView> Silenced(const Table& table, const Arguments& in, bool closes_gates, int64_t columns,
                                      Constants& constants) {
  std::vector<ConstTensorView> tensors(in.tensors.begin(), in.tensors.end());
  const Tensor& value = ValueOf(table);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = table.tensors[i];
    ConstTensorView& t = tensors[i];
    if (!t.present()) continue;
    const std::string_view axes = tensor.axes;
    std::vector<int64_t> sizes = SizesOf(t);
    if (HasColumns(tensor) && axes.size() == sizes.size()) sizes[axes.find_first_of("VP")] = columns;
    const bool gate =
        closes_gates && (tensor.role == Role::kInputGate || (tensor.role == Role::kKey && axes.back() == 'C'));
    const bool writes = &tensor == &value || (tensor.role == Role::kKey && axes.back() == 'd');  // keys of a filter
    if (gate) {
      t = constants.Of(-kInfinity, t.dtype(), sizes, axes, "BT");
    } else if (writes) {
      t = constants.Of(0, t.dtype(), sizes, axes, "BTN");
    } else if (tensor.role == Role::kWrite) {
      t = constants.Of(1, t.dtype(), sizes, axes, "BTN");
    } else if (HasColumns(tensor) && tensor.role != Role::kLogValueDecay) {
      t = {};  // a skip or a gate of the output
    }
  }
  return tensors;
}

}  // namespace

int AxisOf(const Tensor& tensor, const ConstTensorView& t, char letter) {
  const size_t axis = t.present() ? AxesOfRank(tensor.axes, t.rank()).find(letter) : std::string_view::npos;
  return axis == std::string_view::npos ? -1 : static_cast<int>(axis);
}

int TokenAxisOf(const CallInSegments& call, const CallInSegments::Pass& pass, const Arguments& in) {
  const ConstTensorView& first = At(in.tensors, 0);
  const std::string_view axes = first.present() ? AxesOfRank(call.table.tensors[0].axes, first.rank()) : "";
  if (!axes.empty()) return static_cast<int>(axes.find('T'));
  pass({}, in, {});
  throw InternalError(std::string(call.op) + ": no tokens");
}

std::vector<int64_t> TransitionShape(const Table& table, const Arguments& in, size_t i, const ConstTensorView& state) {
  const StateTensor& of = table.states[i];
  const Kind kind = KindOf(table, of);
  if (kind == Kind::kRelative || of.role == StateTensor::kNormaliser) return {};
  std::vector<int64_t> shape = SizesOf(state);
  const size_t columns = ColumnsOf(of);
  if (columns == std::string_view::npos) return shape;
  const Tensor* const decay = table.Find(Role::kLogValueDecay);
  if (decay != nullptr && At(in.tensors, table.IndexOf(*decay)).present()) return shape;
  shape[columns] = kind == Kind::kMatrix ? shape[columns - 1] : 1;
  return shape;
}

bool IsDelta(const Table& table) {
  return table.Has(Role::kBeta) || table.Has(Role::kErase) || table.Has(Role::kWriteKey);
}

size_t ColumnsOf(const StateTensor& state) { return std::string_view(state.axes).find_first_of("VP"); }

ConstTensorView Constants::Of(double value, DType dtype, const std::vector<int64_t>& sizes, std::string_view axes,
                              std::string_view shared) {
  std::vector<int64_t> strides(sizes.size());
  int64_t count = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (shared.find(axes[i]) != std::string_view::npos) continue;
    strides[i] = count;
    count *= std::max<int64_t>(sizes[i], 1);
  }
  void* const data = Next(dtype, count);
  for (int64_t i = 0; i < count; ++i) StoreDouble(dtype, data, i, value);
  return {data, dtype, sizes, strides};
}

void* Constants::Next(DType dtype, int64_t count) {
  const size_t num_bytes = static_cast<size_t>(std::max<int64_t>(count, 1)) * SizeOf(dtype);
  memory_.emplace_back(new std::byte[num_bytes]);  // not written here: the threads of a pass do
  return memory_.back().get();
}

SummaryPasses::SummaryPasses(const char* op, const Table& table, const Arguments& in, const Segment& out)
    : table_(table), in_(in), zeros(table.states.size()), transitions(table.states.size()),
      basis_(table.states.size()) {
  // The states before the two passes: zeros, without a maximum so far, and what shows the transition.
  Apart apart;
  for (size_t i = 0; i < in.tensors.size(); ++i) apart.Reads(table.tensors[i].name, in.tensors[i]);
  for (size_t i = 0; i < table.states.size(); ++i) {
    const StateTensor& state = table.states[i];
    const TensorView &to = At(out.state, i), &transition = At(out.transition, i);
    const ConstTensorView& given = At(in.initial, i);
    const auto name = [&](const char* what) { return StateName(what, state, table.states.size() > 1); };
    if (given.present() && state.role != StateTensor::kTail) {
      Fail(op, name("initial_state"), "is given", "none: a summary is for any state before the segment");
    }
    if (!to.present() && state.role == StateTensor::kNormaliser) continue;
    if (!to.present()) Fail(op, name("state"), "is absent", "a tensor");
    if (to.rank() != static_cast<int>(std::string_view(state.axes).size())) {
      Fail(op, name("state"), "has shape " + to.ShapeString(),
           "rank " + std::to_string(std::string_view(state.axes).size()));
    }
    apart.Writes(op, name("state"), to);
    const bool is_maximum = state.role == StateTensor::kMaximum;
    const double none = !is_maximum ? 0 : table.Has(Role::kInputGate) ? -1e30 : state.absent;
    zeros[i] = given.present() ? given : constants_.Of(none, to.dtype(), SizesOf(to), state.axes, state.axes);
    const std::vector<int64_t> shape = TransitionShape(table, in, i, to);
    std::vector<int64_t> of_basis = shape.empty() ? SizesOf(to) : shape;
    if (const size_t columns = ColumnsOf(state); columns != std::string_view::npos) {
      if (shape.empty()) of_basis[columns] = 1;  // relative to a maximum: the pass is for that alone
      columns_ = of_basis[columns];
    }
    basis_[i] = given.present() ? given : constants_.Of(none, to.dtype(), of_basis, state.axes, state.axes);
    if (shape.empty()) {
      if (transition.present()) Fail(op, name("transition"), "is given", "none: it follows from the others");
      continue;
    }
    apart.Writes(op, name("transition"), transition, Axes(std::span<const int64_t>(shape)), to.dtype());
    transitions[i] = transition;
    basis_[i] = is_maximum ? constants_.Of(0, to.dtype(), shape, state.axes, state.axes)
                           : Basis(KindOf(table, state), to.dtype(), shape, constants_);
  }
}

void SummaryPasses::ComputeTransitions(const ForwardPass& forward) {
  if (HasMaximum(table_) && table_.Has(Role::kProjection)) {  // features do not decay
    for (const TensorView& t : transitions) {
      if (t.present()) Dense(SizesOf(t)).Store(t);
    }
    return;
  }
  const std::vector<ConstTensorView> silenced = Silenced(table_, in_, HasMaximum(table_), columns_, constants_);
  forward({silenced, basis_}, {{}, transitions});
}

namespace {

// A segment is no map of states if the keys that it writes depend on A or on the angle before it.
void CheckIsAMap(const char* op, const Table& table) {
  if (table.Has(Role::kCurvatureRate)) throw Unsupported(std::string(op) + ": what is written depends on A");
  if (table.Has(Role::kAngleRate)) throw Unsupported(std::string(op) + ": what is written depends on the angle");
}

}  // namespace

void Summarize(const char* op, const Table& table, const Arguments& in, const ForwardPass& forward,
               const Segment& out) {
  SummaryPasses passes(op, table, in, out);
  forward({in.tensors, passes.zeros}, {{}, out.state});
  passes.ComputeTransitions(forward);
}

void Summarize(const CallInSegments& call, const Arguments& in, const Segment& out) {
  CheckIsAMap(call.op, call.table);
  const os::ScopedFloatControl float_control;
  const int token_axis = TokenAxisOf(call, call.forward, in);
  const ConstTensorView& first = in.tensors[0];
  if (first.device().type != DeviceType::kCpu) throw Unsupported(std::string(call.op) + ": computes on the CPU alone");
  const CutSequences whole = {RangesOf(call.op, call.table.tensors[0].name, first, Sequences(call), token_axis)};
  Summarize(
      call.op, call.table, in, [&](const Arguments& of, const Results& results) { call.forward(whole, of, results); },
      out);
}

namespace {

// Computes transition(x) + state for the states and, with `transition`, for the transition of the segment before.
void Through(const Table& table, const Segment& segment, StateViews before, std::span<const TensorView> transition,
             std::vector<Dense>& states, std::vector<Dense>& transitions) {
  Linear linear(table, segment, before);
  states.resize(table.states.size());
  transitions.resize(table.states.size());
  for (size_t i = 0; i < table.states.size(); ++i) {
    if (table.states[i].role == StateTensor::kMaximum && At(segment.state, i).present()) {
      linear.set_own_max(Dense(segment.state[i]));
    }
  }
  for (size_t i = 0; i < table.states.size(); ++i) {
    if (!At(segment.state, i).present()) continue;
    const bool maximum = table.states[i].role == StateTensor::kMaximum;
    if (maximum) {
      states[i] = linear.after();
    } else {
      states[i] = linear.Of(i, Dense(before[i]), false);
      linear.AddOwn(i, Dense(segment.state[i]), states[i]);
    }
    if (!At(transition, i).present()) continue;
    Dense x(transition[i]);
    if (maximum) {
      const Dense decays(segment.transition[i]);
      for (size_t g = 0; g < x.size(); ++g) x.at[g] += decays.at[g];
      transitions[i] = std::move(x);
    } else {
      transitions[i] = linear.Of(i, std::move(x), false);
    }
  }
}

void StoreAll(const std::vector<Dense>& values, std::span<const TensorView> out) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (At(out, i).present()) values[i].Store(out[i]);
  }
}

}  // namespace

void Compose(const char* op, const Table& table, const Segment& left, const Segment& right, const Segment& out) {
  CheckIsAMap(op, table);
  CheckTransitions(op, "left.transition", table, left);
  CheckTransitions(op, "right.transition", table, right);
  CheckTransitions(op, "out.transition", table, out);
  CheckAlike(op, "right.state", table, right.state, left.state);
  CheckAlike(op, "out.state", table, out.state, left.state);
  CheckAlike(op, "right.transition", table, right.transition, left.transition);
  CheckAlike(op, "out.transition", table, out.transition, left.transition);
  std::vector<Dense> states, transitions;
  Through(table, right, left.state, left.transition, states, transitions);
  StoreAll(states, out.state);
  StoreAll(transitions, out.transition);
}

void Apply(const char* op, const Table& table, const Segment& segment, StateViews before, StateViews after) {
  CheckIsAMap(op, table);
  CheckTransitions(op, "segment.transition", table, segment);
  CheckAlike(op, "before", table, before, segment.state);
  CheckAlike(op, "after", table, after, segment.state);
  std::vector<Dense> states, transitions;
  Through(table, segment, before, {}, states, transitions);
  StoreAll(states, after);
}

void ApplyBackward(const char* op, const Table& table, const Segment& segment, StateViews before, StateViews d_after,
                   StateViews d_before) {
  CheckIsAMap(op, table);
  CheckTransitions(op, "segment.transition", table, segment);
  CheckAlike(op, "before", table, before, segment.state);
  const Linear linear(table, segment, before);
  for (size_t i = 0; i < table.states.size(); ++i) {
    const TensorView &from = At(d_after, i), &to = At(d_before, i);
    const StateName name("d_before", table.states[i], table.states.size() > 1);
    if (!from.present() && !to.present()) continue;
    if (!table.states[i].differentiable()) Fail(op, name, "is asked for", "none: it is a constant");
    for (const TensorView& t : {from, to}) {
      CheckTensor(op, name, t, Axes(At(before, i).sizes()), At(before, i).dtype(), true);
    }
    Dense sum(to);
    const Dense part = linear.Of(i, Dense(from), true);
    for (size_t e = 0; e < sum.size(); ++e) sum.at[e] += part.at[e];
    sum.Store(to);
  }
}

}  // namespace heed::mechanism
