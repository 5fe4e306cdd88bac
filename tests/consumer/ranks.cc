// A user of the installed heed::distributed: a group of one process, and an error thrown inside the library.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "heed/distributed/distributed.h"
#include "heed/heed.h"

int main() {
  constexpr int64_t T = 20, H = 2, K = 8;
  std::vector<float> x(T * H * K, 0.1f), decay(x.size(), -0.1f), o(x.size()), expected(x.size());
  const auto view = [&](std::vector<float>& of) {
    return heed::TensorView(of.data(), heed::DType::kF32, {1, T, H, K});
  };
  heed::gla::Inputs in;
  in.q = in.k = in.v = view(x);
  in.log_decay = view(decay);
  heed::Context ctx(1);
  const heed::distributed::Group group;
  heed::gla::Forward(ctx, in, {}, {view(expected), {}});
  Forward(ctx, group, in, {}, {view(o), {}});
  try {
    heed::distributed::ShardRanges(-1, 2, heed::distributed::Order::kContiguous);
  } catch (const heed::InvalidArgument& error) {
    std::printf("expected: %s\n", error.what());
    return o == expected ? 0 : 1;
  }
  return 1;
}
