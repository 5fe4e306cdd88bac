// Drivers that turn a readable function, one token of one head, into the references of a mechanism.
//
// A mechanism states its mathematics as a function of the token's rows that reads and writes the states and writes o:
//
//   struct Token {
//     template <class Number>
//     void operator()(const Array<Number>& row..., Array<Number>& state..., Array<Number>& o) const;
//   };
//
// With double it gives values. With Reverse it gives gradients: from the last token to the first, one token is on the
// tape at a time, and its states come from those that were kept every few tokens.
#ifndef HEED_MECHANISM_REFERENCE_READABLE_REFERENCE_INTERNAL_H_
#define HEED_MECHANISM_REFERENCE_READABLE_REFERENCE_INTERNAL_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/mechanism/reference/reference_array_internal.h"
#include "heed/mechanism/reference/reference_tensor_internal.h"
#include "heed/mechanism/reference/reverse_number_internal.h"

namespace heed::mechanism {

// A letter of axes each: B sequences, T tokens, the letters of heads, and any others, whose elements a row has in their
// order. Forms of another rank stand behind a |.
struct ReadableTensor {
  const char* axes;
  ConstTensorView value;
  TensorView gradient = {};
  std::optional<double> absent = {};  // each element of a tensor that may be left out
};

struct ReadableState {
  const char* axes;  // B are sequences, of which several may be in one row of the other tensors
  ConstTensorView initial = {}, d_final = {};
  TensorView final = {}, dinitial = {};
};

struct ReadableOutput {
  const char* axes;
  TensorView value = {};
  ConstTensorView gradient = {};
};

template <size_t n, size_t m>
struct ReadableCall {
  // The letter of heads, and one of heads that several of those share, or 0.
  char heads, shared_heads;
  std::array<ReadableTensor, n> tensors;
  std::array<ReadableState, m> states;
  ReadableOutput o;
};

class AxisLengths {
 public:
  // Throws InvalidArgument for a rank or a size that other tensors of the call contradict.
  void Add(const char* axes, const ConstTensorView& t);
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
      row[i] = t.present() ? LoadAsDouble(t.dtype(), t.data(), At(token, i)) : otherwise_;
    }
  }
  template <class Values>
  void Write(const TensorView& t, int64_t token, const Values& value) const {
    for (size_t i = 0; t.present() && i < size(); ++i) StoreDouble(t.dtype(), t.data(), At(token, i), value(i));
  }
  template <class Values>
  void Add(const TensorView& t, int64_t token, const Values& value) const {
    for (size_t i = 0; t.present() && i < size(); ++i) {
      const int64_t at = At(token, i);
      StoreDouble(t.dtype(), t.data(), at, LoadAsDouble(t.dtype(), t.data(), at) + value(i));
    }
  }

 private:
  int64_t At(int64_t token, size_t i) const { return base_ + token * token_stride_ + offsets_[i]; }

  int64_t base_ = 0, token_stride_ = 0;
  std::vector<int64_t> offsets_;
  size_t columns_ = 1;
  double otherwise_;
};

template <size_t n, size_t m>
AxisLengths LengthsOf(const ReadableCall<n, m>& call) {
  AxisLengths lengths;
  for (const ReadableTensor& t : call.tensors) {
    if (t.value.present() || !t.absent) lengths.Add(t.axes, t.value);
  }
  return lengths;
}

template <size_t n, size_t m, class Options>
std::vector<ReadableHead> HeadsOf(const ReadableCall<n, m>& call, const AxisLengths& lengths, const Options& options) {
  std::vector<ReadableHead> heads;
  const int64_t count = lengths.of(call.heads);
  const int64_t shared = call.shared_heads != 0 && lengths.has(call.shared_heads) ? lengths.of(call.shared_heads) : 1;
  if (shared < 1 || count % shared != 0) throw InvalidArgument("reference: heads are not divided by those they share");
  const auto ranges = SequencesOf(options, lengths.of('B'), lengths.of('T'));
  for (size_t i = 0; i < ranges.size(); ++i) {
    ReadableHead head = {static_cast<int64_t>(i), ranges[i].batch, 0, 0, {}};
    for (int64_t t = ranges[i].begin; t < ranges[i].end; ++t) head.tokens.push_back(t);
    if (options.reverse) std::reverse(head.tokens.begin(), head.tokens.end());
    for (; head.head < count; ++head.head) {
      head.shared_head = head.head / (count / shared);
      heads.push_back(head);
    }
  }
  return heads;
}

// One head of a call: its rows and its states.
template <class Math, size_t n, size_t m>
class ReadableRun {
 public:
  using Call = ReadableCall<n, m>;
  template <class Number>
  using Arrays = std::array<Array<Number>, n>;
  template <class Number>
  using States = std::array<Array<Number>, m>;

  ReadableRun(const Math& math, const Call& call, const AxisLengths& lengths, const ReadableHead& head)
      : math_(math), call_(call), lengths_(lengths), head_(head), o_(RowOf(call.o.axes, View(call.o))) {
    for (const ReadableTensor& t : call.tensors) {
      places_.push_back(RowOf(t.axes, t.value, false, t.absent.value_or(0)));
    }
  }

  void Forward() {
    States<double> states = Initial();
    Array<double> o(o_.size(), o_.columns());
    for (const int64_t t : head_.tokens) {
      Token(Rows(t), states, o);
      o_.Write(call_.o.value, t, [&](size_t j) { return o[j]; });
    }
    for (size_t s = 0; s < m; ++s) {
      const ReadableState& state = call_.states[s];
      RowOf(state.axes, state.final, true).Write(state.final, 0, [&](size_t i) { return states[s][i]; });
    }
  }

