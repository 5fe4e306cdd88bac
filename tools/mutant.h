// The choice among mutants at run time, in the files of a copy of the tree in which tools/mutants.py plants mutants.
//
// HEED_MUTANT is the number of the active mutant. HEED_MUTANTS_REACHED names a file of kHeedMutants bytes: a process
// that reaches mutant n sets byte n of it, through a shared mapping, so that it counts however the process ends.
#ifndef HEED_TOOLS_MUTANT_H_
#define HEED_TOOLS_MUTANT_H_

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <type_traits>

inline constexpr int kHeedMutants = 1 << 14;

struct HeedMutants {
  unsigned char unrecorded[kHeedMutants] = {};
  unsigned char* reached = unrecorded;
  int active = 0;

  void Read() {
    if (const char* number = std::getenv("HEED_MUTANT")) active = std::atoi(number);
    const char* name = std::getenv("HEED_MUTANTS_REACHED");
    const int file = name ? open(name, O_RDWR) : -1;
    if (file < 0) return;
    void* bytes = mmap(nullptr, kHeedMutants, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (bytes != MAP_FAILED) reached = static_cast<unsigned char*>(bytes);
    close(file);
  }
};

// Code that runs before the environment is read reaches no mutant.
inline constinit HeedMutants heed_mutants;
inline const bool heed_mutants_read = (heed_mutants.Read(), true);

inline bool HeedMutant(int number) {
  heed_mutants.reached[number] = 1;
  return heed_mutants.active == number;
}

// For code that the compiler has to evaluate as well, where it gets the original.
constexpr bool HeedMutantAtRunTime(int number) { return !std::is_constant_evaluated() && HeedMutant(number); }

#endif  // HEED_TOOLS_MUTANT_H_
