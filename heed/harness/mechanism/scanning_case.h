// Cases of mechanisms on the scan engine from their tables.
#ifndef HEED_HARNESS_MECHANISM_SCANNING_CASE_H_
#define HEED_HARNESS_MECHANISM_SCANNING_CASE_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "heed/harness/case.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/mechanism/scanning.h"
#include "heed/mechanism/scanning_internal.h"
#include "heed/mechanism/reference/scanning_reference_internal.h"

namespace heed::scanning {

// One mechanism with bound options.
struct Mechanism {
  Definition definition;
  mechanism::Mechanism of_problems;
};

// Sets what problems of a mechanism need to know of its definition.
void Describe(const Definition& definition, mechanism::Mechanism& m);

// Binds the options of a mechanism whose functions take its own type of options.
template <class Structs, class Own>
Mechanism Bound(const std::string& name, const Definition& definition, const Own& own,
                const mechanism::CaseFunctions<Structs, Own>& f, const std::string& options = "") {
  Mechanism m;
  m.definition = definition;
  m.of_problems.name = name;
  m.of_problems.options = options;
  Describe(definition, m.of_problems);
  mechanism::Bind<Structs>(definition.table.tensors, definition.table.states, definition.o_axes(), own, f,
                           m.of_problems);
  return m;
}

// Adds the rounding of sums over several channels to the tolerance of the gradient of a constant or of shared weights.
void RoundSums(const ConstTensorView& input, const ConstTensorView& expected, const TensorView& tolerance);

// The optional tensors of a requested problem, and the forms of the others.
struct Choice {
  std::vector<std::string> absent = {};    // names
  int64_t groups = 1;                      // 0: a form without groups
  std::vector<std::string> constant = {};  // names
  int64_t states = 16;
  int64_t taps = std::numeric_limits<int64_t>::max();  // at most, and at most as many as tokens
  int64_t shifts = 4;                                  // taps of keys
  int64_t head_channels = 8;                           // at most
  bool swapped = false;                                // swaps the order of T and D in memory
};

// Tensors with contiguous T and D, or D and T; decays of ordinary strength, unless the variant has the words "strong"
// or "vanishing".
Case MakeCase(const Mechanism& mechanism, const CaseRequest& request, const Choice& choice);
Case RandomCase(const Mechanism& mechanism, DType dtype, uint64_t seed);

// Words of variants that every mechanism on the scan engine has.
inline const std::vector<std::string> kVariants = {"state", "lengths=62", "reverse", "strided", "strong", "vanishing"};

// The entry of a mechanism: `plain` is called on given tensors; requests and seeds select options.
OpEntry EntryOf(const Mechanism& plain, OpEntry said);

}  // namespace heed::scanning

#endif  // HEED_HARNESS_MECHANISM_SCANNING_CASE_H_
