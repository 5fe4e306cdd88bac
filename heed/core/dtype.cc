// Conversions between element types: scalar and exact to the bit.
#include "heed/core/dtype.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "heed/core/error.h"

namespace heed {
namespace {

struct Info {
  DType dtype;
  const char* name;
  size_t num_bytes;
};

constexpr Info kInfo[] = {
    {DType::kF64, "f64", 8}, {DType::kF32, "f32", 4}, {DType::kBF16, "bf16", 2}, {DType::kF16, "f16", 2},
    {DType::kI64, "i64", 8}, {DType::kI32, "i32", 4}, {DType::kBool, "bool", 1},
};

template <class T>
T Load(const void* data, int64_t index) {
  T value;
  const int64_t offset = index * static_cast<int64_t>(sizeof(T));
  std::memcpy(&value, static_cast<const char*>(data) + offset, sizeof(T));
  return value;
}

template <class T>
void Store(void* data, int64_t index, T value) {
  const int64_t offset = index * static_cast<int64_t>(sizeof(T));
  std::memcpy(static_cast<char*>(data) + offset, &value, sizeof(T));
}

// Converts a double to f32, rounded to odd: the last bit records whether anything was lost, so that a second rounding
// to 16 bits equals a single one.
float RoundToOdd(double x) {
  const float f = static_cast<float>(x);
  if (static_cast<double>(f) == x || !std::isfinite(f)) return f;
  uint32_t bits = std::bit_cast<uint32_t>(f);
  if (std::abs(static_cast<double>(f)) > std::abs(x)) --bits;
  return std::bit_cast<float>(bits | 1);
}

}  // namespace

size_t SizeOf(DType dtype) { return kInfo[static_cast<size_t>(dtype)].num_bytes; }

const char* Name(DType dtype) { return kInfo[static_cast<size_t>(dtype)].name; }

DType DTypeFromName(std::string_view name) {
  for (const Info& info : kInfo) {
    if (name == info.name) return info.dtype;
  }
  throw InvalidArgument("dtype is '" + std::string(name) + "', expected f64, f32, bf16, f16, i64, i32 or bool");
}

float ToFloat(BF16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

float ToFloat(F16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t exponent = (x.bits >> 10) & 31;
  const uint32_t mantissa = x.bits & 0x3FFu;
  if (exponent == 31) {
    return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  }
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  }
  const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

BF16 ToBF16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16)};
}

F16 ToF16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {static_cast<uint16_t>(sign | 0x7E00u)};
  if (magnitude >= 0x477FF000u) return {static_cast<uint16_t>(sign | 0x7C00u)};
  if (magnitude < 0x33000000u) return {sign};  // below 2^-25
  if (magnitude < 0x38800000u) {               // subnormal: round to units of 2^-24
    const uint32_t shift = 126 - (magnitude >> 23);
    const uint32_t significand = (magnitude & 0x7FFFFFu) | 0x800000u;
    const uint32_t units = significand >> shift;
    const uint32_t rest = significand & ((1u << shift) - 1);
    const uint32_t half = 1u << (shift - 1);
    const uint32_t up = rest > half || (rest == half && (units & 1)) ? 1 : 0;
    return {static_cast<uint16_t>(sign | (units + up))};
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1);
  return {static_cast<uint16_t>(sign | ((rounded - (112u << 23)) >> 13))};
}

double LoadAsDouble(DType dtype, const void* data, int64_t index) {
  switch (dtype) {
    case DType::kF64: return Load<double>(data, index);
    case DType::kF32: return Load<float>(data, index);
    case DType::kBF16: return ToFloat(Load<BF16>(data, index));
    case DType::kF16: return ToFloat(Load<F16>(data, index));
    default: throw InternalError("LoadAsDouble: not a float");
  }
}

void StoreDouble(DType dtype, void* data, int64_t index, double value) {
  switch (dtype) {
    case DType::kF64: return Store(data, index, value);
    case DType::kF32: return Store(data, index, static_cast<float>(value));
    case DType::kBF16: return Store(data, index, ToBF16(RoundToOdd(value)));
    case DType::kF16: return Store(data, index, ToF16(RoundToOdd(value)));
    default: throw InternalError("StoreDouble: not a float");
  }
}

int64_t LoadAsInt64(DType dtype, const void* data, int64_t index) {
  switch (dtype) {
    case DType::kI64: return Load<int64_t>(data, index);
    case DType::kI32: return Load<int32_t>(data, index);
    case DType::kBool: return Load<uint8_t>(data, index) != 0;
    default: throw InternalError("LoadAsInt64: not an integer");
  }
}

}  // namespace heed
