// Ordered reductions: a task waits for its ticket, first spinning, then asleep.
#include "heed/core/turn.h"

#include <chrono>
#include <thread>

namespace heed {

void WaitForTurn(Turn& turn, int64_t mine) {
  constexpr auto kSpin = std::chrono::microseconds(50);
  auto now = turn.load(std::memory_order_acquire);
  if (now == mine) return;
  const auto give_up = std::chrono::steady_clock::now() + kSpin;
  while ((now = turn.load(std::memory_order_acquire)) != mine) {
    if (std::chrono::steady_clock::now() < give_up) {
      std::this_thread::yield();
    } else {
      turn.wait(now, std::memory_order_acquire);
    }
  }
}

void EndTurn(Turn& turn) {
  turn.fetch_add(1, std::memory_order_release);
  turn.notify_all();
}

}  // namespace heed
