// The emulated machine: threads as fibers, barriers, and warp-wide operations.
#include "tests/cuda/emulated_machine.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "heed/core/os.h"
#include "tests/cuda/fiber.h"

namespace heed::cuda {
namespace {

constexpr size_t kExchangeBytes = 64;  // most of a thread

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

// Threads that wait at a barrier.
struct ThreadBarrier {
  std::vector<int> waiting;
};

// Four columns of a product, in the target's vectors.
typedef double Columns __attribute__((vector_size(32)));

// C + A B of a warp, with each sum in double and rounded once.
struct Product {
  double a[16][16];
  Columns b[16][2], c[16][2];
  int exchange = -1;  // the exchange whose result is in c

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
  ThreadBarrier waiters;
  alignas(16) unsigned char slots[2][kWarp][kExchangeBytes];
  Product products[2];
};

float Widened(DType dtype, uint16_t bits) {
  return dtype == DType::kBF16 ? std::bit_cast<float>(uint32_t{bits} << 16) : ToFloat(F16{bits});
}

}  // namespace

class EmulatedBlock {
 public:
  EmulatedBlock(const EmulatedGrid& grid, const int (&place)[3], const std::function<void(EmulatedMachine&)>& kernel)
      : place_{place[0], place[1], place[2]}, kernel_(kernel), random_(grid.seed),
        shared_units_((grid.shared_bytes + 15) / 16), shared_(shared_units_ * 16, /*at_end=*/true),
        warps_(static_cast<size_t>(grid.threads / kWarp)), threads_(static_cast<size_t>(grid.threads)) {
    std::memset(shared_.data(), 0xFF, shared_units_ * 16);
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
    // One warp is delayed: as a rule it runs when the others wait for it.
    const auto late = static_cast<int>(random_() % warps_.size());
    while (!ready_.empty()) {
      const auto draw = [&] { return (random_() >> 32) * ready_.size() >> 32; };
      size_t next = draw();
      for (int i = 0; i < 8 && ready_[next] / kWarp == late; ++i) next = draw();
      current_ = ready_[next];
      ready_[next] = ready_.back();
      ready_.pop_back();
      threads_[static_cast<size_t>(current_)].fiber->Resume();
    }
    if (ended_ != threads_.size())
      throw std::logic_error("threads of a block wait at a barrier that others do not reach");
  }

  // Waits until all `count` threads have arrived.
  void ArriveAndWait(ThreadBarrier& waiters, size_t count) {
    const int me = current_;
    if (waiters.waiting.size() + 1 == count) {
      ready_.insert(ready_.end(), waiters.waiting.begin(), waiters.waiting.end());
      waiters.waiting.clear();
      ready_.push_back(me);
    } else {
      waiters.waiting.push_back(me);
    }
    threads_[static_cast<size_t>(me)].fiber->Suspend();
  }

  using Products = std::vector<EmulatedMachine::PendingWgmma>;
  // An mbarrier: the phases of TMA loads.
  struct Mbarrier {
    int ended = 0;
    bool expects = false;
    int64_t bytes = 0;  // expected and not yet in flight
    std::vector<Copy> copies;
    ThreadBarrier waiters;  // threads in MbarrierWait()

    bool is_complete() const { return expects && bytes == 0; }
  };
  void Wait(ThreadBarrier& waiters) {
    const int me = current_;
    waiters.waiting.push_back(me);
    threads_[static_cast<size_t>(me)].fiber->Suspend();
  }
  void Wake(Mbarrier& barrier) {
    if (!barrier.is_complete()) return;
    ready_.insert(ready_.end(), barrier.waiters.waiting.begin(), barrier.waiters.waiting.end());
    barrier.waiters.waiting.clear();
  }

  struct Thread {
    std::unique_ptr<Fiber> fiber;
    std::vector<Copy> copies;                   // since the last commit
    std::deque<std::vector<Copy>> copy_groups;  // in flight
    std::vector<ptrdiff_t> unfenced;            // units that copies have written since the last proxy fence
    bool fenced = false;
    Products products;                                // since the last commit
    std::deque<Products> wgmma_groups;                // in flight
    std::map<const float*, std::vector<float>> sums;  // values before the products in flight
    int exchanges = 0;
  };

