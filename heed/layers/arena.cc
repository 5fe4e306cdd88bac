// The memory stack of a thread that calls layers.
#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "heed/core/os.h"
#include "heed/layers/arena_internal.h"

namespace heed::layers {
namespace {

struct Chunk {
  char* memory;
  size_t size, used;
};

// Chunks are filled one after the other. When the last frame ends, a single chunk replaces them all.
struct Stack {
  std::vector<Chunk> chunks;
  int frames = 0;
  size_t in_use = 0, peak = 0;

  void Add(size_t size) {
    chunks.reserve(chunks.size() + 1);
    chunks.push_back({static_cast<char*>(os::AllocateAligned(size)), size, 0});
  }
  void Keep(size_t count) {
    for (; chunks.size() > count; chunks.pop_back()) os::FreeAligned(chunks.back().memory);
  }
  ~Stack() { Keep(0); }
};

Stack& OfThisThread() {
  static thread_local Stack stack;
  return stack;
}

}  // namespace

Frame::Frame() {
  Stack& stack = OfThisThread();
  chunks_ = stack.chunks.size();
  used_ = chunks_ == 0 ? 0 : stack.chunks.back().used;
  in_use_ = stack.in_use;
  ++stack.frames;
}

Frame::~Frame() {
  Stack& stack = OfThisThread();
  stack.Keep(chunks_);
  if (chunks_ != 0) stack.chunks.back().used = used_;
  stack.in_use = in_use_;
  if (--stack.frames != 0 || (chunks_ == 1 && stack.chunks[0].size >= stack.peak)) return;
  stack.Keep(0);
  try {
    stack.Add(stack.peak);
  } catch (const std::bad_alloc&) {  // the next frame tries again
  }
}

void* Frame::Bytes(int64_t count) {
  constexpr size_t kLine = 128, kLeast = 1 << 16;
  if (count > PTRDIFF_MAX - int64_t{kLine}) throw std::bad_alloc();  // size_t may have 32 bits
  Stack& stack = OfThisThread();
  const size_t size = (static_cast<size_t>(std::max<int64_t>(count, 1)) + kLine - 1) / kLine * kLine;
  if (stack.chunks.empty() || stack.chunks.back().size - stack.chunks.back().used < size)
    stack.Add(std::max(size, kLeast));
  Chunk& chunk = stack.chunks.back();
  void* memory = chunk.memory + chunk.used;
  chunk.used += size;
  stack.in_use += size;
  stack.peak = std::max(stack.peak, stack.in_use);
  return memory;
}

}  // namespace heed::layers
