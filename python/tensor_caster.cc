// Arrays in and out of Python: DLPack and the buffer protocol to views, views
// to NumPy.
//
// The buffer protocol comes first: it is the faster of the two for NumPy and
// the only one that gives away read-only arrays. What it refuses (PyTorch has
// none) goes through DLPack.
#include "python/tensor_caster.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "heed/core/error.h"

namespace heed::python {

// What an exporter told: sizes, strides in bytes, and an element type that heed
// has, or a name.
struct Arrays::Layout {
  void* data = nullptr;
  int rank = 0;
  int64_t sizes[kMaxRank];
  int64_t byte_strides[kMaxRank];
  DType dtype = DType::kF32;
  std::string unknown_dtype;
  std::string refusal;  // why the exporter gave nothing
};

namespace {

static_assert(std::endian::native == std::endian::little,
              "formats are read as little-endian");

constexpr char kArrayExpected[] =
    "an array on the CPU with DLPack or the buffer protocol";

const char* KindName(Kind kind) {
  switch (kind) {
    case Kind::kFloat:
      return "f64, f32, bf16 or f16";
    case Kind::kInt:
      return "i32 or i64";
    case Kind::kBool:
      return "bool";
  }
  return "";
}

// The element type of a buffer: `format` in the notation of Python's struct
// module.
void ParseFormat(const char* format, int64_t item_bytes, DType& dtype,
                 std::string& unknown) {
  if (format == nullptr) format = "B";
  const char* code = format;
  const bool swapped = *code == '>' || *code == '!';
  if (*code != '\0' && std::strchr("@=<>!", *code) != nullptr) ++code;
  const auto is = [&](const char* codes, int64_t bytes) {
    return std::strchr(codes, *code) != nullptr && item_bytes == bytes;
  };
  if (*code == 'Z') {
    unknown = "c" + std::to_string(8 * item_bytes);
  } else if (*code == '\0' || code[1] != '\0') {
    unknown = std::string("'") + format + "'";
  } else if (is("f", 4)) {
    dtype = DType::kF32;
  } else if (is("d", 8)) {
    dtype = DType::kF64;
  } else if (is("e", 2)) {
    dtype = DType::kF16;
  } else if (is("ilq", 4)) {
    dtype = DType::kI32;
  } else if (is("ilq", 8)) {
    dtype = DType::kI64;
  } else if (is("?", 1)) {
    dtype = DType::kBool;
  } else if (std::strchr("bhilq", *code) != nullptr) {
    unknown = "i" + std::to_string(8 * item_bytes);
  } else if (std::strchr("BHILQ", *code) != nullptr) {
    unknown = "u" + std::to_string(8 * item_bytes);
  } else if (std::strchr("efdg", *code) != nullptr) {
    unknown = "f" + std::to_string(8 * item_bytes);
  } else {
    unknown = std::string("'") + format + "'";
  }
  if (swapped && item_bytes > 1)
    unknown = std::string("big-endian '") + format + "'";
}

// The same for DLPack.
void ParseDlType(DLDataType type, DType& dtype, std::string& unknown) {
  const auto is = [&](uint8_t code, uint8_t bits) {
    return type.code == code && type.bits == bits && type.lanes == 1;
  };
  if (is(kDLFloat, 32)) {
    dtype = DType::kF32;
  } else if (is(kDLFloat, 64)) {
    dtype = DType::kF64;
  } else if (is(kDLFloat, 16)) {
    dtype = DType::kF16;
  } else if (is(kDLBfloat, 16)) {
    dtype = DType::kBF16;
  } else if (is(kDLInt, 32)) {
    dtype = DType::kI32;
  } else if (is(kDLInt, 64)) {
    dtype = DType::kI64;
  } else if (is(kDLBool, 8)) {
    dtype = DType::kBool;
  } else {
    const char* family = "DLPack type ";
    if (type.code == kDLInt) family = "i";
    if (type.code == kDLUInt) family = "u";
    if (type.code == kDLFloat) family = "f";
    if (type.code == kDLComplex) family = "c";
    if (*family == 'D')
      unknown = family + std::to_string(type.code) + " of bits ";
    else
      unknown = family;
    unknown += std::to_string(type.bits);
    if (type.lanes != 1) unknown += "x" + std::to_string(type.lanes);
  }
}

// Copies a strided array into row-major order; returns the end of what was
// written.
char* CopyStrided(const char* from, const int64_t* sizes,
                  const int64_t* byte_strides, int rank, size_t item_bytes,
                  char* to) {
  if (rank == 0) {
    std::memcpy(to, from, item_bytes);
    return to + item_bytes;
  }
  for (int64_t i = 0; i < sizes[0]; ++i) {
    to = CopyStrided(from, sizes + 1, byte_strides + 1, rank - 1, item_bytes,
                     to);
    from += byte_strides[0];
  }
  return to;
}

// Reads the pending Python error as text and clears it. Interrupts and exits
// pass through.
std::string TakeError() {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();
  const nb::python_error error;
  return nb::cast<std::string>(nb::str(error.value()));
}

// A NumPy array of ml_dtypes.bfloat16, which NumPy cannot export: the same bits
// as uint16 can be.
bool IsBFloat16(nb::handle value) {
  if (!nb::hasattr(value, "dtype") || !nb::hasattr(value, "view")) return false;
  return nb::getattr(value.attr("dtype"), "name", nb::none())
      .equal(nb::str("bfloat16"));
}

std::string RankText(int64_t rank) {
  return "has rank " + std::to_string(rank);
}

// Never destroyed: the interpreter is gone when static objects die.
struct NumPy {
  nb::object* module = new nb::object(nb::module_::import_("numpy"));
  nb::object* empty = new nb::object(module->attr("empty"));
  nb::object* asarray = new nb::object(module->attr("asarray"));
  nb::object* dtypes[7];

