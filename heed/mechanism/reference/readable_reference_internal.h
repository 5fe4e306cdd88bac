// Drivers that turn a readable function, one token of one head, into the references of a mechanism.
//
// A mechanism states its mathematics as a function of the token's rows, in the order of its tensors, that reads and
// writes the states, in their order, and writes o:
//
//   struct Token {
//     static constexpr mechanism::ReadableForm kForm = {...};  // where it is not that of recurrences
//     template <class Number>
//     void operator()(const Array<Number>& row..., Array<Number>& state..., Array<Number>& o) const;
//   };
//
// Where all tokens may be read after all are written, Token has instead Write(row..., state...) and Read(row...,
// state..., o), and `causal`, which is false where they are. If what a token writes is then relative to a maximum over
// all tokens, Look(row..., state...) finds it, in all tokens before the first is written. A function that differs
// between heads is OfHead(head) of a Token. Where values follow from constants alone, Derive(row...), whose rows of
// tokens are empty, returns them as a Derived<Number>, the first argument of the other functions.
//
// With double the function gives values. With Reverse it gives gradients: from the last token to the first, a few
// tokens are on the tape at a time, and the states before them were kept.
//
// The table of a mechanism says the axes of its tensors, as its header does, and which of them may be left out; what
// part a tensor has in an engine is not read.
#ifndef HEED_MECHANISM_REFERENCE_READABLE_REFERENCE_INTERNAL_H_
#define HEED_MECHANISM_REFERENCE_READABLE_REFERENCE_INTERNAL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/mechanism/reference/reference_array_internal.h"
#include "heed/mechanism/reference/reference_tensor_internal.h"
#include "heed/mechanism/reference/reverse_number_internal.h"
#include "heed/mechanism/table_internal.h"

namespace heed::mechanism {

// B are sequences, T tokens; the other letters are axes whose elements a row has in their order. K features are those
// of a key, unless F says how many there are.
class AxisLengths {
 public:
  // Throws InvalidArgument for a rank or a size that other tensors of the call contradict.
  void Add(const char* axes, const ConstTensorView& t);
  void Set(char axis, int64_t length) { lengths_[static_cast<size_t>(axis)] = length; }
  int64_t of(char axis) const;
  bool has(char axis) const { return lengths_[static_cast<size_t>(axis)] >= 0; }

 private:
  struct Lengths : std::array<int64_t, 128> {
    Lengths() { fill(-1); }
  } lengths_;
};

// One head of one sequence, and where its tokens are, in the order in which they are taken.
struct ReadableHead {
  int64_t sequence, batch, head, shared_head;
  std::vector<int64_t> tokens;
};

// The row of a tensor that a token of a head has.
class TokenRow {
 public:
  // `of_state`: B counts sequences. A view that is absent has a row too, of `otherwise`.
  TokenRow(const char* axes, const ConstTensorView& t, const AxisLengths& lengths, char heads, char shared_heads,
           const ReadableHead& head, bool of_state = false, double otherwise = 0);

  size_t size() const { return offsets_.size(); }
  size_t columns() const { return columns_; }
  bool over_tokens() const { return over_tokens_; }

  // `t` is the one of the constructor, or as large and with its strides.
  void Read(const ConstTensorView& t, int64_t token, Array<double>& row) const {
    for (size_t i = 0; i < size(); ++i) {
      row[i] = t.present() ? Load(t, Offset(token, i)) : otherwise_;
    }
  }
  template <class Values>
  void Write(const TensorView& t, int64_t token, const Values& value) const {
    for (size_t i = 0; t.present() && i < size(); ++i) StoreDouble(t.dtype(), t.data(), Offset(token, i), value(i));
  }
  template <class Values>
  void Add(const TensorView& t, int64_t token, const Values& value) const {
    for (size_t i = 0; t.present() && i < size(); ++i) {
      const int64_t at = Offset(token, i);
      StoreDouble(t.dtype(), t.data(), at, LoadAsDouble(t.dtype(), t.data(), at) + value(i));
    }
  }

