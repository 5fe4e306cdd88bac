// Linformer: checks, then blocks of tokens ("rounds") through the products below and the softmax engine.
//
// Everything between the call's tensors and the engine is in memory of the accumulation dtype: K~ and V~ are sums that
// 16 bits would not hold, and the engine takes one dtype. So tokens are widened, a round of at most 4 MiB at a time,
// which the engine reads and writes in order; relative to the engine's R products per element, the copy is negligible.
#include "heed/ops/linear/linformer/linformer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/carver.h"
#include "heed/core/dispatch.h"
#include "heed/core/os.h"
#include "heed/engines/softmax/kernels.h"
#include "heed/mechanism/check_internal.h"
#include "heed/mechanism/tokens_internal.h"
#include "heed/ops/linear/linformer/linformer_internal.h"

namespace heed::linformer {
namespace {

using mechanism::Axes;
using mechanism::Fail;
using Of = mechanism::Lists<Structs>;

// The names of tensors in the order of lists of views.
const char* NameOf(size_t i) { return mechanism::Members(kTensors)[i].name; }

constexpr int64_t kBudgetBytes = int64_t{4} << 20;
constexpr int64_t kMinRound = 64, kMaxRound = 4096;  // tokens

Tokens TokensOf(const ConstTensorView& t) {
  return {const_cast<void*>(t.data()), t.dtype(), t.stride(0), t.stride(1), t.stride(2), t.size(2), t.size(3)};
}

Matrix MatrixOf(const ConstTensorView& t) {
  return {const_cast<void*>(t.data()), t.dtype(), t.stride(0), t.stride(1), t.size(0), t.size(1)};
}

// A checked call.
struct Call {
  DType dtype, wide;
  int64_t B, T, H, HV, K, V, R;
  double scale;
  std::vector<mechanism::TokenRange> ranges;
  std::vector<Part> parts;  // of sequences that have tokens
  int64_t columns = 0;      // columns of e and f that belong to tokens

  int64_t group() const { return H == 0 ? 1 : HV / H; }
  int64_t value_size() const { return group() * V; }  // per key head
  int64_t element() const { return static_cast<int64_t>(SizeOf(wide)); }
  int64_t tokens() const {
    int64_t sum = 0;
    for (const Part& p : parts) sum += p.count;
    return sum;
  }
};

void CheckDType(const char* op, const char* name, const ConstTensorView& t, DType a, DType b) {
  if (t.dtype() == a || t.dtype() == b) return;
  Fail(op, name, std::string("has dtype ") + Name(t.dtype()),
       Name(a) + std::string(a == b ? "" : std::string(" or ") + Name(b)));
}

Call CheckedCall(const char* op, const Inputs& in, const Options& options, bool data) {
  for (const auto& [name, t] : {std::pair{"q", in.q}, {"v", in.v}}) {
    if (!t.present()) Fail(op, name, "is absent", "a tensor");
    if (t.rank() != 4) {
      Fail(op, name, "has shape " + t.ShapeString(), "rank 4: [B, T, H, D]");
    }
  }
  if (!IsFloat(in.q.dtype())) {
    Fail(op, "q", std::string("has dtype ") + Name(in.q.dtype()), "f64, f32, bf16 or f16");
  }
  Call c;
  c.dtype = in.q.dtype();
  c.wide = mechanism::StateDType(c.dtype);
  c.B = in.q.size(0), c.T = in.q.size(1), c.H = in.q.size(2), c.K = in.q.size(3);
  c.HV = in.v.size(2), c.V = in.v.size(3);
  const Axes q = {c.B, c.T, c.H, c.K};
  for (const auto& [name, t, shape] :
       {std::tuple{"q", in.q, q}, {"k", in.k, q}, {"v", in.v, Axes{c.B, c.T, c.HV, c.V}}}) {
    mechanism::CheckTensor(op, name, t, shape, c.dtype, data);
    mechanism::CheckContiguousRows(op, name, t);
  }
  if (c.K < 1) Fail(op, "q", "has shape " + in.q.ShapeString(), "K >= 1");
  if (c.V < 1) Fail(op, "v", "has shape " + in.v.ShapeString(), "V >= 1");
  if (c.H < 1 ? c.HV != 0 : c.HV % c.H != 0 || c.HV == 0) {
    Fail(op, "v", "has " + std::to_string(c.HV) + " heads", "a multiple of the " + std::to_string(c.H) + " heads of q");
  }
  c.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(c.K)));
  const double limit = c.wide == DType::kF64 ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  if (!(std::abs(c.scale) <= limit)) {
    Fail(op, "scale", "is " + mechanism::Text(c.scale), "a finite number");
  }

