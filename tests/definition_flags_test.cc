// A wrong flag in a mechanism's definition is detected: a reference computes without the definition, so that kernels
// with a wrong flag disagree with it.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <regex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/core/context.h"
#include "heed/core/error.h"
#include "heed/harness/case.h"
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
#include "heed/ops/linear/efficient_attention/efficient_attention_internal.h"
#include "heed/ops/linear/linear_attention/linear_attention_internal.h"
#include "heed/ops/linear/performer/performer_internal.h"
#include "heed/harness/mechanism/recurrent_case.h"
#include "heed/harness/mechanism/scanning_case.h"
#include "heed/ops/ssm/causal_conv1d/causal_conv1d_internal.h"
#include "heed/ops/ssm/h3/h3_internal.h"
#include "heed/ops/ssm/long_convolution/long_convolution_internal.h"
#include "heed/ops/ssm/s4d/s4d_internal.h"
#include "heed/ops/ssm/selective_scan/selective_scan_internal.h"
#include "tests/forks.h"

namespace heed {
namespace {

constexpr uint64_t kSeeds = 12;

template <class Definition>
struct Flip {
  std::string name;  // "decay=2": an enumerator by its number
  Definition definition;
};

// A mechanism, and random problems of it in float64.
template <class Definition>
struct Subject {
  std::string name;
  Definition definition;
  // Kernels run with one definition, the tensors and states of the problem are those of the other, and the reference is
  // the mechanism's own.
  std::function<Case(const Definition& of_kernels, const Definition& of_problems, uint64_t seed)> problem;
};

// Copies of a definition, in each of which one field has another value.
template <class Definition>
class Flips {
 public:
  explicit Flips(Definition& copy) : copy_(copy) {}
  template <class Field>
  void To(const char* name, Field& field, const std::vector<Field>& values) {
    const Field kept = field;
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i] == kept) continue;
      field = values[i];
      list.push_back({std::string(name) + "=" + std::to_string(i), copy_});
    }
    field = kept;
  }
  void Add(const std::string& name) { list.push_back({name, copy_}); }
  void Not(const char* name, bool& field) { To(name, field, {false, true}); }
  void More(const char* name, double& field) { To(name, field, {field, field + 0.3}); }

  std::vector<Flip<Definition>> list;

 private:
  Definition& copy_;
};

// Copies of a table, in each of which two tensors with the same axes have exchanged their roles in the equations, or a
// state has other axes.
template <class Definition>
void FlipTable(Flips<Definition>& flips, mechanism::Table& table, std::initializer_list<const char*> state_axes) {
  static std::deque<std::vector<mechanism::Tensor>> all_tensors;  // tables are views
  static std::deque<std::vector<mechanism::StateTensor>> all_states;
  const mechanism::Table kept = table;
  for (size_t i = 0; i < kept.tensors.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const mechanism::Tensor &one = kept.tensors[j], &other = kept.tensors[i];
      if (std::string_view(one.axes) != other.axes || one.role == mechanism::Role::kNone) continue;
      auto& tensors = all_tensors.emplace_back(kept.tensors.begin(), kept.tensors.end());
      std::swap(tensors[i].role, tensors[j].role);
      table.tensors = tensors;
      flips.Add(std::string("roles of ") + one.name + " and " + other.name);
    }
  }
  table = kept;
  for (size_t i = 0; i < kept.states.size(); ++i) {
    for (const char* axes : state_axes) {
      if (kept.states[i].role != mechanism::StateTensor::kState || std::string_view(kept.states[i].axes) == axes) {
        continue;
      }
      auto& states = all_states.emplace_back(kept.states.begin(), kept.states.end());
      states[i].axes = axes;
      table.states = states;
      flips.Add(std::string("axes of ") + kept.states[i].name + " " + axes);
    }
  }
  table = kept;
}

