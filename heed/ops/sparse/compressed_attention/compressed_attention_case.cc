// Compressed attention in the harness: its entry, simple problems of any size, and the tolerance of kernels against the
// reference: that of one call of attention over keys and compressed keys, and the error of merging two parts.
#include "heed/ops/sparse/compressed_attention/compressed_attention_case.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "heed/harness/mechanism/problem_case.h"
#include "heed/mechanism/check_internal.h"
#include "heed/ops/exact/attention/cases/attention_case.h"
#include "heed/ops/sparse/compressed_attention/compressed_attention_internal.h"

namespace heed::compressed_attention {
namespace {

const std::vector<std::string> kVariants = {"ratio=16", "window=64", "count=16", "sinks"};

std::string Title(const Problem& p) {
  const Options& o = p.options;
  std::string text = std::string("compressed_attention ") + Name(p.in.q.dtype()) + " ratio=" + std::to_string(o.ratio) +
                     " window=" + std::to_string(o.window);
  if (o.start) text += " start=" + std::to_string(*o.start);
  for (const auto& [name, view] : {std::pair{"q", p.in.q},
                                   {"k", p.in.k},
                                   {"v", p.in.v},
                                   {"k_cmp", p.in.k_cmp},
                                   {"v_cmp", p.in.v_cmp},
                                   {"chosen", p.in.chosen},
                                   {"sinks", p.in.sinks},
                                   {"d_lse", p.in.d_lse},
                                   {"lengths", o.lengths},
                                   {"starts", o.starts},
                                   {"cu_seqlens", o.cu_seqlens}}) {
    text += sparse::Described(name, view);
  }
  if (o.scale) text += " scale=" + std::to_string(*o.scale);
  return text + " " + p.note;
}

// The tensor of tokens, followed by that of compressed ones.
Buffer Joined(const ConstTensorView& tokens, const ConstTensorView& compressed) {
  const int64_t Tk = tokens.size(1);
  const Buffer joined(tokens.dtype(), {tokens.size(0), Tk + compressed.size(1), tokens.size(2), tokens.size(3)});
  std::vector<int64_t> index(4);
  if (joined.view().num_elements() == 0) return joined;
  do {
    const bool is_token = index[1] < Tk;
    const int64_t from[] = {index[0], is_token ? index[1] : index[1] - Tk, index[2], index[3]};
    SetElement(joined.view(), index, GetElement(is_token ? tokens : compressed, from));
  } while (NextIndex(joined.view().sizes(), index));
  return joined;
}

// keep[b, h, i, j]: the pairs of a row and the joined keys that the definition has.
Buffer Kept(const Problem& p) {
  const int64_t B = p.in.q.size(0), Tq = p.in.q.size(1), Hq = p.in.q.size(2), Tk = p.in.k.size(1), Hkv = p.in.k.size(2);
  const int64_t N = p.in.k_cmp.size(1);
  const Buffer keep(DType::kBool, {B, Hq, Tq, Tk + N});
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t i = 0; i < Tq; ++i) {
      const DefinedPlace place = PlaceByDefinition(p.in, p.options, b, i);
      const int64_t complete = p.in.chosen.present() ? 0 : place.num_complete(p.options.ratio);
      for (int64_t h = 0; h < Hq; ++h) {
        for (int64_t j = 0; j < Tk; ++j) {
          const int64_t before = (Tk - Tq + i) - j;  // tokens between key and row
          const bool sees = before >= 0 && before < p.options.window && before <= place.token - place.begin;
          keep.Set({b, h, i, j}, place.is_valid() && sees);
        }
        for (int64_t c = 0; c < N; ++c) {
          keep.Set({b, h, i, Tk + c}, c >= place.first_key && c < place.first_key + complete);
        }
        if (!p.in.chosen.present() || !place.is_valid()) continue;
        for (int64_t n = 0; n < p.in.chosen.size(p.in.chosen.rank() - 1); ++n) {
          const bool by_head = p.in.chosen.rank() == 4;
          const std::vector<int64_t> at = by_head ? std::vector{b, i, h / (Hq / Hkv), n} : std::vector{b, i, n};
          const auto c = static_cast<int64_t>(GetElement(p.in.chosen, at));
          if (c >= 0) keep.Set({b, h, i, Tk + place.first_key + c}, 1);
        }
      }
    }
  }
  return keep;
}

