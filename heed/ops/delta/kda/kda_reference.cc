// The references of Kimi delta attention from its readable function, and what bounds rounding.
//
// scale is K^-1/2 by default; log_decay is [B, T, HV, K], beta [B, T, HV].
#include "heed/ops/delta/kda/kda_reference.h"

#include "heed/ops/delta/kda/kda_internal.h"
#include "heed/mechanism/reference/readable_reference_internal.h"

namespace heed::kda {
namespace {

mechanism::ReadableCall<5, 1> CallOf(const Inputs& in, const Gradients& d = {}) {
  return {.heads = 'G',
          .shared_heads = 'H',
          .tensors = {{{"BTHK", in.q, d.q},
                       {"BTHK", in.k, d.k},
                       {"BTGV", in.v, d.v},
                       {"BTGK", in.log_decay, d.log_decay},
                       {"BTG", in.beta, d.beta}}},
          .states = {{{.axes = "BGKV", .initial = in.initial.S, .dinitial = d.initial.S}}},
          .o = {.axes = "BTGV"}};
}

}  // namespace

recurrent::DeltaMath Math(const Inputs& in, const Options& options) {
  recurrent::DeltaMath math;
  math.scale = recurrent::RootScale(in, options);
  math.log_decay = recurrent::PerTokenChannel(in.log_decay);
  math.beta = true;
  return math;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  auto call = CallOf(in);
  call.o.value = out.o;
  call.states[0].final = out.final.S;
  mechanism::RunReadable(Token{recurrent::RootScale(in, options)}, call, options);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  auto call = CallOf(in, out);
  call.o.gradient = in.d_o;
  call.states[0].d_final = in.d_final.S;
  mechanism::RunReadableBackward(Token{recurrent::RootScale(in, options)}, call, options);
}

}  // namespace heed::kda
