// Calibrate: sizes, tensors, and rounds of measurements.
#include "heed/advise/calibrate.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>

#include "heed/advise/candidates_internal.h"
#include "heed/advise/numbers_internal.h"
#include "heed/advise/timing_internal.h"
#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/harness/assumed_tensors.h"

namespace heed::advise {
namespace {

// Sizes of the measured calls, and their special options.
struct Size {
  Sizes sizes;
  bool causal = true;
  bool held_out = false;
};

// Lengths, heads and channels vary independently, so that the fit can separate their costs.
constexpr Size kSizes[] = {
    {{1, 32, 32, 4, 4, 64, 64}},
    {{1, 64, 64, 2, 2, 128, 128}},
    {{1, 128, 128, 8, 8, 64, 64}},
    {{4, 128, 128, 4, 4, 32, 32}, false},
    {{1, 256, 256, 4, 4, 64, 64}},
    {{1, 256, 256, 12, 12, 32, 32}, false},
    {{1, 384, 384, 8, 2, 96, 96}},
    {{1, 512, 512, 2, 2, 64, 64}},
    {{1, 512, 512, 4, 4, 128, 128}, false},
    {{2, 640, 640, 3, 3, 48, 48}},
    {{1, 1024, 1024, 4, 4, 64, 64}},
    {{1, 1024, 1024, 8, 4, 32, 32}},
    {{1, 1536, 1536, 2, 2, 128, 128}},
    {{1, 2048, 2048, 2, 2, 64, 64}, false},
    {{1, 4096, 4096, 1, 1, 64, 64}},
    {{1, 48, 48, 6, 6, 64, 64}, true, true},
    {{1, 192, 192, 6, 6, 80, 80}, true, true},
    {{2, 300, 300, 4, 4, 64, 64}, false, true},
    {{1, 448, 448, 8, 4, 128, 128}, true, true},
    {{1, 768, 768, 4, 4, 64, 64}, true, true},
    {{1, 900, 900, 3, 3, 112, 112}, false, true},
    {{1, 1280, 1280, 6, 6, 40, 40}, true, true},
    {{1, 3000, 3000, 2, 2, 64, 64}, true, true},
};

// Other mechanisms take time proportional to the number of tokens.
constexpr Size kMechanismSizes[] = {
    {{1, 32, 32, 4, 4, 64, 64}},
    {{1, 128, 128, 8, 8, 64, 64}},
    {{4, 128, 128, 4, 4, 32, 32}},
    {{1, 256, 256, 2, 2, 64, 64}},
    {{1, 320, 320, 8, 8, 96, 96}},
    {{2, 320, 320, 3, 3, 48, 48}},
    {{1, 512, 512, 4, 4, 128, 128}},
    {{1, 768, 768, 1, 1, 128, 128}},
    {{1, 1024, 1024, 4, 4, 64, 64}},
    {{1, 1024, 1024, 6, 6, 32, 32}},
    {{1, 512, 512, 3, 3, 40, 40}},
    {{1, 48, 48, 6, 6, 64, 64}, true, true},
    {{1, 192, 192, 6, 6, 80, 80}, true, true},
    {{2, 300, 300, 4, 4, 64, 64}, true, true},
    {{1, 448, 448, 8, 8, 128, 128}, true, true},
    {{1, 640, 640, 6, 6, 72, 72}, true, true},
    {{1, 2000, 2000, 2, 2, 64, 64}, true, true},
};

// One token after a state, whose size does not depend on the number of tokens before it.
constexpr Size kStepSizes[] = {
    {{1, 32, 32, 2, 2, 64, 64}},
    {{1, 32, 32, 8, 8, 64, 64}},
    {{4, 32, 32, 4, 4, 32, 32}},
    {{1, 32, 32, 4, 4, 128, 128}},
    {{2, 32, 32, 3, 3, 48, 48}},
    {{8, 32, 32, 8, 8, 64, 64}},
    {{1, 32, 32, 16, 16, 128, 128}},
    {{1, 32, 32, 4, 4, 96, 96}},
    {{2, 32, 32, 4, 4, 40, 40}},
    {{1, 32, 32, 6, 6, 64, 64}, true, true},
    {{1, 32, 32, 6, 6, 80, 80}, true, true},
    {{2, 32, 32, 4, 4, 64, 64}, true, true},
    {{3, 32, 32, 6, 6, 56, 56}, true, true},
    {{2, 32, 32, 8, 8, 128, 128}, true, true},
};

// Caches hold many more tokens than one pass processes.
constexpr Size kCacheSizes[] = {
    {{1, 64, 64, 4, 4, 64, 64}},
    {{1, 256, 256, 8, 8, 64, 64}},
    {{4, 512, 512, 4, 4, 64, 64}},
    {{1, 1024, 1024, 8, 2, 128, 128}},
    {{1, 2048, 2048, 12, 12, 32, 32}},
    {{1, 4096, 4096, 4, 4, 64, 64}},
    {{1, 4096, 4096, 8, 8, 128, 128}},
    {{1, 8192, 8192, 16, 4, 64, 64}},
    {{1, 16384, 16384, 2, 2, 128, 128}},
    {{1, 16384, 16384, 8, 8, 64, 64}},
    {{1, 512, 512, 32, 8, 128, 128}},
    {{2, 128, 128, 3, 3, 96, 96}},
    {{1, 32768, 32768, 8, 8, 64, 64}},
    {{1, 2048, 2048, 4, 4, 64, 64}},
    {{1, 400, 400, 6, 6, 64, 64}, true, true},
    {{2, 1500, 1500, 4, 4, 80, 80}, true, true},
    {{1, 3000, 3000, 8, 4, 64, 64}, true, true},
    {{1, 6000, 6000, 12, 12, 64, 64}, true, true},
    {{1, 12000, 12000, 8, 2, 128, 128}, true, true},
};

const std::vector<InputSpec> kQkv = {{"q", "BTHK"}, {"k", "BTGK"}, {"v", "BTGV"}};

// A call that is measured again in each round.
struct Job {
  std::shared_ptr<Candidate> candidate;
  Purpose purpose;
  Size size;
  std::vector<InputSpec> inputs;
  StageTimes times = {};
  std::vector<Part> parts = {};
  bool failed = false;

