// Common code of the fuzz targets: reading numbers from random bytes, and failing.
#ifndef TESTS_FUZZ_INPUT_H_
#define TESTS_FUZZ_INPUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>

namespace heed::fuzz {

// Reads bytes from the front; zeros when none are left.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : rest_(data, size) {}

  template <class T>
  T Raw() {
    T value{};
    const size_t n = std::min(sizeof(value), rest_.size());
    if (n > 0) std::memcpy(&value, rest_.data(), n);
    rest_ = rest_.subspan(n);
    return value;
  }

  // A number in [0, n), n up to 256.
  int64_t Below(int64_t n) { return Raw<uint8_t>() % n; }

  // True about once in `n` calls; never after the bytes are used up.
  bool OneIn(int64_t n) { return Raw<uint8_t>() >= 256 - 256 / n; }

  template <class T, size_t N>
  T Pick(const T (&choices)[N]) {
    return choices[Below(N)];
  }

  // A text after its length in one byte.
  std::string Text() {
    const size_t wanted = Raw<uint8_t>();
    const size_t n = std::min(wanted, rest_.size());
    const std::string text(reinterpret_cast<const char*>(rest_.data()), n);
    rest_ = rest_.subspan(n);
    return text;
  }

  std::span<const uint8_t> rest() const { return rest_; }

 private:
  std::span<const uint8_t> rest_;
};

[[noreturn]] inline void Fail(const std::string& what) {
  std::fprintf(stderr, "fuzz: %s\n", what.c_str());
  std::abort();
}

inline void Require(bool ok, const char* what) {
  if (!ok) Fail(what);
}

}  // namespace heed::fuzz

#endif  // TESTS_FUZZ_INPUT_H_
