// Properties of every layer: agreement with its reference, whatever the split, the batch, padding and threads; errors.
#include "heed/layers/layer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/core/os.h"
#include "heed/layers/layer_case.h"
#include "heed/layers/recurrence_internal.h"
#include "heed/layers/saved_state_internal.h"

namespace heed::layers {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr int64_t kT = 13, kMemory = 9;

// One of LayerCases(), which are made once, because each test is a process of its own.
struct Param {
  const LayerCase* layer;
};
void PrintTo(const Param& of, std::ostream* os) { *os << *of.layer; }

class LayerTest : public testing::TestWithParam<Param> {
 protected:
  const LayerCase& of() const { return *GetParam().layer; }

  static Buffer Random(std::vector<int64_t> sizes, uint64_t seed) {
    return Buffer(DType::kF32, sizes).FillNormal(seed);
  }

  // Begins a call with the memory that cross attention needs.
  Call Begin(int64_t batch) {
    Call call;
    if (of().memory_width != 0) {
      memory_ = Random({batch, kMemory, of().memory_width}, 77);
      call.memory = memory_.view();
    }
    if (of().global_tokens) call.global_tokens = Lengths(global_tokens_);
    return call;
  }

  Buffer Result(const Layer& layer, const Buffer& x, const Call& call, State* state = nullptr, int threads = 2) {
    Context ctx(threads);
    const Buffer y(DType::kF32, x.view().sizes());
    layer.Forward(ctx, x.view(), call, state, y.view());
    return y;
  }

  static ConstTensorView Lengths(const std::vector<int64_t>& lengths) {
    return ConstTensorView(lengths.data(), DType::kI64, {std::ssize(lengths)});
  }

  RandomWeights f32_{of().weights, DType::kF32, 3};
  std::unique_ptr<Layer> layer_ = of().make(f32_.weights());
  Buffer memory_;
  const std::vector<int64_t> global_tokens_ = {5, 0, -1, 5};
};

// True if a file has the tensors of this number of sequences.
bool CheckSavedTensorsOf(const SectionReader& from, const State& one, int64_t batch) {
  try {
    CheckSavedTensors(from, one, batch);
    return true;
  } catch (const FileError&) {
    return false;
  }
}

// These suites run on the layers that have the feature.
class LayerWithStateTest : public LayerTest {};
class LayerWithPaddingTest : public LayerTest {};
class LayerWithPackingTest : public LayerTest {};

std::vector<Param> CasesWith(bool LayerCase::* member = nullptr) {
  static const std::vector<LayerCase> all = LayerCases();
  std::vector<Param> cases;
  for (const LayerCase& of : all) {
    if (member == nullptr || of.*member) cases.push_back({&of});
  }
  return cases;
}

TEST_P(LayerTest, AgreesWithItsReference) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const RandomWeights random(of().weights, dtype, 5);
    const auto layer = of().make(random.weights());
    const Buffer x = Random({2, kT, layer->width()}, 1), expected(DType::kF64, x.view().sizes());
    const Call call = Begin(2);
    of().reference(random.weights(), x.view(), call, expected.view());
    EXPECT_LT(Error(Result(*layer, x, call).view(), expected.view()), 5e-6) << Name(dtype);
  }
}

TEST_P(LayerWithStateTest, AnySplitIntoCallsAndStepsGivesTheWhole) {
  const int64_t width = layer_->width();
  const Buffer x = Random({2, kT, width}, 1), whole = Result(*layer_, x, Begin(2));
  for (const std::vector<int64_t>& bounds : {std::vector<int64_t>{0, 5, 6, 7, 11, kT}, {0, 1, 2, 3, kT}}) {
    State state = layer_->MakeState({.batch = 2});
    Call call = Begin(2);
    for (size_t i = 0; i + 1 < bounds.size(); ++i) {
      const int64_t begin = bounds[i], count = bounds[i + 1] - begin;
      const Buffer part(DType::kF32, {2, count, width});
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t t = 0; t < count; ++t) {
          for (int64_t c = 0; c < width; ++c) part.Set({b, t, c}, x.Get({b, begin + t, c}));
        }
      }
      Buffer y;
      if (count == 1 && i > 0) {
        Context ctx(1);
        y = Buffer(DType::kF32, {2, 1, width});
        layer_->Step(ctx, ConstTensorView(part.view().data(), DType::kF32, {2, width}), state,
                     TensorView(y.view().data(), DType::kF32, {2, width}));
      } else {
        y = Result(*layer_, part, call, &state);
      }
      call = {};
      EXPECT_LT(Error(y.view(), whole.view().Slice(1, begin, begin + count)), 5e-6) << begin;
    }
    EXPECT_THAT(state.lengths(), testing::ElementsAre(kT, kT));
  }
}

