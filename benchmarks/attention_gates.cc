// Gates of exact attention: fractions of the FMA peak, and costs of threads, layouts and options relative to the plain
// call.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "benchmarks/gates.h"
#include "cli/format.h"
#include "heed/core/os.h"

namespace heed::bench {
namespace {

// The speed-up of two threads.
constexpr Goals kSpeedUp = {1.85, 1.85, 1.90, 1.85}, kCausalSpeedUp = {1.80, 1.80, 1.90, 1.80};

// The backward pass, on its 10 N^2 d flops per head.
void AddBackward(std::vector<Line>& lines) {
  const auto backward = [](int64_t T, int64_t H, int64_t D, const char* variant, DType dtype = DType::kF32) {
    return Side{T, H, H, D, variant, 1, dtype, "backward"};
  };
  for (const int64_t D : {64, 128}) {
    for (const bool causal : {false, true}) {
      const char* variant = causal ? "causal" : "";
      const double zen4 = causal ? .80 : .86, intel = causal ? .66 : .72;
      const double avx2 = D == 64 ? (causal ? .60 : .68) : (causal ? .58 : .65);
      const auto name = [&](const char* dtype, int64_t N) {
        return Format("{} backward N {} d {} {}", dtype, N, D, causal ? variant : "full");
      };
      // On CPUs with AMX, as six products of AMX tiles.
      const double with_amx = os::HasAmx() ? 1.25 : 1;
      lines.push_back(OfPeak(name("f32", 2048), backward(2048, 4, D, variant), {zen4, with_amx * intel, avx2}));
      lines.push_back(
          OfPeak(name("f32", 512), backward(512, 8, D, variant), {0.8 * zen4, 0.8 * with_amx * intel, 0.8 * avx2}));
      const std::string on_vectors = std::string("invariant") + (causal ? "+causal" : "");
      lines.push_back(
          OfPeak("on vectors, " + name("f32", 2048), backward(2048, 4, D, on_vectors.c_str()), {zen4, intel, avx2}));
      const Side bf16 = backward(2048, 4, D, variant, DType::kBF16);
      lines.push_back(OfPeak(name("bf16", 2048), bf16, {.zen4 = .68}));
      lines.push_back(Against(name("bf16", 2048) + " / f32", Ratio::kTime, bf16, backward(2048, 4, D, variant), 1.02));
      if (os::NumUsableCpus() < 2) continue;
      AddTwoThreads(name("f32", 2048) + ", 4 heads", backward(2048, 4, D, variant), {zen4, intel, avx2}, kSpeedUp,
                    lines);
      AddTwoThreads(name("f32", 2048) + ", 1 head", backward(2048, 1, D, variant), {zen4, intel, avx2}, kSpeedUp,
                    lines);
    }
  }
  // Many short sequences, whose rows come from memory.
  Side many = {128, 12, 12, 64, "causal"};
  many.B = 32;
  lines.push_back(OfPeak("B 32 H 12 N 128 d 64 causal", many, {.zen4 = .55}));
  many.pass = "backward";
  lines.push_back(OfPeak("f32 backward B 32 H 12 N 128 d 64 causal", many, {.zen4 = .55}));
  lines.push_back(OfPeak("f32 backward window 512, N 8192 d 64", backward(8192, 2, 64, "window=512"), {.65, .55, .50}));
}

// Forgetting attention: log decays relative to the same call without them.
void AddForgetting(std::vector<Line>& lines) {
  for (const char* pass : {"forward", "backward"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int64_t D : {64, 128}) {
        for (const bool vectors : {false, true}) {
          if (vectors && (!os::HasAmx() || dtype != DType::kF32)) continue;
          const Side plain = {2048, 4, 4, D, vectors ? "invariant+causal" : "causal", 1, dtype, pass};
          Side forgets = plain;
          forgets.variant = vectors ? "invariant+log_decay" : "log_decay";
          lines.push_back(
              Against(Format("log_decay / causal, {} {}{} d {}", Name(dtype), pass, vectors ? " on vectors" : "", D),
                      Ratio::kTime, forgets, plain, 1.05));
        }
      }
    }
  }
}

// AMX: bf16 relative to the rate of AMX tiles, and f32 as six bf16 products (3xBF16) relative to the FMA peak.
void AddAmx(std::vector<Line>& lines) {
  if (!os::HasAmx()) return;
  const auto of_amx = [&](int64_t T, int64_t D, const char* variant, double goal, const char* pass = "forward") {
    const bool forward = std::string_view(pass) == "forward";
    const char* masks = variant[0] == '\0' ? "full" : variant;
    lines.push_back({Format("bf16{} of AMX, N {} d {} {}", forward ? "" : " backward", T, D, masks),
                     Ratio::kOfAmx,
                     {T, 4, 4, D, variant, 1, DType::kBF16, pass},
                     std::nullopt,
                     {.intel = goal}});
  };
  of_amx(2048, 64, "", .44);
  of_amx(2048, 128, "", .45);
  of_amx(2048, 64, "causal", .37);
  of_amx(2048, 128, "causal", .40);
  of_amx(8192, 64, "", .42);
  of_amx(8192, 128, "", .43);
  of_amx(512, 64, "", .30);
  of_amx(512, 128, "", .30);
  of_amx(2048, 64, "", .30, "backward");
  of_amx(2048, 128, "", .30, "backward");
  of_amx(2048, 64, "causal", .25, "backward");
  of_amx(2048, 128, "causal", .25, "backward");
  Side one = {2048, 4, 4, 64, "", 1, DType::kBF16}, two = one;
  two.threads = 2;
  if (os::NumUsableCpus() >= 2) {
    lines.push_back(Against("bf16 with AMX, two threads, 4 heads", Ratio::kSpeedUp, two, one, 1.85));
  }
}

}  // namespace

