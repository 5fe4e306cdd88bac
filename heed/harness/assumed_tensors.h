// Assumed tensors: the inputs that a mechanism needs beside q, k and v and that a file lacks. They are assumed so that
// the mechanism's cost can be compared with that of others.
#ifndef HEED_HARNESS_ASSUMED_TENSORS_H_
#define HEED_HARNESS_ASSUMED_TENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/harness/case.h"
#include "heed/harness/tensor_file.h"

namespace heed {

// Describes the assumption about a tensor of this name, for people; empty if none exists.
std::string WhatIsAssumed(const std::string& name);

// The size of each letter of an InputSpec's axes beside q, k and v of these sizes: Linformer's rows R are a quarter of
// the tokens and at most 256, Performer's features M are four per channel, nsa has three branches E, and log-linear
// attention as many levels L as the tokens need.
std::map<char, int64_t> AssumedAxes(const Sizes& sizes);

// True if a mechanism takes queries, keys and values: q or RWKV's r, k and v.
bool TakesQkv(const OpEntry& op);

// The inputs of a mechanism for a file with q, k and v: these three are required, the others optional.
std::vector<InputSpec> SpecsBesideQkv(const OpEntry& op);

// Adds to `set`, which has q, k and v, the other inputs of `op`: q as r if r is missing, other tensors as assumed, with
// the same numbers in every dtype and for every mechanism of the same shapes. `assumed` receives their names. If some
// tensor is still missing, the names of all missing tensors are returned and none is added.
std::vector<std::string> Complete(Context& ctx, const OpEntry& op, NamedTensors& set,
                                  std::vector<std::string>& assumed);

}  // namespace heed

#endif  // HEED_HARNESS_ASSUMED_TENSORS_H_
