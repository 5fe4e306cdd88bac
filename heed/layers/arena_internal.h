// Memory for intermediate results of layers, one stack per thread. A call's frame ends with the call, and its memory
// serves the next one: repeated calls allocate only at the beginning. A thread keeps as much memory as its largest call
// needed.
#ifndef HEED_LAYERS_ARENA_INTERNAL_H_
#define HEED_LAYERS_ARENA_INTERNAL_H_

#include <cstddef>
#include <cstdint>

namespace heed::layers {

// Frames end in the reverse order of their beginnings, on the thread where they began.
class Frame {
 public:
  Frame();
  ~Frame();
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  // Uninitialised memory that begins on a cache line, valid until the frame ends. Throws std::bad_alloc.
  float* Floats(int64_t count) { return static_cast<float*>(Bytes(count * 4)); }
  int64_t* Integers(int64_t count) { return static_cast<int64_t*>(Bytes(count * 8)); }

 private:
  void* Bytes(int64_t count);

  size_t chunks_, used_, in_use_;  // of the stack when the frame began
};

}  // namespace heed::layers

#endif  // HEED_LAYERS_ARENA_INTERNAL_H_
