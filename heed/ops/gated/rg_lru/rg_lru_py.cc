// heed.rg_lru, heed.rg_lru_backward and heed.rg_lru_step.
#include "docstrings/rg_lru.h"
#include "heed/ops/gated/rg_lru/rg_lru.h"
#include "heed/ops/gated/rg_lru/rg_lru_internal.h"
#include "heed/ops/mechanism/scanning_py.h"

namespace heed::rg_lru {

void Bind(nanobind::module_& m) {
  scanning::Bind(m, {.name = "rg_lru",
                     .definition = DefinitionOf({}),
                     .num_positional = 4,
                     .settings = {{"c", Options().c}},
                     .bind = [](const scanning::Settings& settings) {
                       Options own;
                       own.c = std::get<double>(settings.at("c"));
                       return scanning::FunctionsOf<Options>(
                           own, {&Forward, &Backward, &Step, &Explain});
                     },
                     .docs = doc::kDocs});
}

}  // namespace heed::rg_lru
