// Threads as fibers, their barriers, and what a warp computes together.
#include "tests/cuda/emulated_machine.h"

#include <bit>
#include <cmath>
#include <deque>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "heed/core/os.h"
#include "tests/cuda/fiber.h"

namespace heed::cuda {
namespace {

constexpr size_t kExchangeBytes = 64;  // a thread's share at most

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

// Threads that wait for each other.
struct Meeting {
  std::vector<int> waiting;
};

// Four columns of a product, which compilers hold in the vectors that a target has.
typedef double Columns __attribute__((vector_size(32)));

// C + A B of a warp, each sum in double and rounded once.
struct Product {
  double a[16][16];
  Columns b[16][2], c[16][2];
  int exchange = -1;  // for which c has become the result

#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__)
  __attribute__((target_clones("avx2", "default")))
#endif
  void
  Multiply() {
    for (int row = 0; row < 16; ++row) {
      Columns left = c[row][0], right = c[row][1];
      for (int k = 0; k < 16; ++k) {
        left += a[row][k] * b[k][0];
        right += a[row][k] * b[k][1];
      }
      c[row][0] = left;
      c[row][1] = right;
    }
  }
};

struct Warp {
  Meeting meeting;
  alignas(16) unsigned char slots[2][kWarp][kExchangeBytes];
  Product products[2];
};

}  // namespace

class EmulatedBlock {
 public:
  EmulatedBlock(const EmulatedGrid& grid, const int (&place)[3],
                const std::function<void(EmulatedMachine&)>& kernel)
      : place_{place[0], place[1], place[2]}, kernel_(kernel), random_(grid.seed),
        shared_((grid.shared_bytes + 15) / 16 * 16, /*at_end=*/true), warps_(static_cast<size_t>(grid.threads / kWarp)),
        threads_(static_cast<size_t>(grid.threads)) {
    std::memset(shared_.data(), 0xFF, (grid.shared_bytes + 15) / 16 * 16);
  }

  void Run() {
    for (size_t i = 0; i < threads_.size(); ++i) {
      ready_.push_back(static_cast<int>(i));
      threads_[i].fiber = std::make_unique<Fiber>([this, i] {
        EmulatedMachine machine(*this, static_cast<int>(i));
        kernel_(machine);
        ++ended_;
      });
    }
    while (!ready_.empty()) {
      const size_t next = (random_() >> 32) * ready_.size() >> 32;
      current_ = ready_[next];
      ready_[next] = ready_.back();
      ready_.pop_back();
      threads_[static_cast<size_t>(current_)].fiber->Resume();
    }
    if (ended_ != threads_.size()) throw std::logic_error("threads of a block wait for others that do not come");
  }

  // Returns when all `count` threads of the meeting are here.
  void Meet(Meeting& meeting, size_t count) {
    const int me = current_;
    if (meeting.waiting.size() + 1 == count) {
      ready_.insert(ready_.end(), meeting.waiting.begin(), meeting.waiting.end());
      meeting.waiting.clear();
      ready_.push_back(me);
    } else {
      meeting.waiting.push_back(me);
    }
    threads_[static_cast<size_t>(me)].fiber->Suspend();
  }

  struct Thread {
    std::unique_ptr<Fiber> fiber;
    std::vector<Copy> copies;               // since the last group
    std::deque<std::vector<Copy>> groups;  // under way
    int exchanges = 0;
  };

