// Files embedded into the program, which cmake/embed.cmake generates.
#ifndef HEED_PAGES_EMBEDDED_FILE_H_
#define HEED_PAGES_EMBEDDED_FILE_H_

#include <cstddef>
#include <string_view>

namespace heed::pages {

struct EmbeddedFile {
  std::string_view name, bytes;
};

extern const EmbeddedFile kPageFiles[];  // heed/pages/web/*
extern const size_t kNumPageFiles;

}  // namespace heed::pages

#endif  // HEED_PAGES_EMBEDDED_FILE_H_
