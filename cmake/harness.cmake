# heed_harness: cases, the generated list of all operations, comparison. Feeds tests, benchmarks and the command line.
file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/heed/harness/*.cc)
list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
get_property(cases GLOBAL PROPERTY HEED_OP_case)

if(sources OR cases)
  add_library(heed_harness STATIC EXCLUDE_FROM_ALL ${sources} ${cases})
  target_link_libraries(heed_harness PUBLIC heed_internal)
endif()
