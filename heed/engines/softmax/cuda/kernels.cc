// The entries of GPU kernels in the engine's list: what they take, and their launches.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "heed/cuda/calls.h"
#include "heed/engines/softmax/cuda/arguments.h"
#include "heed/engines/softmax/cuda/backward.h"
#include "heed/engines/softmax/cuda/forward_shapes.h"
#include "heed/engines/softmax/kernels.h"

namespace heed::softmax {
namespace {

constexpr int64_t kMostHeads = 65535;                    // limit of a grid's second axis
constexpr int64_t kMostQueries = int64_t{1} << 30;       // kernels count rows in 32 bits
constexpr int64_t kMostSmallM = 2 * cuda::kSmallMRows;   // rows per key head: two small-M blocks read its keys
constexpr int64_t kMostSplitFloats = int64_t{64} << 20;  // limit for large-M blocks

std::string DeclinesOption(const Problem& p) {
  const std::pair<bool, const char*> options[] = {{p.quantized || p.pages_gone || !p.shared.empty(), "caches"},
                                                  {p.forgets, "log decays"},
                                                  {p.relative_bias.present(), "a relative bias"},
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
  for (const Sequence& s : p.sequences) {
    if (s.num_queries > kMostQueries) return "takes up to 2^30 queries, not " + std::to_string(s.num_queries);
  }
  return "";
}

int64_t SharedBytes(const Problem& p) {
  const auto bytes = [](auto shape) { return int64_t{shape.kSharedBytes}; };
  return std::max(cuda::WithShape(p.dtype, p.depth, p.value_depth, bytes),
                  cuda::WithSmallMShape(p.dtype, p.depth, p.value_depth, bytes));
}

std::string DeclinesDevice(const Problem& p) { return heed::cuda::Declines(p.device, SharedBytes(p)); }

std::string Declines(const Context&, const Problem& p) {
  if (const auto reason = engine::DeclinesAllButF32(p.dtype); !reason.empty()) return reason;
  for (const auto declines : {&DeclinesOption, &DeclinesSizes, &DeclinesDevice}) {
    if (std::string reason = declines(p); !reason.empty()) return reason;
  }
  return "";
}

bool IsSmallM(const Problem& p, const Sequence& s) { return s.num_queries * p.group() <= kMostSmallM; }

std::string DeclinesWgmma(const Context& ctx, const Problem& p) {
  if (!Declines(ctx, p).empty()) return "is for what softmax_cuda takes";
  std::string unused;
  const heed::cuda::Library& library = *heed::cuda::Find(&unused);
  heed::cuda::DeviceFacts facts;
  library.examine(p.device.index, &facts);
  if (facts.major != 9)
    return "needs compute capability 9.0, not " + std::to_string(facts.major) + "." + std::to_string(facts.minor);
  if (library.softmax->wgmma.forward == nullptr)
    return "is not in this libheed_cuda, built without code for 9.0a or without CUTLASS";
  if (p.dtype == DType::kF32) return "computes bf16 and f16, not f32";
  if (const int64_t channels = std::max(p.depth, p.value_depth); channels > cuda::kMostWgmmaChannels) {
    return "takes up to " + std::to_string(cuda::kMostWgmmaChannels) + " channels, not " + std::to_string(channels);
  }
  if (std::ranges::all_of(p.sequences, [&](const Sequence& s) { return IsSmallM(p, s); })) {
    return "takes more than " + std::to_string(kMostSmallM) + " rows per key head";
  }
  return "";
}

// Rows of a block of the WGMMA and mma.sync kernels.
int64_t WgmmaLanes(const Problem& p) {
  return cuda::WithWgmmaShape<cuda::WgmmaShape>(p.dtype, p.depth, p.value_depth,
                                                [](auto shape) { return int64_t{shape.kRows}; });
}
int64_t Lanes(const Problem& p) {
  return cuda::WithShape(p.dtype, p.depth, p.value_depth, [](auto shape) { return int64_t{shape.kRows}; });
}

// The kernel of a launch and the kind of its blocks.
struct RowBlocks {
  decltype(cuda::BlockLaunches::forward) launch;
  int64_t rows;
  bool small_m, uses_tma;  // loads keys and values by TMA
};

// A launch for some sequences, with its memory. Bits do not depend on the split: all kinds of blocks compute the same
// segments of keys.
class ForwardLaunch {
 public:
  ForwardLaunch(const heed::cuda::Call& call, const RowBlocks& blocks, const Problem& p,
                std::span<const Sequence> sequences, int64_t queries, const cuda::Arguments& arguments)
      : call_(call), blocks_(blocks), p_(p), sequences_(std::ssize(sequences)), queries_(queries),
        params_(arguments.Of(sequences)) {
    if (blocks.uses_tma) arguments.EncodeTensorMaps(call, params_);
    params_.fused = p.group() > 1 && (blocks.small_m || queries < blocks.rows) && !cuda::HasListsByHead(p);
    heads_ = params_.fused ? p.key_heads : p.query_heads;
    row_blocks_ = cuda::Blocks(params_.fused ? queries * p.group() : queries, blocks.rows);
    params_.row_blocks = static_cast<int32_t>(row_blocks_);
    params_.split_channels = static_cast<int32_t>(cuda::Blocks(p.value_depth, 8) * 8);
    for (int64_t i = 0; i < sequences_; ++i) {
      cuda::DeviceSequence& s = params_.sequences[i];
      s.splits = splits_;
      segments_ = std::max(segments_, cuda::SegmentsOf(s));
      splits_ += cuda::SegmentsOf(s) * s.num_queries * p.query_heads;
    }
    if (!Splits()) {
      segments_ = 1;
      return;
    }
    const int64_t numbers = splits_ * params_.split_channels;
    memory_.emplace(
        call, static_cast<size_t>(numbers) * sizeof(float) + static_cast<size_t>(splits_) * sizeof(cuda::SoftmaxState));
    params_.split_outputs = static_cast<float*>(memory_->data());
    params_.split_states = reinterpret_cast<cuda::SoftmaxState*>(params_.split_outputs + numbers);
  }

  void Run() const {
    const cuda::Launches& kernels = *call_.library().softmax;
    call_.Check(blocks_.launch(call_.Of(row_blocks_ * segments_, heads_, Count()), params_));
    if (memory_.has_value()) call_.Check(kernels.combine(call_.Of(queries_, p_.query_heads, Count()), params_));
  }

 private:
  size_t Count() const { return static_cast<size_t>(sequences_); }
  // Small-M blocks split if there are several segments; large-M blocks if they would leave SMs idle and the states stay
  // small.
  bool Splits() const {
    if (segments_ <= 1 || blocks_.small_m) return segments_ > 1;
    if (splits_ * (params_.split_channels + 2) > kMostSplitFloats) return false;
    heed::cuda::DeviceFacts facts;
    call_.Check(call_.library().examine(p_.device.index, &facts));
    return row_blocks_ * heads_ * sequences_ < facts.num_sms;
  }

  const heed::cuda::Call& call_;
  const RowBlocks blocks_;
  const Problem& p_;
  const int64_t sequences_, queries_;
  cuda::ForwardParams params_;
  int64_t heads_, row_blocks_;
  int64_t segments_ = 0, splits_ = 0;  // most segments of a sequence; splits of all rows
  std::optional<heed::cuda::DeviceMemory> memory_;
};

void ForwardBy(const Kernel& kernel, cuda::BlockLaunches cuda::Launches::* launches_of, Context& ctx,
               const Problem& p) {
  if (p.query_heads == 0) return;
  const heed::cuda::Call call(kernel.name, ctx, p.device);
  const cuda::Launches& kernels = *call.library().softmax;
  std::vector<Sequence> sequences = p.sequences;
  const auto many =
      std::stable_partition(sequences.begin(), sequences.end(), [&](const Sequence& s) { return IsSmallM(p, s); });
  const cuda::Arguments arguments(call, p, sequences);
  std::list<ForwardLaunch> launches;  // memory is allocated before anything is written
  const RowBlocks small_m = {kernels.small_m, cuda::kSmallMRows, true, false};
  const RowBlocks whole = {(kernels.*launches_of).forward, kernel.lanes(ctx, p), false,
                           launches_of == &cuda::Launches::wgmma};
  for (const RowBlocks& blocks : {small_m, whole}) {
    cuda::ForLaunches(blocks.small_m ? std::span(sequences.begin(), many) : std::span(many, sequences.end()),
                      [&](std::span<const Sequence> launched, int64_t queries, int64_t) {
                        if (queries > 0) launches.emplace_back(call, blocks, p, launched, queries, arguments);
                      });
  }
  for (const ForwardLaunch& launch : launches) launch.Run();
}

// The passes of a kernel, which is mma.sync or WGMMA.
template <cuda::BlockLaunches cuda::Launches::* kBlocks, const Kernel& kernel>
Passes ForwardPasses(const Context&) {
  return {.forward = [](Context& ctx, const Problem& p) { ForwardBy(kernel, kBlocks, ctx, p); },
          .workspace = [](const Context&, const Problem&) { return int64_t{0}; },
          .lanes = kBlocks == &cuda::Launches::wgmma ? &WgmmaLanes : &Lanes};
}
template <cuda::BlockLaunches cuda::Launches::* kBlocks, const Kernel& kernel>
Passes BackwardPasses(const Context&) {
  return {.backward = [](Context& ctx, const Problem& p,
                         const Gradients& g) { cuda::Backward(kernel.name, kBlocks, ctx, p, g); },
          .backward_workspace = [](const Context&, const Problem&, const Gradients&) { return BackwardBytes(); }};
}
std::string Target(const Context&) { return "cuda"; }

}  // namespace

const Kernel kWgmma = {{
    .name = "softmax_wgmma",
    .why = "as softmax_cuda with WGMMA, whose products overlap the softmax of the next tile",
    .declines = &DeclinesWgmma,
    .forward_passes = &ForwardPasses<&cuda::Launches::wgmma, kWgmma>,
    .backward_passes = &BackwardPasses<&cuda::Launches::wgmma, kWgmma>,
    .target = &Target,
    .device = DeviceType::kCuda,
}};

const Kernel kCuda = {{
    .name = cuda::kName,
    .why = "blocks of rows on a GPU, online softmax over tiles of 64 keys, products of 16 bits summed in f32",
    .declines = &Declines,
    .forward_passes = &ForwardPasses<&cuda::Launches::mma_sync, kCuda>,
    .backward_passes = &BackwardPasses<&cuda::Launches::mma_sync, kCuda>,
    .target = &Target,
    .device = DeviceType::kCuda,
}};

}  // namespace heed::softmax
