// Candidate: one mechanism with one set of options, which the adviser plans, runs and ranks.
//
// A candidate states its work for given sizes without tensors, so that a cost model can predict its time at any length;
// for tensors it makes a call that can be timed and whose result can be compared. Both have the same parts.
#ifndef HEED_ADVISE_CANDIDATE_H_
#define HEED_ADVISE_CANDIDATE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "heed/advise/cost_model.h"
#include "heed/core/context.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/ops/exact/attention/attention.h"

namespace heed::advise {

// kPrefill: the outputs of all tokens. kTraining: outputs and all gradients. kDecode: one more token of each sequence,
// after those in its cache or state.
enum class Purpose { kPrefill, kTraining, kDecode };
const char* Name(Purpose purpose);  // "prefill"

struct Part {
  Work work;
  Load load;
};

// Memory in bytes.
struct Memory {
  double arguments = 0;  // inputs, outputs and gradients
  double workspace = 0;
  double state = 0;  // state for the next token: keys and values, or a recurrence's state
};

// Bytes of the states that summarise a segment of tokens (divided.h).
struct StateBytes {
  double states = 0, transitions = 0, gradients = 0;
};

// The work of a call that the processes of a group divide: the pairs of attention, or a sequence with states.
struct Division {
  bool is_attention = false;
  bool causal = false;            // of attention
  attention::Window window = {};  // of attention
  StateBytes states = {};         // of a mechanism with states
};

// The call of a candidate on tensors.
struct Call {
  // Parts in order, timed one by one, each depending on those before it. All of them can run repeatedly.
  std::vector<std::function<void(Context&)>> stages;
  // Computes `o` once; the stages do not change it. Null: the stages write it.
  std::function<void(Context&)> compute;
  ConstTensorView o;  // [B, n, H, Dv]: of all tokens, or in decoding of the last n
  // The fraction of the visible (query, key) pairs that the last run kept.
  std::function<double()> kept = [] { return 1.0; };
  std::vector<std::shared_ptr<const void>> owners;
};

class Candidate {
 public:
  virtual ~Candidate() = default;

  std::string mechanism;  // "attention"
  std::string options;    // "causal window 127,0"
  std::string python;     // the call in Python
  DType dtype = DType::kF32;
  int threads = 1;
  bool is_softmax = true;  // attention, exact or with dropped keys; otherwise another function, which the model was not
                           // trained for
  bool is_causal = false;  // no token sees later ones
  bool chooses = false;    // the kept pairs depend on tensors
  std::vector<std::string> assumed = {};  // inputs that were not given

  // The work of one call with as many queries as keys (in decoding one query, the last of Tk tokens) that keeps this
  // fraction of the visible pairs. Throws InvalidArgument for sizes that the mechanism does not take.
  virtual std::vector<Part> Parts(const Context& ctx, const Sizes& sizes, double kept) const = 0;
  virtual Memory MemoryAt(const Context& ctx, const Sizes& sizes, double kept) const = 0;

  // Returns what a group of processes divides. Throws Unsupported with the reason if it does not divide the call.
  virtual Division DivisionAt(const Context& ctx, const Sizes& sizes) const;

  // The fraction of the visible pairs kept for this number of tokens, as far as it follows from options.
  virtual double KeptOf(int64_t tokens) const;
  // Returns the fraction kept for `tokens`, given that it is `kept` for `sample_tokens`.
  virtual double KeptAt(double kept, int64_t sample_tokens, int64_t tokens) const;

  // `tensors`, q, k, v [B, T, H, D] in `dtype` and the mechanism's other inputs, outlive the call.
  virtual Call On(Context& ctx, const TensorMap& tensors) const = 0;
};

using Candidates = std::vector<std::unique_ptr<Candidate>>;

// The question that candidates are made for.
struct Question {
  Purpose purpose = Purpose::kPrefill;
  attention::Options exact;  // without tensors
  Sizes sizes;               // sizes that windows and other restrictions are chosen for
  std::vector<DType> dtypes = {DType::kF32, DType::kBF16};
  int threads = 1;
  double epsilon = 0.02;    // for certified attention
  bool has_tensors = true;  // otherwise no candidate whose selection depends on them
};

// Exact attention and variants that drop some of its keys, the exact one first.
Candidates AttentionCandidates(const Question& question);

// A mechanism in one dtype. Its inputs besides q, k and v have the shapes of `given`, with tokens cut or repeated, or
// default shapes. Null if it has no such pass. Throws InvalidArgument for sizes that it does not take.
std::unique_ptr<Candidate> MechanismCandidate(const Question& question, const OpEntry& op, const TensorMap& given,
                                              DType dtype);

}  // namespace heed::advise

#endif  // HEED_ADVISE_CANDIDATE_H_
