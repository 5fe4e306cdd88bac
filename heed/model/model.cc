// Model: opened from a folder, and called from tokens to logits.
#include "heed/model/model.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/layers/arena_internal.h"
#include "heed/layers/rows_internal.h"
#include "heed/model/model_internal.h"
#include "heed/mechanism/check_internal.h"

namespace heed {
namespace {

using mechanism::Fail;

// Adds the path of the folder to exceptions from constructors of layers.
template <class F>
auto InFolder(const model::Folder& folder, const F& f) {
  try {
    return f();
  } catch (const InvalidArgument& error) {
    folder.Fail(error.what());
  }
}

void CheckRowMajor(const char* op, const TensorView& y, const mechanism::Axes& shape, DType dtype) {
  mechanism::CheckTensor(op, "y", y, shape, dtype, true);
  int64_t stride = 1;
  for (int axis = y.rank() - 1; axis >= 0; --axis) {
    if (y.size(axis) > 1 && y.stride(axis) != stride && y.num_elements() != 0) {
      Fail(op, "y", "has stride " + std::to_string(y.stride(axis)) + " in axis " + std::to_string(axis),
           std::to_string(stride) + ": row-major");
    }
    stride *= y.size(axis);
  }
}

}  // namespace

void ModelState::Reorder(std::span<const int64_t> indices) {
  if (std::ssize(indices) != batch())
    Fail("ModelState::Reorder", "indices", "has " + std::to_string(indices.size()) + " of them",
         std::to_string(batch()));
  for (const int64_t index : indices) {
    if (index < 0 || index >= batch())
      Fail("ModelState::Reorder", "indices", "has an element " + std::to_string(index),
           "0 to " + std::to_string(batch() - 1));
  }
  for (layers::State& layer : layers_) layer.Reorder(indices);
  for (std::vector<int64_t>* list : {&lengths_, &pending_, &last_}) {
    const std::vector<int64_t> of = *list;
    for (size_t b = 0; b < indices.size(); ++b) (*list)[b] = of[static_cast<size_t>(indices[b])];
  }
}

ModelState ModelState::Fork() const {
  ModelState fork;
  fork.model_ = model_;
  fork.capacity_ = capacity_;
  fork.page_ = page_;
  fork.lengths_ = lengths_;
  fork.pending_ = pending_;
  fork.last_ = last_;
  for (const layers::State& layer : layers_) fork.layers_.push_back(layer.Fork());
  return fork;
}

int64_t ModelState::nbytes() const {
  int64_t bytes = 0;
  for (const layers::State& layer : layers_) bytes += layer.nbytes();
  return bytes;
}

Model::Model(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Model Model::Open(const std::string& path) {
  model::Folder folder(path);
  const model::Plan& plan = folder.plan();
  return InFolder(folder, [&] {
    auto impl = std::make_shared<Impl>();
    impl->family = folder.family().type;
    impl->vocabulary = plan.vocabulary;
    impl->width = plan.width;
    impl->padding = plan.padding;
    impl->most_positions = plan.most_positions - (plan.padding ? *plan.padding + 1 : 0);
    impl->causal = plan.causal;
    impl->end = folder.end_tokens();
    impl->embedding = folder.embedding();
    const layers::Weights body = folder.body();
    const auto table = [&](const std::string& name, int64_t count, std::optional<layers::Embedding>& to) {
      if (!name.empty()) to.emplace(layers::Embedding::Config{count, plan.width}, body.At(name + "."));
    };
    table(plan.tokens, plan.vocabulary, impl->tokens);
    table(plan.before, plan.vocabulary, impl->before);
    table(plan.positions, plan.most_positions, impl->positions);
    if (!plan.types.empty()) {
      impl->type = body.Floats(plan.types + ".weight", {plan.type_count, plan.width});
      impl->type.resize(static_cast<size_t>(plan.width));
    }
    const auto norm = [&](const std::optional<model::NamedNorm>& of, std::optional<layers::Norm>& to) {
      if (of) to.emplace(of->config, body.At(of->name + "."));
    };
    norm(plan.embedding_norm, impl->embedding_norm);
    for (const model::Block& block : plan.blocks) {
      impl->layers.push_back(block.make(body));
      impl->factors.push_back(static_cast<float>(block.factor));
    }
    norm(plan.final_norm, impl->final_norm);
    if (const std::optional<model::HeadNames> head = folder.head()) {
      const layers::Weights all = folder.weights();
      if (plan.transform) {
        impl->dense = all.Matrix({plan.transform->dense, plan.width, true}, plan.width);
        impl->activation = plan.transform->activation;
        impl->head_norm.emplace(plan.transform->norm.config, all.At(plan.transform->norm.name + "."));
      }
      const int64_t sizes[] = {plan.vocabulary, plan.width};
      const ConstTensorView matrix = all.Tensor(head->weight, sizes);
      impl->head =
          layers::Linear(matrix, head->bias.empty() ? ConstTensorView() : all.Tensor(head->bias, std::span(sizes, 1)));
    }
    folder.CheckAllTaken();
    impl->fingerprint = folder.Fingerprint();
    return Model(std::move(impl));
  });
}

const std::string& Model::family() const { return impl_->family; }
int64_t Model::vocabulary() const { return impl_->vocabulary; }
int64_t Model::width() const { return impl_->width; }
bool Model::causal() const { return impl_->causal; }
bool Model::has_head() const { return impl_->head.present(); }
int64_t Model::most_positions() const { return impl_->most_positions; }
std::span<const int64_t> Model::end_tokens() const { return impl_->end; }

ModelState Model::MakeState(const layers::StateOptions& options) const {
  if (!causal())
    throw InvalidArgument("Model::MakeState: the model is a " + family() +
                          ", expected one that is causal: others see later tokens");
  ModelState state;
  state.model_ = impl_;
  state.capacity_ = options.capacity;
  state.page_ = options.page;
  for (const auto& layer : impl_->layers) state.layers_.push_back(layer->MakeState(options));
  state.lengths_.assign(static_cast<size_t>(options.batch), 0);
  state.pending_.assign(static_cast<size_t>(options.batch), -1);
  state.last_ = state.pending_;
  return state;
}

Model::Batch Model::Check(const char* op, const ConstTensorView& ids, const ConstTensorView& lengths,
                          const ModelState* state) const {
  const auto integers = [&](const char* name, const ConstTensorView& t) {
    mechanism::CheckReadable(op, name, t);
    if (t.dtype() != DType::kI32 && t.dtype() != DType::kI64)
      Fail(op, name, std::string("has dtype ") + Name(t.dtype()), "i32 or i64");
  };
  integers("ids", ids);
  if (ids.rank() != 2) Fail(op, "ids", "has shape " + ids.ShapeString(), "[B, T]");
  Batch batch;
  const int64_t B = batch.B = ids.size(0), T = batch.T = ids.size(1);
  batch.lengths.assign(static_cast<size_t>(B), T);
  if (lengths) {
    integers("lengths", lengths);
    if (lengths.rank() != 1 || lengths.size(0) != B)
      Fail(op, "lengths", "has shape " + lengths.ShapeString(), "[" + std::to_string(B) + "]");
    for (int64_t b = 0; b < B; ++b) {
      const int64_t length = LoadAsInt64(lengths.dtype(), lengths.data(), b * lengths.stride(0));
      if (length < 0 || length > T)
        Fail(op, "lengths", "has an element " + std::to_string(length), "0 to " + std::to_string(T));
      batch.lengths[static_cast<size_t>(b)] = length;
      batch.padded = batch.padded || length != T;
    }
  }
  if (state != nullptr) {
    if (state->model_ != impl_) Fail(op, "state", "is of another model", "one that this model has made");
    if (state->batch() != B) Fail(op, "state", "has a batch of " + std::to_string(state->batch()), std::to_string(B));
  }
  batch.packed = batch.padded && state == nullptr;
  batch.Lay();
  for (int64_t b = 0; b < B; ++b) {
    const int64_t length = batch.length(b), before = state == nullptr ? 0 : state->lengths_[static_cast<size_t>(b)];
    for (const int64_t most : {most_positions() > 0 ? most_positions() : INT64_MAX,
                               state == nullptr || state->capacity_ < 0 ? INT64_MAX : state->capacity_}) {
      if (length > most - before) {
        Fail(op, "ids",
             "would make sequence " + std::to_string(b) + " " + std::to_string(before + length) + " tokens long",
             "at most " + std::to_string(most));
      }
    }
    for (int64_t t = 0; t < length; ++t) {
      const int64_t id = LoadAsInt64(ids.dtype(), ids.data(), b * ids.stride(0) + t * ids.stride(1));
      if (id < 0 || id >= vocabulary())
        Fail(op, "ids", "has an element " + std::to_string(id), "0 to " + std::to_string(vocabulary() - 1));
      batch.ids[static_cast<size_t>(batch.begin(b) + t)] = id;
    }
  }
  return batch;
}

// x = hidden states [rows, width] behind the last norm.
void Model::Hidden(Context& ctx, const Batch& batch, ModelState* state, float* x) const {
  const int64_t B = batch.B, rows = batch.rows(), width = impl_->width;
  if (rows == 0) return;
  const auto seen = [&](int64_t b) { return state == nullptr ? 0 : state->lengths_[static_cast<size_t>(b)]; };
  const auto embed = [&](const std::optional<layers::Embedding>& table, const int64_t* ids, int64_t begin,
                         int64_t count, bool add) {
    table->Forward(ctx, ConstTensorView(ids + begin, DType::kI64, {count}),
                   TensorView(x + begin * width, DType::kF32, {count, width}), add);
  };
  layers::Frame frame;
  embed(impl_->tokens, batch.ids.data(), 0, rows, false);
  if (impl_->before) {
    int64_t* before = frame.Integers(rows);
    for (int64_t b = 0; b < B; ++b) {
      const int64_t begin = batch.begin(b), count = batch.begin(b + 1) - begin;
      const int64_t none = seen(b) == 0 ? 1 : 0;  // the position before a sequence's first token
      if (count <= none) continue;
      if (none == 0) before[begin] = state->last_[static_cast<size_t>(b)];
      std::copy_n(batch.ids.data() + begin, count - 1, before + begin + 1);
      embed(impl_->before, before, begin + none, count - none, true);
    }
  }
  if (impl_->positions) {
    int64_t* places = frame.Integers(rows);
    std::fill_n(places, rows, 0);
    for (int64_t b = 0; b < B; ++b) {
      int64_t counted = 0;  // tokens that are not padding
      for (int64_t t = 0; t < batch.length(b); ++t) {
        const int64_t row = batch.begin(b) + t, id = batch.ids[static_cast<size_t>(row)];
        int64_t& place = places[row] = seen(b) + t;
        if (impl_->padding) place = id == *impl_->padding ? id : *impl_->padding + ++counted;
      }
    }
    embed(impl_->positions, places, 0, rows, true);
  }
  if (!impl_->type.empty()) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t c = 0; c < width; ++c) x[row * width + c] += impl_->type[static_cast<size_t>(c)];
    }
  }
  if (impl_->embedding_norm) impl_->embedding_norm->Rows(ctx, x, rows, x);
  float *from = x, *to = frame.Floats(rows * width);
  layers::Call call;
  std::vector<int64_t> shape = {B, batch.T, width};
  if (batch.packed) {
    call.cu_seqlens = ConstTensorView(batch.begins.data(), DType::kI64, {B + 1});
    shape = {1, rows, width};
  } else if (batch.padded) {
    call.lengths = ConstTensorView(batch.lengths.data(), DType::kI64, {B});
  }
  for (size_t i = 0; i < impl_->layers.size(); ++i) {
    const TensorView out(to, DType::kF32, shape);
    impl_->layers[i]->Forward(ctx, ConstTensorView(from, DType::kF32, shape), call,
                              state == nullptr ? nullptr : &state->layers_[i], out);
    if (const float factor = impl_->factors[i]; factor != 1) {
      for (int64_t e = 0; e < rows * width; ++e) to[e] *= factor;
    }
    std::swap(from, to);
  }
  if (impl_->final_norm) {
    impl_->final_norm->Rows(ctx, from, rows, x);
  } else if (from != x) {
    std::copy_n(from, rows * width, x);
  }
  if (state == nullptr) return;
  for (int64_t b = 0; b < B; ++b) {
    const int64_t length = batch.length(b);
    state->lengths_[static_cast<size_t>(b)] += length;
    if (length == 0) continue;
    state->last_[static_cast<size_t>(b)] = batch.ids[static_cast<size_t>(batch.begin(b) + length - 1)];
  }
}

