// What the page of `heed view` holds.
#include "cli/view_data.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>

#include "cli/attention_call.h"
#include "cli/format.h"
#include "cli/page.h"
#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/ops/exact/attention/weights/attention_weights.h"

namespace heed::cli {
namespace {

constexpr size_t kMaxTokenBytes = 200;
constexpr size_t kMaxWordBytes = 24;  // of the labels of pooled axes
constexpr int64_t kMinBins = 24, kMaxBins = 512;

// One tensor rounded to f16, and what that means in its own dtype.
struct Rounded {
  std::vector<uint8_t> bytes;   // [H, T, D]
  std::vector<int> exponents;   // of each head: value = f16 * 2^exponent
  Buffer values;                // [1, T, H, D]
};

// f16's largest exponent: everything finite lies in [0, 2^15) once scaled.
constexpr int kTopExponent = 15;

Rounded RoundToF16(const ConstTensorView& x) {
  const int64_t T = x.size(1), H = x.size(2), D = x.size(3);
  Rounded rounded;
  rounded.values = Buffer(x.dtype(), {1, T, H, D}, Placement::kAligned);
  for (int64_t h = 0; h < H; ++h) {
    const auto get = [&](int64_t t, int64_t d) {
      return LoadAsDouble(x.dtype(), x.data(),
                          t * x.stride(1) + h * x.stride(2) + d * x.stride(3));
    };
    double largest = 0;
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t d = 0; d < D; ++d) {
        const double size = std::abs(get(t, d));
        if (std::isfinite(size)) largest = std::max(largest, size);
      }
    }
    int exponent = kTopExponent;
    if (largest > 0) std::frexp(largest, &exponent);
    exponent -= kTopExponent;
    rounded.exponents.push_back(exponent);
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t d = 0; d < D; ++d) {
        const F16 half =
            ToF16(static_cast<float>(std::ldexp(get(t, d), -exponent)));
        rounded.bytes.push_back(static_cast<uint8_t>(half.bits & 0xFF));
        rounded.bytes.push_back(static_cast<uint8_t>(half.bits >> 8));
        rounded.values.Set(
            {0, t, h, d},
            std::ldexp(static_cast<double>(ToFloat(half)), exponent));
      }
    }
  }
  return rounded;
}

std::vector<uint8_t> F32Bytes(const ConstTensorView& x) {
  std::vector<uint8_t> bytes;
  for (int64_t i = 0; i < x.num_elements(); ++i) {
    const float value = static_cast<float>(LoadAsDouble(x.dtype(), x.data(), i));
    uint32_t bits;
    static_assert(sizeof(bits) == sizeof(value));
    std::memcpy(&bits, &value, sizeof(bits));
    for (int shift = 0; shift < 32; shift += 8) {
      bytes.push_back(static_cast<uint8_t>(bits >> shift));
    }
  }
  return bytes;
}

// [1, Hq, Tq] of other q and k, of the first sequence, than the file's.
Buffer LogSumExp(Context& ctx, const TensorSet& tensors,
                 const ConstTensorView& q, const ConstTensorView& k,
                 const attention::Options& options) {
  const Buffer no_values(tensors.dtype, {1, k.size(1), k.size(2), 1},
                         Placement::kAligned);
  no_values.FillConstant(0);
  TensorSet set = tensors;
  set.q = q;
  set.k = k;
  set.v = no_values.view();
  set.batched = true;
  const AttentionCall call(set, options, tensors.dtype);
  call.Forward(ctx);
  const ConstTensorView lse = call.lse();
  const Buffer copy(lse.dtype(), lse.sizes(), Placement::kAligned);
  std::memcpy(copy.view().data(), lse.data(),
              static_cast<size_t>(lse.num_elements()) * SizeOf(lse.dtype()));
  return copy;
}

// The first member of a bin: the least i with i bins / total >= bin.
int64_t BinBegin(int64_t bin, int64_t bins, int64_t total) {
  return (bin * total + bins - 1) / bins;
}