TEST_P(LayerWithPaddingTest, ASequenceHasItsBitsAloneAndInAPaddedBatch) {
  const int64_t width = layer_->width();
  const std::vector<int64_t> lengths = {kT, 6, 0};
  const Buffer x = Random({3, kT, width}, 1);
  const auto fill = [&](int64_t b, int64_t from) {
    for (int64_t t = from; t < kT; ++t) {
      for (int64_t c = 0; c < width; ++c) x.Set({b, t, c}, NAN);
    }
  };
  fill(1, 6);
  fill(2, 0);
  Call call = Begin(3);
  call.lengths = Lengths(lengths);
  State state = of().has_state ? layer_->MakeState({.batch = 3}) : State("none", 1);
  const Buffer y = Result(*layer_, x, call, of().has_state ? &state : nullptr);
  for (int64_t b = 0; b < 2; ++b) {
    const int64_t length = lengths[static_cast<size_t>(b)];
    Call alone;
    alone.global_tokens = call.global_tokens;
    if (call.memory) alone.memory = call.memory.Slice(0, b, b + 1);
    Context ctx(1);
    const Buffer expected(DType::kF32, {1, length, width});
    State own = of().has_state ? layer_->MakeState() : State("none", 1);
    layer_->Forward(ctx, ConstTensorView(x.as<float>() + b * kT * width, DType::kF32, {1, length, width}), alone,
                    of().has_state ? &own : nullptr, expected.view());
    EXPECT_TRUE(SameBits(y.view().Slice(0, b, b + 1).Slice(1, 0, length), expected.view())) << b;
    if (!of().has_state) continue;
    // The next token shows that the states are those at the ends of the sequences.
    const Buffer next = Random({3, 1, width}, 9), both = Result(*layer_, next, {}, &state);
    State again = layer_->MakeState({.batch = 3});
    Result(*layer_, x, call, &again);
    state = std::move(again);
    const Buffer single =
        Result(*layer_, next.As(TensorView(next.as<float>() + b * width, DType::kF32, {1, 1, width})), {}, &own);
    EXPECT_LT(Error(both.view().Slice(0, b, b + 1), single.view()), 1e-6) << b;
  }
}

TEST_P(LayerWithPackingTest, PackedSequencesAreSequences) {
  const int64_t width = layer_->width();
  const Buffer x = Random({1, kT, width}, 1);
  const std::vector<int64_t> bounds = {0, 4, 4, 11};
  Call call = Begin(1);
  call.cu_seqlens = Lengths(bounds);
  const Buffer y = Result(*layer_, x, call);
  const Buffer expected(DType::kF64, x.view().sizes());
  of().reference(f32_.weights(), x.view(), call, expected.view());
  EXPECT_LT(Error(y.view().Slice(1, 0, 11), expected.view().Slice(1, 0, 11)), 5e-6);
  const Buffer second =
      Result(*layer_, x.As(TensorView(x.as<float>() + 4 * width, DType::kF32, {1, 7, width})), Begin(1));
  EXPECT_TRUE(SameBits(y.view().Slice(1, 4, 11), second.view()));
}

TEST_P(LayerTest, ThreadsDoNotShowInTheBits) {
  const Buffer x = Random({2, kT, layer_->width()}, 1);
  EXPECT_TRUE(
      SameBits(Result(*layer_, x, Begin(2), nullptr, 1).view(), Result(*layer_, x, Begin(2), nullptr, 3).view()));
}

