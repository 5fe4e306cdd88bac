// Calls one pass of a mechanism a number of times, on one thread, for a counter of instructions: what a call takes is
// the difference of two runs.
// Usage: run_pass MECHANISM PASS VARIANT DTYPE TOKENS HEADS CHANNELS TARGET CALLS
#include <cstdlib>
#include <exception>
#include <iostream>
#include <span>
#include <string>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/dtype.h"
#include "heed/core/tensor.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"

namespace heed {
namespace {

void RunPass(std::span<char* const> arguments) {
  const auto number = [&](size_t i) { return static_cast<int64_t>(std::stoll(arguments[i])); };
  const int64_t tokens = number(4), heads = number(5), channels = number(6);
  const Case c = FindOp(arguments[0])
                     .make_case({.sizes = {1, tokens, tokens, heads, heads, channels, channels},
                                 .dtype = DTypeFromName(arguments[3]),
                                 .pass = arguments[1],
                                 .variant = arguments[2]});
  Context ctx(1);
  ctx.set_isa(arguments[7]);
  std::vector<Buffer> buffers;
  for (const OutputSpec& output : c.outputs) buffers.emplace_back(output.dtype, output.sizes);
  std::vector<TensorView> outputs;
  for (const Buffer& buffer : buffers) outputs.push_back(buffer.view());
  c.run(ctx, outputs);
  for (int64_t call = 0; call < number(8); ++call) (c.timed ? c.timed : c.run)(ctx, outputs);
}

}  // namespace
}  // namespace heed

int main(int argc, char** argv) {
  try {
    if (argc != 10) {
      std::cerr << "usage: run_pass MECHANISM PASS VARIANT DTYPE TOKENS HEADS CHANNELS TARGET CALLS\n";
      return EXIT_FAILURE;
    }
    heed::RunPass({argv + 1, argv + argc});
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "run_pass: " << error.what() << "\n";
    return EXIT_FAILURE;
  }
}