  void Backward() {
    std::vector<TokenRow> gradients;
    for (const ReadableTensor& t : call_.tensors) gradients.push_back(RowOf(t.axes, t.gradient));
    States<double> d_states;
    for (size_t s = 0; s < m; ++s) d_states[s] = ReadState(call_.states[s].axes, call_.states[s].d_final);
    BackThrough([&](int64_t t, const States<double>& before) {
      tape_.Clear();
      const Arrays<double> values = Rows(t);
      Arrays<Reverse> rows;
      for (size_t i = 0; i < n; ++i) rows[i] = Numbers(values[i], call_.tensors[i].gradient.present());
      States<Reverse> states;
      for (size_t s = 0; s < m; ++s) states[s] = Numbers(before[s], true);
      const States<Reverse> first = states;  // as `Token` replaces them
      Array<Reverse> o(o_.size(), o_.columns());
      Token(rows, states, o);
      Array<double> d_o(o_.size(), o_.columns());
      o_.Read(call_.o.gradient, t, d_o);
      for (size_t j = 0; j < o.size(); ++j) tape_.Seed(o[j], d_o[j]);
      for (size_t s = 0; s < m; ++s) {
        for (size_t i = 0; i < states[s].size(); ++i) tape_.Seed(states[s][i], d_states[s][i]);
      }
      tape_.Backward();
      for (size_t s = 0; s < m; ++s) {
        for (size_t i = 0; i < states[s].size(); ++i) d_states[s][i] = tape_.Gradient(first[s][i]);
      }
      for (size_t i = 0; i < n; ++i) {
        gradients[i].Add(call_.tensors[i].gradient, t, [&](size_t at) { return tape_.Gradient(rows[i][at]); });
      }
    });
    for (size_t s = 0; s < m; ++s) {
      const ReadableState& state = call_.states[s];
      RowOf(state.axes, state.dinitial, true).Write(state.dinitial, 0, [&](size_t i) { return d_states[s][i]; });
    }
  }

 private:
  static ConstTensorView View(const ReadableOutput& o) { return o.value.present() ? o.value : o.gradient; }

  TokenRow RowOf(const char* axes, const ConstTensorView& t, bool of_state = false, double otherwise = 0) const {
    return {axes, t, lengths_, call_.heads, call_.shared_heads, head_, of_state, otherwise};
  }

  Array<double> ReadState(const char* axes, const ConstTensorView& t) const {
    const TokenRow row = RowOf(axes, t, true);
    Array<double> state(row.size(), row.columns());
    row.Read(t, 0, state);
    return state;
  }

  States<double> Initial() const {
    States<double> states;
    for (size_t s = 0; s < m; ++s) states[s] = ReadState(call_.states[s].axes, call_.states[s].initial);
    return states;
  }

  Arrays<double> Rows(int64_t token) const {
    Arrays<double> rows;
    for (size_t i = 0; i < n; ++i) {
      rows[i] = Array<double>(places_[i].size(), places_[i].columns());
      places_[i].Read(call_.tensors[i].value, token, rows[i]);
    }
    return rows;
  }

  Array<Reverse> Numbers(const Array<double>& values, bool variables) {
    Array<Reverse> numbers(values.size(), values.columns());
    for (size_t i = 0; i < values.size(); ++i) numbers[i] = variables ? tape_.Variable(values[i]) : Reverse(values[i]);
    return numbers;
  }

  template <class Number>
  void Token(const Arrays<Number>& rows, States<Number>& states, Array<Number>& o) const {
    std::apply([&](const auto&... row) { std::apply([&](auto&... state) { math_(row..., state..., o); }, states); },
               rows);
  }

  // f(token, states before it) for all tokens, the last first.
  template <class F>
  void BackThrough(const F& f) {
    constexpr size_t kStretch = 32;  // tokens whose states are all kept at once
    std::vector<States<double>> kept;
    States<double> states = Initial();
    Array<double> o(o_.size(), o_.columns());
    for (size_t t = 0; t < head_.tokens.size(); ++t) {
      if (t % kStretch == 0) kept.push_back(states);
      Token(Rows(head_.tokens[t]), states, o);
    }
    for (size_t stretch = kept.size(); stretch-- > 0;) {
      const size_t begin = stretch * kStretch, end = std::min(begin + kStretch, head_.tokens.size());
      std::vector<States<double>> before = {kept[stretch]};
      for (size_t t = begin; t + 1 < end; ++t) {
        before.push_back(before.back());
        Token(Rows(head_.tokens[t]), before.back(), o);
      }
      for (size_t t = end; t-- > begin;) f(head_.tokens[t], before[t - begin]);
    }
  }

  const Math& math_;
  const Call& call_;
  const AxisLengths& lengths_;
  const ReadableHead& head_;
  TokenRow o_;
  std::vector<TokenRow> places_;
  Tape tape_;
};

template <class Math, size_t n, size_t m, class Options>
void RunReadable(const Math& math, const ReadableCall<n, m>& call, const Options& options) {
  const AxisLengths lengths = LengthsOf(call);
  Clear(call.o.value);
  for (const ReadableHead& head : HeadsOf(call, lengths, options)) ReadableRun(math, call, lengths, head).Forward();
}

template <class Math, size_t n, size_t m, class Options>
void RunReadableBackward(const Math& math, const ReadableCall<n, m>& call, const Options& options) {
  const AxisLengths lengths = LengthsOf(call);
  for (const ReadableTensor& t : call.tensors) Clear(t.gradient);
  for (const ReadableHead& head : HeadsOf(call, lengths, options)) ReadableRun(math, call, lengths, head).Backward();
}

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_REFERENCE_READABLE_REFERENCE_INTERNAL_H_
