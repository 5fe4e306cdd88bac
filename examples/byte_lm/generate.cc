// Generates text, one byte at a time, from a model that train.py has written. The file is all it needs.
//
//   example_byte_lm FILE [--prompt TEXT] [--bytes N] [--seed N] [--logits OUT.npy]
//
// With --logits it writes the logits after each byte of the prompt, [N, 256], instead of text.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../tasks/command.h"
#include "heed/heed.h"
#include "mechanisms.h"
#include "model.h"

namespace {

void Run(std::span<char* const> arguments) {
  const Command command(arguments, {{"--prompt", "Alice was "}, {"--bytes", "400"}, {"--seed", "0"}, {"--logits", ""}},
                        "FILE [--prompt TEXT] [--bytes N] [--seed N] [--logits OUT.npy]");
  const std::string prompt = command.Text("--prompt"), npy = command.Text("--logits");
  const int64_t count = npy.empty() ? command.Integer("--bytes", 0, 1 << 30) : 0;
  std::mt19937_64 random(static_cast<uint64_t>(command.Integer("--seed", 0, INT64_MAX)));

  const ModelFile file(command.file());
  const Architecture architecture(file);
  std::vector<Mix> memory;  // states of the layers after the text so far
  for (int i = 0; i < architecture.layers; ++i) {
    memory.push_back(architecture.mechanism->make(architecture.shape));
  }
  const ByteModel model(file, architecture);
  heed::Context ctx(1);
  Token token = {};
  // The logits of the next byte, after one more byte.
  const auto step = [&](char byte) {
    token.before = std::exchange(token.byte, static_cast<unsigned char>(byte));
    const Vector logits = model.Logits(ctx, {&token, 1}, memory);
    ++token.position;
    return logits;
  };

  Vector logits, all;
  const auto began = std::chrono::steady_clock::now();
  for (const char byte : prompt) {
    logits = step(byte);
    if (!npy.empty()) all.insert(all.end(), logits.begin(), logits.end());
  }
  if (!npy.empty()) {
    heed::WriteNpy(npy, View(all, {static_cast<int64_t>(prompt.size()), kBytes}));
    return;
  }
  std::fputs(prompt.c_str(), stdout);
  for (int64_t i = 0; i < count; ++i) {
    const char byte = static_cast<char>(Sample(logits, random));
    std::putchar(byte);
    if (byte == '\n') std::fflush(stdout);
    logits = step(byte);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  std::putchar('\n');
  std::fprintf(stderr, "%.0f bytes/s, one at a time\n",
               static_cast<double>(static_cast<int64_t>(prompt.size()) + count) / took.count());
}

}  // namespace

int main(int argc, char** argv) { return Main("example_byte_lm", argc, argv, Run); }
