// Ranks that are threads of one process, and a transport among them.
#ifndef HEED_TESTS_LOCAL_TRANSPORT_H_
#define HEED_TESTS_LOCAL_TRANSPORT_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "heed/distributed/group.h"

namespace heed::distributed {

// Memory that ranks share. A rank that waits for others longer than a minute throws, so that no test hangs.
class LocalRanks {
 public:
  explicit LocalRanks(int size) : size_(size), slots_(static_cast<size_t>(size)) {}

  // Calls f(group) on one thread per rank, and returns what each threw, or null.
  template <class F>
  std::vector<std::exception_ptr> Run(const F& f) {
    std::vector<std::exception_ptr> errors(static_cast<size_t>(size_));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank) {
      threads.emplace_back([this, rank, &f, &errors] {
        Rank self{this, rank};
        try {
          f(Group(self.transport()));
        } catch (...) {
          errors[static_cast<size_t>(rank)] = std::current_exception();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

  int64_t num_calls() const { return num_calls_; }

 private:
  struct Slot {
    const void* data = nullptr;
    const int64_t* counts = nullptr;
  };

  struct Rank {
    LocalRanks* ranks;
    int rank;

    Transport transport() {
      Transport t;
      t.self = this;
      t.rank = rank;
      t.size = ranks->size_;
      t.all_gather = [](void* self, const void* sent, int64_t num_bytes, void* received) {
        Of(self).AllGather(sent, num_bytes, received);
      };
      t.send_receive = [](void* self, const void* sent, int64_t num_sent, int to, void* received, int64_t num_received,
                          int from) { Of(self).SendReceive(sent, num_sent, to, received, num_received, from); };
      t.all_to_all = [](void* self, const void* sent, const int64_t* num_sent, void* received,
                        const int64_t* num_received) { Of(self).AllToAll(sent, num_sent, received, num_received); };
      t.broadcast = [](void* self, void* data, int64_t num_bytes, int root) {
        Of(self).Broadcast(data, num_bytes, root);
      };
      return t;
    }
    static Rank& Of(void* self) { return *static_cast<Rank*>(self); }
    static const std::byte* At(const void* data, int64_t offset) {
      return static_cast<const std::byte*>(data) + offset;
    }
    static std::byte* At(void* data, int64_t offset) { return static_cast<std::byte*>(data) + offset; }
    static void CopyBytes(const void* from, void* to, int64_t count) {
      if (count > 0) std::memcpy(to, from, static_cast<size_t>(count));
    }
    Slot& own() const { return ranks->slots_[static_cast<size_t>(rank)]; }

    void AllGather(const void* sent, int64_t num_bytes, void* received) {
      own() = {sent, nullptr};
      ranks->Wait();
      for (int r = 0; r < ranks->size_; ++r) {
        CopyBytes(ranks->slots_[static_cast<size_t>(r)].data, At(received, r * num_bytes), num_bytes);
      }
      ranks->Wait();
    }
    void AllToAll(const void* sent, const int64_t* num_sent, void* received, const int64_t* num_received) {
      own() = {sent, num_sent};
      ranks->Wait();
      int64_t to = 0;
      for (int r = 0; r < ranks->size_; ++r) {
        const Slot& slot = ranks->slots_[static_cast<size_t>(r)];
        int64_t from = 0;
        for (int before = 0; before < rank; ++before) from += slot.counts[before];
        if (slot.counts[rank] != num_received[r]) throw std::logic_error("all_to_all: counts differ");
        CopyBytes(At(slot.data, from), At(received, to), num_received[r]);
        to += num_received[r];
      }
      ranks->Wait();
    }
    void Broadcast(void* data, int64_t num_bytes, int root) {
      own() = {data, nullptr};
      ranks->Wait();
      if (rank != root) CopyBytes(ranks->slots_[static_cast<size_t>(root)].data, data, num_bytes);
      ranks->Wait();
    }
    void SendReceive(const void* sent, int64_t num_sent, int to, void* received, int64_t num_received, int from) {
      std::unique_lock lock(ranks->mutex_);
      ++ranks->num_calls_;
      if (to >= 0) {
        ranks->messages_[{rank, to}].emplace_back(At(sent, 0), At(sent, num_sent));
        ranks->changed_.notify_all();
      }
      if (from < 0) return;
      auto& queue = ranks->messages_[{from, rank}];
      if (!ranks->changed_.wait_for(lock, kPatience, [&] { return !queue.empty(); })) {
        throw std::runtime_error("send_receive: no message");
      }
      const std::vector<std::byte> message = std::move(queue.front());
      queue.pop_front();
      if (static_cast<int64_t>(message.size()) != num_received) throw std::logic_error("send_receive: sizes differ");
      CopyBytes(message.data(), received, num_received);
    }
  };

  // A barrier.
  void Wait() {
    std::unique_lock lock(mutex_);
    ++num_calls_;
    const int64_t round = round_;
    if (++waiting_ == size_) {
      waiting_ = 0;
      ++round_;
      changed_.notify_all();
    } else if (!changed_.wait_for(lock, kPatience, [&] { return round_ != round; })) {
      throw std::runtime_error("a rank does not come");
    }
  }

  static constexpr std::chrono::seconds kPatience{60};
  int size_;
  std::vector<Slot> slots_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int>, std::deque<std::vector<std::byte>>> messages_;
  int64_t round_ = 0, num_calls_ = 0;
  int waiting_ = 0;
};

// Fails if a rank threw.
inline void ExpectNone(const std::vector<std::exception_ptr>& errors) {
  for (size_t r = 0; r < errors.size(); ++r) {
    if (!errors[r]) continue;
    try {
      std::rethrow_exception(errors[r]);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << r << ": " << error.what();
    }
  }
}

}  // namespace heed::distributed

#endif  // HEED_TESTS_LOCAL_TRANSPORT_H_
