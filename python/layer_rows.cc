// The functions behind PyTorch's operators heed::gated_rows and heed::token_shift, and their gradients.
#include "python/layer_rows.h"

#include <iterator>
#include <string>
#include <vector>

#include "heed/layers/gated_rows_internal.h"
#include "heed/layers/shifted_rows_internal.h"
#include "python/arguments.h"
#include "python/runtime.h"
#include "python/tensor_caster.h"
#include "python/torch_host.h"

namespace heed::python {
namespace {

constexpr char kOp[] = "gated_rows";

struct Call {
  Arrays arrays;
  layers::GatedRows in;
  ConstTensorView dy;
  TensorView y;
  layers::GatedRowsGradients gradients;
};
using Words = std::vector<Keyword<Call>>;

template <ConstTensorView layers::GatedRows::* kField>
void ReadRows(Call& call, const Argument& a) {
  call.in.*kField = call.arrays.Read(a, Kind::kFloat);
}
template <TensorView layers::GatedRowsGradients::* kField>
void WriteGradient(Call& call, const Argument& a) {
  call.gradients.*kField = call.arrays.Write(a, Kind::kFloat);
}

void ReadNorm(Call& call, const Argument& a) {
  const std::string name = ToChoice(a, {"none", "rms", "unit"});
  call.in.norm = name == "none"  ? layers::RowNorm::kNone
                 : name == "rms" ? layers::RowNorm::kRms
                                 : layers::RowNorm::kUnit;
}
void ReadActivation(Call& call, const Argument& a) {
  const std::string name = ToChoice(a, {"silu", "sigmoid", "log_sigmoid"});
  call.in.activation = name == "silu"      ? layers::RowGate::kSilu
                       : name == "sigmoid" ? layers::RowGate::kSigmoid
                                           : layers::RowGate::kLogSigmoid;
}

Words WordsOf(std::initializer_list<Keyword<Call>> before, std::initializer_list<Keyword<Call>> after) {
  Words words = before;
  words.insert(words.end(), {{"x", true, &ReadRows<&layers::GatedRows::x>},
                             {"gate", true, &ReadRows<&layers::GatedRows::gate>},
                             {"weight", true, &ReadRows<&layers::GatedRows::weight>},
                             {"norm", false, &ReadNorm},
                             {"activation", false, &ReadActivation},
                             {"gate_first", false, [](Call& c, const Argument& a) { c.in.gate_first = ToBool(a); }},
                             {"eps", false, [](Call& c, const Argument& a) { c.in.eps = ToFinite(a); }},
                             {"factor", false, [](Call& c, const Argument& a) { c.in.factor = ToFinite(a); }}});
  words.insert(words.end(), after);
  return words;
}

void RunForward(const nb::args& args) {
  static const Words words =
      WordsOf({}, {{"y", false, [](Call& c, const Argument& a) { c.y = c.arrays.Write(a, Kind::kFloat); }}});
  Call call;
  call.arrays.AllowTorch();
  Read<Call>(kOp, words, words.size(), args.ptr(), nullptr, call);
  Context& ctx = TorchContext(0);
  Compute(kOp, [&] { layers::GatedRowsForward(ctx, call.in, call.y); });
}

void RunBackward(const nb::args& args) {
  static const Words words = WordsOf({{"the gradient of the result", false,
                                       [](Call& c, const Argument& a) { c.dy = c.arrays.Read(a, Kind::kFloat); }}},
                                     {{"dx", true, &WriteGradient<&layers::GatedRowsGradients::dx>},
                                      {"dgate", true, &WriteGradient<&layers::GatedRowsGradients::dgate>},
                                      {"dweight", true, &WriteGradient<&layers::GatedRowsGradients::dweight>}});
  Call call;
  call.arrays.AllowTorch();
  Read<Call>(kOp, words, words.size(), args.ptr(), nullptr, call);
  Context& ctx = TorchContext(0);
  ComputeForTorch(kOp, [&] { layers::GatedRowsBackward(ctx, call.in, call.dy, call.gradients); });
}

// Token shift.

constexpr char kShift[] = "token_shift";

struct ShiftCall {
  Arrays arrays;
  layers::ShiftedRows in;
  ConstTensorView dy;
  TensorView y;
  layers::ShiftedRowsGradients gradients;
};

template <ConstTensorView layers::ShiftedRows::* kField>
void ReadShifted(ShiftCall& call, const Argument& a) {
  call.in.*kField = call.arrays.Read(a, Kind::kFloat);
}
template <TensorView layers::ShiftedRowsGradients::* kField>
void WriteShifted(ShiftCall& call, const Argument& a) {
  call.gradients.*kField = call.arrays.Write(a, Kind::kFloat);
}
constexpr Keyword<ShiftCall> kShiftResult = {
    "y", false, [](ShiftCall& c, const Argument& a) { c.y = c.arrays.Write(a, Kind::kFloat); }};
constexpr Keyword<ShiftCall> kShiftIncoming = {
    "the gradient of the result", false,
    [](ShiftCall& c, const Argument& a) { c.dy = c.arrays.Read(a, Kind::kFloat); }};
constexpr Keyword<ShiftCall> kX = {"x", false, &ReadShifted<&layers::ShiftedRows::x>},
                             kFirst = {"first", true, &ReadShifted<&layers::ShiftedRows::first>},
                             kMix = {"mix", false, &ReadShifted<&layers::ShiftedRows::mix>};
constexpr Keyword<ShiftCall> kShiftForward[] = {kX, kFirst, kMix, kShiftResult};
constexpr Keyword<ShiftCall> kShiftBackward[] = {kShiftIncoming,
                                                 kX,
                                                 kFirst,
                                                 kMix,
                                                 {"dx", true, &WriteShifted<&layers::ShiftedRowsGradients::dx>},
                                                 {"dfirst", true, &WriteShifted<&layers::ShiftedRowsGradients::dfirst>},
                                                 {"dmix", true, &WriteShifted<&layers::ShiftedRowsGradients::dmix>}};

void RunShift(const nb::args& args) {
  ShiftCall call;
  call.arrays.AllowTorch();
  Read<ShiftCall>(kShift, kShiftForward, std::size(kShiftForward), args.ptr(), nullptr, call);
  Context& ctx = TorchContext(0);
  Compute(kShift, [&] { layers::ShiftedRowsForward(ctx, call.in, call.y); });
}

void RunShiftBackward(const nb::args& args) {
  ShiftCall call;
  call.arrays.AllowTorch();
  Read<ShiftCall>(kShift, kShiftBackward, std::size(kShiftBackward), args.ptr(), nullptr, call);
  Context& ctx = TorchContext(0);
  ComputeForTorch(kShift, [&] { layers::ShiftedRowsBackward(ctx, call.in, call.dy, call.gradients); });
}

}  // namespace

void BindLayerRows(nb::module_& m) {
  m.def("_torch_gated_rows", &RunForward);
  m.def("_torch_gated_rows_backward", &RunBackward);
  m.def("_torch_token_shift", &RunShift);
  m.def("_torch_token_shift_backward", &RunShiftBackward);
}

}  // namespace heed::python
