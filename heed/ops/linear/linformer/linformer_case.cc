// Linformer in the harness: problems, and how close a kernel must come.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/case.h"
#include "heed/ops/linear/linformer/linformer.h"

namespace heed::linformer {
namespace {

using Shape = std::vector<int64_t>;
using Doubles = std::vector<double>;

struct Problem {
  BackwardInputs in;
  Options options;
  bool forward = true;
  std::vector<OutputSpec> outputs;  // o, or gradients
  std::vector<Buffer> memory;
  std::string note;

  TensorView Keep(const Buffer& buffer) {
    memory.push_back(buffer);
    return buffer.view();
  }
};

Gradients ToGradients(const Problem& p, std::span<const TensorView> views) {
  Gradients out;
  const std::map<std::string, TensorView*> places = {
      {"dq", &out.dq}, {"dk", &out.dk}, {"dv", &out.dv}, {"de", &out.de}, {"df", &out.df}};
  for (size_t i = 0; i < views.size(); ++i) *places.at(p.outputs[i].name) = views[i];
  return out;
}

// Rounding, to first order. u is 2^-24 or 2^-53; a chain of n roundings is a random walk six
// deviations of u / sqrt(3) wide, 3.5 u sqrt(n); `base` is the exponential, the reductions
// and what is rounded once, as for attention.
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
// dS has 2 rel because the mean that is subtracted has the errors of P as well. Magnitudes
// are those of the terms before anything cancels. Results of 16 bits are rounded once more.
// Terms below the smallest normal number are flushed: `subnormal`, for a thousand of them.
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

int64_t Offset(const ConstTensorView& t, std::initializer_list<int64_t> index) {
  int64_t at = 0;
  int axis = 0;
  for (const int64_t i : index) at += i * t.stride(axis++);
  return at;
}

double At(const ConstTensorView& t, std::initializer_list<int64_t> index) {
  return LoadAsDouble(t.dtype(), t.data(), Offset(t, index));
}

// A tolerance is f64.
void Add(const TensorView& t, std::initializer_list<int64_t> index, double value) {
  if (t.present()) t.as<double>()[Offset(t, index)] += value;
}

void Clear(const TensorView& t) {
  Shape index(static_cast<size_t>(t.rank()));
  if (!t.present() || t.num_elements() == 0) return;
  do {
    SetElement(t, index, 0);
  } while (NextIndex(t.sizes(), index));
}

// [R][size] of one head: a projection, and the sums of its terms' magnitudes.
struct Projected {
  std::vector<Doubles> value, magnitude;

  Projected(const ConstTensorView& m, const ConstTensorView& x, int64_t b, int64_t head,
            int64_t first, int64_t count, int64_t column)
      : value(static_cast<size_t>(m.size(0)), Doubles(static_cast<size_t>(x.size(3)))),
        magnitude(value) {
    for (size_t r = 0; r < value.size(); ++r) {
      for (int64_t t = 0; t < count; ++t) {
        const double a = At(m, {static_cast<int64_t>(r), column + t});
        for (size_t c = 0; c < value[r].size(); ++c) {
          const double term = a * At(x, {b, first + t, head, static_cast<int64_t>(c)});
          value[r][c] += term;
          magnitude[r][c] += std::abs(term);
        }
      }
    }
  }
};

// The allowed errors of o, or of the gradients, of which absent ones are not wanted.
void AddErrors(const BackwardInputs& in, const Options& options, const TensorView& o,
               const Gradients& g) {
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
        Doubles p(rows), rel(rows);
        double most = -INFINITY, sum = 0, mean = 0;
        for (size_t r = 0; r < rows; ++r) {
          double size = 0;
          for (size_t c = 0; c < keys.value[r].size(); ++c) {
            const double q = scale * At(in.q, {b, t, kh, static_cast<int64_t>(c)});
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
              error += p[r] * (rel[r] * std::abs(values.value[r][c]) +
                               of_sum * values.magnitude[r][c]);
            }
            Add(o, {b, t, h, static_cast<int64_t>(c)}, error);
          }
          continue;
        }
        Doubles terms(rows);
        double average = 0;
        for (size_t r = 0; r < rows; ++r) {
          for (size_t c = 0; c < static_cast<size_t>(V); ++c) {
            const double d_o = std::abs(At(in.d_o, {b, t, h, static_cast<int64_t>(c)}));
            terms[r] += d_o * values.magnitude[r][c];
            value_size[r][c] += p[r] * d_o;
            value_error[r][c] += p[r] * d_o * (rel[r] + e.Chain(n));
          }
          average += p[r] * terms[r];
        }
        for (size_t r = 0; r < rows; ++r) {
          const double ds = scale * p[r] * (terms[r] + average);
          const double error = 2 * rel[r] + of_sum + e.Chain(V * (HV / H)) + e.base;
          for (size_t c = 0; c < static_cast<size_t>(K); ++c) {
            const auto channel = static_cast<int64_t>(c);
            const double q = std::abs(At(in.q, {b, t, kh, channel}));
            Add(g.dq, {b, t, kh, channel},
                ds * (error + of_sum + e.Chain(R)) * keys.magnitude[r][c]);
            key_size[r][c] += ds * q;
            key_error[r][c] += ds * q * (error + e.Chain(n));
          }
        }
      }
      if (o.present()) continue;
      const auto project_back = [&](const ConstTensorView& m, const ConstTensorView& x,
                                    int64_t head, const std::vector<Doubles>& size,
                                    const std::vector<Doubles>& error, const TensorView& dx,
                                    const TensorView& dm) {
        for (int64_t r = 0; r < R; ++r) {
          for (int64_t t = 0; t < n; ++t) {
            const double weight = std::abs(At(m, {r, column + t}));
            for (int64_t c = 0; c < x.size(3); ++c) {
              const double d = size[static_cast<size_t>(r)][static_cast<size_t>(c)];
              const double off = error[static_cast<size_t>(r)][static_cast<size_t>(c)];
              Add(dx, {b, first + t, head, c}, weight * (off + e.Chain(R) * d));
              Add(dm, {r, column + t}, std::abs(At(x, {b, first + t, head, c})) *
                                           (off + e.Chain(x.size(3) + sequences * HV) * d));
            }
          }
        }
      };
      project_back(in.e, in.k, kh, key_size, key_error, g.dk, g.de);
      project_back(in.f, in.v, h, value_size, value_error, g.dv, g.df);
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
               GetElement(tolerance, index) +
                   std::abs(GetElement(expected, index)) * e.output + e.subnormal);
  } while (NextIndex(tolerance.sizes(), index));
}

