// Element types and the conversions between them.
//
// The 16-bit floats are plain structs: arithmetic happens in f32. Conversions to 16 bits round to nearest even, keep
// infinities and keep NaN a NaN.
#ifndef HEED_CORE_DTYPE_H_
#define HEED_CORE_DTYPE_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "heed/core/export.h"

namespace heed {

enum class DType : uint8_t { kF64, kF32, kBF16, kF16, kI64, kI32, kBool };

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// Bytes of one element.
HEED_API size_t SizeOf(DType dtype);

// "f64", "f32", "bf16", "f16", "i64", "i32", "bool".
HEED_API const char* Name(DType dtype);

// The inverse of Name. Throws InvalidArgument for anything else.
HEED_API DType DTypeFromName(std::string_view name);

inline bool IsFloat(DType dtype) { return dtype <= DType::kF16; }

HEED_API float ToFloat(BF16 x);
HEED_API float ToFloat(F16 x);
HEED_API BF16 ToBF16(float x);
HEED_API F16 ToF16(float x);

// LoadAsDouble returns element `index` of a float array, widened; StoreDouble rounds a double once into it.
HEED_API double LoadAsDouble(DType dtype, const void* data, int64_t index);
HEED_API void StoreDouble(DType dtype, void* data, int64_t index, double value);

// Returns element `index` of an i32, i64 or bool array.
HEED_API int64_t LoadAsInt64(DType dtype, const void* data, int64_t index);

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kF64;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<BF16> {
  static constexpr DType value = DType::kBF16;
};
template <>
struct DTypeOf<F16> {
  static constexpr DType value = DType::kF16;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kI64;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<bool> {
  static constexpr DType value = DType::kBool;
};

}  // namespace heed

#endif  // HEED_CORE_DTYPE_H_
