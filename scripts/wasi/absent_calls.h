// Calls of Linux that libc++'s std::filesystem::copy_file tries before it copies by streams. WASI has neither.
#pragma once
#include <sys/types.h>
#ifdef __cplusplus
extern "C" {
#endif
ssize_t copy_file_range(int, off_t*, int, off_t*, size_t, unsigned);
ssize_t sendfile(int, int, off_t*, size_t);
#ifdef __cplusplus
}
#endif
