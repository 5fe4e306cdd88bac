// Attention of new tokens over a cache in the harness: problems of attention whose keys and values are in pages.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/ops/exact/attention/attend/attend.h"
#include "heed/ops/exact/attention/cases/attention_case.h"
#include "heed/state/kv_cache.h"

namespace heed::attention {

Case MakeStepCase(const Problem& problem) {
  const ConstTensorView &q = problem.in.q, &k = problem.in.k, &v = problem.in.v;
  const Options& options = problem.options;
  if (options.key_lengths.present() || options.dropout != 0) {
    throw InvalidArgument("attention: a step has neither lengths of its own nor dropout");
  }
  const int64_t B = q.size(0), Tk = k.size(1), added = std::min(q.size(1), Tk);
  const auto cache = std::make_shared<KVCache>(
      KVCache::Options{.batch = B, .heads = k.size(2), .dim = k.size(3), .value_dim = v.size(3), .dtype = q.dtype()});
  cache->Append(k.Slice(1, 0, Tk - added), v.Slice(1, 0, Tk - added));
  cache->Append(k.Slice(1, Tk - added, Tk), v.Slice(1, Tk - added, Tk));

  Case c = MakeCase(problem);
  c.pass = "step";
  c.title += " step";
  c.run = [cache, q, options, memory = problem.memory](Context& ctx, std::span<const TensorView> outputs) {
    Attend(ctx, cache->view(), q, options, {outputs[0], outputs.size() > 1 ? outputs[1] : TensorView()});
  };
  return c;
}

}  // namespace heed::attention
