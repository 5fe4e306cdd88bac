// What a mechanism needs beside q, k and v and a file does not have: assumed, so
// that its cost can be seen beside that of others.
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

// What is assumed of a tensor of that name, for people; empty where nothing is.
std::string WhatIsAssumed(const std::string& name);

// The size that each letter of an InputSpec's axes stands for beside q, k and v of these sizes: Linformer's rows R are
// a quarter of the tokens and at most 256, Performer's features M four per channel, and nsa has three branches E.
std::map<char, int64_t> AssumedAxes(const Sizes& sizes);

// Whether a mechanism takes queries, keys and values: q or RWKV's r, k and v.
bool TakesQkv(const OpEntry& op);

// What a mechanism takes, as a file with q, k and v has it: these three, and the rest if it is there.
std::vector<InputSpec> SpecsBesideQkv(const OpEntry& op);

// Adds to `set`, which has q, k and v, what else `op` needs: q as r where r is
// missing, other tensors as assumed, the same numbers in every dtype and for
// every mechanism of the same shapes. `assumed` receives their names. If some
// tensor still is missing, all that are missing are returned and none is added.
std::vector<std::string> Complete(Context& ctx, const OpEntry& op, NamedTensors& set,
                                  std::vector<std::string>& assumed);

}  // namespace heed

#endif  // HEED_HARNESS_ASSUMED_TENSORS_H_
