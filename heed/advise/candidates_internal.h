// Common parts of candidates: sizes without tensors, bytes of arguments, and generated tensors.
#ifndef HEED_ADVISE_CANDIDATES_INTERNAL_H_
#define HEED_ADVISE_CANDIDATES_INTERNAL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/advise/candidate.h"
#include "heed/harness/options_text.h"

namespace heed::advise {

// Tensors of these sizes without memory.
attention::Inputs InputsOf(const Sizes& sizes, DType dtype);
attention::Inputs InputsOf(const TensorMap& tensors);  // RWKV has r instead of q
Sizes SizesOf(const attention::Inputs& in);

double SizeIn(DType dtype);       // bytes per element
double Rows(const Sizes& sizes);  // queries over all heads

// Pairs of a query and a key over all heads, only those with j <= i if `causal`.
double VisiblePairs(const Sizes& sizes, bool causal);

double ArgumentBytes(const Sizes& sizes, DType dtype);  // of q, k, v and o
double KeyValueBytes(const Sizes& sizes, DType dtype, int64_t tokens);
double TrainingBytes(const Sizes& sizes, DType dtype);  // of all gradients and the log-sum-exps

// Adds `bytes` that are read repeatedly, as an amount in units by working-set size: their cost depends on the cache
// level they fit into, which the fit of a machine determines. "byte_1M" is the cost per byte at one MiB; sizes between
// two units are interpolated logarithmically.
void AddBytes(double bytes, Load& load);

// Row-major and aligned, with pseudorandom elements between -1 and 1. Cheaper than Buffer::FillNormal.
Buffer OrdinaryNumbers(DType dtype, std::span<const int64_t> sizes, uint64_t seed = 1);

// Keeps the owner alive as long as the call.
template <class T>
std::shared_ptr<T> Keep(Call& call, std::shared_ptr<T> owner) {
  call.owners.push_back(owner);
  return owner;
}

// Adds attention of all tokens, with the gradients of q, k and v for training: one stage, whose options may change with
// each run.
void AddPasses(Call& call, Purpose purpose, const attention::Inputs& in, std::function<attention::Options()> options);
double PassesWorkspace(const Context& ctx, Purpose purpose, const attention::Inputs& in,
                       const attention::Options& options);

// Reasons for which a group refuses a call (Candidate::DivisionAt).
inline constexpr char kPatternsAreNotDivided[] = "a group does not divide patterns";
inline constexpr char kTakesNoGroup[] = "the mechanism takes no group";
inline constexpr char kOneTokenIsNotDivided[] = "a group divides the tokens of prefill and training, not of decoding";

// Tokens at the end that decoding is compared on.
inline constexpr int64_t kDecodedRows = 16;

// True without a window or a pattern, so that alternatives may add theirs.
bool IsUnrestricted(const attention::Options& options);

// The windows to try: a half, a quarter and an eighth of the tokens, in multiples of kWidthStep, the widest first.
inline constexpr int64_t kWidthStep = 16;
std::vector<int64_t> Widths(int64_t tokens);

// Options as arguments in Python, ", causal=True, window=(127, 0)".
std::string OptionsPython(const attention::Options& options);

// The shortest text that parses to this number.
std::string NumberText(double value);

// Sets the dtype and threads, which the text mentions if they are fewer than those of the question.
void SetKind(const Question& question, DType dtype, int threads, Candidate& candidate);

void AddWhole(const Question& question, Candidates& candidates);
void AddSelected(const Question& question, Candidates& candidates);
void AddCertified(const Question& question, Candidates& candidates);
void AddCached(const Question& question, Candidates& candidates);

}  // namespace heed::advise

#endif  // HEED_ADVISE_CANDIDATES_INTERNAL_H_
