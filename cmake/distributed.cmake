# libheed_distributed: a sequence that several processes hold in parts. It uses libheed, and links no MPI: programs include
# heed/distributed/mpi.h with theirs.
file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/heed/distributed/*.cc)
list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
file(GLOB headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/heed/distributed/*.h)
list(FILTER headers EXCLUDE REGEX "(_internal|/mpi)\\.h$")

# The library of users, and the same on top of heed_internal for everything in this tree.
function(heed_add_distributed target library)
  add_library(${target} ${ARGN} ${sources})
  target_compile_definitions(${target} PRIVATE HEED_VERSION="${PROJECT_VERSION}")
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:heed_flags> PUBLIC ${library})
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)  # libheed computes
  target_precompile_headers(${target} PRIVATE ${HEED_STANDARD_HEADERS})
endfunction()
heed_add_distributed(heed_distributed heed)
add_library(heed::distributed ALIAS heed_distributed)
target_sources(heed_distributed PUBLIC
  FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${headers}
  FILE_SET mpi TYPE HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${PROJECT_SOURCE_DIR}/heed/distributed/mpi.h)
set_target_properties(heed_distributed PROPERTIES
  EXPORT_NAME distributed
  VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
  VERIFY_INTERFACE_HEADER_SETS ${HEED_BUILD_TESTS}
  INTERFACE_HEADER_SETS_TO_VERIFY HEADERS)
if(BUILD_SHARED_LIBS)
  if(WIN32)  # where calls of a shared library are compiled differently
    heed_add_distributed(heed_distributed_internal heed_internal STATIC EXCLUDE_FROM_ALL)
  else()
    add_library(heed_distributed_internal STATIC EXCLUDE_FROM_ALL $<TARGET_OBJECTS:heed_distributed>)
    set_target_properties(heed_distributed_internal PROPERTIES LINKER_LANGUAGE CXX)
    target_link_libraries(heed_distributed_internal PUBLIC heed_internal)
  endif()
  if(UNIX AND NOT APPLE)
    set(map ${CMAKE_CURRENT_LIST_DIR}/libheed.map)
    target_link_options(heed_distributed PRIVATE LINKER:--version-script=${map})
    set_property(TARGET heed_distributed APPEND PROPERTY LINK_DEPENDS ${map})
  endif()
else()
  add_library(heed_distributed_internal INTERFACE)
  target_link_libraries(heed_distributed_internal INTERFACE heed_distributed heed_internal)
endif()
