// Environment variables: numbers that give a test run more seeds, or other ones, and HEED_ISA.
#ifndef HEED_TESTS_ENVIRONMENT_H_
#define HEED_TESTS_ENVIRONMENT_H_

#include <cstdint>
#include <cstdlib>
#include <string>

namespace heed {

inline int64_t FromEnvironment(const char* name, int64_t absent) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? absent : std::atoll(text);
}

// Sets HEED_ISA, and restores it on destruction.
class ScopedIsa {
 public:
  explicit ScopedIsa(const char* value) {
    const char* const before = std::getenv("HEED_ISA");
    had_ = before != nullptr;
    if (had_) before_ = before;
    Set(value);
  }
  ~ScopedIsa() { Set(had_ ? before_.c_str() : nullptr); }

 private:
  static void Set(const char* value) {
#if defined(_WIN32)
    _putenv_s("HEED_ISA", value == nullptr ? "" : value);  // an empty value removes the variable
#else
    if (value == nullptr) {
      unsetenv("HEED_ISA");
    } else {
      setenv("HEED_ISA", value, 1);
    }
#endif
  }
  bool had_;
  std::string before_;
};

}  // namespace heed

#endif  // HEED_TESTS_ENVIRONMENT_H_
