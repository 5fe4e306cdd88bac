// What caches do with rotary options: check them, turn rows of keys, put them into files.
#ifndef HEED_STATE_CACHE_ROTARY_INTERNAL_H_
#define HEED_STATE_CACHE_ROTARY_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/ops/positions/phase_table_internal.h"
#include "heed/state/cache_rotary.h"

namespace heed {

// Throws InvalidArgument "KVCache: rotary ..." for options that a cache of keys of `dim`
// elements cannot have; `name` is that of the class.
void CheckCacheRotary(const std::string& name, const CacheRotary& rotary, int64_t dim);

// Turns rows of keys as Rotary() does, to the bit. May be used by several threads at once.
class KeyRotation {
 public:
  // The options have been checked.
  KeyRotation(const CacheRotary& rotary, int64_t dim);

  // The heads of one token; strides in elements, rows themselves contiguous.
  struct Rows {
    const std::byte* from;
    int64_t from_stride;
    std::byte* to;  // shares no memory with `from`
    int64_t to_stride;
    int64_t heads;
    DType dtype;
  };

  // Memory for one thread, and where it is in the table.
  class Worker {
   public:
    explicit Worker(const KeyRotation& rotation);
    Worker(const Worker&) = delete;
    void Turn(int64_t position, const Rows& rows);

   private:
    const KeyRotation& rotation_;
    std::vector<double> phase_memory_, scratch_;
    positions::PhaseRow phase_;
  };

 private:
  RotaryPairs pairs_;
  int64_t dim_, turned_;  // elements of a row, and of these turned
  positions::PhaseTable table_;
};

// As a file has them: names among the metadata, and numbers in a tensor, those of absent
// fields NaN.
struct RotaryInFile {
  std::map<std::string, std::string> metadata;
  std::vector<double> numbers;
};
inline constexpr int64_t kRotaryNumbers = 13;

RotaryInFile WriteRotary(const CacheRotary& rotary);

// Nothing without metadata of rotary; with it, numbers [kRotaryNumbers]. Throws
// InvalidArgument for names that are none and numbers that WriteRotary never gives; whether
// the options make sense is for CheckCacheRotary.
bool HasRotary(const std::map<std::string, std::string>& metadata);
CacheRotary ReadRotary(const std::map<std::string, std::string>& metadata, const double* numbers);

}  // namespace heed

#endif  // HEED_STATE_CACHE_ROTARY_INTERNAL_H_