// The structured binding names every field, so that a new field does not compile before it is flipped here. Without
// has_direction a call refuses an option, which is not a flag of the equations.
std::vector<Flip<recurrent::Definition>> FlipsOf(recurrent::Definition d) {
  using recurrence::Feature;
  Flips<recurrent::Definition> flips(d);
  auto& [table, root_scale, feature, key_feature, feature_eps, causal, has_direction, normalize, eps, surroundings,
         bound] = d;
  FlipTable(flips, table, {"BGFV", "BGVF"});
  const std::vector<Feature> features = {
      Feature::kIdentity,  Feature::kElu1,      Feature::kRelu,   Feature::kReluSquared,
      Feature::kExp,       Feature::kSoftmax,   Feature::kTaylor, Feature::kSoftmaxOfTokens,
      Feature::kRandomExp, Feature::kRandomRelu};
  flips.To("feature", feature, features);
  // Without key_feature keys have the feature of queries.
  std::vector<std::optional<Feature>> key_features = {key_feature ? std::nullopt : key_feature};
  for (const Feature of_keys : features) {
    if (key_feature || of_keys != feature) key_features.push_back(of_keys);
  }
  flips.To("key_feature", key_feature, key_features);
  flips.Not("root_scale", root_scale);
  flips.Not("causal", causal);
  flips.Not("normalize", normalize);
  flips.More("eps", eps);
  flips.More("feature_eps", feature_eps);
  flips.More("bound", bound);
  return flips.list;
}

// Counts of operations are not flags.
std::vector<Flip<scanning::Definition>> FlipsOf(scanning::Definition d) {
  using scan::Method;
  using scan::Rule;
  Flips<scanning::Definition> flips(d);
  auto& [table, rule, flops, kernels, softplus, silu, c, bilinear, method] = d;
  FlipTable(flips, table, {"BD", "BDN", "BDN2"});
  flips.To("rule", rule, {Rule::kSelective, Rule::kDecay, Rule::kGates, Rule::kTaps, Rule::kModes, Rule::kHeads});
  flips.To("kernels", kernels, {nullptr});
  flips.Not("softplus", softplus);
  flips.Not("silu", silu);
  flips.More("c", c);
  flips.Not("bilinear", bilinear);
  flips.To("method", method, {Method::kAuto, Method::kRecurrent, Method::kConvolution});
  return flips.list;
}

// Allows every result an error that is far below the effect of a flag and far above rounding in float64. A result that
// the reference leaves out is refused.
void Loosen(mechanism::Mechanism& m) {
  using Reference = std::function<void(const mechanism::Problem&, mechanism::Views, mechanism::Views)>;
  const auto loosened = [](const Reference& call, bool backward) -> Reference {
    return [=](const mechanism::Problem& p, mechanism::Views expected, mechanism::Views tolerance) {
      call(p, expected, {});
      for (size_t i = backward ? p.num_forward : 0; i < (backward ? p.outputs.size() : p.num_forward); ++i) {
        // Gradients of constants have the dtype of the constants.
        const DType dtype = p.outputs[i].dtype;
        const double share = dtype == DType::kF64 ? 1e-9 : dtype == DType::kF32 ? 1e-6 : 0x1p-7;
        std::vector<int64_t> at(expected[i].sizes().size());
        if (expected[i].num_elements() == 0) continue;
        do {
          const double value = GetElement(expected[i], at);
          if (std::isnan(value)) throw InternalError("the reference leaves out " + p.outputs[i].name);
          SetElement(tolerance[i], at, share * (1 + std::abs(value)));
        } while (NextIndex(expected[i].sizes(), at));
      }
    };
  };
  m.reference = loosened(m.reference, false);
  m.backward_reference = loosened(m.backward_reference, true);
}