// How much the rows of a map say that neither their columns nor their distances
// say alone: the mean over rows of sum_j p_ij log2(p_ij / m_ij), in bits, with m_ij
// the larger of the mean share of column j and that of the distance j - i. Even
// heads, local ones, and those that look at the same tokens from everywhere have
// next to none.
double Structure(const TensorView& map, int64_t head) {
  const int64_t rows = map.size(2), columns = map.size(3);
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  std::vector<double> shares(size(rows * columns)), by_column(size(columns)),
      by_distance(size(rows + columns)), count(size(rows + columns));
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < columns; ++j) {
      const double share =
          LoadAsDouble(map.dtype(), map.data(), (head * rows + i) * columns + j);
      shares[size(i * columns + j)] = std::isfinite(share) ? share : 0;
      sum += shares[size(i * columns + j)];
    }
    for (int64_t j = 0; sum > 0 && j < columns; ++j) {
      double& share = shares[size(i * columns + j)];
      share /= sum;
      by_column[size(j)] += share / static_cast<double>(rows);
      by_distance[size(j - i + rows)] += share;
      ++count[size(j - i + rows)];
    }
  }
  double bits = 0;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      const double share = shares[size(i * columns + j)];
      if (share <= 0) continue;
      const size_t distance = size(j - i + rows);
      const double model =
          std::max(by_column[size(j)], by_distance[distance] / count[distance]);
      bits += share * std::log2(share / model);
    }
  }
  return bits / static_cast<double>(rows);
}

Json Structures(const TensorView& map) {
  Json list = Json::array();
  for (int64_t h = 0; h < map.size(1); ++h) list.push_back(Structure(map, h));
  return list;
}

// At most `max_bytes` of UTF-8, cut between characters.
std::string Shorten(const std::string& text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  size_t end = max_bytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) {
    --end;
  }
  return text.substr(0, end) + "\xE2\x80\xA6";
}

}  // namespace

int64_t ExactBytes(const TensorSet& tensors) {
  const ConstTensorView &q = tensors.q, &k = tensors.k;
  const int64_t halves =
      q.size(3) * (q.size(1) * q.size(2) + k.size(1) * k.size(2));
  return (2 * halves + 4 * q.size(1) * q.size(2)) * 4 / 3 + 12;
}

ViewLayer ExactLayer(Context& ctx, const TensorSet& tensors,
                     const attention::Options& options, int64_t index) {
  const Rounded q = RoundToF16(tensors.q), k = RoundToF16(tensors.k);
  const int64_t Hkv = tensors.k.size(2);
  const Buffer lse =
      LogSumExp(ctx, tensors, q.values.view(), k.values.view(), options);
  const Buffer coarse(lse.view().dtype(),
                      {1, tensors.q.size(2), std::min(kMaxBins, tensors.q.size(1)),
                       std::min(kMaxBins, tensors.k.size(1))},
                      Placement::kAligned);
  attention::Map(ctx, {q.values.view(), k.values.view(), lse.view()}, options,
                 attention::Reduce::kMean, coarse.view());

  const int64_t Hq = tensors.q.size(2), D = tensors.q.size(3);
  const double scale =
      options.scale.value_or(1 / std::sqrt(static_cast<double>(D)));
  Json factors = Json::array();
  for (int64_t h = 0; h < Hq; ++h) {
    const auto head = static_cast<size_t>(h);
    const auto key_head = static_cast<size_t>(h / (Hq / Hkv));
    factors.push_back(
        std::ldexp(scale, q.exponents[head] + k.exponents[key_head]));
  }
  const auto powers = [](const Rounded& x) {
    Json list = Json::array();
    for (const int exponent : x.exponents) list.push_back(std::ldexp(1.0, exponent));
    return list;
  };
  const std::string id = std::to_string(index);
  return {{{"keyHeads", Hkv},
           {"dim", D},
           {"factors", factors},
           {"qFactors", powers(q)},
           {"keyFactors", powers(k)},
           {"structure", Structures(coarse.view())}},
          {{"q" + id, Base64(q.bytes)},
           {"k" + id, Base64(k.bytes)},
           {"lse" + id, Base64(F32Bytes(lse.view()))}}};
}

Json ImpliedList(const TensorSet& tensors, std::span<const int64_t> heads) {
  Json list = Json::array();
  if (tensors.q.size(1) != tensors.k.size(1)) return list;
  for (const OpEntry& op : AllOps()) {
    if (op.weights == nullptr) continue;
    const int64_t channels = tensors.q.size(3);
    const ImpliedWeights first = op.weights(0, channels);
    Json log_decays = Json::array();
    for (const int64_t head : heads) {
      log_decays.push_back(op.weights(head, channels).log_decay);
    }
    list.push_back({{"name", op.name},
                    {"form", first.form},
                    {"scale", first.scale},
                    {"normalize", first.normalize},
                    {"eps", first.eps},
                    {"seesAll", first.sees_all},
                    {"logDecays", log_decays}});
  }
  return list;
}

