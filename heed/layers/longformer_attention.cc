// LongformerAttention: projections and Longformer's attention. The projections of global tokens are computed for their
// rows alone.
#include "heed/layers/longformer_attention.h"

#include <algorithm>
#include <vector>

#include "heed/core/error.h"
#include "heed/layers/arena_internal.h"
#include "heed/layers/attend_internal.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/sparse/longformer/longformer.h"

namespace heed::layers {
namespace {

using mechanism::Fail;

// The rows of all global tokens, each once.
std::vector<int64_t> GlobalRows(const Tokens& tokens) {
  const ConstTensorView& global = tokens.call.global_tokens;
  std::vector<int64_t> rows;
  if (!global) return rows;
  const bool by_sequence = global.rank() == 2;
  const int64_t count = global.size(global.rank() - 1), step = global.stride(global.rank() - 1);
  const auto add = [&](int64_t b, int64_t begin, int64_t length) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at =
          LoadAsInt64(global.dtype(), global.data(), (by_sequence ? b * global.stride(0) : 0) + i * step);
      if (at >= 0 && at < length) rows.push_back(begin + at);
    }
  };
  if (tokens.packed.empty()) {
    for (int64_t b = 0; b < tokens.B; ++b) add(b, b * tokens.T, tokens.T);
  } else {
    for (size_t i = 0; i + 1 < tokens.packed.size(); ++i) {
      add(static_cast<int64_t>(i), tokens.packed[i], tokens.packed[i + 1] - tokens.packed[i]);
    }
  }
  std::ranges::sort(rows);
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

}  // namespace

LongformerAttention::LongformerAttention(const Config& config, const Weights& weights)
    : Layer("layers::LongformerAttention", config.width), config_(config) {
  CheckConfig(name(), "heads", config.heads);
  CheckConfig(name(), "window", config.window, 0);
  CheckDivisor(name(), "heads", config.heads, "width", width());
  const auto named = [&](const std::string& kind) { return LinearName{kind, width(), true}; };
  in_ = weights.Matrix(std::vector{named("self.query"), named("self.key"), named("self.value")}, width());
  query_ = weights.Matrix(named("self.query_global"), width());
  both_ = weights.Matrix(std::vector{named("self.key_global"), named("self.value_global")}, width());
  out_ = weights.Matrix(named("output.dense"), width());
}

State LongformerAttention::MakeState(const StateOptions&) const {
  throw InvalidArgument(name() + "::MakeState: the layer has no state: its tokens see later ones");
}

void LongformerAttention::Check(const Tokens& tokens, const State*) const {
  const std::string text = name() + "::Forward";
  const char* op = text.c_str();
  if (tokens.call.memory) Fail(op, "memory", "is given", "none: this is no cross attention");
  if (tokens.call.mask) Fail(op, "mask", "is given", "none: lengths say what is padding");
  const ConstTensorView& global = tokens.call.global_tokens;
  if (!global) return;
  mechanism::CheckReadable(op, "global_tokens", global);
  if (global.dtype() != DType::kI32 && global.dtype() != DType::kI64) {
    Fail(op, "global_tokens", std::string("has dtype ") + Name(global.dtype()), "i32 or i64");
  }
  const int64_t sequences = tokens.packed.empty() ? tokens.B : std::ssize(tokens.packed) - 1;
  if (global.rank() != 1 && (global.rank() != 2 || global.size(0) != sequences)) {
    Fail(op, "global_tokens", "has shape " + global.ShapeString(), "[n] or [" + std::to_string(sequences) + ",n]");
  }
}

void LongformerAttention::Compute(Context& ctx, const Tokens& tokens, const float* x, float* y, State*) const {
  const int64_t rows = tokens.rows(), width = this->width(), heads = config_.heads, dim = width / heads;
  Frame frame;
  const float* projected = frame.Floats(rows * 3 * width);
  in_.Rows(ctx, x, width, rows, const_cast<float*>(projected), 3 * width);
  longformer::Inputs in;
  in.q = Heads(projected, tokens, heads, dim, 3 * width);
  in.k = Heads(projected + width, tokens, heads, dim, 3 * width);
  in.v = Heads(projected + 2 * width, tokens, heads, dim, 3 * width);
  const std::vector<int64_t> global = GlobalRows(tokens);
  const int64_t none = -1, count = std::ssize(global);
  longformer::Options options;
  options.tokens = ConstTensorView(&none, DType::kI64, {1});
  if (count != 0) {
    options.tokens = tokens.call.global_tokens;
    float *gathered = frame.Floats(count * width), *few = frame.Floats(count * width);
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(x + global[static_cast<size_t>(i)] * width, width, gathered + i * width);
    query_.Rows(ctx, gathered, width, count, few, width);
    float* q = frame.Floats(rows * width);  // only rows of global tokens are read
    for (int64_t i = 0; i < count; ++i) std::copy_n(few + i * width, width, q + global[static_cast<size_t>(i)] * width);
    float* both = frame.Floats(rows * 2 * width);
    both_.Rows(ctx, x, width, rows, both, 2 * width);
    in.qg = Heads(q, tokens, heads, dim, width);
    in.kg = Heads(both, tokens, heads, dim, 2 * width);
    in.vg = Heads(both + width, tokens, heads, dim, 2 * width);
  }
  options.window = config_.window;
  options.key_lengths = tokens.call.lengths;
  options.query_lengths = tokens.call.lengths;
  options.cu_seqlens_q = tokens.call.cu_seqlens;
  float* o = frame.Floats(rows * width);
  longformer::Forward(ctx, in, options, {Heads(o, tokens, heads, dim, width), {}});
  out_.Rows(ctx, o, width, rows, y, width);
}

}  // namespace heed::layers