// The problems' kernels become the passes of an engine with the definition `d`.
template <class Definition, class Own>
void UsePasses(const Definition& d, const Own& own, bool has_step, mechanism::Mechanism& m) {
  using Passes = mechanism::Passes<Definition>;
  const auto table = std::make_shared<const mechanism::Mechanism>(m);
  const auto with = [own](const mechanism::Problem& p) { return mechanism::With(own, p.options); };
  m.forward = [=](Context& ctx, const mechanism::Problem& p, mechanism::Views views) {
    Passes::Forward("forward", ctx, d, ArgumentsOf(p), with(p), ForwardResults(*table, p, views));
  };
  m.backward = [=](Context& ctx, const mechanism::Problem& p, mechanism::Views views) {
    Passes::Backward("backward", ctx, d, ArgumentsOf(p), with(p), BackwardResults(*table, p, views));
  };
  if (!has_step) return;
  m.step = [=](Context& ctx, const mechanism::Problem& p, mechanism::Views views) {
    mechanism::ResultViews out = ForwardResults(*table, p, views);
    out.o = mechanism::WithoutTokens(table->o_axes, out.o);
    const mechanism::TokenArguments token(*table, p);
    Passes::Step("step", ctx, d, {.tensors = token.tensors}, with(p), out);
  };
}

template <class Structs, class Own>
Subject<recurrent::Definition> Recurrence(const std::string& name, const recurrent::Definition& definition,
                                          const Own& own, const mechanism::CaseFunctions<Structs, Own>& functions) {
  const auto problem = [=](const recurrent::Definition& d, const recurrent::Definition& of_problems, uint64_t seed) {
    recurrent::Mechanism m = recurrent::Bound<Structs, Own>(name, of_problems, own, functions);
    UsePasses(d, own, true, m.of_problems);
    Loosen(m.of_problems);
    return recurrent::RandomCase(m, DType::kF64, seed);
  };
  return {name, definition, problem};
}

template <class Structs, class Own>
Subject<scanning::Definition> Scan(const std::string& name, const scanning::Definition& definition, const Own& own,
                                   const mechanism::CaseFunctions<Structs, Own>& functions) {
  const auto problem = [=](const scanning::Definition& d, const scanning::Definition& of_problems, uint64_t seed) {
    scanning::Mechanism m = scanning::Bound<Structs, Own>(name, of_problems, own, functions);
    UsePasses(d, own, d.has_state(), m.of_problems);
    Loosen(m.of_problems);
    return scanning::RandomCase(m, DType::kF64, seed);
  };
  return {name, definition, problem};
}

// Steps are made from definitions, so that the functions of all mechanisms have one form here.
#define HEED_SUBJECT(kind, name, own, text)                                                                       \
  kind<name::Structs, name::Options>(#name text, name::DefinitionOf(own), own,                                    \
                                     {{&name::Forward, &name::Backward, &name::Explain, &name::BackwardWorkspace, \
                                       &name::Reference, &name::BackwardReference}})

// Problems have all tensors: the decays that retention has by default are not the engine's.
recurrent::Definition AllGiven(recurrent::Definition definition) {
  static std::deque<std::vector<mechanism::Tensor>> kept;
  auto& tensors = kept.emplace_back(definition.table.tensors.begin(), definition.table.tensors.end());
  for (mechanism::Tensor& tensor : tensors) tensor.optional = false;
  definition.table.tensors = tensors;
  return definition;
}