// Attention's tolerance for one softmax over all keys, with these additions.
//
//   o    Each part has an lse with attention's error E, so that the weights of the parts are wrong by a factor up to
//        1 + 2 E: at most E V in o, with V the largest |v| that the row sees in this channel.
//   dq   In 16 bits each part is rounded: at most u A, with A the sum of the magnitudes of all terms, a quarter of the
//        4 u A that attention's tolerance has, and for subnormal numbers of f16 half of their distance, 2^-25.
class Tolerance {
 public:
  Tolerance(const Problem& p, std::span<const TensorView> allowed) : p_(p), allowed_(allowed) {
    attention::Problem a;
    const Buffer k = Joined(p.in.k, p.in.k_cmp), v = Joined(p.in.v, p.in.v_cmp), keep = Kept(p);
    a.memory = {k, v, keep};
    a.in = {p.in.q, k.view(), v.view()};
    a.options.scale = p.options.scale;
    a.options.sinks = p.in.sinks;
    a.options.mask = keep.view();
    attention::DescribeOutputs(a);
    if (!p.gradients.empty()) {
      attention::DescribeGradients(a, 1);
      a.d_o = p.in.d_o;
      a.d_lse = p.in.d_lse;
    }
    const Case of = p.gradients.empty() ? attention::MakeCase(a) : attention::MakeBackwardCase(a, true);
    std::vector<Buffer> memory;
    std::vector<TensorView> expected, views;
    for (const OutputSpec& spec : of.outputs) {
      for (std::vector<TensorView>* to : {&expected, &views}) {
        memory.push_back(Buffer(DType::kF64, spec.sizes));
        to->push_back(memory.back().view());
      }
      of_whole_[spec.name] = views.back();
    }
    of.reference(expected, views);
    OfResults(v.view(), keep.view());
    for (size_t n = 0; n < p.gradients.size(); ++n) OfGradient(p.gradients[n].name, allowed[p.results.size() + n]);
  }

 private:
  // Calls f(index) for every element.
  template <class F>
  static void ForElements(const TensorView& t, const F& f) {
    std::vector<int64_t> index(t.sizes().size());
    if (t.num_elements() == 0) return;
    do f(index);
    while (NextIndex(t.sizes(), index));
  }

  void OfResults(const ConstTensorView& v, const ConstTensorView& keep) const {
    const int64_t group = p_.in.k.size(2) == 0 ? 1 : p_.in.q.size(2) / p_.in.k.size(2);
    const TensorView &of_o = of_whole_.at("o"), &of_lse = of_whole_.at("lse");
    ForElements(allowed_[0], [&](const std::vector<int64_t>& at) {
      const int64_t b = at[0], i = at[1], h = at[2], e = at[3];
      double largest = 0;
      for (int64_t j = 0; j < v.size(1); ++j) {
        const int64_t pair[] = {b, h, i, j}, value[] = {b, j, h / group, e};
        if (GetElement(keep, pair) != 0) largest = std::max(largest, std::abs(GetElement(v, value)));
      }
      const int64_t row[] = {b, h, i};
      SetElement(allowed_[0], at, GetElement(of_o, at) + largest * GetElement(of_lse, row));
    });
    ForElements(allowed_[1],
                [&](const std::vector<int64_t>& at) { SetElement(allowed_[1], at, GetElement(of_lse, at)); });
  }

  void OfGradient(const std::string& name, const TensorView& to) const {
    const bool is_compressed = name.ends_with("_cmp"), is_rounded = name == "dq" && SizeOf(p_.in.q.dtype()) == 2;
    const double of_subnormal = is_rounded && p_.in.q.dtype() == DType::kF16 ? 0x1p-25 : 0;
    const TensorView& of = of_whole_.at(is_compressed ? name.substr(0, 2) : name);
    ForElements(to, [&](std::vector<int64_t> at) {
      const std::vector<int64_t> own = at;
      if (is_compressed) at[1] += p_.in.k.size(1);
      SetElement(to, own, GetElement(of, at) * (is_rounded ? 1.25 : 1) + of_subnormal);
    });
  }

  const Problem& p_;
  std::span<const TensorView> allowed_;  // of results, then of gradients
  std::map<std::string, TensorView> of_whole_;
};