 private:
  static double Load(const ConstTensorView& t, int64_t at) {
    if (t.dtype() == DType::kBool) return static_cast<double>(LoadAsInt64(t.dtype(), t.data(), at));
    return LoadAsDouble(t.dtype(), t.data(), at);
  }
  int64_t Offset(int64_t token, size_t i) const { return base_ + token * token_stride_ + offsets_[i]; }

  int64_t base_ = 0, token_stride_ = 0;
  std::vector<int64_t> offsets_;
  size_t columns_ = 1;
  bool over_tokens_ = false;
  double otherwise_;
};

// The arguments of a mechanism's references, in the order of its table.
struct ReadableCall {
  ReadableForm form;
  Table table;
  Arguments in;
  Results out;
  AxisLengths lengths;

  // Lengths of axes that no tensor has are set afterwards.
  ReadableCall(const ReadableForm& of, const Table& tensors, const Arguments& arguments, const Results& results);

  ConstTensorView o() const { return out.o.present() ? out.o : in.d_o; }
  // True for a state of a head that several heads share.
  bool IsShared(const StateTensor& state) const {
    const std::string_view axes = state.axes;
    return form.shared_heads != 0 && axes.find(form.shared_heads) != std::string_view::npos &&
           axes.find(form.heads) == std::string_view::npos;
  }
  template <class Options>
  std::vector<ReadableHead> Heads(const Options& options) const {
    return Heads(SequencesOf(options, lengths.of('B'), lengths.of('T')), options.reverse);
  }

 private:
  std::vector<ReadableHead> Heads(const std::vector<ReferenceSequence>& sequences, bool reverse) const;
};

// The values that a mechanism derives from its constants, empty where it derives none.
template <class Math, class Number, bool derives>
struct DerivedOf {
  struct Type {};
};
template <class Math, class Number>
struct DerivedOf<Math, Number, true> {
  using Type = typename Math::template Derived<Number>;
};

// One head of a call with n tensors and m states: its rows and its states.
template <class Math, size_t n, size_t m>
class ReadableRun {
 public:
  template <class Number>
  using Arrays = std::array<Array<Number>, n>;
  template <class Number>
  using Rows = std::array<const Array<Number>*, n>;
  template <class Number>
  using States = std::array<Array<Number>, m>;
  static constexpr bool kDerives = requires { typename Math::template Derived<double>; };
  template <class Number>
  using Derived = typename DerivedOf<Math, Number, kDerives>::Type;

  ReadableRun(const Math& math, const ReadableCall& call, const ReadableHead& head)
      : math_(math), call_(call), head_(head), o_(RowOf(call.form.o, call.o())) {
    for (size_t i = 0; i < n; ++i) {
      places_.push_back(RowOf(call.table.tensors[i].axes, At(call.in.tensors, i)));
      if (!places_[i].over_tokens()) Read(i, 0, constants_.rows[i]);
    }
    constants_.derived = Derive(constants_.rows);
  }

  void Forward() {
    States<double> states = Initial();
    Array<double> o(o_.size(), o_.columns());
    const bool together = ReadsAfterAllAreWritten();
    if (together) WriteAll(states);
    for (const int64_t t : head_.tokens) {
      const Arrays<double> own = RowsOf(t);
      const Rows<double> rows = Pointers(constants_.rows, own);
      together ? Read(rows, constants_.derived, states, o) : Token(rows, constants_.derived, states, o);
      o_.Write(call_.out.o, t, [&](size_t j) { return o[j]; });
    }
    PutStates(states);
  }

