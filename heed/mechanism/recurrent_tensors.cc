// The tensors and states of all recurrent mechanisms, in one table.
#include <string_view>

#include "heed/mechanism/recurrent_internal.h"

namespace heed::recurrent {
namespace {

const char* DecayAxes(DecayShape shape) {
  switch (shape) {
    case DecayShape::kNone: return "";
    case DecayShape::kHead: return "G";
    case DecayShape::kHeadKey: return "GK";
    case DecayShape::kToken: return "BTG";
    case DecayShape::kKey: return "BTGK";
  }
  return "";
}

// Every tensor that some mechanism takes, in the order of messages and results, with the mechanisms that take it.
struct Row {
  Tensor tensor;
  bool (*exists)(const Definition& d);
};
constexpr Row kRows[] = {
    {{.name = "q", .axes = "BTHK", .input = &Inputs::q, .step = &StepInputs::q, .gradient = &Gradients::dq},
     [](const Definition&) { return true; }},
    {{.name = "k", .axes = "BTHK", .input = &Inputs::k, .step = &StepInputs::k, .gradient = &Gradients::dk},
     [](const Definition& d) { return !d.complement_keys && !d.channels; }},
    {{.name = "v", .axes = "BTGV", .input = &Inputs::v, .step = &StepInputs::v, .gradient = &Gradients::dv},
     [](const Definition&) { return true; }},
    {{.name = "projection",
      .axes = "MK",
      .input = &Inputs::projection,
      .step = &StepInputs::projection,
      .gradient = &Gradients::dprojection},
     [](const Definition& d) { return recurrence::IsRandom(d.feature); }},
    {{.name = "log_decay",
      .axes = "BTG",
      .input = &Inputs::log_decay,
      .step = &StepInputs::log_decay,
      .gradient = &Gradients::dlog_decay,
      .type = Tensor::kWide,
      .values = Tensor::kDecays},
     [](const Definition& d) { return d.decay != DecayShape::kNone; }},
    {{.name = "log_decay_v",
      .axes = "BTGV",
      .input = &Inputs::log_decay_v,
      .step = &StepInputs::log_decay_v,
      .gradient = &Gradients::dlog_decay_v,
      .type = Tensor::kWide,
      .values = Tensor::kDecays,
      .optional = true},
     [](const Definition& d) { return d.value_decay; }},
    {{.name = "u",
      .axes = "GK",
      .input = &Inputs::u,
      .step = &StepInputs::u,
      .gradient = &Gradients::du,
      .type = Tensor::kAnyFloat},
     [](const Definition& d) { return d.bonus || d.channels; }},
    {{.name = "beta",
      .axes = "BTG",
      .input = &Inputs::beta,
      .step = &StepInputs::beta,
      .gradient = &Gradients::dbeta,
      .type = Tensor::kWide,
      .values = Tensor::kFractions},
     [](const Definition& d) { return d.beta; }},
    {{.name = "p",
      .axes = "BTHK",
      .input = &Inputs::p,
      .step = &StepInputs::p,
      .gradient = &Gradients::dp,
      .values = Tensor::kNearlyKeys},
     [](const Definition& d) { return d.read_key; }},
    {{.name = "erase",
      .axes = "BTGK",
      .input = &Inputs::erase,
      .step = &StepInputs::erase,
      .gradient = &Gradients::derase,
      .type = Tensor::kWide,
      .values = Tensor::kFractions},
     [](const Definition& d) { return d.erase_and_write; }},
    {{.name = "write",
      .axes = "BTGV",
      .input = &Inputs::write,
      .step = &StepInputs::write,
      .gradient = &Gradients::dwrite,
      .type = Tensor::kWide,
      .values = Tensor::kFractions},
     [](const Definition& d) { return d.erase_and_write; }},
    {{.name = "a",
      .axes = "BTHK",
      .input = &Inputs::a,
      .step = &StepInputs::a,
      .gradient = &Gradients::da,
      .values = Tensor::kNegativeKeys},
     [](const Definition& d) { return d.delta == recurrence::Delta::kBeforeDecay; }},
    {{.name = "b",
      .axes = "BTHK",
      .input = &Inputs::b,
      .step = &StepInputs::b,
      .gradient = &Gradients::db,
      .values = Tensor::kNearlyKeys},
     [](const Definition& d) { return d.delta == recurrence::Delta::kBeforeDecay; }},
    {{.name = "i",
      .axes = "BTG",
      .input = &Inputs::i,
      .step = &StepInputs::i,
      .gradient = &Gradients::di,
      .type = Tensor::kWide},
     [](const Definition& d) { return d.exp_gates; }},
    {{.name = "f",
      .axes = "BTG",
      .input = &Inputs::f,
      .step = &StepInputs::f,
      .gradient = &Gradients::df,
      .type = Tensor::kWide,
      .values = Tensor::kOpenGates},
     [](const Definition& d) { return d.exp_gates; }},
};

// The axes of a tensor whose tokens have several writes.
const char* AxesOfWrites(const Tensor& tensor) {
  if (tensor.input == &Inputs::k) return "BTNHK";
  if (tensor.input == &Inputs::v) return "BTNGV";
  if (tensor.input == &Inputs::beta) return "BTNG";
  return tensor.axes;
}

}  // namespace

Tensors::Tensors(const Definition& d) {
  for (const Row& row : kRows) {
    if (!row.exists(d)) continue;
    Tensor tensor = row.tensor;
    if (tensor.input == &Inputs::q) tensor.name = d.query_name;
    if (tensor.input == &Inputs::k) tensor.name = d.key_name;
    if (tensor.input == &Inputs::k && d.delta != recurrence::Delta::kNone) {
      tensor.values = Tensor::kUnit;
    }
    if (tensor.input == &Inputs::v) tensor.name = d.value_name;
    if (tensor.input == &Inputs::log_decay) {
      tensor.axes = DecayAxes(d.decay);
      if (IsConstant(d.decay)) tensor.type = Tensor::kAnyFloat;
      tensor.optional = d.several_writes;
    }
    if (d.several_writes) tensor.axes = AxesOfWrites(tensor);
    if (d.channels) tensor.axes = tensor.over_tokens() ? "BTC" : "C";
    tensors_[count_++] = tensor;
  }
}

Tensors Tensors::NotOf(const Definition& d) {
  Tensors others;
  for (const Row& row : kRows) {
    if (!row.exists(d)) others.tensors_[others.count_++] = row.tensor;
  }
  return others;
}

const Tensor* Tensors::Find(std::string_view name) const {
  for (const Tensor& tensor : *this) {
    if (name == tensor.name) return &tensor;
  }
  return nullptr;
}

const Tensor* Tensors::Any(std::string_view name) {
  for (const Row& row : kRows) {
    if (name == row.tensor.name) return &row.tensor;
  }
  return nullptr;
}

std::array<StateTensor, 3> StateTensors(const Definition& d) {
  const char* const S = d.channels ? "BC" : d.value_first ? "BGVF" : "BGFV";
  return {{{"", S, &ConstState::S, &State::S, d.causal},
           {"_z", d.channels ? "BC" : "BGF", &ConstState::z, &State::z, d.causal && d.normalize},
           {"_m", d.channels ? "BC" : "BG", &ConstState::m, &State::m, HasMaximum(d)}}};
}

}  // namespace heed::recurrent
