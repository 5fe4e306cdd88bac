// Common functions of tests that fork processes.
#ifndef HEED_TESTS_FORKS_H_
#define HEED_TESTS_FORKS_H_

#if !defined(_WIN32)
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "tests/sanitizers.h"

namespace heed {

#if defined(_WIN32)
inline constexpr bool kCanFork = false;
inline constexpr char kWhyNoFork[] = "Windows has no fork()";

template <class F>
int StatusOfFork(F) {
  return -1;
}
#else
inline constexpr bool kCanFork = !HEED_THREAD_SANITIZER;
inline constexpr char kWhyNoFork[] = "ThreadSanitizer refuses threads in a forked child";

// The exit status of `child`, run in a fork; -1 if it was killed or did not end.
template <class F>
int StatusOfFork(F child) {
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(30);
    child();
    _exit(100);
  }
  int status = 0;
  if (pid < 0 || waitpid(pid, &status, 0) != pid) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
#endif

}  // namespace heed

#endif  // HEED_TESTS_FORKS_H_
