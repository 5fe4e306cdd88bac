# heed_harness: cases, the generated list of all operations, comparison. Feeds tests, benchmarks and the command line.
file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/heed/harness/*.cc ${PROJECT_SOURCE_DIR}/heed/ops/mechanism/*_case.cc
  ${PROJECT_SOURCE_DIR}/heed/ops/*/common/*_case.cc)
list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
get_property(cases GLOBAL PROPERTY HEED_OP_case)

heed_write_list(${PROJECT_BINARY_DIR}/all_ops.cc case heed/harness/case.h "OpEntry Entry();"
  "std::vector<OpEntry> AllOps()" "return {" "    NAME::Entry()," "};")

if(sources OR cases)
  add_library(heed_harness STATIC EXCLUDE_FROM_ALL ${sources} ${cases} ${PROJECT_BINARY_DIR}/all_ops.cc)
  target_link_libraries(heed_harness PUBLIC heed_internal)
endif()