std::string Title(const Problem& p) {
  std::string text = std::string("linformer ") + Name(p.in.q.dtype());
  for (const auto& [name, view] :
       {std::pair{"q", p.in.q}, {"k", p.in.k}, {"v", p.in.v}, {"e", p.in.e}, {"f", p.in.f},
        {"lengths", p.options.lengths}, {"starts", p.options.starts},
        {"cu_seqlens", p.options.cu_seqlens}}) {
    if (!view.present()) continue;
    text += std::string(" ") + name + view.ShapeString() + "/" + ShapeString(view.strides());
  }
  if (p.options.scale) text += " scale=" + std::to_string(*p.options.scale);
  return text + " " + p.note;
}

Case ToCase(const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c;
  c.title = Title(problem);
  c.pass = p->forward ? "forward" : "backward";
  c.outputs = p->outputs;
  c.run = [p](Context& ctx, std::span<const TensorView> views) {
    if (p->forward) return Forward(ctx, p->in, p->options, {views[0]});
    Backward(ctx, p->in, p->options, ToGradients(*p, views));
  };
  c.reference = [p](std::span<const TensorView> expected,
                    std::span<const TensorView> tolerance) {
    if (p->forward) {
      Reference(p->in, p->options, {expected[0]});
    } else {
      BackwardReference(p->in, p->options, ToGradients(*p, expected));
    }
    if (tolerance.empty()) return;
    for (const TensorView& t : tolerance) Clear(t);
    AddErrors(p->in, p->options, p->forward ? tolerance[0] : TensorView(),
              p->forward ? Gradients() : ToGradients(*p, tolerance));
    for (size_t i = 0; i < tolerance.size(); ++i) {
      AddRounding(tolerance[i], expected[i], p->outputs[i].dtype);
    }
  };
  for (const ConstTensorView& view : {p->in.q, p->in.k, p->in.v, p->in.e, p->in.f}) {
    c.bytes += static_cast<double>(view.num_elements()) *
               static_cast<double>(SizeOf(view.dtype()));
  }
  for (const OutputSpec& spec : c.outputs) {
    double bytes = static_cast<double>(SizeOf(spec.dtype));
    for (const int64_t size : spec.sizes) bytes *= static_cast<double>(size);
    c.bytes += bytes;
  }
  return c;
}

void Describe(Problem& p) {
  const auto like = [&](const char* name, const ConstTensorView& t) {
    p.outputs.push_back({name, t.dtype(), {t.sizes().begin(), t.sizes().end()}, {}});
  };
  if (p.forward) return like("o", p.in.v);
  like("dq", p.in.q);
  like("dk", p.in.k);
  like("dv", p.in.v);
  like("de", p.in.e);
  like("df", p.in.f);
}

