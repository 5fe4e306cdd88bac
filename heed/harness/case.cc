// Names of sizes, finding an operation, and the comparison with a reference.
#include "heed/harness/case.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <ostream>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"

namespace heed {
namespace {

std::string Pair(const char* name, int64_t a, int64_t b) {
  std::string text = name + std::to_string(a);
  return a == b ? text : text + "x" + std::to_string(b);
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

// One buffer per output; f64 if it is to hold what a reference says.
std::vector<Buffer> Allocate(const Case& c, bool reference) {
  std::vector<Buffer> buffers;
  for (const OutputSpec& spec : c.outputs) {
    if (reference || spec.strides.empty()) {
      buffers.emplace_back(reference ? DType::kF64 : spec.dtype, spec.sizes);
    } else {
      buffers.emplace_back(spec.dtype, spec.sizes, spec.strides,
                           Placement::kBeforeGuard);
    }
  }
  return buffers;
}

std::vector<TensorView> Views(const std::vector<Buffer>& buffers) {
  std::vector<TensorView> views;
  for (const Buffer& buffer : buffers) views.push_back(buffer.view());
  return views;
}

}  // namespace

std::string ToString(const Sizes& s) {
  return "B" + std::to_string(s.B) + "_" + Pair("T", s.Tq, s.Tk) + "_" +
         Pair("H", s.Hq, s.Hkv) + "_" + Pair("D", s.D, s.Dv);
}

std::ostream& operator<<(std::ostream& os, const Sizes& sizes) {
  return os << ToString(sizes);
}

OpEntry FindOp(std::string_view name) {
  std::string names;
  for (const OpEntry& op : AllOps()) {
    if (op.name == name) return op;
    names += (names.empty() ? "" : ", ") + op.name;
  }
  throw InvalidArgument("mechanism is " + std::string(name) +
                        ", expected one of " + names);
}

Expected ExpectedOf(const Case& c) {
  Expected expected = {Allocate(c, true), Allocate(c, true)};
  c.reference(Views(expected.values), Views(expected.tolerance));
  return expected;
}

Comparison CompareResults(const Case& c, std::span<const ConstTensorView> results,
                          const Expected& reference) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto& [expected, tolerance] = reference;
  Comparison worst;
  double got = 0, want = 0;
  bool any = false;
  for (size_t i = 0; i < results.size(); ++i) {
    const ConstTensorView& result = results[i];
    double& max_error = worst.max_errors.emplace_back(0);
    if (result.num_elements() == 0) continue;
    std::vector<int64_t> index(result.sizes().size());
    do {
      const double x = GetElement(result, index);
      const double y = GetElement(expected[i].view(), index);
      const double allowed = GetElement(tolerance[i].view(), index);
      double error = std::abs(x - y), ratio;
      if (std::isnan(x) || std::isnan(y)) {
        error = ratio = std::isnan(x) && std::isnan(y) ? 0 : kInfinity;
      } else if (x == y) {
        error = ratio = 0;  // equal infinities included
      } else {
        ratio = allowed > 0 ? error / allowed : kInfinity;
      }
      max_error = std::max(max_error, error);
      worst.max_error = std::max(worst.max_error, error);
      if (!any || ratio > worst.worst_ratio) {
        any = true;
        worst.worst_ratio = ratio;
        worst.error = error;
        worst.tolerance = allowed;
        worst.where = c.outputs[i].name + ShapeString(index);
        got = x;
        want = y;
      }
    } while (NextIndex(result.sizes(), index));
  }
  worst.ok = worst.worst_ratio <= 1;
  if (!any) {
    worst.message = "nothing to compare";
  } else {
    worst.message = worst.where + " is " + Number(got) + ", expected " +
                    Number(want) + " within " + Number(worst.tolerance) +
                    " (error " + Number(worst.error) + ")";
  }
  if (!worst.ok) worst.message += "; " + c.title;
  return worst;
}

Comparison CompareResults(const Case& c, std::span<const ConstTensorView> results) {
  return CompareResults(c, results, ExpectedOf(c));
}

Comparison Compare(const Case& c, Context& ctx) { return Compare(c, ctx, ExpectedOf(c)); }

Comparison Compare(const Case& c, Context& ctx, const Expected& expected) {
  const std::vector<Buffer> outputs = Allocate(c, false);
  c.run(ctx, Views(outputs));
  std::vector<ConstTensorView> results;
  for (const Buffer& output : outputs) results.push_back(output.view());
  return CompareResults(c, results, expected);
}

}  // namespace heed
