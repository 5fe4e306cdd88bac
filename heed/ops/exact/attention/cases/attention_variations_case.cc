// The rows of a problem, computed by other calls.
#include "heed/ops/exact/attention/cases/attention_variations_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "heed/ops/exact/attention/attention_options_internal.h"
#include "heed/ops/exact/attention/attention_reference_internal.h"

namespace heed::attention {
namespace {

Buffer MakeOutput(const OutputSpec& spec, DType dtype) {
  if (spec.sizes.empty()) return {};
  if (spec.strides.empty()) return Buffer(dtype, spec.sizes);
  return Buffer(dtype, spec.sizes, spec.strides, Placement::kBeforeGuard);
}

// All tensors among the arguments, those with rows first.
std::vector<ConstTensorView*> Tensors(Problem& p) {
  std::vector<ConstTensorView*> tensors = {&p.in.q, &p.in.k, &p.in.v, &p.d_o, &p.d_lse};
  ForEachTensor(p.options, [&](const OptionRow&, ConstTensorView& view) { tensors.push_back(&view); });
  return tensors;
}

// The index of an axis of an option's tensor; -1 where the tensor is broadcast along it, or absent.
int AxisOf(const OptionRow& row, const ConstTensorView& view, char axis) {
  if (!view || !row.Has(axis)) return -1;
  const int at = static_cast<int>(row.axes.find(axis)) - static_cast<int>(row.axes.size()) + view.rank();
  return at < 0 || (row.Broadcasts() && view.size(at) == 1) ? -1 : at;
}

template <class F>
void ForEachIndex(std::span<const int64_t> sizes, F&& f) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return;
  std::vector<int64_t> index(sizes.size());
  do {
    f(index);
  } while (NextIndex(sizes, index));
}

void CopyElements(const ConstTensorView& from, const TensorView& to) {
  ForEachIndex(from.sizes(),
               [&](const std::vector<int64_t>& index) { SetElement(to, index, GetElement(from, index)); });
}

void SliceRows(ConstTensorView& view, int axis, int64_t begin, int64_t end) {
  if (view) view = view.Slice(axis, begin, end);
}

// Makes the positions explicit, so that slices keep them.
void FixPositions(Problem& p) {
  if (p.options.query_starts) return;
  const Sizes s = SizesOf(p);
  const int64_t start = p.options.align == Align::kBottomRight ? s.Tk - s.Tq : 0;
  p.options.query_starts = KeepInts(p, std::vector<int64_t>(static_cast<size_t>(s.B), start));
}

// Describes outputs and gradients for new inputs.
void DescribeAgain(Problem& p) {
  DescribeOutputs(p);
  ForEachGradient(p.in, p.options, [&](const char* name, auto, const char*, const ConstTensorView& of) {
    for (OutputSpec& spec : p.gradients) {
      if (spec.name == name) spec = {name, of.dtype(), {of.sizes().begin(), of.sizes().end()}, {}};
    }
  });
}

int64_t Element(const ConstTensorView& view, int64_t b) {
  return LoadAsInt64(view.dtype(), view.data(), b * view.stride(0));
}

}  // namespace

void SliceOptions(Options& options, char axis, int64_t begin, int64_t end) {
  ForEachTensor(options, [&](const OptionRow& row, ConstTensorView& view) {
    const int at = AxisOf(row, view, axis);
    if (at >= 0) view = view.Slice(at, begin, end);
  });
}

Result RunForward(Context& ctx, const Problem& p) {
  Result r = {MakeOutput(p.o, p.o.dtype), MakeOutput(p.lse, p.lse.dtype)};
  Forward(ctx, p.in, p.options, {r.o.view(), r.lse.view()});
  return r;
}

Result RunReference(const Problem& p) {
  Result r = {Buffer(DType::kF64, p.o.sizes), {}};
  if (!p.lse.sizes.empty()) r.lse = Buffer(DType::kF64, p.lse.sizes);
  Reference(p.in, p.options, {r.o.view(), r.lse.view()});
  return r;
}

std::vector<Buffer> RunBackward(Context& ctx, const Problem& p) {
  const Buffer o(p.in.q.dtype(), p.o.sizes),
      lse(p.in.q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, p.LseSizes());
  Forward(ctx, p.in, p.options, {o.view(), lse.view()});
  std::vector<Buffer> gradients;
  std::vector<TensorView> views;
  for (const OutputSpec& spec : p.gradients) {
    gradients.push_back(MakeOutput(spec, spec.dtype));
    views.push_back(gradients.back().view());
  }
  Backward(ctx, {p.in.q, p.in.k, p.in.v, o.view(), lse.view(), p.d_o, p.d_lse}, p.options,
           ToGradients(p.gradients, views));
  return gradients;
}

