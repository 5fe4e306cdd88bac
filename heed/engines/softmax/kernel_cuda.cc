// The kernel of GPUs in the list: what it takes, and problems as its launches.
#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "heed/core/error.h"
#include "heed/cuda/library.h"
#include "heed/engines/softmax/cuda/forward_shapes.h"
#include "heed/engines/softmax/kernels.h"

namespace heed::softmax {
namespace {

constexpr int64_t kMostHeads = 65535;  // blocks of a grid on its second axis

std::string DeclinesOption(const Problem& p) {
  const std::pair<bool, const char*> options[] = {
      {p.page_tokens > 0 || p.quantized || !p.shared.empty(), "caches"},
      {p.bias.data != nullptr && p.bias.dtype == DType::kF64, "a bias of f64"},
      {p.has_pattern, "patterns"},
      {!p.segments_q.empty(), "segments"},
      {p.forgets, "log decays"},
      {p.wide_outputs, "outputs of another dtype"}};
  for (const auto& [given, name] : options) {
    if (given) return std::string("does not take ") + name;
  }
  return "";
}

std::string DeclinesSizes(const Problem& p) {
  const int64_t channels = std::max(p.depth, p.value_depth);
  if (channels > cuda::kMostChannels) {
    return "takes up to " + std::to_string(cuda::kMostChannels) + " channels, not " + std::to_string(channels);
  }
  if (p.query_heads > kMostHeads) {
    return "takes up to " + std::to_string(kMostHeads) + " heads, not " + std::to_string(p.query_heads);
  }
  if (const size_t numbers = std::max(p.slopes.size(), p.sinks.size()); numbers > cuda::kMostNumbers) {
    return "takes up to " + std::to_string(cuda::kMostNumbers) + " slopes and sinks, not " + std::to_string(numbers);
  }
  for (const Sequence& s : p.sequences) {
    if (s.num_queries > INT32_MAX) return "takes up to 2^31 - 1 queries, not " + std::to_string(s.num_queries);
  }
  return "";
}

int64_t SharedBytes(const Problem& p) {
  return cuda::WithShape(p.depth, p.value_depth, [](auto shape) { return int64_t{shape.kSharedBytes}; });
}

std::string DeclinesDevice(const Problem& p) {
  std::string why_not;
  const heed::cuda::Library* library = heed::cuda::Find(&why_not);
  if (library == nullptr) return "is not there: " + why_not;
  heed::cuda::DeviceFacts facts;
  if (const char* reason = library->examine(p.device.index, &facts)) return std::string("cannot run: ") + reason;
  if (facts.major < 8) {
    return "needs compute capability 8.0, not " + std::to_string(facts.major) + "." + std::to_string(facts.minor);
  }
  if (SharedBytes(p) > facts.shared_bytes) {
    return "needs " + std::to_string(SharedBytes(p)) + " bytes of shared memory for these channels, not " +
           std::to_string(facts.shared_bytes);
  }
  return "";
}

std::string Declines(const Context&, const Problem& p) {
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) return std::string("computes bf16 and f16, not ") + Name(p.dtype);
  for (const auto declines : {&DeclinesOption, &DeclinesSizes, &DeclinesDevice}) {
    if (std::string reason = declines(p); !reason.empty()) return reason;
  }
  return "";
}

cuda::DeviceSequence OnDevice(const Problem& p, const Sequence& s) {
  const auto offset = [&](const Rows& rows, int64_t first) {
    return s.batch * rows.batch_stride + first * rows.token_stride;
  };
  return {.q = offset(p.q, s.first_q),
          .k = offset(p.k, s.first_k),
          .v = offset(p.v, s.first_k),
          .o = offset(p.o, s.first_q),
          .lse = offset(p.lse, s.first_q),
          .bias = s.batch * p.bias.batch_stride,
          .mask = s.batch * p.mask.batch_stride,
          .slopes = s.batch * p.slopes_stride,
          .first_head = static_cast<uint32_t>(s.batch * p.query_heads),
          .start = s.start,
          .key_begin = s.key_begin,
          .key_end = s.key_end,
          .num_keys = s.num_keys,
          .query_end = s.query_end,
          .prefix_end = s.prefix_end,
          .sink_end = s.sink_end,
          .num_queries = static_cast<int32_t>(s.num_queries)};
}

// Whether each row begins at a multiple of 16 bytes.
bool IsAligned(const Rows& rows) {
  const auto address = reinterpret_cast<uintptr_t>(rows.data);
  const auto strides = static_cast<uintptr_t>(rows.batch_stride | rows.token_stride | rows.head_stride);
  return (address / sizeof(uint16_t) | strides) % cuda::kPiece == 0;
}

cuda::ForwardParams ParamsOf(const Problem& p, std::span<const Sequence> sequences) {
  const auto strides = [](const Rows& rows) { return cuda::Strides{rows.token_stride, rows.head_stride}; };
  const auto pairs = [](const Pairs& x) {
    return cuda::DevicePairs{x.data, x.dtype, x.head_stride, x.query_stride, x.key_stride};
  };
  cuda::ForwardParams params = {
      .q = p.q.data,
      .k = p.k.data,
      .v = p.v.data,
      .o = const_cast<void*>(p.o.data),
      .lse = static_cast<float*>(const_cast<void*>(p.lse.data)),
      .q_strides = strides(p.q),
      .k_strides = strides(p.k),
      .v_strides = strides(p.v),
      .o_strides = strides(p.o),
      .lse_strides = strides(p.lse),
      .window_left = p.window_left,
      .window_right = p.window_right,
      .chunk = p.chunk,
      .causal = p.causal,
      .aligned = IsAligned(p.q) && IsAligned(p.k) && IsAligned(p.v),
      .group = static_cast<int32_t>(p.group()),
      .depth = static_cast<int32_t>(p.depth),
      .value_depth = static_cast<int32_t>(p.value_depth),
      .scale = static_cast<float>(p.scale),
      .softcap = static_cast<float>(p.softcap),
      .bias = pairs(p.bias),
      .mask = pairs(p.mask),
      .has_slopes = !p.slopes.empty(),
      .has_sinks = !p.sinks.empty(),
      .dropout = static_cast<float>(p.dropout),
      .keep_below = p.keep_below,
      .key_low = p.key_low,
      .key_high = p.key_high,
      .dropout_offset = p.dropout_offset};
  const auto narrow = [](double x) { return static_cast<float>(x); };
  std::ranges::transform(p.slopes, params.slopes, narrow);
  std::ranges::transform(p.sinks, params.sinks, narrow);
  std::ranges::transform(sequences, params.sequences, [&](const Sequence& s) { return OnDevice(p, s); });
  return params;
}

int64_t Lanes(const Problem& p) {
  return cuda::WithShape(p.depth, p.value_depth, [](auto shape) { return int64_t{shape.kRows}; });
}

void Forward(Context& ctx, const Problem& p) {
  if (p.query_heads == 0) return;
  std::string unused;
  const heed::cuda::Library& library = *heed::cuda::Find(&unused);
  if (const char* wrong = library.check_stream(p.device.index, ctx.stream())) {
    throw InvalidArgument(std::string("softmax_cuda: the Context's stream ") + wrong + ", expected one of cuda:" +
                          std::to_string(p.device.index));
  }
  const int64_t lanes = Lanes(p);
  for (size_t first = 0; first < p.sequences.size(); first += cuda::kMostSequences) {
    const size_t count = std::min<size_t>(cuda::kMostSequences, p.sequences.size() - first);
    const std::span sequences = std::span(p.sequences).subspan(first, count);
    int64_t most = 0;
    for (const Sequence& s : sequences) most = std::max(most, s.num_queries);
    if (most == 0) continue;
    cuda::ForwardParams params = ParamsOf(p, sequences);
    params.fused = p.group() > 1 && most < lanes;
    const int64_t rows = params.fused ? most * p.group() : most;
    const heed::cuda::Launch launch = {
        .device = p.device.index,
        .stream = ctx.stream(),
        .blocks = {static_cast<int32_t>((rows + lanes - 1) / lanes),
                   static_cast<int32_t>(params.fused ? p.key_heads : p.query_heads), static_cast<int32_t>(count)}};
    if (const char* error = library.softmax->forward(launch, p.dtype, params)) {
      throw InternalError(std::string("softmax_cuda: ") + error);
    }
  }
}

}  // namespace

const Kernel kCuda = {{
    .name = "softmax_cuda",
    .why = "blocks of rows on a GPU, online softmax over tiles of 64 keys, products of 16 bits summed in f32",
    .declines = &Declines,
    .forward_passes = [](const Context&) {
      return Passes{.forward = &Forward,
                    .workspace = [](const Context&, const Problem&) { return int64_t{0}; },
                    .lanes = &Lanes};
    },
    .target = [](const Context&) { return std::string("cuda"); },
    .device = DeviceType::kCuda,
}};

}  // namespace heed::softmax
