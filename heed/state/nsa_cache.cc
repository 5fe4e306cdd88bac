// NSACache: a growing cache whose windows are compressed when they become complete.
#include "heed/state/nsa_cache.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <utility>

#include "heed/core/error.h"

namespace heed {
namespace {

[[noreturn]] void Fail(const std::string& what, const std::string& got, const std::string& expected) {
  throw InvalidArgument("NSACache" + what + " " + got + ", expected " + expected);
}

KVCache TokensOf(const NSACache::Options& o) {
  for (const auto& [name, value] : {std::pair{": length", o.length}, {": stride", o.stride}}) {
    if (value < 1) Fail(name, "is " + std::to_string(value), "1 or more");
  }
  KVCache::Options tokens;
  tokens.batch = o.batch;
  tokens.heads = o.heads;
  tokens.dim = o.dim;
  tokens.value_dim = o.value_dim;
  tokens.capacity = o.capacity;
  tokens.page = o.page;
  tokens.dtype = o.dtype;
  return KVCache(tokens);
}

// The address of the row of a token and head.
const void* RowOf(const KVView& view, const PageRows& rows, int64_t sequence, int64_t token, int64_t head) {
  const std::byte* page = view.pages[sequence][token / view.page_tokens];
  return page + rows.begin + head * rows.head_stride + token % view.page_tokens * rows.token_stride;
}

}  // namespace

NSACache::NSACache(const Options& options) : NSACache(options, TokensOf(options)) {
  if (options_.value_dim == 0) options_.value_dim = options_.dim;
}

void NSACache::Reserve(int64_t windows) {
  if (windows <= room_) return;
  const int64_t room = std::max(windows, 2 * room_);
  const auto size = static_cast<int64_t>(SizeOf(options_.dtype));
  const auto grown = [&](const std::vector<std::byte>& from, int64_t channels) {
    const int64_t window = options_.heads * channels * size;
    std::vector<std::byte> to(static_cast<size_t>(options_.batch * room * window));
    for (int64_t b = 0; b < options_.batch && room_ > 0; ++b) {
      std::memcpy(to.data() + b * room * window, from.data() + b * room_ * window, static_cast<size_t>(room_ * window));
    }
    return to;
  };
  std::vector<std::byte> k = grown(k_, options_.dim), v = grown(v_, options_.value_dim);
  k_ = std::move(k);
  v_ = std::move(v);
  room_ = room;
}

void NSACache::Compress(int64_t sequence, int64_t window, int64_t given, const ConstTensorView& k_cmp,
                        const ConstTensorView& v_cmp) {
  const KVView view = tokens_.view();
  const DType dtype = options_.dtype;
  for (const auto& [rows, from, channels, to] :
       {std::tuple{&view.key, &k_cmp, options_.dim, &k_}, {&view.value, &v_cmp, options_.value_dim, &v_}}) {
    for (int64_t h = 0; h < options_.heads; ++h) {
      for (int64_t e = 0; e < channels; ++e) {
        double value = 0;
        if (from->present()) {
          value = LoadAsDouble(
              dtype, from->data(),
              sequence * from->stride(0) + given * from->stride(1) + h * from->stride(2) + e * from->stride(3));
        } else {
          for (int64_t t = window * options_.stride; t < window * options_.stride + options_.length; ++t) {
            value += LoadAsDouble(dtype, RowOf(view, *rows, sequence, t, h), e);
          }
          value /= static_cast<double>(options_.length);
          // Rounded like in nsa::Forward.
          if (dtype != DType::kF64) value = static_cast<double>(static_cast<float>(value));
        }
        StoreDouble(dtype, to->data(), ((sequence * room_ + window) * options_.heads + h) * channels + e, value);
      }
    }
  }
}

void NSACache::Append(const ConstTensorView& k, const ConstTensorView& v, std::span<const int64_t> lengths,
                      const ConstTensorView& k_cmp, const ConstTensorView& v_cmp) {
  std::vector<int64_t> before(this->lengths().begin(), this->lengths().end());
  const int64_t all = k.rank() == 4 ? k.size(1) : 0;
  int64_t most = 0, completed = 0;  // windows of a sequence, and the number of new ones
  for (size_t b = 0; b < before.size(); ++b) {
    const int64_t added = lengths.empty() ? all : b < lengths.size() ? std::clamp<int64_t>(lengths[b], 0, all) : 0;
    most = std::max(most, NumWindows(before[b] + added));
    completed = std::max(completed, NumWindows(before[b] + added) - NumWindows(before[b]));
  }
  if (k_cmp.present() != v_cmp.present())
    Fail(std::string("::Append: ") + (k_cmp.present() ? "v_cmp" : "k_cmp"), "is absent", "both or none");
  for (const auto& [name, t, channels] :
       {std::tuple{"k_cmp", &k_cmp, options_.dim}, {"v_cmp", &v_cmp, options_.value_dim}}) {
    if (!t->present()) continue;
    const std::string argument = std::string("::Append: ") + name;
    if (t->dtype() != options_.dtype)
      Fail(argument, std::string("has dtype ") + Name(t->dtype()), Name(options_.dtype));
    const bool fits =
        t->rank() == 4 && t->size(0) == options_.batch && t->size(2) == options_.heads && t->size(3) == channels;
    if (!fits || t->size(1) < completed) {
      Fail(argument, "has shape " + t->ShapeString(),
           std::string("[") + std::to_string(options_.batch) + ",n," + std::to_string(options_.heads) + "," +
               std::to_string(channels) + "] with n = " + std::to_string(completed) + " or more windows");
    }
    if (t->device().type != DeviceType::kCpu || (t->num_elements() > 0 && t->data() == nullptr))
      Fail(argument, "has no data", "memory on the CPU");
  }
  const int64_t capacity = options_.capacity;
  Reserve(capacity > 0 ? std::min(most, NumWindows(capacity)) : most);
  tokens_.Append(k, v, lengths);
  for (int64_t b = 0; b < options_.batch; ++b) {
    const int64_t old = NumWindows(before[static_cast<size_t>(b)]),
                  now = NumWindows(this->lengths()[static_cast<size_t>(b)]);
    for (int64_t w = old; w < now; ++w) Compress(b, w, w - old, k_cmp, v_cmp);
  }
}

NSACache NSACache::Fork() const {
  NSACache fork(options_, tokens_.Fork());
  fork.room_ = room_;
  fork.k_ = k_;
  fork.v_ = v_;
  return fork;
}

int64_t NSACache::nbytes() const { return tokens_.nbytes() + static_cast<int64_t>(k_.size() + v_.size()); }

NSAView NSACache::view() const {
  NSAView view;
  view.tokens = tokens_.view();
  view.length = options_.length;
  view.stride = options_.stride;
  int64_t windows = 0;
  for (const int64_t length : lengths()) windows = std::max(windows, NumWindows(length));
  const auto rows = [&](const std::vector<std::byte>& data, int64_t channels) {
    const int64_t window = options_.heads * channels;
    return ConstTensorView(data.data(), options_.dtype, {options_.batch, windows, options_.heads, channels},
                           {room_ * window, window, channels, 1});
  };
  view.k_cmp = rows(k_, options_.dim);
  view.v_cmp = rows(v_, options_.value_dim);
  return view;
}

}  // namespace heed
