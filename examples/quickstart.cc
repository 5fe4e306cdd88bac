// The smallest program: causal attention over 512 tokens.
#include <vector>

#include "heed/heed.h"

int main() {
  const int64_t T = 512, H = 8, D = 64;
  std::vector<float> q(T * H * D, 0.1f), k = q, v = q, o(q.size());
  const auto view = [&](std::vector<float>& x) { return heed::TensorView(x.data(), heed::DType::kF32, {1, T, H, D}); };
  heed::Context ctx(/*num_threads=*/2);
  heed::attention::Options options;
  options.causal = true;
  heed::attention::Forward(ctx, {view(q), view(k), view(v)}, options, {.o = view(o), .lse = {}});
}
