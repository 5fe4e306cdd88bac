// Ordered reductions: a task waits for its ticket, first spinning, then asleep.
#include "heed/core/ticket.h"

#include <chrono>
#include <thread>

namespace heed {

void WaitForTicket(TicketCounter& counter, int64_t ticket) {
  constexpr auto kSpin = std::chrono::microseconds(50);
  auto now = counter.load(std::memory_order_acquire);
  if (now >= ticket) return;
  const auto give_up = std::chrono::steady_clock::now() + kSpin;
  while ((now = counter.load(std::memory_order_acquire)) < ticket) {
    if (std::chrono::steady_clock::now() < give_up) {
      std::this_thread::yield();
    } else {
      counter.wait(now, std::memory_order_acquire);
    }
  }
}

void ReleaseTicket(TicketCounter& counter) {
  counter.fetch_add(1, std::memory_order_release);
  counter.notify_all();
}

}  // namespace heed
