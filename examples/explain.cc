// The plan and the cost of a call from its shapes alone: no data is needed.
#include <cstdio>

#include "heed/heed.h"

int main() {
  const heed::ConstTensorView q(nullptr, heed::DType::kF32, {1, 8192, 14, 64});
  const heed::ConstTensorView kv(nullptr, heed::DType::kF32, {1, 8192, 2, 64});
  heed::attention::Options options;
  options.causal = true;
  options.window.left = 1023;

  heed::Context ctx;
  const heed::attention::Explanation told = heed::attention::Explain(ctx, {q, kv, kv}, options);
  std::printf("%s on %s: %s\n", told.kernel.c_str(), told.target.c_str(), told.why.c_str());
  std::printf("%.3g flops, %.3g bytes, %lld bytes of scratch\n", told.flops, told.bytes,
              static_cast<long long>(told.workspace_bytes));
}
