// Problems of mechanisms that make several calls of attention: what their cases have in common.
#ifndef HEED_OPS_SPARSE_COMMON_SPARSE_CASE_H_
#define HEED_OPS_SPARSE_COMMON_SPARSE_CASE_H_

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"

namespace heed::sparse {

// Arguments of one call with their memory, which copies share.
template <class BackwardInputs, class Options>
struct Problem {
  BackwardInputs in;  // what the forward pass leaves for the backward pass is that of a run
  Options options;
  std::vector<OutputSpec> results;    // of the forward pass
  std::vector<OutputSpec> gradients;  // that are asked for; empty: a forward pass
  std::vector<Buffer> memory;
  std::string note;  // joins the title

  TensorView Keep(const Buffer& buffer) {
    memory.push_back(buffer);
    return buffer.view();
  }
};

// What random problems are drawn with.
class Draw {
 public:
  Draw(DType dtype, uint64_t seed, uint64_t stream) : dtype_(dtype), random_(seed, stream), seed_(seed * 64) {}

  bool Chance(double probability) { return random_.Chance(probability); }
  int64_t Integer(int64_t low, int64_t high) { return random_.Integer(low, high); }
  int64_t Channels() { return Chance(0.7) ? Integer(1, 20) : random_.Pick<int64_t>({31, 32, 33, 64}); }
  Random& random() { return random_; }
  uint64_t NextSeed() { return ++seed_; }
  DType dtype() const { return dtype_; }

  // N(0, deviation^2) with tokens and heads in either order, gaps between rows, at either guard.
  Buffer Tensor(const std::vector<int64_t>& sizes, double deviation);
  // Drops some of the gradients from one problem in five; true where none is left.
  bool DropsAll(std::vector<OutputSpec>& gradients);

 private:
  DType dtype_;
  Random random_;
  uint64_t seed_;
};

// " q[2, 7, 3, 20]/[420, 60, 20, 1]", or nothing of an absent tensor.
std::string Described(const char* name, const ConstTensorView& tensor);

// A tensor's gradient, or a result, row-major.
OutputSpec LikeTensor(const char* name, const ConstTensorView& tensor);

// All results and gradients written once.
double BytesOf(std::span<const OutputSpec> outputs);

// Throws InvalidArgument unless a request asks for a pass that there is, and its variant's words are of `variants`,
// with any numbers.
void CheckRequest(const char* mechanism, const CaseRequest& request, const std::vector<std::string>& variants);

// A call whose one result is `o`, as an Explanation plans it.
template <class Explanation>
TensorCall CallOf(const Explanation& plan, const OutputSpec& o, bool causal,
                  const std::function<void(Context&, const TensorView& o)>& run) {
  return {.outputs = {o},
          .run = [run](Context& ctx, std::span<const TensorView> views) { run(ctx, views[0]); },
          .causal = causal,
          .kernel = plan.kernel,
          .target = plan.target,
          .why = plan.why,
          .flops = plan.flops,
          .workspace_bytes = plan.workspace_bytes};
}

// The views that outputs will have, without memory.
std::vector<TensorView> ViewsOf(std::span<const OutputSpec> outputs);

// Both passes in one call: `both` has the results and the gradients, and runs what writes them.
template <class Explanation>
TensorCall TrainingOf(const Explanation& plan, const Case& both, bool causal) {
  TensorCall call = CallOf(plan, both.outputs[0], causal, {});
  call.outputs = both.outputs;
  call.run = both.run;
  return call;
}

}  // namespace heed::sparse

#endif  // HEED_OPS_SPARSE_COMMON_SPARSE_CASE_H_
