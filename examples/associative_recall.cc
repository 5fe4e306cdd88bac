// A model of two attention layers learns associative recall: after pairs of a key and its value, which are new in every
// sequence, one key is repeated, and the answer is its value. The set of tokens alone does not determine which value
// belongs to which key.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <utility>
#include <vector>

#include "heed/heed.h"

namespace {

constexpr int64_t kBatch = 32, kPairs = 6, kKeys = 8, kValues = 8;
constexpr int64_t kTokens = 2 * kPairs + 1, kWords = kKeys + kValues, kInputs = kWords + kTokens;
constexpr int64_t kWidth = 32, kHeads = 2, kHeadWidth = kWidth / kHeads;
constexpr int64_t kRows = kBatch * kTokens;
constexpr int kMaxSteps = 1000;
constexpr double kGoal = 0.1;  // nats; a guess among the values shown costs log 6 = 1.8

// Random numbers that are the same on every machine.
class Random {
 public:
  int64_t Below(int64_t limit) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>((state_ >> 33) % static_cast<uint64_t>(limit));
  }
  float Uniform() { return static_cast<float>(Below(1 << 24)) * 0x1p-23f - 1; }

 private:
  uint64_t state_ = 1;
};

using Vector = std::vector<float>;

// Weights that are trained by Adam (Kingma, Ba, arXiv:1412.6980).
struct Weights {
  Weights(int64_t count, double deviation, Random& random)
      : value(static_cast<size_t>(count)), gradient(value), mean(value), square(value) {
    for (float& x : value) x = random.Uniform() * static_cast<float>(deviation * std::sqrt(3.0));
  }
  void Step(int step) {
    const double rate = 3e-3 / (1 - std::pow(0.9, step)), root = 1 - std::pow(0.98, step);
    for (size_t i = 0; i < value.size(); ++i) {
      const double g = gradient[i];
      mean[i] = static_cast<float>(0.9 * mean[i] + 0.1 * g);
      square[i] = static_cast<float>(0.98 * square[i] + 0.02 * g * g);
      value[i] -= static_cast<float>(rate * mean[i] / (std::sqrt(square[i] / root) + 1e-8));
      gradient[i] = 0;
    }
  }
  Vector value, gradient, mean, square;
};

// y += x W for the rows of x.
void Multiply(const Vector& x, const Vector& w, int64_t in, int64_t out, Vector& y) {
  const float* from = x.data();
  for (float* to = y.data(); to != y.data() + y.size(); to += out, from += in) {
    for (int64_t i = 0; i < in; ++i) {
      for (int64_t o = 0; o < out; ++o) to[o] += from[i] * w[static_cast<size_t>(i * out + o)];
    }
  }
}

// The gradients of x and W, given dy: dx += dy W^T, dW += x^T dy.
void MultiplyBackward(const Vector& x, Weights& w, int64_t in, int64_t out, const Vector& dy, Vector& dx) {
  Vector transposed(w.value.size());
  for (int64_t i = 0; i < in * out; ++i) {
    transposed[static_cast<size_t>(i % out * in + i / out)] = w.value[static_cast<size_t>(i)];
  }
  Multiply(dy, transposed, out, in, dx);
  const float *row = x.data(), *d_row = dy.data();
  for (; row != x.data() + x.size(); row += in, d_row += out) {
    float* gradient = w.gradient.data();
    for (int64_t i = 0; i < in; ++i, gradient += out) {
      for (int64_t o = 0; o < out; ++o) gradient[o] += row[i] * d_row[o];
    }
  }
}

// x + Attention(x Wq, x Wk, x Wv) Wo, causal, all heads concatenated in one row.
class Layer {
 public:
  explicit Layer(Random& random)
      : qkv_(3 * kWidth * kWidth, 1 / std::sqrt(kWidth), random), out_(kWidth * kWidth, 1 / std::sqrt(kWidth), random) {
    options_.causal = true;
  }

  Vector Forward(heed::Context& ctx, const Vector& x) {
    x_ = x;
    rows_.assign(static_cast<size_t>(kRows * 3 * kWidth), 0);
    o_.resize(x.size());
    lse_.resize(static_cast<size_t>(kRows * kHeads));
    Multiply(x, qkv_.value, kWidth, 3 * kWidth, rows_);
    heed::attention::Forward(ctx, {Part(rows_, 0), Part(rows_, 1), Part(rows_, 2)}, options_,
                             {.o = Whole(o_), .lse = Lse()});
    Vector y = x;
    Multiply(o_, out_.value, kWidth, kWidth, y);
    return y;
  }

