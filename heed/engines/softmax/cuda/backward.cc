// The backward pass of attention as launches.
#include "heed/engines/softmax/cuda/backward.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/cuda/calls.h"
#include "heed/engines/softmax/cuda/arguments.h"
#include "heed/engines/softmax/cuda/forward_shapes.h"

namespace heed::softmax::cuda {
namespace {

void RefuseGradients(const Problem& p, const Gradients& g) {
  const auto refuse = [](const std::string& why) { throw Unsupported(std::string(kName) + " " + why); };
  const int64_t channels = std::max(p.depth, p.value_depth);
  if (p.dtype == DType::kF32 && channels > kMostWideChannels) {
    refuse("has gradients of f32 of up to " + std::to_string(kMostWideChannels) + " channels, not " +
           std::to_string(channels));
  }
  if (g.dsinks != nullptr || g.dalibi != nullptr) refuse("has gradients of sinks and slopes that are on the device");
  const int64_t needed =
      WithBackwardShape(p.dtype, p.depth, p.value_depth, [](auto shape) { return int64_t{shape.kSharedBytes}; });
  if (const std::string reason = heed::cuda::Declines(p.device, needed); !reason.empty())
    refuse(reason + ", for gradients");
}

// A backward pass. Its device memory is allocated before anything is written.
class BackwardPass {
 public:
  BackwardPass(const heed::cuda::Call& call, BlockLaunches Launches::* blocks, const Problem& p, const Gradients& g)
      : call_(call), kernels_(*call.library().softmax), blocks_(kernels_.*blocks), p_(p), g_(g),
        arguments_(call, p, p.sequences), uploads_(call), num_rows_(CountRows(p)),
        terms_(call, BytesOf<RowTerms>(num_rows_ * p.query_heads)) {
    const auto with_terms = [&](const HeadNumbers& gradient, std::optional<heed::cuda::DeviceMemory>& memory) {
      if (gradient.data != nullptr) memory.emplace(call, BytesOf<float>(num_rows_ * p.query_heads));
    };
    with_terms(g.device_dsinks, sink_terms_);
    with_terms(g.device_dalibi, slope_terms_);
  }

  void Run() {
    Prepare();
    ForLaunches(p_.sequences, [&](std::span<const Sequence> sequences, int64_t queries, int64_t keys) {
      const BackwardParams params = ParamsOf(sequences);
      const auto run = [&](const auto& kernel, int64_t blocks, int64_t heads) {
        Run(kernel, blocks, heads, std::ssize(sequences), params);
      };
      run(kernels_.terms, Blocks(queries, kTermsRows), p_.query_heads);
      if (g_.dk.data != nullptr || g_.dv.data != nullptr)
        run(blocks_.key_gradients, Blocks(keys, kBackwardTile), p_.key_heads);
      if (g_.dq.data != nullptr || slope_terms_.has_value()) {
        run(blocks_.query_gradients, Blocks(queries, kBackwardTile), p_.query_heads);
      }
    });
    if (bias_sequences_ != nullptr) AddUpBias();
    AddUp(sink_terms_, sink_offsets_, g_.device_dsinks, 1);
    AddUp(slope_terms_, slope_offsets_, g_.device_dalibi, num_slopes());
  }

 private:
  template <class Params>
  void Run(const char* (*kernel)(const heed::cuda::Launch&, const Params&), int64_t blocks, int64_t heads,
           int64_t count, const Params& params) const {
    if (blocks * heads * count > 0) call_.Check(kernel(call_.Of(blocks, heads, static_cast<size_t>(count)), params));
  }
  template <class T>
  static size_t BytesOf(int64_t count) {
    return std::max<size_t>(1, static_cast<size_t>(count) * sizeof(T));
  }
  static int64_t CountRows(const Problem& p) {
    int64_t rows = 0;
    for (const Sequence& s : p.sequences) rows += s.num_queries;
    return rows;
  }
  // Slopes of a head: one, or one per batch entry.
  int64_t num_slopes() const { return g_.device_dalibi.batch_stride == 0 ? 1 : NumBatches(); }
  int64_t NumBatches() const {
    int64_t count = 0;
    for (const Sequence& s : p_.sequences) count = std::max(count, s.batch + 1);
    return count;
  }

  // Uploads what kernels read besides launch parameters.
  void Prepare() {
    std::vector<int64_t> offsets = {0};
    std::vector<GradientSequence> all;
    for (const Sequence& s : p_.sequences) {
      const DeviceGradients gradients = GradientsOf(s, offsets.back());
      first_rows_.push_back(gradients.first_row);
      all.push_back({arguments_.OnDevice(s), gradients, s.batch});
      offsets.push_back(offsets.back() + s.num_queries);
    }
    if (g_.dbias.data != nullptr) bias_sequences_ = uploads_.Put(all);
    if (sink_terms_.has_value()) sink_offsets_ = uploads_.Put(std::vector<int64_t>{0, num_rows_});
    if (slope_terms_.has_value()) {
      slope_offsets_ = uploads_.Put(num_slopes() == 1 ? std::vector<int64_t>{0, num_rows_} : offsets);
    }
  }

