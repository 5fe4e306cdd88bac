// Checks of the tensors of a part, with messages that name operation, argument,
// what it got and what it expected.
#ifndef HEED_OPS_PARTS_CHECK_INTERNAL_H_
#define HEED_OPS_PARTS_CHECK_INTERNAL_H_

#include <string>

#include "heed/core/tensor.h"

namespace heed::parts {

// Throws InvalidArgument "rotary: dim is 3, expected ...".
[[noreturn]] void Fail(const char* op, const char* name, const std::string& got,
                       const std::string& expected);

// "0.5", "1e+39".
std::string Text(double value);

// Present, on the CPU, aligned, with data where there are elements.
void CheckReadable(const char* op, const char* name, const ConstTensorView& t);

// The same for a float dtype.
void CheckFloat(const char* op, const char* name, const ConstTensorView& t);

// The last axis has stride 1.
void CheckContiguousRows(const char* op, const char* name,
                         const ConstTensorView& t);

// Readable, every element reached once, sharing no memory with `in`, which
// messages call `in_name`.
void CheckWritable(const char* op, const char* name, const TensorView& t,
                   const char* in_name, const ConstTensorView& in);

}  // namespace heed::parts

#endif  // HEED_OPS_PARTS_CHECK_INTERNAL_H_
