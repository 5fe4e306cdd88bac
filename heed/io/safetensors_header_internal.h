// The JSON header of a safetensors file: reading, with every claim checked, and writing.
#ifndef HEED_IO_SAFETENSORS_HEADER_INTERNAL_H_
#define HEED_IO_SAFETENSORS_HEADER_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "heed/io/safetensors.h"

namespace heed {

inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;
inline constexpr size_t kMaxSafetensorsNameBytes = 4096;
inline constexpr size_t kMaxSafetensorsRank = 64;

struct SafetensorsHeader {
  std::vector<SafetensorsFile::Entry> entries;
  std::map<std::string, std::string> metadata;
  size_t data_begin = 0;  // offset in the file
};

// Reads the header of a whole file. Afterwards every entry has a dtype of the format, a size that fits it and int64,
// and bytes of its own inside the data; together the entries cover all of the data. Throws FileError.
SafetensorsHeader ParseSafetensorsHeader(const std::string& path, std::span<const uint8_t> file);

// The length, the JSON and its padding, with entries in the order given. Throws InvalidArgument for text that the
// format cannot hold.
std::string MakeSafetensorsHeader(std::span<const SafetensorsFile::Entry> entries,
                                  const std::map<std::string, std::string>& metadata);

}  // namespace heed

#endif  // HEED_IO_SAFETENSORS_HEADER_INTERNAL_H_
