// Any other mechanism, as its entry in the harness calls it: a whole pass, training, or one token after a state.
#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string_view>

#include "heed/advise/candidates_internal.h"
#include "heed/advise/divided.h"
#include "heed/core/error.h"
#include "heed/distributed/sequence.h"
#include "heed/harness/assumed_tensors.h"

namespace heed::advise {
namespace {

double BytesOf(const ConstTensorView& x) { return static_cast<double>(x.num_elements()) * SizeIn(x.dtype()); }

double BytesOf(const OutputSpec& spec) {
  double bytes = SizeIn(spec.dtype);
  for (const int64_t size : spec.sizes) bytes *= static_cast<double>(size);
  return bytes;
}

// Address of tensors that are never read: with a null pointer, engines would treat them as absent.
alignas(64) constexpr std::byte kNowhere[64] = {};

// The arguments of a call without their data. Constants, which plans do read, are zeros.
struct Shapes {
  TensorMap tensors;
  std::vector<std::vector<std::byte>> memory;  // of constants
};

// Padding of channels to whole vectors, relative to the channels.
constexpr int64_t kLanes = 16;  // for f32; on targets with shorter vectors the unpadded flops fit
double Padded(int64_t channels) {
  return static_cast<double>((channels + kLanes - 1) / kLanes * kLanes) / static_cast<double>(channels);
}

// The mechanisms of heed::distributed; others have no states to send.
bool TakesGroup(const std::string& mechanism) {
#define HEED_TAKES_GROUP(name) \
  if (mechanism == #name) return true;
  HEED_DISTRIBUTED_MECHANISMS(HEED_TAKES_GROUP)
#undef HEED_TAKES_GROUP
  return false;
}

// A state that is the number of the tokens so far is the only one of integers.
bool CountsTokens(const OutputSpec& spec) { return spec.dtype == DType::kI64; }

bool IsState(const OutputSpec& spec) { return spec.name.starts_with("state"); }

// Outputs of a call, with their memory.
struct Outputs {
  std::vector<Buffer> memory;
  std::vector<TensorView> views;

  explicit Outputs(const TensorCall& call) {
    for (const OutputSpec& spec : call.outputs) Add(Buffer(spec.dtype, spec.sizes, Placement::kAligned));
  }
  void Add(const Buffer& buffer) {
    memory.push_back(buffer);
    views.push_back(buffer.view());
  }
};

class Mechanism : public Candidate {
 public:
  Mechanism(const Question& question, const OpEntry& op, const TensorMap& given)
      : purpose_(question.purpose), scale_(question.exact.scale), op_(op) {
    mechanism = op.name;
    is_softmax = op.family == "sparse";
    options = "default";
    for (const auto& [name, tensor] : given) given_[name] = {tensor.sizes().begin(), tensor.sizes().end()};
    std::string arguments, keywords;
    for (const InputSpec& spec : op.inputs) {
      if (!spec.optional) arguments += (arguments.empty() ? "" : ", ") + spec.name;
      if (spec.optional && given.contains(spec.name)) keywords += ", " + spec.name + "=" + spec.name;
    }
    python = "heed." + op.name + "(" + arguments + keywords + op.keywords + ")";
    if (purpose_ != Purpose::kDecode) return;
    if (StatesCountTokens(question.sizes)) keywords += ", positions=positions";
    python = "heed." + op.name + "_step(" + arguments + ", state" + keywords + ")";
  }

  bool PlansCausal(const Sizes& sizes) const {
    const Context ctx(1);
    return CallOf(ctx, ShapesOf(sizes).tensors).causal;
  }

  std::vector<Part> Parts(const Context& ctx, const Sizes& s, double) const override {
    const Shapes all = ShapesOf(s);
    const TensorMap& shapes = all.tensors;
    const TensorCall plan = CallOf(ctx, shapes);
    Load load = {
        {"row", Rows(OfCall(s))}, {"flop", plan.flops}, {"padded_flop", Padded(s.D) * Padded(s.Dv) * plan.flops}};
    // Rows that end within a vector are copied first, and column blocks of a state are two vectors wide.
    if (s.D % kLanes != 0 || s.Dv % kLanes != 0) load["ragged"] = load["row"] * static_cast<double>(s.D + s.Dv);
    if (s.Dv % (2 * kLanes) != 0) load["odd_flop"] = plan.flops;
    for (const auto& [name, x] : shapes) load["byte"] += BytesOf(x);
    double states = 0;
    for (const OutputSpec& spec : plan.outputs) (IsState(spec) ? states : load["byte"]) += BytesOf(spec);
    // A pass writes its states once; a step reads and writes states that the last one left in cache.
    purpose_ == Purpose::kDecode ? AddBytes(states, load) : void(load["state_byte"] = states);
    if (shapes.contains("projection"))
      load["feature"] = load["row"] * static_cast<double>(shapes.at("projection").size(0));
    return {{{mechanism + " " + Name(purpose_), dtype, threads}, load}};
  }

  Memory MemoryAt(const Context& ctx, const Sizes& s, double) const override {
    const Shapes shapes = ShapesOf(s);
    const TensorCall plan = CallOf(ctx, shapes.tensors);
    Memory memory;
    memory.workspace = static_cast<double>(plan.workspace_bytes);
    for (const auto& [name, x] : shapes.tensors) memory.arguments += BytesOf(x);
    for (const OutputSpec& spec : plan.outputs) (IsState(spec) ? memory.state : memory.arguments) += BytesOf(spec);
    const bool remembers = std::ranges::any_of(plan.outputs, IsState);
    if (!remembers && purpose_ == Purpose::kPrefill)
      memory.state = KeyValueBytes(s, dtype, s.Tk);  // tokens see all keys
    return memory;
  }

  Division DivisionAt(const Context& ctx, const Sizes& s) const override {
    if (!TakesGroup(mechanism)) throw Unsupported(kTakesNoGroup);
    const Shapes shapes = ShapesOf(s);
    const TensorCall plan = CallOf(ctx, shapes.tensors);
    if (!plan.causal) throw Unsupported("a group divides causal calls only");
    const StateKind kind = op_.family == "delta"                        ? StateKind::kDelta
                           : shapes.tensors.contains("log_value_decay") ? StateKind::kElementwise
                                                                        : StateKind::kDecays;
    Division division;
    division.states = StateBytesOf(kind, plan.outputs);
    return division;
  }

  Call On(Context& ctx, const TensorMap& tensors) const override {
    if (purpose_ == Purpose::kDecode) return Decode(ctx, tensors);
    TensorMap all = tensors;
    Call call;
    if (purpose_ == Purpose::kTraining) {
      const attention::Inputs in = InputsOf(tensors);
      const std::vector<int64_t> sizes = {in.q.size(0), in.q.size(1), in.q.size(2), in.v.size(3)};
      const auto d_o = Keep(call, std::make_shared<Buffer>(OrdinaryNumbers(dtype, sizes)));
      all["d_o"] = d_o->view();
    }
    const TensorCall plan = CallOf(ctx, all);
    const auto outputs = Keep(call, std::make_shared<Outputs>(plan));
    call.o = outputs->views[0];
    call.stages.emplace_back([outputs, run = plan.run](Context& run_ctx) { run(run_ctx, outputs->views); });
    return call;
  }

 private:
  // A decoding call has one token.
  Sizes OfCall(Sizes s) const {
    if (purpose_ == Purpose::kDecode) s.Tq = s.Tk = 1;
    return s;
  }

  // True if a step needs the number of tokens before it.
  bool StatesCountTokens(const Sizes& sizes) const {
    try {
      const Context ctx(1);
      return std::ranges::any_of(CallOf(ctx, ShapesOf(sizes).tensors).outputs, CountsTokens);
    } catch (const InvalidArgument&) {
      return false;  // there is no such call
    }
  }

  TensorCall CallOf(const Context& ctx, const TensorMap& tensors) const {
    const OpEntry::CallOn& call = purpose_ == Purpose::kPrefill    ? op_.call
                                  : purpose_ == Purpose::kTraining ? op_.train
                                                                   : op_.step;
    try {
      return call(ctx, tensors, scale_);
    } catch (const InvalidArgument&) {
      if (!scale_) throw;  // some mechanisms have no scale: they are called without it
    }
    return call(ctx, tensors, std::nullopt);
  }

  Shapes ShapesOf(const Sizes& sizes) const {
    const Sizes s = OfCall(sizes);
    Shapes shapes;
    for (const InputSpec& spec : op_.inputs) {
      const auto found = given_.find(spec.name);
      if (spec.optional && found == given_.end()) continue;
      std::map<char, int64_t> letters = AssumedAxes(sizes);
      letters['T'] = s.Tk;
      if (found != given_.end()) {  // other sizes than those of the problem
        for (size_t axis = 0; axis < spec.axes.size(); ++axis) {
          const char letter = spec.axes[axis];
          // The number of levels follows from that of tokens.
          if (std::string_view("BTCL").find(letter) == std::string_view::npos) letters[letter] = found->second[axis];
        }
      }
      std::vector<int64_t> shape;
      for (const char letter : spec.axes) {
        if (!letters.contains(letter)) {
          throw InvalidArgument(mechanism + ": takes a " + spec.name +
                                " with axes whose sizes q, k and v do not determine");
        }
        shape.push_back(letters.at(letter));
      }
      const bool widen = spec.wide && SizeOf(dtype) == 2;
      ConstTensorView& x = shapes.tensors[spec.name] = ConstTensorView(kNowhere, widen ? DType::kF32 : dtype, shape);
      if (spec.axes.find_first_of("TC") != std::string::npos) continue;
      shapes.memory.emplace_back(static_cast<size_t>(BytesOf(x)));
      x = ConstTensorView(shapes.memory.back().data(), x.dtype(), shape);
    }
    if (purpose_ == Purpose::kTraining)
      shapes.tensors["d_o"] = ConstTensorView(kNowhere, dtype, {s.B, s.Tq, s.Hq, s.Dv});
    return shapes;
  }

  // Tokens [begin, end) of every tensor that has tokens.
  TensorMap TokensOf(const TensorMap& tensors, int64_t begin, int64_t end) const {
    TensorMap cut = tensors;
    for (const InputSpec& spec : op_.inputs) {
      const size_t axis = spec.axes.find_first_of("TC");
      const auto found = cut.find(spec.name);
      if (axis == std::string::npos || found == cut.end()) continue;
      found->second = found->second.Slice(static_cast<int>(axis), begin, end);
    }
    return cut;
  }

  // The last tokens one by one, after the state that a whole pass computes from those before them.
  Call Decode(Context& ctx, const TensorMap& tensors) const {
    Call call;
    const attention::Inputs in = InputsOf(tensors);
    const int64_t T = in.q.size(1), rows = std::min(T, kDecodedRows);
    const TensorMap before = TokensOf(tensors, 0, T - rows);
    TensorCall whole = op_.call(ctx, before, {});
    const auto states = Keep(call, std::make_shared<Outputs>(whole));
    const auto begin = [states, run = whole.run](Context& run_ctx) { run(run_ctx, states->views); };
    const Buffer o(dtype, {in.q.size(0), rows, in.q.size(2), in.v.size(3)}, Placement::kAligned);
    call.o = o.view();
    const auto step = [self = *this, states, o, tensors, T, rows](Context& run_ctx, int64_t row) {
      const TensorCall one = self.CallOf(run_ctx, self.TokensOf(tensors, T - rows + row, T - rows + row + 1));
      std::vector<TensorView> views = states->views;
      views[0] = o.view().Slice(1, row, row + 1);
      one.run(run_ctx, views);
    };
    call.compute = [begin, step, rows](Context& run_ctx) {
      begin(run_ctx);
      for (int64_t row = 0; row < rows; ++row) step(run_ctx, row);
    };
    const TensorCall last = CallOf(ctx, TokensOf(tensors, T - 1, T));
    const Buffer again(dtype, {in.q.size(0), 1, in.q.size(2), in.v.size(3)}, Placement::kAligned);
    call.stages.emplace_back([states, again, T, run = last.run](Context& run_ctx) {
      std::vector<TensorView> views = states->views;
      views[0] = again.view();
      for (const TensorView& view : views) {  // it is the last token again
        if (view.dtype() == DType::kI64) std::fill_n(view.as<int64_t>(), view.num_elements(), T - 1);
      }
      run(run_ctx, views);
    });
    return call;
  }

  Purpose purpose_;
  std::optional<double> scale_;
  OpEntry op_;
  std::map<std::string, std::vector<int64_t>> given_;  // shapes
};

}  // namespace

std::unique_ptr<Candidate> MechanismCandidate(const Question& question, const OpEntry& op, const TensorMap& given,
                                              DType dtype) {
  const bool has = question.purpose == Purpose::kPrefill    ? op.call != nullptr
                   : question.purpose == Purpose::kTraining ? op.train != nullptr
                                                            : op.step != nullptr;
  if (!has || !std::ranges::count(op.dtypes, dtype)) return nullptr;
  auto candidate = std::make_unique<Mechanism>(question, op, given);
  candidate->dtype = dtype;
  candidate->threads = question.threads;
  candidate->is_causal = question.purpose == Purpose::kDecode || candidate->PlansCausal(question.sizes);
  return candidate;
}

}  // namespace heed::advise
