// Candidate: one mechanism with one choice of options, which the adviser plans, runs and ranks.
//
// What a candidate has to do on sizes it says without tensors, so that a cost model can tell its time at any length; on
// tensors it makes a call that can be timed and whose result can be compared. Both know the same parts.
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

// kPrefill: the outputs of all tokens. kTraining: these and all gradients. kDecode: one more token of each sequence,
// behind those that are remembered.
enum class Purpose { kPrefill, kTraining, kDecode };
const char* Name(Purpose purpose);  // "prefill"

struct Part {
  Work work;
  Load load;
};

// In bytes.
struct Memory {
  double arguments = 0;  // inputs, outputs and gradients
  double workspace = 0;
  double state = 0;  // what the next token needs: keys and values, or a recurrence's state
};

// A candidate on tensors.
struct Call {
  // Parts in their order, to be timed one by one, each needing those before it. All of them can run again and again.
  std::vector<std::function<void(Context&)>> stages;
  // Writes `o`, once, which the stages then leave alone; null: they write it.
  std::function<void(Context&)> compute;
  ConstTensorView o;  // [B, n, H, Dv]: of all tokens, in decoding of the last n
  // The share of the visible pairs of a query and a key that it kept, once it has run.
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
  bool is_softmax = true;  // attention, exact or with keys left out; else another function, which nobody trained here
  bool is_causal = false;  // no token sees those behind it
  bool chooses = false;    // which pairs it keeps depends on tensors
  std::vector<std::string> assumed = {};  // inputs that nobody gave

  // What one call has to do with as many queries as keys (in decoding one query, the last of Tk tokens), where it keeps
  // this share of the visible pairs. Throws InvalidArgument for sizes that the mechanism does not take.
  virtual std::vector<Part> Parts(const Context& ctx, const Sizes& sizes, double kept) const = 0;
  virtual Memory MemoryAt(const Context& ctx, const Sizes& sizes, double kept) const = 0;

  // The share of the visible pairs that is kept of so many tokens, as far as options alone say it.
  virtual double KeptOf(int64_t tokens) const;
  // The same where it is `kept` of `sample_tokens`.
  virtual double KeptAt(double kept, int64_t sample_tokens, int64_t tokens) const;

  // `tensors`, q, k, v [B, T, H, D] in `dtype` and what else the mechanism takes, outlive the call.
  virtual Call On(Context& ctx, const TensorMap& tensors) const = 0;
};

using Candidates = std::vector<std::unique_ptr<Candidate>>;

// What candidates are asked for.
struct Question {
  Purpose purpose = Purpose::kPrefill;
  attention::Options exact;  // without tensors
  Sizes sizes;               // which restrictions are made for
  std::vector<DType> dtypes = {DType::kF32, DType::kBF16};
  int threads = 1;
  double epsilon = 0.02;    // of certified attention
  bool has_tensors = true;  // else none whose choice depends on them
};

// Exact attention and what leaves out some of its keys, the exact one first.
Candidates AttentionCandidates(const Question& question);

// A mechanism in one dtype. The shapes of what it takes besides q, k and v are those of `given`, whose tokens are cut
// or repeated, else what would be assumed. Null where it has no such pass. Throws InvalidArgument for sizes that it
// does not take.
std::unique_ptr<Candidate> MechanismCandidate(const Question& question, const OpEntry& op, const TensorMap& given,
                                              DType dtype);

}  // namespace heed::advise

#endif  // HEED_ADVISE_CANDIDATE_H_
