// Checks of the tensors of a part.
#include <cstdint>
#include <cstdio>
#include <string>

#include "heed/core/error.h"
#include "heed/ops/mechanism/check_internal.h"

namespace heed::mechanism {

void Fail(const char* op, const char* name, const std::string& got,
          const std::string& expected) {
  throw InvalidArgument(std::string(op) + ": " + name + " " + got +
                        ", expected " + expected);
}

std::string Text(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%g", value);
  return buffer;
}

void CheckReadable(const char* op, const char* name, const ConstTensorView& t) {
  if (!t.present()) Fail(op, name, "is absent", "a tensor");
  if (t.device().type != DeviceType::kCpu) {
    Fail(op, name,
         "is on device " + std::to_string(static_cast<int>(t.device().type)),
         "the CPU");
  }
  if (t.num_elements() == 0) return;
  if (t.data() == nullptr) {
    Fail(op, name, "has no data",
         "a pointer to " + t.ShapeString() + " elements");
  }
  if (reinterpret_cast<uintptr_t>(t.data()) % SizeOf(t.dtype()) != 0) {
    Fail(op, name, "has a misaligned address",
         "a multiple of " + std::to_string(SizeOf(t.dtype())) + " bytes");
  }
}

void CheckFloat(const char* op, const char* name, const ConstTensorView& t) {
  CheckReadable(op, name, t);
  if (!IsFloat(t.dtype())) {
    Fail(op, name, std::string("has dtype ") + Name(t.dtype()),
         "f64, f32, bf16 or f16");
  }
}

void CheckContiguousRows(const char* op, const char* name,
                         const ConstTensorView& t) {
  const int last = t.rank() - 1;
  if (t.size(last) > 1 && t.stride(last) != 1) {
    Fail(op, name,
         "has stride " + std::to_string(t.stride(last)) + " on its last axis",
         "1 (contiguous rows)");
  }
}

namespace {

void CheckEachOnce(const char* op, const char* name, const TensorView& t) {
  CheckReadable(op, name, t);
  if (SelfOverlaps(t)) {
    Fail(op, name,
         "has strides " + ShapeString(t.strides()) + " for shape " +
             t.ShapeString(),
         "strides that reach every element once");
  }
}

void CheckApart(const char* op, const char* name, const TensorView& t,
                const char* in_name, const ConstTensorView& in) {
  if (Overlap(t, in)) {
    Fail(op, name, std::string("overlaps ") + in_name, "memory of its own");
  }
}

}  // namespace

void CheckWritable(const char* op, const char* name, const TensorView& t,
                   const char* in_name, const ConstTensorView& in) {
  CheckEachOnce(op, name, t);
  CheckApart(op, name, t, in_name, in);
}

void Apart::Reads(const char* name, const ConstTensorView& t) {
  if (t.present()) tensors_.at(count_++) = {name, t};
}

void Apart::Writes(const char* op, const char* name, const TensorView& t) {
  if (!t.present()) return;
  CheckEachOnce(op, name, t);
  for (size_t i = 0; i < count_; ++i) {
    CheckApart(op, name, t, tensors_[i].name.c_str(), tensors_[i].view);
  }
  Reads(name, t);
}

}  // namespace heed::mechanism