  const bool packed = options.cu_seqlens.present();
  int64_t longest = packed ? 0 : c.T;
  c.ranges = mechanism::RangesOf(op, "q", in.q, options, 1, data);
  for (const mechanism::TokenRange& range : c.ranges) {
    const int64_t count = range.end - range.begin;
    if (packed) longest = std::max(longest, count);
    if (count == 0) continue;
    const int64_t column = packed ? 0 : range.begin;
    c.parts.push_back({range.batch, range.begin, count, column});
    c.columns = std::max(c.columns, column + count);
  }
  for (const auto& [name, t] : {std::pair{"e", in.e}, {"f", in.f}}) {
    if (!t.present()) Fail(op, name, "is absent", "a tensor");
    CheckDType(op, name, t, c.dtype, c.wide);
    const bool first = name[0] == 'e';
    if (t.rank() != 2 || t.size(0) < 1 || (!first && t.size(0) != in.e.size(0)) || t.size(1) < longest) {
      Fail(op, name, "has shape " + t.ShapeString(),
           std::string("[") + (first ? "R >= 1" : std::to_string(in.e.size(0))) + ", at least " +
               std::to_string(longest) + " columns]");
    }
    if (data || t.data() != nullptr) mechanism::CheckReadable(op, name, t);
  }
  c.R = in.e.size(0);
  if (c.H == 0) c.parts.clear();
  return c;
}

mechanism::Apart Reads(const Inputs& in, const Options& options) {
  mechanism::Apart apart;
  const auto inputs = Of::Of(in).tensors;
  for (size_t i = 0; i < inputs.size(); ++i) apart.Reads(NameOf(i), inputs[i]);
  apart.Reads("lengths", options.lengths);
  apart.Reads("starts", options.starts);
  apart.Reads("cu_seqlens", options.cu_seqlens);
  return apart;
}

// Checks an output tensor; later outputs may not overlap it.
void CheckWrite(const char* op, const char* name, const TensorView& t, const ConstTensorView& like,
                mechanism::Apart& apart) {
  mechanism::CheckTensor(op, name, t, like.sizes(), like.dtype(), true);
  if (like.rank() == 4) mechanism::CheckContiguousRows(op, name, t);
  apart.Writes(op, name, t);
}

// Groups of sequences that are computed together: several that fit into a round, or one of several rounds. The length
// of a round affects the bits of gradients, so it depends only on the sizes of one sequence.
struct Plan {
  int64_t round;                // tokens of a sequence per round
  std::vector<size_t> begins;   // first part of each group, and the end
  int64_t parts = 0, rows = 0;  // largest numbers over all groups: parts, and tokens of a round

  explicit Plan(const Call& c) {
    const int64_t row = c.element() * c.H * (c.K + c.value_size());
    round = row == 0 ? kMinRound : kBudgetBytes / row / kMinRound * kMinRound;
    round = std::clamp(round, kMinRound, kMaxRound);
    const int64_t most_parts = row == 0 ? 1 : std::max<int64_t>(kBudgetBytes / (row * c.R), 1);
    int64_t in_group = 0, tokens = 0;
    for (size_t i = 0; i < c.parts.size(); ++i) {
      const int64_t count = std::min(c.parts[i].count, round);
      if (i == 0 || in_group == most_parts || tokens + count > round) {
        begins.push_back(i);
        in_group = tokens = 0;
      }
      parts = std::max(parts, ++in_group);
      rows = std::max(rows, tokens += count);
    }
    begins.push_back(c.parts.size());
  }
  size_t groups() const { return begins.size() - 1; }
  std::span<const Part> Group(const Call& c, size_t i) const {
    return std::span(c.parts).subspan(begins[i], begins[i + 1] - begins[i]);
  }
  int64_t Rounds(std::span<const Part> group) const {
    return (group[0].count + round - 1) / round;  // 1 if a group has several parts
  }
};

// Temporary memory. One head of the engine is a key head with the values of all value heads that share it side by side,
// since they share one softmax.
struct Memory {
  Wide keys, values;                  // K~ and V~
  Wide q, o;                          // for one round
  Wide d_keys, d_values, dq, d_o;     // their gradients; those of K~ and V~ are sums over all rounds
  Wide round_d_keys, round_d_values;  // for one part and round
  void* lse = nullptr;                // [H][rows]
  void *de = nullptr, *df = nullptr;  // [R][stride]
  int64_t stride = 0;

