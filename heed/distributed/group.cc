// Messages of a group, and the agreement of its ranks on a call.
#include "heed/distributed/group.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "heed/core/dtype.h"
#include "heed/core/error.h"
#include "heed/distributed/group_internal.h"

namespace heed::distributed {
namespace {

// FNV-1a.
int64_t Digest(std::string_view text) {
  uint64_t hash = 14695981039346656037u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return static_cast<int64_t>(hash);
}

template <class T>
std::span<const std::byte> BytesOf(const std::vector<T>& numbers) {
  return std::as_bytes(std::span<const T>(numbers));
}

std::vector<int64_t> AllGatherNumbers(const Group& group, const std::vector<int64_t>& sent) {
  const Bytes received = AllGather(group, BytesOf(sent));
  std::vector<int64_t> numbers(received.size() / sizeof(int64_t));
  std::memcpy(numbers.data(), received.data(), received.size());
  return numbers;
}

std::vector<std::string> AllGatherText(const Group& group, const std::string& text) {
  const std::vector<int64_t> sizes = AllGatherNumbers(group, {static_cast<int64_t>(text.size())});
  const auto longest = static_cast<size_t>(*std::ranges::max_element(sizes));
  std::string padded = text;
  padded.resize(longest);
  const Bytes received = AllGather(group, std::as_bytes(std::span<const char>(padded)));
  std::vector<std::string> texts;
  for (size_t r = 0; r < sizes.size(); ++r) {
    texts.emplace_back(reinterpret_cast<const char*>(received.data()) + r * longest, static_cast<size_t>(sizes[r]));
  }
  return texts;
}

// Calls f(offset in a, offset in b, elements in a row) for runs of elements that are contiguous in both.
template <class F>
void ForRuns(const ConstTensorView& a, const ConstTensorView& b, const F& f) {
  if (a.num_elements() == 0) return;
  const int rank = a.rank();
  int64_t run = 1;
  int outer = rank;  // axes before the run
  while (outer > 0 && a.stride(outer - 1) == run && b.stride(outer - 1) == run) run *= a.size(--outer);
  std::vector<int64_t> index(static_cast<size_t>(outer));
  int64_t of_a = 0, of_b = 0;
  while (true) {
    f(of_a, of_b, run);
    int axis = outer - 1;
    for (; axis >= 0; --axis) {
      int64_t& i = index[static_cast<size_t>(axis)];
      of_a += a.stride(axis);
      of_b += b.stride(axis);
      if (++i < a.size(axis)) break;
      of_a -= i * a.stride(axis);
      of_b -= i * b.stride(axis);
      i = 0;
    }
    if (axis < 0) return;
  }
}

}  // namespace

Group::Group(const Transport& transport) : transport_(transport) {
  const Transport& t = transport;
  if (t.size < 1 || t.rank < 0 || t.rank >= t.size) {
    Refuse("Group", "rank", "is " + std::to_string(t.rank) + " of " + std::to_string(t.size), "0 or more, below size");
  }
  if (t.size > 1 &&
      (t.all_gather == nullptr || t.send_receive == nullptr || t.all_to_all == nullptr || t.broadcast == nullptr)) {
    Refuse("Group", "transport", "lacks a function", "all_gather, send_receive, all_to_all and broadcast");
  }
  if ((t.start == nullptr) != (t.finish == nullptr)) {
    Refuse("Group", "transport", "has one of start and finish", "both or none");
  }
  const char* const checks = std::getenv("HEED_DISTRIBUTED_CHECKS");
  checks_ = checks == nullptr || std::string_view(checks) != "0";
}

Bytes AllGather(const Group& group, std::span<const std::byte> sent) {
  Bytes received(sent.size() * static_cast<size_t>(group.size()));
  if (group.size() == 1) {
    std::ranges::copy(sent, received.begin());
  } else if (!sent.empty()) {
    const Transport& t = group.transport();
    t.all_gather(t.self, sent.data(), static_cast<int64_t>(sent.size()), received.data());
  }
  return received;
}

Messages Exchange(const Group& group, std::vector<Bytes> sent, std::span<const int64_t> num_received) {
  std::vector<int64_t> num_sent;
  size_t total = 0;
  for (const Bytes& message : sent) {
    num_sent.push_back(static_cast<int64_t>(message.size()));
    total += message.size();
  }
  Bytes all;
  all.reserve(total);
  for (Bytes& message : sent) {
    all.insert(all.end(), message.begin(), message.end());
    Bytes().swap(message);  // these may be large: each is held once
  }
  Messages received;
  size_t begin = 0;
  for (const int64_t count : num_received) {
    received.begins.push_back(begin);
    begin += static_cast<size_t>(count);
  }
  if (group.size() == 1) {
    received.bytes = std::move(all);
    return received;
  }
  received.bytes.resize(begin);
  const Transport& t = group.transport();
  t.all_to_all(t.self, all.data(), num_sent.data(), received.bytes.data(), num_received.data());
  return received;
}

void SendTo(const Group& group, std::span<const std::byte> sent, int to) {
  const Transport& t = group.transport();
  t.send_receive(t.self, sent.data(), static_cast<int64_t>(sent.size()), to, nullptr, 0, -1);
}

void ReceiveFrom(const Group& group, std::span<std::byte> received, int from) {
  const Transport& t = group.transport();
  t.send_receive(t.self, nullptr, 0, -1, received.data(), static_cast<int64_t>(received.size()), from);
}

void SendReceive(const Group& group, std::span<const std::byte> sent, int to, std::span<std::byte> received, int from) {
  const Transport& t = group.transport();
  t.send_receive(t.self, sent.data(), static_cast<int64_t>(sent.size()), to, received.data(),
                 static_cast<int64_t>(received.size()), from);
}

void* Start(const Group& group, std::span<const std::byte> sent, int to, std::span<std::byte> received, int from) {
  const Transport& t = group.transport();
  return t.start(t.self, sent.data(), static_cast<int64_t>(sent.size()), to, received.data(),
                 static_cast<int64_t>(received.size()), from);
}

void Finish(const Group& group, void* started) {
  const Transport& t = group.transport();
  t.finish(t.self, started);
}

void Broadcast(const Group& group, std::span<std::byte> data, int root) {
  if (group.size() == 1 || data.empty()) return;
  const Transport& t = group.transport();
  t.broadcast(t.self, data.data(), static_cast<int64_t>(data.size()), root);
}

std::vector<Numbers> Agree(const Group& group, const std::string& operation, const Numbers& numbers,
                           const std::function<std::string()>& describe) {
  std::exception_ptr error;
  std::string text;
  if (group.checks()) {
    try {
      text = describe();
    } catch (const std::exception& refused) {
      error = std::current_exception();
      text = std::string("refused its arguments: ") + refused.what();
    }
  }
  std::vector<int64_t> header = {Digest(text), error ? 1 : 0};
  header.insert(header.end(), numbers.begin(), numbers.end());
  const std::vector<int64_t> headers = AllGatherNumbers(group, header);
  const auto ranks = static_cast<size_t>(group.size());
  const auto of = [&](size_t rank, size_t i) { return headers[rank * header.size() + i]; };
  bool refused = false, differs = false;
  for (size_t r = 0; r < ranks; ++r) {
    refused |= of(r, 1) != 0;
    differs |= of(r, 0) != of(0, 0);
  }
  if (refused || differs) {
    const std::vector<std::string> texts = AllGatherText(group, text);
    if (error) std::rethrow_exception(error);
    for (size_t r = 0; r < ranks; ++r) {
      if (of(r, 1) != 0) throw InvalidArgument(operation + ": rank " + std::to_string(r) + " " + texts[r]);
    }
    for (size_t r = 1; r < ranks; ++r) {
      if (of(r, 0) == of(0, 0)) continue;
      throw InvalidArgument(operation + ": rank " + std::to_string(r) + " calls " + texts[r] +
                            ", expected the call of rank 0, " + texts[0]);
    }
  }
  std::vector<Numbers> result(ranks);
  for (size_t r = 0; r < ranks; ++r) {
    for (size_t i = 0; i < numbers.size(); ++i) result[r][i] = of(r, 2 + i);
  }
  return result;
}

void RefuseCall(const Group& group, const std::string& message) {
  Group always = group;
  always.set_checks(true);
  try {
    Agree(always, "", {}, [&]() -> std::string { throw InvalidArgument(message); });
  } catch (const InvalidArgument&) {  // of this rank, or of another one that refuses its call too
  }
}

void Refuse(const std::string& operation, const std::string& name, const std::string& got,
            const std::string& expected) {
  throw InvalidArgument(operation + ": " + name + " " + got + ", expected " + expected);
}

void CheckOnCpu(const std::string& operation, const std::string& name, const ConstTensorView& t) {
  if (!t.present() || t.device().type == DeviceType::kCpu) return;
  throw Unsupported(operation + ": " + name + " is on a GPU, expected the CPU with a group");
}

void CheckApart(const std::string& operation, std::span<const ConstTensorView> inputs,
                std::span<const TensorView> outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].present()) continue;
    const auto refuse = [&](const char* what) {
      Refuse(operation, "an output of shape " + outputs[i].ShapeString(), what, "memory of its own");
    };
    if (SelfOverlaps(outputs[i])) refuse("overlaps itself");
    for (const ConstTensorView& in : inputs) {
      if (in.present() && Overlap(in, outputs[i])) refuse("overlaps an input");
    }
    for (size_t j = 0; j < i; ++j) {
      if (outputs[j].present() && Overlap(outputs[j], outputs[i])) refuse("overlaps another output");
    }
  }
}