std::vector<Buffer> RunBackwardReference(const Problem& p) {
  std::vector<Buffer> gradients;
  std::vector<TensorView> views;
  for (const OutputSpec& spec : p.gradients) {
    gradients.emplace_back(DType::kF64, spec.sizes);
    views.push_back(gradients.back().view());
  }
  BackwardReference({p.in.q, p.in.k, p.in.v, {}, {}, p.d_o, p.d_lse}, p.options, ToGradients(p.gradients, views));
  return gradients;
}

Problem WithGradients(Problem p, uint64_t seed) {
  DescribeGradients(p, seed);
  p.d_lse =
      Keep(p, Buffer(p.in.q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, p.LseSizes()).FillNormal(seed + 100));
  return p;
}

Problem MakeProblem(DType dtype, const Sizes& s, uint64_t seed) {
  Problem p;
  p.in.q = Keep(p, Buffer(dtype, {s.B, s.Tq, s.Hq, s.D}).FillNormal(seed));
  p.in.k = Keep(p, Buffer(dtype, {s.B, s.Tk, s.Hkv, s.D}).FillNormal(seed + 1));
  p.in.v = Keep(p, Buffer(dtype, {s.B, s.Tk, s.Hkv, s.Dv}).FillNormal(seed + 2));
  DescribeOutputs(p);
  return p;
}

ConstTensorView Keep(Problem& problem, const Buffer& buffer) {
  problem.memory.push_back(buffer);
  return buffer.view();
}

ConstTensorView KeepInts(Problem& problem, std::vector<int64_t> values, DType dtype) {
  const Buffer buffer(dtype, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t at[] = {static_cast<int64_t>(i)};
    if (dtype == DType::kI64) {
      buffer.as<int64_t>()[i] = values[i];  // all 64 bits
    } else {
      SetElement(buffer.view(), at, static_cast<double>(values[i]));
    }
  }
  return Keep(problem, buffer);
}