  // Returns the gradient of x, given dy, and adds the gradients of the weights.
  Vector Backward(heed::Context& ctx, const Vector& dy) {
    Vector d_o(o_.size()), d_rows(rows_.size()), dx = dy;
    MultiplyBackward(o_, out_, kWidth, kWidth, dy, d_o);
    heed::attention::Backward(ctx,
                              {.q = Part(rows_, 0),
                               .k = Part(rows_, 1),
                               .v = Part(rows_, 2),
                               .o = Whole(o_),
                               .lse = Lse(),
                               .d_o = Whole(d_o),
                               .d_lse = {}},
                              options_,
                              {.dq = Part(d_rows, 0),
                               .dk = Part(d_rows, 1),
                               .dv = Part(d_rows, 2),
                               .dbias = {},
                               .dsinks = {},
                               .dalibi = {},
                               .drelative_bias = {},
                               .dlog_decay = {}});
    MultiplyBackward(x_, qkv_, kWidth, 3 * kWidth, d_rows, dx);
    return dx;
  }

  void Step(int step) {
    qkv_.Step(step);
    out_.Step(step);
  }

 private:
  // q, k or v of a fused projection: a view, no copy.
  static heed::TensorView Part(Vector& rows, int64_t part) {
    return {rows.data() + part * kWidth,
            heed::DType::kF32,
            {kBatch, kTokens, kHeads, kHeadWidth},
            {kTokens * 3 * kWidth, 3 * kWidth, kHeadWidth, 1}};
  }
  static heed::TensorView Whole(Vector& rows) {
    return {rows.data(), heed::DType::kF32, {kBatch, kTokens, kHeads, kHeadWidth}};
  }
  heed::TensorView Lse() { return {lse_.data(), heed::DType::kF32, {kBatch, kHeads, kTokens}}; }

  heed::attention::Options options_;
  Weights qkv_, out_;
  Vector x_, rows_, o_, lse_;
};

struct Batch {
  Vector inputs;                 // [kRows][kInputs]: 1 for the word and for its position, else 0
  std::vector<int64_t> answers;  // [kBatch], below kValues
};

Batch Draw(Random& random) {
  Batch batch = {Vector(kRows * kInputs), {}};
  float* row = batch.inputs.data();
  for (int64_t b = 0; b < kBatch; ++b) {
    int64_t keys[kKeys], values[kPairs], place = 0;
    std::iota(keys, keys + kKeys, 0);
    const auto add = [&](int64_t word) {
      row[word] = row[kWords + place++] = 1;
      row += kInputs;
    };
    for (int64_t i = 0; i < kPairs; ++i) {  // keys differ, values need not
      std::swap(keys[i], keys[i + random.Below(kKeys - i)]);
      values[i] = random.Below(kValues);
      add(keys[i]);
      add(kKeys + values[i]);
    }
    const int64_t asked = random.Below(kPairs);
    add(keys[asked]);
    batch.answers.push_back(values[asked]);
  }
  return batch;
}

// The mean cross entropy of the answers, which are predicted at the last token of a sequence, and its gradient.
double CrossEntropy(const Vector& logits, const std::vector<int64_t>& answers, Vector& gradient) {
  double loss = 0;
  for (int64_t b = 0; b < kBatch; ++b) {
    const int64_t at = ((b + 1) * kTokens - 1) * kValues;
    const int64_t answer = answers[static_cast<size_t>(b)];
    const float* row = logits.data() + at;
    double sum = 0;
    for (int64_t i = 0; i < kValues; ++i) sum += std::exp(row[i]);
    loss += (std::log(sum) - row[answer]) / kBatch;
    for (int64_t i = 0; i < kValues; ++i) {
      gradient[static_cast<size_t>(at + i)] = static_cast<float>((std::exp(row[i]) / sum - (i == answer)) / kBatch);
    }
  }
  return loss;
}

}  // namespace

int main() {
  Random random;
  heed::Context ctx(2);
  Weights embedding(kInputs * kWidth, 1, random), head(kWidth * kValues, 1 / std::sqrt(kWidth), random);
  Layer layers[] = {Layer(random), Layer(random)};
  double recent = std::log(static_cast<double>(kValues));
  int step = 0;
  while (recent > kGoal && step < kMaxSteps) {
    const Batch batch = Draw(random);
    Vector x(kRows * kWidth), dx(x.size()), d_inputs(batch.inputs.size());
    Multiply(batch.inputs, embedding.value, kInputs, kWidth, x);
    for (Layer& layer : layers) x = layer.Forward(ctx, x);

    Vector logits(kRows * kValues), d_logits(logits.size());
    Multiply(x, head.value, kWidth, kValues, logits);
    recent += 0.1 * (CrossEntropy(logits, batch.answers, d_logits) - recent);

    MultiplyBackward(x, head, kWidth, kValues, d_logits, dx);
    dx = layers[0].Backward(ctx, layers[1].Backward(ctx, dx));
    MultiplyBackward(batch.inputs, embedding, kInputs, kWidth, dx, d_inputs);
    ++step;
    embedding.Step(step);
    head.Step(step);
    for (Layer& layer : layers) layer.Step(step);
    if (step % 50 == 0) std::printf("step %3d  loss %.4f\n", step, recent);
  }
  std::printf("step %3d  loss %.4f, expected %g\n", step, recent, kGoal);
  return recent <= kGoal ? 0 : 1;
}
