// Shared code of cache tests: a model of a cache as a plain list of rows, and random rows for both.
#ifndef HEED_STATE_CACHE_MODEL_CASE_H_
#define HEED_STATE_CACHE_MODEL_CASE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/harness/buffer.h"
#include "heed/state/kv_cache.h"
#include "heed/state/kv_view.h"
#include "heed/state/latent_kv_cache.h"
#include "heed/state/ring_kv_cache.h"

namespace heed {

// The bytes of a token in a cache: the rows of all heads, and the scale of each if quantised.
struct ModelToken {
  std::string k, v;
};

struct CacheModel {
  int64_t heads = 1, dim = 1, value_dim = 1;
  DType dtype = DType::kF32;
  bool quantized = false, latent = false;
  int64_t window = 0, sink_tokens = 0;  // nonzero in a ring

  std::vector<std::vector<std::shared_ptr<const ModelToken>>> tokens;  // [batch]
  std::vector<int64_t> appended, first_kept;
  int64_t shared_prefix = 0;

  explicit CacheModel(const KVCache::Options& o)
      : heads(o.heads), dim(o.dim), value_dim(o.value_dim == 0 ? o.dim : o.value_dim), dtype(o.dtype),
        quantized(o.quantize == Quantize::kInt8) {
    SetBatch(o.batch);
  }
  explicit CacheModel(const RingKVCache::Options& o)
      : heads(o.heads), dim(o.dim), value_dim(o.value_dim == 0 ? o.dim : o.value_dim), dtype(o.dtype), window(o.window),
        sink_tokens(o.sink_tokens) {
    SetBatch(o.batch);
  }
  explicit CacheModel(const LatentKVCache::Options& o)
      : dim(o.latent + o.rope), value_dim(o.latent), dtype(o.dtype), latent(true) {
    SetBatch(o.batch);
  }

  void SetBatch(int64_t batch) {
    tokens.resize(static_cast<size_t>(batch));
    appended.resize(tokens.size());
    first_kept.resize(tokens.size());
  }
  int64_t batch() const { return static_cast<int64_t>(tokens.size()); }
  int64_t length(size_t b) const { return static_cast<int64_t>(tokens[b].size()); }
  std::vector<int64_t> lengths() const {
    std::vector<int64_t> all;
    for (size_t b = 0; b < tokens.size(); ++b) all.push_back(length(b));
    return all;
  }
  bool IsGone(size_t b, int64_t t) const { return t >= sink_tokens && t < first_kept[b]; }

  // The stored form of the row of `n` elements that begins at element `at` of a view.
  std::string Row(const ConstTensorView& x, int64_t at, int64_t stride, int64_t n) const {
    const int64_t size = static_cast<int64_t>(SizeOf(dtype));
    std::string row;
    if (!quantized) {
      for (int64_t i = 0; i < n; ++i) {
        row.append(x.as<char>() + (at + i * stride) * size, static_cast<size_t>(size));
      }
      return row;
    }
    double largest = 0;
    const auto get = [&](int64_t i) { return LoadAsDouble(dtype, x.data(), at + i * stride); };
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(get(i)));
    const float scale = largest == 0 ? 1 : static_cast<float>(largest) / 127.0f;
    for (int64_t i = 0; i < n; ++i) {
      const float x_i = static_cast<float>(get(i));
      row.push_back(static_cast<char>(static_cast<int8_t>(std::nearbyint(x_i / scale))));  // char may be unsigned
    }
    row.append(reinterpret_cast<const char*>(&scale), sizeof(scale));
    return row;
  }

  // k is [B, T, H, D]; v is [B, T, H, Dv], or absent for a latent cache.
  void Append(const ConstTensorView& k, const ConstTensorView& v, std::span<const int64_t> counts) {
    for (size_t b = 0; b < tokens.size(); ++b) {
      const int64_t before = length(b);
      for (int64_t t = 0; t < counts[b]; ++t) {
        auto token = std::make_shared<ModelToken>();
        for (int64_t h = 0; h < heads; ++h) {
          const auto add = [&](const ConstTensorView& x, std::string& to) {
            const int64_t at = static_cast<int64_t>(b) * x.stride(0) + t * x.stride(1) + h * x.stride(2);
            to += Row(x, at, x.stride(3), x.size(3));
          };
          add(k, token->k);
          if (!latent) add(v, token->v);
        }
        tokens[b].push_back(std::move(token));
      }
      appended[b] = counts[b];
      if (window != 0) first_kept[b] = std::max(first_kept[b], before - window + 1);
    }
  }

  // True if every row that the next row of a sequence of length `to` sees is still there.
  bool CanTrim(size_t b, int64_t to) const {
    if (to < 0 || to > length(b)) return false;
    if (window == 0) return true;
    if (to > sink_tokens && to < first_kept[b]) return false;  // released
    for (int64_t t = std::max<int64_t>(to - window + 1, 0); t < to; ++t) {
      if (IsGone(b, t)) return false;
    }
    return true;
  }
  void Trim(std::span<const int64_t> to) {
    for (size_t b = 0; b < tokens.size(); ++b) {
      const int64_t before = std::min(length(b) - appended[b], to[b]);
      tokens[b].resize(static_cast<size_t>(to[b]));
      appended[b] = to[b] - before;
      first_kept[b] = std::min(first_kept[b], to[b]);
      shared_prefix = std::min(shared_prefix, to[b]);
    }
  }
  void Reorder(std::span<const int64_t> indices) {
    const CacheModel old = *this;
    for (size_t b = 0; b < tokens.size(); ++b) {
      const size_t i = static_cast<size_t>(indices[b]);
      tokens[b] = old.tokens[i];
      appended[b] = old.appended[i];
      first_kept[b] = old.first_kept[i];
    }
  }
  CacheModel Share(int64_t batch) const {
    CacheModel shared = *this;
    shared.tokens.assign(static_cast<size_t>(batch), tokens[0]);
    shared.appended.assign(static_cast<size_t>(batch), appended[0]);
    shared.first_kept.assign(static_cast<size_t>(batch), first_kept[0]);
    shared.shared_prefix = length(0);
    return shared;
  }
};

