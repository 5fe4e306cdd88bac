// One head of a sequence of H3 in double, with all intermediate values.
#ifndef HEED_OPS_SSM_H3_H3_REFERENCE_INTERNAL_H_
#define HEED_OPS_SSM_H3_H3_REFERENCE_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "heed/mechanism/reference/modes_reference_internal.h"
#include "heed/ops/ssm/h3/h3.h"

namespace heed::h3 {

using scanning::Complexes;
using scanning::Doubles;

struct ReferenceHead {
  scanning::ReferencePlace place;     // whose channel is the head
  std::vector<Doubles> q, v, k_plus;  // [d][T]; for k preceded by the W - 1 keys of the tail
  std::vector<Doubles> taps;          // [d][W], including shift_D
  std::vector<Doubles> keys;          // k': [d][T]
  scanning::ReferenceRow modes;

  size_t T() const { return place.tokens.size(); }
  size_t d() const { return q.size(); }
  size_t tail() const { return d() == 0 ? 0 : taps[0].size() - 1; }
  int64_t ChannelOf(size_t i) const { return place.channel * static_cast<int64_t>(d()) + static_cast<int64_t>(i); }
};
void ForEachHead(const Inputs& in, const Options& options, const std::function<void(const ReferenceHead&)>& f);

// Sets `row`, initialised with the head's modes, to that of k'_i v_j, reusing the memory of the previous row.
void SetRow(const Inputs& in, const ReferenceHead& head, size_t i, size_t j, scanning::ReferenceRow& row);

// Gradients of the outputs, [d][T]; of the final tail, [d][W - 1]; and of the final states of a row.
std::vector<Doubles> IncomingOf(const BackwardInputs& in, const ReferenceHead& head);
std::vector<Doubles> IncomingTailOf(const BackwardInputs& in, const ReferenceHead& head);
Complexes IncomingOf(const BackwardInputs& in, const ReferenceHead& head, size_t i, size_t j);

}  // namespace heed::h3

#endif  // HEED_OPS_SSM_H3_H3_REFERENCE_INTERNAL_H_
