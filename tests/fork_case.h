// What tests of forked processes have in common.
#ifndef HEED_TESTS_FORK_CASE_H_
#define HEED_TESTS_FORK_CASE_H_

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

namespace heed {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kCanFork = false;  // it refuses threads in a forked child
#else
inline constexpr bool kCanFork = true;
#endif

// The exit status of `child`, run in a fork; -1 if it was killed or hung.
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

}  // namespace heed

#endif  // HEED_TESTS_FORK_CASE_H_
