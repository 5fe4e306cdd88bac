// Cases of mechanisms on the scan engine from their tables.
#ifndef HEED_HARNESS_MECHANISM_SCANNING_CASE_H_
#define HEED_HARNESS_MECHANISM_SCANNING_CASE_H_

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "heed/harness/case.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/mechanism/scanning.h"
#include "heed/mechanism/scanning_internal.h"
#include "heed/mechanism/reference/reference_tensor_internal.h"

namespace heed::scanning {

// One mechanism with bound options.
struct Mechanism {
  Definition definition;
  mechanism::Mechanism of_problems;
};

// Sets what problems of a mechanism need to know of its definition.
void Describe(const Definition& definition, mechanism::Mechanism& m);

Mechanism Bound(const std::string& name, const Definition& definition,
                const std::shared_ptr<const mechanism::Calls>& calls, const std::string& options = "");

// Binds the options of a mechanism whose functions take its own type of options.
template <class Structs, class Own>
Mechanism Bound(const std::string& name, const Definition& definition, const Own& own,
                const mechanism::CaseFunctions<Structs, Own>& f, const std::string& options = "") {
  return Bound(name, definition, std::make_shared<const mechanism::BoundCalls<Structs, Own>>(own, f), options);
}

using Doubles = std::vector<double>;

// One channel of one sequence.
struct ChannelPlace {
  int64_t sequence, batch, channel;
  std::vector<int64_t> tokens;  // in the order of processing
};

// All places of a call that a kernel's checks would accept.
std::vector<ChannelPlace> PlacesOf(int64_t B, int64_t T, int64_t D, const Options& options);

// Rounding errors for a dtype, with u the unit roundoff of the accumulation dtype. For f64 u is doubled, as the
// reference has the same rounding.
struct Epsilon {
  double unit = 0;       // u
  double least = 0;      // smaller results may be flushed to 0
  double output = 0;     // of results stored in 16 bits
  double subnormal = 0;  // and of subnormal 16-bit results
};
Epsilon EpsilonOf(DType dtype);

// The tolerance of a value computed with `error` and then stored.
inline double Stored(double value, double error, const Epsilon& e) {
  return 1.01 * error + e.least + e.output * (std::abs(value) + error) + e.subnormal;
}

inline double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
inline double Softplus(double x) { return std::fmax(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

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
