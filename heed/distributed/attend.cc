// Attention to the caches of all ranks: each attends to its own, and all merge the results.
#include "heed/distributed/attend.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/core/error.h"
#include "heed/distributed/group_internal.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/exact/attention/attention_options_internal.h"

namespace heed::distributed {
namespace {

constexpr char kOp[] = "attention::Attend";

void CheckCall(const KVView& cache, const ConstTensorView& q, const attention::Options& options) {
  using attention::Options;
  for (const auto& [is_refused, why] :
       {std::pair(cache.window > 0, "a ring keeps the last keys alone"),
        {cache.rotary != nullptr, "rotary encoding counts from a cache's own first key"},
        {cache.log_decay_heads > 0, "log decays of later keys are in other caches"}}) {
    if (is_refused) throw Unsupported(std::string(kOp) + ": group is given, expected none: " + why);
  }
  for (const attention::OptionRow& row : attention::kOptionRows) {
    bool taken = false;
    for (const attention::OptionField& field :
         {attention::OptionField(&Options::scale), attention::OptionField(&Options::causal),
          attention::OptionField(&Options::softcap), attention::OptionField(&Options::sinks),
          attention::OptionField(&Options::precision), attention::OptionField(&Options::invariant)}) {
      taken |= row.field == field;
    }
    if (taken || !IsGiven(row, options)) continue;
    throw Unsupported(std::string(kOp) + ": " + row.name +
                      " is given with a group, whose caches take scale, causal, softcap, sinks, precision, invariant");
  }
  CheckOnCpu(kOp, "q", q);
  if (q.rank() != 4) Refuse(kOp, "q", "has shape " + q.ShapeString(), "[B, T, H, D]");
}

std::string Describe(const ConstTensorView& q, const attention::Options& options) {
  std::ostringstream text;
  text.precision(17);
  text << kOp << "(" << Described("q", q, {}) << ", causal=" << options.causal << ", softcap=" << options.softcap
       << ", precision=" << static_cast<int>(options.precision) << ", invariant=" << options.invariant;
  if (options.scale) text << ", scale=" << *options.scale;
  if (options.sinks.present()) text << ", " << Described("sinks", options.sinks, {});
  text << ") heed " << HEED_VERSION;
  return std::move(text).str();
}

}  // namespace

void Attend(Context& ctx, const Group& group, const KVView& cache, const ConstTensorView& q,
            const attention::Options& options, const attention::Outputs& out) {
  const bool is_last = group.rank() + 1 == group.size();
  Owned o, lse;
  bool attended = false;
  const auto attend = [&] {
    attended = true;
    CheckCall(cache, q, options);
    CheckApart(kOp, std::vector<ConstTensorView>{q, options.sinks}, std::vector<TensorView>{out.o, out.lse});
    const Shape o_shape = {q.size(0), q.size(1), q.size(2), cache.value_dim};
    const Shape lse_shape = {q.size(0), q.size(2), q.size(1)};
    for (const auto& [name, t, shape] :
         {std::tuple<const char*, ConstTensorView, Shape>("o", out.o, o_shape), {"lse", out.lse, lse_shape}}) {
      const bool absent = !t.present() && name[0] == 'l';
      if (absent || (t.present() && std::ranges::equal(t.sizes(), shape))) continue;
      Refuse(kOp, name, "has shape " + t.ShapeString(), ShapeString(shape));
    }
    o = Owned(q.dtype(), o_shape);
    lse = Owned(q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, lse_shape);
    attention::Options own = options;
    own.sinks = {};  // the sum over all keys has them
    KVView view = cache;
    const std::vector<int64_t> rows(static_cast<size_t>(cache.batch), q.size(1));
    if (!is_last) {  // all keys here lie before the rows
      own.causal = false;
      view.appended = rows;
    }
    attention::Attend(ctx, view, q, own, {o.view(), lse.view()});
  };
  Agree(group, kOp, {}, [&] {
    attend();
    return Describe(q, options);
  });
  if (!attended) attend();
  // Rows beyond those that the last rank appended see no key, as in one cache.
  std::vector<int64_t> appended(static_cast<size_t>(cache.batch));
  if (is_last) appended.assign(cache.appended.begin(), cache.appended.end());
  Broadcast(group, std::as_writable_bytes(std::span(appended)), group.size() - 1);
  const Bytes all_o = AllGather(group, o.bytes());
  Bytes all_lse = AllGather(group, lse.bytes());
  std::vector<attention::Part> parts;
  for (size_t r = 0; r < static_cast<size_t>(group.size()); ++r) {
    const TensorView part_lse(all_lse.data() + r * lse.bytes().size(), lse.view().dtype(), lse.view().sizes());
    for (int64_t b = 0; b < q.size(0); ++b) {
      for (int64_t h = 0; h < q.size(2); ++h) {
        for (int64_t i = appended[static_cast<size_t>(b)]; i < q.size(1); ++i) {
          StoreDouble(part_lse.dtype(), part_lse.data(), (b * q.size(2) + h) * q.size(1) + i,
                      -std::numeric_limits<double>::infinity());
        }
      }
    }
    parts.push_back({ConstTensorView(all_o.data() + r * o.bytes().size(), q.dtype(), o.view().sizes()), part_lse});
  }
  attention::Merge(ctx, parts, options.sinks, out);
}

}  // namespace heed::distributed
