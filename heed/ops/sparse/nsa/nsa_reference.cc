// nsa::Reference and BackwardReference: three references of attention in double, under the mask of each branch.
//
// It shares only the checks with nsa.cc, and is to be read beside the header.
#include "heed/ops/sparse/nsa/nsa_reference_internal.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <tuple>

#include "heed/ops/exact/attention/weights/attention_weights.h"
#include "heed/ops/sparse/nsa/nsa_internal.h"

namespace heed::nsa {
namespace {

int64_t OffsetAt(const ConstTensorView& t, std::initializer_list<int64_t> index) {
  int64_t at = 0;
  for (int axis = 0; axis < t.rank(); ++axis) at += index.begin()[axis] * t.stride(axis);
  return at;
}

std::vector<int64_t> SizesOf(const ConstTensorView& t) { return {t.sizes().begin(), t.sizes().end()}; }

// Means of windows, rounded to the dtype of x.
ConstTensorView MeansOf(Parts& parts, const ConstTensorView& x) {
  const int64_t T = x.size(1);
  int64_t windows = 0;
  while (windows * parts.stride + parts.length <= T) ++windows;
  const TensorView means = Zeros(parts, x.dtype(), {x.size(0), windows, x.size(2), x.size(3)});
  ForElements(means, [&](int64_t b, int64_t w, int64_t h, int64_t e) {
    double sum = 0;
    for (int64_t t = w * parts.stride; t < w * parts.stride + parts.length; ++t) sum += ElementAt(x, {b, t, h, e});
    SetElementAt(means, {b, w, h, e}, sum / static_cast<double>(parts.length));
  });
  return means;
}

// keep[b, h, i, j] = sees(b, h, i, j).
template <class F>
ConstTensorView MaskOf(Parts& parts, const std::vector<int64_t>& sizes, const F& sees) {
  const TensorView keep = Zeros(parts, DType::kBool, sizes);
  ForElements(keep, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    keep.as<bool>()[OffsetAt(keep, {b, h, i, j})] = sees(b, h, i, j);
  });
  return keep;
}

// Selects the blocks of one row, given the importance of each.
Margin ChooseRow(const std::vector<double>& importance, int64_t own, int64_t columns, int64_t* row) {
  std::vector<int64_t> kept, others;
  for (int64_t b = 0; b <= own; ++b) (b == 0 || b + 1 >= own ? kept : others).push_back(b);
  const auto of = [&](int64_t b) {
    const double x = importance[static_cast<size_t>(b)];
    return std::isnan(x) ? -std::numeric_limits<double>::infinity() : x;
  };
  std::ranges::stable_sort(others, [&](int64_t a, int64_t b) { return of(a) > of(b); });
  Margin margin;
  for (const int64_t b : others) {
    if (std::ssize(kept) == columns) {
      const double least = of(kept.back());
      if (columns > 3) margin = {least == of(b) ? 0 : (least - of(b)) / std::abs(least), least};
      break;
    }
    kept.push_back(b);
  }
  std::ranges::sort(kept);
  std::ranges::copy(kept, row);
  return margin;
}

// Selects blocks by the probabilities of compressed keys.
void Choose(const BackwardInputs& in, const Options& options, Parts& parts) {
  const int64_t B = in.q.size(0), Tq = in.q.size(1), Hq = in.q.size(2), Tk = in.k.size(1), Hkv = in.k.size(2);
  const int64_t windows = parts.in[0].k.size(1), columns = Columns(options, Tk);
  const TensorView P = Zeros(parts, DType::kF64, {B, Hq, Tq, windows});
  attention::WeightsReference({in.q, parts.in[0].k, {}}, parts.options[0], {}, P);
  const TensorView blocks = Zeros(parts, DType::kI32, {B, Tq, Hkv, columns});
  parts.blocks = blocks;
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(in.q.size(3))));
  const int64_t group = Hkv == 0 ? 1 : Hq / Hkv;
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t i = 0; i < Tq; ++i) {
      const int64_t own = (Tk - Tq + i) / options.block;
      for (int64_t h = 0; h < Hkv; ++h) {
        std::vector<double> importance(static_cast<size_t>(own + 1), 0.0);
        double magnitude = 0;
        for (int64_t w = 0; w < windows; ++w) {
          double p = 0;
          for (int64_t head = h * group; head < (h + 1) * group; ++head) {
            p += ElementAt(P, {b, head, i, w});
            double sum = 0;
            for (int64_t e = 0; e < in.q.size(3); ++e) {
              sum += std::abs(scale * ElementAt(in.q, {b, i, head, e}) * ElementAt(parts.in[0].k, {b, w, h, e}));
            }
            magnitude = std::max(magnitude, sum);
          }
          for (int64_t t = w * parts.stride; p != 0 && t < w * parts.stride + parts.length; ++t) {
            if (t / options.block <= own)
              importance[static_cast<size_t>(t / options.block)] += p / static_cast<double>(parts.stride);
          }
        }
        std::vector<int64_t> row(static_cast<size_t>(columns), -1);
        parts.margins.push_back(ChooseRow(importance, own, columns, row.data()));
        parts.margins.back().magnitude = magnitude;
        for (int64_t n = 0; n < columns; ++n) {
          blocks.as<int32_t>()[OffsetAt(blocks, {b, i, h, n})] = static_cast<int32_t>(row[static_cast<size_t>(n)]);
        }
      }
    }
  }
}

}  // namespace

