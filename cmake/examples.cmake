# One program per example. They see what an installed heed offers, and no more; the tests run each.
file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/examples/*.cc)
foreach(source IN LISTS sources)
  cmake_path(GET source STEM name)
  add_executable(example_${name} ${source})
  target_link_libraries(example_${name} PRIVATE heed::heed)
  if(HEED_BUILD_TESTS)
    add_test(NAME example.${name} COMMAND example_${name} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  endif()
endforeach()

# A folder is one program too. It reads what its Python part has written; python/tests runs both.
file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/examples/*/*.cc)
foreach(source IN LISTS sources)
  cmake_path(GET source PARENT_PATH folder)
  cmake_path(GET folder FILENAME name)
  add_executable(example_${name} ${source})
  target_link_libraries(example_${name} PRIVATE heed::heed)
endforeach()