// y = logits [rows, vocabulary] of hidden states x [rows, width].
void Model::Logits(Context& ctx, const float* x, int64_t rows, float* y) const {
  layers::Frame frame;
  if (impl_->dense.present()) {
    float* transformed = frame.Floats(rows * width());
    impl_->dense.Rows(ctx, x, width(), rows, transformed, width());
    layers::ActivateRows activate;
    activate.activation = impl_->activation;
    activate.x = {transformed, width()};
    activate.y = {transformed, width()};
    activate.rows = static_cast<size_t>(rows);
    activate.size = static_cast<size_t>(width());
    layers::Run(ctx, activate);
    impl_->head_norm->Rows(ctx, transformed, rows, transformed);
    x = transformed;
  }
  impl_->head.Rows(ctx, x, width(), rows, y, vocabulary());
}

void Model::Forward(Context& ctx, const ConstTensorView& ids, const ConstTensorView& lengths, ModelState* state,
                    const TensorView& y) const {
  constexpr const char* op = "Model::Forward";
  const Batch batch = Check(op, ids, lengths, state);
  CheckRowMajor(op, y, {batch.B, batch.T, outputs()}, DType::kF32);
  mechanism::CheckWritable(op, "y", y, "ids", ids);
  if (state != nullptr && std::ranges::any_of(state->pending_, [](int64_t id) { return id >= 0; })) {
    Fail(op, "state", "has a token of Generate() pending", "a state that has processed all of its tokens");
  }
  const int64_t size = outputs();
  auto* const out = y.as<float>();
  if (has_head()) {
    layers::Frame frame;
    float* x = frame.Floats(batch.rows() * width());
    Hidden(ctx, batch, state, x);
    Logits(ctx, x, batch.rows(), out);
  } else {
    Hidden(ctx, batch, state, out);
  }
  // Moves packed rows to their final places, which are never before their present places.
  for (int64_t b = batch.B - 1; b >= 0 && batch.packed; --b) {
    std::memmove(out + b * batch.T * size, out + batch.begin(b) * size,
                 static_cast<size_t>(batch.length(b) * size) * sizeof(float));
  }
}