TensorView Zeros(Parts& parts, DType dtype, const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return {parts.memory.emplace_back(static_cast<size_t>(count) + 1).data(), dtype, sizes};
}

double ElementAt(const ConstTensorView& t, std::initializer_list<int64_t> index) {
  return LoadAsDouble(t.dtype(), t.data(), OffsetAt(t, index));
}

void SetElementAt(const TensorView& t, std::initializer_list<int64_t> index, double value) {
  StoreDouble(t.dtype(), t.data(), OffsetAt(t, index), value);
}

void AddFromMeans(const Parts& parts, const ConstTensorView& d_means, const TensorView& to) {
  ForElements(d_means, [&](int64_t b, int64_t w, int64_t h, int64_t e) {
    const double arriving = ElementAt(d_means, {b, w, h, e}) / static_cast<double>(parts.length);
    for (int64_t t = w * parts.stride; t < w * parts.stride + parts.length; ++t) {
      SetElementAt(to, {b, t, h, e}, ElementAt(to, {b, t, h, e}) + arriving);
    }
  });
}

Parts PartsOf(const BackwardInputs& in, const Options& options) {
  Parts parts;
  const int64_t B = in.q.size(0), Tq = in.q.size(1), Hq = in.q.size(2), Tk = in.k.size(1), Hkv = in.k.size(2);
  const int64_t start = Tk - Tq, group = Hkv == 0 ? 1 : Hq / Hkv;
  parts.length = options.length == 0 ? options.block : options.length;
  parts.stride = options.stride == 0 ? options.block : options.stride;
  parts.means = !in.k_cmp.present();
  const ConstTensorView k_cmp = parts.means ? MeansOf(parts, in.k) : in.k_cmp;
  const ConstTensorView v_cmp = parts.means ? MeansOf(parts, in.v) : in.v_cmp;
  for (int c = 0; c < 3; ++c) {
    parts.in[c] = {in.q, c == 0 ? k_cmp : in.k, c == 0 ? v_cmp : in.v, {}, {}, {}, {}};
    parts.options[c].scale = options.scale;
    if (!in.d_o.present()) continue;
    const TensorView gated = Zeros(parts, in.d_o.dtype(), SizesOf(in.d_o));
    ForElements(gated, [&](int64_t b, int64_t i, int64_t h, int64_t e) {
      SetElementAt(gated, {b, i, h, e}, ElementAt(in.gates, {b, i, h, c}) * ElementAt(in.d_o, {b, i, h, e}));
    });
    parts.in[c].d_o = gated;
  }
  parts.options[0].mask = MaskOf(parts, {1, 1, Tq, k_cmp.size(1)}, [&](int64_t, int64_t, int64_t i, int64_t w) {
    return w * parts.stride + parts.length - 1 <= start + i;
  });
  Choose(in, options, parts);
  parts.options[1].mask = MaskOf(parts, {B, Hq, Tq, Tk}, [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    bool is_listed = false;
    for (int64_t n = 0; n < parts.blocks.size(3); ++n) {
      is_listed =
          is_listed || parts.blocks.as<int32_t>()[OffsetAt(parts.blocks, {b, i, h / group, n})] == j / options.block;
    }
    return is_listed && j <= start + i;
  });
  parts.options[2].mask = MaskOf(parts, {1, 1, Tq, Tk}, [&](int64_t, int64_t, int64_t i, int64_t j) {
    return j <= start + i && start + i - j < options.window;
  });
  return parts;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  CheckedCall("nsa::Reference", in, options, out.o, attention::Use::kReference);
  BackwardInputs forward;
  static_cast<Inputs&>(forward) = in;
  Parts parts = PartsOf(forward, options);
  const TensorView sum = Zeros(parts, DType::kF64, SizesOf(out.o));
  for (int c = 0; c < 3; ++c) {
    const TensorView o = Zeros(parts, DType::kF64, SizesOf(out.o));
    const TensorView lse = Zeros(parts, DType::kF64, {o.size(0), o.size(2), o.size(1)});
    attention::Reference({in.q, parts.in[c].k, parts.in[c].v}, parts.options[c], {o, lse});
    ForElements(o, [&](int64_t b, int64_t i, int64_t h, int64_t e) {
      const double x = ElementAt(o, {b, i, h, e});
      SetElementAt(sum, {b, i, h, e}, ElementAt(sum, {b, i, h, e}) + ElementAt(in.gates, {b, i, h, c}) * x);
      if (out.branches.present()) SetElementAt(Of(out.branches, c), {b, i, h, e}, x);
      if (out.lse.present()) SetElementAt(Of(out.lse, c), {b, h, i}, ElementAt(lse, {b, h, i}));
    });
  }
  ForElements(out.o, [&](int64_t b, int64_t i, int64_t h, int64_t e) {
    SetElementAt(out.o, {b, i, h, e}, ElementAt(sum, {b, i, h, e}));
  });
  if (!out.blocks.present()) return;
  ForElements(out.blocks, [&](int64_t b, int64_t i, int64_t h, int64_t n) {
    out.blocks.as<int32_t>()[OffsetAt(out.blocks, {b, i, h, n})] =
        parts.blocks.as<int32_t>()[OffsetAt(parts.blocks, {b, i, h, n})];
  });
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  CheckBackwardReference("nsa::BackwardReference", in, options, out);
  Parts parts = PartsOf(in, options);
  const TensorView dq = Zeros(parts, DType::kF64, SizesOf(in.q)), dk = Zeros(parts, DType::kF64, SizesOf(in.k));
  const TensorView dv = Zeros(parts, DType::kF64, SizesOf(in.v)), dgates = Zeros(parts, DType::kF64, SizesOf(in.gates));
  const auto add = [](const ConstTensorView& from, const TensorView& to) {
    ForElements(from, [&](int64_t a, int64_t b, int64_t c, int64_t d) {
      SetElementAt(to, {a, b, c, d}, ElementAt(to, {a, b, c, d}) + ElementAt(from, {a, b, c, d}));
    });
  };
  const auto store = [](const ConstTensorView& from, const TensorView& to) {
    if (!to.present()) return;
    ForElements(from, [&](int64_t a, int64_t b, int64_t c, int64_t d) {
      SetElementAt(to, {a, b, c, d}, ElementAt(from, {a, b, c, d}));
    });
  };
  for (int c = 0; c < 3; ++c) {
    const attention::BackwardInputs& of = parts.in[c];
    const TensorView of_q = Zeros(parts, DType::kF64, SizesOf(of.q)), of_k = Zeros(parts, DType::kF64, SizesOf(of.k));
    const TensorView of_v = Zeros(parts, DType::kF64, SizesOf(of.v)), o = Zeros(parts, DType::kF64, SizesOf(in.d_o));
    attention::Reference({of.q, of.k, of.v}, parts.options[c], {o, {}});
    attention::BackwardReference(of, parts.options[c], {of_q, of_k, of_v, {}, {}, {}, {}, {}});
    ForElements(o, [&](int64_t b, int64_t i, int64_t h, int64_t e) {
      const double x = ElementAt(in.d_o, {b, i, h, e}) * ElementAt(o, {b, i, h, e});
      SetElementAt(dgates, {b, i, h, c}, ElementAt(dgates, {b, i, h, c}) + x);
    });
    add(of_q, dq);
    if (c > 0) {
      add(of_k, dk);
      add(of_v, dv);
    } else if (parts.means) {
      AddFromMeans(parts, of_k, dk);
      AddFromMeans(parts, of_v, dv);
    } else {
      store(of_k, out.dk_cmp);
      store(of_v, out.dv_cmp);
    }
  }
  store(dq, out.dq);
  store(dk, out.dk);
  store(dv, out.dv);
  store(dgates, out.dgates);
}

}  // namespace heed::nsa