  Memory(const Call& c, const Plan& plan, bool backward) : memory_(nullptr, &os::FreeAligned) {
    bytes_ = LayOut(c, plan, backward, nullptr);
  }
  int64_t bytes() const { return bytes_; }
  void Allocate(const Call& c, const Plan& plan, bool backward) {
    memory_.reset(os::AllocateAligned(std::max<int64_t>(bytes_, 1)));
    LayOut(c, plan, backward, memory_.get());
  }

 private:
  int64_t LayOut(const Call& c, const Plan& plan, bool backward, void* base) {
    Carver carver(base);
    const auto next = [&](void*& to, int64_t elements) {
      char* at = nullptr;
      carver.Next(at, elements * c.element());
      to = at;
    };
    // Layout [part][head][row][size]; a round has one part with the rows of all parts.
    const auto wide = [&](Wide& w, int64_t parts, int64_t rows, int64_t group, int64_t size) {
      const int64_t row = group * size;
      w = {nullptr, c.H * rows * row, rows * row, row, group, size};
      next(w.data, parts * w.part_stride);
    };
    const int64_t group = c.group();
    wide(keys, plan.parts, c.R, 1, c.K);
    wide(values, plan.parts, c.R, group, c.V);
    wide(q, 1, plan.rows, 1, c.K);
    wide(o, 1, plan.rows, group, c.V);
    if (!backward) return carver.bytes();
    wide(dq, 1, plan.rows, 1, c.K);
    wide(d_o, 1, plan.rows, group, c.V);
    wide(d_keys, plan.parts, c.R, 1, c.K);
    wide(d_values, plan.parts, c.R, group, c.V);
    wide(round_d_keys, 1, c.R, 1, c.K);
    wide(round_d_values, 1, c.R, group, c.V);
    next(lse, c.H * plan.rows);
    stride = (c.columns + 63) / 64 * 64;
    next(de, c.R * stride);
    next(df, c.R * stride);
    return carver.bytes();
  }

  std::unique_ptr<void, decltype(&os::FreeAligned)> memory_;
  int64_t bytes_ = 0;
};

softmax::Rows KeysOf(const Wide& w) { return {w.data, w.part_stride, w.row_stride, w.head_stride}; }
softmax::Rows QueriesOf(const Wide& w) { return {w.data, 0, w.row_stride, w.head_stride}; }

// The tokens [begin, begin + plan.round) of a group's sequences.
struct Round {
  std::vector<Part> parts;
  softmax::Problem problem;
};

Round RoundOf(const Call& c, const Plan& plan, const Memory& memory, std::span<const Part> group, int64_t begin,
              bool backward) {
  Round r;
  softmax::Problem& p = r.problem;
  p.dtype = c.wide;
  p.query_heads = p.key_heads = c.H;
  p.depth = c.K;
  p.value_depth = c.value_size();
  p.scale = c.scale;
  int64_t row = 0;
  for (size_t i = 0; i < group.size(); ++i) {
    const int64_t count = std::min(group[i].count - begin, plan.round);
    r.parts.push_back({group[i].batch, group[i].first + begin, count, group[i].column + begin});
    softmax::Sequence s;
    s.batch = static_cast<int64_t>(i);
    s.first_q = row;
    s.num_queries = s.query_end = count;
    s.num_keys = s.key_end = c.R;
    p.sequences.push_back(s);
    row += count;
  }
  p.q = QueriesOf(memory.q);
  p.k = KeysOf(memory.keys);
  p.v = KeysOf(memory.values);
  p.o = QueriesOf(memory.o);
  if (backward) p.lse = {memory.lse, 0, 1, plan.rows};
  return r;
}

// Calls f for the first round of each group, which has the largest problems.
template <class F>
void ForLongestRounds(const Call& c, const Plan& plan, const Memory& memory, bool backward, const F& f) {
  for (size_t i = 0; i < plan.groups(); ++i) {
    f(RoundOf(c, plan, memory, plan.Group(c, i), 0, backward).problem);
  }
}

// A problem without tokens, which determines the kernel.
softmax::Problem NoTokens(const Call& c) {
  softmax::Problem p;
  p.dtype = c.wide;
  p.query_heads = p.key_heads = std::max<int64_t>(c.H, 1);
  p.depth = c.K;
  p.value_depth = c.value_size();
  return p;
}

