// The backward pass of nsa: that of each of its branches, with the gradients of shared tensors summed.
#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/ops/sparse/nsa/nsa_internal.h"

namespace heed::nsa {
namespace {

using attention::Use;
using mechanism::Fail;

// Checks the arguments of Backward. kExplain and kReference read no results, and the gradients of kReference may be
// f64.
Call CheckedBackward(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out, Use use) {
  const Use reads = use == Use::kExplain ? use : Use::kInputs;
  Call c = CheckedCall(op, in, options, {}, reads);
  const Shape& s = c.shape;
  const DType dtype = in.q.dtype();
  const bool data = use != Use::kExplain;
  if (use == Use::kForward) {
    mechanism::CheckTensor(op, "branches", in.branches, {kBranches, s.B, s.Tq, s.Hq, s.Dv}, dtype, true);
    mechanism::CheckContiguousRows(op, "branches", in.branches);
    mechanism::CheckTensor(op, "lse", in.lse, {kBranches, s.B, s.Hq, s.Tq}, mechanism::StateDType(dtype), true);
    mechanism::CheckTensor(op, "blocks", in.blocks, {s.B, s.Tq, s.Hkv, s.columns}, DType::kI32, true);
  }
  if (data) {
    mechanism::CheckTensor(op, "d_o", in.d_o, {s.B, s.Tq, s.Hq, s.Dv}, dtype, true);
    mechanism::CheckContiguousRows(op, "d_o", in.d_o);
  }
  mechanism::Apart apart = Reads(in);
  for (const auto& [name, view, of, input] : {std::tuple{"dq", out.dq, "q", in.q},
                                              {"dk", out.dk, "k", in.k},
                                              {"dv", out.dv, "v", in.v},
                                              {"dgates", out.dgates, "gates", in.gates},
                                              {"dk_cmp", out.dk_cmp, "k_cmp", in.k_cmp},
                                              {"dv_cmp", out.dv_cmp, "v_cmp", in.v_cmp}}) {
    if (!view.present()) continue;
    if (!input.present()) Fail(op, name, "is asked for", std::string(of) + " with it");
    const bool wide = use == Use::kReference && view.dtype() == DType::kF64;
    mechanism::CheckTensor(op, name, view, input.sizes(), wide ? DType::kF64 : dtype, data);
    mechanism::CheckContiguousRows(op, name, view);
    if (data) apart.Writes(op, name, view);
  }
  return c;
}

// Gradients of all branches except the last, which writes to the results, and the output gradient of one branch.
// Tensors that are not needed are absent.
struct Room {
  TensorView k_cmp, v_cmp, gated;
  TensorView dq[2], dk, dv;  // dq of the compressed and selected branches; dk and dv of the selected one
  TensorView dk_cmp, dv_cmp;
  Memory memory;

  Room(const Call& c, const BackwardInputs& in, const Gradients& out) : dk_cmp(out.dk_cmp), dv_cmp(out.dv_cmp) {
    const Shape& s = c.shape;
    const DType dtype = in.q.dtype();
    const auto want = [&](TensorView* view, int64_t tokens, int64_t heads, int64_t channels) {
      memory.Want(view, dtype, {s.B, tokens, heads, channels});
    };
    if (c.means) {
      want(&k_cmp, s.windows, s.Hkv, s.D);
      want(&v_cmp, s.windows, s.Hkv, s.Dv);
    }
    if (out.dq.present()) {
      for (TensorView& view : dq) want(&view, s.Tq, s.Hq, s.D);
    }
    if (out.dk.present()) want(&dk, s.Tk, s.Hkv, s.D);
    if (out.dv.present()) want(&dv, s.Tk, s.Hkv, s.Dv);
    if (c.means && out.dk.present()) want(&dk_cmp, s.windows, s.Hkv, s.D);
    if (c.means && out.dv.present()) want(&dv_cmp, s.windows, s.Hkv, s.Dv);
    for (int64_t branch = 0; branch < kBranches; ++branch) {
      if (IsWanted(GradientsOf(out, branch)) && !gated.present()) want(&gated, s.Tq, s.Hq, s.Dv);
    }
  }

