// Numbers from environment variables that give a test run more seeds, or other ones.
#ifndef HEED_TESTS_ENVIRONMENT_H_
#define HEED_TESTS_ENVIRONMENT_H_

#include <cstdint>
#include <cstdlib>

namespace heed {

inline int64_t FromEnvironment(const char* name, int64_t absent) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? absent : std::atoll(text);
}

}  // namespace heed

#endif  // HEED_TESTS_ENVIRONMENT_H_
