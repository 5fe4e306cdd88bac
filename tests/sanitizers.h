// The sanitizer that a test is compiled with: g++ defines macros for it, clang has features.
#ifndef HEED_TESTS_SANITIZERS_H_
#define HEED_TESTS_SANITIZERS_H_

#if defined(__has_feature)
#define HEED_SANITIZER_FEATURE(NAME) __has_feature(NAME)
#else
#define HEED_SANITIZER_FEATURE(NAME) 0
#endif

#if defined(__SANITIZE_THREAD__) || HEED_SANITIZER_FEATURE(thread_sanitizer)
#define HEED_THREAD_SANITIZER 1
#else
#define HEED_THREAD_SANITIZER 0
#endif

#if defined(__SANITIZE_ADDRESS__) || HEED_SANITIZER_FEATURE(address_sanitizer)
#define HEED_ADDRESS_SANITIZER 1
#else
#define HEED_ADDRESS_SANITIZER 0
#endif

#endif  // HEED_TESTS_SANITIZERS_H_
