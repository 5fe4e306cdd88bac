# `cmake --install`: library, public headers, CMake package heed::heed, pkg-config files, and the program where it is built.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/heed)

install(TARGETS heed heed_distributed EXPORT heedTargets COMPONENT heed
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT heed
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT heed
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT heed
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT heed
  FILE_SET generated_headers DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT heed
  FILE_SET mpi DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT heed)
install(EXPORT heedTargets NAMESPACE heed:: DESTINATION ${package_dir} COMPONENT heed)

# A static libheed needs Highway at its user's link: a static Highway is installed beside it under our own name, so that the
# user needs none; a shared one must be there anyway.
set(HEED_HIGHWAY none)
set(HEED_PC_LIBS "-lheed")
set(HEED_PC_REQUIRES "")
set(HEED_PC_CFLAGS "")
if(NOT BUILD_SHARED_LIBS)
  set(HEED_PC_CFLAGS "-DHEED_STATIC")
  get_target_property(highway_type hwy::hwy TYPE)
  if(highway_type STREQUAL "STATIC_LIBRARY")
    set(HEED_HIGHWAY bundled)
    set(HEED_HIGHWAY_FILE ${CMAKE_STATIC_LIBRARY_PREFIX}heed_hwy${CMAKE_STATIC_LIBRARY_SUFFIX})
    install(FILES $<TARGET_FILE:hwy::hwy> DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME ${HEED_HIGHWAY_FILE} COMPONENT heed)
    target_link_libraries(heed PRIVATE $<INSTALL_INTERFACE:heed::highway>)
    string(APPEND HEED_PC_LIBS " -lheed_hwy")
  else()
    set(HEED_HIGHWAY installed)
    target_link_libraries(heed PRIVATE $<INSTALL_INTERFACE:hwy::hwy>)
    set(HEED_PC_REQUIRES "libhwy")
  endif()
  string(APPEND HEED_PC_LIBS " -lstdc++ -lm -pthread")
endif()

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/heedConfig.cmake.in ${PROJECT_BINARY_DIR}/heedConfig.cmake
  INSTALL_DESTINATION ${package_dir} PATH_VARS CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/heedConfigVersion.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/heedConfig.cmake ${PROJECT_BINARY_DIR}/heedConfigVersion.cmake
  DESTINATION ${package_dir} COMPONENT heed)

# The prefix in pkg-config files is relative to the file, so that an installed tree can be moved.
cmake_path(SET pc_dir NORMALIZE ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig)
cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX BASE_DIRECTORY ${pc_dir} OUTPUT_VARIABLE HEED_PC_PREFIX)
foreach(name IN ITEMS heed heed_distributed)
  configure_file(${PROJECT_SOURCE_DIR}/${name}.pc.in ${PROJECT_BINARY_DIR}/${name}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT heed)
endforeach()

if(TARGET heed_cli)
  install(TARGETS heed_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT heed)
  if(NOT CMAKE_CROSSCOMPILING)  # the program says itself what a shell completes
    set(completions ${PROJECT_BINARY_DIR}/completions)
    file(MAKE_DIRECTORY ${completions})
    add_custom_command(TARGET heed_cli POST_BUILD VERBATIM
      COMMAND heed_cli completion bash > ${completions}/heed
      COMMAND heed_cli completion zsh > ${completions}/_heed)
    install(FILES ${completions}/heed DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions COMPONENT heed)
    install(FILES ${completions}/_heed DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions COMPONENT heed)
  endif()
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT heed)
