// Any bytes as a call and an expression of a pattern: an InvalidArgument that names the expected form, or a pattern
// whose own expression gives the same set, and whose mask and density follow from its definition.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "heed/core/error.h"
#include "heed/patterns/pattern.h"
#include "heed/patterns/pattern_internal.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/tensors.h"

namespace heed::fuzz {
namespace {

constexpr int64_t kMostPairs = 4000;  // pairs that are evaluated by the definition, which may be slow

// The result of `f`; empty if it throws InvalidArgument.
template <class F>
auto Try(const F& f) -> std::optional<decltype(f())> {
  try {
    return f();
  } catch (const InvalidArgument& e) {
    CheckMessage(e.what());
    return std::nullopt;
  }
}

PatternCall MakeCall(Input& input) {
  PatternCall call;
  call.Tq = input.Below(100);
  call.Tk = input.Below(200);
  call.key_heads = 1 + input.Below(2);
  call.query_heads = call.key_heads * (1 + input.Below(2));
  const int64_t starts[] = {call.Tk - call.Tq, 0, -5, 70, int64_t{1} << 33, -(int64_t{1} << 33)};
  call.starts = {input.Pick(starts)};
  if (input.OneIn(4)) call.starts.push_back(input.Pick(starts));
  return call;
}

// The text of a pattern parses to the same pattern, and that has the same text. Tables too large to be printed are
// skipped.
void CheckExpression(const Pattern& pattern) {
  const std::string text = pattern.ToString();
  if (text.find('<') != std::string::npos) return;
  const std::optional<Pattern> again = Try([&] { return Pattern::Parse(text); });
  if (!again) Fail("its own expression does not parse: " + text);
  if (!(*again == pattern) || again->ToString() != text) Fail("another pattern than " + text);
}

void CheckSet(const Pattern& pattern, const PatternCall& call, bool causal, int64_t offset) {
  const auto batch = static_cast<int64_t>(call.starts.size());
  const std::vector<int64_t> shape = {batch, call.query_heads, call.Tq, call.Tk};
  const int64_t pairs = batch * call.query_heads * call.Tq * call.Tk;
  std::vector<uint8_t> keep(static_cast<size_t>(pairs), 2);
  const bool fits = Try([&] {
                      Mask(pattern, call, causal, TensorView(keep.data(), DType::kBool, shape));
                      return true;
                    }).has_value();
  const std::optional<double> density = Try([&] { return Density(pattern, call, causal); });
  Require(fits == density.has_value(), "a mask where there is no density, or the other way");
  if (!fits) return;

  double kept = 0, seen = 0;
  const int64_t step = 1 + pairs / kMostPairs, first = offset % step;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t key = i % call.Tk, row = i / call.Tk % call.Tq, bh = i / call.Tk / call.Tq;
    const int64_t b = bh / call.query_heads;
    const bool sees = !causal || key <= call.starts[static_cast<size_t>(b)] + row;
    const uint8_t got = keep[static_cast<size_t>(i)];
    kept += got;
    seen += sees;
    if (i % step != first) continue;
    const bool expected = sees && patterns::Keeps(pattern, call, b, bh % call.query_heads, row, key);
    if (got != static_cast<uint8_t>(expected)) {
      Fail("row " + std::to_string(row) + " and key " + std::to_string(key) + " of " + pattern.ToString());
    }
  }
  Require(std::abs(*density - (seen > 0 ? kept / seen : 0)) < 1e-12, "the density is not that of the mask");
}

void Run(Input input) {
  const PatternCall call = MakeCall(input);
  const bool causal = input.OneIn(2);
  const int64_t offset = input.Below(256);
  const std::string_view text(reinterpret_cast<const char*>(input.rest().data()), input.rest().size());
  const std::optional<Pattern> pattern = Try([&] { return Pattern::Parse(text); });
  if (!pattern) return;
  CheckExpression(*pattern);
  CheckSet(*pattern, call, causal, offset);
}

}  // namespace
}  // namespace heed::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  heed::fuzz::Run({data, size});
  return 0;
}
