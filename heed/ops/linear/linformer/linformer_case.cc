// Linformer in the harness: problems, and the tolerances of kernels.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/harness/mechanism/problem_case.h"
#include "heed/mechanism/reference/reference_tensor_internal.h"
#include "heed/ops/linear/linformer/linformer_internal.h"

namespace heed::linformer {
namespace {

using mechanism::Add;
using mechanism::At;
using mechanism::Row;
using mechanism::Shape;
using Doubles = std::vector<double>;

// Rounding, to first order. u is 2^-24 or 2^-53; a chain of n roundings is a random walk, bounded by six standard
// deviations of u / sqrt(3), 3.5 u sqrt(n); `base` is the error of the exponential, the reductions and single
// roundings, as for attention.
//
//   K~_rc       off by eK AK_rc,  AK = sum_t |e k|,  eK = chain(128 + T / 128), and so V~
//   s_tr        by ds_tr = (eK + chain(K)) |scale| sum_c |q_c| AK_rc
//   P_tr        by P_tr rel_tr,   rel_tr = ds_tr + sum_r P ds + 2 chain(R) + base
//   o           by sum_r P (rel |V~| + eV AV)
//   dS_tr       by M_tr E_tr,     M = |scale| P (AP_r + sum_r P AP), AP = sum_c |d_o| AV,
//                                 E = 2 rel + eV + chain(V HV / H) + base
//   dq          by sum_r M (E + eK + chain(R)) AK
//   dK~_rc      by sum_t M |q| (E + chain(T)),   dV~ by sum_t P |d_o| (rel + chain(T))
//   dk          by sum_r |e| (that + chain(R) times its magnitude), and so dv
//   dE          by sum_bhc |k| (that + chain(K + B H) times its magnitude), and so dF
//
// dS has 2 rel because the subtracted mean has the errors of P as well. Magnitudes are those of the terms without
// cancellation. Results of 16 bits are rounded once more. Terms below the smallest normal number are flushed:
// `subnormal`, for a thousand of them.
struct Epsilon {
  double u, base, output = 0, subnormal = 0;
  double Chain(int64_t n) const { return 3.5 * u * std::sqrt(static_cast<double>(n)); }
};

Epsilon EpsilonOf(DType dtype) {
  constexpr double kTerms = 1024;
  Epsilon e = {0x1p-24, 1e-6, 0, kTerms * 0x1p-126};
  if (dtype == DType::kF64) e = {0x1p-53, 1e-14, 0, kTerms * 0x1p-1022};
  if (dtype == DType::kBF16) e.output = 1.01 * 0x1p-8;
  if (dtype == DType::kF16) {
    e.output = 1.01 * 0x1p-11;
    e.subnormal = 0x1p-25;
  }
  return e;
}

// One token of one head.
Doubles RowOf(const ConstTensorView& x, int64_t b, int64_t t, int64_t head) {
  Doubles row(static_cast<size_t>(x.size(3)));
  for (size_t c = 0; c < row.size(); ++c) row[c] = At(x, {b, t, head, static_cast<int64_t>(c)});
  return row;
}

// [R][size] of one head: a projection, and the sums of its terms' magnitudes.
struct Projected {
  std::vector<Doubles> value, magnitude;

