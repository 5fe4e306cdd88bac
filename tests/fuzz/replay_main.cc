// Runs a fuzz target without libFuzzer: on every file of the given folders, on damaged copies of them, and on random
// bytes. The inputs are the same in every run.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "heed/harness/buffer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

void Run(const Bytes& bytes) {
  const Bytes exact(bytes);  // no readable memory after the last byte
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

Bytes RandomBytes(heed::Random& random, int64_t size) {
  Bytes bytes(static_cast<size_t>(size));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.Word());
  return bytes;
}

// Changes a few bytes, or cuts off the end.
Bytes Damaged(heed::Random& random, Bytes bytes) {
  if (bytes.empty()) return bytes;
  const auto last = static_cast<int64_t>(bytes.size()) - 1;
  if (random.Chance(0.2)) {
    bytes.resize(static_cast<size_t>(random.Integer(0, last)));
    return bytes;
  }
  for (int64_t n = random.Integer(1, 4); n > 0; --n) {
    bytes[static_cast<size_t>(random.Integer(0, last))] = static_cast<uint8_t>(random.Word());
  }
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  constexpr int kDamaged = 60, kRandom = 12000;
  heed::Random random(1);
  int files = 0;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::ifstream file(entry.path(), std::ios::binary);
      const Bytes bytes(std::istreambuf_iterator<char>(file), {});
      Run(bytes);
      for (int n = 0; n < kDamaged; ++n) Run(Damaged(random, bytes));
      ++files;
    }
  }
  if (files == 0) {
    std::fprintf(stderr, "no seeds\n");
    return 1;
  }
  for (int n = 0; n < kRandom; ++n) {
    Run(RandomBytes(random, random.Integer(0, 400)));
  }
  std::printf("%d seeds, %d damaged, %d random\n", files, files * kDamaged, kRandom);
  return 0;
}