std::string Described(const char* name, const ConstTensorView& t, std::optional<int> tokens_axis) {
  std::string text = std::string(name) + ": " + Name(t.dtype()) + " [";
  for (int i = 0; i < t.rank(); ++i) {
    if (i > 0) text += ",";
    text += tokens_axis == i ? "T" : std::to_string(t.size(i));
  }
  text += "]";
  if (t.rank() == 1 && (t.dtype() == DType::kI32 || t.dtype() == DType::kI64) && t.data() != nullptr) {
    for (int64_t i = 0; i < t.size(0); ++i) {
      text += (i == 0 ? " " : ",") + std::to_string(LoadAsInt64(t.dtype(), t.data(), i * t.stride(0)));
    }
  }
  return text;
}

void Copy(const ConstTensorView& from, const TensorView& to) {
  const auto size = static_cast<int64_t>(SizeOf(to.dtype()));
  ForRuns(from, to, [&](int64_t source, int64_t target, int64_t count) {
    std::memcpy(to.as<std::byte>() + target * size, from.as<std::byte>() + source * size,
                static_cast<size_t>(count * size));
  });
}

void Convert(const ConstTensorView& from, const TensorView& to) {
  if (from.dtype() == to.dtype()) return Copy(from, to);
  ForRuns(from, to, [&](int64_t source, int64_t target, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      StoreDouble(to.dtype(), to.data(), target + i, LoadAsDouble(from.dtype(), from.data(), source + i));
    }
  });
}

