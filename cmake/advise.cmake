# heed_advise: the adviser, its cost model and what measures it. Feeds the command line and the Python module.
file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/heed/advise/*.cc)
list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
add_library(heed_advise STATIC EXCLUDE_FROM_ALL ${sources})
target_link_libraries(heed_advise PUBLIC heed_harness)
target_precompile_headers(heed_advise REUSE_FROM heed_cases)
target_compile_options(heed_advise PRIVATE $<$<CONFIG:Release>:-O1>)  # what it measures is the library
