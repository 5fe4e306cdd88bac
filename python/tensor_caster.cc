// Arrays of Python as views: in place if possible, else copied.
//
// The buffer protocol is tried first: it is faster for NumPy, and the only one that exports read-only arrays. Arrays
// without it (PyTorch's) go through DLPack.
#include "python/tensor_caster.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "heed/core/device_name.h"
#include "heed/core/error.h"
#include "python/gil.h"
#include "python/numpy_array.h"
#include "python/runtime.h"
#include "python/torch_host.h"

namespace heed::python {

namespace {

const char* KindName(Kind kind) {
  switch (kind) {
    case Kind::kFloat: return "f64, f32, bf16 or f16";
    case Kind::kInt: return "i32 or i64";
    case Kind::kBool: return "bool";
  }
  return "";
}

// Copies a strided array into row-major order; returns the end of the copy.
char* CopyStrided(const char* from, const int64_t* sizes, const int64_t* byte_strides, int rank, size_t item_bytes,
                  char* to) {
  if (rank == 0) {
    std::memcpy(to, from, item_bytes);
    return to + item_bytes;
  }
  for (int64_t i = 0; i < sizes[0]; ++i) {
    to = CopyStrided(from, sizes + 1, byte_strides + 1, rank - 1, item_bytes, to);
    from += byte_strides[0];
  }
  return to;
}

// True for a NumPy array of ml_dtypes.bfloat16, which NumPy cannot export; its bits can be exported as uint16.
bool IsBFloat16(nb::handle value) {
  if (!nb::hasattr(value, "dtype") || !nb::hasattr(value, "view")) return false;
  const nb::object dtype = value.attr("dtype");
  const nb::object name = nb::steal(RunPython([&] {  // nb::getattr is noexcept
    return PyObject_GetAttrString(dtype.ptr(), "name");
  }));
  if (!name.is_valid()) PyErr_Clear();
  return name.is_valid() && name.equal(nb::str("bfloat16"));
}

}  // namespace

ConstTensorView Arrays::View(const Argument& argument, ArrayLayout& layout, bool writable, Rows rows) {
  const auto item_bytes = static_cast<int64_t>(SizeOf(layout.dtype));
  const size_t rank = static_cast<size_t>(layout.rank);
  bool empty = false, divisible = reinterpret_cast<uintptr_t>(layout.data) % static_cast<uintptr_t>(item_bytes) == 0;
  int64_t strides[kMaxRank];
  for (size_t i = 0; i < rank; ++i) {
    empty = empty || layout.sizes[i] == 0;
    // The stride of an axis of one element has no meaning, and exporters may set any value.
    if (layout.sizes[i] <= 1) layout.byte_strides[i] = i + 1 == rank ? item_bytes : 0;
    divisible = divisible && layout.byte_strides[i] % item_bytes == 0;
    strides[i] = layout.byte_strides[i] / item_bytes;
  }
  const std::span<const int64_t> sizes(layout.sizes, rank);
  try {
    if (empty) return ConstTensorView(layout.data, layout.dtype, sizes, layout.device);
    const ConstTensorView view(layout.data, layout.dtype, sizes, {strides, rank}, layout.device);
    const bool contiguous = rank == 0 || strides[rank - 1] == 1 || rows == Rows::kAny ||
                            (rows == Rows::kContiguousOrRepeated && strides[rank - 1] == 0);
    if (divisible && contiguous) return view;
    if (writable) {
      Fail(argument.operation, argument.name, "is not aligned to its elements", "an aligned array");
    }
    if (layout.device.type != DeviceType::kCpu) {
      Fail(argument.operation, argument.name,
           "is on " + NameOf(layout.device) +
               (contiguous ? " and not aligned to its elements" : " and its last axis is not contiguous"),
           "a tensor that need not be copied there");
    }
    if (Strict() && !allow_shapes_) {
      throw Unsupported(std::string(argument.operation) + ": " + argument.name +
                        (contiguous ? ": is not aligned to its elements" : ": its last axis is not contiguous") +
                        ", so that it would be copied, which heed.set_strict(True) forbids");
    }
    if (!contiguous) copied_.push_back(argument.name);
    // If only shapes are needed, masks and integers are still read, but no floats.
    if ((allow_shapes_ && IsFloat(layout.dtype)) || layout.data == nullptr)
      return ConstTensorView(nullptr, layout.dtype, sizes);
    ArrayHolder& holder = holders_.emplace_front();
    const auto num_bytes = static_cast<size_t>(view.num_elements() * item_bytes);
    holder.copy.reset(new char[num_bytes]);
    CopyStrided(static_cast<const char*>(layout.data), layout.sizes, layout.byte_strides, layout.rank,
                static_cast<size_t>(item_bytes), holder.copy.get());
    return ConstTensorView(holder.copy.get(), layout.dtype, sizes);
  } catch (const InvalidArgument& error) {
    // The sizes overflow, and the view does not know the argument's name.
    std::string text = error.what();
    if (text.rfind("tensor ", 0) != 0) throw;
    throw InvalidArgument(std::string(argument.operation) + ": " + argument.name + text.substr(6));
  }
}

ConstTensorView Arrays::Import(const Argument& argument, Kind kind, bool writable, Rows rows) {
  ArrayLayout layout;
  const auto check_dtype = [&] {
    if (layout.unknown_dtype.empty()) return;
    Fail(argument.operation, argument.name, "has dtype " + layout.unknown_dtype, KindName(kind));
  };
  if (allow_torch_ && ImportTorch(argument, layout, allow_devices_)) {
    check_dtype();
    return View(argument, layout, writable, rows);
  }
  ArrayHolder& holder = holders_.emplace_front();
  bool found = ImportBuffer(argument, argument.value, writable, holder, layout) ||
               ImportDlpack(argument, writable, holder, layout);
  if (!found && IsBFloat16(argument.value)) {
    const nb::object bits = argument.value.attr("view")("uint16");
    found = ImportBuffer(argument, bits, writable, holder, layout);
    layout.dtype = DType::kBF16;
    layout.unknown_dtype.clear();
  }
  if (!found) {
    if (layout.refusal.empty()) Fail(argument, kArrayExpected);
    Fail(argument.operation, argument.name, "cannot be read (" + layout.refusal + ")", kArrayExpected);
  }
  check_dtype();
  return View(argument, layout, writable, rows);
}

ConstTensorView Arrays::FromShape(const Argument& argument, Kind kind) {
  ArrayLayout layout;
  const nb::tuple shape = nb::borrow<nb::tuple>(argument.value);
  if (shape.size() > static_cast<size_t>(kMaxRank)) {
    FailRank(argument, static_cast<int64_t>(shape.size()));
  }
  layout.dtype = kind == Kind::kFloat ? shape_dtype_ : kind == Kind::kInt ? DType::kI64 : DType::kBool;
  layout.rank = static_cast<int>(shape.size());
  int64_t stride = static_cast<int64_t>(SizeOf(layout.dtype));
  for (int i = layout.rank; i-- > 0;) {
    layout.sizes[i] = ToInt({argument.operation, argument.name, shape[static_cast<size_t>(i)]}, 0, INT64_MAX);
    layout.byte_strides[i] = stride;
    if (__builtin_mul_overflow(stride, layout.sizes[i], &stride)) {
      Fail(argument, "fewer than 2^63 bytes");
    }
  }
  return View(argument, layout, false, Rows::kContiguous);
}

ConstTensorView Arrays::Read(const Argument& argument, Kind kind) {
  if (allow_shapes_ && PyTuple_Check(argument.value.ptr())) return FromShape(argument, kind);
  return Import(argument, kind, false, Rows::kContiguous);
}

ConstTensorView Arrays::ReadInPlace(const Argument& argument, Kind kind) {
  if (allow_shapes_ && PyTuple_Check(argument.value.ptr())) return FromShape(argument, kind);
  return Import(argument, kind, false, Rows::kAny);
}

ConstTensorView Arrays::ReadBroadcast(const Argument& argument, Kind kind) {
  if (allow_shapes_ && PyTuple_Check(argument.value.ptr())) return FromShape(argument, kind);
  return Import(argument, kind, false, Rows::kContiguousOrRepeated);
}

ConstTensorView Arrays::ReadPositions(const Argument& argument) {
  const ConstTensorView view = ReadList(argument, Kind::kInt);
  CheckOnCpu(argument, view);
  if (view.dtype() != DType::kI32 || view.rank() != 1 || view.data() == nullptr) return view;
  const auto size = static_cast<size_t>(view.size(0));
  ArrayHolder& holder = holders_.emplace_front();
  holder.copy.reset(new char[size * sizeof(int64_t)]);
  std::copy_n(view.as<int32_t>(), size, reinterpret_cast<int64_t*>(holder.copy.get()));
  return ConstTensorView(holder.copy.get(), DType::kI64, view.sizes());
}

ConstTensorView Arrays::ReadList(const Argument& argument, Kind kind) {
  PyObject* const p = argument.value.ptr();
  if (!PyList_Check(p) && (allow_shapes_ || !PyTuple_Check(p))) return Read(argument, kind);
  nb::object array;
  try {
    array = NumPyArray(argument.value);
    // NumPy converts an empty list to floats.
    const bool empty = nb::cast<int64_t>(array.attr("size")) == 0;
    if (empty && kind == Kind::kInt) array = array.attr("astype")("int64");
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
    Fail(argument, std::string("numbers of one shape, ") + KindName(kind));
  }
  return Import({argument.operation, argument.name, array}, kind, false, Rows::kContiguous);
}

void CheckOnCpu(const Argument& argument, const ConstTensorView& view) {
  if (view.device().type == DeviceType::kCpu) return;
  Fail(argument.operation, argument.name, "is on " + NameOf(view.device()), "the CPU");
}

TensorView Arrays::Write(const Argument& argument, Kind kind) {
  const ConstTensorView view = Import(argument, kind, true, Rows::kAny);
  return TensorView(const_cast<void*>(view.data()), view.dtype(), view.sizes(), view.strides(), view.device());
}

}  // namespace heed::python
