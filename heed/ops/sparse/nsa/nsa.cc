// Native sparse attention as three calls of attention; the first one selects the blocks of the second.
#include "heed/ops/sparse/nsa/nsa.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/os.h"
#include "heed/patterns/pattern_internal.h"
#include "heed/ops/sparse/nsa/nsa_internal.h"

namespace heed::nsa {
namespace {

using attention::Use;
using mechanism::Fail;

void CheckCount(const char* op, const char* name, int64_t value, int64_t least) {
  if (value < least) Fail(op, name, "is " + std::to_string(value), std::to_string(least) + " or more");
}

// Checks compressed keys or values that are given instead of means.
void CheckCompressed(const char* op, const char* name, const ConstTensorView& t, const Shape& s, int64_t windows,
                     int64_t channels, DType dtype, bool data) {
  if (!t.present()) Fail(op, name, "is absent", "k_cmp and v_cmp, or none of them");
  const std::string expected = std::string("[") + std::to_string(s.B) + ",N," + std::to_string(s.Hkv) + "," +
                               std::to_string(channels) + "] with N = " + std::to_string(windows) + " or more windows";
  const bool fits = t.rank() == 4 && t.size(0) == s.B && t.size(2) == s.Hkv && t.size(3) == channels;
  if (!fits || t.size(1) < windows) Fail(op, name, "has shape " + t.ShapeString(), expected);
  mechanism::CheckTensor(op, name, t, t.sizes(), dtype, data);
  mechanism::CheckContiguousRows(op, name, t);
}

// Memory of results that were not requested, and of compressed keys that were not given.
struct Room {
  TensorView branches, lse, blocks, k_cmp, v_cmp;
  Memory memory;

  Room(const Call& c, const Inputs& in, const Outputs& out) : branches(out.branches), lse(out.lse), blocks(out.blocks) {
    const Shape& s = c.shape;
    const DType dtype = in.q.dtype();
    if (!branches.present()) {
      memory.Want(&branches, dtype, {kBranches, s.B, s.Tq, s.Hq, s.Dv});
      memory.Want(&lse, mechanism::StateDType(dtype), {kBranches, s.B, s.Hq, s.Tq});
      memory.Want(&blocks, DType::kI32, {s.B, s.Tq, s.Hkv, s.columns});
    }
    if (c.means) {
      memory.Want(&k_cmp, dtype, {s.B, s.windows, s.Hkv, s.D});
      memory.Want(&v_cmp, dtype, {s.B, s.windows, s.Hkv, s.Dv});
    }
  }
};

void CheckOutputs(const char* op, const Call& c, const Inputs& in, const Outputs& out) {
  const Shape& s = c.shape;
  const bool all = out.branches.present() || out.lse.present() || out.blocks.present();
  BackwardInputs reads;
  static_cast<Inputs&>(reads) = in;
  mechanism::Apart apart = Reads(reads);
  apart.Writes(op, "o", out.o);
  if (!all) return;
  const DType dtype = in.q.dtype();
  apart.Writes(op, "branches", out.branches, {kBranches, s.B, s.Tq, s.Hq, s.Dv}, dtype);
  mechanism::CheckContiguousRows(op, "branches", out.branches);
  apart.Writes(op, "lse", out.lse, {kBranches, s.B, s.Hq, s.Tq}, mechanism::StateDType(dtype));
  apart.Writes(op, "blocks", out.blocks, {s.B, s.Tq, s.Hkv, s.columns}, DType::kI32);
}

}  // namespace

int64_t Columns(const Options& options, int64_t Tk) {
  const int64_t block = std::max<int64_t>(options.block, 1), blocks = Tk / block + (Tk % block == 0 ? 0 : 1);
  return std::min(std::max<int64_t>(options.count, 3), blocks);
}

mechanism::Apart Reads(const BackwardInputs& in) {
  mechanism::Apart apart;
  for (const auto& [name, view] : {std::pair{"q", in.q},
                                   {"k", in.k},
                                   {"v", in.v},
                                   {"gates", in.gates},
                                   {"k_cmp", in.k_cmp},
                                   {"v_cmp", in.v_cmp},
                                   {"branches", in.branches},
                                   {"lse", in.lse},
                                   {"blocks", in.blocks},
                                   {"d_o", in.d_o}}) {
    apart.Reads(name, view);
  }
  return apart;
}

void CheckOptions(const char* op, const Options& options) {
  CheckCount(op, "block", options.block, 1);
  CheckCount(op, "stride", options.stride, 0);
  CheckCount(op, "count", options.count, 1);
  CheckCount(op, "window", options.window, 1);
  CheckCount(op, "length", options.length, 0);
}

Call CheckedCall(const char* op, const Inputs& in, const Options& options, const TensorView& o, Use use) {
  CheckOptions(op, options);
  attention::Options causal;
  causal.scale = options.scale;
  causal.causal = true;
  attention::CheckedProblem(op, {in.q, in.k, in.v}, causal, {o, {}}, use);

  Call c;
  Shape& s = c.shape;
  s.B = in.q.size(0);
  s.Tq = in.q.size(1);
  s.Tk = in.k.size(1);
  s.Hq = in.q.size(2);
  s.Hkv = in.k.size(2);
  s.D = in.q.size(3);
  s.Dv = in.v.size(3);
  if (s.Tq > s.Tk) {
    Fail(op, "q", "has " + std::to_string(s.Tq) + " tokens",
         "at most the " + std::to_string(s.Tk) + " of k, whose last ones they are");
  }
  s.stride = options.stride == 0 ? options.block : options.stride;
  s.length = options.length == 0 ? options.block : options.length;
  s.block = std::min(options.block, std::max<int64_t>(s.Tk, 1));  // all keys are in the first block either way
  s.columns = Columns(options, s.Tk);
  s.windows = patterns::NumCompleteWindows(s.Tk - 1, s.length, s.stride);
  s.starts.assign(static_cast<size_t>(s.B), s.Tk - s.Tq);
  s.rows.assign(static_cast<size_t>(s.B), s.Tq);
  const bool data = use != Use::kExplain;
  const DType dtype = in.q.dtype();
  mechanism::CheckTensor(op, "gates", in.gates, {s.B, s.Tq, s.Hq, kBranches}, dtype, data);
  mechanism::CheckContiguousRows(op, "gates", in.gates);
  c.means = !in.k_cmp.present() && !in.v_cmp.present();
  if (!c.means) {
    CheckCompressed(op, "k_cmp", in.k_cmp, s, s.windows, s.D, dtype, data);
    const int64_t windows = std::max(s.windows, in.k_cmp.size(1));
    CheckCompressed(op, "v_cmp", in.v_cmp, s, windows, s.Dv, dtype, data);
    if (in.v_cmp.size(1) != windows) {
      Fail(op, "v_cmp", "has " + std::to_string(in.v_cmp.size(1)) + " windows", std::to_string(windows) + " as k_cmp");
    }
  }

  causal.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(s.D)));
  c.options[kSelected] = c.options[kWindowed] = causal;
  c.options[kWindowed].window = {std::min(options.window - 1, s.Tk), 0};
  attention::Options& compressed = c.options[kCompressed];
  compressed.scale = causal.scale;
  compressed.query_starts = ConstTensorView(s.starts.data(), DType::kI64, {s.B});
  compressed.pattern = patterns::CompleteWindows(s.length, s.stride);
  return c;
}

