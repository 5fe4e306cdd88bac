// Quoting, alignment and the values of bools, for the readers of files.
#include <cstring>

#include "heed/core/error.h"
#include "heed/io/bytes_internal.h"

namespace heed {

std::string Quote(std::string_view text) {
  constexpr size_t kLimit = 80;
  constexpr char kHex[] = "0123456789abcdef";
  std::string quoted = "'";
  for (const char c : text.substr(0, kLimit)) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7F) {
      quoted += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      quoted += c;
    }
  }
  return quoted + (text.size() > kLimit ? "...'" : "'");
}

bool IsAligned(const void* data, DType dtype) { return reinterpret_cast<uintptr_t>(data) % SizeOf(dtype) == 0; }

AlignedBytes CopyAligned(const void* data, size_t num_bytes) {
  AlignedBytes copy(os::AllocateAligned(num_bytes));
  if (num_bytes > 0) std::memcpy(copy.get(), data, num_bytes);
  return copy;
}

void CheckBools(const std::string& what, const void* data, size_t num_bytes) {
  const uint8_t* bytes = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < num_bytes; ++i) {
    if (bytes[i] > 1) {
      throw FileError(what + " has " + std::to_string(bytes[i]) + " for a bool at element " + std::to_string(i) +
                      ", expected 0 or 1");
    }
  }
}

}  // namespace heed
