// The public functions of each mechanism, as calls of the functions over lists of views.
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

#include "heed/distributed/sequence.h"
#include "heed/distributed/sequence_internal.h"
#include "heed/ops/delta/comba/comba_internal.h"
#include "heed/ops/delta/delta_product/delta_product_internal.h"
#include "heed/ops/delta/delta_rule/delta_rule_internal.h"
#include "heed/ops/delta/gated_delta_rule/gated_delta_rule_internal.h"
#include "heed/ops/delta/gdn2/gdn2_internal.h"
#include "heed/ops/delta/kda/kda_internal.h"
#include "heed/ops/delta/precond_delta_rule/precond_delta_rule_internal.h"
#include "heed/ops/delta/precond_kda/precond_kda_internal.h"
#include "heed/ops/delta/rwkv7/rwkv7_internal.h"
#include "heed/ops/gated/gla/gla_internal.h"
#include "heed/ops/gated/hgrn/hgrn_internal.h"
#include "heed/ops/gated/hgrn2/hgrn2_internal.h"
#include "heed/ops/gated/lightning/lightning_internal.h"
#include "heed/ops/gated/mlstm/mlstm_internal.h"
#include "heed/ops/gated/retention/retention_internal.h"
#include "heed/ops/gated/rg_lru/rg_lru_internal.h"
#include "heed/ops/gated/rwkv4/rwkv4_internal.h"
#include "heed/ops/gated/rwkv5/rwkv5_internal.h"
#include "heed/ops/gated/rwkv6/rwkv6_internal.h"
#include "heed/ops/gated/simple_gla/simple_gla_internal.h"
#include "heed/ops/linear/based/based_internal.h"
#include "heed/ops/linear/linear_attention/linear_attention_internal.h"
#include "heed/ops/linear/performer/performer_internal.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d_internal.h"
#include "heed/ops/ssm/h3/h3_internal.h"
#include "heed/ops/ssm/mamba3/mamba3_internal.h"
#include "heed/ops/ssm/s4d/s4d_internal.h"
#include "heed/ops/ssm/selective_scan/selective_scan_internal.h"
#include "heed/ops/ssm/ssd/ssd_internal.h"

namespace heed::distributed {
namespace {

using mechanism::Arguments;
using mechanism::Results;
using mechanism::Segment;
using mechanism::StateViews;

template <class T>
std::string Text(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<int64_t>(value));
  } else {
    std::ostringstream text;
    text.precision(17);
    text << value;
    return std::move(text).str();
  }
}

// The options of a mechanism that are not tensors. An option that is missing here is not compared between ranks.
template <class Options>
std::string OptionsText(const Options& options) {
  std::string text;
  if constexpr (requires { options.scale; }) {
    if (options.scale) text += ", scale=" + Text(*options.scale);
  }
#define HEED_OPTION(name)                                         \
  if constexpr (requires { options.name; }) {                     \
    text += std::string(", ") + #name + "=" + Text(options.name); \
  }
  HEED_OPTION(reverse)
  HEED_OPTION(causal)
  HEED_OPTION(normalize)
  HEED_OPTION(eps)
  HEED_OPTION(feature_map)
  HEED_OPTION(kernel)
  HEED_OPTION(method)
  HEED_OPTION(discretization)
  HEED_OPTION(delta_softplus)
  HEED_OPTION(dt_softplus)
  HEED_OPTION(dt_min)
  HEED_OPTION(dt_max)
  HEED_OPTION(activation)
  HEED_OPTION(c)
  HEED_OPTION(bound)
#undef HEED_OPTION
  return text;
}

template <class Structs>
typename Structs::State StateOf(StateViews views) {
  return mechanism::Lists<Structs>::OutputsOf({{}, views}).final;
}

template <class Options>
Options WithNumbers(Options options, const SequenceNumbers& numbers) {
  options.lengths = numbers.lengths;
  options.starts = numbers.starts;
  options.cu_seqlens = numbers.cu_seqlens;
  return options;
}

