# heed_harness: cases, the generated list of all operations, comparison. Feeds tests, benchmarks and the command line.
file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/heed/harness/*.cc ${PROJECT_SOURCE_DIR}/heed/harness/mechanism/*_case.cc
  ${PROJECT_SOURCE_DIR}/heed/ops/*/common/*_case.cc ${PROJECT_SOURCE_DIR}/heed/patterns/*_case.cc)
list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
get_property(cases GLOBAL PROPERTY HEED_OP_case)

heed_write_list(${PROJECT_BINARY_DIR}/all_ops.cc case heed/harness/case.h "OpEntry Entry();"
  "const std::vector<OpEntry>& AllOps()" "static const std::vector<OpEntry> all = {" "    NAME::Entry()," "};
  return all;")

if(sources OR cases)
  # Cases draw numbers and make tables; what is timed of them is the library. Bounds of modes and convolutions are sums
  # over all tokens of all pairs of channels, half the seconds of H3's tests.
  set(light ${sources} ${cases})
  list(FILTER light INCLUDE REGEX "_case\\.cc$")
  list(FILTER light EXCLUDE REGEX "/mechanism/(modes|convolution)_case\\.cc$")
  list(REMOVE_ITEM sources ${light})
  list(REMOVE_ITEM cases ${light})
  # A case of a mechanism, <name>_case.cc, has a namespace of its own: the compiler reads eight of them as one file.
  add_library(heed_cases OBJECT EXCLUDE_FROM_ALL ${light})
  target_link_libraries(heed_cases PRIVATE heed_internal)
  target_compile_options(heed_cases PRIVATE $<$<CONFIG:Release>:-O1>)
  target_precompile_headers(heed_cases PRIVATE ${HEED_STANDARD_HEADERS})
  set_target_properties(heed_cases PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
  foreach(case IN LISTS light)
    cmake_path(GET case PARENT_PATH folder)
    cmake_path(GET folder FILENAME name)
    if(NOT case STREQUAL "${folder}/${name}_case.cc" AND NOT folder STREQUAL "${PROJECT_BINARY_DIR}/mechanisms")
      set_source_files_properties(${case} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
  endforeach()
  add_library(heed_harness STATIC EXCLUDE_FROM_ALL ${sources} ${cases} ${PROJECT_BINARY_DIR}/all_ops.cc
    $<TARGET_OBJECTS:heed_cases>)
  target_link_libraries(heed_harness PUBLIC heed_internal)
  target_precompile_headers(heed_harness PRIVATE ${HEED_STANDARD_HEADERS})
  set_source_files_properties(${PROJECT_SOURCE_DIR}/heed/harness/probe.cc ${PROJECT_SOURCE_DIR}/heed/harness/probe_pairs.cc
    PROPERTIES SKIP_PRECOMPILE_HEADERS ON)

  # run_pass: a program for counters of instructions, which need no Google Benchmark.
  if(HEED_BUILD_TESTS OR HEED_BUILD_BENCHMARKS)
    add_executable(run_pass EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/benchmarks/instructions/run_pass.cc)
    target_link_libraries(run_pass PRIVATE heed_harness)
  endif()
endif()