  NumPy() {
    const char* names[7] = {"float64", "float32", "uint16", "float16",
                            "int64",   "int32",   "bool"};
    for (int i = 0; i < 7; ++i)
      dtypes[i] = new nb::object(module->attr("dtype")(names[i]));
  }

  // Imported when the first array is made, not with heed.
  static const NumPy& Get() {
    static const NumPy* numpy = new NumPy;
    return *numpy;
  }
};

}  // namespace

Arrays::Holder::~Holder() {
  if (buffer.obj != nullptr) PyBuffer_Release(&buffer);
  if (tensor != nullptr && tensor->deleter != nullptr) tensor->deleter(tensor);
  if (versioned != nullptr && versioned->deleter != nullptr)
    versioned->deleter(versioned);
}

bool Arrays::FromBuffer(const Argument& argument, nb::handle value,
                        bool writable, Layout& layout) {
  if (!PyObject_CheckBuffer(value.ptr())) return false;
  Holder& holder = holders_.emplace_front();
  Py_buffer& buffer = holder.buffer;
  if (PyObject_GetBuffer(value.ptr(), &buffer,
                         PyBUF_STRIDED_RO | PyBUF_FORMAT) != 0) {
    layout.refusal = TakeError();
    holders_.pop_front();
    return false;
  }
  if (writable && buffer.readonly) {
    Fail(argument.operation, argument.name, "is read-only", "a writable array");
  }
  if (buffer.ndim > kMaxRank) {
    Fail(argument.operation, argument.name, RankText(buffer.ndim),
         "at most " + std::to_string(kMaxRank));
  }
  layout.data = buffer.buf;
  layout.rank = buffer.ndim;
  for (int i = 0; i < buffer.ndim; ++i) {
    layout.sizes[i] = buffer.shape[i];
    layout.byte_strides[i] = buffer.strides[i];
  }
  ParseFormat(buffer.format, buffer.itemsize, layout.dtype,
              layout.unknown_dtype);
  return true;
}

bool Arrays::FromDlpack(const Argument& argument, bool writable,
                        Layout& layout) {
  const nb::handle value = argument.value;
  const auto fail = [&](const std::string& got, const char* expected) {
    Fail(argument.operation, argument.name, got, expected);
  };
  const auto check_device = [&](int64_t type) {
    if (type != kDLCPU && type != kDLCUDAHost && type != kDLROCMHost) {
      fail("is on DLPack device type " + std::to_string(type) +
               (type == 2 ? " (CUDA)" : ""),
           "an array on the CPU");
    }
  };
  nb::object capsule;
  try {
    if (!nb::hasattr(value, "__dlpack__")) return false;
    if (nb::hasattr(value, "__dlpack_device__")) {
      check_device(nb::cast<int64_t>(value.attr("__dlpack_device__")()[0]));
    }
    try {
      capsule = value.attr("__dlpack__")(nb::arg("max_version") =
                                             nb::make_tuple(1, 0));
    } catch (const nb::python_error& error) {
      if (!error.matches(PyExc_TypeError))
        throw;  // a producer from before DLPack 1.0
      capsule = value.attr("__dlpack__")();
    }
  } catch (nb::python_error& error) {
    error.restore();
    layout.refusal = TakeError();
    return false;
  } catch (const nb::cast_error&) {
    fail("has a __dlpack_device__ that is not a pair of ints",
         "an array on the CPU");
  }

  Holder& holder = holders_.emplace_front();
  const DLTensor* tensor = nullptr;
  uint64_t flags = 0;
  PyObject* const p = capsule.ptr();
  if (PyCapsule_IsValid(p, "dltensor_versioned")) {
    auto* versioned = static_cast<DLManagedTensorVersioned*>(
        PyCapsule_GetPointer(p, "dltensor_versioned"));
    if (versioned->version.major != 1) {
      fail("has DLPack version " + std::to_string(versioned->version.major),
           "1");
    }
    PyCapsule_SetName(p, "used_dltensor_versioned");
    holder.versioned = versioned;
    tensor = &versioned->dl_tensor;
    flags = versioned->flags;
  } else if (PyCapsule_IsValid(p, "dltensor")) {
    holder.tensor =
        static_cast<DLManagedTensor*>(PyCapsule_GetPointer(p, "dltensor"));
    PyCapsule_SetName(p, "used_dltensor");
    tensor = &holder.tensor->dl_tensor;
  } else {
    fail("has a __dlpack__ that returns no new DLPack capsule", kArrayExpected);
  }
  check_device(tensor->device.device_type);
  if (writable && (flags & kDLReadOnly) != 0)
    fail("is read-only", "a writable array");
  if (writable && (flags & kDLIsCopied) != 0)
    fail("is exported as a copy", "the array itself");
  if (tensor->ndim < 0 || tensor->ndim > kMaxRank) {
    fail(RankText(tensor->ndim), "at most 5");
  }

  ParseDlType(tensor->dtype, layout.dtype, layout.unknown_dtype);
  layout.data = static_cast<char*>(tensor->data) + tensor->byte_offset;
  layout.rank = tensor->ndim;
  const int64_t item_bytes = tensor->dtype.bits / 8;
  int64_t compact = item_bytes;
  for (int i = tensor->ndim; i-- > 0;) {
    layout.sizes[i] = tensor->shape[i];
    int64_t stride = compact;
    if (tensor->strides != nullptr &&
        __builtin_mul_overflow(tensor->strides[i], item_bytes, &stride)) {
      fail("has stride " + std::to_string(tensor->strides[i]),
           "fewer than 2^63 bytes");
    }
    layout.byte_strides[i] = stride;
    // An overflow here is a size that the view refuses.
    if (__builtin_mul_overflow(compact, layout.sizes[i], &compact)) compact = 0;
  }
  return true;
}

ConstTensorView Arrays::View(const Argument& argument, Layout& layout,
                             bool writable, Rows rows) {
  const auto item_bytes = static_cast<int64_t>(SizeOf(layout.dtype));
  const size_t rank = static_cast<size_t>(layout.rank);
  bool empty = false, divisible = reinterpret_cast<uintptr_t>(layout.data) %
                                      static_cast<uintptr_t>(item_bytes) ==
                                  0;
  int64_t strides[kMaxRank];
  for (size_t i = 0; i < rank; ++i) {
    empty = empty || layout.sizes[i] == 0;
    // The stride of an axis of one element means nothing, and exporters put
    // anything there.
    if (layout.sizes[i] <= 1)
      layout.byte_strides[i] = i + 1 == rank ? item_bytes : 0;
    divisible = divisible && layout.byte_strides[i] % item_bytes == 0;
    strides[i] = layout.byte_strides[i] / item_bytes;
  }
  const std::span<const int64_t> sizes(layout.sizes, rank);
  try {
    if (empty) return ConstTensorView(layout.data, layout.dtype, sizes);
    const ConstTensorView view(layout.data, layout.dtype, sizes,
                               {strides, rank});
    const bool contiguous =
        rank == 0 || strides[rank - 1] == 1 || rows == Rows::kAny ||
        (rows == Rows::kContiguousOrRepeated && strides[rank - 1] == 0);
    if (divisible && contiguous) return view;
    if (writable) {
      Fail(argument.operation, argument.name, "is not aligned to its elements",
           "an aligned array");
    }
    if (!contiguous) copied_.push_back(argument.name);
    // A description reads masks and integers, but no float.
    if (allow_shapes_ && IsFloat(layout.dtype))
      return ConstTensorView(nullptr, layout.dtype, sizes);
    Holder& holder = holders_.emplace_front();
    const auto num_bytes =
        static_cast<size_t>(view.num_elements() * item_bytes);
    holder.copy.reset(new char[num_bytes]);
    CopyStrided(static_cast<const char*>(layout.data), layout.sizes,
                layout.byte_strides, layout.rank,
                static_cast<size_t>(item_bytes), holder.copy.get());
    return ConstTensorView(holder.copy.get(), layout.dtype, sizes);
  } catch (const InvalidArgument& error) {
    // Sizes that overflow: the view does not know whose they are.
    std::string text = error.what();
    if (text.rfind("tensor ", 0) != 0) throw;
    throw InvalidArgument(std::string(argument.operation) + ": " +
                          argument.name + text.substr(6));
  }
}

ConstTensorView Arrays::Import(const Argument& argument, Kind kind,
                               bool writable, Rows rows) {
  Layout layout;
  bool found = FromBuffer(argument, argument.value, writable, layout) ||
               FromDlpack(argument, writable, layout);
  if (!found && IsBFloat16(argument.value)) {
    const nb::object bits = argument.value.attr("view")("uint16");
    found = FromBuffer(argument, bits, writable, layout);
    layout.dtype = DType::kBF16;
    layout.unknown_dtype.clear();
  }
  if (!found) {
    if (layout.refusal.empty()) Fail(argument, kArrayExpected);
    Fail(argument.operation, argument.name,
         "cannot be read (" + layout.refusal + ")", kArrayExpected);
  }
  if (!layout.unknown_dtype.empty()) {
    Fail(argument.operation, argument.name, "has dtype " + layout.unknown_dtype,
         KindName(kind));
  }
  return View(argument, layout, writable, rows);
}

ConstTensorView Arrays::FromShape(const Argument& argument, Kind kind) {
  Layout layout;
  const nb::tuple shape = nb::borrow<nb::tuple>(argument.value);
  if (shape.size() > static_cast<size_t>(kMaxRank)) {
    Fail(argument.operation, argument.name,
         RankText(static_cast<int64_t>(shape.size())),
         "at most " + std::to_string(kMaxRank));
  }
  layout.dtype = kind == Kind::kFloat ? shape_dtype_
                 : kind == Kind::kInt ? DType::kI64
                                      : DType::kBool;
  layout.rank = static_cast<int>(shape.size());
  int64_t stride = static_cast<int64_t>(SizeOf(layout.dtype));
  for (int i = layout.rank; i-- > 0;) {
    layout.sizes[i] = ToInt(
        {argument.operation, argument.name, shape[static_cast<size_t>(i)]}, 0,
        INT64_MAX);
    layout.byte_strides[i] = stride;
    if (__builtin_mul_overflow(stride, layout.sizes[i], &stride)) {
      Fail(argument, "fewer than 2^63 bytes");
    }
  }
  return View(argument, layout, false, Rows::kContiguous);
}

ConstTensorView Arrays::Read(const Argument& argument, Kind kind) {
  if (allow_shapes_ && PyTuple_Check(argument.value.ptr()))
    return FromShape(argument, kind);
  return Import(argument, kind, false, Rows::kContiguous);
}

ConstTensorView Arrays::ReadBroadcast(const Argument& argument, Kind kind) {
  if (allow_shapes_ && PyTuple_Check(argument.value.ptr()))
    return FromShape(argument, kind);
  return Import(argument, kind, false, Rows::kContiguousOrRepeated);
}

ConstTensorView Arrays::ReadPositions(const Argument& argument) {
  const ConstTensorView view = ReadList(argument, Kind::kInt);
  if (view.dtype() != DType::kI32 || view.rank() != 1 || view.data() == nullptr)
    return view;
  const auto size = static_cast<size_t>(view.size(0));
  Holder& holder = holders_.emplace_front();
  holder.copy.reset(new char[size * sizeof(int64_t)]);
  std::copy_n(view.as<int32_t>(), size,
              reinterpret_cast<int64_t*>(holder.copy.get()));
  return ConstTensorView(holder.copy.get(), DType::kI64, view.sizes());
}

ConstTensorView Arrays::ReadList(const Argument& argument, Kind kind) {
  PyObject* const p = argument.value.ptr();
  if (!PyList_Check(p) && (allow_shapes_ || !PyTuple_Check(p)))
    return Read(argument, kind);
  nb::object array;
  try {
    array = (*NumPy::Get().asarray)(argument.value);
    // NumPy takes an empty list for floats.
    const bool empty = nb::cast<int64_t>(array.attr("size")) == 0;
    if (empty && kind == Kind::kInt) array = array.attr("astype")("int64");
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
    Fail(argument, std::string("numbers of one shape, ") + KindName(kind));
  }
  return Import({argument.operation, argument.name, array}, kind, false,
                Rows::kContiguous);
}

TensorView Arrays::Write(const Argument& argument, Kind kind) {
  const ConstTensorView view = Import(argument, kind, true, Rows::kAny);
  return TensorView(const_cast<void*>(view.data()), view.dtype(), view.sizes(),
                    view.strides(), view.device());
}

NewArray::NewArray(const char* operation, DType dtype,
                   std::span<const int64_t> sizes) {
  const NumPy& numpy = NumPy::Get();
  PyObject* shape = PyTuple_New(static_cast<Py_ssize_t>(sizes.size()));
  if (shape == nullptr) throw nb::python_error();
  nb::object owner = nb::steal(shape);
  for (size_t i = 0; i < sizes.size(); ++i) {
    PyTuple_SET_ITEM(shape, static_cast<Py_ssize_t>(i),
                     PyLong_FromLongLong(sizes[i]));
  }
  PyObject* arguments[] = {shape, numpy.dtypes[static_cast<int>(dtype)]->ptr()};
  array =
      nb::steal(PyObject_Vectorcall(numpy.empty->ptr(), arguments, 2, nullptr));
  if (!array.is_valid()) throw nb::python_error();
  // Nobody else has the array: its memory stays where it is without holding the
  // buffer.
  Py_buffer buffer;
  if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_SIMPLE) != 0)
    throw nb::python_error();
  view = TensorView(buffer.buf, dtype, sizes);
  PyBuffer_Release(&buffer);
  if (dtype == DType::kBF16) {
    try {
      array = array.attr("view")(
          nb::module_::import_("ml_dtypes").attr("bfloat16"));
    } catch (const nb::python_error& error) {
      if (!error.matches(PyExc_ImportError)) throw;
      throw Unsupported(std::string(operation) +
                        ": a bf16 result needs the package ml_dtypes, which is "
                        "not installed");
    }
  }
}

}  // namespace heed::python
