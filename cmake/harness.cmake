# heed_harness: cases, the generated list of all operations, comparison. Feeds tests, benchmarks and the command line.
file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/heed/harness/*.cc ${PROJECT_SOURCE_DIR}/heed/ops/mechanism/*_case.cc
  ${PROJECT_SOURCE_DIR}/heed/ops/*/common/*_case.cc ${PROJECT_SOURCE_DIR}/heed/patterns/*_case.cc)
list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
get_property(cases GLOBAL PROPERTY HEED_OP_case)

heed_write_list(${PROJECT_BINARY_DIR}/all_ops.cc case heed/harness/case.h "OpEntry Entry();"
  "const std::vector<OpEntry>& AllOps()" "static const std::vector<OpEntry> all = {" "    NAME::Entry()," "};
  return all;")

if(sources OR cases)
  add_library(heed_harness STATIC EXCLUDE_FROM_ALL ${sources} ${cases} ${PROJECT_BINARY_DIR}/all_ops.cc)
  target_link_libraries(heed_harness PUBLIC heed_internal)
  target_precompile_headers(heed_harness PRIVATE ${HEED_STANDARD_HEADERS})
  # Cases draw numbers and make tables; what is timed of them is the library. Bounds of modes and convolutions are sums
  # over all tokens of all pairs of channels, half the seconds of H3's tests.
  set(light ${sources} ${cases})
  list(FILTER light INCLUDE REGEX "_case\\.cc$")
  list(FILTER light EXCLUDE REGEX "/mechanism/(modes|convolution)_case\\.cc$")
  set_source_files_properties(${light} PROPERTIES COMPILE_OPTIONS $<$<CONFIG:Release>:-O1>)
  set_source_files_properties(${PROJECT_SOURCE_DIR}/heed/harness/probe.cc ${PROJECT_SOURCE_DIR}/heed/harness/probe_pairs.cc
    PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
endif()
