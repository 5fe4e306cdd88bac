// What libstdc++ 12 and its headers use of a glibc newer than 2.28, for files that are linked for glibc 2.28.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <time.h>

#define HIDDEN __attribute__((visibility("hidden")))

// glibc 2.32: nonzero while the process has one thread, so that reference counts need no atomic instructions. Zero is
// right for every process.
HIDDEN char __libc_single_threaded;

// glibc 2.30: waits until `deadline` of `clock`; std::condition_variable::wait_for() does so with CLOCK_MONOTONIC. As
// older versions of libstdc++ do, it waits by CLOCK_REALTIME for what is left; if the time is set meanwhile, it wakes
// early or late.
HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                  const struct timespec* deadline) {
  const long kSecond = 1000000000;
  struct timespec now, until;
  if (clock == CLOCK_REALTIME) return pthread_cond_timedwait(condition, mutex, deadline);
  if (clock_gettime(clock, &now) != 0 || clock_gettime(CLOCK_REALTIME, &until) != 0) return EINVAL;
  until.tv_sec += deadline->tv_sec - now.tv_sec;
  until.tv_nsec += deadline->tv_nsec - now.tv_nsec;
  if (until.tv_nsec >= kSecond) {
    until.tv_nsec -= kSecond;
    ++until.tv_sec;
  } else if (until.tv_nsec < 0) {
    until.tv_nsec += kSecond;
    --until.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &until);
}