// T = Tq tokens, H = Hkv and HV = Hq heads, and Tk projected tokens, at most 256: those of
// the paper.
Case MakeCase(const CaseRequest& request) {
  const Sizes& s = request.sizes;
  if (request.pass != "forward" && request.pass != "backward") {
    throw InvalidArgument("linformer: pass is " + request.pass +
                          ", expected forward or backward");
  }
  Problem p;
  p.forward = request.pass == "forward";
  p.note = request.variant;
  uint64_t seed = request.seed * 16;
  const auto tensor = [&](const Shape& sizes, double deviation) {
    return p.Keep(
        Buffer(request.dtype, sizes, Placement::kAligned).FillNormal(++seed, deviation));
  };
  const int64_t R = std::min<int64_t>(s.Tk, 256);
  const double mean = 1 / std::sqrt(static_cast<double>(std::max<int64_t>(s.Tq, 1)));
  p.in.q = tensor({s.B, s.Tq, s.Hkv, s.D}, 1);
  p.in.k = tensor({s.B, s.Tq, s.Hkv, s.D}, 1);
  p.in.v = tensor({s.B, s.Tq, s.Hq, s.Dv}, 1);
  p.in.e = tensor({R, s.Tq}, mean);
  p.in.f = tensor({R, s.Tq}, mean);
  if (!p.forward) p.in.d_o = tensor({s.B, s.Tq, s.Hq, s.Dv}, 1);
  auto tokens = static_cast<double>(s.Tq);
  if (request.variant.rfind("lengths", 0) == 0) {
    const double percent =
        request.variant.size() > 8 ? std::stod(request.variant.substr(8)) : 62;
    tokens = std::floor(tokens * percent / 100);
    p.options.lengths = p.Keep(Buffer(DType::kI64, {s.B}).FillConstant(tokens));
  } else if (!request.variant.empty()) {
    throw InvalidArgument("linformer: variant is " + request.variant +
                          ", expected one of Entry().variants");
  }
  Describe(p);
  Case c = ToCase(p);
  const auto keys = static_cast<double>(s.Hkv * s.D), values = static_cast<double>(s.Hq * s.Dv);
  const double per_row = p.forward ? 4 * (keys + values)
                                   : 8 * (keys + values) + 6 * keys + 4 * values;
  c.flops = static_cast<double>(s.B * R) * tokens * per_row;
  return c;
}

// Random sizes, layouts and options.
class Generator {
 public:
  Generator(DType dtype, uint64_t seed) : dtype_(dtype), random_(seed, 2), seed_(seed * 64) {
    p_.note = "seed=" + std::to_string(seed);
  }

  Problem Make() {
    p_.forward = random_.Chance(0.5);
    const bool packed = random_.Chance(0.25);
    const int64_t B = packed ? 1 : random_.Chance(0.03) ? 0 : Integer(1, 3);
    const int64_t T = Tokens(), H = Integer(1, 2);
    const int64_t HV = H * random_.Pick<int64_t>({1, 1, 2, 3});
    const int64_t K = Channels(), V = Channels();
    const int64_t R = random_.Chance(0.8) ? Integer(1, 20)
                                          : random_.Pick<int64_t>({63, 64, 65, 130});
    int64_t longest = T;
    if (packed) {
      Shape bounds = {0};
      for (int64_t n = Integer(0, 4); n > 0; --n) bounds.push_back(Integer(0, T));
      std::sort(bounds.begin(), bounds.end());
      longest = 0;
      for (size_t i = 1; i < bounds.size(); ++i) {
        longest = std::max(longest, bounds[i] - bounds[i - 1]);
      }
      p_.options.cu_seqlens = Ints(bounds);
    } else {
      if (random_.Chance(0.3)) p_.options.lengths = Ints(Bounds(B, T));
      if (random_.Chance(0.3)) p_.options.starts = Ints(Bounds(B, T));
    }
    const double strength = std::exp(random_.Uniform(-3, 1));
    p_.in.q = Tensor({B, T, H, K}, strength);
    p_.in.k = Tensor({B, T, H, K}, 1);
    p_.in.v = Tensor({B, T, HV, V}, 1);
    p_.in.d_o = Tensor({B, T, HV, V}, 1);
    p_.in.e = Weights(R, longest);
    p_.in.f = Weights(R, longest);
    if (random_.Chance(0.3)) p_.options.scale = random_.Uniform(-1, 1);
    Describe(p_);
    for (size_t i = p_.outputs.size(); !p_.forward && i-- > 0;) {
      if (p_.outputs.size() > 1 && random_.Chance(0.2)) {
        p_.outputs.erase(p_.outputs.begin() + static_cast<int64_t>(i));
      }
    }
    return p_;
  }

