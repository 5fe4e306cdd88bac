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
// With double the function gives values. With Reverse it gives gradients: from the last token to the first, one token
// is on the tape at a time, and its states come from those that were kept every few tokens.
//
// Where all tokens may be read after all are written, Token has instead Write(row..., state...) and Read(row...,
// state..., o), and `causal`, which is false where they are. If what a token writes is then relative to a maximum over
// all tokens, Look(row..., state...) finds it, in all tokens before the first is written. A function that differs
// between heads is OfHead(head) of a Token.
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
  double otherwise_;
};

// What the references of a mechanism are called with, in the order of its table.
struct ReadableCall {
  ReadableForm form;
  Table table;
  Arguments in;
  Results out;
  AxisLengths lengths;

  // Lengths of axes that no tensor has are set afterwards.
  ReadableCall(const ReadableForm& of, const Table& tensors, const Arguments& arguments, const Results& results);

  ConstTensorView o() const { return out.o.present() ? out.o : in.d_o; }
  template <class Options>
  std::vector<ReadableHead> Heads(const Options& options) const {
    return Heads(SequencesOf(options, lengths.of('B'), lengths.of('T')), options.reverse);
  }

 private:
  std::vector<ReadableHead> Heads(const std::vector<ReferenceSequence>& sequences, bool reverse) const;
};

// One head of a call with n tensors and m states: its rows and its states.
template <class Math, size_t n, size_t m>
class ReadableRun {
 public:
  template <class Number>
  using Arrays = std::array<Array<Number>, n>;
  template <class Number>
  using States = std::array<Array<Number>, m>;

  ReadableRun(const Math& math, const ReadableCall& call, const ReadableHead& head)
      : math_(math), call_(call), head_(head), o_(RowOf(call.form.o, call.o())) {
    for (size_t i = 0; i < n; ++i) places_.push_back(RowOf(call.table.tensors[i].axes, At(call.in.tensors, i)));
  }

  void Forward() {
    States<double> states = Initial();
    Array<double> o(o_.size(), o_.columns());
    const bool together = ReadsAfterAllAreWritten();
    if (together) WriteAll(states);
    for (const int64_t t : head_.tokens) {
      together ? Read(Rows(t), states, o) : Token(Rows(t), states, o);
      o_.Write(call_.out.o, t, [&](size_t j) { return o[j]; });
    }
    PutStates(states);
  }