// A case of the forward pass, followed by the backward pass if there are gradients: all outputs are compared.
Case ToCase(const Problem& problem) {
  const auto p = std::make_shared<const Problem>(problem);
  Case c;
  c.title = Title(problem);
  c.pass = p->gradients.empty() ? "forward" : "backward";
  c.outputs = p->results;
  c.outputs.insert(c.outputs.end(), p->gradients.begin(), p->gradients.end());
  const auto backward = [p](Context& ctx, std::span<const TensorView> views) {
    BackwardInputs in = p->in;
    in.o = views[0];
    in.lse = views[1];
    Backward(ctx, in, p->options, ToGradients(p->gradients, views.subspan(2)));
  };
  c.run = [p, backward](Context& ctx, std::span<const TensorView> views) {
    Forward(ctx, p->in, p->options, {views[0], views[1]});
    if (!p->gradients.empty()) backward(ctx, views);
  };
  if (p->gradients.empty()) {
    c.timed = [p](Context& ctx, std::span<const TensorView> views) { Forward(ctx, p->in, p->options, {views[0], {}}); };
  } else {
    c.timed = backward;
  }
  c.reference = [p](std::span<const TensorView> expected, std::span<const TensorView> tolerance) {
    Reference(p->in, p->options, {expected[0], expected[1]});
    if (!p->gradients.empty()) BackwardReference(p->in, p->options, ToGradients(p->gradients, expected.subspan(2)));
    if (!tolerance.empty()) Tolerance(*p, tolerance);
  };
  for (const ConstTensorView& view :
       {p->in.q, p->in.k, p->in.v, p->in.k_cmp, p->in.v_cmp, p->in.chosen, p->in.sinks, p->in.d_o, p->in.d_lse}) {
    c.bytes += mechanism::Bytes(view);
  }
  c.bytes += sparse::BytesOf(c.outputs);
  return c;
}

// Tk tokens, of which the last ones, at most Tq, are rows.
Case MakeCase(const CaseRequest& request) {
  const Sizes& s = request.sizes;
  sparse::CheckRequest("compressed_attention", request, kVariants);
  Problem p;
  p.note = request.variant;
  const mechanism::Words words(request.variant);
  if (const auto ratio = words.Number("ratio")) p.options.ratio = static_cast<int64_t>(*ratio);
  if (const auto window = words.Number("window")) p.options.window = static_cast<int64_t>(*window);
  const int64_t Tq = std::min(s.Tq, s.Tk), N = s.Tk / std::max<int64_t>(p.options.ratio, 1);
  uint64_t seed = request.seed * 16;
  const auto tensor = [&](DType dtype, const std::vector<int64_t>& sizes) {
    return p.Keep(Buffer(dtype, sizes, Placement::kAligned).FillNormal(++seed));
  };
  p.in.q = tensor(request.dtype, {s.B, Tq, s.Hq, s.D});
  p.in.k = tensor(request.dtype, {s.B, s.Tk, s.Hkv, s.D});
  p.in.v = tensor(request.dtype, {s.B, s.Tk, s.Hkv, s.Dv});
  p.in.k_cmp = tensor(request.dtype, {s.B, N, s.Hkv, s.D});
  p.in.v_cmp = tensor(request.dtype, {s.B, N, s.Hkv, s.Dv});
  if (words.Has("sinks")) p.in.sinks = tensor(request.dtype, {s.Hq});
  const auto complete = [&](int64_t i) { return (s.Tk - Tq + i + 1) / p.options.ratio; };
  const auto count = words.Number("count");
  if (count) {
    const Buffer chosen(DType::kI64, {s.B, Tq, static_cast<int64_t>(*count)}, Placement::kAligned);
    Random random(++seed);
    for (int64_t row = 0; row < s.B * Tq; ++row) {
      ChooseKeys(random, complete(row % Tq),
                 {chosen.as<int64_t>() + row * chosen.view().size(2), static_cast<size_t>(*count)});
    }
    p.in.chosen = p.Keep(chosen);
  }
  if (request.pass == "backward") p.in.d_o = tensor(request.dtype, {s.B, Tq, s.Hq, s.Dv});
  Describe(p);
  Case c = ToCase(p);
  for (int64_t i = 0; i < Tq; ++i) {
    const int64_t keys = count ? std::min(static_cast<int64_t>(*count), complete(i)) : complete(i);
    c.pairs += static_cast<double>(s.B * s.Hq * (keys + std::min(p.options.window, s.Tk - Tq + i + 1)));
  }
  const auto D = static_cast<double>(s.D), Dv = static_cast<double>(s.Dv);
  c.flops = 2 * c.pairs * (request.pass == "backward" ? 3 * D + 2 * Dv : D + Dv);
  return c;
}

Case RandomCase(DType dtype, uint64_t seed) { return ToCase(RandomProblem(dtype, seed)); }

