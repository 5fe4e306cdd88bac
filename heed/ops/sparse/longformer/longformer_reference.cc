// longformer::Reference and BackwardReference: two references of attention in double, each of which computes some rows.
//
// It shares only the checks with longformer.cc, and is to be read beside the header.
#include "heed/ops/sparse/longformer/longformer_reference_internal.h"

#include <algorithm>
#include <set>
#include <span>
#include <tuple>

#include "heed/ops/exact/attention/attention_internal.h"
#include "heed/mechanism/check_internal.h"
#include "heed/patterns/pattern.h"
#include "heed/ops/sparse/longformer/longformer_internal.h"

namespace heed::longformer {
namespace {

int64_t OffsetAt(const ConstTensorView& t, std::initializer_list<int64_t> index) {
  const int64_t* last = index.end() - t.rank();
  int64_t at = 0;
  for (int axis = 0; axis < t.rank(); ++axis) at += last[axis] * t.stride(axis);
  return at;
}

int64_t IntAt(const ConstTensorView& t, std::initializer_list<int64_t> index) {
  return LoadAsInt64(t.dtype(), t.data(), OffsetAt(t, index));
}

// Allocates row-major zeros.
TensorView Zeros(Halves& halves, DType dtype, const std::vector<int64_t>& sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return {halves.memory.emplace_back(static_cast<size_t>(count) + 1).data(), dtype, sizes};
}

ConstTensorView Ints(Halves& halves, const std::vector<int64_t>& values) {
  const TensorView t = Zeros(halves, DType::kI64, {std::ssize(values)});
  std::ranges::copy(values, t.as<int64_t>());
  return t;
}

// Calls f(batch, token) for every row.
template <class F>
void ForRows(const ConstTensorView& q, const F& f) {
  const int r = q.rank();
  for (int64_t b = 0; b < (r == 4 ? q.size(0) : 1); ++b) {
    for (int64_t t = 0; t < q.size(r - 3); ++t) f(b, t);
  }
}

std::vector<int64_t> SizesOf(const ConstTensorView& t) { return {t.sizes().begin(), t.sizes().end()}; }

// A copy in which the rows of global tokens are zero, and a copy of only these rows. Axes of tokens count from the end.
void Divide(Halves& halves, ConstTensorView& all, ConstTensorView& own, int axis_of_tokens, int64_t own_batches,
            int64_t own_tokens) {
  if (!all.present()) return;
  const ConstTensorView from = all;
  const int axis = from.rank() - axis_of_tokens;
  const bool is_lse = axis_of_tokens == 1;
  std::vector<int64_t> sizes = SizesOf(from);
  const TensorView others = Zeros(halves, from.dtype(), sizes);
  sizes[static_cast<size_t>(axis)] = own_tokens;
  if (from.rank() == (is_lse ? 3 : 4)) sizes[0] = own_batches;
  const TensorView rows = Zeros(halves, from.dtype(), sizes);
  const int64_t batches = from.rank() == (is_lse ? 3 : 4) ? from.size(0) : 1;
  const int64_t heads = from.size(is_lse ? axis - 1 : axis + 1), channels = is_lse ? 1 : from.size(axis + 2);
  for (int64_t b = 0; b < batches; ++b) {
    for (int64_t t = 0; t < from.size(axis); ++t) {
      const auto place =
          std::ranges::find_if(halves.places, [&](const TokenPlace& p) { return p.batch == b && p.token == t; });
      const bool is_token = place != halves.places.end();
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t c = 0; c < channels; ++c) {
          if (is_lse) {
            const double value = ElementAt(from, {b, h, t});
            is_token ? SetElementAt(rows, {place->own_batch, h, place->own_token}, value)
                     : SetElementAt(others, {b, h, t}, value);
          } else {
            const double value = ElementAt(from, {b, t, h, c});
            is_token ? SetElementAt(rows, {place->own_batch, place->own_token, h, c}, value)
                     : SetElementAt(others, {b, t, h, c}, value);
          }
        }
      }
    }
  }
  all = others;
  own = rows;
}

}  // namespace

double ElementAt(const ConstTensorView& t, std::initializer_list<int64_t> index) {
  return LoadAsDouble(t.dtype(), t.data(), OffsetAt(t, index));
}

void SetElementAt(const TensorView& t, std::initializer_list<int64_t> index, double value) {
  StoreDouble(t.dtype(), t.data(), OffsetAt(t, index), value);
}

void PutRows(const Halves& halves, const ConstTensorView& own, const TensorView& all) {
  const int r = all.rank();
  for (const TokenPlace& p : halves.places) {
    for (int64_t h = 0; h < all.size(r - 2); ++h) {
      for (int64_t c = 0; c < all.size(r - 1); ++c) {
        SetElementAt(all, {p.batch, p.token, h, c}, ElementAt(own, {p.own_batch, p.own_token, h, c}));
      }
    }
  }
}

void PutLse(const Halves& halves, const ConstTensorView& own, const TensorView& all) {
  for (const TokenPlace& p : halves.places) {
    for (int64_t h = 0; h < all.size(all.rank() - 2); ++h) {
      SetElementAt(all, {p.batch, h, p.token}, ElementAt(own, {p.own_batch, h, p.own_token}));
    }
  }
}

