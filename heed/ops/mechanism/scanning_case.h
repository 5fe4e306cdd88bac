// Cases of mechanisms on the scan engine from their tables.
#ifndef HEED_OPS_MECHANISM_SCANNING_CASE_H_
#define HEED_OPS_MECHANISM_SCANNING_CASE_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "heed/harness/case.h"
#include "heed/ops/mechanism/problem_case.h"
#include "heed/ops/mechanism/scanning.h"
#include "heed/ops/mechanism/scanning_internal.h"
#include "heed/ops/mechanism/scanning_reference_internal.h"

namespace heed::scanning {

template <class Own>
using Functions = mechanism::Functions<Api, Own>;

// One mechanism, with options of its own bound.
struct Mechanism {
  Definition definition;
  mechanism::Mechanism of_problems;
};

// What a definition says of problems.
mechanism::Structs<Api> StructsOf(const Definition& definition);
void Describe(const Definition& definition, mechanism::Mechanism& m);

// One whose functions take options of its own kind: with these. Its Explain is the definition's.
template <class Own>
Mechanism Bound(const std::string& name, const Definition& definition, const Own& own, Functions<Own> f,
                const std::string& options = "") {
  f.explain = [=](const Context& ctx, const Inputs& in, const Own& with) {
    return Explain(name.c_str(), ctx, definition, in, with);
  };
  f.backward_workspace = [=](const Context& ctx, const Inputs& in, const Own& with) {
    return BackwardWorkspace(name.c_str(), ctx, definition, in, with);
  };
  Mechanism m;
  m.definition = definition;
  m.of_problems.name = name;
  m.of_problems.options = options;
  Describe(definition, m.of_problems);
  mechanism::Bind(StructsOf(definition), own, f, m.of_problems);
  return m;
}

// Adds to the allowed errors of the gradient of a constant or of shared weights, which several
// channels have added up, what rounding their sum takes.
void RoundSums(const ConstTensorView& input, const ConstTensorView& expected, const TensorView& tolerance);

// Which of the optional tensors a requested problem has, and which of their forms others have.
struct Choice {
  std::vector<std::string> absent = {};    // names
  int64_t groups = 1;                      // 0: a form without groups
  std::vector<std::string> constant = {};  // names
  int64_t states = 16;
  int64_t taps = std::numeric_limits<int64_t>::max();  // of at most as many as tokens
  int64_t shifts = 4;                                  // taps of keys
  int64_t head_channels = 8;                           // at most
  bool swapped = false;                                // D contiguous where T is else, or T where D is
};

// Tensors with T and D contiguous or D and T; decays of ordinary strength, but for words of the
// variant: "strong", "vanishing".
Case MakeCase(const Mechanism& mechanism, const CaseRequest& request, const Choice& choice);
Case RandomCase(const Mechanism& mechanism, DType dtype, uint64_t seed);

// Words of variants that every one of them has.
inline const std::vector<std::string> kVariants = {"state", "lengths=62", "reverse", "strided", "strong", "vanishing"};

// The entry of a mechanism: `plain` is called on tensors of others, a request chooses, and a seed.
OpEntry EntryOf(const Mechanism& plain, OpEntry said);

}  // namespace heed::scanning

#endif  // HEED_OPS_MECHANISM_SCANNING_CASE_H_
