// Problems of mechanisms that make several calls of attention: common parts of their cases.
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
  BackwardInputs in;  // the outputs of the forward pass that the backward pass reads come from a run of it
  Options options;
  std::vector<OutputSpec> results;    // outputs of the forward pass
  std::vector<OutputSpec> gradients;  // requested gradients; empty: a forward pass
  std::vector<Buffer> memory;
  std::string note;  // appended to the title

  TensorView Keep(const Buffer& buffer) {
    memory.push_back(buffer);
    return buffer.view();
  }
};

// Draws random problems.
class Draw {
 public:
  Draw(DType dtype, uint64_t seed, uint64_t stream) : dtype_(dtype), random_(seed, stream), seed_(seed * 64) {}

  bool Chance(double probability) { return random_.Chance(probability); }
  int64_t Integer(int64_t low, int64_t high) { return random_.Integer(low, high); }
  int64_t Channels() { return Chance(0.7) ? Integer(1, 20) : random_.Pick<int64_t>({31, 32, 33, 64}); }
  Random& random() { return random_; }
  uint64_t NextSeed() { return ++seed_; }
  DType dtype() const { return dtype_; }

  // N(0, deviation^2) with tokens and heads in either order, gaps between rows, against either guard page.
  Buffer Tensor(const std::vector<int64_t>& sizes, double deviation);
  // Drops some of the gradients from one problem in five; true if none is left.
  bool DropsAll(std::vector<OutputSpec>& gradients);

 private:
  DType dtype_;
  Random random_;
  uint64_t seed_;
};

// " q[2, 7, 3, 20]/[420, 60, 20, 1]", or empty for an absent tensor.
std::string Described(const char* name, const ConstTensorView& tensor);

// A row-major output like the tensor: its gradient, or a result.
OutputSpec LikeTensor(const char* name, const ConstTensorView& tensor);

// Bytes to write all results and gradients once.
double BytesOf(std::span<const OutputSpec> outputs);

// Throws InvalidArgument unless the requested pass exists and the words of the variant are in `variants`, with any
// numbers.
void CheckRequest(const char* mechanism, const CaseRequest& request, const std::vector<std::string>& variants);

// A call whose only result is `o`, from its Explanation.
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

// Views of the outputs, without memory.
std::vector<TensorView> ViewsOf(std::span<const OutputSpec> outputs);

// Both passes in one call: `both` has the results and the gradients, and runs both passes.
template <class Explanation>
TensorCall TrainingOf(const Explanation& plan, const Case& both, bool causal) {
  TensorCall call = CallOf(plan, both.outputs[0], causal, {});
  call.outputs = both.outputs;
  call.run = both.run;
  return call;
}

}  // namespace heed::sparse

#endif  // HEED_OPS_SPARSE_COMMON_SPARSE_CASE_H_