  const int place_[3];
  const std::function<void(EmulatedMachine&)>& kernel_;
  std::mt19937_64 random_;
  const size_t shared_units_;
  os::GuardedMemory shared_;  // an access beyond its end faults
  std::vector<char> unfenced_ =
      std::vector<char>(shared_units_);  // units of 16 bytes that copies have written and WGMMA does not see yet
  std::map<const uint64_t*, Mbarrier> mbarriers_;
  std::vector<Warp> warps_;
  std::vector<Thread> threads_;
  std::vector<int> ready_;
  ThreadBarrier all_;
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
  // Two flags alternate: the next barrier's flag is cleared when all threads have read the last one's.
  const int of = b.syncs_ % 2;
  if (b.arrived_ == 0) b.flags_[of] = false;
  b.flags_[of] |= flag;
  if (++b.arrived_ == static_cast<int>(b.threads_.size())) {
    b.arrived_ = 0;
    ++b.syncs_;
  }
  b.ArriveAndWait(b.all_, b.threads_.size());
  return b.flags_[of];
}

const void* EmulatedMachine::Exchange(const void* mine, size_t bytes) {
  Warp& warp = block_.warps_[static_cast<size_t>(thread_ / kWarp)];
  auto& slots = warp.slots[block_.threads_[static_cast<size_t>(thread_)].exchanges++ % 2];
  std::memcpy(slots[thread_ % kWarp], mine, bytes);
  block_.ArriveAndWait(warp.waiters, kWarp);
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
  if (!is_aligned(to) || !is_aligned(from)) return;  // a GPU would fault; here the copy never lands
  block_.threads_[static_cast<size_t>(thread_)].copies.push_back({to, from, exists ? 16 : 0});
}

void EmulatedMachine::CommitCopies() {
  EmulatedBlock::Thread& thread = block_.threads_[static_cast<size_t>(thread_)];
  thread.copy_groups.push_back(std::move(thread.copies));
  thread.copies.clear();
}

void EmulatedMachine::WaitCopies(int pending) {
  EmulatedBlock::Thread& thread = block_.threads_[static_cast<size_t>(thread_)];
  for (; thread.copy_groups.size() > static_cast<size_t>(pending); thread.copy_groups.pop_front()) {
    for (const Copy& copy : thread.copy_groups.front()) {
      std::memset(copy.to, 0, 16);
      if (copy.bytes > 0) std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
      const ptrdiff_t unit = (static_cast<const char*>(copy.to) - shared()) / 16;
      block_.unfenced_[static_cast<size_t>(unit)] = true;
      thread.unfenced.push_back(unit);
    }
  }
}

void EmulatedMachine::LdMatrix(bool transposed, const void* row, uint32_t* r) {
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
  block_.ArriveAndWait(block_.warps_[static_cast<size_t>(thread_ / kWarp)].waiters,
                       kWarp);  // before a row is written again
}

void EmulatedMachine::MmaSync(DType dtype, const uint32_t* a, const uint32_t* b, float* c) {
  const auto widened = [&](uint32_t pair, int half) {
    return static_cast<double>(Widened(dtype, static_cast<uint16_t>(pair >> (16 * half))));
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
  block_.ArriveAndWait(warp.waiters, kWarp);
  if (product.exchange != exchange) {  // the first thread to resume multiplies for all
    product.Multiply();
    product.exchange = exchange;
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) c[i] = static_cast<float>(product.c[g + 8 * (i / 2)][t / 2][2 * (t % 2) + i % 2]);
}

void EmulatedMachine::FenceProxyAsync() {
  EmulatedBlock::Thread& thread = block_.threads_[static_cast<size_t>(thread_)];
  for (const ptrdiff_t unit : thread.unfenced) block_.unfenced_[static_cast<size_t>(unit)] = false;
  thread.unfenced.clear();
}

void EmulatedMachine::MbarrierInit(uint64_t* barrier) { block_.mbarriers_[barrier] = {}; }

void EmulatedMachine::MbarrierExpectTx(uint64_t* barrier, int bytes) {
  EmulatedBlock::Mbarrier& at = block_.mbarriers_.at(barrier);
  if (at.expects) throw std::logic_error("an mbarrier phase has two expected counts");
  at.expects = true;
  at.bytes += bytes;
  block_.Wake(at);
}

void EmulatedMachine::TmaLoad(const TensorMap& map, int channel, int token, int head, int batch, void* to,
                              uint64_t* barrier) {
  const TensorMapSource& rows = *reinterpret_cast<const TensorMapSource*>(&map);
  EmulatedBlock::Mbarrier& at = block_.mbarriers_.at(barrier);
  const ptrdiff_t begin = static_cast<char*>(to) - shared();
  if (begin % 1024 != 0) throw std::logic_error("a TMA load to an address that is not a multiple of 1024 bytes");
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < 64; ++column) {
      const int64_t c = channel + column, t = token + row;
      const bool exists = c < rows.channels && t < rows.tokens && head < rows.heads && batch < rows.batches;
      const int64_t element = c + t * rows.token_stride + head * rows.head_stride + batch * rows.batch_stride;
      char* const place = shared() + begin + row * 128 + ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2;
      std::memset(place, 0xFF, 2);
      at.copies.push_back(
          {place, exists ? static_cast<const char*>(rows.data) + 2 * element : nullptr, exists ? 2 : 0});
    }
  }
  at.bytes -= 64 * 128;
  block_.Wake(at);
}

void EmulatedMachine::MbarrierWait(uint64_t* barrier, int phase) {
  EmulatedBlock::Mbarrier& at = block_.mbarriers_.at(barrier);
  while (at.ended % 2 == phase && !at.is_complete()) block_.Wait(at.waiters);
  if (at.ended % 2 != phase) return;
  for (const Copy& copy : at.copies) {  // the whole phase lands
    std::memset(copy.to, 0, 2);
    if (copy.bytes > 0) std::memcpy(copy.to, copy.from, 2);
  }
  at.copies.clear();
  at.expects = false;
  ++at.ended;
}

