// Any bytes as a safetensors file: a FileError of one line, or tensors inside the bytes and a header that is unchanged
// after being written and read again.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/io/safetensors.h"
#include "heed/io/safetensors_header_internal.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/tensors.h"

namespace heed::fuzz {
namespace {

void CheckRewritten(const SafetensorsFile& file, std::span<const uint8_t> bytes) {
  std::string text = MakeSafetensorsHeader(file.entries(), file.metadata());
  size_t num_data = 0;
  for (const SafetensorsFile::Entry& entry : file.entries()) {
    num_data += static_cast<size_t>(entry.num_bytes);
  }
  Require(num_data <= bytes.size(), "tensors are larger than their file");
  text.append(num_data, '\0');
  const SafetensorsHeader again =
      ParseSafetensorsHeader("again", {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  Require(again.metadata == file.metadata(), "metadata changes when rewritten");
  Require(again.entries.size() == file.entries().size(), "tensors get lost");
  for (size_t i = 0; i < again.entries.size(); ++i) {
    const SafetensorsFile::Entry &a = again.entries[i], &b = file.entries()[i];
    Require(a.name == b.name && a.dtype == b.dtype && a.sizes == b.sizes && a.begin_bytes == b.begin_bytes &&
                a.num_bytes == b.num_bytes,
            "a tensor changes when rewritten");
  }
}

void Run(std::span<const uint8_t> bytes) {
  try {
    const SafetensorsFile file("F", bytes);
    for (const std::string& name : file.names()) {
      Require(file.Contains(name), "a name is not found");
      try {
        ReadAll(file.tensor(name));
      } catch (const FileError& e) {  // a dtype that heed lacks, a high rank, an invalid bool
        CheckMessage(e.what());
      }
    }
    CheckRewritten(file, bytes);
  } catch (const FileError& e) {
    CheckMessage(e.what());
  }
}

}  // namespace
}  // namespace heed::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  heed::fuzz::Run({data, size});
  return 0;
}