  Projected(const ConstTensorView& m, const ConstTensorView& x, int64_t b, int64_t head, int64_t first, int64_t count,
            int64_t column)
      : value(static_cast<size_t>(m.size(0)), Doubles(static_cast<size_t>(x.size(3)))), magnitude(value) {
    std::vector<Doubles> rows;
    for (int64_t t = 0; t < count; ++t) rows.push_back(RowOf(x, b, first + t, head));
    for (size_t r = 0; r < value.size(); ++r) {
      for (int64_t t = 0; t < count; ++t) {
        const double a = At(m, {static_cast<int64_t>(r), column + t});
        const Doubles& row = rows[static_cast<size_t>(t)];
        for (size_t c = 0; c < value[r].size(); ++c) {
          const double term = a * row[c];
          value[r][c] += term;
          magnitude[r][c] += std::abs(term);
        }
      }
    }
  }
};

// Adds the errors of o, or of the gradients that are present.
void AddErrors(const BackwardInputs& in, const Options& options, const TensorView& o, const Gradients& g) {
  const Epsilon e = EpsilonOf(in.q.dtype());
  const int64_t B = in.q.size(0), T = in.q.size(1), H = in.q.size(2), K = in.q.size(3);
  const int64_t HV = in.v.size(2), V = in.v.size(3), R = in.e.size(0);
  const double scale = std::abs(options.scale.value_or(1 / std::sqrt(static_cast<double>(K))));
  const bool packed = options.cu_seqlens.present();
  const int64_t sequences = packed ? options.cu_seqlens.size(0) - 1 : B;
  const auto integer = [](const ConstTensorView& t, int64_t i, int64_t otherwise) {
    return t.present() ? LoadAsInt64(t.dtype(), t.data(), i * t.stride(0)) : otherwise;
  };
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t b = packed ? 0 : i;
    const int64_t first = packed ? integer(options.cu_seqlens, i, 0) : integer(options.starts, i, 0);
    const int64_t end = packed ? integer(options.cu_seqlens, i + 1, 0) : integer(options.lengths, i, T);
    const int64_t n = std::max<int64_t>(end - first, 0), column = packed ? 0 : first;
    const double of_sum = e.Chain(std::min<int64_t>(n, 128) + n / 128);
    for (int64_t h = 0; h < HV; ++h) {
      const int64_t kh = h / (HV / H);
      const Projected keys(in.e, in.k, b, kh, first, n, column);
      const Projected values(in.f, in.v, b, h, first, n, column);
      const auto rows = static_cast<size_t>(R);
      std::vector<Doubles> key_error(rows, Doubles(static_cast<size_t>(K)));
      std::vector<Doubles> value_error(rows, Doubles(static_cast<size_t>(V)));
      auto key_size = key_error, value_size = value_error;  // of dK~ and dV~
      for (int64_t t = first; t < first + n; ++t) {
        const Doubles q_row = RowOf(in.q, b, t, kh);
        Doubles p(rows), rel(rows);
        double most = -INFINITY, sum = 0, mean = 0;
        for (size_t r = 0; r < rows; ++r) {
          double size = 0;
          for (size_t c = 0; c < keys.value[r].size(); ++c) {
            const double q = scale * q_row[c];
            p[r] += q * keys.value[r][c];
            size += std::abs(q) * keys.magnitude[r][c];
          }
          if (options.scale && *options.scale < 0) p[r] = -p[r];
          rel[r] = (of_sum + e.Chain(K) + e.u) * size;
          most = std::max(most, p[r]);
        }
        for (double& x : p) sum += x = std::exp(x - most);
        for (size_t r = 0; r < rows; ++r) mean += (p[r] /= sum) * rel[r];
        for (double& x : rel) x += mean + 2 * e.Chain(R) + e.base;
        if (o.present()) {
          for (size_t c = 0; c < static_cast<size_t>(V); ++c) {
            double error = 0;
            for (size_t r = 0; r < rows; ++r) {
              error += p[r] * (rel[r] * std::abs(values.value[r][c]) + of_sum * values.magnitude[r][c]);
            }
            Add(o, {b, t, h, static_cast<int64_t>(c)}, error);
          }
          continue;
        }
        const Doubles d_o_row = RowOf(in.d_o, b, t, h);
        Doubles terms(rows);
        double average = 0;
        const double chain = e.Chain(n), chain_of_dq = e.Chain(R);
        for (size_t r = 0; r < rows; ++r) {
          for (size_t c = 0; c < static_cast<size_t>(V); ++c) {
            const double d_o = std::abs(d_o_row[c]);
            terms[r] += d_o * values.magnitude[r][c];
            value_size[r][c] += p[r] * d_o;
            value_error[r][c] += p[r] * d_o * (rel[r] + chain);
          }
          average += p[r] * terms[r];
        }
        for (size_t r = 0; r < rows; ++r) {
          const double ds = scale * p[r] * (terms[r] + average);
          const double error = 2 * rel[r] + of_sum + e.Chain(V * (HV / H)) + e.base;
          for (size_t c = 0; c < static_cast<size_t>(K); ++c) {
            const auto channel = static_cast<int64_t>(c);
            const double q = std::abs(q_row[c]);
            Add(g.q, {b, t, kh, channel}, ds * (error + of_sum + chain_of_dq) * keys.magnitude[r][c]);
            key_size[r][c] += ds * q;
            key_error[r][c] += ds * q * (error + chain);
          }
        }
      }
      if (o.present()) continue;
      const auto project_back = [&](const ConstTensorView& m, const ConstTensorView& x, int64_t head,
                                    const std::vector<Doubles>& size, const std::vector<Doubles>& error,
                                    const TensorView& dx, const TensorView& dm) {
        const double of_dx = e.Chain(R), of_dm = e.Chain(x.size(3) + sequences * HV);
        for (int64_t r = 0; r < R; ++r) {
          for (int64_t t = 0; t < n; ++t) {
            const double weight = std::abs(At(m, {r, column + t}));
            for (int64_t c = 0; c < x.size(3); ++c) {
              const double d = size[static_cast<size_t>(r)][static_cast<size_t>(c)];
              const double off = error[static_cast<size_t>(r)][static_cast<size_t>(c)];
              Add(dx, {b, first + t, head, c}, weight * (off + of_dx * d));
              Add(dm, {r, column + t}, std::abs(At(x, {b, first + t, head, c})) * (off + of_dm * d));
            }
          }
        }
      };
      project_back(in.e, in.k, kh, key_size, key_error, g.k, g.e);
      project_back(in.f, in.v, h, value_size, value_error, g.v, g.f);
    }
  }
}

// Rounding of results to `dtype`.
void AddRounding(const TensorView& tolerance, const TensorView& expected, DType dtype) {
  if (!tolerance.present() || tolerance.num_elements() == 0) return;
  const Epsilon e = EpsilonOf(dtype);
  Shape index(static_cast<size_t>(tolerance.rank()));
  do {
    SetElement(tolerance, index,
               GetElement(tolerance, index) + std::abs(GetElement(expected, index)) * e.output + e.subnormal);
  } while (NextIndex(tolerance.sizes(), index));
}

// Clears the tolerances, adds the errors, and adds the final rounding.
void Tolerance(const Inputs& in, const Options& options, const Outputs& expected, const Outputs& tolerance) {
  BackwardInputs whole;
  static_cast<Inputs&>(whole) = in;
  mechanism::Clear(tolerance.o);
  AddErrors(whole, options, tolerance.o, {});
  AddRounding(tolerance.o, expected.o, in.q.dtype());
}

void BackwardTolerance(const BackwardInputs& in, const Options& options, const Gradients& expected,
                       const Gradients& tolerance) {
  using Of = mechanism::Lists<Structs>;
  const auto tolerances = Of::Of(tolerance).gradients, values = Of::Of(expected).gradients;
  for (const TensorView& t : tolerances) mechanism::Clear(t);
  AddErrors(in, options, {}, tolerance);
  for (size_t i = 0; i < tolerances.size(); ++i) {
    AddRounding(tolerances[i], values[i], Of::Of(in).tensors[i].dtype());
  }
}

// Linformer has no states, and so no steps.
mechanism::Mechanism MakeMechanism() {
  mechanism::Mechanism m;
  m.name = "linformer";
  m.causal = m.has_direction = false;
  mechanism::Bind<Structs, Options>(mechanism::Members(kTensors), {}, "BTGV", {},
                                    {HEED_FUNCTIONS_WITHOUT_STEP, &Tolerance, &BackwardTolerance}, m);
  return m;
}

class Maker : public mechanism::Maker {
 public:
  using mechanism::Maker::Maker;

