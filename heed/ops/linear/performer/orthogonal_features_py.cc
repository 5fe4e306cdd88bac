// Bindings of heed.orthogonal_features.
#include "heed/ops/linear/performer/orthogonal_features.h"

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "docstrings/orthogonal_features.h"
#include "python/arguments.h"
#include "python/docstring.h"
#include "python/numpy_array.h"
#include "python/runtime.h"

namespace heed::python {
namespace {

constexpr char kOp[] = "orthogonal_features";
constexpr int64_t kMostRows = 1 << 24, kMostColumns = 4096;

nb::object Array(nb::handle m, nb::handle d, nb::handle seed, nb::handle scaling, nb::handle haar_fix) {
  const int64_t sizes[] = {ToInt({kOp, "m", m}, 1, kMostRows), ToInt({kOp, "d", d}, 1, kMostColumns)};
  const uint64_t key = ToUnsigned({kOp, "seed", seed});
  const OrthogonalFeaturesOptions options = {
      ToInt({kOp, "scaling", scaling}, 0, 1) == 0 ? FeatureNorms::kChi : FeatureNorms::kRoot,
      ToBool({kOp, "haar_fix", haar_fix})};
  NewArray w(kOp, DType::kF64, sizes);
  Context& ctx = ThreadContext(0);
  Compute(kOp, [&] { OrthogonalFeatures(ctx, key, options, w.view); });
  return w.array;
}

constexpr char kSignature[] =
    "def orthogonal_features(m: int, d: int, seed: int, *, scaling: typing.Literal[0, 1] = 0, "
    "haar_fix: bool = True) -> numpy.typing.NDArray[numpy.float64]";

constexpr Said kArguments[] = {
    {"m", "rows, at least 1"},
    {"d", "columns, 1 to 4096"},
    {"seed", "of the rows, from 0 to 2^64 - 1"},
    {"scaling", "norms of the rows: 0, those of Gaussian rows; 1, sqrt(d)"},
    {"haar_fix", "whether signs are set so that directions are uniform"},
};

constexpr char kInPython[] = R"(
Returns a new NumPy array [m, d], float64.

Example:

  >>> import heed, numpy as np
  >>> w = heed.orthogonal_features(4, 4, 0, scaling=1)
  >>> bool(np.allclose(w @ w.T, 4 * np.eye(4)))
  True)";

}  // namespace

void BindOrthogonalFeatures(nb::module_& m) {
  using namespace nanobind::literals;
  m.def(kOp, &Array, "m"_a.none(), "d"_a.none(), "seed"_a.none(), nb::kw_only(), "scaling"_a.none() = 0,
        "haar_fix"_a.none() = true, nb::sig(kSignature),
        Docstring(doc::kOrthogonalFeatures, kSignature, {kArguments}, kInPython).c_str());
}

}  // namespace heed::python
