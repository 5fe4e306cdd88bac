// heed: every attention mechanism on any CPU. Includes the whole public surface.
#ifndef HEED_HEED_H_
#define HEED_HEED_H_

#include "heed/core/context.h"
#include "heed/core/dispatch.h"
#include "heed/core/dtype.h"
#include "heed/core/error.h"
#include "heed/core/tensor.h"
#include "heed/io/npy.h"
#include "heed/io/safetensors.h"
#include "heed/ops/mechanisms.h"
#include "heed/ops/positions/alibi.h"
#include "heed/ops/linear/performer/orthogonal_features.h"
#include "heed/ops/mechanism/recurrent.h"
#include "heed/ops/positions/rotary.h"
#include "heed/ops/positions/rotary_scaling.h"
#include "heed/ops/positions/sinusoidal.h"
#include "heed/ops/positions/t5_bias.h"
#include "heed/ops/sparse/common/pattern.h"
#include "heed/ops/sparse/common/pattern_block_mask.h"
#include "heed/state/kv_cache.h"
#include "heed/state/latent_kv_cache.h"
#include "heed/state/ring_kv_cache.h"

#endif  // HEED_HEED_H_
