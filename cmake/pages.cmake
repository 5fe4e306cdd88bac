# heed_pages: pages of HTML, for the command line and the Python module. They carry their style and scripts with them.
include(cmake/embed.cmake)
file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/heed/pages/*.cc)
list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
file(GLOB web_files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/heed/pages/web/*)
heed_embed(${PROJECT_BINARY_DIR}/page_files.cc PageFiles ${web_files})
add_library(heed_pages STATIC EXCLUDE_FROM_ALL ${sources} ${PROJECT_BINARY_DIR}/page_files.cc)
target_link_libraries(heed_pages PUBLIC heed_harness)
target_precompile_headers(heed_pages PRIVATE <nlohmann/json.hpp>)