  std::string What() const {
    return candidate->mechanism + " " + candidate->options + " " + Name(purpose) + " " + heed::Name(candidate->dtype) +
           " " + ToString(size.sizes);
  }
};

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16};

void AddJobs(Purpose purpose, const Size& size, int threads, std::vector<Job>& jobs) {
  Question question;
  question.purpose = purpose;
  question.exact.causal = size.causal || purpose == Purpose::kDecode;
  question.sizes = size.sizes;
  question.threads = threads;
  for (std::unique_ptr<Candidate>& candidate : AttentionCandidates(question)) {
    jobs.push_back({std::shared_ptr<Candidate>(std::move(candidate)), purpose, size, kQkv});
  }
}

void AddMechanismJobs(const OpEntry& op, Purpose purpose, const Size& size, int threads, std::vector<Job>& jobs) {
  Question question;
  question.purpose = purpose;
  question.threads = threads;
  for (const DType dtype : kDTypes) {
    Size own = size;
    // Key heads are as many as query heads: files repeat them.
    const auto shares = [](const InputSpec& spec) { return spec.axes.find('G') != std::string::npos; };
    if (std::ranges::none_of(op.inputs, shares)) own.sizes.Hkv = own.sizes.Hq;
    if (!Numbers::Know(op.inputs)) continue;
    if (std::unique_ptr<Candidate> candidate = MechanismCandidate(question, op, {}, dtype)) {
      jobs.push_back({std::shared_ptr<Candidate>(std::move(candidate)), purpose, own, op.inputs});
    }
  }
}

std::vector<Job> Jobs(const CalibrateOptions& options) {
  const int threads = options.threads;
  const auto is_wanted = [&](const std::string& mechanism) {
    return options.mechanisms.empty() || std::ranges::count(options.mechanisms, mechanism) > 0;
  };
  std::vector<Job> jobs;
  for (const Size& size : kSizes) {
    AddJobs(Purpose::kPrefill, size, threads, jobs);
    AddJobs(Purpose::kTraining, size, threads, jobs);
  }
  for (const Size& size : kCacheSizes) AddJobs(Purpose::kDecode, size, threads, jobs);
  std::erase_if(jobs, [&](const Job& job) { return !is_wanted(job.candidate->mechanism); });
  for (const OpEntry& op : AllOps()) {
    if (op.name == "attention" || op.name == "certified_attention" || op.call == nullptr || !TakesQkv(op) ||
        !is_wanted(op.name))
      continue;
    for (const Size& size : kMechanismSizes) {
      AddMechanismJobs(op, Purpose::kPrefill, size, threads, jobs);
      AddMechanismJobs(op, Purpose::kTraining, size, threads, jobs);
    }
    for (const Size& size : kStepSizes) AddMechanismJobs(op, Purpose::kDecode, size, threads, jobs);
  }
  return jobs;
}

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

constexpr double kSecondsPerRound = 0.004;  // that a call is repeated for

void Measure(Job& job, std::map<int, std::unique_ptr<Context>>& contexts, const std::string& isa, Numbers& numbers) {
  std::unique_ptr<Context>& ctx = contexts[job.candidate->threads];
  if (!ctx) {
    ctx = std::make_unique<Context>(job.candidate->threads);
    if (!isa.empty()) ctx->set_isa(isa);
  }
  try {
    const TensorMap tensors = numbers.For(job.inputs);
    const Call call = job.candidate->On(*ctx, tensors);
    if (call.compute) call.compute(*ctx);
    for (const auto& stage : call.stages) stage(*ctx);  // warms up memory and caches
    if (job.parts.empty()) job.parts = job.candidate->Parts(*ctx, job.size.sizes, call.kept());
    job.times.Run(*ctx, call, 1, kSecondsPerRound);
  } catch (const InvalidArgument&) {
    job.failed = true;  // the mechanism does not take these sizes
  } catch (const Unsupported&) {
    job.failed = true;
  }
}

// The completed fraction of the time: by the number of timed calls in the first round, by the clock later.
class Progress {
 public:
  Progress(const CalibrateOptions& options, size_t num_jobs) : options_(options), num_jobs_(num_jobs) {}

