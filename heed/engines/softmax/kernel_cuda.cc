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

constexpr int64_t kMostHeads = 65535;            // blocks of a grid on its second axis
constexpr int64_t kMostQueries = int64_t{1} << 30;  // which kernels count in 32 bits

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
    if (s.num_queries > kMostQueries) return "takes up to 2^30 queries, not " + std::to_string(s.num_queries);
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

// The library, which takes the Context's stream.
const heed::cuda::Library& LibraryFor(const Context& ctx, const Problem& p) {
  std::string unused;
  const heed::cuda::Library& library = *heed::cuda::Find(&unused);
  if (const char* wrong = library.check_stream(p.device.index, ctx.stream())) {
    throw InvalidArgument(std::string("softmax_cuda: the Context's stream ") + wrong + ", expected one of cuda:" +
                          std::to_string(p.device.index));
  }
  return library;
}

void ThrowIf(const char* error) {
  if (error != nullptr) throw InternalError(std::string("softmax_cuda: ") + error);
}

// f(sequences, the most queries, the most keys that one of them has) for as many as a launch takes.
template <class F>
void ForLaunches(const Problem& p, const F& f) {
  for (size_t first = 0; first < p.sequences.size(); first += cuda::kMostSequences) {
    const size_t count = std::min<size_t>(cuda::kMostSequences, p.sequences.size() - first);
    const std::span sequences = std::span(p.sequences).subspan(first, count);
    int64_t queries = 0, keys = 0;
    for (const Sequence& s : sequences) {
      queries = std::max(queries, s.num_queries);
      keys = std::max(keys, s.num_keys);
    }
    f(sequences, queries, keys);
  }
}

heed::cuda::Launch LaunchOf(const Context& ctx, const Problem& p, int64_t blocks, int64_t heads, size_t sequences) {
  return {.device = p.device.index,
          .stream = ctx.stream(),
          .blocks = {static_cast<int32_t>(blocks), static_cast<int32_t>(heads), static_cast<int32_t>(sequences)}};
}

int64_t Blocks(int64_t rows, int64_t lanes) { return (rows + lanes - 1) / lanes; }

void Forward(Context& ctx, const Problem& p) {
  if (p.query_heads == 0) return;
  const heed::cuda::Library& library = LibraryFor(ctx, p);
  ForLaunches(p, [&](std::span<const Sequence> sequences, int64_t queries, int64_t) {
    if (queries == 0) return;
    cuda::ForwardParams params = ParamsOf(p, sequences);
    params.fused = p.group() > 1 && queries < Lanes(p);
    const int64_t rows = params.fused ? queries * p.group() : queries;
    const int64_t heads = params.fused ? p.key_heads : p.query_heads;
    ThrowIf(library.softmax->forward(LaunchOf(ctx, p, Blocks(rows, Lanes(p)), heads, sequences.size()), p.dtype, params));
  });
}

// A call's memory on the device, given back in the order of the stream.
class DeviceMemory {
 public:
  DeviceMemory(const heed::cuda::Library& library, const Context& ctx, const Problem& p, size_t num_bytes)
      : library_(library), device_(p.device.index), stream_(ctx.stream()) {
    if (const char* error = library.allocate(device_, stream_, num_bytes, &data_)) {
      throw Unsupported("softmax_cuda: cannot have " + std::to_string(num_bytes) + " bytes of the device: " + error);
    }
  }
  ~DeviceMemory() { library_.free(device_, stream_, data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* data() const { return data_; }

 private:
  const heed::cuda::Library& library_;
  const int32_t device_;
  void* const stream_;
  void* data_ = nullptr;
};

void RefuseGradients(const Problem& p, const Gradients& g) {
  const auto refuse = [](const std::string& why) { throw Unsupported("softmax_cuda " + why); };
  if (p.dtype != DType::kBF16) refuse(std::string("has gradients of bf16, not ") + Name(p.dtype));
  if (const int64_t channels = std::max(p.depth, p.value_depth); channels > cuda::kMostBackwardChannels) {
    refuse("has gradients of up to " + std::to_string(cuda::kMostBackwardChannels) + " channels, not " + std::to_string(channels));
  }
  if (g.dbias.data != nullptr || g.dsinks != nullptr || g.dalibi != nullptr || g.dlog_decay.data != nullptr) {
    refuse("has gradients of q, k and v alone");
  }
}

void Backward(Context& ctx, const Problem& p, const Gradients& g) {
  RefuseGradients(p, g);
  if (p.query_heads == 0) return;
  const heed::cuda::Library& library = LibraryFor(ctx, p);
  int64_t rows = 0;
  for (const Sequence& s : p.sequences) rows += s.num_queries * p.query_heads;
  const DeviceMemory terms(library, ctx, p, std::max<size_t>(1, static_cast<size_t>(rows) * sizeof(cuda::RowTerms)));
  const auto strides = [](const Rows& of) { return cuda::Strides{of.token_stride, of.head_stride}; };
  const auto writable = [](const Rows& of) { return const_cast<void*>(of.data); };
  int64_t first_row = 0;
  ForLaunches(p, [&](std::span<const Sequence> sequences, int64_t queries, int64_t keys) {
    cuda::BackwardParams params = {.forward = ParamsOf(p, sequences),
                                   .d_o = g.d_o.data,
                                   .d_lse = static_cast<const float*>(g.d_lse.data),
                                   .dq = writable(g.dq),
                                   .dk = writable(g.dk),
                                   .dv = writable(g.dv),
                                   .d_o_strides = strides(g.d_o),
                                   .d_lse_strides = strides(g.d_lse),
                                   .dq_strides = strides(g.dq),
                                   .dk_strides = strides(g.dk),
                                   .dv_strides = strides(g.dv),
                                   .terms = static_cast<cuda::RowTerms*>(terms.data())};
    params.forward.aligned = params.forward.aligned && IsAligned(g.d_o);
    for (size_t i = 0; i < sequences.size(); ++i) {
      const Sequence& s = sequences[i];
      const auto offset = [&](const Rows& of, int64_t first) { return s.batch * of.batch_stride + first * of.token_stride; };
      params.gradients[i] = {offset(g.d_o, s.first_q), offset(g.d_lse, s.first_q), offset(g.dq, s.first_q),
                             offset(g.dk, s.first_k),  offset(g.dv, s.first_k),    first_row};
      first_row += s.num_queries * p.query_heads;
    }
    const auto launch = [&](int64_t blocks, int64_t heads) { return LaunchOf(ctx, p, blocks, heads, sequences.size()); };
    if (queries > 0) ThrowIf(library.softmax->terms(launch(Blocks(queries, cuda::kTermsRows), p.query_heads), params));
    if (keys > 0 && (g.dk.data != nullptr || g.dv.data != nullptr)) {
      ThrowIf(library.softmax->key_gradients(launch(Blocks(keys, cuda::kBackwardTile), p.key_heads), params));
    }
    if (queries > 0 && g.dq.data != nullptr) {
      ThrowIf(library.softmax->query_gradients(launch(Blocks(queries, cuda::kBackwardTile), p.query_heads), params));
    }
  });
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
    .backward_passes = [](const Context&) {
      return Passes{.backward = &Backward,
                    .backward_workspace = [](const Context&, const Problem&, const Gradients&) { return BackwardBytes(); }};
    },
    .target = [](const Context&) { return std::string("cuda"); },
    .device = DeviceType::kCuda,
}};

}  // namespace heed::softmax