  void Backward() {
    for (size_t i = 0; i < n; ++i) gradients_.push_back(RowOf(call_.table.tensors[i].axes, At(call_.out.gradients, i)));
    States<double> d_states;
    for (size_t s = 0; s < m; ++s) d_states[s] = ReadState(s, At(call_.in.d_final, s), 0);
    const auto read = [&](const auto& rows, auto& states, auto& o) { Read(rows, states, o); };
    const auto write = [&](const auto& rows, auto& states, auto&) { Write(rows, states); };
    const auto token = [&](const auto& rows, auto& states, auto& o) { Token(rows, states, o); };
    if (ReadsAfterAllAreWritten()) {
      States<double> written = Initial();
      WriteAll(written);
      for (const int64_t t : head_.tokens) BackThrough(read, t, written, true, d_states);
      ForEachFromTheLast(write, [&](int64_t t, const auto& before) { BackThrough(write, t, before, false, d_states); });
    } else {
      ForEachFromTheLast(token, [&](int64_t t, const auto& before) { BackThrough(token, t, before, true, d_states); });
    }
    PutStates(d_states);
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
        if (ReadsAfterAllAreWritten()) Apply([&](auto&... all) { math_.Look(all...); }, Rows(t), states);
      }
    }
    return states;
  }

  void PutStates(const States<double>& states) const {
    for (size_t s = 0; s < m; ++s) {
      const TensorView& to = At(call_.out.states, s);
      RowOf(call_.table.states[s].axes, to, true).Write(to, 0, [&](size_t i) { return states[s][i]; });
    }
  }

  Arrays<double> Rows(int64_t token) const {
    Arrays<double> rows;
    for (size_t i = 0; i < n; ++i) {
      rows[i] = Array<double>(places_[i].size(), places_[i].columns());
      places_[i].Read(At(call_.in.tensors, i), token, rows[i]);
    }
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
  template <class Number, class F>
  static void Apply(const F& f, const Arrays<Number>& rows, States<Number>& states) {
    std::apply([&](const auto&... row) { std::apply([&](auto&... state) { f(row..., state...); }, states); }, rows);
  }
  template <class Number>
  void Write(const Arrays<Number>& rows, States<Number>& states) const {
    if constexpr (kWritesApart) Apply([&](auto&... all) { math_.Write(all...); }, rows, states);
  }
  template <class Number>
  void Read(const Arrays<Number>& rows, States<Number>& states, Array<Number>& o) const {
    if constexpr (kWritesApart) Apply([&](auto&... all) { math_.Read(all..., o); }, rows, states);
  }
  template <class Number>
  void Token(const Arrays<Number>& rows, States<Number>& states, Array<Number>& o) const {
    if constexpr (kWritesApart) {
      Write(rows, states);
      Read(rows, states, o);
    } else {
      Apply([&](auto&... all) { math_(all..., o); }, rows, states);
    }
  }

  void WriteAll(States<double>& states) const {
    for (const int64_t t : head_.tokens) Write(Rows(t), states);
  }

  // Adds the gradients of f at one token, with these states before it, and replaces the gradients of the states after
  // it by those of the states before it; or adds these where f only reads states.
  template <class F>
  void BackThrough(const F& f, int64_t t, const States<double>& before, bool reads, States<double>& d_states) {
    tape_.Clear();
    const Arrays<double> values = Rows(t);
    Arrays<Reverse> rows;
    for (size_t i = 0; i < n; ++i) rows[i] = Numbers(values[i], At(call_.out.gradients, i).present());
    States<Reverse> states;
    for (size_t s = 0; s < m; ++s) states[s] = Numbers(before[s], true);
    const States<Reverse> first = states;  // as f replaces them
    Array<Reverse> o(o_.size(), o_.columns());
    f(rows, states, o);
    if (reads) {
      Array<double> d_o(o_.size(), o_.columns());
      o_.Read(call_.in.d_o, t, d_o);
      for (size_t j = 0; j < o.size(); ++j) tape_.Seed(o[j], d_o[j]);
    }
    for (size_t s = 0; s < m; ++s) {
      for (size_t i = 0; i < states[s].size(); ++i) tape_.Seed(states[s][i], d_states[s][i]);
    }
    tape_.Backward();
    for (size_t s = 0; s < m; ++s) {
      for (size_t i = 0; i < states[s].size(); ++i) d_states[s][i] = tape_.Gradient(first[s][i]);
    }
    for (size_t i = 0; i < n; ++i) {
      gradients_[i].Add(At(call_.out.gradients, i), t, [&](size_t at) { return tape_.Gradient(rows[i][at]); });
    }
  }

  // g(token, states before it) for all tokens, the last first, of which f takes the states on.
  template <class F, class G>
  void ForEachFromTheLast(const F& f, const G& g) {
    constexpr size_t kStretch = 32;  // tokens whose states are all kept at once
    std::vector<States<double>> kept;
    States<double> states = Initial();
    Array<double> o(o_.size(), o_.columns());
    for (size_t t = 0; t < head_.tokens.size(); ++t) {
      if (t % kStretch == 0) kept.push_back(states);
      f(Rows(head_.tokens[t]), states, o);
    }
    for (size_t stretch = kept.size(); stretch-- > 0;) {
      const size_t begin = stretch * kStretch, end = std::min(begin + kStretch, head_.tokens.size());
      std::vector<States<double>> before = {kept[stretch]};
      for (size_t t = begin; t + 1 < end; ++t) {
        before.push_back(before.back());
        f(Rows(head_.tokens[t]), before.back(), o);
      }
      for (size_t t = end; t-- > begin;) g(head_.tokens[t], before[t - begin]);
    }
  }

  const Math& math_;
  const ReadableCall& call_;
  const ReadableHead& head_;
  TokenRow o_;
  std::vector<TokenRow> places_, gradients_;
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
  for (const ReadableHead& head : call.Heads(options)) {
    const Math of_head = OfHead(math, head.head);
    ReadableRun<Math, n, m> run(of_head, call, head);
    backward ? run.Backward() : run.Forward();
  }
}

}  // namespace heed::mechanism

// Defines the references of a mechanism, in its namespace, from TokenOf() its inputs and options.
#define HEED_DEFINE_REFERENCES                                                                                \
  void Reference(const Inputs& in, const Options& options, const Outputs& out) {                              \
    using Of = mechanism::Lists<Structs>;                                                                     \
    mechanism::RunReadable(kTensors, kStates, TokenOf(in, options), Of::Of(in), options, Of::Of(out), false); \
  }                                                                                                           \
  void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {            \
    using Of = mechanism::Lists<Structs>;                                                                     \
    mechanism::RunReadable(kTensors, kStates, TokenOf(in, options), Of::Of(in), options, Of::Of(out), true);  \
  }

#endif  // HEED_MECHANISM_REFERENCE_READABLE_REFERENCE_INTERNAL_H_
