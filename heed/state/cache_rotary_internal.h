// Internal functions for the rotary options of caches: checks, rotation of key rows, storage in files.
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

// Throws InvalidArgument "KVCache: rotary ..." for options that are invalid for keys of `dim` elements. `name` is the
// name of the class.
void CheckCacheRotary(const std::string& name, const CacheRotary& rotary, int64_t dim);

// Rotates rows of keys; the results have the bits of Rotary(). Several threads may use it at once.
class KeyRotation {
 public:
  // The options must have been checked.
  KeyRotation(const CacheRotary& rotary, int64_t dim);

  // The heads of one token. Strides are in elements; each row is contiguous.
  struct Rows {
    const std::byte* from;
    int64_t from_stride;
    std::byte* to;  // shares no memory with `from`
    int64_t to_stride;
    int64_t heads;
    DType dtype;
  };

  // Memory of one thread, and its place in the table.
  class Worker {
   public:
    explicit Worker(const KeyRotation& rotation);
    Worker(const Worker&) = delete;
    void Rotate(int64_t position, const Rows& rows);

   private:
    const KeyRotation& rotation_;
    std::vector<double> phase_memory_, scratch_;
    positions::PhaseRow phase_;
  };

 private:
  RotaryPairs pairs_;
  int64_t dim_, rotated_;  // elements of a row, and the number of these that are rotated
  positions::PhaseTable table_;
};

// Rotary options in a file: names in the metadata, and numbers in a tensor, where NaN marks an absent field.
struct RotaryInFile {
  std::map<std::string, std::string> metadata;
  std::vector<double> numbers;
};
inline constexpr int64_t kRotaryNumbers = 13;

RotaryInFile WriteRotary(const CacheRotary& rotary);

// HasRotary returns false for metadata without rotary options; with them, the tensor of numbers is [kRotaryNumbers].
// ReadRotary throws InvalidArgument for unknown names and for numbers that WriteRotary never gives; CheckCacheRotary
// decides whether the options are valid.
bool HasRotary(const std::map<std::string, std::string>& metadata);
CacheRotary ReadRotary(const std::map<std::string, std::string>& metadata, const double* numbers);

}  // namespace heed

#endif  // HEED_STATE_CACHE_ROTARY_INTERNAL_H_