  void Backward() {
    for (size_t i = 0; i < n; ++i) gradients_.push_back(RowOf(call_.table.tensors[i].axes, At(call_.out.gradients, i)));
    States<double> d_states;
    for (size_t s = 0; s < m; ++s) {
      const bool counts = !IsShared(s) || head_.head == 0 || SharedHeadBefore() != head_.shared_head;
      d_states[s] = ReadState(s, counts ? At(call_.in.d_final, s) : ConstTensorView(), 0);
    }
    const auto read = [&](const auto& rows, const auto& derived, auto& states, auto& o) {
      Read(rows, derived, states, o);
    };
    const auto write = [&](const auto& rows, const auto& derived, auto& states, auto&) {
      Write(rows, derived, states);
    };
    const auto token = [&](const auto& rows, const auto& derived, auto& states, auto& o) {
      Token(rows, derived, states, o);
    };
    if (ReadsAfterAllAreWritten()) {
      States<double> written = Initial();
      WriteAll(written);
      const size_t T = head_.tokens.size(), stretch = Stretch(written);
      for (size_t begin = 0; begin < T; begin += stretch) {
        BackThrough(read, begin, std::min(begin + stretch, T), written, true, d_states);
      }
      BackThroughAll(write, false, d_states);
    } else {
      BackThroughAll(token, true, d_states);
    }
    PutStates(d_states, true);
  }

 private:
  TokenRow RowOf(const char* axes, const ConstTensorView& t, bool of_state = false, double otherwise = 0) const {
    return {axes, t, call_.lengths, call_.form.heads, call_.form.shared_heads, head_, of_state, otherwise};
  }

  Array<double> ReadState(size_t s, const ConstTensorView& t, double absent) const {
    const TokenRow row = RowOf(call_.table.states[s].axes, t, true, absent);
    Array<double> state(row.size(), row.columns());
    row.Read(t, 0, state);
    return state;
  }

  States<double> Initial() const {
    States<double> states;
    for (size_t s = 0; s < m; ++s) {
      states[s] = ReadState(s, At(call_.in.initial, s), call_.table.states[s].absent);
    }
    if constexpr (kLooks) {
      for (const int64_t t : head_.tokens) {
        if (!ReadsAfterAllAreWritten()) break;
        const Arrays<double> own = RowsOf(t);
        Apply<double>([&](auto&... all) { math_.Look(all...); }, Pointers(constants_.rows, own), constants_.derived,
                      states);
      }
    }
    return states;
  }

  // All heads that share a state have the same one; its gradient is the sum of theirs.
  void PutStates(const States<double>& states, bool gradients = false) const {
    for (size_t s = 0; s < m; ++s) {
      const TensorView& to = At(call_.out.states, s);
      const TokenRow row = RowOf(call_.table.states[s].axes, to, true);
      const auto value = [&](size_t i) { return states[s][i]; };
      gradients&& IsShared(s) ? row.Add(to, 0, value) : row.Write(to, 0, value);
    }
  }
  bool IsShared(size_t s) const { return call_.IsShared(call_.table.states[s]); }
  int64_t SharedHeadBefore() const {
    return (head_.head - 1) / (call_.lengths.of(call_.form.heads) / call_.lengths.of(call_.form.shared_heads));
  }

  void Read(size_t i, int64_t token, Array<double>& row) const {
    row = Array<double>(places_[i].size(), places_[i].columns());
    places_[i].Read(At(call_.in.tensors, i), token, row);
  }

  // The rows of tensors over tokens; the others are empty.
  Arrays<double> RowsOf(int64_t token) const {
    Arrays<double> rows;
    for (size_t i = 0; i < n; ++i) {
      if (places_[i].over_tokens()) Read(i, token, rows[i]);
    }
    return rows;
  }

  template <class Number>
  Rows<Number> Pointers(const Arrays<Number>& constants, const Arrays<Number>& of_token) const {
    Rows<Number> rows;
    for (size_t i = 0; i < n; ++i) rows[i] = places_[i].over_tokens() ? &of_token[i] : &constants[i];
    return rows;
  }

  Array<Reverse> Numbers(const Array<double>& values, bool variables) {
    Array<Reverse> numbers(values.size(), values.columns());
    for (size_t i = 0; i < values.size(); ++i) numbers[i] = variables ? tape_.Variable(values[i]) : Reverse(values[i]);
    return numbers;
  }

  // The function of the mechanism.

  static constexpr bool kWritesApart = requires(const Math& math) { math.causal; };
  static constexpr bool kLooks = requires { &Math::template Look<double>; };

  bool ReadsAfterAllAreWritten() const {
    if constexpr (kWritesApart) return !math_.causal;
    return false;
  }