 private:
  void DrawSizes() override {
    sizes_.H = Integer(1, 2);
    sizes_.G = sizes_.H * random_.Pick<int64_t>({1, 1, 2, 3});
    sizes_.K = Channels();
    sizes_.V = Channels();
    sizes_.M = Chance(0.8) ? Integer(1, 20) : random_.Pick<int64_t>({63, 64, 65, 130});
    sizes_.L = sizes_.T + (Chance(0.4) ? Integer(1, 9) : 0);
    strength_ = std::exp(random_.Uniform(-3, 1));
  }
  ConstTensorView DrawInput(const Row& row) override {
    const bool weights = row.type == mechanism::kWide;
    const Buffer buffer = weights ? Weights(row) : AnyLayout(dtype_, ShapeOf(row.axes), true);
    return Keep(buffer.FillNormal(NextSeed(), weights ? Mean(sizes_.T) : p_.inputs.empty() ? strength_ : 1));
  }
  void DrawOptions() override {
    // C need not exceed the longest packed sequence.
    const ConstTensorView& bounds = p_.options.cu_seqlens;
    if (bounds.present()) {
      int64_t longest = 0;
      for (int64_t i = 1; i < bounds.size(0); ++i) {
        longest =
            std::max(longest, static_cast<int64_t>(GetElement(bounds, Shape{i}) - GetElement(bounds, Shape{i - 1})));
      }
      for (const size_t i : {3, 4}) p_.inputs[i] = p_.inputs[i].Slice(1, 0, longest);
    }
    if (Chance(0.3)) p_.options.scale = random_.Uniform(-1, 1);
  }
  // Contiguous rows or columns, with gaps between them.
  Buffer Weights(const Row& row) {
    const Shape sizes = ShapeOf(row.axes);
    const int64_t gap = Integer(0, 3);
    const Shape strides = Chance(0.6) ? Shape{std::max<int64_t>(sizes[1], 1) + gap, 1} : Shape{1, sizes[0] + gap};
    const int64_t begin = Integer(0, 9);
    return Buffer(Chance(0.5) ? wide() : dtype_, sizes, strides, AnyGuard(), begin);
  }
  static double Mean(int64_t tokens) { return 1 / std::sqrt(static_cast<double>(std::max<int64_t>(tokens, 1))); }

