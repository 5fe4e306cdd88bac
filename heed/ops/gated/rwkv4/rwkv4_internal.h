// RWKV-4 as a recurrence over channels: its definition for the engine, and its reference in these terms.
#ifndef HEED_OPS_GATED_RWKV4_RWKV4_INTERNAL_H_
#define HEED_OPS_GATED_RWKV4_RWKV4_INTERNAL_H_

#include "heed/ops/gated/rwkv4/rwkv4.h"
#include "heed/mechanism/recurrent_internal.h"

namespace heed::rwkv4 {

// Keys take the place of queries, num and den the places of S and z.
inline constexpr recurrent::Definition kDefinition = {.decay = recurrent::DecayShape::kHead,
                                                      .normalize = true,
                                                      .channels = true,
                                                      .query_name = "k",
                                                      .state_names = {".num", ".den", ".max"}};

recurrent::BackwardInputs AsRecurrence(const BackwardInputs& in);
recurrent::Gradients AsRecurrence(const Gradients& out);

void ReferenceOfRecurrence(const recurrent::Inputs& in, const recurrent::Options& options,
                           const recurrent::Outputs& out);
void BackwardReferenceOfRecurrence(const recurrent::BackwardInputs& in, const recurrent::Options& options,
                                   const recurrent::Gradients& out);

// The tolerance of each output, derived in the .cc file.
void Tolerance(const recurrent::Inputs& in, const recurrent::Options& options, const recurrent::Outputs& expected,
               const recurrent::Outputs& tolerance);
void BackwardTolerance(const recurrent::BackwardInputs& in, const recurrent::Options& options,
                       const recurrent::Gradients& expected, const recurrent::Gradients& tolerance);

}  // namespace heed::rwkv4

#endif  // HEED_OPS_GATED_RWKV4_RWKV4_INTERNAL_H_