  // Calls f(row..., state...), with `derived` before them where the mechanism derives something.
  template <class Number, class F>
  static void Apply(const F& f, const Rows<Number>& rows, const Derived<Number>& derived, States<Number>& states) {
    std::apply(
        [&](const auto*... row) {
          std::apply(
              [&](auto&... state) {
                if constexpr (kDerives) {
                  f(derived, *row..., state...);
                } else {
                  f(*row..., state...);
                }
              },
              states);
        },
        rows);
  }
  template <class Number>
  void Write(const Rows<Number>& rows, const Derived<Number>& derived, States<Number>& states) const {
    if constexpr (kWritesApart) Apply<Number>([&](auto&... all) { math_.Write(all...); }, rows, derived, states);
  }
  template <class Number>
  void Read(const Rows<Number>& rows, const Derived<Number>& derived, States<Number>& states, Array<Number>& o) const {
    if constexpr (kWritesApart) Apply<Number>([&](auto&... all) { math_.Read(all..., o); }, rows, derived, states);
  }
  template <class Number>
  void Token(const Rows<Number>& rows, const Derived<Number>& derived, States<Number>& states, Array<Number>& o) const {
    if constexpr (kWritesApart) {
      Write(rows, derived, states);
      Read(rows, derived, states, o);
    } else {
      Apply<Number>([&](auto&... all) { math_(all..., o); }, rows, derived, states);
    }
  }
  template <class Number>
  Derived<Number> Derive(const Arrays<Number>& rows) const {
    if constexpr (kDerives) return std::apply([&](const auto&... row) { return math_.Derive(row...); }, rows);
    return {};
  }

  void WriteAll(States<double>& states) const {
    for (const int64_t t : head_.tokens) {
      const Arrays<double> own = RowsOf(t);
      Write(Pointers(constants_.rows, own), constants_.derived, states);
    }
  }

  // Adds the gradients of f at these tokens, with these states before them, and replaces the gradients of the states
  // after them by those of the states before them; or adds these where f only reads states.
  template <class F>
  void BackThrough(const F& f, size_t begin, size_t end, const States<double>& before, bool reads,
                   States<double>& d_states) {
    tape_.Clear();
    const Arrays<Reverse> constants = NumbersOf(constants_.rows);
    const Derived<Reverse> derived = Derive(constants);
    States<Reverse> states;
    for (size_t s = 0; s < m; ++s) states[s] = Numbers(before[s], true);
    const States<Reverse> first = states;  // as f replaces them
    std::vector<Arrays<Reverse>> own;      // of tokens
    Array<Reverse> o(o_.size(), o_.columns());
    Array<double> d_o(o_.size(), o_.columns());
    for (size_t t = begin; t < end; ++t) {
      own.push_back(NumbersOf(RowsOf(head_.tokens[t])));
      f(Pointers(constants, own.back()), derived, states, o);
      if (!reads) continue;
      o_.Read(call_.in.d_o, head_.tokens[t], d_o);
      for (size_t j = 0; j < o.size(); ++j) tape_.Seed(o[j], d_o[j]);
    }
    for (size_t s = 0; s < m; ++s) {
      for (size_t i = 0; i < states[s].size(); ++i) tape_.Seed(states[s][i], d_states[s][i]);
    }
    tape_.Backward();
    for (size_t s = 0; s < m; ++s) {
      for (size_t i = 0; i < states[s].size(); ++i) d_states[s][i] = tape_.Gradient(first[s][i]);
    }
    AddGradients(0, constants);
    for (size_t t = begin; t < end; ++t) AddGradients(head_.tokens[t], own[t - begin]);
  }

  // Rows of tensors whose gradients are not requested are constants.
  Arrays<Reverse> NumbersOf(const Arrays<double>& values) {
    Arrays<Reverse> rows;
    for (size_t i = 0; i < n; ++i) rows[i] = Numbers(values[i], At(call_.out.gradients, i).present());
    return rows;
  }
  void AddGradients(int64_t token, const Arrays<Reverse>& rows) const {
    for (size_t i = 0; i < n; ++i) {
      if (rows[i].size() == 0) continue;
      gradients_[i].Add(At(call_.out.gradients, i), token, [&](size_t at) { return tape_.Gradient(rows[i][at]); });
    }
  }