void Model::Step(Context& ctx, const ConstTensorView& ids, ModelState& state, const TensorView& y) const {
  if (ids.rank() != 1) Fail("Model::Step", "ids", "has shape " + ids.ShapeString(), "[B]");
  if (y.rank() != 2) Fail("Model::Step", "y", "has shape " + y.ShapeString(), "[B, " + std::to_string(outputs()) + "]");
  Forward(
      ctx, ConstTensorView(ids.data(), ids.dtype(), {ids.size(0), 1}, {ids.stride(0), 1}, ids.device()), {}, &state,
      TensorView(y.data(), y.dtype(), {y.size(0), 1, y.size(1)}, {y.stride(0), y.stride(0), y.stride(1)}, y.device()));
}

void Model::Reference(const std::string& path, const ConstTensorView& ids, const ConstTensorView& lengths,
                      const TensorView& y) {
  model::Folder folder(path);
  const model::Plan& plan = folder.plan();
  layers::Call call;
  call.lengths = lengths;
  std::vector<int64_t> copies(static_cast<size_t>(ids.num_elements()));
  for (int64_t i = 0; i < ids.num_elements(); ++i) {
    copies[static_cast<size_t>(i)] =
        LoadAsInt64(ids.dtype(), ids.data(), i / ids.size(1) * ids.stride(0) + i % ids.size(1) * ids.stride(1));
  }
  model::Reference(plan, folder.weights(), folder.body(), folder.head(),
                   ConstTensorView(copies.data(), DType::kI64, ids.sizes()), call, y);
}

}  // namespace heed
