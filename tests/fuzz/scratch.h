// A temporary file, for targets that read files by name.
#ifndef TESTS_FUZZ_SCRATCH_H_
#define TESTS_FUZZ_SCRATCH_H_

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <ios>
#include <iterator>
#include <span>
#include <string>

#include "heed/core/os.h"

namespace heed::fuzz {

// A file that is rewritten for each input, and removed at the end.
class Scratch {
 public:
  explicit Scratch(const char* name)
      : path_((std::filesystem::temp_directory_path() / ("heed_fuzz_" + std::to_string(os::ProcessId()) + name))
                  .string()) {}
  ~Scratch() { std::filesystem::remove(path_); }

  const std::string& path() const { return path_; }

  // Writes a new file: some systems wait for the disk when a file is truncated.
  void Write(std::span<const uint8_t> bytes) const {
    std::filesystem::remove(path_);
    std::ofstream(path_, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }
  std::string Read() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  const std::string path_;
};

}  // namespace heed::fuzz

#endif  // TESTS_FUZZ_SCRATCH_H_
