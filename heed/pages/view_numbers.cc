// The data of one layer on the page of attention.
#include "heed/pages/view_numbers.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/ops/exact/attention/weights/attention_weights.h"
#include "heed/pages/page.h"

namespace heed::pages {
namespace {

constexpr size_t kMaxWordBytes = 24;  // for labels of pooled axes
constexpr int64_t kMaxBins = 512;     // of the map whose structure is measured

// One tensor rounded to f16, and the rounded values in its own dtype.
struct Rounded {
  std::vector<uint8_t> bytes;  // [H, T, D]
  std::vector<int> exponents;  // per head: value = f16 * 2^exponent
  Buffer values;               // [1, T, H, D]
};

// f16's largest exponent: all finite values are in [0, 2^15) after scaling.
constexpr int kTopExponent = 15;

Rounded RoundToF16(const ConstTensorView& x) {
  const int64_t T = x.size(1), H = x.size(2), D = x.size(3);
  Rounded rounded;
  rounded.values = Buffer(x.dtype(), {1, T, H, D}, Placement::kAligned);
  for (int64_t h = 0; h < H; ++h) {
    const auto get = [&](int64_t t, int64_t d) {
      return LoadAsDouble(x.dtype(), x.data(), t * x.stride(1) + h * x.stride(2) + d * x.stride(3));
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
        const F16 half = ToF16(static_cast<float>(std::ldexp(get(t, d), -exponent)));
        rounded.bytes.push_back(static_cast<uint8_t>(half.bits & 0xFF));
        rounded.bytes.push_back(static_cast<uint8_t>(half.bits >> 8));
        rounded.values.Set({0, t, h, d}, std::ldexp(static_cast<double>(ToFloat(half)), exponent));
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

// The first member of a bin: the least i with i bins / total >= bin.
int64_t BinBegin(int64_t bin, int64_t bins, int64_t total) { return (bin * total + bins - 1) / bins; }

// The information in the rows of a map beyond that of its columns and its distances: the mean over rows of sum_j p_ij
// log2(p_ij / m_ij), in bits, where m_ij is the larger of the mean probability of column j and that of the distance j -
// i. Uniform heads, local heads, and heads that attend to the same tokens from everywhere have nearly none.
double Structure(const TensorView& map, int64_t head) {
  const int64_t rows = map.size(2), columns = map.size(3);
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  std::vector<double> shares(size(rows * columns)), by_column(size(columns)), by_distance(size(rows + columns)),
      count(size(rows + columns));
  for (int64_t i = 0; i < rows; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < columns; ++j) {
      const double share = LoadAsDouble(map.dtype(), map.data(), (head * rows + i) * columns + j);
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
      const double model = std::max(by_column[size(j)], by_distance[distance] / count[distance]);
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

// The map of head h from f16 values, with its rows on the axis of a tensor's tokens.
ConstTensorView HeadsLast(const ConstTensorView& map) {
  return ConstTensorView(map.data(), map.dtype(), {1, map.size(2), map.size(1), map.size(3)},
                         {map.stride(0), map.stride(2), map.stride(1), 1});
}

Json Factors(const std::vector<int>& exponents) {
  Json factors = Json::array();
  for (const int exponent : exponents) factors.push_back(std::ldexp(1.0, exponent));
  return factors;
}

// The bins in which some query sees some key. With equal keys, a probability is one over the number of keys that the
// row sees, so it is nonzero if the key is visible.
Buffer SeenMap(Context& ctx, const ViewLayer& layer, const attention::Options& options, Bins bins) {
  const ConstTensorView &q = layer.q, &k = layer.k;
  const Buffer zero_q(DType::kF32, {q.size(0), q.size(1), q.size(2), 1}, Placement::kAligned);
  const Buffer zero_k(DType::kF32, {k.size(0), k.size(1), k.size(2), 1}, Placement::kAligned);
  zero_q.FillConstant(0);
  zero_k.FillConstant(0);
  attention::Options masks = options;
  masks.scale = 1.0;
  masks.softcap = 0;
  for (ConstTensorView* moved : {&masks.bias, &masks.alibi, &masks.sinks, &masks.log_decay, &masks.relative_bias})
    *moved = {};
  const Buffer map(DType::kF32, {q.size(0), q.size(2), bins.rows, bins.columns}, Placement::kAligned);
  attention::Map(ctx, {zero_q.view(), zero_k.view(), {}}, masks, attention::Reduce::kMax, map.view());
  return map;
}

// Adds those bins as header.seen and its blob.
void AddSeen(const Buffer& map, const std::string& id, Numbers& numbers) {
  const TensorView& x = map.view();
  const int64_t heads = x.size(1), cells = x.size(2) * x.size(3);
  const auto num_bytes = static_cast<size_t>((cells + 7) / 8);
  std::vector<uint8_t> bits(static_cast<size_t>(heads) * num_bytes);
  for (int64_t i = 0; i < heads * cells; ++i) {
    if (map.as<float>()[i] > 0) {
      bits[static_cast<size_t>(i / cells) * num_bytes + static_cast<size_t>(i % cells / 8)] |=
          static_cast<uint8_t>(1 << i % cells % 8);
    }
  }
  const bool same = std::equal(bits.begin() + static_cast<std::ptrdiff_t>(num_bytes), bits.end(), bits.begin());
  if (same) bits.resize(num_bytes);
  numbers.header["seen"] = {{"id", "seen" + id}, {"heads", same ? 1 : heads}};
  numbers.blobs.emplace_back("seen" + id, Base64(bits));
}

// The tokens at which bins begin; the first of `total` queries or keys has index `start` among the keys.
Json Words(const Json& labels, int64_t bins, int64_t total, int64_t start) {
  Json list = Json::array();
  for (int64_t b = 0; b < bins; ++b) {
    const int64_t token = start + BinBegin(b, bins, total);
    const bool known = token >= 0 && token < static_cast<int64_t>(labels.size());
    list.push_back(known ? Json(Shorten(labels[static_cast<size_t>(token)].get<std::string>(), kMaxWordBytes))
                         : Json(nullptr));
  }
  return list;
}

int64_t Base64Bytes(int64_t num_bytes) { return (num_bytes + 2) / 3 * 4; }

}  // namespace

int64_t ExactBytes(const ViewLayer& layer) {
  const ConstTensorView &q = layer.q, &k = layer.k;
  return Base64Bytes(2 * q.size(3) * q.size(1) * q.size(2)) + Base64Bytes(2 * k.size(3) * k.size(1) * k.size(2)) +
         Base64Bytes(4 * q.size(1) * q.size(2));
}

Numbers ExactNumbers(Context& ctx, const ViewLayer& layer, const attention::Options& options, int64_t index) {
  const Rounded q = RoundToF16(layer.q), k = RoundToF16(layer.k);
  const attention::Options first = OfFirstSequence(options);
  const Buffer lse = LogSumExp(ctx, q.values.view(), k.values.view(), first);
  const int64_t Hq = layer.q.size(2), Hkv = layer.k.size(2), D = layer.q.size(3);
  const Buffer coarse(lse.view().dtype(),
                      {1, Hq, std::min(kMaxBins, layer.q.size(1)), std::min(kMaxBins, layer.k.size(1))},
                      Placement::kAligned);
  attention::Map(ctx, {q.values.view(), k.values.view(), lse.view()}, first, attention::Reduce::kMean, coarse.view());

  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(D)));
  Json factors = Json::array();
  for (int64_t h = 0; h < Hq; ++h) {
    const auto head = static_cast<size_t>(h), key_head = static_cast<size_t>(h / (Hq / Hkv));
    factors.push_back(std::ldexp(scale, q.exponents[head] + k.exponents[key_head]));
  }
  const std::string id = std::to_string(index);
  return {{{"keyHeads", Hkv},
           {"dim", D},
           {"factors", factors},
           {"qFactors", Factors(q.exponents)},
           {"keyFactors", Factors(k.exponents)},
           {"structure", Structures(coarse.view())}},
          {{"q" + id, Base64(q.bytes)}, {"k" + id, Base64(k.bytes)}, {"lse" + id, Base64(F32Bytes(lse.view()))}}};
}

Json ImpliedList(const ViewLayer& layer) {
  Json list = Json::array();
  if (layer.q.size(1) != layer.k.size(1)) return list;
  for (const OpEntry& op : AllOps()) {
    if (op.weights == nullptr) continue;
    const int64_t channels = layer.q.size(3);
    const ImpliedWeights first = op.weights(0, channels);
    Json log_decays = Json::array();
    for (const int64_t head : layer.heads) log_decays.push_back(op.weights(head, channels).log_decay);
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

int64_t MapBytes(const ViewLayer& layer, Bins bins, bool with_kept) {
  const int64_t heads = layer.q.size(2), cells = bins.rows * bins.columns;
  const bool single = bins.rows == layer.q.size(1) && bins.columns == layer.k.size(1);
  return Base64Bytes(sizeof(F16) * heads * cells) * (single ? 1 : 2) +
         (with_kept ? Base64Bytes(heads * (single ? (cells + 7) / 8 : cells)) : 0) +
         (MasksPairs(layer.options) && !ComputedInPage(layer.options) ? Base64Bytes(heads * ((cells + 7) / 8)) : 0);
}

Numbers MapNumbers(Context& ctx, const ViewLayer& layer, const attention::Options& options, int64_t index, Bins bins) {
  const int64_t Tq = layer.q.size(1), Tk = layer.k.size(1), Hq = layer.q.size(2);
  const bool simple = ComputedInPage(options) && !options.pattern.present();
  // Other options may have an axis of sequences, and sequences may share a row.
  const ConstTensorView q = simple ? layer.q.Slice(0, 0, 1) : layer.q, k = simple ? layer.k.Slice(0, 0, 1) : layer.k;
  const attention::Options own = simple ? OfFirstSequence(options) : options;
  const Buffer lse = LogSumExp(ctx, q, k, own);
  const std::string id = std::to_string(index);
  const bool single = bins.rows == Tq && bins.columns == Tk;
  Numbers numbers;
  numbers.header["bins"] = {bins.rows, bins.columns};
  for (const auto& [name, reduce] : {std::pair{"mean", attention::Reduce::kMean}, {"max", attention::Reduce::kMax}}) {
    if (single && reduce == attention::Reduce::kMax) continue;
    const Buffer map(lse.view().dtype(), {q.size(0), Hq, bins.rows, bins.columns}, Placement::kAligned);
    attention::Map(ctx, {q, k, lse.view()}, own, reduce, map.view());
    if (reduce == attention::Reduce::kMean) numbers.header["structure"] = Structures(map.view());
    const Rounded rounded = RoundToF16(HeadsLast(map.view()));
    numbers.header[std::string(name) + "Factors"] = Factors(rounded.exponents);
    numbers.blobs.emplace_back(name + id, Base64(rounded.bytes));
  }
  if (!simple && MasksPairs(options)) AddSeen(SeenMap(ctx, layer, options, bins), id, numbers);
  if (layer.labels.is_array()) {
    numbers.header["rowWords"] = Words(layer.labels, bins.rows, Tq, Starts(layer)[0]);
    numbers.header["colWords"] = Words(layer.labels, bins.columns, Tk, 0);
  }
  return numbers;
}

}  // namespace heed::pages
