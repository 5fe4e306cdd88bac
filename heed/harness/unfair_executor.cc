// UnfairExecutor.
#include "heed/harness/unfair_executor.h"

#include <cfenv>
#include <chrono>
#include <iterator>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "heed/harness/rounding_modes.h"

namespace heed {

Executor UnfairExecutor::executor() {
  return {this, [](void* self) { return static_cast<UnfairExecutor*>(self)->num_threads_; },
          [](void* self, int num_workers, void (*body)(void*, int), void* argument) {
            static_cast<UnfairExecutor*>(self)->Run(num_workers, body, argument);
          }};
}

void UnfairExecutor::Run(int num_workers, void (*body)(void*, int), void* argument) {
  std::vector<int> workers;
  for (int worker = 0; worker < num_workers; ++worker) {
    if (worker == 0 || random_.Chance(0.85)) workers.push_back(worker);
  }
  for (size_t i = workers.size(); i-- > 1;) {
    std::swap(workers[i], workers[static_cast<size_t>(random_.Integer(0, static_cast<int64_t>(i)))]);
  }
  std::vector<std::thread> threads;
  for (const int worker : workers) {
    const auto delay = std::chrono::microseconds(random_.Integer(0, 60));
    const int rounding = kRoundingModes[random_.Integer(0, std::ssize(kRoundingModes) - 1)];
    const auto work = [=] {
      std::fesetround(rounding);
      std::this_thread::sleep_for(delay);
      body(argument, worker);
    };
    const bool alone = random_.Chance(0.3);  // until its tasks are done
    try {
      threads.emplace_back(work);
      if (alone) threads.back().join();
    } catch (const std::system_error&) {
      work();  // WebAssembly starts no threads
    }
  }
  for (std::thread& thread : threads) {
    if (thread.joinable()) thread.join();
  }
}

}  // namespace heed
