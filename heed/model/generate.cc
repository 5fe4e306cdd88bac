// Model::Generate and Model::Embed: sampling from logits and pooling of hidden states.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "heed/core/error.h"
#include "heed/core/philox.h"
#include "heed/layers/arena_internal.h"
#include "heed/model/model_internal.h"
#include "heed/mechanism/check_internal.h"

namespace heed {
namespace {

using mechanism::Fail;

constexpr char kGenerate[] = "Model::Generate";

void CheckOptions(const GenerateOptions& options) {
  if (options.tokens < 0) Fail(kGenerate, "tokens", "is " + std::to_string(options.tokens), "at least 0");
  if (!(options.temperature >= 0 && std::isfinite(options.temperature))) {
    Fail(kGenerate, "temperature", "is " + std::to_string(options.temperature), "a finite number, at least 0");
  }
  if (options.top_k < 0) Fail(kGenerate, "top_k", "is " + std::to_string(options.top_k), "at least 0");
  if (!(options.top_p > 0 && options.top_p <= 1))
    Fail(kGenerate, "top_p", "is " + std::to_string(options.top_p), "above 0, at most 1");
}

// A uniform number in [0, 1) with 53 bits.
double Uniform(uint64_t seed, int64_t sequence, int64_t place) {
  const auto words = Philox({static_cast<uint32_t>(place), static_cast<uint32_t>(static_cast<uint64_t>(place) >> 32),
                             static_cast<uint32_t>(sequence), 0},
                            {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return std::ldexp(static_cast<double>((uint64_t{words[0]} << 21) ^ (words[1] >> 11)), -53);
}

// The token that these logits and this number in [0, 1) choose.
int64_t Choose(std::span<const float> logits, const GenerateOptions& options, double uniform) {
  const auto best = std::ranges::max_element(logits);
  if (options.temperature == 0) return best - logits.begin();
  std::vector<int64_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  size_t kept = logits.size();
  if (options.top_k > 0) kept = std::min(kept, static_cast<size_t>(options.top_k));
  const auto logit = [&](int64_t id) {  // NaN, which a state from a file may cause, ranks below all others
    const float x = logits[static_cast<size_t>(id)];
    return std::isnan(x) ? -std::numeric_limits<float>::infinity() : x;
  };
  const auto likelier = [&](int64_t a, int64_t b) {
    const float x = logit(a), y = logit(b);
    return x > y || (x == y && a < b);
  };
  std::partial_sort(order.begin(), order.begin() + static_cast<int64_t>(kept), order.end(), likelier);
  std::vector<double> weights(kept);
  double sum = 0;
  for (size_t i = 0; i < kept; ++i) {
    sum += weights[i] =
        std::exp((static_cast<double>(logits[static_cast<size_t>(order[i])]) - *best) / options.temperature);
  }
  if (options.top_p < 1) {
    double within = 0;
    size_t count = 0;
    while (count < kept && within < options.top_p * sum) within += weights[count++];
    kept = std::max<size_t>(1, count);  // keeps no logits that are NaN
    sum = within;
  }
  double left = uniform * sum;
  for (size_t i = 0; i + 1 < kept; ++i) {
    left -= weights[i];
    if (left < 0) return order[i];
  }
  return order[kept - 1];
}

}  // namespace

std::vector<std::vector<int64_t>> Model::Generate(Context& ctx, const std::vector<std::vector<int64_t>>& prompts,
                                                  const GenerateOptions& options, ModelState* state) const {
  CheckOptions(options);
  if (!causal() || !has_head())
    throw InvalidArgument(std::string(kGenerate) + ": the model is a " + family() +
                          " that continues no text, expected a causal one with a head, as LlamaForCausalLM");
  const int64_t B = std::ssize(prompts);
  std::vector<std::vector<int64_t>> given = prompts, made(prompts.size());
  if (B == 0) return made;
  std::optional<ModelState> own;
  if (state == nullptr) state = &own.emplace(MakeState({.batch = B}));
  if (state->batch() != B)
    Fail(kGenerate, "state", "has a batch of " + std::to_string(state->batch()), std::to_string(B));
  int64_t longest = 0;
  std::vector<int64_t> lengths;
  for (size_t b = 0; b < given.size(); ++b) {
    if (const int64_t pending = state->pending_[b]; pending >= 0) given[b].insert(given[b].begin(), pending);
    if (given[b].empty()) Fail(kGenerate, "prompts", "has an empty one", "at least one token in each");
    lengths.push_back(std::ssize(given[b]));
    longest = std::max(longest, lengths.back());
  }
  std::vector<int64_t> ids(static_cast<size_t>(B * longest), 0);
  for (int64_t b = 0; b < B; ++b) std::ranges::copy(given[static_cast<size_t>(b)], ids.begin() + b * longest);
  Batch batch = Check(kGenerate, ConstTensorView(ids.data(), DType::kI64, {B, longest}),
                      ConstTensorView(lengths.data(), DType::kI64, {B}), state);
  // All tokens to come must fit too: generation does not begin if it could not end.
  for (int64_t b = 0; b < B; ++b) {
    const int64_t most = std::min(most_positions() > 0 ? most_positions() : INT64_MAX,
                                  state->capacity_ < 0 ? INT64_MAX : state->capacity_);
    const int64_t before = state->lengths_[static_cast<size_t>(b)] + lengths[static_cast<size_t>(b)];
    if (options.tokens > 0 && options.tokens - 1 > most - before) {
      Fail(kGenerate, "tokens",
           "is " + std::to_string(options.tokens) + " behind " + std::to_string(before) + " others",
           "at most " + std::to_string(most) + " together");
    }
  }
  const std::span<const int64_t> end = options.end ? std::span<const int64_t>(*options.end) : end_tokens();
  std::vector<int64_t> next(prompts.size(), 0);
  std::vector<float> last(static_cast<size_t>(B * width())), logits(static_cast<size_t>(B * vocabulary()));
  for (int64_t step = 0;; ++step) {
    {
      layers::Frame frame;
      float* x = frame.Floats(batch.rows() * width());
      Hidden(ctx, batch, state, x);
      for (int64_t b = 0; b < B; ++b) {
        const int64_t row = batch.begin(b) + std::max<int64_t>(0, batch.length(b) - 1);
        std::copy_n(x + row * width(), width(), last.begin() + b * width());
      }
    }
    if (step == 0) std::ranges::fill(state->pending_, -1);
    if (step == options.tokens) return made;
    Logits(ctx, last.data(), B, logits.data());
    bool all_ended = true;
    for (size_t b = 0; b < made.size(); ++b) {
      if (next[b] < 0) continue;
      const std::span<const float> of(logits.data() + static_cast<int64_t>(b) * vocabulary(),
                                      static_cast<size_t>(vocabulary()));
      next[b] =
          Choose(of, options,
                 options.temperature == 0 ? 0 : Uniform(options.seed, static_cast<int64_t>(b), state->lengths_[b]));
      made[b].push_back(next[b]);
      state->pending_[b] = next[b];
    }
    const bool go_on = !options.on_tokens || options.on_tokens(next);
    for (size_t b = 0; b < made.size(); ++b) {
      if (next[b] >= 0 && std::ranges::find(end, next[b]) != end.end()) next[b] = -1;
      all_ended = all_ended && next[b] < 0;
    }
    if (!go_on || all_ended || step + 1 == options.tokens) return made;
    batch.T = 1;
    batch.padded = false;
    batch.Lay();
    for (size_t b = 0; b < made.size(); ++b) {
      batch.lengths[b] = next[b] < 0 ? 0 : 1;
      batch.padded = batch.padded || next[b] < 0;
      if (next[b] < 0) continue;
      batch.ids[b] = next[b];
      state->pending_[b] = -1;
    }
  }
}

void Model::Embed(Context& ctx, const ConstTensorView& ids, const ConstTensorView& lengths, const TensorView& y) const {
  constexpr const char* op = "Model::Embed";
  const Batch batch = Check(op, ids, lengths, nullptr);
  mechanism::CheckTensor(op, "y", y, {batch.B, width()}, DType::kF32, true);
  mechanism::CheckContiguousRows(op, "y", y);
  mechanism::CheckWritable(op, "y", y, "ids", ids);
  for (const int64_t length : batch.lengths) {
    if (length < 1) Fail(op, "lengths", "has an element 0", "at least 1");
  }
  layers::Frame frame;
  float* x = frame.Floats(batch.rows() * width());
  Hidden(ctx, batch, nullptr, x);
  std::vector<double> sum(static_cast<size_t>(width()));
  for (int64_t b = 0; b < batch.B; ++b) {
    const int64_t count = impl_->embedding.pooling == model::Pooling::kMean ? batch.length(b) : 1;
    std::ranges::fill(sum, 0);
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t c = 0; c < width(); ++c) sum[static_cast<size_t>(c)] += x[(batch.begin(b) + t) * width() + c];
    }
    double divisor = static_cast<double>(count);
    if (impl_->embedding.unit) {
      double squares = 0;
      for (const double value : sum) squares += value * value;
      divisor = std::max(std::sqrt(squares), 1e-12);
    }
    for (int64_t c = 0; c < width(); ++c)
      y.as<float>()[b * y.stride(0) + c] = static_cast<float>(sum[static_cast<size_t>(c)] / divisor);
  }
}

}  // namespace heed
