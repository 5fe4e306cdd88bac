# The compile units of the softmax engine that only instantiate passes: one per operand type, or per kind of CPU. f32
# serves 16-bit tensors too, which are widened. bf16 is for CPUs whose bf16 dot product is faster than their FMA, bytes
# for those with integer dot products of bytes. Units with AMX that have code of their own are amx/*.cc.
set(pairs TARGETS HEED_BF16_PAIRS)
set(bytes TARGETS HEED_BYTE_PRODUCTS)

# The logits and the outputs of blocks of rows, which all passes share.
set(block TEMPLATES block/block_parts-inl.h block/outputs-inl.h)
heed_add_unit(block_f32 "Blocks of rows, for f32." ${block}
  INSTANCES "HEED_COMPILE_BLOCKS(FmaOperands<float>)" "HEED_COMPILE_ONE_VECTOR(FmaOperands<float>)")
heed_add_unit(block_f64 "Blocks of rows, for f64." ${block} INSTANCES "HEED_COMPILE_BLOCKS(FmaOperands<double>)")
heed_add_unit(block_bf16 "Blocks of rows, for bf16 dot products." ${pairs} ${block} backward/gradient_operands-inl.h
  INSTANCES "HEED_COMPILE_BLOCKS(PairOperands)" "HEED_COMPILE_ONE_VECTOR(PairOperands)"
    "HEED_COMPILE_LOGITS(PairGradients, hs::kShapes.block_vectors)")

set(forward DECLARED kernels.h TEMPLATES forward/tasks-inl.h)
heed_add_unit(forward_f32 "The forward pass for f32." ${forward}
  PASSES "Passes ForwardF32 = ForwardPasses<FmaOperands<float>>()")
heed_add_unit(forward_f64 "The forward pass for f64." ${forward}
  PASSES "Passes ForwardF64 = ForwardPasses<FmaOperands<double>>()")
heed_add_unit(forward_bf16 "The forward pass with bf16 dot products." ${pairs} ${forward}
  PASSES "Passes ForwardPairs = ForwardPasses<PairOperands>()")

set(backward DECLARED kernels.h TEMPLATES backward/backward_tasks-inl.h backward/vector_gradients-inl.h)
heed_add_unit(backward_f32 "The backward pass for f32." ${backward}
  PASSES "Passes BackwardF32 = BackwardPasses<VectorGradients<FmaGradients<float>>>()")
heed_add_unit(backward_f64 "The backward pass for f64." ${backward}
  PASSES "Passes BackwardF64 = BackwardPasses<VectorGradients<FmaGradients<double>>>()")
heed_add_unit(backward_bf16 "The backward pass with bf16 dot products." ${pairs} ${backward}
  PASSES "Passes BackwardPairs = BackwardPasses<VectorGradients<PairGradients>>()")

set(decode DECLARED kernels.h TEMPLATES decode/decode_parts-inl.h)
heed_add_unit(decode_f32 "The forward pass for small M, for f32." ${decode}
  INSTANCES "HEED_COMPILE_STREAMED_ROWS(DecodeOperands<float>)"
  PASSES "Passes DecodeF32 = DecodePasses<DecodeOperands<float>>()")
heed_add_unit(decode_f64 "The forward pass for small M, for f64." ${decode}
  INSTANCES "HEED_COMPILE_STREAMED_ROWS(DecodeOperands<double>)"
  PASSES "Passes DecodeF64 = DecodePasses<DecodeOperands<double>>()")
heed_add_unit(decode_bf16 "The forward pass for small M, with bf16 dot products." ${pairs} ${decode}
  INSTANCES "HEED_COMPILE_STREAMED_ROWS(PairDecodeOperands)"
  PASSES "Passes DecodePairs = DecodePasses<PairDecodeOperands>()")
heed_add_unit(decode_int8 "The forward pass for small M, for int8 keys and values." ${decode}
  INSTANCES "HEED_COMPILE_ROWS(QuantizedOperands)"
  PASSES "Passes DecodeInt8 = DecodePasses<QuantizedOperands>()")
foreach(unit "bytes;Bytes;HEED_BYTE_PRODUCTS;integer dot products" "amx;Amx;HEED_AMX;AMX")
  list(POP_FRONT unit name suffix targets products)
  heed_add_unit(decode_int8_${name} "The forward pass for small M, for int8 keys and values with ${products}."
    TARGETS ${targets} ${decode} INSTANCES "HEED_COMPILE_ROWS(ByteOperands)"
    PASSES "Passes DecodeInt8${suffix} = DecodePasses<ByteOperands>()")
endforeach()

set(skipping DECLARED certified/skipping_internal.h TEMPLATES certified/skipping-inl.h)
heed_add_unit(skipping_f32 "Attention that skips values, vectorised over queries, for f32." ${skipping}
  PASSES "SkippingPasses SkippingF32 = LanePasses<FmaOperands<float>>()")
heed_add_unit(skipping_decode_f32 "Attention that skips values, small M, for f32." ${skipping}
  PASSES "SkippingPasses SkippingDecodeF32 = RowPasses<DecodeOperands<float>>()")
heed_add_unit(skipping_bf16 "Attention that skips values, with bf16 dot products." ${pairs} ${skipping}
  PASSES "SkippingPasses SkippingPairs = LanePasses<PairOperands>()"
    "SkippingPasses SkippingDecodePairs = RowPasses<PairDecodeOperands>()")

set(sketch DECLARED certified/sketch_internal.h TEMPLATES certified/sketch-inl.h)
heed_add_unit(sketch "Bounds of softmax sums from a sketch." ${sketch} PASSES "SketchPasses SketchOfTarget = Sketch()")
heed_add_unit(sketch_bytes "Bounds of softmax sums from a sketch, with integer dot products." ${bytes} ${sketch}
  PASSES "SketchPasses SketchOfBytes = Sketch()")

set(weights DECLARED weights/weights_internal.h TEMPLATES weights/weights-inl.h)
heed_add_unit(weights_f32 "Attention probabilities, for f32." ${weights}
  PASSES "WeightsPasses WeightsF32 = PassesOfWeights<FmaOperands<float>>()")
heed_add_unit(weights_f64 "Attention probabilities, for f64." ${weights}
  PASSES "WeightsPasses WeightsF64 = PassesOfWeights<FmaOperands<double>>()")
