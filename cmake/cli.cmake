# The program `heed`.
file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cli/*.cc)
list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
if(sources)
  add_executable(heed_cli ${sources})
  set_target_properties(heed_cli PROPERTIES OUTPUT_NAME heed)
  target_link_libraries(heed_cli PRIVATE heed_harness CLI11::CLI11)
endif()