void EmulatedMachine::WgmmaFence() { block_.threads_[static_cast<size_t>(thread_)].fenced = true; }

void EmulatedMachine::Wgmma(const PendingWgmma& product) {
  EmulatedBlock::Thread& thread = block_.threads_[static_cast<size_t>(thread_)];
  if (!thread.fenced) throw std::logic_error("wgmma without a fence of its registers");
  const auto count = static_cast<size_t>(4 * product.tiles);
  if (thread.sums.emplace(product.c, std::vector<float>(product.c, product.c + count)).second) {
    std::fill_n(product.c, count, std::nanf(""));
  }
  thread.products.push_back(product);
}

void EmulatedMachine::WgmmaCommit() {
  EmulatedBlock::Thread& thread = block_.threads_[static_cast<size_t>(thread_)];
  thread.wgmma_groups.push_back(std::move(thread.products));
  thread.products.clear();
}

void EmulatedMachine::WgmmaWait(int pending) {
  EmulatedBlock::Thread& thread = block_.threads_[static_cast<size_t>(thread_)];
  thread.fenced = false;  // registers may be written from now on
  for (; thread.wgmma_groups.size() > static_cast<size_t>(pending); thread.wgmma_groups.pop_front()) {
    for (const PendingWgmma& product : thread.wgmma_groups.front()) Land(product);
  }
}

void EmulatedMachine::Land(const PendingWgmma& product) {
  EmulatedBlock::Thread& thread = block_.threads_[static_cast<size_t>(thread_)];
  if (const auto before = thread.sums.find(product.c); before != thread.sums.end()) {
    std::ranges::copy(before->second, product.c);
    thread.sums.erase(before);
  }
  const auto* rows = static_cast<const unsigned char*>(Exchange(product.a, sizeof(product.a)));
  const int g = thread_ % kWarp / 4, t = thread_ % 4;
  double a[2][16];  // rows g and g + 8
  for (int k = 0; k < 16; ++k) {
    for (int half = 0; half < 2; ++half) {
      if (product.shared_a.at != nullptr) {
        a[half][k] = ElementOf(product.dtype, product.shared_a, thread_ / kWarp % 4 * 16 + g + 8 * half, k);
        continue;
      }
      const size_t lane = static_cast<size_t>(4 * g + k % 8 / 2), word = static_cast<size_t>(half + 2 * (k / 8));
      uint16_t bits;
      std::memcpy(&bits, rows + lane * kExchangeBytes + 4 * word + 2 * static_cast<size_t>(k % 2), sizeof(bits));
      a[half][k] = Widened(product.dtype, bits);
    }
  }
  for (int column = 2 * t; column < 8 * product.tiles; column += column % 2 == 0 ? 1 : 7) {
    double b[16];
    for (int k = 0; k < 16; ++k) {
      b[k] = product.transposed ? ElementOf(product.dtype, product.b, k, column)
                                : ElementOf(product.dtype, product.b, column, k);
    }
    for (int half = 0; half < 2; ++half) {
      float& c = product.c[column / 8 * 4 + 2 * half + column % 2];
      double sum = product.adds ? static_cast<double>(c) : 0;
      for (int k = 0; k < 16; ++k) sum += a[half][k] * b[k];
      c = static_cast<float>(sum);
    }
  }
}

float EmulatedMachine::ElementOf(DType dtype, const WgmmaOperand& operand, int row, int column) const {
  const auto* base = reinterpret_cast<const unsigned char*>(shared());
  ptrdiff_t place = static_cast<const unsigned char*>(operand.at) - base + row / 8 * kStrideBytes + row % 8 * 128;
  place += column / 64 * operand.leading_bytes + column % 64 * 2;
  place ^= place / 128 % 8 * 16;
  if (block_.unfenced_[static_cast<size_t>(place / 16)])
    throw std::logic_error("wgmma reads shared memory without a proxy fence");
  uint16_t bits;
  std::memcpy(&bits, base + place, sizeof(bits));
  return Widened(dtype, bits);
}

float EmulatedMachine::Exp2(float x) { return x < -126 ? 0 : std::exp2(x); }

uint16_t EmulatedMachine::Bits(DType dtype, float x) { return dtype == DType::kBF16 ? ToBF16(x).bits : ToF16(x).bits; }

void RunEmulated(const EmulatedGrid& grid, const std::function<void(EmulatedMachine&)>& kernel) {
  for (int z = 0; z < grid.blocks[2]; ++z) {
    for (int y = 0; y < grid.blocks[1]; ++y) {
      for (int x = 0; x < grid.blocks[0]; ++x) EmulatedBlock(grid, {x, y, z}, kernel).Run();
    }
  }
}

}  // namespace heed::cuda
