// Reverse: a number that remembers how it was computed, so that one pass over a tape gives the gradients by all
// variables.
//
//   Tape tape;
//   const Reverse x = tape.Variable(2), y = exp(x) * x;
//   tape.Seed(y, 1);
//   tape.Backward();
//   tape.Gradient(x)      // exp(2) (1 + 2)
#ifndef HEED_MECHANISM_REFERENCE_REVERSE_NUMBER_INTERNAL_H_
#define HEED_MECHANISM_REFERENCE_REVERSE_NUMBER_INTERNAL_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace heed::mechanism {

class Tape;

// A constant has no tape. A number is valid until its tape is cleared.
struct Reverse {
  double value = 0;
  uint32_t node = 0;
  Tape* tape = nullptr;

  Reverse() = default;
  Reverse(double x) : value(x) {}  // NOLINT: constants appear in formulas as they are
  Reverse(double x, uint32_t of, Tape* on) : value(x), node(of), tape(on) {}
};

class Tape {
 public:
  Tape() { Clear(); }

  void Clear() {
    nodes_.assign(1, {});
    gradients_.clear();
  }

  Reverse Variable(double value) { return Push(value, 0, 0, 0, 0); }

  // A number with these derivatives by two others; node 0 is that of all constants.
  Reverse Push(double value, uint32_t left, double by_left, uint32_t right, double by_right) {
    nodes_.push_back({by_left, by_right, left, right});
    return {value, static_cast<uint32_t>(nodes_.size() - 1), this};
  }

  // Adds `gradient` to that of x, before Backward.
  void Seed(const Reverse& x, double gradient) {
    gradients_.resize(nodes_.size(), 0.0);
    gradients_[x.node] += gradient;
  }

  // From the last node to the first: each passes its gradient on to the two that it was computed from.
  void Backward() {
    gradients_.resize(nodes_.size(), 0.0);
    for (size_t i = nodes_.size(); i-- > 1;) {
      const Node& node = nodes_[i];
      gradients_[node.left] += node.by_left * gradients_[i];
      gradients_[node.right] += node.by_right * gradients_[i];
    }
  }

  double Gradient(const Reverse& x) const { return gradients_[x.node]; }

 private:
  struct Node {
    double by_left = 0, by_right = 0;
    uint32_t left = 0, right = 0;
  };
  std::vector<Node> nodes_;
  std::vector<double> gradients_;
};

inline Reverse Binary(double value, const Reverse& x, double by_x, const Reverse& y, double by_y) {
  Tape* const tape = x.tape != nullptr ? x.tape : y.tape;
  if (tape == nullptr) return value;
  return tape->Push(value, x.node, by_x, y.node, by_y);
}
inline Reverse Unary(double value, const Reverse& x, double by_x) {
  return x.tape == nullptr ? Reverse(value) : x.tape->Push(value, x.node, by_x, 0, 0);
}

inline Reverse operator+(const Reverse& x, const Reverse& y) { return Binary(x.value + y.value, x, 1, y, 1); }
inline Reverse operator-(const Reverse& x, const Reverse& y) { return Binary(x.value - y.value, x, 1, y, -1); }
inline Reverse operator*(const Reverse& x, const Reverse& y) {
  if (y.tape == nullptr && y.value == 1) return x;  // a factor that is left out takes no room
  return Binary(x.value * y.value, x, y.value, y, x.value);
}
inline Reverse operator/(const Reverse& x, const Reverse& y) {
  const double quotient = x.value / y.value;
  return Binary(quotient, x, 1 / y.value, y, -quotient / y.value);
}
inline Reverse operator-(const Reverse& x) { return Unary(-x.value, x, -1); }
inline Reverse& operator+=(Reverse& x, const Reverse& y) { return x = x + y; }
inline Reverse& operator-=(Reverse& x, const Reverse& y) { return x = x - y; }
inline Reverse& operator*=(Reverse& x, const Reverse& y) { return x = x * y; }
inline Reverse& operator/=(Reverse& x, const Reverse& y) { return x = x / y; }

// The number as a constant, which has no gradient.
inline double ValueOf(const Reverse& x) { return x.value; }
inline double ValueOf(double x) { return x; }

inline bool operator<(const Reverse& x, const Reverse& y) { return x.value < y.value; }
inline bool operator>(const Reverse& x, const Reverse& y) { return x.value > y.value; }

inline Reverse exp(const Reverse& x) {
  const double y = std::exp(x.value);
  return Unary(y, x, y);
}
inline Reverse expm1(const Reverse& x) { return Unary(std::expm1(x.value), x, std::exp(x.value)); }
inline Reverse log(const Reverse& x) { return Unary(std::log(x.value), x, 1 / x.value); }
inline Reverse log1p(const Reverse& x) { return Unary(std::log1p(x.value), x, 1 / (1 + x.value)); }
inline Reverse sin(const Reverse& x) { return Unary(std::sin(x.value), x, std::cos(x.value)); }
inline Reverse cos(const Reverse& x) { return Unary(std::cos(x.value), x, -std::sin(x.value)); }
inline Reverse abs(const Reverse& x) { return Unary(std::abs(x.value), x, std::copysign(1.0, x.value)); }

}  // namespace heed::mechanism

#endif  // HEED_MECHANISM_REFERENCE_REVERSE_NUMBER_INTERNAL_H_
