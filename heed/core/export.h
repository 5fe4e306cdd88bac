// HEED_API marks the symbols that libheed exports. All others are hidden, Highway's included.
#ifndef HEED_CORE_EXPORT_H_
#define HEED_CORE_EXPORT_H_

#if defined(HEED_STATIC)
#define HEED_API
#elif defined(_WIN32)
#if defined(HEED_BUILDING)
#define HEED_API __declspec(dllexport)
#else
#define HEED_API __declspec(dllimport)
#endif
#else
#define HEED_API __attribute__((visibility("default")))
#endif

#endif  // HEED_CORE_EXPORT_H_
