// Cases of operations that no table describes: titles, tolerances, random layouts.
#include "heed/harness/mechanism/state_case.h"

#include <cmath>
#include <limits>

namespace heed::mechanism {

void CopyElements(const ConstTensorView& from, const TensorView& to) {
  if (from.num_elements() == 0) return;
  Shape index(static_cast<size_t>(from.rank()));
  do SetElement(to, index, GetElement(from, index));
  while (NextIndex(from.sizes(), index));
}

void AddToken(const TensorView& positions) {
  for (int64_t i = 0; i < positions.num_elements(); ++i) ++positions.as<int64_t>()[i];
}

Case DescribedCase(const std::string& op, const std::string& pass, const NamedViews& arguments,
                   const std::vector<OutputSpec>& outputs) {
  Case c;
  c.pass = pass;
  c.title = op;
  c.outputs = outputs;
  for (const auto& [name, view] : arguments) {
    if (!view.present()) continue;
    c.title += std::string(" ") + name + view.ShapeString() + "/" + ShapeString(view.strides());
    c.bytes += Bytes(view);
  }
  for (const OutputSpec& output : outputs) {
    double size = static_cast<double>(SizeOf(output.dtype));
    for (const int64_t axis : output.sizes) size *= static_cast<double>(axis);
    c.bytes += size;
  }
  return c;
}

void AllowErrors(DType dtype, double share, const std::vector<OutputSpec>& outputs, Views expected, Views allowed) {
  const bool wide = dtype == DType::kF64;
  const double u = wide ? 0x1p-53 : 0x1p-24;
  for (size_t i = 0; i < allowed.size(); ++i) {
    const DType of = outputs[i].dtype;
    const double rounding = of == DType::kBF16 ? 1.01 * 0x1p-8 : of == DType::kF16 ? 1.01 * 0x1p-11 : 2 * u;
    const double least = of == DType::kF16 ? 0x1p-24 : wide ? 0x1p-1000 : 0x1p-110;
    if (allowed[i].num_elements() == 0) continue;
    Shape index(static_cast<size_t>(allowed[i].rank()));
    do {
      const double value = std::abs(GetElement(expected[i], index));
      SetElement(allowed[i], index, share * GetElement(allowed[i], index) + rounding * value + least);
    } while (NextIndex(allowed[i].sizes(), index));
  }
}

void FillDecays(const Buffer& buffer, uint64_t seed, double mean, double cuts) {
  FillEach(buffer, seed, [mean, cuts](Random& random) {
    const double x = mean * std::log(1 - random.Uniform(0, 1));
    return random.Chance(cuts) ? -std::numeric_limits<double>::infinity() : x;
  });
}

void FillUniform(const Buffer& buffer, uint64_t seed, double low, double high) {
  FillEach(buffer, seed, [low, high](Random& random) { return random.Uniform(low, high); });
}

void FillScaled(const Buffer& buffer, uint64_t seed, double scale) {
  FillEach(buffer, seed, [scale](Random& random) { return scale * random.Normal(); });
}

void FillRows(const Buffer& buffer, uint64_t seed) {
  FillScaled(buffer, seed, 1 / std::sqrt(static_cast<double>(buffer.view().sizes().back())));
}

Buffer RandomArguments::Layout(DType dtype, const Shape& sizes, bool rows) {
  std::vector<size_t> order;  // from the innermost axis outwards
  for (size_t axis = sizes.size(); axis-- > 0;) order.push_back(axis);
  if (Chance(0.4)) std::swap(order[rows ? 1 : 0], order[rows ? 2 : 1]);
  Shape strides(sizes.size());
  int64_t next = 1;
  for (const size_t axis : order) {
    strides[axis] = next;
    next = next * std::max<int64_t>(sizes[axis], 1) + (Chance(0.3) ? Integer(1, 3) : 0);
  }
  const Placement placement = Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard;
  return Buffer(dtype, sizes, strides, placement, Integer(0, 5));
}

Buffer RandomArguments::Bounds(int64_t sequences, int64_t T) {
  Buffer bounds(DType::kI64, Shape{sequences + 1});
  std::vector<int64_t> cuts = {0, T};
  while (static_cast<int64_t>(cuts.size()) <= sequences) cuts.push_back(Integer(0, T));
  std::sort(cuts.begin(), cuts.end());
  std::copy(cuts.begin(), cuts.begin() + sequences + 1, bounds.as<int64_t>());
  return bounds;
}

}  // namespace heed::mechanism