std::vector<Line> AttentionLines() {
  std::vector<Line> lines = {
      OfPeak("N 2048 d 64 full", {2048, 4, 4, 64, ""}, {.88, 1.08, .70}),
      OfPeak("N 2048 d 128 full", {2048, 4, 4, 128, ""}, {.90, 1.20, .72}),
      OfPeak("N 2048 d 64 causal", {2048, 4, 4, 64, "causal"}, {.82, .98, .62}),
      OfPeak("N 2048 d 128 causal", {2048, 4, 4, 128, "causal"}, {.85, 1.00, .64}),
      OfPeak("on vectors, N 2048 d 64 full", {2048, 4, 4, 64, "invariant"}, {.88, .76, .70}),
      OfPeak("on vectors, N 2048 d 128 causal", {2048, 4, 4, 128, "invariant+causal"}, {.85, .68, .64}),
      OfPeak("N 8192 d 128 full", {8192, 1, 1, 128, ""}, {.avx2 = .70}),
      OfPeak("N 512 d 64 full", {512, 8, 8, 64, ""}, {.80, .70, .65}),
      OfPeak("N 512 d 64 causal", {512, 8, 8, 64, "causal"}, {.zen4 = .70, .avx2 = .55}),
      OfPeak("N 128 d 64 full", {128, 16, 16, 64, ""}, {.zen4 = .65, .avx2 = .55}),
      OfPeak("window 512, N 8192 d 64", {8192, 2, 2, 64, "window=512"}, {.70, .62, .55}),
      OfPeak("window 1024, N 8192 d 64", {8192, 2, 2, 64, "window=1024"}, {.78, .68, .60}),
  };
  if (os::NumUsableCpus() >= 2) {
    AddTwoThreads("2 threads, d 64 full, 4 heads", {2048, 4, 4, 64, ""}, {.88, .76, .70}, kSpeedUp, lines);
    AddTwoThreads("2 threads, d 128 full, 4 heads", {2048, 4, 4, 128, ""}, {.90, .74, .72}, kSpeedUp, lines);
    AddTwoThreads("2 threads, d 64 causal, 4 heads", {2048, 4, 4, 64, "causal"}, {.82, .70, .62}, kCausalSpeedUp,
                  lines);
    AddTwoThreads("2 threads, d 128 causal, 4 heads", {2048, 4, 4, 128, "causal"}, {.85, .68, .64}, kCausalSpeedUp,
                  lines);
    AddTwoThreads("2 threads, d 64 full, 1 head", {2048, 1, 1, 64, ""}, {.88, .76, .70}, kSpeedUp, lines);
    AddTwoThreads("2 threads, d 64 causal, 1 head", {2048, 1, 1, 64, "causal"}, {.82, .70, .62}, kCausalSpeedUp, lines);
  }
  const Side plain = {2048, 4, 4, 64, ""};
  const auto time = [&](const std::string& name, const Side& subject, const Side& other, double goal) {
    lines.push_back(Against(name, Ratio::kTime, subject, other, goal));
  };
  time("[B,T,H,D] / [B,H,T,D], d 64", plain, {2048, 4, 4, 64, "bhtd"}, 1.06);
  time("[B,T,H,D] / [B,H,T,D], d 128, 16 heads", {2048, 16, 16, 128, ""}, {2048, 16, 16, 128, "bhtd"}, 1.06);
  time("GQA 8 on 2 / 8 on 8 heads, d 64", {2048, 8, 2, 64, ""}, {2048, 8, 8, 64, ""}, 1.00);
  time("GQA 8 on 2 / 8 on 8 heads, d 128 causal", {2048, 8, 2, 128, "causal"}, {2048, 8, 8, 128, "causal"}, 1.00);
  time("softcap / plain", {2048, 4, 4, 64, "softcap=30"}, plain, 1.15);
  time("ALiBi / plain", {2048, 4, 4, 64, "alibi"}, plain, 1.03);
  time("bias / plain", {2048, 4, 4, 64, "bias"}, plain, 1.10);
  time("attention_map 64 x 64 / attention, N 16384", {16384, 1, 1, 64, "map=64"}, {16384, 1, 1, 64, ""}, 1.30);
  // 16 bits: bf16 dot products on Zen 4, widened to f32 with AVX2. AMX has lines of its own.
  for (const auto& [D, full, causal] : {std::tuple{64, .76, .70}, {128, .80, .74}}) {
    for (const char* variant : {"", "causal"}) {
      const bool is_full = variant[0] == '\0';
      const std::string name = Format("bf16 N 2048 d {} {}", D, is_full ? "full" : variant);
      Side side = {2048, 4, 4, D, variant};
      const Side single = side;
      side.dtype = DType::kBF16;
      lines.push_back(OfPeak(name, side, {.zen4 = is_full ? full : causal, .avx2 = is_full ? .65 : .58}));
      time(name + " / f32", side, single, 1.02);
      side.dtype = DType::kF16;
      time(Format("f16 N 2048 d {} {} / f32", D, is_full ? "full" : variant), side, single, 1.02);
    }
  }
  const Side short_f32 = {100, 8, 8, 64, ""};
  Side short_bf16 = short_f32, short_f16 = short_f32;
  short_bf16.dtype = DType::kBF16;
  short_f16.dtype = DType::kF16;
  time("bf16 N 100 d 64 / f32", short_bf16, short_f32, 1.02);
  time("f16 N 100 d 64 / f32", short_f16, short_f32, 1.02);
  AddForgetting(lines);
  AddAmx(lines);
  AddBackward(lines);
  return lines;
}

}  // namespace heed::bench
