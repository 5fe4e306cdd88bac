# bench_ops: throughput of every operation, verified before it is timed.
file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/benchmarks/*.cc)
if(sources)
  add_executable(bench_ops ${sources} ${PROJECT_SOURCE_DIR}/cli/format.cc)
  target_link_libraries(bench_ops PRIVATE heed_harness heed_bench_libraries benchmark::benchmark fmt::fmt-header-only)
  target_precompile_headers(bench_ops PRIVATE ${HEED_STANDARD_HEADERS} <fmt/format.h> <nlohmann/json.hpp>)
endif()

# bench_cuda: kernels of GPUs beside what a GPU attains. On the emulated one of tests, which is a test of the program, times mean nothing.
if(TARGET heed_test_devices)
  add_executable(bench_cuda ${PROJECT_SOURCE_DIR}/benchmarks/cuda/bench_cuda.cc ${PROJECT_SOURCE_DIR}/cli/format.cc)
  target_link_libraries(bench_cuda PRIVATE heed_test_devices fmt::fmt-header-only)
  if(TARGET heed_cuda)
    target_sources(bench_cuda PRIVATE ${PROJECT_SOURCE_DIR}/benchmarks/cuda/limits.cu)
    set_target_properties(bench_cuda PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON)
  endif()
  add_test(NAME bench_cuda_runs COMMAND bench_cuda --emulated)
endif()
