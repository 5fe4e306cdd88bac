// Files that the build put into the program: cmake/embed.cmake writes them.
#ifndef CLI_EMBEDDED_FILE_H_
#define CLI_EMBEDDED_FILE_H_

#include <cstddef>
#include <string_view>

namespace heed::cli {

struct EmbeddedFile {
  std::string_view name, bytes;
};

extern const EmbeddedFile kPageFiles[];  // cli/page/*
extern const size_t kNumPageFiles;

}  // namespace heed::cli

#endif  // CLI_EMBEDDED_FILE_H_