template <class Structs, class Options>
Operation Bound(const char* name, const mechanism::Table& table, const Options& options,
                const mechanism::Functions<Structs, Options>& f) {
  using Of = mechanism::Lists<Structs>;
  Operation operation;
  operation.name = name;
  operation.table = table;
  operation.numbers = {options.lengths, options.starts, options.cu_seqlens};
  if constexpr (requires { options.reverse; }) operation.reverse = options.reverse;
  if constexpr (requires { options.causal; }) operation.causal = options.causal;
  if constexpr (requires { options.normalize; }) operation.normalize = options.normalize;
  operation.taylor = operation.name == "based";
  operation.zeros_differ = operation.name == "rg_lru";
  operation.options = OptionsText(options);
  operation.forward = [=](Context& ctx, const Arguments& in, const SequenceNumbers& numbers, const Results& out) {
    f.Forward(ctx, in, WithNumbers(options, numbers), out);
  };
  operation.backward = [=](Context& ctx, const Arguments& in, const SequenceNumbers& numbers, const Results& out) {
    f.Backward(ctx, in, WithNumbers(options, numbers), out);
  };
  operation.summarize = [=](Context& ctx, const Arguments& in, const SequenceNumbers& numbers, const Segment& out) {
    f.summarize(ctx, Of::InputsOf(in), WithNumbers(options, numbers), Of::SummaryOf(out));
  };
  operation.apply = [=](const Segment& segment, StateViews before, StateViews after) {
    f.apply(Of::SummaryOf(segment), StateOf<Structs>(before), StateOf<Structs>(after));
  };
  operation.apply_backward = [=](const Segment& segment, StateViews before, StateViews d_after, StateViews d_before) {
    f.apply_backward(Of::SummaryOf(segment), StateOf<Structs>(before), StateOf<Structs>(d_after),
                     StateOf<Structs>(d_before));
  };
  return operation;
}

}  // namespace
}  // namespace heed::distributed

// Functions of a mechanism are named in its own namespace, where HEED_FUNCTIONS finds them.
#define HEED_DISTRIBUTED_OPERATION(op)                                                                           \
  namespace heed::op {                                                                                           \
  namespace {                                                                                                    \
  distributed::Operation DistributedOperation(const Options& options) {                                          \
    const mechanism::Functions<Structs, Options> functions = HEED_FUNCTIONS;                                     \
    return distributed::Bound<Structs, Options>(#op, mechanism::TableOf(kTensors, kStates), options, functions); \
  }                                                                                                              \
  }                                                                                                              \
  }
HEED_DISTRIBUTED_MECHANISMS(HEED_DISTRIBUTED_OPERATION)
#undef HEED_DISTRIBUTED_OPERATION

namespace heed::distributed {

#define HEED_DISTRIBUTED_PASSES(op)                                                                         \
  void Forward(Context& ctx, const Group& group, const op::Inputs& in, const op::Options& options,          \
               const op::Outputs& out, const SequenceOptions& sequence) {                                   \
    using Of = mechanism::Lists<op::Structs>;                                                               \
    Forward(ctx, group, op::DistributedOperation(options), Of::Of(in), Of::Of(out), sequence);              \
  }                                                                                                         \
  void Backward(Context& ctx, const Group& group, const op::BackwardInputs& in, const op::Options& options, \
                const op::Gradients& out, const SequenceOptions& sequence) {                                \
    using Of = mechanism::Lists<op::Structs>;                                                               \
    Backward(ctx, group, op::DistributedOperation(options), Of::Of(in), Of::Of(out), sequence);             \
  }
HEED_DISTRIBUTED_MECHANISMS(HEED_DISTRIBUTED_PASSES)
#undef HEED_DISTRIBUTED_PASSES

}  // namespace heed::distributed