 private:
  int64_t Integer(int64_t low, int64_t high) { return random_.Integer(low, high); }
  int64_t Tokens() {
    if (random_.Chance(0.04)) return 0;
    if (random_.Chance(0.7)) return Integer(1, 20);
    return random_.Pick<int64_t>({63, 64, 65, 127, 128, 129, 200});
  }
  int64_t Channels() {
    if (random_.Chance(0.7)) return Integer(1, 18);
    return random_.Pick<int64_t>({31, 32, 33, 40, 64});
  }
  Shape Bounds(int64_t B, int64_t T) {
    Shape bounds;
    for (int64_t b = 0; b < B; ++b) bounds.push_back(Integer(0, T));
    return bounds;
  }
  ConstTensorView Ints(const Shape& values) {
    const Buffer buffer(random_.Chance(0.5) ? DType::kI32 : DType::kI64,
                        {static_cast<int64_t>(values.size())});
    for (size_t i = 0; i < values.size(); ++i) {
      buffer.Set({static_cast<int64_t>(i)}, static_cast<double>(values[i]));
    }
    return p_.Keep(buffer);
  }
  // `order` has the axes from the innermost outwards; gaps between rows, at either guard.
  ConstTensorView Fill(DType dtype, const Shape& sizes, const std::vector<size_t>& order,
                       double deviation) {
    Shape strides(sizes.size(), 1);
    int64_t next = 1;
    for (const size_t axis : order) {
      strides[axis] = next;
      next = next * std::max<int64_t>(sizes[axis], 1) + Integer(0, 3);
    }
    const Placement placement =
        random_.Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard;
    return p_.Keep(Buffer(dtype, sizes, strides, placement, Integer(0, 9))
                       .FillNormal(++seed_, deviation));
  }
  ConstTensorView Tensor(const Shape& sizes, double deviation) {
    const std::vector<size_t> order = random_.Chance(0.5) ? std::vector<size_t>{3, 2, 1, 0}
                                                          : std::vector<size_t>{3, 1, 2, 0};
    return Fill(dtype_, sizes, order, deviation);
  }
  ConstTensorView Weights(int64_t R, int64_t columns) {
    const DType wide = dtype_ == DType::kF64 ? DType::kF64 : DType::kF32;
    const Shape sizes = {R, columns + (random_.Chance(0.4) ? Integer(1, 9) : 0)};
    return Fill(random_.Chance(0.5) ? wide : dtype_, sizes,
                random_.Chance(0.6) ? std::vector<size_t>{1, 0} : std::vector<size_t>{0, 1},
                1 / std::sqrt(static_cast<double>(std::max<int64_t>(columns, 1))));
  }

  Problem p_;
  DType dtype_;
  Random random_;
  uint64_t seed_;
};

Case RandomCase(DType dtype, uint64_t seed) { return ToCase(Generator(dtype, seed).Make()); }

TensorCall CallOn(const Context& ctx, const TensorMap& tensors, std::optional<double> scale) {
  const auto p = std::make_shared<Problem>();
  p->in.q = tensors.at("q");
  p->in.k = tensors.at("k");
  p->in.v = tensors.at("v");
  p->in.e = tensors.at("e");
  p->in.f = tensors.at("f");
  p->options.scale = scale;
  const Explanation plan = Explain(ctx, p->in, p->options);  // checks everything first
  Describe(*p);
  return {.outputs = p->outputs,
          .run = [p](Context& run_ctx, std::span<const TensorView> views) {
            Forward(run_ctx, p->in, p->options, {views[0]});
          },
          .causal = false,
          .kernel = plan.kernel,
          .target = plan.target,
          .why = plan.why,
          .flops = plan.flops,
          .workspace_bytes = plan.workspace_bytes};
}

}  // namespace

OpEntry Entry() {
  return {.name = "linformer",
          .family = "linear",
          .passes = {"forward", "backward"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = {"lengths=62"},
          .flops = "4 R (Hkv D + Hq Dv) per token, R = min(Tk, 256), backward 14 R Hkv D + 12 R Hq Dv",
          .bytes = "(B Tq (2 Hkv D + 2 Hq Dv) + 2 R Tq) size",
          .state = "none: K~ and V~ need every token",
          .make_case = &MakeCase,
          .random_case = &RandomCase,
          .inputs = {{"q", "BTHK"}, {"k", "BTHK"}, {"v", "BTHV"}, {"e", "RC"}, {"f", "RC"}},
          .call = &CallOn};
}

}  // namespace heed::linformer