std::vector<Subject<recurrent::Definition>> Recurrences() {
  linear_attention::Options identity, not_causal;
  identity.feature_map = linear_attention::FeatureMap::kIdentity;
  identity.normalize = false;
  not_causal.feature_map = linear_attention::FeatureMap::kSoftmax;
  not_causal.causal = false;
  performer::Options causal, relu;
  causal.causal = true;
  relu.kernel = performer::Kernel::kRelu;
  return {HEED_SUBJECT(Recurrence, gla, gla::Options(), ""),
          HEED_SUBJECT(Recurrence, hgrn2, hgrn2::Options(), ""),
          HEED_SUBJECT(Recurrence, lightning, lightning::Options(), ""),
          HEED_SUBJECT(Recurrence, mlstm, mlstm::Options(), ""),
          Recurrence<retention::Structs, retention::Options>(
              "retention", AllGiven(retention::DefinitionOf({})), {},
              {&retention::Forward, &retention::Backward, &retention::Explain, &retention::BackwardWorkspace,
               &retention::Reference, &retention::BackwardReference}),
          HEED_SUBJECT(Recurrence, rwkv4, rwkv4::Options(), ""),
          HEED_SUBJECT(Recurrence, rwkv5, rwkv5::Options(), ""),
          HEED_SUBJECT(Recurrence, rwkv6, rwkv6::Options(), ""),
          HEED_SUBJECT(Recurrence, simple_gla, simple_gla::Options(), ""),
          HEED_SUBJECT(Recurrence, delta_rule, delta_rule::Options(), ""),
          HEED_SUBJECT(Recurrence, gated_delta_rule, gated_delta_rule::Options(), ""),
          HEED_SUBJECT(Recurrence, gdn2, gdn2::Options(), ""),
          HEED_SUBJECT(Recurrence, comba, comba::Options(), ""),
          HEED_SUBJECT(Recurrence, delta_product, delta_product::Options(), ""),
          HEED_SUBJECT(Recurrence, kda, kda::Options(), ""),
          HEED_SUBJECT(Recurrence, precond_delta_rule, precond_delta_rule::Options(), ""),
          HEED_SUBJECT(Recurrence, precond_kda, precond_kda::Options(), ""),
          HEED_SUBJECT(Recurrence, rwkv7, rwkv7::Options(), ""),
          HEED_SUBJECT(Recurrence, based, based::Options(), ""),
          HEED_SUBJECT(Recurrence, linear_attention, linear_attention::Options(), ""),
          HEED_SUBJECT(Recurrence, linear_attention, identity, " identity"),
          HEED_SUBJECT(Recurrence, linear_attention, not_causal, " softmax not causal"),
          HEED_SUBJECT(Recurrence, performer, performer::Options(), ""),
          HEED_SUBJECT(Recurrence, performer, causal, " causal"),
          HEED_SUBJECT(Recurrence, performer, relu, " relu"),
          HEED_SUBJECT(Recurrence, efficient_attention, efficient_attention::Options(), "")};
}

std::vector<Subject<scanning::Definition>> Scans() {
  selective_scan::Options softplus;
  softplus.delta_softplus = true;
  s4d::Options bilinear;
  bilinear.discretization = s4d::Discretization::kBilinear;
  causal_conv1d::Options silu;
  silu.activation = causal_conv1d::Activation::kSilu;
  return {HEED_SUBJECT(Scan, hgrn, hgrn::Options(), ""),
          HEED_SUBJECT(Scan, rg_lru, rg_lru::Options(), ""),
          HEED_SUBJECT(Scan, selective_scan, selective_scan::Options(), ""),
          HEED_SUBJECT(Scan, selective_scan, softplus, " softplus"),
          HEED_SUBJECT(Scan, s4d, s4d::Options(), ""),
          HEED_SUBJECT(Scan, s4d, bilinear, " bilinear"),
          HEED_SUBJECT(Scan, h3, h3::Options(), ""),
          HEED_SUBJECT(Scan, long_convolution, long_convolution::Options(), ""),
          HEED_SUBJECT(Scan, causal_conv1d, causal_conv1d::Options(), ""),
          HEED_SUBJECT(Scan, causal_conv1d, silu, " silu")};
}

// The error of the first random problem that is refused or has a wrong result; empty if none exists.
template <class Definition>
std::string Disagreement(const Subject<Definition>& subject, const Definition& of_kernels,
                         const Definition& of_problems) {
  Context ctx(1);
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    try {
      const Comparison result = Compare(subject.problem(of_kernels, of_problems, seed), ctx);
      if (!result.ok) return result.message;
    } catch (const std::exception& error) {
      return error.what();
    }
  }
  return "";
}

// A definition that no mechanism has may lead to invalid reads, so it runs in a process of its own; a crash counts as
// detected.
template <class Definition>
bool IsSeen(const Subject<Definition>& subject, const Definition& of_kernels, const Definition& of_problems) {
  return StatusOfFork([&] {
           if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(2);
           _exit(Disagreement(subject, of_kernels, of_problems).empty() ? 0 : 1);
         }) != 0;
}

