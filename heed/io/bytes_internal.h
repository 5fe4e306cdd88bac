// Common functions of the readers of files: quoting text from a file, and making its bytes readable through a view.
#ifndef HEED_IO_BYTES_INTERNAL_H_
#define HEED_IO_BYTES_INTERNAL_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "heed/core/dtype.h"
#include "heed/core/os.h"

namespace heed {

// Both formats are little-endian, as is every machine that heed supports.
static_assert(std::endian::native == std::endian::little);

// 'text' for a message of one line in ASCII, whatever a file contains: other bytes are escaped, long text is cut.
std::string Quote(std::string_view text);

struct FreeAlignedDeleter {
  void operator()(void* memory) const { os::FreeAligned(memory); }
};
using AlignedBytes = std::unique_ptr<void, FreeAlignedDeleter>;

// True if `data` may be read as elements of `dtype`.
bool IsAligned(const void* data, DType dtype);

// An aligned copy.
AlignedBytes CopyAligned(const void* data, size_t num_bytes);

// Throws FileError "`what` ..." unless every byte is 0 or 1: reading another value as a bool is undefined behaviour.
void CheckBools(const std::string& what, const void* data, size_t num_bytes);

}  // namespace heed

#endif  // HEED_IO_BYTES_INTERNAL_H_
