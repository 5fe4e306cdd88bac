# The compile units of selectors. f32 serves 16-bit tensors too, which are widened.
set(passes DECLARED select_internal.h TEMPLATES block_choice-inl.h indexer-inl.h)
heed_add_unit(passes_f32 "The kernels of selectors for f32." ${passes}
  PASSES "Passes PassesF32 = {&RunTopBlocks<float>, &RunCumulative<float>, &RunIndexer<float>}")
heed_add_unit(passes_f64 "The kernels of selectors for f64." ${passes}
  PASSES "Passes PassesF64 = {&RunTopBlocks<double>, &RunCumulative<double>, &RunIndexer<double>}")
