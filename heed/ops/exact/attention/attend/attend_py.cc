// attend() of heed's caches, and its part of heed.explain.
#include "heed/ops/exact/attention/attend/attend_py.h"

#include <cstdint>
#include <shared_mutex>
#include <span>
#include <string>
#include <utility>

#include "heed/distributed/attend.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/exact/attention/attention_call_py.h"
#include "heed/ops/exact/attention/attention_options_py.h"
#include "heed/state/ring_kv_cache.h"
#include "python/numpy_array.h"
#include "python/torch_host.h"

namespace heed::attention {
namespace {

namespace nb = nanobind;
using namespace python;  // NOLINT: the binding's own vocabulary

std::string Shape(const CacheOwner& cache) {
  return "[" + std::to_string(cache.batch) + ",T,H," + std::to_string(cache.dim) + "]";
}

// Reads all arguments of a call on `cache` and checks those that determine the shapes of the results.
void ReadArguments(const char* op, const CacheOwner& cache, bool for_torch, PyObject* args, PyObject* kwargs,
                   Call& call) {
  call.options.causal = true;
  if (const auto* ring = dynamic_cast<const Owner<RingKVCache>*>(&cache)) {
    const RingKVCache::Options kept = ring->cache.options();
    call.options.window = {kept.window - 1, 0};
    call.options.sink_tokens = kept.sink_tokens;
  }
  const bool is_latent = cache.base().kind() == CacheKind::kLatent;
  ReadAttendCall(op, {.needs_scale = is_latent, .for_torch = for_torch}, args, kwargs, call);
  const ConstTensorView& q = call.in.q;
  if (!q.present()) FailMissing(op, "q");
  if (is_latent && !call.options.scale) FailMissing(op, "scale");
  if (q.rank() != 4) Fail(op, "q", "has shape " + q.ShapeString(), Shape(cache));
  if (q.dtype() != cache.dtype) {
    Fail(op, "q", std::string("has dtype ") + Name(q.dtype()), std::string(Name(cache.dtype)) + " as the cache");
  }
  const ConstTensorView& tree = call.tree;
  if (!tree.present()) return;
  if (call.communicator) Fail(op, "tree", "is given with comm", "None with it");
  if (tree.rank() != 1 || tree.size(0) != q.size(1)) {
    Fail(op, "tree", "has shape " + tree.ShapeString(),
         "[" + std::to_string(q.size(1)) + "], a parent for each row of q");
  }
  if (tree.dtype() != DType::kI64) {
    Fail(op, "tree", std::string("has dtype ") + Name(tree.dtype()), "i32 or i64");
  }
  if (tree.data() == nullptr && tree.size(0) != 0) {
    Fail(op, "tree", "has no data", "the parents themselves");
  }
}

std::span<const int64_t> Tree(const Call& call) {
  if (!call.tree.present()) return {};
  return {call.tree.as<int64_t>(), static_cast<size_t>(call.tree.size(0))};
}

void Run(const char* op, Context& ctx, const CacheOwner& cache, const Call& call, const Outputs& out) {
  Compute(op, [&] {
    const std::shared_lock lock(cache.mutex);
    const KVView view = cache.base().view();
    if (!call.communicator) return Attend(ctx, view, call.in.q, call.options, out, Tree(call));
    // A ring's own window is no option of the caller, and it is refused as a ring.
    distributed::Attend(ctx, call.communicator->group(), view, call.in.q, call.options, out);
  });
}

nb::dict ExplainAttendOn(DType, int num_threads, PyObject* kwargs) {
  constexpr char kOp[] = "explain";
  const nb::kwargs given = nb::borrow<nb::kwargs>(kwargs);
  if (!given.contains("cache")) FailMissing(kOp, "cache");
  const nb::object cache_object = given["cache"];
  const CacheOwner* cache = nullptr;
  if (!nb::try_cast(cache_object, cache) || cache == nullptr) {
    Fail({kOp, "cache", cache_object}, "a cache of keys and values");
  }
  nb::dict rest;
  for (const auto& [key, value] : given) {
    if (!key.equal(nb::str("cache"))) rest[key] = value;
  }
  const std::string op = cache->Op("attend");
  Call call;
  call.describe = true;
  call.arrays.AllowShapes(cache->dtype);
  ReadArguments(op.c_str(), *cache, false, nullptr, rest.ptr(), call);
  const Context& ctx = ThreadContext(num_threads);
  Explanation e;
  Compute(op.c_str(), [&] {
    const std::shared_lock lock(cache->mutex);
    e = ExplainAttend(ctx, cache->base().view(), call.in.q, call.options, Tree(call));
  });
  return Described(e.kernel, e.target, e.why, e.flops, e.bytes, e.workspace_bytes, e.visited_pairs, e.invariant,
                   call.arrays.copied());
}

}  // namespace

nb::object BoundOn(const CacheOwner& cache, const nb::args& args, const nb::kwargs& kwargs) {
  const std::string name = cache.Op("quantization_bound");
  const char* const op = name.c_str();
  Call call;
  ReadArguments(op, cache, false, args.ptr(), kwargs.ptr(), call);
  if (call.communicator) Fail(op, "comm", "is given", "None: the bound is that of one cache");
  const Context& ctx = ThreadContext(call.num_threads);
  Bound bound;
  Compute(op, [&] {
    const std::shared_lock lock(cache.mutex);
    bound = QuantizationBound(ctx, cache.base().view(), call.in.q, call.options);
  });
  return nb::make_tuple(bound.logit, bound.output);
}

nb::object AttendOn(const CacheOwner& cache, const nb::args& args, const nb::kwargs& kwargs) {
  const std::string name = cache.Op("attend");
  const char* const op = name.c_str();
  Call call;
  const Results results = ReadInGroup(
      [&] {
        ReadArguments(op, cache, false, args.ptr(), kwargs.ptr(), call);
        return NewResults(op, call, call.in.q, cache.value_dim);
      },
      op, kwargs.ptr());
  Run(op, ThreadContext(call.num_threads), cache, call, results.views);
  return results.Returned();
}

void AttendOnTorch(const CacheOwner& cache, const nb::args& args, const nb::kwargs& kwargs) {
  const std::string op = cache.Op("attend");
  Call call;
  ReadInGroup([&] { ReadArguments(op.c_str(), cache, true, args.ptr(), kwargs.ptr(), call); }, op.c_str(),
              kwargs.ptr());
  Run(op.c_str(), TorchContext(call.num_threads), cache, call, {call.out_view, call.out_lse});
}

const char* SpelledForCache(const std::string& signature) {
  const bool has_scale = signature.find("scale:") != signature.npos;
  const bool is_attend = signature.starts_with("def attend(");
  const auto takes = [](const OptionRow& row) {  // causal and scale have other defaults
    return row.not_on_cache == nullptr && row.field != OptionField(&Options::causal) &&
           row.field != OptionField(&Options::scale);
  };
  return Spelled(
      signature, takes,
      std::string(is_attend ? kComm : "") + kOutAndThreads + (has_scale ? "" : ", scale: float | None = None"));
}

void BindAttend(nb::module_&) { RegisterExplain("attend", &ExplainAttendOn); }

}  // namespace heed::attention
