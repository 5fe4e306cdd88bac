// Prints tokens of a language model from a folder in Transformers' format, each as soon as it is generated.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include "heed/heed.h"

int main(int argc, char** argv) {
  if (argc < 3) {
    std::printf("usage: %s FOLDER ID...\n", argv[0]);
    return 0;
  }
  try {
    const heed::Model model = heed::Model::Open(argv[1]);
    std::vector<int64_t> prompt;
    for (int i = 2; i < argc; ++i) prompt.push_back(std::atoll(argv[i]));
    heed::GenerateOptions options;
    options.tokens = 16;
    options.on_tokens = [](std::span<const int64_t> tokens) {
      return std::printf("%lld\n", static_cast<long long>(tokens[0])) > 0;
    };
    heed::Context ctx;
    model.Generate(ctx, {prompt}, options);
  } catch (const std::exception& error) {  // one line: the error, and what was expected
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
