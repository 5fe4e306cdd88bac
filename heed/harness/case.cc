// Names of sizes, lookup of an operation, and the comparison with a reference.
#include "heed/harness/case.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <ostream>
#include <utility>

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

// One buffer per output, in f64 for the values of a reference.
std::vector<Buffer> Allocate(const Case& c, bool reference) {
  std::vector<Buffer> buffers;
  for (const OutputSpec& spec : c.outputs) {
    if (reference || spec.strides.empty()) {
      buffers.emplace_back(reference ? DType::kF64 : spec.dtype, spec.sizes);
    } else {
      buffers.emplace_back(spec.dtype, spec.sizes, spec.strides, Placement::kBeforeGuard);
    }
  }
  return buffers;
}

// The index of the n-th element in row-major order.
std::vector<int64_t> IndexOf(std::span<const int64_t> sizes, int64_t n) {
  std::vector<int64_t> index(sizes.size());
  for (size_t axis = sizes.size(); axis-- > 0; n /= sizes[axis]) index[axis] = n % sizes[axis];
  return index;
}

std::vector<TensorView> Views(const std::vector<Buffer>& buffers) {
  std::vector<TensorView> views;
  for (const Buffer& buffer : buffers) views.push_back(buffer.view());
  return views;
}

}  // namespace

std::string ToString(const Sizes& s) {
  std::string text = "B";
  text += std::to_string(s.B);
  return text + "_" + Pair("T", s.Tq, s.Tk) + "_" + Pair("H", s.Hq, s.Hkv) + "_" + Pair("D", s.D, s.Dv);
}

std::ostream& operator<<(std::ostream& os, const Sizes& sizes) { return os << ToString(sizes); }

OpEntry FindOp(std::string_view name) {
  std::string names;
  for (const OpEntry& op : AllOps()) {
    if (op.name == name) return op;
    names += (names.empty() ? "" : ", ") + op.name;
  }
  throw InvalidArgument("mechanism is " + std::string(name) + ", expected one of " + names);
}

Expected ExpectedOf(const Case& c) {
  Expected expected = {Allocate(c, true), Allocate(c, true)};
  c.reference(Views(expected.values), Views(expected.tolerance));
  return expected;
}

Comparison CompareResults(const Case& c, std::span<const ConstTensorView> results, const Expected& reference) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto& [expected, tolerance] = reference;
  Comparison worst;
  double got = 0, want = 0;
  std::pair<size_t, int64_t> where;  // output and element
  bool any = false;
  for (size_t i = 0; i < results.size(); ++i) {
    const ConstTensorView& result = results[i];
    double& max_error = worst.max_errors.emplace_back(0);
    if (result.num_elements() == 0) continue;
    const std::vector<double> got_all = Elements(result), expected_all = Elements(expected[i].view());
    const std::vector<double> allowed_all = Elements(tolerance[i].view());
    for (size_t n = 0; n < got_all.size(); ++n) {
      const double x = got_all[n], y = expected_all[n], allowed = allowed_all[n];
      double error = std::abs(x - y), ratio;
      if (std::isnan(x) || std::isnan(y)) {
        error = ratio = std::isnan(x) && std::isnan(y) ? 0 : kInfinity;
      } else if (x == y) {
        error = ratio = 0;  // equal, also if infinite
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
        where = {i, static_cast<int64_t>(n)};
        got = x;
        want = y;
      }
    }
  }
  if (any) {
    worst.where = c.outputs[where.first].name + ShapeString(IndexOf(results[where.first].sizes(), where.second));
  }
  worst.ok = worst.worst_ratio <= 1;
  if (!any) {
    worst.message = "nothing to compare";
  } else {
    worst.message = worst.where + " is " + Number(got) + ", expected " + Number(want) + " within " +
                    Number(worst.tolerance) + " (error " + Number(worst.error) + ")";
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
