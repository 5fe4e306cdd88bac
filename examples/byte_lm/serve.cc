// Many continuations of one prompt from a model with `attention` that train.py has written.
//
//   example_byte_lm_serve FILE [--prompt TEXT] [--bytes N] [--samples N] [--beams N] [--seed N]
//
// It prints the best of some samples, then the result of a beam search. serve.h explains both.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "../tasks/command.h"
#include "heed/heed.h"
#include "model.h"
#include "serve.h"

namespace {

class Clock {
 public:
  double Seconds() const {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
    return took.count();
  }

 private:
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

// Quotes a text so that it fits on one line.
std::string Quoted(const std::string& text) {
  std::string line = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    char escaped[8] = {c, 0};
    if (byte < 32 || byte > 126) std::snprintf(escaped, sizeof(escaped), "\\x%02x", byte);
    line += c == '\n' ? "\\n" : c == '"' || c == '\\' ? std::string("\\") + c : escaped;
  }
  return line + '"';
}

void Print(const char* how, const std::vector<Continuation>& all, const Texts& texts, const Alone& best_alone,
           double seconds) {
  const double count = static_cast<double>(all.size() * all[0].text.size());
  std::printf("\n%s: %.0f bytes/s\n", how, count / seconds);
  for (const Continuation& one : all) {
    std::printf("%8.3f  %s\n", one.mean(), Quoted(one.text).c_str());
  }
  std::printf("caches: %.1f KiB; %zu that share nothing: %.1f KiB\n", static_cast<double>(texts.num_bytes()) / 1024,
              all.size(), static_cast<double>(all.size()) * static_cast<double>(best_alone.num_bytes) / 1024);
  std::printf("the first in one pass, on its own: %.3f\n",
              best_alone.log_probability / static_cast<double>(all[0].text.size()));
}

void Run(std::span<char* const> arguments) {
  const Command command(
      arguments, {{"--prompt", "Alice was "}, {"--bytes", "60"}, {"--samples", "8"}, {"--beams", "4"}, {"--seed", "0"}},
      "FILE [--prompt TEXT] [--bytes N] [--samples N] [--beams N] [--seed N]");
  const std::string& prompt = command.Text("--prompt");
  const int64_t count = command.Integer("--bytes", 1, 1 << 20);
  const int64_t samples = command.Integer("--samples", 1, 1024);
  const int64_t beams = command.Integer("--beams", 1, kBytes);
  const auto seed = static_cast<uint64_t>(command.Integer("--seed", 0, INT64_MAX));

  const ModelFile file(command.file());
  const Architecture architecture(file);
  const ByteModel model(file, architecture);
  heed::Context ctx(1);  // there is little work at a time, and the rest of the model has one thread too
  const Texts nothing(model, architecture);
  Texts text = nothing.Share(1);
  const Clock prefill;
  text.Append(ctx, Bytes(prompt));
  std::printf("prompt: %zu bytes at once, %.0f bytes/s\n", prompt.size(),
              static_cast<double>(prompt.size()) / prefill.Seconds());

  Texts drawn = text.Share(samples);
  const Clock sampling;
  std::vector<Continuation> all = Sampled(ctx, drawn, count, seed);
  const double sampling_seconds = sampling.Seconds();
  Rank(all);
  Print("samples, by mean log probability of a byte", all, drawn, InOnePass(ctx, nothing.Share(1), prompt, all[0].text),
        sampling_seconds);

  Texts searched = text.Share(beams);
  const Clock searching;
  const std::vector<Continuation> best = BeamSearch(ctx, searched, count);
  const double searching_seconds = searching.Seconds();
  Print("beam search", best, searched, InOnePass(ctx, nothing.Share(1), prompt, best[0].text), searching_seconds);
}

}  // namespace

int main(int argc, char** argv) { return Main("example_byte_lm_serve", argc, argv, Run); }
