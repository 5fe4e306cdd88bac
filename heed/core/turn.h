// Ordered reductions: tasks of a parallel region add to one place in a fixed order.
#ifndef HEED_CORE_TURN_H_
#define HEED_CORE_TURN_H_

#include <atomic>
#include <cstdint>

namespace heed {

// A place that many tasks add to, in the order of their tickets 0, 1, 2, ... Tasks must be started in that order, so
// that a task only waits for tasks that are running.
using Turn = std::atomic<int32_t>;
void WaitForTurn(Turn& turn, int64_t mine);
void EndTurn(Turn& turn);

}  // namespace heed

#endif  // HEED_CORE_TURN_H_
