// Arguments of attention launches.
#include "heed/engines/softmax/cuda/arguments.h"

#include <limits>
#include <utility>

namespace heed::softmax::cuda {

Arguments::Arguments(const heed::cuda::Call& call, const Problem& p, std::span<const Sequence> sequences)
    : p_(p), all_(sequences), uploads_(call), slopes_(NumbersOf(p.slopes, p.device_slopes)),
      sinks_(NumbersOf(p.sinks, p.device_sinks)),
      aligned_(IsAligned(p.q, p.dtype) && IsAligned(p.k, p.dtype) && IsAligned(p.v, p.dtype)) {
  if (p.page_tokens > 0) ListPages();
  if (p.has_pattern || !p.segments_q.empty()) UploadTileLists();
}

DeviceNumbers Arguments::NumbersOf(const std::vector<double>& here, const HeadNumbers& there) {
  if (there.data != nullptr) return {there.data, there.dtype, there.head_stride};
  if (here.empty()) return {};
  return {uploads_.Put(std::vector<float>(here.begin(), here.end())), DType::kF32, 1};
}

void Arguments::ListPages() {
  std::vector<const std::byte*> pages;
  for (const Sequence& s : all_) {
    first_pages_.push_back(std::ssize(pages));
    if (s.pages != nullptr) pages.insert(pages.end(), s.pages, s.pages + Blocks(s.key_end, p_.page_tokens));
  }
  for (const std::byte* page : pages) {
    aligned_ = aligned_ && (reinterpret_cast<uintptr_t>(page) | p_.k.page_offset | p_.v.page_offset) % 16 == 0;
  }
  pages_ = uploads_.Put(pages);
}

void Arguments::UploadTileLists() {
  TileLists lists = ListTiles(p_, all_);
  list_begins_ = uploads_.Put(lists.begins);
  list_tiles_ = uploads_.Put(lists.tiles);
  mask_words_ = uploads_.Put(lists.words);
  list_places_ = std::move(lists.places);
}

DeviceSequence Arguments::OnDevice(const Sequence& s) const {
  const auto offset = [&](const Rows& rows, int64_t first) {
    return s.batch * rows.batch_stride + first * rows.token_stride;
  };
  const auto index = static_cast<size_t>(&s - all_.data());
  const TileLists::Place list = list_places_.empty() ? TileLists::Place() : list_places_[index];
  return {.q = offset(p_.q, s.first_q),
          .k = offset(p_.k, s.first_k),
          .v = offset(p_.v, s.first_k),
          .o = offset(p_.o, s.first_q),
          .lse = offset(p_.lse, s.first_q),
          .bias = s.batch * p_.bias.batch_stride,
          .mask = s.batch * p_.mask.batch_stride,
          .slopes = s.batch * (p_.device_slopes.data != nullptr ? p_.device_slopes.batch_stride : p_.slopes_stride),
          .first_head = static_cast<uint32_t>(s.batch * p_.query_heads),
          .start = s.start,
          .key_begin = s.key_begin,
          .key_end = s.key_end,
          .num_keys = s.num_keys,
          .query_end = s.query_end,
          .prefix_end = s.prefix_end,
          .sink_end = s.sink_end,
          .splits = 0,
          .pages = first_pages_.empty() ? 0 : first_pages_[index],
          .tile_list = list.first,
          .list_head_stride = list.head_stride,
          .num_queries = static_cast<int32_t>(s.num_queries),
          .k_batch = BatchOf(p_.k, s),
          .v_batch = BatchOf(p_.v, s),
          .first_key = s.first_k};
}

// TMA counts tokens in 32 bits and takes neither heads that share rows nor negative strides.
void Arguments::EncodeTensorMaps(const heed::cuda::Call& call, ForwardParams& params) const {
  if (p_.page_tokens > 0 || !params.aligned) return;
  int64_t tokens = 1;
  for (const Sequence& s : all_) tokens = std::max(tokens, s.first_k + s.num_keys);
  const auto map = [&](const Rows& rows, int64_t channels, heed::cuda::TensorMap& to) {
    int64_t batches = 1;
    for (const Sequence& s : all_) batches = std::max<int64_t>(batches, BatchOf(rows, s) + 1);
    const auto stride = [&](int64_t size, int64_t of) { return size == 1 ? rows.token_stride : of; };
    const heed::cuda::TensorMapSource source = {
        .data = rows.data,
        .channels = channels,
        .tokens = tokens,
        .heads = p_.key_heads,
        .batches = batches,
        .token_stride = tokens == 1 ? (channels + 7) / 8 * 8 : rows.token_stride,
        .head_stride = stride(p_.key_heads, rows.head_stride),
        .batch_stride = stride(batches, rows.batch_stride)};
    if (source.token_stride <= 0 || source.head_stride <= 0 || source.batch_stride <= 0) return false;
    return call.EncodeTensorMap(source, &to);
  };
  params.uses_tma = tokens <= std::numeric_limits<int32_t>::max() && map(p_.k, p_.depth, params.k_tensor_map) &&
                    map(p_.v, p_.value_depth, params.v_tensor_map);
}

ForwardParams Arguments::Of(std::span<const Sequence> launched) const {
  const auto pairs = [](const Pairs& x) {
    return DevicePairs{x.data, x.dtype, x.head_stride, x.query_stride, x.key_stride};
  };
  ForwardParams params = {
      .dtype = p_.dtype,
      .q = p_.q.data,
      .k = p_.k.data,
      .v = p_.v.data,
      .o = const_cast<void*>(p_.o.data),
      .lse = static_cast<float*>(const_cast<void*>(p_.lse.data)),
      .q_strides = StridesOf(p_.q),
      .k_strides = StridesOf(p_.k),
      .v_strides = StridesOf(p_.v),
      .o_strides = StridesOf(p_.o),
      .lse_strides = StridesOf(p_.lse),
      .window_left = p_.window_left,
      .window_right = p_.window_right,
      .chunk = p_.chunk,
      .page_tokens = static_cast<int32_t>(std::min<int64_t>(p_.page_tokens, std::numeric_limits<int32_t>::max())),
      .pages = pages_,
      .k_in_page = p_.k.page_offset,
      .v_in_page = p_.v.page_offset,
      .list_begins = list_begins_,
      .list_tiles = list_tiles_,
      .mask_words = mask_words_,
      .causal = p_.causal,
      .aligned = aligned_,
      .group = static_cast<int32_t>(p_.key_heads == 0 ? 0 : p_.group()),
      .depth = static_cast<int32_t>(p_.depth),
      .value_depth = static_cast<int32_t>(p_.value_depth),
      .scale = static_cast<float>(p_.scale),
      .softcap = static_cast<float>(p_.softcap),
      .bias = pairs(p_.bias),
      .mask = pairs(p_.mask),
      .slopes = slopes_,
      .sinks = sinks_,
      .dropout = static_cast<float>(p_.dropout),
      .keep_below = p_.keep_below,
      .key_low = p_.key_low,
      .key_high = p_.key_high,
      .dropout_offset = p_.dropout_offset};
  std::ranges::transform(launched, params.sequences, [&](const Sequence& s) { return OnDevice(s); });
  return params;
}

}  // namespace heed::softmax::cuda
