// Definitions of the public functions of a mechanism, for the file that has its options.
#ifndef HEED_MECHANISM_DEFINE_INTERNAL_H_
#define HEED_MECHANISM_DEFINE_INTERNAL_H_

#include "heed/mechanism/table_internal.h"

namespace heed::mechanism {

// Summarises all tokens of a call, by passes that compute no outputs.
void Summarize(const CallInSegments& call, const Arguments& in, const Segment& out);

}  // namespace heed::mechanism

// Returns from the public Forward or Backward of a mechanism, in its namespace, if the call is computed in segments.
#define HEED_IN_SEGMENTS(name, Pass)                                                                               \
  if (options.segment != 0) {                                                                                      \
    mechanism::InSegments<Structs, Options>(#name "::" #Pass, mechanism::TableOf(kTensors, kStates), ctx, options, \
                                            &Forward, &Backward)                                                   \
        .Pass(ctx, mechanism::Lists<Structs>::Of(in), mechanism::Lists<Structs>::Of(out));                         \
    return;                                                                                                        \
  }

// Defines the public functions of a mechanism, in its namespace with its structs in `Structs`, from DefinitionOf() its
// options, as calls of `framework`, recurrent or scanning.
#define HEED_DEFINE_PASSES(framework, name)                                                                          \
  void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {                         \
    HEED_IN_SEGMENTS(name, Forward)                                                                                  \
    using Of = mechanism::Lists<Structs>;                                                                            \
    framework::Passes::Forward(#name "::Forward", ctx, DefinitionOf(options), Of::Of(in), options, Of::Of(out));     \
  }                                                                                                                  \
  void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {              \
    HEED_IN_SEGMENTS(name, Backward)                                                                                 \
    using Of = mechanism::Lists<Structs>;                                                                            \
    framework::Passes::Backward(#name "::Backward", ctx, DefinitionOf(options), Of::Of(in), options, Of::Of(out));   \
  }                                                                                                                  \
  int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {                                  \
    using Of = mechanism::Lists<Structs>;                                                                            \
    return framework::Passes::Workspace(#name "::Workspace", ctx, DefinitionOf(options), Of::Of(in), options);       \
  }                                                                                                                  \
  int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {                          \
    using Of = mechanism::Lists<Structs>;                                                                            \
    return framework::Passes::BackwardWorkspace(#name "::BackwardWorkspace", ctx, DefinitionOf(options), Of::Of(in), \
                                                options);                                                            \
  }                                                                                                                  \
  Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {                                \
    return framework::Passes::Explain(#name "::Explain", ctx, DefinitionOf(options),                                 \
                                      mechanism::Lists<Structs>::Of(in), options);                                   \
  }

// Defines Step too, for a mechanism with states.
#define HEED_DEFINE_RECURRENT(framework, name)                                                                     \
  HEED_DEFINE_PASSES(framework, name)                                                                              \
  void Step(Context& ctx, const StepInputs& in, const Options& options, const State& state, const TensorView& o) { \
    framework::Passes::Step(#name "::Step", ctx, DefinitionOf(options), {mechanism::Members(in)}, options,         \
                            {o, mechanism::Members(state)});                                                       \
  }                                                                                                                \
  HEED_DEFINE_SEGMENTS(name)

// Defines the functions of segments (structs.h) with the mechanism's forward pass.
#define HEED_DEFINE_SEGMENTS(name)                                                                                   \
  void Summarize(Context& ctx, const Inputs& in, const Options& options, const Summary& out) {                       \
    using Of = mechanism::Lists<Structs>;                                                                            \
    const mechanism::CallInSegments call = mechanism::InSegments<Structs, Options>(                                  \
        #name "::Summarize", mechanism::TableOf(kTensors, kStates), ctx, options, &Forward, &Backward);              \
    mechanism::Summarize(call, Of::Of(in), Of::Of(out));                                                             \
  }                                                                                                                  \
  void Compose(const Summary& left, const Summary& right, const Summary& out) {                                      \
    using Of = mechanism::Lists<Structs>;                                                                            \
    mechanism::Compose(#name "::Compose", mechanism::TableOf(kTensors, kStates), Of::Of(left), Of::Of(right),        \
                       Of::Of(out));                                                                                 \
  }                                                                                                                  \
  void Apply(const Summary& segment, const State& before, const State& after) {                                      \
    mechanism::Apply(#name "::Apply", mechanism::TableOf(kTensors, kStates), mechanism::Lists<Structs>::Of(segment), \
                     mechanism::Members(before), mechanism::Members(after));                                         \
  }                                                                                                                  \
  void ApplyBackward(const Summary& segment, const State& before, const State& d_after, const State& d_before) {     \
    mechanism::ApplyBackward(#name "::ApplyBackward", mechanism::TableOf(kTensors, kStates),                         \
                             mechanism::Lists<Structs>::Of(segment), mechanism::Members(before),                     \
                             mechanism::Members(d_after), mechanism::Members(d_before));                             \
  }

#endif  // HEED_MECHANISM_DEFINE_INTERNAL_H_
