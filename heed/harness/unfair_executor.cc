// UnfairExecutor.
#include "heed/harness/unfair_executor.h"

#include <cfenv>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

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
    const int rounding = random_.Pick<int>({FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO});
    threads.emplace_back([=] {
      std::fesetround(rounding);
      std::this_thread::sleep_for(delay);
      body(argument, worker);
    });
    if (random_.Chance(0.3)) threads.back().join();  // runs alone until its tasks are done
  }
  for (std::thread& thread : threads) {
    if (thread.joinable()) thread.join();
  }
}

}  // namespace heed
