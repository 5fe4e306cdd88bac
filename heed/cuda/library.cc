// Loads libheed_cuda once.
#include "heed/cuda/library.h"

#include <atomic>

#include "heed/core/os.h"

namespace heed::cuda {
namespace {

std::atomic<const Library*> replacement = nullptr;

struct Loaded {
  const Library* library = nullptr;
  std::string why_not;
};

Loaded Load() {
  Loaded loaded;
  void* symbol = os::LoadSymbol(kLibraryFile, kLibrarySymbol, &loaded.why_not);
  if (symbol == nullptr) return loaded;
  const Library* library = reinterpret_cast<const Library* (*)()>(symbol)();
  if (std::string(library->version) != HEED_VERSION) {
    loaded.why_not = std::string(kLibraryFile) + " is of version " + library->version + ", expected " + HEED_VERSION;
    return loaded;
  }
  loaded.library = library;
  return loaded;
}

}  // namespace

const Library* Find(std::string* why_not) {
  if (const Library* library = replacement.load()) return library;
  static const Loaded loaded = Load();
  if (loaded.library == nullptr) *why_not = loaded.why_not;
  return loaded.library;
}

void Replace(const Library* library) { replacement.store(library); }

}  // namespace heed::cuda