  const int place_[3];
  const std::function<void(EmulatedMachine&)>& kernel_;
  std::mt19937_64 random_;
  os::GuardedMemory shared_;  // an access beyond it faults
  std::vector<Warp> warps_;
  std::vector<Thread> threads_;
  std::vector<int> ready_;
  Meeting all_;
  bool flags_[2] = {};
  int syncs_ = 0, arrived_ = 0;
  int current_ = 0;
  size_t ended_ = 0;
};

int EmulatedMachine::num_threads() const { return static_cast<int>(block_.threads_.size()); }
int EmulatedMachine::block(int axis) const { return block_.place_[axis]; }
char* EmulatedMachine::shared() const { return reinterpret_cast<char*>(block_.shared_.data()); }

void EmulatedMachine::Sync() { SyncOr(false); }

bool EmulatedMachine::SyncOr(bool flag) {
  EmulatedBlock& b = block_;
  // The flag of this meeting; that of the next is cleared when all have read it of the last one.
  const int of = b.syncs_ % 2;
  if (b.arrived_ == 0) b.flags_[of] = false;
  b.flags_[of] |= flag;
  if (++b.arrived_ == static_cast<int>(b.threads_.size())) {
    b.arrived_ = 0;
    ++b.syncs_;
  }
  b.Meet(b.all_, b.threads_.size());
  return b.flags_[of];
}

const void* EmulatedMachine::Exchange(const void* mine, size_t bytes) {
  Warp& warp = block_.warps_[static_cast<size_t>(thread_ / kWarp)];
  auto& slots = warp.slots[block_.threads_[static_cast<size_t>(thread_)].exchanges++ % 2];
  std::memcpy(slots[thread_ % kWarp], mine, bytes);
  block_.Meet(warp.meeting, kWarp);
  return slots;
}

bool EmulatedMachine::Any(bool flag) {
  const auto* slots = static_cast<const unsigned char*>(Exchange(&flag, sizeof(flag)));
  bool any = false;
  for (size_t lane = 0; lane < kWarp; ++lane) any |= slots[lane * kExchangeBytes] != 0;
  return any;
}

float EmulatedMachine::Shuffle(float x, int lane) {
  const auto* slots = static_cast<const unsigned char*>(Exchange(&x, sizeof(x)));
  std::memcpy(&x, slots + static_cast<size_t>(lane) * kExchangeBytes, sizeof(x));
  return x;
}

void EmulatedMachine::CopyAsync(void* to, const void* from, bool exists) {
  std::memset(to, 0xFF, 16);
  const auto is_aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  if (!is_aligned(to) || !is_aligned(from)) return;  // a GPU would stop: it never lands
  block_.threads_[static_cast<size_t>(thread_)].copies.push_back({to, from, exists ? 16 : 0});
}

void EmulatedMachine::CommitCopies() {
  EmulatedBlock::Thread& thread = block_.threads_[static_cast<size_t>(thread_)];
  thread.groups.push_back(std::move(thread.copies));
  thread.copies.clear();
}

void EmulatedMachine::WaitCopies(int pending) {
  EmulatedBlock::Thread& thread = block_.threads_[static_cast<size_t>(thread_)];
  for (; thread.groups.size() > static_cast<size_t>(pending); thread.groups.pop_front()) {
    for (const Copy& copy : thread.groups.front()) {
      std::memset(copy.to, 0, 16);
      if (copy.bytes > 0) std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
    }
  }
}

void EmulatedMachine::LoadMatrices(bool transposed, const void* row, uint32_t* r) {
  const auto* slots = static_cast<const unsigned char*>(Exchange(&row, sizeof(row)));
  const int lane = thread_ % kWarp;
  const auto element = [&](int matrix, int i, int j) {
    const unsigned char* at;
    std::memcpy(&at, slots + static_cast<size_t>(8 * matrix + i) * kExchangeBytes, sizeof(at));
    uint16_t bits;
    std::memcpy(&bits, at + 2 * j, sizeof(bits));
    return static_cast<uint32_t>(bits);
  };
  for (int matrix = 0; matrix < 4; ++matrix) {
    const int i = lane / 4, j = lane % 4 * 2;
    const uint32_t low = transposed ? element(matrix, j, i) : element(matrix, i, j);
    const uint32_t high = transposed ? element(matrix, j + 1, i) : element(matrix, i, j + 1);
    r[matrix] = low | high << 16;
  }
  block_.Meet(block_.warps_[static_cast<size_t>(thread_ / kWarp)].meeting, kWarp);  // before a row is written again
}

void EmulatedMachine::Multiply(DType dtype, const uint32_t* a, const uint32_t* b, float* c) {
  const auto widened = [&](uint32_t pair, int half) {
    const auto bits = static_cast<uint16_t>(pair >> (16 * half));
    return static_cast<double>(dtype == DType::kBF16 ? std::bit_cast<float>(uint32_t{bits} << 16) : ToFloat(F16{bits}));
  };
  Warp& warp = block_.warps_[static_cast<size_t>(thread_ / kWarp)];
  const int exchange = block_.threads_[static_cast<size_t>(thread_)].exchanges++;
  Product& product = warp.products[exchange % 2];
  const int g = thread_ % kWarp / 4, t = thread_ % 4;
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) product.a[g + 8 * (i / 2 % 2)][2 * t + 8 * (i / 4) + i % 2] = widened(a[i / 2], i % 2);
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) product.b[2 * t + 8 * (i / 2) + i % 2][g / 4][g % 4] = widened(b[i / 2], i % 2);
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) product.c[g + 8 * (i / 2)][t / 2][2 * (t % 2) + i % 2] = c[i];
  block_.Meet(warp.meeting, kWarp);
  if (product.exchange != exchange) {  // the first to go on multiplies for all
    product.Multiply();
    product.exchange = exchange;
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) c[i] = static_cast<float>(product.c[g + 8 * (i / 2)][t / 2][2 * (t % 2) + i % 2]);
}

float EmulatedMachine::Exp2(float x) { return x < -126 ? 0 : std::exp2(x); }

uint16_t EmulatedMachine::Bits(DType dtype, float x) {
  return dtype == DType::kBF16 ? ToBF16(x).bits : ToF16(x).bits;
}

void RunEmulated(const EmulatedGrid& grid, const std::function<void(EmulatedMachine&)>& kernel) {
  for (int z = 0; z < grid.blocks[2]; ++z) {
    for (int y = 0; y < grid.blocks[1]; ++y) {
      for (int x = 0; x < grid.blocks[0]; ++x) EmulatedBlock(grid, {x, y, z}, kernel).Run();
    }
  }
}

}  // namespace heed::cuda
