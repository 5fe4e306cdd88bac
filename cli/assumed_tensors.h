// What a mechanism needs beside q, k and v and a file does not have: assumed, so
// that its cost can be seen beside that of others.
#ifndef CLI_ASSUMED_TENSORS_H_
#define CLI_ASSUMED_TENSORS_H_

#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/harness/case.h"
#include "heed/harness/tensor_file.h"

namespace heed::cli {

// What is assumed of a tensor of that name, for people; empty where nothing is.
std::string WhatIsAssumed(const std::string& name);

// Adds to `set`, which has q, k and v, what else `op` needs: q as r where r is
// missing, other tensors as assumed, the same numbers in every dtype and for
// every mechanism of the same shapes. `assumed` receives their names. If some
// tensor still is missing, all that are missing are returned and none is added.
std::vector<std::string> Complete(Context& ctx, const OpEntry& op, NamedTensors& set,
                                  std::vector<std::string>& assumed);

}  // namespace heed::cli

#endif  // CLI_ASSUMED_TENSORS_H_