  double elapsed() const { return Now() - start_; }
  void Show(size_t begun, const std::string& what) {
    if (!options_.progress) return;
    const double round =
        elapsed() * static_cast<double>(num_jobs_) / static_cast<double>(std::min(begun, num_jobs_) + 1);
    const double all = begun < num_jobs_ ? std::max(round, options_.seconds) : options_.seconds;
    share_ = std::max(share_, std::min(elapsed() / std::max(all, 1e-9), 1.0));
    options_.progress(share_, what);
  }

 private:
  const CalibrateOptions& options_;
  size_t num_jobs_;
  double start_ = Now(), share_ = 0;
};

std::vector<Measured> MeasureAll(const CalibrateOptions& options) {
  std::vector<Job> jobs = Jobs(options);
  // Small sizes first, so that every kind of work has some measurements if time runs out.
  std::ranges::stable_sort(jobs, {}, [](const Job& job) {
    const Sizes& s = job.size.sizes;
    return std::tuple(s.B * s.Tq * s.Hq * s.D, s.Tq, s.Hq, s.Hkv, job.candidate->dtype);
  });
  std::map<int, std::unique_ptr<Context>> contexts;
  Progress progress(options, jobs.size());
  std::unique_ptr<Numbers> numbers;
  std::string made_for;
  double round_seconds = 0;
  for (size_t round = 0; round == 0 || progress.elapsed() + round_seconds < options.seconds; ++round) {
    const double begin = progress.elapsed();
    for (size_t i = 0; i < jobs.size() && progress.elapsed() < options.most_seconds; ++i) {
      Job& job = jobs[i];
      if (job.failed) continue;
      progress.Show(round * jobs.size() + i, job.What());
      const std::string key = ToString(job.size.sizes) + heed::Name(job.candidate->dtype);
      if (key != made_for) {
        numbers = std::make_unique<Numbers>(job.size.sizes, job.candidate->dtype);
        made_for = key;
      }
      Measure(job, contexts, options.isa, *numbers);
    }
    round_seconds = progress.elapsed() - begin;
  }
  std::vector<Measured> measured;
  for (const Job& job : jobs) {
    if (!job.failed && !job.parts.empty())
      measured.push_back({job.What(), job.size.held_out, job.parts, job.times.best()});
  }
  return measured;
}

}  // namespace

Calibration FitOf(const std::vector<Measured>& measured) {
  std::map<Work, std::vector<Observation>> observations;
  for (const Measured& call : measured) {
    if (call.held_out) continue;
    for (size_t i = 0; i < call.parts.size(); ++i) {
      observations[call.parts[i].work].push_back({call.parts[i].load, call.seconds[i]});
    }
  }
  Calibration calibration;
  calibration.calls = std::ssize(measured);
  CostModel& model = calibration.model;
  for (const auto& [work, samples] : observations) model.fits[work] = Fit(samples);
  for (const Measured& call : measured) {
    if (!call.held_out) continue;
    HeldOut held = {call.what};
    bool has_all = true;
    for (size_t i = 0; i < call.parts.size(); ++i) {
      const std::optional<double> seconds = model.Predict(call.parts[i].work, call.parts[i].load);
      has_all = has_all && seconds.has_value();
      held.predicted += seconds.value_or(0);
      held.measured += call.seconds[i];
    }
    if (!has_all) continue;
    calibration.held_out.push_back(held);
    model.errors.push_back(std::abs(held.predicted - held.measured) / held.measured);
  }
  return calibration;
}

Calibration Calibrate(const CalibrateOptions& options) {
  const double start = Now();
  Calibration calibration = FitOf(MeasureAll(options));
  Context ctx(options.threads);
  if (!options.isa.empty()) ctx.set_isa(options.isa);
  CostModel& model = calibration.model;
  model.cpu = os::CpuName();
  model.version = HEED_VERSION;
  model.target = TargetName(ctx.allowed_targets());
  model.threads = options.threads;
  model.seconds = Now() - start;
  return calibration;
}

}  // namespace heed::advise