// Flips that no problem detects if everything but the reference uses them, and the reason why that is right.
struct Exception {
  const char* flips;  // a regular expression of names
  const char* why;
  // The flip removes something that a call may leave out, so that no problem here has it; the mechanism's own problems
  // detect it. If false, kernels ignore the flag, which these problems show too.
  bool takes_away = false;
};

#define HEED_DELTA_RULES \
  "(comba|delta_product|delta_rule|gated_delta_rule|gdn2|kda|precond_delta_rule|precond_kda|rwkv7)"

constexpr Exception kOfRecurrences[] = {
    {"(?!performer feature_eps).* feature_eps=1", "random exponentials alone have it, where queries see all keys"},
    {"(?!precond_).* bound=1", "no keys are preconditioned"},
    {"(?!based|mlstm|precond_|linear_attention (eps|softmax)).* eps=1",
     "there is no denominator, or that of random features, to which nothing is added"},
    {HEED_DELTA_RULES " (feature=[1-57]|key_feature=[1-9])", "delta rules take queries and keys as they are"},
    {"hgrn2 key_feature=[1-9]", "keys are complements of decays"},
    {"performer (causal key_feature=[1-9]|relu key_feature=[1-79])", "queries and keys have the same random features"},
    {"rwkv4 (root_scale=1|feature=[1-9]|key_feature=[1-9])", "a channel has no query and no scale"},
    {HEED_DELTA_RULES " normalize=1", "delta rules have no normaliser, and their tables no state of one"},
    {"gdn2 roles of v and write", "their product is written"},
    {"(linear_attention softmax not causal|performer|performer relu) axes of S .*",
     "there are no states without causality"},
    {"(" HEED_DELTA_RULES " causal|rwkv4 (causal|normalize))=0", "states may be left out", true},
};

constexpr Exception kOfScans[] = {
    {"(?!selective_scan).* softplus=1", "an option of selective scans"},
    {"(?!causal_conv1d).* silu=1", "an option of short convolutions"},
    {"(?!rg_lru).* c=1", "an option of RG-LRU"},
    {"(?!s4d|h3).* bilinear=1", "an option of complex modes"},
    {"(?!selective_scan.* method=2).* method=[12]", "two ways to the same numbers, where there are complex modes"},
    {"causal_conv1d.* rule=[034]", "it has kernels of its own"},
};

template <class Definition>
void ExpectThatFlipsAreSeen(const std::vector<Subject<Definition>>& subjects, std::span<const Exception> exceptions) {
  std::vector<std::regex> patterns;
  for (const Exception& exception : exceptions) patterns.emplace_back(exception.flips);
  std::vector<bool> used(exceptions.size());
  for (const Subject<Definition>& subject : subjects) {
    ASSERT_EQ(Disagreement(subject, subject.definition, subject.definition), "") << subject.name;
    for (const Flip<Definition>& flip : FlipsOf(subject.definition)) {
      const std::string name = subject.name + " " + flip.name;
      size_t row = 0;
      while (row < exceptions.size() && !std::regex_match(name, patterns[row])) ++row;
      if (row == exceptions.size()) {
        EXPECT_TRUE(IsSeen(subject, flip.definition, flip.definition)) << name;
      } else {
        used[row] = true;
        EXPECT_EQ(IsSeen(subject, flip.definition, subject.definition), exceptions[row].takes_away) << name;
      }
    }
  }
  for (size_t row = 0; row < exceptions.size(); ++row) EXPECT_TRUE(used[row]) << "no " << exceptions[row].flips;
}

TEST(DefinitionFlagsTest, AWrongFlagOfARecurrenceIsSeen) {
  if (!kCanFork) GTEST_SKIP() << kWhyNoFork;
  ExpectThatFlipsAreSeen(Recurrences(), kOfRecurrences);
}

TEST(DefinitionFlagsTest, AWrongFlagOfAScanIsSeen) {
  if (!kCanFork) GTEST_SKIP() << kWhyNoFork;
  ExpectThatFlipsAreSeen(Scans(), kOfScans);
}

}  // namespace
}  // namespace heed
