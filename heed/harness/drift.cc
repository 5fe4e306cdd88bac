// Drift: a long problem, and the errors of stretches of it.
#include "heed/harness/drift.h"

#include <algorithm>
#include <cmath>

#include "heed/harness/buffer.h"

namespace heed {

std::vector<double> Drift(Context& ctx, const OpEntry& op, const std::string& variant, int64_t channels,
                          std::span<const int64_t> ends) {
  const int64_t T = ends.back();
  const Case c = op.make_case({{1, T, T, 1, 1, channels, channels}, DType::kF32, 1, "forward", variant});
  std::vector<Buffer> memory;
  std::vector<TensorView> results, expected;
  for (const OutputSpec& spec : c.outputs) {
    memory.emplace_back(spec.dtype, spec.sizes, Placement::kAligned);
    results.push_back(memory.back().view());
    memory.emplace_back(DType::kF64, spec.sizes, Placement::kAligned);
    expected.push_back(memory.back().view());
  }
  c.run(ctx, results);
  c.reference(expected, {});

  const int64_t row = results[0].num_elements() / T;  // o is [1, T, 1, V]
  std::vector<double> errors;
  for (const int64_t end : ends) {
    double error = 0, size = 0;
    for (int64_t i = std::max<int64_t>(end - kDriftTokens, 0) * row; i < end * row; ++i) {
      const double want = expected[0].as<double>()[i];
      const double difference = static_cast<double>(results[0].as<float>()[i]) - want;
      error += difference * difference;
      size += want * want;
    }
    errors.push_back(std::sqrt(error / size));
  }
  return errors;
}

std::vector<std::string> DriftVariants(const OpEntry& op) {
  const auto has = [](const std::vector<std::string>& words, const char* word) {
    return std::find(words.begin(), words.end(), word) != words.end();
  };
  // Attention stores keys instead of sums, so its errors do not accumulate.
  if (!has(op.passes, "step") || op.family == "exact" || op.family == "sparse") return {};
  if (op.name == "log_linear_attention") return {};  // its reference computes pairs of tokens, 10^10 of these
  std::vector<std::string> variants = {has(op.variants, "causal") ? "causal" : ""};
  for (const char* word : {"strong", "vanishing", "faint"}) {
    if (has(op.variants, word)) variants.emplace_back(word);
  }
  return variants;
}

}  // namespace heed