ConstTensorView KeepFloats(Problem& problem, std::vector<double> values, DType dtype) {
  const Buffer buffer(dtype, {static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i) {
    buffer.Set({static_cast<int64_t>(i)}, values[i]);
  }
  return Keep(problem, buffer);
}

Sizes SizesOf(const Problem& p) {
  return {.B = p.in.q.size(0),
          .Tq = p.in.q.size(1),
          .Tk = p.in.k.size(1),
          .Hq = p.in.q.size(2),
          .Hkv = p.in.k.size(2),
          .D = p.in.q.size(3),
          .Dv = p.in.v.size(3)};
}

Problem Restrided(const Problem& problem, uint64_t seed) {
  Problem p = problem;
  Random random(seed, 0x57D);
  const auto reorder = [&](std::span<const int64_t> sizes, bool contiguous, bool negative) {
    std::vector<size_t> order(sizes.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = order.size() - 1 - i;
    for (size_t i = contiguous ? 1 : 0; i < order.size(); ++i) {
      std::swap(
          order[i],
          order[static_cast<size_t>(random.Integer(static_cast<int64_t>(i), static_cast<int64_t>(order.size()) - 1))]);
    }
    std::vector<int64_t> strides(sizes.size());
    int64_t next = contiguous ? 1 : random.Integer(1, 2);
    for (size_t i = 0; i < order.size(); ++i) {
      strides[order[i]] = next;
      next = next * std::max<int64_t>(sizes[order[i]], 1) + random.Integer(0, 3);
      const bool last = contiguous && i == 0;
      if (negative && !last && random.Chance(0.3)) {
        strides[order[i]] *= -1;
      }
    }
    return strides;
  };
  const std::vector<ConstTensorView*> tensors = Tensors(p);
  for (size_t i = 0; i < tensors.size(); ++i) {
    ConstTensorView& view = *tensors[i];
    if (!view) continue;
    const Buffer copy(view.dtype(), view.sizes(), reorder(view.sizes(), /*contiguous=*/i < 4, true),
                      random.Chance(0.5) ? Placement::kAfterGuard : Placement::kBeforeGuard);
    CopyElements(view, copy.view());
    view = Keep(p, copy);
  }
  p.o.strides = reorder(p.o.sizes, true, false);
  p.lse.strides = reorder(p.lse.sizes, false, false);
  for (OutputSpec& spec : p.gradients) spec.strides = reorder(spec.sizes, true, false);
  return p;
}

Problem OneSequence(const Problem& problem, int64_t b) {
  Problem p = problem;
  for (ConstTensorView* view : {&p.in.q, &p.in.k, &p.in.v, &p.d_o, &p.d_lse}) SliceRows(*view, 0, b, b + 1);
  SliceOptions(p.options, 'B', b, b + 1);
  DescribeAgain(p);
  return p;
}

Problem OneKeyHead(const Problem& problem, int64_t key_head) {
  Problem p = problem;
  const Sizes s = SizesOf(p);
  const int64_t group = s.Hq / s.Hkv;
  const int64_t begin = key_head * group, end = begin + group;
  SliceRows(p.in.q, 2, begin, end);
  SliceRows(p.in.k, 2, key_head, key_head + 1);
  SliceRows(p.in.v, 2, key_head, key_head + 1);
  SliceOptions(p.options, 'H', begin, end);
  SliceRows(p.d_o, 2, begin, end);
  SliceRows(p.d_lse, 1, begin, end);
  DescribeAgain(p);
  return p;
}

Problem SomeQueries(const Problem& problem, int64_t begin, int64_t end) {
  Problem p = problem;
  FixPositions(p);
  Options& o = p.options;
  const int64_t B = p.in.q.size(0);
  SliceRows(p.in.q, 1, begin, end);
  SliceRows(p.d_o, 1, begin, end);
  SliceRows(p.d_lse, 2, begin, end);
  SliceOptions(o, 'Q', begin, end);
  std::vector<int64_t> starts, lengths;
  for (int64_t b = 0; b < B; ++b) {
    starts.push_back(Element(o.query_starts, b) + begin);
    if (o.query_lengths) {
      lengths.push_back(std::clamp<int64_t>(Element(o.query_lengths, b) - begin, 0, end - begin));
    }
  }
  o.query_starts = KeepInts(p, starts);
  if (o.query_lengths) o.query_lengths = KeepInts(p, lengths);
  DescribeAgain(p);
  return p;
}

Problem Padded(const Problem& problem, int64_t left, int64_t right) {
  Problem p = problem;
  FixPositions(p);
  Options& o = p.options;
  const Sizes s = SizesOf(p);
  // Copies into the middle of a larger tensor; added elements remain NaN, or have all bits set. `query` and `key` are
  // axes, -1 for none.
  const auto extend = [&](ConstTensorView& view, int query, int key) {
    if (!view) return;
    std::vector<int64_t> sizes(view.sizes().begin(), view.sizes().end());
    if (query >= 0) sizes[static_cast<size_t>(query)] += right;
    if (key >= 0) sizes[static_cast<size_t>(key)] += left + right;
    const Buffer larger(view.dtype(), sizes);
    if (view.dtype() == DType::kBool) larger.FillConstant(1);
    TensorView middle = larger.view();
    if (query >= 0) middle = middle.Slice(query, 0, view.size(query));
    if (key >= 0) middle = middle.Slice(key, left, left + view.size(key));
    CopyElements(view, middle);
    view = Keep(p, larger);
  };
  extend(p.in.q, 1, -1);
  extend(p.in.k, -1, 1);
  extend(p.in.v, -1, 1);
  extend(p.d_o, 1, -1);
  extend(p.d_lse, 2, -1);
  ForEachTensor(o, [&](const OptionRow& row, ConstTensorView& view) {
    const int query = AxisOf(row, view, 'Q'), key = AxisOf(row, view, 'K');
    if (query >= 0 || key >= 0) extend(view, query, key);
  });
  std::vector<int64_t> queries, starts, begins, ends;
  for (int64_t b = 0; b < s.B; ++b) {
    const auto get = [&](const ConstTensorView& view, int64_t absent) { return view ? Element(view, b) : absent; };
    queries.push_back(get(o.query_lengths, s.Tq));
    starts.push_back(get(o.query_starts, 0) + left);
    begins.push_back(get(o.key_starts, 0) + left);
    ends.push_back(get(o.key_lengths, s.Tk) + left);
  }
  o.query_lengths = KeepInts(p, queries);
  o.query_starts = KeepInts(p, starts);
  o.key_starts = KeepInts(p, begins);
  o.key_lengths = KeepInts(p, ends);
  DescribeAgain(p);
  return p;
}

std::optional<Problem> Packed(const Problem& problem) {
  Problem p = problem;
  Options& o = p.options;
  for (const OptionRow& row : kOptionRows) {
    if (row.Is(kPadded) && IsGiven(row, o)) return std::nullopt;
  }
  const Sizes s = SizesOf(p);
  for (ConstTensorView* view : {&p.in.q, &p.in.k, &p.in.v, &p.d_o}) {
    if (!*view) continue;
    const int64_t T = view->size(1);
    const Buffer rows(view->dtype(), {s.B * T, view->size(2), view->size(3)});
    for (int64_t b = 0; b < s.B; ++b) {
      const TensorView part = rows.view().Slice(0, b * T, (b + 1) * T);
      ForEachIndex(part.sizes(), [&](const std::vector<int64_t>& at) {
        const int64_t from[] = {b, at[0], at[1], at[2]};
        SetElement(part, at, GetElement(*view, from));
      });
    }
    *view = Keep(p, rows);
  }
  if (p.d_lse) {
    const Buffer rows(p.d_lse.dtype(), {s.Hq, s.B * s.Tq});
    ForEachIndex(p.d_lse.sizes(), [&](const std::vector<int64_t>& at) {
      rows.Set({at[1], at[0] * s.Tq + at[2]}, GetElement(p.d_lse, at));
    });
    p.d_lse = Keep(p, rows);
  }
  if (o.log_decay) {
    const Buffer rows(o.log_decay.dtype(), {s.B * s.Tk, s.Hq});
    ForEachIndex(o.log_decay.sizes(), [&](const std::vector<int64_t>& at) {
      rows.Set({at[0] * s.Tk + at[1], at[2]}, GetElement(o.log_decay, at));
    });
    o.log_decay = Keep(p, rows);
  }
  std::vector<int64_t> cu_q, cu_k;
  for (int64_t b = 0; b <= s.B; ++b) {
    cu_q.push_back(b * s.Tq);
    cu_k.push_back(b * s.Tk);
  }
  o.cu_seqlens_q = KeepInts(p, cu_q);
  o.cu_seqlens_k = KeepInts(p, cu_k);
  DescribeAgain(p);
  return p;
}

std::string Difference(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.dtype() != b.dtype() || !std::equal(a.sizes().begin(), a.sizes().end(), b.sizes().begin(), b.sizes().end())) {
    return "shape " + a.ShapeString() + " is not " + b.ShapeString();
  }
  if (SameBits(a, b)) return "";
  std::string text;
  int64_t count = 0;
  ForEachIndex(a.sizes(), [&](const std::vector<int64_t>& index) {
    const double x = GetElement(a, index), y = GetElement(b, index);
    if (std::memcmp(&x, &y, sizeof(x)) == 0) return;  // widening is exact
    if (std::isnan(x) && std::isnan(y)) return;
    if (count++ == 0) {
      text = "at " + ShapeString(index) + " " + std::to_string(x) + " is not " + std::to_string(y) + ", off by " +
             std::to_string(x - y);
    }
  });
  return count == 0 ? "" : text + " (" + std::to_string(count) + " elements differ)";
}

std::string Difference(const Result& a, const Result& b) {
  const std::string o = Difference(a.o.view(), b.o.view());
  if (!o.empty()) return "o " + o;
  if (!a.lse.present() || !b.lse.present()) return "";
  const std::string lse = Difference(a.lse.view(), b.lse.view());
  return lse.empty() ? "" : "lse " + lse;
}

std::string Difference(const std::vector<Buffer>& a, const std::vector<Buffer>& b) {
  if (a.size() != b.size()) return "different gradients";
  for (size_t i = 0; i < a.size(); ++i) {
    const std::string text = Difference(a[i].view(), b[i].view());
    if (!text.empty()) return "gradient " + std::to_string(i) + " " + text;
  }
  return "";
}

void ForEachRow(const Problem& p, const SeenKeys& f) {
  const Buffer o(DType::kF64, p.o.sizes);
  ReferenceRows(p.in, p.options, {o.view(), {}}, [&](const ReferenceRow& row) {
    std::vector<int64_t> keys;
    for (const ReferencePair& pair : row.pairs) keys.push_back(pair.key);
    f(row.sequence, row.head, row.query, keys);
  });
}

}  // namespace heed::attention