int64_t ForwardBytes(const char* op, const Context& ctx, const Call& c) {
  const Plan plan(c);
  const Memory memory(c, plan, false);
  const softmax::Kernel& kernel = softmax::Choose(op, ctx, NoTokens(c));
  int64_t scratch = ProductBytes(c.wide, std::max(c.K, c.V));
  ForLongestRounds(c, plan, memory, false,
                   [&](const softmax::Problem& p) { scratch = std::max(scratch, kernel.workspace(ctx, p)); });
  return memory.bytes() + scratch * ctx.num_threads();
}

template <class T>
void AddTo(Context& ctx, const Wide& from, const Wide& to) {
  constexpr int64_t kBlock = 1 << 14;
  const int64_t size = from.part_stride;
  ctx.ParallelFor((size + kBlock - 1) / kBlock, [&](int64_t task, int) {
    const T* a = static_cast<const T*>(from.data);
    T* b = static_cast<T*>(to.data);
    const int64_t end = std::min((task + 1) * kBlock, size);
    for (int64_t i = task * kBlock; i < end; ++i) b[i] += a[i];
  });
}

// Rounds sums by row and column to the result; columns without a token get 0.
void StoreSums(const Call& c, const void* sums, int64_t stride, const TensorView& t) {
  for (int64_t r = 0; r < t.size(0); ++r) {
    for (int64_t i = 0; i < t.size(1); ++i) {
      const double x = i < c.columns ? LoadAsDouble(c.wide, sums, r * stride + i) : 0;
      StoreDouble(t.dtype(), t.data(), r * t.stride(0) + i * t.stride(1), x);
    }
  }
}

}  // namespace

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "linformer::Forward";
  const os::ScopedFloatControl float_control;  // for the scalars of the problem
  const Call c = CheckedCall(kOp, in, options, true);
  mechanism::Apart apart = Reads(in, options);
  CheckWrite(kOp, "o", out.o, in.v, apart);
  const softmax::Kernel& kernel = softmax::Choose(kOp, ctx, NoTokens(c));
  const Plan plan(c);
  Memory memory(c, plan, false);
  memory.Allocate(c, plan, false);
  const Tokens q = TokensOf(in.q), k = TokensOf(in.k), v = TokensOf(in.v), o = TokensOf(out.o);
  for (size_t i = 0; i < plan.groups(); ++i) {
    const auto group = plan.Group(c, i);
    Project(ctx, c.wide, group, MatrixOf(in.e), k, memory.keys);
    Project(ctx, c.wide, group, MatrixOf(in.f), v, memory.values);
    for (int64_t r = 0; r < plan.Rounds(group); ++r) {
      const Round round = RoundOf(c, plan, memory, group, r * plan.round, false);
      LoadTokens(ctx, c.wide, round.parts, q, memory.q);
      kernel.forward(ctx, round.problem);
      StoreTokens(ctx, c.wide, round.parts, memory.o, o);
    }
  }
  mechanism::ClearOthers(c.ranges, out.o);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  constexpr char kOp[] = "linformer::Backward";
  const os::ScopedFloatControl float_control;
  const Call c = CheckedCall(kOp, in, options, true);
  mechanism::CheckTensor(kOp, "d_o", in.d_o, {c.B, c.T, c.HV, c.V}, c.dtype, true);
  mechanism::CheckContiguousRows(kOp, "d_o", in.d_o);
  mechanism::Apart apart = Reads(in, options);
  apart.Reads("d_o", in.d_o);
  const auto inputs = Of::Of(in).tensors;
  const auto gradients = Of::Of(out).gradients;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].present()) continue;
    CheckWrite(kOp, (std::string("d") + NameOf(i)).c_str(), gradients[i], inputs[i], apart);
  }

  const softmax::Kernel& kernel = softmax::Choose(kOp, ctx, NoTokens(c), softmax::Pass::kBackward);
  const Plan plan(c);
  Memory memory(c, plan, true);
  memory.Allocate(c, plan, true);
  const bool keys = out.k.present() || out.e.present();
  const bool values = out.v.present() || out.f.present();
  const auto sums_bytes = static_cast<size_t>(c.element() * c.R * memory.stride);
  std::memset(memory.de, 0, sums_bytes);
  std::memset(memory.df, 0, sums_bytes);
  const Tokens q = TokensOf(in.q), k = TokensOf(in.k), v = TokensOf(in.v), d_o = TokensOf(in.d_o);
  const Matrix e = MatrixOf(in.e), f = MatrixOf(in.f);
  const auto add = c.wide == DType::kF64 ? &AddTo<double> : &AddTo<float>;

  softmax::Gradients g;
  g.d_o = QueriesOf(memory.d_o);
  if (out.q.present()) g.dq = QueriesOf(memory.dq);
  for (size_t i = 0; i < plan.groups(); ++i) {
    const auto group = plan.Group(c, i);
    Project(ctx, c.wide, group, e, k, memory.keys);
    Project(ctx, c.wide, group, f, v, memory.values);
    for (int64_t r = 0; r < plan.Rounds(group); ++r) {
      const Round round = RoundOf(c, plan, memory, group, r * plan.round, true);
      LoadTokens(ctx, c.wide, round.parts, q, memory.q);
      LoadTokens(ctx, c.wide, round.parts, d_o, memory.d_o);
      if (keys) g.dk = KeysOf(r == 0 ? memory.d_keys : memory.round_d_keys);
      if (values) g.dv = KeysOf(r == 0 ? memory.d_values : memory.round_d_values);
      kernel.forward(ctx, round.problem);
      kernel.backward(ctx, round.problem, g);
      if (out.q.present()) {
        StoreTokens(ctx, c.wide, round.parts, memory.dq, TokensOf(out.q));
      }
      if (keys && r > 0) add(ctx, memory.round_d_keys, memory.d_keys);
      if (values && r > 0) add(ctx, memory.round_d_values, memory.d_values);
    }
    if (out.k.present()) {
      ProjectBack(ctx, c.wide, group, e, memory.d_keys, TokensOf(out.k));
    }
    if (out.v.present()) {
      ProjectBack(ctx, c.wide, group, f, memory.d_values, TokensOf(out.v));
    }
    if (out.e.present()) {
      AddOuterSums(ctx, c.wide, group, memory.d_keys, k, c.R, memory.stride, memory.de);
    }
    if (out.f.present()) {
      AddOuterSums(ctx, c.wide, group, memory.d_values, v, c.R, memory.stride, memory.df);
    }
  }
  for (const TensorView* t : {&out.q, &out.k, &out.v}) mechanism::ClearOthers(c.ranges, *t);
  if (out.e.present()) StoreSums(c, memory.de, memory.stride, out.e);
  if (out.f.present()) StoreSums(c, memory.df, memory.stride, out.f);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "linformer::Workspace";
  return ForwardBytes(kOp, ctx, CheckedCall(kOp, in, options, false));
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "linformer::BackwardWorkspace";
  const Call c = CheckedCall(kOp, in, options, false);
  const Plan plan(c);
  const Memory memory(c, plan, true);
  const softmax::Kernel& kernel = softmax::Choose(kOp, ctx, NoTokens(c), softmax::Pass::kBackward);
  // A non-null address marks a gradient as requested.
  static char described;
  softmax::Gradients g;
  g.dq.data = g.dk.data = g.dv.data = &described;
  int64_t scratch = ProductBytes(c.wide, std::max(c.K, c.V)), shared = 0;
  ForLongestRounds(c, plan, memory, true, [&](const softmax::Problem& p) {
    const softmax::BackwardBytes bytes = kernel.backward_workspace(ctx, p, g);
    scratch = std::max({scratch, bytes.per_thread, kernel.workspace(ctx, p)});
    shared = std::max(shared, bytes.shared);
  });
  return memory.bytes() + scratch * ctx.num_threads() + shared;
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "linformer::Explain";
  const Call c = CheckedCall(kOp, in, options, false);
  const softmax::Kernel& kernel = softmax::Choose(kOp, ctx, NoTokens(c));
  const auto tokens = static_cast<double>(c.tokens());
  const auto product = [](int64_t a, int64_t b) { return static_cast<double>(a) * static_cast<double>(b); };
  Explanation x;
  x.kernel = std::string("linformer on ") + kernel.name;
  x.target = kernel.target(ctx);
  x.why = std::string("k and v projected to R tokens by products in registers, then ") + kernel.why;
  x.flops = 4 * tokens * static_cast<double>(c.R) * (product(c.H, c.K) + product(c.HV, c.V));
  x.bytes = mechanism::Bytes(in.v);  // bytes of o
  for (const ConstTensorView& t : Of::Of(in).tensors) x.bytes += mechanism::Bytes(t);
  x.workspace_bytes = ForwardBytes(kOp, ctx, c);
  x.visited_pairs = tokens * product(c.R, c.H);
  return x;
}

}  // namespace heed::linformer
