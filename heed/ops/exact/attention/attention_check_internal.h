// Checks of single arguments, shared by the passes of attention.
#ifndef HEED_OPS_EXACT_ATTENTION_ATTENTION_CHECK_INTERNAL_H_
#define HEED_OPS_EXACT_ATTENTION_ATTENTION_CHECK_INTERNAL_H_

#include <cstdint>
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

#include "heed/core/device_name.h"
#include "heed/core/error.h"
#include "heed/core/tensor.h"
#include "heed/engines/softmax/problem.h"
#include "heed/ops/exact/attention/attention_internal.h"

namespace heed::attention {

template <class T>
std::string Text(T value) {
  std::string text = std::to_string(value);
  if constexpr (std::is_floating_point_v<T>) {
    char buffer[32];
    std::snprintf(buffer, sizeof(buffer), "%g", value);
    text = buffer;
  }
  return text;
}

// Accepts rank 1 or 2, and returns no numbers for an absent tensor.
inline softmax::HeadNumbers HeadNumbersOf(const ConstTensorView& t) {
  if (t.num_elements() == 0) return {};
  return {t.data(), t.dtype(), t.rank() == 2 && t.size(0) > 1 ? t.stride(0) : 0, t.stride(t.rank() - 1)};
}

class Check {
 public:
  // `device` is the device of all tensors except those that are read while arguments are checked.
  Check(const char* op, Use use, Device device = {}) : op_(op), use_(use), device_(device) {}

  [[noreturn]] void Fail(const char* name, const std::string& got, const std::string& expected) const {
    throw InvalidArgument(std::string(op_) + ": " + name + " " + got + ", expected " + expected);
  }

  void Present(const char* name, const ConstTensorView& t) const {
    if (!t.present()) Fail(name, "is absent", "a tensor");
  }

  void Shape(const char* name, const ConstTensorView& t, const std::vector<int64_t>& expected) const {
    bool same = static_cast<size_t>(t.rank()) == expected.size();
    for (size_t i = 0; same && i < expected.size(); ++i) {
      same = t.size(static_cast<int>(i)) == expected[i];
    }
    if (!same) Fail(name, "has shape " + t.ShapeString(), ShapeString(expected));
  }

  void On(const char* name, const ConstTensorView& t, Device device) const {
    const bool is_cpu = device.type == DeviceType::kCpu;
    if (is_cpu ? t.device().type == DeviceType::kCpu : t.device() == device) return;
    Fail(name, "is on " + NameOf(t.device()), NameOf(device) + (is_cpu ? "" : " as q"));
  }
  void OnCpu(const char* name, const ConstTensorView& t) const { On(name, t, {}); }

  // Checks what every tensor must satisfy: its device, alignment and data pointer.
  void Readable(const char* name, const ConstTensorView& t) const {
    On(name, t, device_);
    HasData(name, t);
  }
  void HasData(const char* name, const ConstTensorView& t) const {
    if (t.num_elements() == 0) return;
    if (t.data() == nullptr && use_ != Use::kExplain) {
      Fail(name, "has no data", "a pointer to " + t.ShapeString() + " elements");
    }
    if (reinterpret_cast<uintptr_t>(t.data()) % SizeOf(t.dtype()) != 0) {
      Fail(name, "has a misaligned address", "a multiple of " + Text(SizeOf(t.dtype())) + " bytes");
    }
  }

  void ContiguousRows(const char* name, const ConstTensorView& t) const {
    if (t.rank() == 0) return;
    const int last = t.rank() - 1;
    if (t.size(last) > 1 && t.stride(last) != 1) {
      Fail(name, "has stride " + Text(t.stride(last)) + " on its last axis", "1 (contiguous rows)");
    }
  }

  void Writable(const char* name, const ConstTensorView& t) const {
    Readable(name, t);
    if (SelfOverlaps(t)) {
      Fail(name, "has strides " + ShapeString(t.strides()) + " for shape " + t.ShapeString(),
           "strides that reach every element once");
    }
  }