  // T = Tq tokens, H = Hkv and HV = Hq heads, and Tk projected tokens, at most 256, the number in the paper.
  void SetSizes(const Sizes& s) override {
    sizes_.H = s.Hkv;
    sizes_.G = s.Hq;
    sizes_.K = s.D;
    sizes_.V = s.Dv;
    sizes_.M = std::min<int64_t>(s.Tk, 256);
    sizes_.L = s.Tq;
  }
  ConstTensorView MakeInput(const Row& row) override {
    const double deviation = row.type == mechanism::kWide ? Mean(sizes_.T) : 1;
    return Keep(Buffer(dtype_, ShapeOf(row.axes), Placement::kAligned).FillNormal(NextSeed(), deviation));
  }
  double Flops(int64_t tokens, bool backward) override {
    const auto keys = static_cast<double>(sizes_.H * sizes_.K);
    const auto values = static_cast<double>(sizes_.G * sizes_.V);
    const double per_row = backward ? 8 * (keys + values) + 6 * keys + 4 * values : 4 * (keys + values);
    return static_cast<double>(sizes_.B * sizes_.M * tokens) * per_row;
  }

  double strength_ = 1;
};

}  // namespace

OpEntry Entry() {
  OpEntry entry = mechanism::EntryOf(
      {.family = "linear",
       .variants = {"lengths=62"},
       .flops = "4 R (Hkv D + Hq Dv) per token, R = min(Tk, 256), backward 14 R Hkv D + 12 R Hq Dv",
       .bytes = "(B Tq (2 Hkv D + 2 Hq Dv) + 2 R Tq) size",
       .state = "none: K~ and V~ need every token",
       .make_case =
           [](const CaseRequest& request) {
             return Maker(MakeMechanism(), request.dtype, request.seed).MakeCase(request);
           },
       .random_case = [](DType dtype, uint64_t seed) { return Maker(MakeMechanism(), dtype, seed).RandomCase(); }},
      MakeMechanism());
  entry.inputs = {{"q", "BTHK"}, {"k", "BTHK"}, {"v", "BTHV"}, {"e", "RC"}, {"f", "RC"}};
  return entry;
}

}  // namespace heed::linformer
