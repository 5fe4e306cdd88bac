// bench_cuda: GPU kernels as fractions of the device's limits, each checked against its reference first.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/cuda/limits.h"
#include "cli/format.h"
#include "heed/core/error.h"
#include "heed/harness/case.h"
#include "heed/ops/exact/attention/attention.h"
#include "heed/ops/exact/attention/cases/attention_case.h"
#include "heed/harness/mechanism/recurrent_case.h"
#include "heed/ops/ssm/selective_scan/selective_scan_case.h"
#include "heed/ops/ssm/ssd/ssd_case.h"
#include "tests/cuda/problems_on_devices.h"

namespace heed::bench {
namespace {

constexpr int kRounds = 11;
constexpr int64_t kCopied = int64_t{1} << 30;  // bytes

class EmulatedClock : public Timed {
 public:
  std::string name() const override { return "an emulated GPU: times mean nothing"; }
  double Seconds(const std::function<void()>& f) const override {
    const auto begin = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  void Copy(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
  void Multiply() const override {}
  double multiply_flops() const override { return 1; }
};

// The limit that a line is a fraction of.
enum class Limit { kProducts, kCopy };

struct Line {
  std::string name;
  Limit limit;
  double goal;
  // Prepares the run and calls `measure` with it, its flops and its bytes.
  using Measure = std::function<void(const std::function<void()>& run, double flops, double bytes)>;
  std::function<void(const Measure& measure)> prepare;
};

class Bench {
 public:
  Bench(const TestDevice& device, const Timed& timed, bool tiny)
      : device_(device), timed_(timed), tiny_(tiny), copied_(tiny ? 1 << 10 : kCopied),
        from_(device.Allocate(static_cast<size_t>(copied_))), to_(device.Allocate(static_cast<size_t>(copied_))) {}

  const TestDevice& device() const { return device_; }
  Context& context() { return ctx_; }
  int64_t Tokens(int64_t tokens) const { return tiny_ ? std::min<int64_t>(tokens, 20) : tokens; }
  int64_t Batch(int64_t batch) const { return tiny_ ? 1 : batch; }
  int64_t Channels(int64_t channels) const { return tiny_ ? std::min<int64_t>(channels, 64) : channels; }
  int64_t Heads(int64_t heads) const { return tiny_ ? std::min<int64_t>(heads, 2) : heads; }

  void Print(const Line& line) {
    line.prepare([&](const std::function<void()>& run, double flops, double bytes) {
      const auto limit = [&] {
        if (line.limit == Limit::kProducts) return timed_.Multiply();
        timed_.Copy(to_.get(), from_.get(), static_cast<size_t>(copied_));
      };
      const double of_limit =
          line.limit == Limit::kProducts ? timed_.multiply_flops() : 2.0 * static_cast<double>(copied_);
      const double work = line.limit == Limit::kProducts ? flops : bytes;
      if (!tiny_) run();
      std::vector<double> seconds, ratios;
      for (int round = 0; round < (tiny_ ? 1 : kRounds); ++round) {
        const double rate = of_limit / timed_.Seconds(limit);
        seconds.push_back(timed_.Seconds(run));
        ratios.push_back(work / seconds.back() / rate);
      }
      const double median = Median(seconds), ratio = Median(ratios);
      std::fputs(
          Format("{:<52} {:>9.1f} us {:>8.1f} {:<8} {:>5.2f} of {:<8} {}\n", line.name, 1e6 * median,
                 work / median / (line.limit == Limit::kProducts ? 1e12 : 1e9),
                 line.limit == Limit::kProducts ? "TFLOP/s" : "GB/s", ratio,
                 line.limit == Limit::kProducts ? "products" : "a copy",
                 line.goal == 0 || tiny_ ? "" : Format("goal {:.2f}{}", line.goal, ratio < line.goal ? " MISSED" : ""))
              .c_str(),
          stdout);
      std::fflush(stdout);
    });
  }

 private:
  static double Median(std::vector<double> x) {
    std::ranges::sort(x);
    return x[x.size() / 2];
  }

  const TestDevice& device_;
  const Timed& timed_;
  const bool tiny_;
  const int64_t copied_;
  const std::shared_ptr<void> from_, to_;
  Context ctx_{1};
};

void Verify(const Case& c, Context& ctx) {
  const Comparison result = Compare(c, ctx);
  if (!result.ok) throw std::runtime_error(c.title + ": " + result.message);
}

// Attention.

struct AttentionSizes {
  int64_t B, Tq, Tk, Hq, Hkv, D;
};

// A tensor on the device with normal numbers, or, for seed 0, uninitialised.
class OnGpu {
 public:
  OnGpu(const TestDevice& device, const std::vector<int64_t>& sizes, uint64_t seed, DType dtype = DType::kBF16)
      : host_(dtype, sizes, Placement::kAligned),
        on_device_(device, seed == 0 ? host_.view() : host_.FillNormal(seed).view()) {}
  const TensorView& view() const { return on_device_.view(); }

 private:
  Buffer host_;
  DeviceTensor on_device_;
};

Line Attention(Bench& bench, const std::string& name, AttentionSizes n, bool causal, bool backward, Limit limit,
               double goal) {
  n.B = bench.Batch(n.B);
  n.Tq = bench.Tokens(n.Tq);
  n.Tk = bench.Tokens(n.Tk);
  n.Hq = bench.Heads(n.Hq);
  n.Hkv = bench.Heads(n.Hkv);
  return {
      name, limit, goal, [&bench, n, causal, backward](const Line::Measure& measure) {
        const TestDevice& device = bench.device();
        Context& ctx = bench.context();
        const std::vector<int64_t> of_q = {n.B, n.Tq, n.Hq, n.D}, of_k = {n.B, n.Tk, n.Hkv, n.D};
        const OnGpu q(device, of_q, 1), k(device, of_k, 2), v(device, of_k, 3), d_o(device, of_q, 4),
            o(device, of_q, 0), dq(device, of_q, 0), dk(device, of_k, 0), dv(device, of_k, 0),
            lse(device, {n.B, n.Hq, n.Tq}, 0, DType::kF32);
        attention::Options options;
        options.causal = causal;
        attention::Gradients gradients;
        gradients.dq = dq.view();
        gradients.dk = dk.view();
        gradients.dv = dv.view();
        const auto forward = [&] {
          attention::Forward(ctx, {q.view(), k.view(), v.view()}, options, {o.view(), lse.view()});
        };
        const double pairs = static_cast<double>(n.Tq) * static_cast<double>(n.Tk) * (causal && n.Tq == n.Tk ? .5 : 1);
        const double flops = 4 * static_cast<double>(n.B * n.Hq * n.D) * pairs;
        const double bytes = 2 * 2 * static_cast<double>(n.B * n.D) * static_cast<double>(n.Tq * n.Hq + n.Tk * n.Hkv);
        forward();
        if (!backward) return measure(forward, flops, bytes);
        measure(
            [&] {
              attention::Backward(ctx, {q.view(), k.view(), v.view(), o.view(), lse.view(), d_o.view(), {}}, options,
                                  gradients);
            },
            2.5 * flops, 3 * bytes);
      }};
}

// Recurrences.

double Bytes(const std::vector<ConstTensorView>& views) {
  double bytes = 0;
  for (const ConstTensorView& t : views) bytes += mechanism::Bytes(t);
  return bytes;
}

// A mechanism on the device whose runs are passed to `measure`.
mechanism::Mechanism Measured(const TestDevice& device, const mechanism::Mechanism& m, const Line::Measure& measure) {
  mechanism::Mechanism result = m;
  for (auto* pass : {&result.forward, &result.backward, &result.step}) {
    *pass = [&device, m, measure, call = *pass](Context& ctx, const mechanism::Problem& p, mechanism::Views outputs) {
      const OnDevice on_device(device, m, p, outputs);
      double bytes = Bytes(p.inputs) + Bytes(p.initial) + Bytes(p.d_final) + Bytes({p.d_o});
      for (const TensorView& t : outputs) bytes += mechanism::Bytes(t);
      measure([&] { call(ctx, on_device.problem(), on_device.outputs()); }, 0, bytes);
    };
  }
  return result;
}

using MakeCase = std::function<Case(const ssd::Moving& moved, const CaseRequest& request)>;

Line Recurrence(Bench& bench, const std::string& name, const std::string& pass, const Sizes& sizes,
                const MakeCase& make, double goal) {
  Sizes n = sizes;
  n.B = bench.Batch(n.B);
  n.Tq = n.Tk = pass == "step" ? 1 : bench.Tokens(n.Tq);
  n.Hq = bench.Heads(n.Hq);
  n.Hkv = bench.Heads(n.Hkv);
  return {name + ", " + pass, Limit::kCopy, goal, [&bench, pass, n, make](const Line::Measure& measure) {
            CaseRequest request = {.sizes = n, .dtype = DType::kBF16, .seed = 1, .pass = pass, .variant = ""};
            const TestDevice& device = bench.device();
            const Case timed =
                make([&](const mechanism::Mechanism& m) { return Measured(device, m, measure); }, request);
            request.sizes.B = 1;
            request.sizes.Tq = request.sizes.Tk = std::min<int64_t>(n.Tq, 130);
            Verify(make([&](const mechanism::Mechanism& m) { return Moved(device, m); }, request), bench.context());
            std::vector<Buffer> buffers;
            std::vector<TensorView> views;
            for (const OutputSpec& output : timed.outputs)
              views.push_back(buffers.emplace_back(output.dtype, output.sizes).view());
            timed.run(bench.context(), views);
          }};
}

MakeCase OfRecurrent(const char* name) {
  return [name](const ssd::Moving& moved, const CaseRequest& request) {
    const recurrent::Mechanism& m = *FindOp(name).recurrent;
    return recurrent::MakeCase(moved(m.of_problems), m.definition, request);
  };
}

// A selective scan of D channels with 16 states each.
Case MakeScan(const ssd::Moving& moved, const CaseRequest& request) {
  selective_scan::Options options;
  options.delta_softplus = true;
  scanning::Mechanism m = selective_scan::MechanismOf(options);
  m.of_problems = moved(m.of_problems);
  scanning::Choice choice;
  choice.states = 16;
  return scanning::MakeCase(m, request, choice);
}

std::vector<Line> Lines(Bench& bench) {
  std::vector<Line> lines;
  for (const int64_t T : {4096, 8192, 16384}) {
    for (const bool causal : {false, true}) {
      for (const bool backward : {false, true}) {
        const std::string name =
            Format("attention d=128 {} {} {}", causal ? "causal" : "full", T, backward ? "backward" : "forward");
        lines.push_back(Attention(bench, name, {16384 / T, T, T, 16, 16, 128}, causal, backward, Limit::kProducts, 0));
      }
    }
  }
  lines.push_back(Attention(bench, "attention, decoding over 64 MiB of keys", {4, 1, 8192, 32, 8, 128}, false, false,
                            Limit::kCopy, .8));
  for (const int64_t channels : {64, 128}) {
    const Sizes sizes = {4, 4096, 4096, 16, 16, bench.Channels(channels), bench.Channels(channels)};
    for (const char* name : {"linear_attention", "simple_gla", "gla", "gated_delta_rule", "kda"}) {
      for (const char* pass : {"forward", "backward", "step"}) {
        const double goal = channels == 64 && std::string(pass) != "step" ? .4 : 0;
        lines.push_back(
            Recurrence(bench, Format("{} {} channels", name, channels), pass, sizes, OfRecurrent(name), goal));
      }
    }
  }
  for (const char* pass : {"forward", "backward", "step"}) {
    lines.push_back(Recurrence(bench, "selective_scan 4096 channels, 16 states", pass,
                               {8, 2048, 2048, 1, 1, bench.Channels(4096), 1}, &MakeScan, 0));
    lines.push_back(
        Recurrence(bench, "ssd 64 channels, 128 states", pass, {4, 4096, 4096, 32, 1, 128, 64}, &ssd::MakeCaseOf, .4));
  }
  return lines;
}

void Run(bool emulated, const std::string& filter) {
  static const EmulatedClock emulated_clock;
#if defined(HEED_WITH_CUDA)
  if (!emulated && !cuda::Gpu().WhyNot().empty()) throw std::runtime_error("there is no GPU: " + cuda::Gpu().WhyNot());
  const TestDevice& device = emulated ? cuda::EmulatedDevice() : cuda::Gpu();
  const Timed& timed = emulated ? emulated_clock : TimedGpu();
#else
  if (!emulated) throw std::runtime_error("built without CUDA (HEED_WITH_CUDA)");
  const TestDevice& device = cuda::EmulatedDevice();
  const Timed& timed = emulated_clock;
#endif
  cuda::Replace(device.library());
  Bench bench(device, timed, emulated);
  std::printf("%s\n", timed.name().c_str());
  for (const Line& line : Lines(bench)) {
    if (line.name.find(filter) == std::string::npos) continue;
    try {
      bench.Print(line);
    } catch (const Unsupported& error) {
      std::printf("%-52s %s\n", line.name.c_str(), error.what());
    }
  }
}

}  // namespace
}  // namespace heed::bench

int main(int argc, char** argv) {
  bool emulated = false;
  std::string filter;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--emulated") {
      emulated = true;
    } else {
      filter = argv[i];
    }
  }
  try {
    heed::bench::Run(emulated, filter);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_cuda: %s\n", error.what());
    return 1;
  }
  return 0;
}
