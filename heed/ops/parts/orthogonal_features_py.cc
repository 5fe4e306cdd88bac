// heed.orthogonal_features.
#include "heed/ops/parts/orthogonal_features.h"

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "docstrings/orthogonal_features.h"
#include "python/arguments.h"
#include "python/numpy_array.h"
#include "python/runtime.h"

namespace heed::python {
namespace {

constexpr char kOp[] = "orthogonal_features";
constexpr int64_t kMostRows = 1 << 24, kMostColumns = 4096;

nb::object Array(nb::handle m, nb::handle d, nb::handle seed, nb::handle scaling,
                 nb::handle haar_fix) {
  const int64_t sizes[] = {ToInt({kOp, "m", m}, 1, kMostRows),
                           ToInt({kOp, "d", d}, 1, kMostColumns)};
  const uint64_t key = ToUnsigned({kOp, "seed", seed});
  const OrthogonalFeaturesOptions options = {
      ToInt({kOp, "scaling", scaling}, 0, 1) == 0 ? FeatureNorms::kChi : FeatureNorms::kRoot,
      ToBool({kOp, "haar_fix", haar_fix})};
  NewArray w(kOp, DType::kF64, sizes);
  Context& ctx = ThreadContext(0);
  Compute(kOp, {}, [&] { OrthogonalFeatures(ctx, key, options, w.view); });
  return w.array;
}

constexpr char kSignature[] =
    "def orthogonal_features(m: int, d: int, seed: int, *, scaling: typing.Literal[0, 1] = 0, "
    "haar_fix: bool = True) -> numpy.typing.NDArray[numpy.float64]";

constexpr char kInPython[] = R"(

In Python. Returns a new NumPy array [m, d], float64, m at least 1. seed is below 2^64.)";

}  // namespace

void BindOrthogonalFeatures(nb::module_& m) {
  using namespace nanobind::literals;
  m.def(kOp, &Array, "m"_a.none(), "d"_a.none(), "seed"_a.none(), nb::kw_only(),
        "scaling"_a.none() = 0, "haar_fix"_a.none() = true, nb::sig(kSignature),
        (std::string(doc::kOrthogonalFeatures) + kInPython).c_str());
}

}  // namespace heed::python
