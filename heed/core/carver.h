// Carver divides one block of memory into arrays, each of which begins on a cache line of its own.
#ifndef HEED_CORE_CARVER_H_
#define HEED_CORE_CARVER_H_

#include <cstdint>

namespace heed {

// With a null base the carver only counts, so that one function both lays out the memory and measures it.
class Carver {
 public:
  explicit Carver(void* base, int64_t begin = 0) : base_(static_cast<char*>(base)), at_(begin) {}

  template <class E>
  void Next(E*& buffer, int64_t elements) {
    buffer = base_ == nullptr ? nullptr : reinterpret_cast<E*>(base_ + at_);
    at_ += (elements * static_cast<int64_t>(sizeof(E)) + 127) / 128 * 128;
  }
  int64_t bytes() const { return at_; }

 private:
  char* base_;
  int64_t at_;
};

}  // namespace heed

#endif  // HEED_CORE_CARVER_H_