Halves HalvesOf(const BackwardInputs& in, const Options& options) {
  Halves halves;
  const attention::Options shared = AttentionOptions(options);
  Half &all = halves.all, &own = halves.tokens;
  all.in = {in.q, in.k, in.v, {}, {}, in.d_o, in.d_lse};
  all.options = shared;
  all.options.pattern = patterns::Longformer(options.window, options.tokens);
  if (!in.qg.present()) return halves;

  const int r = in.q.rank();
  const bool packed = options.cu_seqlens_q.present();
  const int64_t sequences = packed ? options.cu_seqlens_q.size(0) - 1 : in.q.size(0);
  const int64_t n = options.tokens.size(options.tokens.rank() - 1);
  const bool one_list = options.tokens.rank() == 2 && options.tokens.size(0) == 1;
  std::vector<int64_t> counts, bounds = {0};
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t first = packed ? IntAt(options.cu_seqlens_q, {s}) : 0;
    int64_t end = packed ? IntAt(options.cu_seqlens_q, {s + 1}) - first : in.q.size(r - 3);
    if (options.query_lengths.present()) end = IntAt(options.query_lengths, {s});
    std::set<int64_t> tokens;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t token = IntAt(options.tokens, {one_list ? 0 : s, i});
      if (token >= 0 && token < end) tokens.insert(token);
    }
    int64_t own_token = packed ? bounds.back() : 0;
    for (const int64_t token : tokens) {
      halves.places.push_back({packed ? 0 : s, first + token, packed ? 0 : s, own_token++});
    }
    counts.push_back(std::ssize(tokens));
    bounds.push_back(bounds.back() + std::ssize(tokens));
  }

  own.options = shared;
  own.options.query_starts = Ints(halves, std::vector<int64_t>(counts.size(), kFirstPosition));
  int64_t own_batches = 1, own_tokens = bounds.back();
  if (packed) {
    own.options.cu_seqlens_q = Ints(halves, bounds);
    own.options.cu_seqlens_k = options.cu_seqlens_q;
  } else {
    own.options.query_lengths = Ints(halves, counts);
    own_batches = sequences;
    own_tokens = counts.empty() ? 0 : *std::ranges::max_element(counts);
  }
  own.in = {in.qg, in.kg, in.vg, {}, {}, {}, {}};
  ConstTensorView qg = in.qg, unused;
  Divide(halves, all.in.q, unused, 3, own_batches, own_tokens);
  Divide(halves, qg, own.in.q, 3, own_batches, own_tokens);
  Divide(halves, all.in.d_o, own.in.d_o, 3, own_batches, own_tokens);
  Divide(halves, all.in.d_lse, own.in.d_lse, 1, own_batches, own_tokens);
  return halves;
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "longformer::Reference";
  const Call call = CheckedCall(kOp, in, options, true);
  attention::CheckedProblem(kOp, {in.q, in.k, in.v}, call.options, {out.o, out.lse}, attention::Use::kReference);
  BackwardInputs forward;
  static_cast<Inputs&>(forward) = in;
  Halves halves = HalvesOf(forward, options);
  const Half &all = halves.all, &own = halves.tokens;
  attention::Reference({all.in.q, all.in.k, all.in.v}, all.options, {out.o, out.lse});
  if (!in.qg.present()) return;
  std::vector<int64_t> sizes = SizesOf(own.in.q);
  sizes.back() = in.v.size(in.v.rank() - 1);
  const TensorView o = Zeros(halves, DType::kF64, sizes);
  const int heads = own.in.q.rank() - 2;
  std::vector<int64_t> lse_sizes = {own.in.q.size(heads), own.in.q.size(heads - 1)};
  if (!options.cu_seqlens_q.present()) lse_sizes.insert(lse_sizes.begin(), own.in.q.size(0));
  const TensorView lse = Zeros(halves, DType::kF64, lse_sizes);
  attention::Reference({own.in.q, own.in.k, own.in.v}, own.options, {o, lse});
  PutRows(halves, o, out.o);
  if (out.lse.present()) PutLse(halves, lse, out.lse);
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  constexpr char kOp[] = "longformer::BackwardReference";
  const Call call = CheckedCall(kOp, in, options, true);
  for (const auto& [name, view, of] :
       {std::tuple{"dqg", out.dqg, in.qg}, {"dkg", out.dkg, in.kg}, {"dvg", out.dvg, in.vg}}) {
    if (view.present() && !(of.present() && std::ranges::equal(view.sizes(), of.sizes()))) {
      mechanism::Fail(kOp, name, "has shape " + view.ShapeString(), of.ShapeString());
    }
  }
  attention::CheckedBackward(kOp, {in.q, in.k, in.v, {}, {}, in.d_o, in.d_lse}, call.options,
                             {out.dq, out.dk, out.dv, {}, {}, {}, {}, {}}, attention::Use::kReference);
  Halves halves = HalvesOf(in, options);
  attention::BackwardReference(halves.all.in, halves.all.options, {out.dq, out.dk, out.dv, {}, {}, {}, {}, {}});
  if (!in.qg.present()) return;
  const TensorView dq = Zeros(halves, DType::kF64, SizesOf(halves.tokens.in.q));
  attention::BackwardReference(halves.tokens.in, halves.tokens.options, {dq, out.dkg, out.dvg, {}, {}, {}, {}, {}});
  if (!out.dqg.present()) return;
  const int r = out.dqg.rank();
  ForRows(out.dqg, [&](int64_t b, int64_t t) {
    for (int64_t h = 0; h < out.dqg.size(r - 2); ++h) {
      for (int64_t c = 0; c < out.dqg.size(r - 1); ++c) SetElementAt(out.dqg, {b, t, h, c}, 0);
    }
  });
  PutRows(halves, dq, out.dqg);
}

}  // namespace heed::longformer