  void NoOverlap(const char* out_name, const ConstTensorView& out, const char* name, const ConstTensorView& in) const {
    if (Overlap(out, in)) {
      Fail(out_name, std::string("overlaps ") + name, "memory of its own");
    }
  }

  // An optional integer tensor, as int64s; empty if it is absent or has no data.
  std::vector<int64_t> Integers(const char* name, const ConstTensorView& t, const std::vector<int64_t>& shape) const {
    if (!t.present()) return {};
    if (t.dtype() != DType::kI32 && t.dtype() != DType::kI64) {
      Fail(name, std::string("has dtype ") + Name(t.dtype()), "i32 or i64");
    }
    Shape(name, t, shape);
    OnCpu(name, t);
    HasData(name, t);
    if (t.data() == nullptr) return {};
    std::vector<int64_t> values;
    ForEach(t, [&](int64_t index) { values.push_back(LoadAsInt64(t.dtype(), t.data(), index)); });
    return values;
  }

  std::vector<double> Floats(const ConstTensorView& t) const {
    std::vector<double> values;
    if (t.data() == nullptr) {
      values.resize(static_cast<size_t>(t.num_elements()));
      return values;
    }
    ForEach(t, [&](int64_t index) { values.push_back(LoadAsDouble(t.dtype(), t.data(), index)); });
    return values;
  }

  // Reads numbers per head that are on the CPU here; kernels read those on the device.
  void HeadNumbers(const char* name, const ConstTensorView& t, std::vector<double>* values,
                   softmax::HeadNumbers* there) const {
    if (t.device().type == DeviceType::kCpu) {
      HasData(name, t);
      *values = Floats(t);
    } else {
      Readable(name, t);
      *there = HeadNumbersOf(t);
    }
  }

  void Float(const char* name, const ConstTensorView& t) const {
    if (!IsFloat(t.dtype())) {
      Fail(name, std::string("has dtype ") + Name(t.dtype()), "a float dtype");
    }
    HasData(name, t);
  }

  // A tensor that broadcasts to [B, H, Tq, Tk] by numpy's rule.
  softmax::Pairs Broadcast(const char* name, const ConstTensorView& t, const std::vector<int64_t>& shape) const {
    bool fits = t.rank() <= 4;
    int64_t strides[4] = {0, 0, 0, 0};
    for (int i = 0; fits && i < t.rank(); ++i) {
      const int axis = 4 - t.rank() + i;
      const int64_t size = t.size(i);
      fits = size == 1 || size == shape[static_cast<size_t>(axis)];
      strides[axis] = size == 1 ? 0 : t.stride(i);
    }
    if (!fits) {
      Fail(name, "has shape " + t.ShapeString(), "one that broadcasts to " + ShapeString(shape));
    }
    Readable(name, t);
    return {t.data(), t.dtype(), strides[0], strides[1], strides[2], strides[3]};
  }

 private:
  template <class F>
  static void ForEach(const ConstTensorView& t, const F& f) {
    if (t.rank() == 1) {
      for (int64_t i = 0; i < t.size(0); ++i) f(i * t.stride(0));
      return;
    }
    for (int64_t i = 0; i < t.size(0); ++i) {
      for (int64_t j = 0; j < t.size(1); ++j) {
        f(i * t.stride(0) + j * t.stride(1));
      }
    }
  }

  const char* op_;
  Use use_;
  Device device_;
};

// A [B, T, H, D] tensor, or a packed [T, H, D] one without its batch axis.
inline softmax::Rows RowsOf(const ConstTensorView& t) {
  const int r = t.rank();
  return {t.data(), r == 4 ? t.stride(0) : 0, t.stride(r - 3), t.stride(r - 2)};
}

// An lse, [B, H, T] or packed [H, T].
inline softmax::Rows LseRowsOf(const ConstTensorView& t) {
  const int r = t.rank();
  return {t.data(), r == 3 ? t.stride(0) : 0, t.stride(r - 1), t.stride(r - 2)};
}

}  // namespace heed::attention

#endif  // HEED_OPS_EXACT_ATTENTION_ATTENTION_CHECK_INTERNAL_H_
