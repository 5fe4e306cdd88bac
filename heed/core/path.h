// Paths of files: UTF-8 in strings, as all of heed has them, whatever the system's own encoding is.
#ifndef HEED_CORE_PATH_H_
#define HEED_CORE_PATH_H_

#include <filesystem>
#include <string>
#include <string_view>

namespace heed {

inline std::filesystem::path ToPath(std::string_view utf8) { return std::u8string(utf8.begin(), utf8.end()); }

inline std::string ToUtf8(const std::filesystem::path& path) {
  const std::u8string utf8 = path.u8string();
  return {utf8.begin(), utf8.end()};
}

}  // namespace heed

#endif  // HEED_CORE_PATH_H_
