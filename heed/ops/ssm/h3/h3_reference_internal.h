// One head of a sequence of H3 in double, every number of it kept.
#ifndef HEED_OPS_SSM_H3_H3_REFERENCE_INTERNAL_H_
#define HEED_OPS_SSM_H3_H3_REFERENCE_INTERNAL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "heed/ops/mechanism/modes_reference_internal.h"
#include "heed/ops/ssm/h3/h3.h"

namespace heed::h3 {

using scanning::Complexes;
using scanning::Doubles;

struct ReferenceHead {
  scanning::ReferencePlace place;     // whose channel is the head
  std::vector<Doubles> q, v, k_plus;  // [d][T]; of k the W - 1 keys of the tail before them
  std::vector<Doubles> taps;          // [d][W], shift_D included
  std::vector<Doubles> keys;          // k': [d][T]
  scanning::ReferenceRow modes;

  size_t T() const { return place.tokens.size(); }
  size_t d() const { return q.size(); }
  size_t tail() const { return d() == 0 ? 0 : taps[0].size() - 1; }
  int64_t ChannelOf(size_t i) const { return place.channel * static_cast<int64_t>(d()) + static_cast<int64_t>(i); }
};
void ForEachHead(const Inputs& in, const Options& options, const std::function<void(const ReferenceHead&)>& f);

// Makes `row`, which began as the head's modes, that of k'_i v_j. Its memory is that of the row before.
void SetRow(const Inputs& in, const ReferenceHead& head, size_t i, size_t j, scanning::ReferenceRow& row);

// What comes in from outputs, [d][T]; from the last keys, [d][W - 1]; and from the last states of a row.
std::vector<Doubles> IncomingOf(const BackwardInputs& in, const ReferenceHead& head);
std::vector<Doubles> IncomingTailOf(const BackwardInputs& in, const ReferenceHead& head);
Complexes IncomingOf(const BackwardInputs& in, const ReferenceHead& head, size_t i, size_t j);

}  // namespace heed::h3

#endif  // HEED_OPS_SSM_H3_H3_REFERENCE_INTERNAL_H_