  DeviceGradients GradientsOf(const Sequence& s, int64_t first_row) const {
    const auto offset = [&](const Rows& of, int64_t first) {
      return s.batch * of.batch_stride + first * of.token_stride;
    };
    return {offset(g_.d_o, s.first_q), offset(g_.d_lse, s.first_q), offset(g_.dq, s.first_q),
            offset(g_.dk, s.first_k),  offset(g_.dv, s.first_k),    first_row};
  }

  BackwardParams ParamsOf(std::span<const Sequence> sequences) const {
    const auto writable = [](const Rows& of) { return const_cast<void*>(of.data); };
    const auto floats = [](const std::optional<heed::cuda::DeviceMemory>& memory) {
      return memory.has_value() ? static_cast<float*>(memory->data()) : nullptr;
    };
    BackwardParams params = {.forward = arguments_.Of(sequences),
                             .d_o = g_.d_o.data,
                             .d_lse = static_cast<const float*>(g_.d_lse.data),
                             .dq = writable(g_.dq),
                             .dk = writable(g_.dk),
                             .dv = writable(g_.dv),
                             .d_o_strides = StridesOf(g_.d_o),
                             .d_lse_strides = StridesOf(g_.d_lse),
                             .dq_strides = StridesOf(g_.dq),
                             .dk_strides = StridesOf(g_.dk),
                             .dv_strides = StridesOf(g_.dv),
                             .terms = static_cast<RowTerms*>(terms_.data()),
                             .num_rows = num_rows_,
                             .sink_terms = floats(sink_terms_),
                             .slope_terms = floats(slope_terms_)};
    params.forward.aligned = params.forward.aligned && IsAligned(g_.d_o, p_.dtype);
    for (size_t i = 0; i < sequences.size(); ++i) {
      const Sequence& s = sequences[i];
      params.gradients[i] = GradientsOf(s, first_rows_[static_cast<size_t>(&s - p_.sequences.data())]);
    }
    return params;
  }

  void AddUpBias() const {
    const Pairs& dbias = g_.dbias;
    BiasGradientParams params = {
        .backward = ParamsOf({}),
        .dbias = const_cast<void*>(dbias.data),
        .dtype = dbias.dtype,
        .sizes = {},
        .strides = {dbias.batch_stride, dbias.head_stride, dbias.query_stride, dbias.key_stride},
        .sequences = bias_sequences_,
        .num_sequences = std::ssize(p_.sequences),
        .num_heads = static_cast<int32_t>(p_.query_heads)};
    std::ranges::copy(g_.dbias_sizes, params.sizes);
    const auto [batches, heads, queries, keys] = g_.dbias_sizes;
    Run(kernels_.bias_gradients, TilesOf(queries) * TilesOf(keys), heads, batches, params);
  }

  // Adds up terms of rows into `count` sums per head.
  void AddUp(const std::optional<heed::cuda::DeviceMemory>& terms, const int64_t* offsets, const HeadNumbers& sums,
             int64_t count) const {
    if (!terms.has_value()) return;
    const HeadSumsParams params = {.terms = static_cast<const float*>(terms->data()),
                                   .num_rows = num_rows_,
                                   .offsets = offsets,
                                   .sums = const_cast<void*>(sums.data),
                                   .dtype = sums.dtype,
                                   .stride = sums.batch_stride,
                                   .head_stride = sums.head_stride};
    Run(kernels_.head_sums, p_.query_heads, count, 1, params);
  }

  const heed::cuda::Call& call_;
  const Launches& kernels_;
  const BlockLaunches& blocks_;
  const Problem& p_;
  const Gradients& g_;
  const Arguments arguments_;
  heed::cuda::Uploads uploads_;
  const int64_t num_rows_;  // rows of a head over all sequences
  const heed::cuda::DeviceMemory terms_;
  std::optional<heed::cuda::DeviceMemory> sink_terms_, slope_terms_;
  std::vector<int64_t> first_rows_;  // by sequence
  const GradientSequence* bias_sequences_ = nullptr;
  const int64_t *sink_offsets_ = nullptr, *slope_offsets_ = nullptr;
};

}  // namespace

void Backward(const char* name, BlockLaunches Launches::* blocks, Context& ctx, const Problem& p, const Gradients& g) {
  RefuseGradients(p, g);
  const heed::cuda::Call call(name, ctx, p.device);
  BackwardPass(call, blocks, p, g).Run();
}

}  // namespace heed::softmax::cuda