void Add(const ConstTensorView& x, const TensorView& sum) {
  ForRuns(x, sum, [&](int64_t source, int64_t target, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const double added = LoadAsDouble(x.dtype(), x.data(), source + i);
      StoreDouble(sum.dtype(), sum.data(), target + i, LoadAsDouble(sum.dtype(), sum.data(), target + i) + added);
    }
  });
}

Bytes Packed(const ConstTensorView& t) {
  Bytes bytes(static_cast<size_t>(t.num_elements()) * SizeOf(t.dtype()));
  Copy(t, TensorView(bytes.data(), t.dtype(), t.sizes()));
  return bytes;
}

Shape Resized(const ConstTensorView& t, int axis, int64_t size) {
  Shape shape(t.sizes().begin(), t.sizes().end());
  shape[static_cast<size_t>(axis)] = size;
  return shape;
}

Owned::Owned(DType dtype, std::span<const int64_t> sizes) {
  const ConstTensorView shape(nullptr, dtype, sizes);
  memory_.resize(static_cast<size_t>(shape.num_elements()) * SizeOf(dtype));
  // An empty tensor has an address too.
  if (memory_.empty()) memory_.reserve(1);
  view_ = TensorView(memory_.data(), dtype, sizes);
}

}  // namespace heed::distributed
