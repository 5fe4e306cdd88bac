// Efficient attention in the harness, with and without masks.
#include <cstdint>
#include <iterator>
#include <string>

#include "heed/ops/linear/efficient_attention/efficient_attention_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"

namespace heed::efficient_attention {
namespace {

mechanism::Mechanism Mechanism() {
  mechanism::Structs<Api> structs;
  const recurrent::Definition definition = DefinitionOf(nullptr);
  structs.tensors.assign(std::begin(kTensors), std::end(kTensors));
  structs.o_axes = recurrent::OutputAxes(definition);
  const mechanism::Functions<Api, Options> functions = {
      .forward = [](Context& ctx, const Masked& in, const Options& options,
                    const Outputs& out) { Forward(ctx, in, in.With(options), out); },
      .backward = [](Context& ctx, const Masked& in, const Options& options,
                     const Gradients& out) { Backward(ctx, in, in.With(options), out); },
      .reference = [](const Masked& in, const Options& options,
                      const Outputs& out) { Reference(in, in.With(options), out); },
      .backward_reference = [](const Masked& in, const Options& options,
                               const Gradients& out) { BackwardReference(in, in.With(options), out); },
      .tolerance = [](const Masked& in, const Options& options, const Outputs& expected,
                      const Outputs& tolerance) { Tolerance(in, in.With(options), expected, tolerance); },
      .backward_tolerance =
          [](const Masked& in, const Options& options, const Gradients& expected, const Gradients& tolerance) {
            BackwardTolerance(in, in.With(options), expected, tolerance);
          },
      .explain = [](const Context& ctx, const Masked& in,
                    const Options& options) { return Explain(ctx, in, in.With(options)); },
      .backward_workspace = [](const Context& ctx, const Masked& in,
                               const Options& options) { return BackwardWorkspace(ctx, in, in.With(options)); }};
  mechanism::Mechanism m;
  m.name = "efficient_attention";
  m.has_direction = false;
  recurrent::Describe(definition, m);
  mechanism::Bind(structs, Options(), functions, m);
  return m;
}

}  // namespace

OpEntry Entry() {
  OpEntry entry = mechanism::EntryOf({.family = "linear",
                                      .variants = {"lengths=62", "kv_mask"},
                                      .flops = "4 D Dv per token and value head, backward 10 D Dv",
                                      .bytes = "B Tq (2 Hkv D + 2 Hq Dv) size",
                                      .state = "none: not causal"},
                                     Mechanism());
  entry.inputs = {{"q", "BTHK"}, {"k", "BTHK"}, {"v", "BTHV"}};
  entry.make_case = [](const CaseRequest& request) {
    Case c = recurrent::MakeCase(Mechanism(), DefinitionOf(nullptr), request);
    if (request.pass == "backward") c.flops *= 10.0 / 12;
    return c;
  };
  entry.random_case = [](DType dtype, uint64_t seed) {
    return recurrent::RandomCase(Mechanism(), DefinitionOf(nullptr), dtype, seed);
  };
  return entry;
}

}  // namespace heed::efficient_attention
