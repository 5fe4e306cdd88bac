// Checks of the tensors of an operation.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>

#include "heed/core/device_name.h"
#include "heed/core/error.h"
#include "heed/mechanism/check_internal.h"

namespace heed::mechanism {

void Fail(const char* op, const char* name, const std::string& got, const std::string& expected) {
  throw InvalidArgument(std::string(op) + ": " + name + " " + got + ", expected " + expected);
}

std::string Text(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%g", value);
  return buffer;
}

void CheckReadable(const char* op, const char* name, const ConstTensorView& t, Device device) {
  if (!t.present()) Fail(op, name, "is absent", "a tensor");
  if (t.device() != device) Fail(op, name, "is on " + NameOf(t.device()), NameOf(device));
  if (t.num_elements() == 0) return;
  if (t.data() == nullptr) {
    Fail(op, name, "has no data", "a pointer to " + t.ShapeString() + " elements");
  }
  if (reinterpret_cast<uintptr_t>(t.data()) % SizeOf(t.dtype()) != 0) {
    Fail(op, name, "has a misaligned address", "a multiple of " + std::to_string(SizeOf(t.dtype())) + " bytes");
  }
}

void CheckFloat(const char* op, const char* name, const ConstTensorView& t) {
  CheckReadable(op, name, t);
  if (!IsFloat(t.dtype())) {
    Fail(op, name, std::string("has dtype ") + Name(t.dtype()), "f64, f32, bf16 or f16");
  }
}

DType StateDType(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

void CheckTensor(const char* op, const char* name, const ConstTensorView& t, const Axes& shape, DType dtype, bool data,
                 Device device) {
  if (!t.present()) Fail(op, name, "is absent", "a tensor");
  if (t.dtype() != dtype) {
    Fail(op, name, std::string("has dtype ") + Name(t.dtype()), Name(dtype));
  }
  const std::span<const int64_t> sizes = shape;
  if (!std::equal(t.sizes().begin(), t.sizes().end(), sizes.begin(), sizes.end())) {
    Fail(op, name, "has shape " + t.ShapeString(), ShapeString(sizes));
  }
  if (data || t.data() != nullptr) CheckReadable(op, name, t, device);
}

void CheckNotPositive(const char* op, const char* name, const ConstTensorView& t) {
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    int64_t rest = i, at = 0;
    for (int axis = t.rank() - 1; axis >= 0; --axis) {
      at += rest % t.size(axis) * t.stride(axis);
      rest /= t.size(axis);
    }
    const double value = LoadAsDouble(t.dtype(), t.data(), at);
    if (!(value <= 0)) Fail(op, name, "has an element " + Text(value), "<= 0 everywhere");
  }
}

double Bytes(const ConstTensorView& t) {
  if (!t.present()) return 0;
  return static_cast<double>(t.num_elements()) * static_cast<double>(SizeOf(t.dtype()));
}

void CheckContiguousRows(const char* op, const char* name, const ConstTensorView& t) {
  const int last = t.rank() - 1;
  if (t.size(last) > 1 && t.stride(last) != 1) {
    Fail(op, name, "has stride " + std::to_string(t.stride(last)) + " on its last axis", "1 (contiguous rows)");
  }
}

namespace {

void CheckEachOnce(const char* op, const char* name, const TensorView& t, Device device) {
  CheckReadable(op, name, t, device);
  if (SelfOverlaps(t)) {
    Fail(op, name, "has strides " + ShapeString(t.strides()) + " for shape " + t.ShapeString(),
         "strides that reach every element once");
  }
}

void CheckApart(const char* op, const char* name, const TensorView& t, const char* in_name, const ConstTensorView& in) {
  if (Overlap(t, in)) {
    Fail(op, name, std::string("overlaps ") + in_name, "memory of its own");
  }
}

}  // namespace

void CheckWritable(const char* op, const char* name, const TensorView& t, const char* in_name,
                   const ConstTensorView& in) {
  CheckEachOnce(op, name, t, {});
  CheckApart(op, name, t, in_name, in);
}

void Apart::Reads(const char* name, const ConstTensorView& t) {
  if (!t.present()) return;
  Named& named = tensors_.at(count_++);
  named.name = {};
  std::strncpy(named.name.data(), name, named.name.size() - 1);
  named.view = t;
}

void Apart::Writes(const char* op, const char* name, const TensorView& t) {
  if (!t.present()) return;
  CheckEachOnce(op, name, t, device_);
  for (size_t i = 0; i < count_; ++i) {
    CheckApart(op, name, t, tensors_[i].name.data(), tensors_[i].view);
  }
  Reads(name, t);
}

}  // namespace heed::mechanism