attention::Inputs BranchInputs(const Inputs& in, const ConstTensorView& k_cmp, const ConstTensorView& v_cmp,
                               int64_t branch) {
  if (branch == kCompressed) return {in.q, k_cmp, v_cmp};
  return {in.q, in.k, in.v};
}

Pattern Selected(const Shape& s, const ConstTensorView& blocks) {
  patterns::Table index;
  index.shape = {s.B, s.Tq, s.Hkv, s.columns};
  const int64_t rows = s.B * s.Tq * s.Hkv;
  index.values.reserve(static_cast<size_t>(rows * s.columns));
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t h = row % s.Hkv, i = row / s.Hkv % s.Tq, b = row / s.Hkv / s.Tq;
    const int32_t* at = blocks.as<int32_t>() + b * blocks.stride(0) + i * blocks.stride(1) + h * blocks.stride(2);
    for (int64_t n = 0; n < s.columns; ++n) index.values.push_back(at[n * blocks.stride(3)]);
  }
  return patterns::Build("row_blocks", {std::move(index), s.block});
}

Pattern FirstBlocks(const Shape& s) {
  std::vector<int32_t> blocks(static_cast<size_t>(s.B * s.Tq * s.Hkv * s.columns));
  int32_t* row = blocks.data();
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t i = 0; i < s.Tq; ++i) {
      for (int64_t h = 0; h < s.Hkv; ++h, row += s.columns) {
        const int64_t wanted = FixedBlocks(s, s.starts[static_cast<size_t>(b)] + i, row);
        for (int64_t n = 0; n < wanted; ++n) row[3 + n] = static_cast<int32_t>(1 + n);
      }
    }
  }
  return Selected(s, ConstTensorView(blocks.data(), DType::kI32, {s.B, s.Tq, s.Hkv, s.columns}));
}

TensorView Of(const TensorView& all, int64_t branch) {
  const ConstTensorView of = Of(ConstTensorView(all), branch);
  return {const_cast<void*>(of.data()), of.dtype(), of.sizes(), of.strides()};
}

ConstTensorView Of(const ConstTensorView& all, int64_t branch) {
  const ConstTensorView of = all.Slice(0, branch, branch + 1);
  return {of.data(), of.dtype(), of.sizes().subspan(1), of.strides().subspan(1)};
}

