#include "absent_calls.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

// EINVAL makes libc++ copy by streams.
ssize_t copy_file_range(int, off_t*, int, off_t*, size_t, unsigned) {
  errno = EINVAL;
  return -1;
}

ssize_t sendfile(int, int, off_t*, size_t) {
  errno = EINVAL;
  return -1;
}

// libc++abi has destructors of thread_local objects on Linux alone. There is one thread, and it ends with the program.
int __cxa_atexit(void (*)(void*), void*, void*);

int __cxa_thread_atexit(void (*destroy)(void*), void* object, void* library) {
  return __cxa_atexit(destroy, object, library);
}

// WASI has no current folder. Where the environment names one that the program may see, paths are relative to it.
__attribute__((constructor)) static void EnterFolder(void) {
  const char* folder = getenv("PWD");
  if (folder) chdir(folder);
}

// The C library's own walks a list of threads, which never ends here. GoogleTest calls it at its end.
int pthread_key_delete(pthread_key_t) { return 0; }