  // The number of tokens that are on the tape at once, less where there are many states.
  static size_t Stretch(const States<double>& states) {
    size_t size = 1;
    for (const Array<double>& state : states) size += state.size();
    return std::clamp<size_t>(8192 / size, 8, 32);
  }

  // Takes the states through all tokens with f, keeps them at the first of each stretch, and goes back from the last
  // stretch to the first.
  template <class F>
  void BackThroughAll(const F& f, bool reads, States<double>& d_states) {
    std::vector<States<double>> kept;
    States<double> states = Initial();
    Array<double> o(o_.size(), o_.columns());
    const size_t stretch = Stretch(states), T = head_.tokens.size();
    for (size_t t = 0; t < T; ++t) {
      if (t % stretch == 0) kept.push_back(states);
      const Arrays<double> own = RowsOf(head_.tokens[t]);
      f(Pointers(constants_.rows, own), constants_.derived, states, o);
    }
    for (size_t i = kept.size(); i-- > 0;) {
      BackThrough(f, i * stretch, std::min((i + 1) * stretch, T), kept[i], reads, d_states);
    }
  }

  const Math& math_;
  const ReadableCall& call_;
  const ReadableHead& head_;
  TokenRow o_;
  std::vector<TokenRow> places_, gradients_;
  struct {
    Arrays<double> rows;
    Derived<double> derived;
  } constants_;
  Tape tape_;
};

template <class Math>
Math OfHead(const Math& math, int64_t head) {
  if constexpr (requires { math.OfHead(head); }) return math.OfHead(head);
  return math;
}

template <class Math>
constexpr ReadableForm FormOf() {
  if constexpr (requires { Math::kForm; }) return Math::kForm;
  return {};
}

// The references of a mechanism whose tensors and states are these; `out` are outputs or gradients.
template <class Tensors, class States, class Math, class In, class Options, class Out>
void RunReadable(const Tensors& tensors, const States& states, const Math& math, const In& in, const Options& options,
                 const Out& out, bool backward) {
  constexpr size_t n = sizeof(Tensors) / sizeof(Tensor);
  constexpr size_t m = std::is_empty_v<States> ? 0 : sizeof(States) / sizeof(StateTensor);
  ReadableCall call(FormOf<Math>(), TableOf(tensors, states), in, out);
  if constexpr (requires { math.num_features; }) call.lengths.Set('F', math.num_features);
  Clear(call.out.o);
  for (const TensorView& gradient : call.out.gradients) Clear(gradient);
  for (size_t s = 0; s < call.out.states.size() && s < m; ++s) {
    if (call.IsShared(call.table.states[s])) Clear(call.out.states[s]);
  }
  for (const ReadableHead& head : call.Heads(options)) {
    const Math of_head = OfHead(math, head.head);
    ReadableRun<Math, n, m> run(of_head, call, head);
    backward ? run.Backward() : run.Forward();
  }
}

}  // namespace heed::mechanism

// Defines the references of a mechanism, in its namespace, from TokenOf() its inputs and options.
#define HEED_DEFINE_REFERENCES HEED_DEFINE_REFERENCES_WITH(kStates)

// Takes other states: those of the mechanism, and after them those that its readable function alone has. No call gives
// or receives the latter, which begin with what a table calls absent.
#define HEED_DEFINE_REFERENCES_WITH(states)                                                                  \
  void Reference(const Inputs& in, const Options& options, const Outputs& out) {                             \
    using Of = mechanism::Lists<Structs>;                                                                    \
    mechanism::RunReadable(kTensors, states, TokenOf(in, options), Of::Of(in), options, Of::Of(out), false); \
  }                                                                                                          \
  void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {           \
    using Of = mechanism::Lists<Structs>;                                                                    \
    mechanism::RunReadable(kTensors, states, TokenOf(in, options), Of::Of(in), options, Of::Of(out), true);  \
  }

#endif  // HEED_MECHANISM_REFERENCE_READABLE_REFERENCE_INTERNAL_H_
