// What candidates have in common: sizes without tensors, bytes of arguments, numbers to compute with.
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
attention::Inputs InputsOf(const TensorMap& tensors);  // RWKV calls q r
Sizes SizesOf(const attention::Inputs& in);

double SizeIn(DType dtype);       // bytes of an element
double Rows(const Sizes& sizes);  // queries of all heads

// Pairs of a query and a key of all heads, of those with j <= i if `causal`.
double VisiblePairs(const Sizes& sizes, bool causal);

double ArgumentBytes(const Sizes& sizes, DType dtype);  // of q, k, v and o
double KeyValueBytes(const Sizes& sizes, DType dtype, int64_t tokens);
double TrainingBytes(const Sizes& sizes, DType dtype);  // of all gradients and the log-sum-exps

// Adds `bytes` that are read again and again, shared out among units by how many they are: what fits into a cache is
// nearer, and how near each cache of a machine is, its fit says. "byte_1M" is the cost of a byte of a mebibyte; between
// two sizes it is between theirs, by the logarithm.
void AddBytes(double bytes, Load& load);

// Row-major and aligned, its elements between -1 and 1, without a pattern that a mechanism could see. Cheap, unlike
// Buffer::FillNormal.
Buffer OrdinaryNumbers(DType dtype, std::span<const int64_t> sizes, uint64_t seed = 1);

// As long as the call lives.
template <class T>
std::shared_ptr<T> Keep(Call& call, std::shared_ptr<T> owner) {
  call.owners.push_back(owner);
  return owner;
}

// Attention of all tokens, and the gradients of q, k and v if it is trained: one stage, whose options may change with
// each run.
void AddPasses(Call& call, Purpose purpose, const attention::Inputs& in, std::function<attention::Options()> options);
double PassesWorkspace(const Context& ctx, Purpose purpose, const attention::Inputs& in,
                       const attention::Options& options);

// Tokens at the end that decoding is compared by.
inline constexpr int64_t kDecodedRows = 16;

// No window and no pattern: alternatives may have theirs.
bool IsUnrestricted(const attention::Options& options);

// What windows are tried: a half, a quarter and an eighth of the tokens, in steps of kWidthStep, the widest first.
inline constexpr int64_t kWidthStep = 16;
std::vector<int64_t> Widths(int64_t tokens);

// Options as arguments in Python, ", causal=True, window=(127, 0)".
std::string OptionsPython(const attention::Options& options);

// The shortest text that reads as this number.
std::string NumberText(double value);

// Its dtype and threads, which are said where they are fewer than those of the question.
void SetKind(const Question& question, DType dtype, int threads, Candidate& candidate);

void AddWhole(const Question& question, Candidates& candidates);
void AddSelected(const Question& question, Candidates& candidates);
void AddCertified(const Question& question, Candidates& candidates);
void AddCached(const Question& question, Candidates& candidates);

}  // namespace heed::advise

#endif  // HEED_ADVISE_CANDIDATES_INTERNAL_H_
