# libheed: compiled once as objects. `heed` is what gets installed; `heed_internal` is the same objects as a static library
# for everything in this tree, which may call functions that the shared library does not export.
file(GLOB_RECURSE sources CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/heed/core/*.cc
  ${PROJECT_SOURCE_DIR}/heed/cuda/*.cc
  ${PROJECT_SOURCE_DIR}/heed/io/*.cc
  ${PROJECT_SOURCE_DIR}/heed/engines/*.cc
  ${PROJECT_SOURCE_DIR}/heed/layers/*.cc
  ${PROJECT_SOURCE_DIR}/heed/model/*.cc
  ${PROJECT_SOURCE_DIR}/heed/patterns/*.cc
  ${PROJECT_SOURCE_DIR}/heed/state/*.cc
  ${PROJECT_SOURCE_DIR}/heed/mechanism/*.cc
  ${PROJECT_SOURCE_DIR}/heed/ops/positions/*.cc
  ${PROJECT_SOURCE_DIR}/heed/ops/*/common/*.cc)
list(FILTER sources EXCLUDE REGEX "_(test|case|py)\\.cc$")
set(system posix)
if(WIN32)
  set(system windows)
elseif(CMAKE_SYSTEM_NAME STREQUAL "WASI")
  set(system wasi)
endif()
list(FILTER sources EXCLUDE REGEX "/os_[a-z]+\\.cc$")
list(APPEND sources ${PROJECT_SOURCE_DIR}/heed/core/os_${system}.cc)

add_library(heed_objects OBJECT ${sources})
include(${CMAKE_CURRENT_LIST_DIR}/units.cmake)
block()
  include(${PROJECT_SOURCE_DIR}/heed/engines/softmax/units.cmake)
endblock()
target_compile_definitions(heed_objects PRIVATE HEED_BUILDING HEED_VERSION="${PROJECT_VERSION}")
# Used inside only: no installed header names one of them.
target_link_libraries(heed_objects PRIVATE heed_flags hwy::hwy nlohmann_json::nlohmann_json Threads::Threads)

add_library(heed)
add_library(heed::heed ALIAS heed)
target_sources(heed PRIVATE $<TARGET_OBJECTS:heed_objects>)
# Public headers are those in the file set HEADERS, and no others. Ops add theirs in heed_add_op.
file(GLOB public_headers CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/heed/heed.h
  ${PROJECT_SOURCE_DIR}/heed/io/*.h
  ${PROJECT_SOURCE_DIR}/heed/layers/*.h
  ${PROJECT_SOURCE_DIR}/heed/model/*.h
  ${PROJECT_SOURCE_DIR}/heed/patterns/*.h
  ${PROJECT_SOURCE_DIR}/heed/state/*.h
  ${PROJECT_SOURCE_DIR}/heed/mechanism/*.h
  ${PROJECT_SOURCE_DIR}/heed/ops/positions/*.h
  ${PROJECT_SOURCE_DIR}/heed/ops/*/common/*.h)
foreach(name context dispatch dtype error export tensor)
  if(EXISTS ${PROJECT_SOURCE_DIR}/heed/core/${name}.h)
    list(APPEND public_headers ${PROJECT_SOURCE_DIR}/heed/core/${name}.h)
  endif()
endforeach()
list(FILTER public_headers EXCLUDE REGEX "(_(internal|case|py)|-inl)\\.h$")
target_sources(heed PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${public_headers})
target_compile_features(heed PUBLIC cxx_std_20)
target_link_libraries(heed PRIVATE Threads::Threads ${CMAKE_DL_LIBS} $<BUILD_INTERFACE:hwy::hwy>)
set_target_properties(heed PROPERTIES
  LINKER_LANGUAGE CXX
  VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
  VERIFY_INTERFACE_HEADER_SETS ${HEED_BUILD_TESTS})

if(BUILD_SHARED_LIBS)
  # Highway inside libheed.so stays inside, whatever visibility it was built with.
  if(UNIX AND NOT APPLE)
    set(map ${CMAKE_CURRENT_LIST_DIR}/libheed.map)
    target_link_options(heed PRIVATE LINKER:--exclude-libs,ALL LINKER:--version-script=${map})
    set_property(TARGET heed APPEND PROPERTY LINK_DEPENDS ${map})
  endif()
  add_library(heed_internal STATIC $<TARGET_OBJECTS:heed_objects>)
  set_target_properties(heed_internal PROPERTIES LINKER_LANGUAGE CXX)
else()
  target_compile_definitions(heed_objects PRIVATE HEED_STATIC)
  target_compile_definitions(heed PUBLIC HEED_STATIC)
  add_library(heed_internal INTERFACE)
  target_link_libraries(heed_internal INTERFACE heed)
endif()
target_compile_definitions(heed_internal INTERFACE HEED_STATIC HEED_VERSION="${PROJECT_VERSION}")
target_link_libraries(heed_internal INTERFACE
  heed_flags hwy::hwy nlohmann_json::nlohmann_json Threads::Threads ${CMAKE_DL_LIBS})

# AMX products and vector code are interleaved by hand; GCC's generic scheduler undoes a sixth of that. No instruction
# set follows from this flag, except where a driver of clang takes it for -march, as Zig's does.
set(amx_kernels softmax/amx/forward.cc softmax/amx/backward.cc recurrence/forward_amx.cc)
include(CheckCXXCompilerFlag)
check_cxx_compiler_flag(-mtune=sapphirerapids HEED_HAS_TUNE_SAPPHIRERAPIDS)
list(TRANSFORM amx_kernels PREPEND ${PROJECT_SOURCE_DIR}/heed/engines/)
if(HEED_HAS_TUNE_SAPPHIRERAPIDS AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set_source_files_properties(${amx_kernels} PROPERTIES COMPILE_OPTIONS -mtune=sapphirerapids)
endif()

# The emulation of AMX takes compilers a quarter of an hour each under sanitizers. The
# emulation's memory is its operands', which the other kernels read under them.
if(CMAKE_CXX_FLAGS MATCHES "-fsanitize=[^ ]*(address|thread)")
  list(FILTER amx_kernels INCLUDE REGEX "/softmax/")
  set_property(SOURCE ${amx_kernels} APPEND PROPERTY COMPILE_OPTIONS -fno-sanitize=all)
endif()

# Kernels do without precompiled headers, which would gain them little: compiler caches find them whatever the build folder.
function(heed_precompile_library)
  get_target_property(sources heed_objects SOURCES)
  set(kernels "")
  foreach(source IN LISTS sources)
    file(STRINGS ${source} of_targets REGEX "hwy/foreach_target\\.h" LIMIT_COUNT 1)
    if(of_targets)
      list(APPEND kernels ${source})
    endif()
  endforeach()
  if(HEED_TARGETS STREQUAL "native" OR CMAKE_SYSTEM_NAME STREQUAL "WASI")
    heed_shorten_compilation(${kernels})
  else()
    set_source_files_properties(${kernels} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  endif()
  target_precompile_headers(heed_objects PRIVATE ${HEED_STANDARD_HEADERS})
  set_target_properties(heed_objects PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  heed_unite("_reference" ${sources})
endfunction()

# The files <name><suffix>.cc of a family's mechanisms, which have namespaces of their own, are read as one file: the
# references, which instantiate the same templates, in half the time.
function(heed_unite suffix)
  foreach(source IN LISTS ARGN)
    cmake_path(GET source PARENT_PATH folder)
    cmake_path(GET folder FILENAME name)
    cmake_path(GET folder PARENT_PATH family)
    cmake_path(GET family FILENAME family)
    if(source STREQUAL "${folder}/${name}${suffix}.cc")
      set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${family}${suffix})
    endif()
  endforeach()
endfunction()

# HEED_TARGETS=native, and WebAssembly, are for short compile times. Kernels become a library with precompiled headers of its own, which save a
# tenth of their time: g++ 12 crashes on those of another -O. What has no kernel is compiled with -O1, in three quarters of the
# time. The main files of a family's mechanisms are read as one file.
function(heed_shorten_compilation)
  get_target_property(sources heed_objects SOURCES)
  list(REMOVE_ITEM sources ${ARGN})
  set_property(TARGET heed_objects PROPERTY SOURCES ${sources})
  add_library(heed_kernels OBJECT ${ARGN})
  foreach(property COMPILE_DEFINITIONS LINK_LIBRARIES)
    get_target_property(value heed_objects ${property})
    set_property(TARGET heed_kernels PROPERTY ${property} ${value})
  endforeach()
  target_precompile_headers(heed_kernels PRIVATE ${HEED_STANDARD_HEADERS})
  foreach(source IN LISTS ARGN)
    get_source_file_property(options ${source} COMPILE_OPTIONS)  # -mtune, which a precompiled header would have to share
    if(options)
      set_source_files_properties(${source} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
    endif()
  endforeach()
  target_sources(heed PRIVATE $<TARGET_OBJECTS:heed_kernels>)
  if(BUILD_SHARED_LIBS)
    target_sources(heed_internal PRIVATE $<TARGET_OBJECTS:heed_kernels>)
  endif()

  target_compile_options(heed_objects PRIVATE $<$<CONFIG:Release>:-O1>)
  heed_unite("" ${sources})
endfunction()
