// Ordered reductions: tasks of a parallel region add to one place in a fixed order.
#ifndef HEED_CORE_TICKET_H_
#define HEED_CORE_TICKET_H_

#include <atomic>
#include <cstdint>

namespace heed {

// Orders the tasks that add to one place: a task waits until the counter is at least its ticket 0, 1, 2, ..., adds, and
// releases the ticket. Tasks must be started in the order of their tickets, so that a task only waits for tasks that
// are running.
using TicketCounter = std::atomic<int32_t>;
void WaitForTicket(TicketCounter& counter, int64_t ticket);
void ReleaseTicket(TicketCounter& counter);

}  // namespace heed

#endif  // HEED_CORE_TICKET_H_