int64_t PooledSize(int64_t num_heads, bool with_kept, int64_t max_bytes) {
  const double bytes_per_bin = (2 * sizeof(F16) + (with_kept ? 1 : 0)) * 4.0 / 3;
  const double bins = static_cast<double>(max_bytes) /
                      (bytes_per_bin * static_cast<double>(num_heads));
  const auto size = static_cast<int64_t>(std::sqrt(std::max(bins, 0.0)));
  return size < kMinBins ? 0 : std::min(size, kMaxBins);
}

ViewLayer PooledLayer(Context& ctx, const TensorSet& tensors,
                      const attention::Options& options, int64_t index,
                      const Json& labels, int64_t size) {
  const int64_t Tq = tensors.q.size(1), Tk = tensors.k.size(1);
  const int64_t rows = std::min(size, Tq), columns = std::min(size, Tk);
  ViewLayer layer;
  layer.header["bins"] = {rows, columns};
  const ConstTensorView q = tensors.q.Slice(0, 0, 1),
                        k = tensors.k.Slice(0, 0, 1);
  const Buffer lse = LogSumExp(ctx, tensors, q, k, options);
  const std::string id = std::to_string(index);
  for (const auto& [name, reduce] :
       {std::pair{"mean", attention::Reduce::kMean}, {"max", attention::Reduce::kMax}}) {
    const Buffer map(lse.view().dtype(), {1, q.size(2), rows, columns},
                     Placement::kAligned);
    attention::Map(ctx, {q, k, lse.view()}, options, reduce, map.view());
    if (reduce == attention::Reduce::kMean) {
      layer.header["structure"] = Structures(map.view());
    }
    // As [1, T, H, D] whose heads are rounded one by one.
    const ConstTensorView x = map.view();
    const Rounded rounded = RoundToF16(
        ConstTensorView(x.data(), x.dtype(), {1, rows, x.size(1), columns},
                        {x.stride(0), x.stride(2), x.stride(1), 1}));
    Json factors = Json::array();
    for (const int exponent : rounded.exponents) {
      factors.push_back(std::ldexp(1.0, exponent));
    }
    layer.header[std::string(name) + "Factors"] = factors;
    layer.blobs.emplace_back(name + id, Base64(rounded.bytes));
  }
  const auto words = [&](int64_t bins, int64_t total, int64_t start) {
    Json list = Json::array();
    for (int64_t b = 0; b < bins; ++b) {
      const int64_t token = start + BinBegin(b, bins, total);
      const bool known =
          token >= 0 && token < static_cast<int64_t>(labels.size());
      list.push_back(
          known ? Json(Shorten(
                      labels[static_cast<size_t>(token)].get<std::string>(),
                      kMaxWordBytes))
                : Json(nullptr));
    }
    return list;
  };
  if (labels.is_array()) {
    layer.header["rowWords"] = words(rows, Tq, Tk - Tq);
    layer.header["colWords"] = words(columns, Tk, 0);
  }
  return layer;
}

Json TokenLabels(const TensorSet& tensors, std::vector<std::string>& notes) {
  const auto fact = tensors.facts.find("tokens");
  if (fact == tensors.facts.end()) {
    notes.push_back("no tokens in the file: labels are positions");
    return nullptr;
  }
  const Json list = Json::parse(fact->second, nullptr, false);
  const bool strings =
      list.is_array() && std::all_of(list.begin(), list.end(),
                                     [](const Json& x) { return x.is_string(); });
  if (!strings) {
    const std::string_view text = fact->second;
    throw FileError(Format(
        "{}: metadata tokens is '{}{}', expected a JSON list of strings",
        tensors.file, text.substr(0, 40), text.size() > 40 ? "..." : ""));
  }
  const int64_t Tk = tensors.k.size(1);
  if (static_cast<int64_t>(list.size()) != Tk) {
    notes.push_back(Format(
        "{} tokens for {} keys in the file: labels are positions", list.size(),
        Tk));
    return nullptr;
  }
  Json labels = Json::array();
  for (const Json& token : list) {
    labels.push_back(Shorten(token.get<std::string>(), kMaxTokenBytes));
  }
  return labels;
}

}  // namespace heed::cli
