// Bindings of heed.precond_kda, heed.precond_kda_backward and heed.precond_kda_step.
#include "docstrings/precond_kda.h"
#include "heed/ops/delta/precond_kda/precond_kda_internal.h"
#include "python/mechanism/describe.h"

namespace heed::precond_kda {
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
      m, {.name = "precond_kda", .settings = {{"bound", 1.5}, {"eps", 1e-6}}, .docs = doc::kDocs}, DefinitionOf({}),
      HEED_FUNCTIONS, &Own);
}

}  // namespace heed::precond_kda
