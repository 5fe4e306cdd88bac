// Wrong calls of the backward pass of attention: the message of each, and that nothing has been written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/ops/exact/attention/cases/attention_variations_case.h"

namespace heed::attention {
namespace {

using testing::HasSubstr;

// A valid call: q [2,3,4,8], k [2,5,2,8], v [2,5,2,6], all options that have a gradient, all gradients; or packed with
// 6 and 10 rows and no bias.
struct Call {
  Problem p;
  BackwardInputs in;
  Gradients out;

  TensorView New(DType dtype, std::vector<int64_t> sizes) {
    p.memory.emplace_back(dtype, sizes);
    return p.memory.back().view();
  }
  TensorView New(DType dtype, std::vector<int64_t> sizes, std::vector<int64_t> strides) {
    p.memory.emplace_back(dtype, sizes, strides, Placement::kBeforeGuard);
    return p.memory.back().view();
  }
};

Call RightCall(bool packed) {
  Call c;
  c.p = MakeProblem(DType::kF32, {2, 3, 5, 4, 2, 8, 6});
  if (packed) c.p = *Packed(c.p);
  c.p.options.sinks = KeepFloats(c.p, {1, 2, 3, 4});
  c.p.options.alibi = KeepFloats(c.p, {1, 2, 3, 4});
  c.p.options.relative_bias = Keep(c.p, Buffer(DType::kF32, {4, 7}).FillConstant(1));
  c.p.options.causal = true;
  const std::vector<int64_t> tokens = packed ? std::vector<int64_t>{10, 4} : std::vector<int64_t>{2, 5, 4};
  c.p.options.log_decay = Keep(c.p, Buffer(DType::kF32, tokens).FillConstant(-1));
  if (!packed) c.p.options.bias = Keep(c.p, Buffer(DType::kF16, {4, 3, 5}).FillNormal(1));
  c.p = WithGradients(c.p, 2);
  const TensorView o = c.New(DType::kF32, c.p.o.sizes), lse = c.New(DType::kF32, c.p.lse.sizes);
  Context ctx(1);
  Forward(ctx, c.p.in, c.p.options, {o, lse});
  c.in = {c.p.in.q, c.p.in.k, c.p.in.v, o, lse, c.p.d_o, c.p.d_lse};
  std::vector<TensorView> views;
  for (const OutputSpec& spec : c.p.gradients) {
    views.push_back(c.New(spec.dtype, spec.sizes));
    c.p.memory.back().FillConstant(0.25);
  }
  c.out = ToGradients(c.p.gradients, views);
  return c;
}

struct Mistake {
  std::string name;
  std::function<void(Call&)> make;
  std::string message;  // after "attention::Backward: "
  bool packed = false;
};

void PrintTo(const Mistake& mistake, std::ostream* os) { *os << mistake.name; }

void AddInputMistakes(std::vector<Mistake>& all) {
  struct Input {
    const char* name;
    ConstTensorView BackwardInputs::* member;
    std::vector<int64_t> shape;
    std::vector<int64_t> packed_shape;
    bool rows, optional;
  };
  const Input inputs[] = {{"o", &BackwardInputs::o, {2, 3, 4, 6}, {6, 4, 6}, true, false},
                          {"lse", &BackwardInputs::lse, {2, 4, 3}, {4, 6}, false, false},
                          {"d_o", &BackwardInputs::d_o, {2, 3, 4, 6}, {6, 4, 6}, true, false},
                          {"d_lse", &BackwardInputs::d_lse, {2, 4, 3}, {4, 6}, false, true}};
  for (const Input& input : inputs) {
    const auto member = input.member;
    const auto shape = input.shape, packed_shape = input.packed_shape;
    const std::string name = input.name, right = ShapeString(shape);
    const auto add = [&](const char* what, std::function<void(Call&)> make, std::string message, bool packed = false) {
      all.push_back({name + what, std::move(make), name + " " + message, packed});
    };
    if (!input.optional) {
      add("IsAbsent", [member](Call& c) { c.in.*member = {}; }, "is absent, expected a tensor");
    }
    add(
        "HasAnotherDType", [member, shape](Call& c) { c.in.*member = c.New(DType::kF64, shape); },
        "has dtype f64, expected f32");
    add(
        "IsOfSixteenBits", [member, shape](Call& c) { c.in.*member = c.New(DType::kBF16, shape); },
        "has dtype bf16, expected f32");
    add(
        "HasAnotherRank", [member](Call& c) { c.in.*member = c.New(DType::kF32, {3, 4}); },
        "has shape [3,4], expected " + right);
    add(
        "HasAnotherShape",
        [member, shape](Call& c) {
          std::vector<int64_t> other = shape;
          ++other.back();
          c.in.*member = c.New(DType::kF32, other);
        },
        "has shape [");
    add(
        "IsNotPacked", [member, shape](Call& c) { c.in.*member = c.New(DType::kF32, shape); },
        "has shape " + right + ", expected " + ShapeString(packed_shape), true);
    add(
        "HasNoData", [member, shape](Call& c) { c.in.*member = {nullptr, DType::kF32, shape}; },
        "has no data, expected a pointer to " + right + " elements");
    add(
        "IsMisaligned",
        [member, shape](Call& c) {
          const TensorView bytes = c.New(DType::kF32, {1000});
          c.in.*member = {bytes.as<char>() + 2, DType::kF32, shape};
        },
        "has a misaligned address, expected a multiple of 4 bytes");
    add(
        "IsOnAnotherDevice",
        [member, shape](Call& c) {
          c.in.*member = {(c.in.*member).data(), DType::kF32, shape, Device{DeviceType::kCuda, 0}};
        },
        "is on cuda:0, expected the CPU");
    if (input.rows) {
      add(
          "HasStridedRows", [member, shape](Call& c) { c.in.*member = c.New(DType::kF32, shape, {300, 100, 20, 2}); },
          "has stride 2 on its last axis, expected 1 (contiguous rows)");
    }
    // Places a gradient in the same memory; dv is as large as the largest.
    all.push_back({"DvOverlaps_" + name,
                   [member](Call& c) {
                     // o is [2,3,4,6], lse [2,4,3]: both begin at the same address.
                     const TensorView memory = c.New(DType::kF32, {2, 5, 4, 6});
                     const ConstTensorView old = c.in.*member;
                     c.in.*member = {memory.data(), DType::kF32, old.sizes()};
                     c.out.dv = {memory.data(), DType::kF32, c.p.in.v.sizes()};
                   },
                   "dv overlaps " + name + ", expected memory of its own"});
  }
}

void AddGradientMistakes(std::vector<Mistake>& all) {
  struct Output {
    const char *name, *of;
    TensorView Gradients::* member;
    std::vector<int64_t> shape;
    const char *dtype, *other_dtype;
    DType other;
  };
  const Output outputs[] = {
      {"dq", "q", &Gradients::dq, {2, 3, 4, 8}, "f32", "f64", DType::kF64},
      {"dk", "k", &Gradients::dk, {2, 5, 2, 8}, "f32", "bf16", DType::kBF16},
      {"dv", "v", &Gradients::dv, {2, 5, 2, 6}, "f32", "f16", DType::kF16},
      {"dbias", "bias", &Gradients::dbias, {4, 3, 5}, "f16", "f32", DType::kF32},
      {"dsinks", "sinks", &Gradients::dsinks, {4}, "f32", "f64", DType::kF64},
      {"dalibi", "alibi", &Gradients::dalibi, {4}, "f32", "i32", DType::kI32},
      {"drelative_bias", "relative_bias", &Gradients::drelative_bias, {4, 7}, "f32", "f64", DType::kF64},
      {"dlog_decay", "log_decay", &Gradients::dlog_decay, {2, 5, 4}, "f32", "f64", DType::kF64}};
  for (const Output& output : outputs) {
    const auto member = output.member;
    const auto shape = output.shape;
    const std::string name = output.name, right = ShapeString(shape);
    const DType dtype = name == "dbias" ? DType::kF16 : DType::kF32;
    const auto add = [&](const char* what, std::function<void(Call&)> make, std::string message) {
      all.push_back({name + what, std::move(make), name + " " + message});
    };
    add(
        "HasAnotherDType", [member, shape, other = output.other](Call& c) { c.out.*member = c.New(other, shape); },
        std::string("has dtype ") + output.other_dtype + ", expected " + output.dtype);
    add(
        "HasAnotherShape",
        [member, shape, dtype](Call& c) {
          std::vector<int64_t> other = shape;
          ++other[0];
          c.out.*member = c.New(dtype, other);
        },
        "has shape [" + std::to_string(shape[0] + 1));
    add(
        "HasAnotherRank",
        [member, shape, dtype](Call& c) {
          std::vector<int64_t> other = shape;
          other.insert(other.begin(), 1);
          c.out.*member = c.New(dtype, other);
        },
        "has shape [1,");
    add(
        "HasNoData", [member, shape, dtype](Call& c) { c.out.*member = {nullptr, dtype, shape}; },
        "has no data, expected a pointer to " + right + " elements");
    add(
        "IsOnAnotherDevice",
        [member, shape, dtype](Call& c) {
          c.out.*member = {(c.out.*member).data(), dtype, shape, Device{DeviceType::kCuda, 1}};
        },
        "is on cuda:1, expected the CPU");
    add(
        "HasAStrideOnItsLastAxis",
        [member, shape, dtype](Call& c) {
          std::vector<int64_t> strides = {300, 60, 20, 2};
          strides.erase(strides.begin(), strides.end() - static_cast<int>(shape.size()));
          c.out.*member = c.New(dtype, shape, strides);
        },
        "has stride 2 on its last axis, expected 1");
    if (shape.size() > 1) {
      add(
          "OverlapsItself",
          [member, shape, dtype](Call& c) {
            std::vector<int64_t> strides = {300, 60, 20, 1};
            strides.erase(strides.begin(), strides.end() - static_cast<int>(shape.size()));
            strides[0] = 0;
            c.out.*member = TensorView(c.New(DType::kF32, {2000}).data(), dtype, shape, strides);
          },
          "has strides [0,");
    }
    // A gradient may overlap neither its own input nor any other input.
    add(
        "OverlapsQ",
        [member, shape, dtype](Call& c) {
          const TensorView memory = c.New(DType::kF32, {2, 3, 4, 8});
          c.in.q = memory;
          const TensorView view(memory.data(), dtype, shape);
          c.out.*member = view;
        },
        "overlaps q, expected memory of its own");
    if (name != "dq") {
      add(
          "OverlapsDq", [member, shape, dtype](Call& c) { c.out.*member = {c.out.dq.data(), dtype, shape}; },
          "overlaps dq, expected memory of its own");
    }
    if (std::string(output.of).size() == 1) continue;
    const auto option = name == "dbias"            ? &Options::bias
                        : name == "dsinks"         ? &Options::sinks
                        : name == "dalibi"         ? &Options::alibi
                        : name == "drelative_bias" ? &Options::relative_bias
                                                   : &Options::log_decay;
    all.push_back({name + "OfNothing", [option](Call& c) { c.p.options.*option = {}; },
                   name + " is asked for, expected " + output.of + " with it"});
    all.push_back({name + "OverlapsWhatItIsOf",
                   [member, option, shape, dtype](Call& c) { c.p.options.*option = c.out.*member; },
                   name + " overlaps " + output.of + ", expected memory of its own"});
  }
  all.push_back({"DkIsNotPacked", [](Call& c) { c.out.dk = c.New(DType::kF32, {2, 5, 2, 8}); },
                 "dk has shape [2,5,2,8], expected [10,2,8]", true});
}

// Mistakes in arguments of the forward call have their own tests; two of them show that the backward call checks for
// them.
void AddForwardMistakes(std::vector<Mistake>& all) {
  all.push_back({"VIsAbsent", [](Call& c) { c.in.v = {}; }, "v is absent, expected a tensor"});
  all.push_back({"DropoutIsTwo", [](Call& c) { c.p.options.dropout = 2; }, "dropout is 2, expected 0 <= dropout < 1"});
}

std::vector<Mistake> Mistakes() {
  std::vector<Mistake> all;
  AddInputMistakes(all);
  AddGradientMistakes(all);
  AddForwardMistakes(all);
  return all;
}

std::vector<std::vector<uint8_t>> Snapshot(const Problem& p) {
  std::vector<std::vector<uint8_t>> bytes;
  for (const Buffer& b : p.memory) bytes.emplace_back(b.bytes().begin(), b.bytes().end());
  return bytes;
}

class BackwardMistake : public testing::TestWithParam<Mistake> {};

INSTANTIATE_TEST_SUITE_P(Arguments, BackwardMistake, testing::ValuesIn(Mistakes()),
                         [](const auto& value) { return value.param.name; });

TEST_P(BackwardMistake, IsNamedAndNothingIsWritten) {
  Call c = RightCall(GetParam().packed);
  GetParam().make(c);
  const auto before = Snapshot(c.p);
  Context ctx(1);
  try {
    Backward(ctx, c.in, c.p.options, c.out);
    ADD_FAILURE() << "did not throw";
  } catch (const InvalidArgument& e) {
    EXPECT_THAT(e.what(), HasSubstr("attention::Backward: " + GetParam().message));
  }
  EXPECT_EQ(Snapshot(c.p), before);
}

TEST(BackwardErrors, TheCallsThatAreSpoiledAreRight) {
  for (const bool packed : {false, true}) {
    const Call c = RightCall(packed);
    Context ctx(1);
    EXPECT_NO_THROW(Backward(ctx, c.in, c.p.options, c.out));
    EXPECT_NO_THROW(BackwardReference(c.in, c.p.options, c.out));
    EXPECT_NO_THROW(BackwardWorkspace(ctx, c.in, c.p.options, c.out));
  }
}

TEST(BackwardErrors, EveryEntryPointNamesItself) {
  Call c = RightCall(false);
  c.out.dk = c.New(DType::kF32, {1, 5, 2, 8});
  Context ctx(1);
  const auto message = [&](const auto& call) -> std::string {
    try {
      call();
    } catch (const InvalidArgument& e) {
      return e.what();
    }
    return "no error";
  };
  const std::string what = ": dk has shape [1,5,2,8], expected [2,5,2,8]";
  EXPECT_EQ(message([&] { Backward(ctx, c.in, c.p.options, c.out); }), "attention::Backward" + what);
  EXPECT_EQ(message([&] { BackwardReference(c.in, c.p.options, c.out); }), "attention::BackwardReference" + what);
  EXPECT_EQ(message([&] { BackwardWorkspace(ctx, c.in, c.p.options, c.out); }), "attention::BackwardWorkspace" + what);
}

// The reference may write f64 beside inputs of other dtypes; the kernels may not.
TEST(BackwardErrors, TheReferenceNeedsNeitherONorLse) {
  Call c = RightCall(false);
  c.in.o = c.in.lse = {};
  c.out.dk = c.New(DType::kF64, {2, 5, 2, 8});
  EXPECT_NO_THROW(BackwardReference(c.in, c.p.options, c.out));
}

}  // namespace
}  // namespace heed::attention