// The problem of CLI verbs on a file that has compressed keys.
std::shared_ptr<Problem> ProblemOn(const TensorMap& tensors, std::optional<double> scale) {
  const auto p = std::make_shared<Problem>();
  for (const auto& [name, view] : {std::pair{"q", &p->in.q},
                                   {"k", &p->in.k},
                                   {"v", &p->in.v},
                                   {"k_cmp", &p->in.k_cmp},
                                   {"v_cmp", &p->in.v_cmp},
                                   {"d_o", &p->in.d_o}}) {
    if (const auto found = tensors.find(name); found != tensors.end()) *view = found->second;
  }
  p->options.scale = scale;
  return p;
}

TensorCall CallOn(const Context& ctx, const TensorMap& tensors, std::optional<double> scale) {
  const auto p = ProblemOn(tensors, scale);
  const Explanation plan = Explain(ctx, p->in, p->options);  // throws if the arguments are invalid
  Describe(*p);
  return sparse::CallOf(plan, p->results[0], true, [p](Context& run_ctx, const TensorView& out) {
    Forward(run_ctx, p->in, p->options, {out, {}});
  });
}

TensorCall TrainOn(const Context& ctx, const TensorMap& tensors, std::optional<double> scale) {
  const auto p = ProblemOn(tensors, scale);
  Explanation plan = Explain(ctx, p->in, p->options);
  Describe(*p);
  const Gradients planned = ToGradients(p->gradients, sparse::ViewsOf(p->gradients));
  plan.workspace_bytes = std::max(plan.workspace_bytes, BackwardWorkspace(ctx, p->in, p->options, planned));
  return sparse::TrainingOf(plan, ToCase(*p), true);
}

}  // namespace

void Describe(Problem& p) {
  const DType dtype = p.in.q.dtype();
  const int64_t B = p.in.q.size(0), Tq = p.in.q.size(1), Hq = p.in.q.size(2);
  p.results = {{"o", dtype, {B, Tq, Hq, p.in.v.size(3)}, {}}, {"lse", mechanism::StateDType(dtype), {B, Hq, Tq}, {}}};
  p.gradients.clear();
  if (!p.in.d_o) return;
  for (const auto& [name, of] : {std::pair{"dq", p.in.q},
                                 {"dk", p.in.k},
                                 {"dv", p.in.v},
                                 {"dk_cmp", p.in.k_cmp},
                                 {"dv_cmp", p.in.v_cmp},
                                 {"dsinks", p.in.sinks}}) {
    if (of) p.gradients.push_back(sparse::LikeTensor(name, of));
  }
}

Gradients ToGradients(std::span<const OutputSpec> specs, std::span<const TensorView> views) {
  Gradients out;
  const std::map<std::string, TensorView*> places = {{"dq", &out.dq},         {"dk", &out.dk},
                                                     {"dv", &out.dv},         {"dk_cmp", &out.dk_cmp},
                                                     {"dv_cmp", &out.dv_cmp}, {"dsinks", &out.dsinks}};
  for (size_t i = 0; i < views.size(); ++i) *places.at(specs[i].name) = views[i];
  return out;
}

void ChooseKeys(Random& random, int64_t complete, std::span<int64_t> row) {
  int64_t left = std::min<int64_t>(complete, std::ssize(row));
  std::ranges::fill(row, -1);
  for (int64_t c = 0; left > 0; ++c) {
    if (random.Uniform() * static_cast<double>(complete - c) < static_cast<double>(left))
      row[row.size() - static_cast<size_t>(left--)] = c;
  }
}

OpEntry Entry() {
  return {.name = "compressed_attention",
          .family = "sparse",
          .passes = {"forward", "backward"},
          .dtypes = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16},
          .variants = kVariants,
          .flops =
              "2 (D + Dv) per kept pair, backward 2 (3 D + 2 Dv); B Hq T (window + count) pairs, or without a choice "
              "B Hq T (window + T / (2 ratio))",
          .bytes = "(B T Hq (D + Dv) + B (T + T / ratio) Hkv (D + Dv)) size",
          .state = "B Hkv (window + T / ratio) (D + Dv) size",
          .make_case = &MakeCase,
          .random_case = &RandomCase,
          .inputs = {{"q", "BTHK"}, {"k", "BTGK"}, {"v", "BTGV"}, {"k_cmp", "BNGK"}, {"v_cmp", "BNGV"}},
          .call = &CallOn,
          .keywords = ", ratio=4, window=128",
          .train = &TrainOn};
}

}  // namespace heed::compressed_attention