TEST_P(LayerWithStateTest, StatesAreReorderedAndForked) {
  const int64_t width = layer_->width();
  const Buffer x = Random({2, kT, width}, 1), next = Random({2, 1, width}, 2);
  State state = layer_->MakeState({.batch = 2});
  Result(*layer_, x, Begin(2), &state);
  State fork = state.Fork();
  fork.Reorder(std::vector<int64_t>{1, 1});
  const Buffer same(DType::kF32, next.view().sizes());
  for (int64_t c = 0; c < width; ++c) {
    for (int64_t b = 0; b < 2; ++b) same.Set({b, 0, c}, next.Get({1, 0, c}));
  }
  const Buffer expected = Result(*layer_, same, {}, &state), got = Result(*layer_, same, {}, &fork);
  for (int64_t b = 0; b < 2; ++b) {
    EXPECT_TRUE(SameBits(got.view().Slice(0, b, b + 1), expected.view().Slice(0, 1, 2)));
  }
  EXPECT_GE(state.nbytes(), 0);
  EXPECT_THAT([&] { state.Reorder(std::vector<int64_t>{0, 2}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("an index is 2, expected 0 to 1")));
}

TEST_P(LayerWithStateTest, StatesComeBackFromFiles) {
  const int64_t width = layer_->width();
  const std::string path =
      testing::TempDir() + "heed_" + std::to_string(os::ProcessId()) + "_" + of().name + ".safetensors";
  State state = layer_->MakeState({.batch = 2, .page = 4});
  Call call = Begin(2);
  const std::vector<int64_t> lengths = {kT, 6};
  if (of().pads) call.lengths = Lengths(lengths);
  Result(*layer_, Random({2, kT, width}, 1), call, &state);
  const SectionWriter file;
  WriteState(state, file.At("a."));
  WriteState(state, file.At("b."));
  file.Write(path);
  State loaded = layer_->MakeState({.batch = 2, .page = 4});
  {
    const SectionReader saved(path);
    CheckSavedTensors(saved.At("b."), layer_->MakeState(), 2);
    EXPECT_EQ(CheckSavedTensorsOf(saved.At("b."), layer_->MakeState(), 3), state.tensors().empty());
    ReadState(saved.At("b."), state.lengths(), 1 << 30, loaded);
  }
  std::filesystem::remove(path);
  EXPECT_TRUE(std::ranges::equal(loaded.lengths(), state.lengths()));
  EXPECT_EQ(loaded.nbytes(), state.nbytes());
  for (const int64_t count : {1, 3}) {
    const Buffer next = Random({2, count, width}, 2);
    EXPECT_TRUE(SameBits(Result(*layer_, next, {}, &loaded).view(), Result(*layer_, next, {}, &state).view())) << count;
  }
}

TEST_P(LayerTest, AMissingOrMisshapenTensorIsNamed) {
  for (const WeightName& tensor : of().weights) {
    RandomWeights random(of().weights, DType::kF32, 5);
    random.Remove(tensor.name);
    EXPECT_THAT([&] { of().make(random.weights()); },
                ThrowsMessage<InvalidArgument>(
                    HasSubstr(tensor.name + " is missing, expected a tensor of shape " + ShapeString(tensor.sizes))));
    std::vector<int64_t> sizes = tensor.sizes;
    ++sizes.back();
    random.Replace(tensor.name, Buffer(DType::kF32, sizes));
    EXPECT_THAT([&] { of().make(random.weights()); },
                ThrowsMessage<InvalidArgument>(HasSubstr(tensor.name + " has shape " + ShapeString(sizes) +
                                                         ", expected " + ShapeString(tensor.sizes))));
    random.Replace(tensor.name, Buffer(DType::kI32, tensor.sizes));
    EXPECT_THAT(
        [&] { of().make(random.weights()); },
        ThrowsMessage<InvalidArgument>(HasSubstr(tensor.name + " has dtype i32, expected f64, f32, bf16 or f16")));
  }
}

TEST_P(LayerTest, EmptyCallsLeaveTheStateAlone) {
  const int64_t width = layer_->width();
  Call call = Begin(2);
  Result(*layer_, Buffer(DType::kF32, {2, 0, width}), call);
  if (!of().has_state) return;
  State state = layer_->MakeState({.batch = 2});
  Result(*layer_, Buffer(DType::kF32, {2, 0, width}), call, &state);
  EXPECT_THAT(state.lengths(), testing::ElementsAre(0, 0));
}

TEST_P(LayerTest, WrongArgumentsAreNamedBeforeAnythingIsWritten) {
  const int64_t width = layer_->width();
  Context ctx(1);
  const Buffer x = Random({2, kT, width}, 1), y(DType::kF32, x.view().sizes()),
               untouched(DType::kF32, x.view().sizes());
  const auto refuses = [&](const Call& call, State* state, const std::string& what, const ConstTensorView& in,
                           const TensorView& out) {
    EXPECT_THAT([&] { layer_->Forward(ctx, in, call, state, out); }, ThrowsMessage<InvalidArgument>(HasSubstr(what)))
        << what;
    EXPECT_TRUE(SameBits(y.view(), untouched.view()));
  };
  const Call plain = Begin(2);
  const std::string name = layer_->name() + "::Forward: ";
  refuses(plain, nullptr, name + "x has shape", ConstTensorView(x.view().data(), DType::kF32, {2 * kT, width}),
          y.view());
  refuses(plain, nullptr, name + "x has shape", Random({2, kT, width + 1}, 1).view(), y.view());
  refuses(plain, nullptr, name + "x has dtype f64", Buffer(DType::kF64, x.view().sizes()).view(), y.view());
  refuses(plain, nullptr, name + "y has shape", x.view(), Buffer(DType::kF32, {2, kT - 1, width}).view());
  refuses(plain, nullptr, name + "y", x.view(), x.view());
  refuses(plain, nullptr, name + "x has stride", x.view().Slice(1, 0, kT - 1),
          y.As(TensorView(y.view().data(), DType::kF32, {2, kT - 1, width})).view());
  Call call = plain;
  const std::vector<int64_t> too_long = {kT + 1, 1}, three = {1, 1, 1}, bounds = {0, 3};
  call.lengths = Lengths(too_long);
  refuses(call, nullptr, name + "lengths has an element 14, expected 0 to 13", x.view(), y.view());
  call.lengths = Lengths(three);
  refuses(call, nullptr, name + "lengths has shape [3], expected [2]", x.view(), y.view());
  call = plain;
  call.cu_seqlens = Lengths(bounds);
  refuses(call, nullptr, name + "cu_seqlens is given with a batch of 2", x.view(), y.view());
  call = Begin(1);
  const std::vector<int64_t> late = {1, 3};
  call.cu_seqlens = Lengths(late);
  refuses(call, nullptr, name + "cu_seqlens does not begin with 0", x.view().Slice(0, 0, 1), y.view().Slice(0, 0, 1));
  call = plain;
  call.global_tokens = x.view();
  refuses(call, nullptr, name + "global_tokens", x.view(), y.view());
  State other("layers::Other", 2);
  refuses(plain, &other, name + "state is of layers::Other", x.view(), y.view());
  if (of().memory_width == 0) {
    call = {};
    const Buffer memory = Random({2, 3, 4}, 1);
    call.memory = memory.view();
    refuses(call, nullptr, name + "memory is given, expected none", x.view(), y.view());
  } else {
    refuses({}, nullptr, name + "memory is absent", x.view(), y.view());
  }
  if (!of().has_state) {
    EXPECT_THROW(layer_->MakeState(), InvalidArgument);
    return;
  }
  State three_of_them = layer_->MakeState({.batch = 3});
  refuses(plain, &three_of_them, name + "state has a batch of 3, expected 2", x.view(), y.view());
  EXPECT_THAT([&] { layer_->MakeState({.batch = 0}); },
              ThrowsMessage<InvalidArgument>(HasSubstr("batch is 0, expected at least 1")));
}

TEST(RecurrenceTest, ArgumentsThatAMechanismDoesNotHaveAreNamed) {
  const Buffer x(DType::kF32, {1, 2, 1, 3});
  const Recurrence& gla = RecurrenceNamed("gla");
  NamedViews in;
  for (const char* name : {"q", "k", "v", "log_decay", "beta"}) in.Add(name, x.view());
  EXPECT_THAT([&] { RecurrenceReference(gla, in, {}, x.view()); },
              ThrowsMessage<InternalError>(HasSubstr("gla has no argument 'beta'")));
  EXPECT_THAT([&] { in.at("u"); }, ThrowsMessage<InternalError>(HasSubstr("there is no argument 'u'")));
  EXPECT_THAT([&] { RecurrenceNamed("gru"); }, ThrowsMessage<InternalError>(HasSubstr("no recurrence 'gru'")));
  EXPECT_THAT(
      [&] {
        while (true) in.Add("u", x.view());
      },
      ThrowsMessage<InternalError>(HasSubstr("too many arguments, at 'u'")));
}

std::string NameOf(const testing::TestParamInfo<Param>& of) { return of.param.layer->name; }

INSTANTIATE_TEST_SUITE_P(Layers, LayerTest, testing::ValuesIn(CasesWith()), NameOf);
INSTANTIATE_TEST_SUITE_P(Layers, LayerWithStateTest, testing::ValuesIn(CasesWith(&LayerCase::has_state)), NameOf);
INSTANTIATE_TEST_SUITE_P(Layers, LayerWithPaddingTest, testing::ValuesIn(CasesWith(&LayerCase::pads)), NameOf);
INSTANTIATE_TEST_SUITE_P(Layers, LayerWithPackingTest, testing::ValuesIn(CasesWith(&LayerCase::packs)), NameOf);

}  // namespace
}  // namespace heed::layers