void Memory::Want(TensorView* view, DType dtype, std::vector<int64_t> sizes) {
  *view = TensorView(nullptr, dtype, sizes);
  wanted_.push_back({view, bytes_});
  bytes_ += (view->num_elements() * static_cast<int64_t>(SizeOf(dtype)) + 127) / 128 * 128;
}

void Memory::Allocate() {
  memory_.reset(os::AllocateAligned(std::max<int64_t>(bytes_, 1)));
  for (const auto& [view, at] : wanted_) {
    *view = TensorView(static_cast<char*>(memory_.get()) + at, view->dtype(), view->sizes(), view->strides());
  }
}

void Forward(Context& ctx, const Inputs& in, const Options& options, const Outputs& out) {
  constexpr char kOp[] = "nsa::Forward";
  Call c = CheckedCall(kOp, in, options, out.o, Use::kForward);
  CheckOutputs(kOp, c, in, out);
  const Shape& s = c.shape;
  Room room(c, in, out);
  room.memory.Allocate();
  if (c.means) {
    Means(ctx, s, in.k, room.k_cmp);
    Means(ctx, s, in.v, room.v_cmp);
  }
  const ConstTensorView k_cmp = c.means ? room.k_cmp : in.k_cmp, v_cmp = c.means ? room.v_cmp : in.v_cmp;
  for (const int64_t branch : {kCompressed, kSelected, kWindowed}) {
    if (branch == kSelected) {
      ChooseBlocks(ctx, s, *c.options[kCompressed].scale, in.q, k_cmp, Of(room.lse, kCompressed), room.blocks);
      c.options[kSelected].pattern = Selected(s, room.blocks);
    }
    attention::Forward(ctx, BranchInputs(in, k_cmp, v_cmp, branch), c.options[branch],
                       {Of(room.branches, branch), Of(room.lse, branch)});
  }
  AddGated(ctx, room.branches, in.gates, out.o);
}

namespace {

// A call with known shapes only, which selects the first blocks.
struct Described {
  Call call;
  TensorView k_cmp, v_cmp;  // without memory
  int64_t own_bytes;

  Described(const char* op, const Inputs& in, const Options& options)
      : call(CheckedCall(op, in, options, {}, Use::kExplain)) {
    Room room(call, in, {});
    k_cmp = room.k_cmp;
    v_cmp = room.v_cmp;
    own_bytes = room.memory.bytes();
    call.options[kSelected].pattern = FirstBlocks(call.shape);
  }
  attention::Inputs InputsOf(const Inputs& in, int64_t branch) const {
    return call.means ? BranchInputs(in, k_cmp, v_cmp, branch) : BranchInputs(in, in.k_cmp, in.v_cmp, branch);
  }
};

int64_t BytesOf(const Context& ctx, const Inputs& in, const Described& d) {
  int64_t scratch = ChoiceBytes(d.call.shape, in.q.dtype()) * ctx.num_threads();
  for (int64_t branch = 0; branch < kBranches; ++branch) {
    scratch = std::max(scratch, attention::Workspace(ctx, d.InputsOf(in, branch), d.call.options[branch]));
  }
  return scratch + d.own_bytes;
}

}  // namespace

int64_t Workspace(const Context& ctx, const Inputs& in, const Options& options) {
  return BytesOf(ctx, in, Described("nsa::Workspace", in, options));
}

Explanation Explain(const Context& ctx, const Inputs& in, const Options& options) {
  const Described d("nsa::Explain", in, options);
  Explanation x;
  x.flops = x.visited_pairs = x.bytes = 0;
  x.invariant = true;
  for (int64_t branch = 0; branch < kBranches; ++branch) {
    const Explanation of = attention::Explain(ctx, d.InputsOf(in, branch), d.call.options[branch]);
    const bool importances = branch == kCompressed;
    const double D = static_cast<double>(d.call.shape.D), Dv = static_cast<double>(d.call.shape.Dv);
    x.flops += of.flops * (importances ? 1 + D / (D + Dv) : 1);
    x.visited_pairs += of.visited_pairs * (importances ? 2 : 1);
    x.invariant = x.invariant && of.invariant;
    if (branch != kSelected) continue;
    x.kernel = "nsa on " + of.kernel;
    x.target = of.target;
    x.why = "compressed keys, the blocks that they choose and the last keys are three calls of attention: " + of.why;
  }
  const DType dtype = in.q.dtype();
  for (const ConstTensorView& t : {in.q, in.k, in.v, in.gates, in.k_cmp, in.v_cmp}) x.bytes += mechanism::Bytes(t);
  x.bytes += static_cast<double>(d.call.shape.B * d.call.shape.Tq * d.call.shape.Hq * d.call.shape.Dv) *
             static_cast<double>(SizeOf(dtype));
  x.workspace_bytes = BytesOf(ctx, in, d);
  return x;
}

}  // namespace heed::nsa
