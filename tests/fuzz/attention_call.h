// A call of attention made from random bytes: small shapes, any layout, every option, and sometimes a mistake.
#ifndef TESTS_FUZZ_ATTENTION_CALL_H_
#define TESTS_FUZZ_ATTENTION_CALL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "heed/ops/exact/attention/cases/attention_case.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/slots.h"

namespace heed::fuzz {

struct Call {
  attention::Problem problem;
  TensorView o, lse;    // in slots 0 and 1
  std::string mistake;  // the reason why it must be refused; empty if it must not be
  // extreme: an argument is valid but beyond single precision, so that only memory accesses are checked. doubtful: both
  // acceptance and refusal are right.
  bool extreme = false, doubtful = false;
};

// The call that `input` describes.
Call MakeCall(Input& input, Slots& slots);

}  // namespace heed::fuzz

#endif  // TESTS_FUZZ_ATTENTION_CALL_H_
