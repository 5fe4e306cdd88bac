// Options and tensors of one layer of the page of attention.
#include "heed/pages/view_layer.h"

#include <algorithm>
#include <iterator>

#include "heed/ops/exact/attention/attention_options_internal.h"

namespace heed::pages {
namespace {

using attention::OptionField;
using attention::Options;

constexpr size_t kMaxTokenBytes = 200;

bool IsGivenBeside(const Options& options, std::initializer_list<OptionField> known) {
  return std::ranges::any_of(attention::kOptionRows, [&](const attention::OptionRow& row) {
    return attention::IsGiven(row, options) && std::ranges::find(known, row.field) == known.end();
  });
}

}  // namespace

Json Labels(std::span<const std::string> tokens) {
  Json labels = Json::array();
  for (const std::string& token : tokens) labels.push_back(Shorten(token, kMaxTokenBytes));
  return labels;
}

std::string Shorten(const std::string& text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  size_t end = max_bytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end) + "\xE2\x80\xA6";
}

bool ComputedInPage(const Options& options) {
  // The page shows probabilities before dropout; the precision of the computation is not visible.
  return !IsGivenBeside(options, {&Options::scale, &Options::softcap, &Options::causal, &Options::window,
                                  &Options::align, &Options::query_starts, &Options::pattern, &Options::dropout,
                                  &Options::precision, &Options::invariant});
}

bool MasksPairs(const Options& options) {
  return IsGivenBeside(
      options, {&Options::scale, &Options::softcap, &Options::causal, &Options::window, &Options::align,
                &Options::query_starts, &Options::dropout, &Options::precision, &Options::invariant, &Options::bias,
                &Options::alibi, &Options::sinks, &Options::log_decay, &Options::relative_bias});
}

Options OfFirstSequence(const Options& options) {
  Options first = options;
  if (first.query_starts.present()) first.query_starts = first.query_starts.Slice(0, 0, 1);
  return first;
}

std::vector<int64_t> Starts(const ViewLayer& layer) {
  const Options& options = layer.options;
  const bool top_left = options.align == attention::Align::kTopLeft;
  std::vector<int64_t> starts(static_cast<size_t>(layer.q.size(0)), top_left ? 0 : layer.k.size(1) - layer.q.size(1));
  const ConstTensorView& given = options.query_starts;
  for (size_t b = 0; given.present() && b < starts.size(); ++b) {
    starts[b] = given.as<int64_t>()[static_cast<int64_t>(b) * given.stride(0)];
  }
  return starts;
}

Buffer LogSumExp(Context& ctx, const ConstTensorView& q, const ConstTensorView& k, const Options& options) {
  const int64_t B = q.size(0), Tq = q.size(1), Hq = q.size(2);
  const Buffer v(q.dtype(), {k.size(0), k.size(1), k.size(2), 1}, Placement::kAligned);
  const Buffer o(q.dtype(), {B, Tq, Hq, 1}, Placement::kAligned);
  const Buffer lse(q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, {B, Hq, Tq}, Placement::kAligned);
  v.FillConstant(0);
  attention::Forward(ctx, {q, k, v.view()}, options, {o.view(), lse.view()});
  return lse;
}

}  // namespace heed::pages