// Row t of head h as the view has it, followed by its scale.
inline std::string ViewRow(const KVView& view, const PageRows& rows, const PageRows& scales, size_t b, int64_t t,
                           int64_t h, int64_t dim) {
  const std::byte* const page = view.pages[b][t / view.page_tokens];
  const auto at = [&](const PageRows& r) {
    return reinterpret_cast<const char*>(page) + r.begin + h * r.head_stride + t % view.page_tokens * r.token_stride;
  };
  const size_t size = view.quantized ? 1 : SizeOf(view.dtype);
  std::string row(at(rows), static_cast<size_t>(dim) * size);
  if (view.quantized) row.append(at(scales), sizeof(float));
  return row;
}

// Describes the first difference; empty if none exists.
inline std::string Difference(const KVView& view, const CacheModel& model) {
  if (view.batch != model.batch() || view.heads != model.heads || view.dim != model.dim ||
      view.value_dim != model.value_dim || view.dtype != model.dtype || view.quantized != model.quantized) {
    return "options";
  }
  if (!std::ranges::equal(view.lengths, model.lengths())) return "lengths";
  if (!std::ranges::equal(view.appended, model.appended)) return "appended";
  if (model.window == 0 ? !view.first_kept.empty() : !std::ranges::equal(view.first_kept, model.first_kept)) {
    return "first_kept";
  }
  for (size_t b = 0; b < model.tokens.size(); ++b) {
    for (int64_t t = 0; t < model.length(b); ++t) {
      if (model.IsGone(b, t)) continue;
      const ModelToken& token = *model.tokens[b][static_cast<size_t>(t)];
      std::string k, v;
      for (int64_t h = 0; h < model.heads; ++h) {
        k += ViewRow(view, view.key, view.key_scale, b, t, h, view.dim);
        if (model.latent) continue;
        v += ViewRow(view, view.value, view.value_scale, b, t, h, view.value_dim);
      }
      if (k != token.k || v != token.v) {
        return std::string(k != token.k ? "key" : "value") + " of token " + std::to_string(t) + " of sequence " +
               std::to_string(b);
      }
    }
  }
  return "";
}

// A [B, T, H, D] tensor of random bits or finite numbers, with one of several orders of its axes in memory.
class RandomRows {
 public:
  RandomRows(Random& random, DType dtype, bool finite, std::vector<int64_t> sizes, bool strided = true) {
    std::vector<size_t> order(sizes.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (size_t i = order.size() - 1; strided && i > 0; --i) {
      std::swap(order[i], order[static_cast<size_t>(random.Integer(0, static_cast<int64_t>(i)))]);
    }
    std::vector<int64_t> strides(sizes.size());
    int64_t count = 1;
    for (size_t i = order.size(); i-- > 0;) {
      strides[order[i]] = count;
      count *= std::max<int64_t>(sizes[order[i]], 1);
    }
    const size_t size = SizeOf(dtype);
    memory_.resize((static_cast<size_t>(count) * size + 7) / 8);
    char* const bytes = reinterpret_cast<char*>(memory_.data());
    for (int64_t i = 0; i < count; ++i) {
      if (finite) {
        StoreDouble(dtype, bytes, i, random.Uniform(-2, 2));
      } else {
        const uint64_t word = random.Word() | (uint64_t{random.Word()} << 32);
        std::memcpy(bytes + static_cast<size_t>(i) * size, &word, size);
      }
    }
    view_ = ConstTensorView(bytes, dtype, sizes, strides);
  }
  const ConstTensorView& view() const { return view_; }

 private:
  std::vector<uint64_t> memory_;
  ConstTensorView view_;
};

// Appends the same random rows to a cache and its model: counts[b] of T.
template <class Cache>
void AppendRandom(Random& random, Cache& cache, CacheModel& model, std::span<const int64_t> counts,
                  bool strided = true) {
  int64_t T = 0;
  for (const int64_t count : counts) T = std::max(T, count);
  const int64_t B = model.batch(), H = model.heads;
  const bool finite = model.quantized;
  const RandomRows k(random, model.dtype, finite, {B, T, H, model.dim}, strided);
  if constexpr (std::is_same_v<Cache, LatentKVCache>) {
    const ConstTensorView rows(k.view().data(), model.dtype, {B, T, model.dim},
                               {k.view().stride(0), k.view().stride(1), k.view().stride(3)});
    cache.Append(rows, counts);
    model.Append(k.view(), {}, counts);
  } else {
    const RandomRows v(random, model.dtype, finite, {B, T, H, model.value_dim}, strided);
    cache.Append(k.view(), v.view(), counts);
    model.Append(k.view(), v.view(), counts);
  }
}

}  // namespace heed

#endif  // HEED_STATE_CACHE_MODEL_CASE_H_
