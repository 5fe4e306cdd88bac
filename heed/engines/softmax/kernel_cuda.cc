// The kernel of GPUs in the list: what it takes, and problems as its launches.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/cuda/calls.h"
#include "heed/cuda/shared_tile.h"
#include "heed/engines/softmax/cuda/forward_shapes.h"
#include "heed/engines/softmax/kernels.h"

namespace heed::softmax {
namespace {

constexpr char kName[] = "softmax_cuda";
constexpr int64_t kMostHeads = 65535;            // blocks of a grid on its second axis
constexpr int64_t kMostQueries = int64_t{1} << 30;  // which kernels count in 32 bits
constexpr int64_t kMostFewRows = 2 * cuda::kFewRows;  // of a key head: two blocks read its keys at once
constexpr int64_t kMostPartNumbers = int64_t{64} << 20;  // of many rows

std::string DeclinesOption(const Problem& p) {
  const std::pair<bool, const char*> options[] = {
      {p.quantized || p.pages_gone || !p.shared.empty(), "caches"},
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
  const auto bytes = [](auto shape) { return int64_t{shape.kSharedBytes}; };
  return std::max(cuda::WithShape(p.depth, p.value_depth, bytes), cuda::WithFewRowsShape(p.depth, p.value_depth, bytes));
}

std::string DeclinesDevice(const Problem& p) { return heed::cuda::Declines(p.device, SharedBytes(p)); }

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
          .parts = 0,
          .pages = 0,
          .num_queries = static_cast<int32_t>(s.num_queries)};
}

// Whether each row begins at a multiple of 16 bytes.
bool IsAligned(const Rows& rows) {
  const auto address = reinterpret_cast<uintptr_t>(rows.data);
  const auto strides = static_cast<uintptr_t>(rows.batch_stride | rows.token_stride | rows.head_stride);
  return (address / sizeof(uint16_t) | strides) % heed::cuda::kPiece == 0;
}

cuda::ForwardParams ParamsOf(const Problem& p, std::span<const Sequence> sequences) {
  const auto strides = [](const Rows& rows) { return cuda::Strides{rows.token_stride, rows.head_stride}; };
  const auto pairs = [](const Pairs& x) {
    return cuda::DevicePairs{x.data, x.dtype, x.head_stride, x.query_stride, x.key_stride};
  };
  cuda::ForwardParams params = {
      .dtype = p.dtype,
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
      .page_tokens = static_cast<int32_t>(std::min<int64_t>(p.page_tokens, std::numeric_limits<int32_t>::max())),
      .k_in_page = p.k.page_offset,
      .v_in_page = p.v.page_offset,
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

// f(sequences, the most queries, the most keys that one of them has) for as many as a launch takes.
template <class F>
void ForLaunches(std::span<const Sequence> all, const F& f) {
  for (size_t first = 0; first < all.size(); first += cuda::kMostSequences) {
    const size_t count = std::min<size_t>(cuda::kMostSequences, all.size() - first);
    const std::span sequences = all.subspan(first, count);
    int64_t queries = 0, keys = 0;
    for (const Sequence& s : sequences) {
      queries = std::max(queries, s.num_queries);
      keys = std::max(keys, s.num_keys);
    }
    f(sequences, queries, keys);
  }
}

int64_t Blocks(int64_t rows, int64_t lanes) { return (rows + lanes - 1) / lanes; }

// Where the pages of some sequences begin, on the device, if they have any.
class PageTable {
 public:
  PageTable(const heed::cuda::Call& call, const Problem& p, std::span<const Sequence> sequences) : all_(sequences) {
    if (p.page_tokens == 0) return;
    std::vector<const std::byte*> pages;
    for (const Sequence& s : sequences) {
      firsts_.push_back(std::ssize(pages));
      if (s.pages != nullptr) pages.insert(pages.end(), s.pages, s.pages + Blocks(s.key_end, p.page_tokens));
    }
    for (const std::byte* page : pages) {
      aligned_ = aligned_ && (reinterpret_cast<uintptr_t>(page) | p.k.page_offset | p.v.page_offset) % 16 == 0;
    }
    const size_t num_bytes = std::max<size_t>(1, pages.size()) * sizeof(const std::byte*);
    call.Upload(memory_.emplace(call, num_bytes).data(), pages.data(), pages.size() * sizeof(const std::byte*));
  }

  // Of a launch of some of them.
  void AddTo(cuda::ForwardParams* params, std::span<const Sequence> launched) const {
    if (!memory_.has_value()) return;
    params->pages = static_cast<const std::byte* const*>(memory_->data());
    params->aligned = params->aligned && aligned_;
    const int64_t first = launched.data() - all_.data();
    for (size_t i = 0; i < launched.size(); ++i) params->sequences[i].pages = firsts_[static_cast<size_t>(first) + i];
  }

 private:
  const std::span<const Sequence> all_;
  std::vector<int64_t> firsts_;
  bool aligned_ = true;
  std::optional<heed::cuda::DeviceMemory> memory_;
};

// A launch of these sequences, with its memory. How it is cut no bit depends on: blocks of either kind add up the same segments
// of keys.
class ForwardLaunch {
 public:
  ForwardLaunch(const heed::cuda::Call& call, const Problem& p, std::span<const Sequence> sequences, int64_t queries,
                bool few_rows, const PageTable& pages)
      : call_(call), p_(p), sequences_(std::ssize(sequences)), queries_(queries), few_rows_(few_rows),
        params_(ParamsOf(p, sequences)) {
    pages.AddTo(&params_, sequences);
    params_.fused = p.group() > 1 && queries < Lanes(p);
    heads_ = params_.fused ? p.key_heads : p.query_heads;
    row_blocks_ = Blocks(params_.fused ? queries * p.group() : queries, few_rows ? cuda::kFewRows : Lanes(p));
    params_.row_blocks = static_cast<int32_t>(row_blocks_);
    params_.part_channels = static_cast<int32_t>(Blocks(p.value_depth, 8) * 8);
    for (int64_t i = 0; i < sequences_; ++i) {
      cuda::DeviceSequence& s = params_.sequences[i];
      s.parts = parts_;
      segments_ = std::max(segments_, cuda::SegmentsOf(s));
      parts_ += cuda::SegmentsOf(s) * s.num_queries * p.query_heads;
    }
    if (!Splits()) {
      segments_ = 1;
      return;
    }
    const int64_t numbers = parts_ * params_.part_channels;
    memory_.emplace(call, static_cast<size_t>(numbers) * sizeof(float) + static_cast<size_t>(parts_) * sizeof(cuda::PartTerms));
    params_.part_outputs = static_cast<float*>(memory_->data());
    params_.part_terms = reinterpret_cast<cuda::PartTerms*>(params_.part_outputs + numbers);
  }

  void Run() const {
    const cuda::Launches& kernels = *call_.library().softmax;
    const auto forward = few_rows_ ? kernels.few_rows : kernels.forward;
    call_.Check(forward(call_.Of(row_blocks_ * segments_, heads_, Count()), params_));
    if (memory_.has_value()) call_.Check(kernels.combine(call_.Of(queries_, p_.query_heads, Count()), params_));
  }

 private:
  size_t Count() const { return static_cast<size_t>(sequences_); }
  // Few rows do; many where their blocks would leave multiprocessors idle, and what they leave stays small.
  bool Splits() const {
    if (segments_ <= 1 || few_rows_) return segments_ > 1;
    if (parts_ * (params_.part_channels + 2) > kMostPartNumbers) return false;
    heed::cuda::DeviceFacts facts;
    call_.Check(call_.library().examine(p_.device.index, &facts));
    return row_blocks_ * heads_ * sequences_ < facts.multiprocessors;
  }

  const heed::cuda::Call& call_;
  const Problem& p_;
  const int64_t sequences_, queries_;
  const bool few_rows_;
  cuda::ForwardParams params_;
  int64_t heads_, row_blocks_;
  int64_t segments_ = 0, parts_ = 0;  // the most of a sequence, and those of all rows
  std::optional<heed::cuda::DeviceMemory> memory_;
};

void Forward(Context& ctx, const Problem& p) {
  if (p.query_heads == 0) return;
  const heed::cuda::Call call(kName, ctx, p.device);
  std::vector<Sequence> sequences = p.sequences;
  const auto many = std::stable_partition(sequences.begin(), sequences.end(), [&](const Sequence& s) {
    return s.num_queries * p.group() <= kMostFewRows;
  });
  const PageTable pages(call, p, sequences);
  std::list<ForwardLaunch> launches;  // all have their memory before anything is written
  for (const bool few_rows : {true, false}) {
    ForLaunches(few_rows ? std::span(sequences.begin(), many) : std::span(many, sequences.end()),
                [&](std::span<const Sequence> launched, int64_t queries, int64_t) {
                  if (queries > 0) launches.emplace_back(call, p, launched, queries, few_rows, pages);
                });
  }
  for (const ForwardLaunch& launch : launches) launch.Run();
}

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
  const heed::cuda::Call call(kName, ctx, p.device);
  const cuda::Launches& kernels = *call.library().softmax;
  int64_t rows = 0;
  for (const Sequence& s : p.sequences) rows += s.num_queries * p.query_heads;
  const heed::cuda::DeviceMemory terms(call, std::max<size_t>(1, static_cast<size_t>(rows) * sizeof(cuda::RowTerms)));
  const auto strides = [](const Rows& of) { return cuda::Strides{of.token_stride, of.head_stride}; };
  const auto writable = [](const Rows& of) { return const_cast<void*>(of.data); };
  int64_t first_row = 0;
  ForLaunches(p.sequences, [&](std::span<const Sequence> sequences, int64_t queries, int64_t keys) {
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
    const auto launch = [&](int64_t blocks, int64_t heads) { return call.Of(blocks, heads, sequences.size()); };
    if (queries > 0) call.Check(kernels.terms(launch(Blocks(queries, cuda::kTermsRows), p.query_heads), params));
    if (keys > 0 && (g.dk.data != nullptr || g.dv.data != nullptr)) {
      call.Check(kernels.key_gradients(launch(Blocks(keys, cuda::kBackwardTile), p.key_heads), params));
    }
    if (queries > 0 && g.dq.data != nullptr) {
      call.Check(kernels.query_gradients(launch(Blocks(queries, cuda::kBackwardTile), p.query_heads), params));
    }
  });
}

}  // namespace

const Kernel kCuda = {{
    .name = kName,
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
