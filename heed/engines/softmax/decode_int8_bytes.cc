// The decode kernel for int8 rows on CPUs that multiply bytes.
#define HEED_BYTE_PRODUCTS
#include "heed/core/targets.h"
// After targets.h:
#include "heed/engines/softmax/forward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "heed/engines/softmax/decode_int8_bytes.cc"  // this file
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
#if HWY_TARGET == HWY_AVX3_DL
// After highway.h:
#include "heed/engines/softmax/decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace heed::softmax::HWY_NAMESPACE {

void RunInt8Bytes(Context& ctx, const Problem& problem) { Decode<ByteOperands>(ctx, problem); }

int64_t ScratchInt8Bytes(const Problem& problem, int num_threads) {
  return ScratchBytes<ByteOperands>(problem, DecodePlan<ByteOperands>(problem), num_threads);
}

int64_t RowsInt8Bytes() { return DecodeRows<ByteOperands>(); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace heed::softmax::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3_DL

#if HWY_ONCE
namespace heed::softmax {

#if HWY_TARGETS & HWY_AVX3_DL

bool HasDecodeInt8Bytes() { return true; }

void DecodeInt8Bytes(Context& ctx, const Problem& problem) { N_AVX3_DL::RunInt8Bytes(ctx, problem); }

int64_t DecodeWorkspaceInt8Bytes(const Context& ctx, const Problem& problem) {
  return N_AVX3_DL::ScratchInt8Bytes(problem, ctx.num_threads());
}

int64_t DecodeRowsInt8Bytes(const Context&, const Problem&) { return N_AVX3_DL::RowsInt8Bytes(); }

#else  // never called

bool HasDecodeInt8Bytes() { return false; }
void DecodeInt8Bytes(Context&, const Problem&) {}
int64_t DecodeWorkspaceInt8Bytes(const Context&, const Problem&) { return 0; }
int64_t DecodeRowsInt8Bytes(const Context&, const Problem&) { return 0; }

#endif  // HWY_TARGETS & HWY_AVX3_DL

}  // namespace heed::softmax
#endif  // HWY_ONCE
