// The causal convolution: checks, sequences, and what is beside the kernels.
#include "heed/ops/ssm/causal_conv1d/causal_conv1d.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/dispatch.h"
#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/ops/mechanism/check_internal.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d_internal.h"

namespace heed::causal_conv1d {
namespace {

using mechanism::Fail;
using Shape = std::vector<int64_t>;

DType StateDType(DType dtype) {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

// Of a tensor that is there; with `data` false, pointers may be null.
void CheckTensor(const char* op, const char* name, const ConstTensorView& t,
                 const Shape& shape, DType dtype, bool data) {
  if (!t.present()) Fail(op, name, "is absent", "a tensor");
  if (t.dtype() != dtype) {
    Fail(op, name, std::string("has dtype ") + Name(t.dtype()), Name(dtype));
  }
  if (!std::ranges::equal(t.sizes(), shape)) {
    Fail(op, name, "has shape " + t.ShapeString(), ShapeString(shape));
  }
  if (data || t.data() != nullptr) mechanism::CheckReadable(op, name, t);
}

// Everything about a call that has been checked.
struct Call {
  Problem p;
  Shape x, weight, bias, state;
  std::vector<recurrent::TokenRange> ranges;
  bool reverse = false;
};

Grid Tokens(const Call& call, const ConstTensorView& t) {
  if (!t.present()) return {};
  return {t.data(), t.dtype(), t.stride(0), t.stride(1),
          call.reverse ? -t.stride(2) : t.stride(2)};
}

Grid State(const ConstTensorView& t) {
  if (!t.present()) return {};
  return {t.data(), t.dtype(), t.stride(0), t.stride(1), t.stride(2)};
}

Grid Parameter(const ConstTensorView& t) {  // over channels, and taps
  if (!t.present()) return {};
  return {t.data(), t.dtype(), 0, t.stride(0), t.rank() == 2 ? t.stride(1) : 0};
}

// What is contiguous, or most of it where both are.
bool ChannelsInLanes(const ConstTensorView& x) {
  const int64_t D = x.size(1), T = x.size(2);
  if (x.stride(1) != 1 || D == 1) return false;
  return T > 1 ? std::abs(x.stride(2)) != 1 || T < D : true;
}

// Neither axis is: elements are gathered one by one.
bool Gathers(const ConstTensorView& x) {
  return !ChannelsInLanes(x) && x.size(2) > 1 && std::abs(x.stride(2)) != 1;
}

void RefuseToGather(const char* op, const Context& ctx, const ConstTensorView& x) {
  if (!ctx.strict() || !Gathers(x)) return;
  throw Unsupported(std::string(op) +
                    ": x: neither tokens nor channels are contiguous, so that they would be gathered "
                    "one by one, which a strict Context forbids");
}

void CheckParameter(const char* op, const char* name, const ConstTensorView& t,
                    const Shape& shape, DType dtype, bool data) {
  const bool wide = t.present() && t.dtype() == StateDType(dtype);
  CheckTensor(op, name, t, shape, wide ? t.dtype() : dtype, data);
}

Call Checked(const char* op, const Inputs& in, const Options& options, bool data) {
  Call call;
  Problem& p = call.p;
  if (!in.x.present()) Fail(op, "x", "is absent", "a tensor");
  if (in.x.rank() != 3) {
    Fail(op, "x", "has shape " + in.x.ShapeString(), "rank 3: [B, D, T]");
  }
  if (!IsFloat(in.x.dtype())) {
    Fail(op, "x", std::string("has dtype ") + Name(in.x.dtype()), "f64, f32, bf16 or f16");
  }
  call.x.assign(in.x.sizes().begin(), in.x.sizes().end());
  p.dtype = in.x.dtype();
  CheckTensor(op, "x", in.x, call.x, p.dtype, data);
  p.D = in.x.size(1);
  const ConstTensorView& w = in.weight;
  if (!w.present()) Fail(op, "weight", "is absent", "a tensor");
  if (w.rank() != 2 || w.size(1) < 1) {
    Fail(op, "weight", "has shape " + w.ShapeString(), "[D, W] with W >= 1");
  }
  p.W = w.size(1);
  call.weight = {p.D, p.W};
  call.bias = {p.D};
  CheckParameter(op, "weight", w, call.weight, p.dtype, data);
  if (in.bias.present()) CheckParameter(op, "bias", in.bias, call.bias, p.dtype, data);
  call.ranges = RangesOf(op, in.x, options, data);
  call.state = {static_cast<int64_t>(call.ranges.size()), p.D, p.W - 1};
  if (in.initial.present()) {
    CheckTensor(op, "initial_state", in.initial, call.state, StateDType(p.dtype), data);
  }
  p.silu = options.activation == Activation::kSilu;
  call.reverse = options.reverse;
  for (const recurrent::TokenRange& range : call.ranges) {
    const auto index = static_cast<int64_t>(p.sequences.size());
    const int64_t count = range.end - range.begin;
    // Backwards in time, strides are negative and tokens count from the end.
    p.sequences.push_back(
        {range.batch, index, options.reverse ? 1 - range.end : range.begin, count});
    int64_t begin = 0;
    do {
      p.runs.push_back({index, begin, std::min(begin + kRunTokens, count)});
      begin += kRunTokens;
    } while (begin < count);
  }
  p.channels_in_lanes = ChannelsInLanes(in.x);
  p.x = Tokens(call, in.x);
  p.weight = Parameter(in.weight);
  p.bias = Parameter(in.bias);
  p.initial = State(in.initial);
  return call;
}

struct Named {
  const char* name;
  ConstTensorView view;
};

std::vector<Named> Reads(const Inputs& in, const Options& options) {
  return {{"x", in.x},
          {"weight", in.weight},
          {"bias", in.bias},
          {"initial_state", in.initial},
          {"lengths", options.lengths},
          {"starts", options.starts},
          {"cu_seqlens", options.cu_seqlens}};
}

// An output: memory apart from what is read and from other outputs, among which it then is.
void CheckOutput(const char* op, const char* name, const TensorView& t, const Shape& shape,
                 DType dtype, std::vector<Named>& others) {
  CheckTensor(op, name, t, shape, dtype, true);
  for (const Named& other : others) {
    if (other.view.present()) mechanism::CheckWritable(op, name, t, other.name, other.view);
  }
  others.push_back({name, t});
}

// Zeros for tokens [begin, end).
void Clear(const TensorView& t, int64_t batch, int64_t begin, int64_t end) {
  const auto size = static_cast<int64_t>(SizeOf(t.dtype()));
  const bool channels_inside = std::abs(t.stride(1)) <= std::abs(t.stride(2));
  const int inner = channels_inside ? 1 : 2, outer = 3 - inner;
  const auto sizes = [&](int axis) { return axis == 1 ? t.size(1) : end - begin; };
  char* first = t.as<char>() + (batch * t.stride(0) + begin * t.stride(2)) * size;
  for (int64_t i = 0; i < sizes(outer); ++i) {
    char* row = first + i * t.stride(outer) * size;
    if (t.stride(inner) == 1) {
      std::memset(row, 0, static_cast<size_t>(sizes(inner) * size));
      continue;
    }
    for (int64_t k = 0; k < sizes(inner); ++k) {
      std::memset(row + k * t.stride(inner) * size, 0, static_cast<size_t>(size));
    }
  }
}

// Zeros for tokens that no sequence has.
void ClearOthers(const Call& call, const TensorView& t) {
  if (!t.present() || t.num_elements() == 0) return;
  for (int64_t b = 0; b < t.size(0); ++b) {
    int64_t after = 0;  // of the ranges so far: ascending
    for (const recurrent::TokenRange& range : call.ranges) {
      if (range.batch != b) continue;
      if (after < range.begin) Clear(t, b, after, range.begin);
      after = range.end;
    }
    if (after < t.size(2)) Clear(t, b, after, t.size(2));
  }
}

double Bytes(const ConstTensorView& t) {
  return t.present() ? static_cast<double>(t.num_elements()) *
                           static_cast<double>(SizeOf(t.dtype()))
                     : 0;
}

// [B, D] as [B, D, 1].
ConstTensorView OneToken(const char* op, const char* name, const ConstTensorView& t) {
  if (!t.present()) Fail(op, name, "is absent", "a tensor");
  if (t.rank() != 2) {
    Fail(op, name, "has shape " + t.ShapeString(), "one token of each sequence: [B, D]");
  }
  return {t.data(), t.dtype(), {t.size(0), t.size(1), 1}, {t.stride(0), t.stride(1), 0},
          t.device()};
}

}  // namespace

std::vector<recurrent::TokenRange> RangesOf(const char* op, const ConstTensorView& x,
                                            const Options& options, bool data) {
  const int64_t B = x.size(0), T = x.size(2);
  if (options.cu_seqlens.present() && B != 1) {
    Fail(op, "x", "has shape " + x.ShapeString(), "a leading axis of 1 with cu_seqlens");
  }
  recurrent::Options of;
  of.lengths = options.lengths;
  of.starts = options.starts;
  of.cu_seqlens = options.cu_seqlens;
  // Of a tensor it looks at the first two axes alone.
  return recurrent::Ranges(op, {nullptr, x.dtype(), {B, T, 0, 0}}, of, data);
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "causal_conv1d::Forward";
  Call call = Checked(kOp, in, options, true);
  Problem& p = call.p;
  std::vector<Named> others = Reads(in, options);
  RefuseToGather(kOp, ctx, in.x);
  CheckOutput(kOp, "o", out.o, call.x, p.dtype, others);
  if (out.final.present()) {
    CheckOutput(kOp, "final_state", out.final, call.state, StateDType(p.dtype), others);
  }
  p.o = Tokens(call, out.o);
  p.final = State(out.final);
  ForwardCpu(ctx, p);
  ClearOthers(call, out.o);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options,
              const Gradients& out) {
  constexpr char kOp[] = "causal_conv1d::Backward";
  const Call call = Checked(kOp, in, options, true);
  const Problem& p = call.p;
  RefuseToGather(kOp, ctx, in.x);
  GradientGrids g;
  CheckTensor(kOp, "d_o", in.d_o, call.x, p.dtype, true);
  g.d_o = Tokens(call, in.d_o);
  std::vector<Named> others = Reads(in, options);
  others.push_back({"d_o", in.d_o});
  if (in.d_final.present()) {
    CheckTensor(kOp, "d_state", in.d_final, call.state, StateDType(p.dtype), true);
    g.d_final = State(in.d_final);
    others.push_back({"d_state", in.d_final});
  }
  if (out.dbias.present() && !in.bias.present()) {
    Fail(kOp, "dbias", "is asked for", "none: there is no such input");
  }
  const auto check = [&](const char* name, const TensorView& t, const Shape& shape,
                         DType dtype) {
    if (t.present()) CheckOutput(kOp, name, t, shape, dtype, others);
  };
  check("dx", out.dx, call.x, p.dtype);
  check("dweight", out.dweight, call.weight, in.weight.dtype());
  check("dbias", out.dbias, call.bias, in.bias.dtype());
  check("dinitial_state", out.dinitial, call.state, StateDType(p.dtype));
  g.dx = Tokens(call, out.dx);
  g.dweight = Parameter(out.dweight);
  g.dbias = Parameter(out.dbias);
  g.dinitial = State(out.dinitial);
  BackwardCpu(ctx, p, g);
  ClearOthers(call, out.dx);
}

void Step(Context& ctx, const StepInputs& in, const Options& options,
          const TensorView& state, const TensorView& o) {
  constexpr char kOp[] = "causal_conv1d::Step";
  Inputs whole;
  whole.x = OneToken(kOp, "x", in.x);
  whole.weight = in.weight;
  whole.bias = in.bias;
  Options one;  // all that a token can be asked for
  one.activation = options.activation;
  Call call = Checked(kOp, whole, one, true);
  Problem& p = call.p;
  std::vector<Named> others = Reads(whole, one);
  CheckOutput(kOp, "state", state, call.state, StateDType(p.dtype), others);
  const ConstTensorView out = OneToken(kOp, "o", o);
  CheckOutput(kOp, "o",
              {const_cast<void*>(out.data()), out.dtype(), out.sizes(), out.strides(),
               out.device()},
              call.x, p.dtype, others);
  p.o = Tokens(call, out);
  p.final = State(state);
  StepCpu(ctx, p);
}

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return ForwardBytes(ctx, Checked("causal_conv1d::Workspace", in, options, false).p);
}

int64_t BackwardWorkspace(const Context& ctx, const Inputs& in, const Options& options) {
  constexpr char kOp[] = "causal_conv1d::BackwardWorkspace";
  return BackwardBytes(ctx, Checked(kOp, in, options, false).p);
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  const Call call = Checked("causal_conv1d::Explain", in, options, false);
  const Problem& p = call.p;
  double tokens = 0;
  for (const Sequence& s : p.sequences) tokens += static_cast<double>(s.count);
  Explanation e;
  e.kernel = std::string("causal_conv1d_") + Name(StateDType(p.dtype));
  e.target = TargetName(ctx.allowed_targets());
  e.why = p.channels_in_lanes ? "channels in lanes, because they are contiguous in x"
          : Gathers(in.x) ? "tokens in lanes, gathered: neither axis of x is contiguous"
                     : "tokens in lanes, because they are contiguous in x";
  e.flops = 2 * tokens * static_cast<double>(p.D) * static_cast<double>(p.W);
  e.bytes = 2 * Bytes(in.x) + Bytes(in.weight) + Bytes(in.bias) + Bytes(in.initial);
  e.workspace_bytes = ForwardBytes(ctx, p);
  return e;
}

}  // namespace heed::causal_conv1d
