// Messages of a group: bytes, copies of views, and the agreement on a call.
#ifndef HEED_DISTRIBUTED_GROUP_INTERNAL_H_
#define HEED_DISTRIBUTED_GROUP_INTERNAL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "heed/core/tensor.h"
#include "heed/distributed/group.h"

namespace heed::distributed {

using Bytes = std::vector<std::byte>;
using Shape = std::vector<int64_t>;

// The bytes of all ranks, in their order; each sends as many.
Bytes AllGather(const Group& group, std::span<const std::byte> sent);

// Messages from all ranks, in their order.
struct Messages {
  Bytes bytes;
  std::vector<size_t> begins;
  const std::byte* operator[](size_t rank) const { return bytes.data() + begins[rank]; }
};

// Sends a message to each rank, and returns those from each rank, which have these sizes.
Messages Exchange(const Group& group, std::vector<Bytes> sent, std::span<const int64_t> num_received);

void SendTo(const Group& group, std::span<const std::byte> sent, int to);
void ReceiveFrom(const Group& group, std::span<std::byte> received, int from);
// Sends to one rank and receives from another, at the same time.
void SendReceive(const Group& group, std::span<const std::byte> sent, int to, std::span<std::byte> received, int from);
// Begins SendReceive on a transport with `start`; Finish takes the result and waits.
void* Start(const Group& group, std::span<const std::byte> sent, int to, std::span<std::byte> received, int from);
void Finish(const Group& group, void* started);
void Broadcast(const Group& group, std::span<std::byte> data, int root);

// Numbers that a rank announces with its call; unused ones are 0.
using Numbers = std::array<int64_t, 8>;

// Returns the numbers of each rank. `describe` checks this rank's arguments and returns the call as ranks compare it.
// Where it throws on a rank, or descriptions differ, every rank throws, and nothing else has been sent. Without checks
// it is not called.
std::vector<Numbers> Agree(const Group& group, const std::string& operation, const Numbers& numbers,
                           const std::function<std::string()>& describe);

// Throws InvalidArgument "operation: name got, expected ...".
[[noreturn]] void Refuse(const std::string& operation, const std::string& name, const std::string& got,
                         const std::string& expected);

// Throws Unsupported for a tensor on a GPU.
void CheckOnCpu(const std::string& operation, const std::string& name, const ConstTensorView& t);

// Throws InvalidArgument if outputs share memory with inputs, each other or themselves.
void CheckApart(const std::string& operation, std::span<const ConstTensorView> inputs,
                std::span<const TensorView> outputs);

// "q: f32 [2,T,4,16]" with T for the axis that is divided, and the values of a tensor of integers.
std::string Described(const char* name, const ConstTensorView& t, std::optional<int> tokens_axis);

// Copies all elements between views of one shape and dtype.
void Copy(const ConstTensorView& from, const TensorView& to);

// Copies all elements between views of one shape, rounded to the dtype of `to`.
void Convert(const ConstTensorView& from, const TensorView& to);

// Adds `x` to `sum`, rounded once per element.
void Add(const ConstTensorView& x, const TensorView& sum);

// A row-major copy as bytes.
Bytes Packed(const ConstTensorView& t);

// The shape of a view with another size of one axis.
Shape Resized(const ConstTensorView& t, int axis, int64_t size);

// Memory of a new tensor, zeroed, and its row-major view.
class Owned {
 public:
  Owned() = default;
  Owned(DType dtype, std::span<const int64_t> sizes);
  Owned(Owned&&) = default;
  Owned& operator=(Owned&&) = default;
  const TensorView& view() const { return view_; }
  std::span<std::byte> bytes() { return memory_; }

 private:
  Bytes memory_;
  TensorView view_;
};

}  // namespace heed::distributed

#endif  // HEED_DISTRIBUTED_GROUP_INTERNAL_H_
