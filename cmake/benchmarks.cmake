# bench_ops: throughput of every operation, verified before it is timed.
file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/benchmarks/*.cc)
if(sources)
  add_executable(bench_ops ${sources} ${PROJECT_SOURCE_DIR}/cli/format.cc)
  target_link_libraries(bench_ops PRIVATE heed_harness heed_bench_libraries benchmark::benchmark fmt::fmt-header-only)
  target_precompile_headers(bench_ops PRIVATE ${HEED_STANDARD_HEADERS} <fmt/format.h> <nlohmann/json.hpp>)
endif()
