// Bindings of heed.precond_delta_rule, heed.precond_delta_rule_backward and heed.precond_delta_rule_step.
#include "docstrings/precond_delta_rule.h"
#include "heed/ops/delta/precond_delta_rule/precond_delta_rule_internal.h"
#include "python/mechanism/describe.h"

namespace heed::precond_delta_rule {
namespace {

Options Own(const binding::Settings& settings) {
  Options own;
  own.bound = settings.Get<double>("bound");
  own.eps = settings.Get<double>("eps");
  return own;
}

}  // namespace

void Bind(nanobind::module_& m) {
  binding::Bind<Structs, Options>(
      m, {.name = "precond_delta_rule", .settings = {{"bound", 1.5}, {"eps", 1e-6}}, .docs = doc::kDocs},
      DefinitionOf({}), HEED_FUNCTIONS, &Own);
}

}  // namespace heed::precond_delta_rule