  // The tensors that a branch writes its gradients to.
  attention::Gradients GradientsOf(const Gradients& out, int64_t branch) const {
    attention::Gradients g;
    g.dq = branch == kWindowed ? out.dq : dq[branch];
    g.dk = branch == kWindowed ? out.dk : branch == kSelected ? dk : dk_cmp;
    g.dv = branch == kWindowed ? out.dv : branch == kSelected ? dv : dv_cmp;
    return g;
  }
  static bool IsWanted(const attention::Gradients& g) { return g.dq.present() || g.dk.present() || g.dv.present(); }
};

}  // namespace

void CheckBackwardReference(const char* op, const BackwardInputs& in, const Options& options, const Gradients& out) {
  CheckedBackward(op, in, options, out, Use::kReference);
}

void Backward(Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  constexpr char kOp[] = "nsa::Backward";
  Call c = CheckedBackward(kOp, in, options, out, Use::kForward);
  const Shape& s = c.shape;
  Room room(c, in, out);
  c.options[kSelected].pattern = Selected(s, in.blocks);  // may throw
  room.memory.Allocate();
  if (c.means && room.gated.present()) {
    Means(ctx, s, in.k, room.k_cmp);
    Means(ctx, s, in.v, room.v_cmp);
  }
  const ConstTensorView k_cmp = c.means ? room.k_cmp : in.k_cmp, v_cmp = c.means ? room.v_cmp : in.v_cmp;
  for (int64_t branch = 0; branch < kBranches; ++branch) {
    const attention::Gradients g = room.GradientsOf(out, branch);
    const bool is_wanted = Room::IsWanted(g);
    if (!is_wanted && !out.dgates.present()) continue;
    const ConstTensorView o = Of(in.branches, branch);
    GateGradients(ctx, branch, in.d_o, in.gates, o, out.dgates, is_wanted ? room.gated : TensorView());
    if (!is_wanted) continue;
    const attention::Inputs of = BranchInputs(in, k_cmp, v_cmp, branch);
    attention::Backward(ctx, {of.q, of.k, of.v, o, Of(in.lse, branch), room.gated, {}}, c.options[branch], g);
  }
  if (out.dq.present()) AddTo(ctx, s, out.dq, std::vector<ConstTensorView>{room.dq[0], room.dq[1]}, {});
  if (out.dk.present())
    AddTo(ctx, s, out.dk, std::vector<ConstTensorView>{room.dk}, c.means ? room.dk_cmp : TensorView());
  if (out.dv.present())
    AddTo(ctx, s, out.dv, std::vector<ConstTensorView>{room.dv}, c.means ? room.dv_cmp : TensorView());
}

int64_t BackwardWorkspace(const Context& ctx, const BackwardInputs& in, const Options& options, const Gradients& out) {
  constexpr char kOp[] = "nsa::BackwardWorkspace";
  Call c = CheckedBackward(kOp, in, options, out, Use::kExplain);
  const Room room(c, in, out);
  c.options[kSelected].pattern = FirstBlocks(c.shape);
  const ConstTensorView k_cmp = c.means ? room.k_cmp : in.k_cmp, v_cmp = c.means ? room.v_cmp : in.v_cmp;
  int64_t scratch = 0;
  for (int64_t branch = 0; branch < kBranches; ++branch) {
    const attention::Gradients g = room.GradientsOf(out, branch);
    if (!Room::IsWanted(g)) continue;
    const attention::Inputs of = BranchInputs(in, k_cmp, v_cmp, branch);
    scratch =
        std::max(scratch, attention::BackwardWorkspace(ctx, {of.q, of.k, of.v, {}, {}, {}, {}}, c.options[branch], g));
  }
  return scratch + room.memory.bytes();
}

}  // namespace heed::nsa
