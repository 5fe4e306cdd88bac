# The only file that names a third party. Each is found installed, and what is missing is named with its Debian package.
# Highway, which distributions have too old, is also found in .cache, where scripts/setup builds it, else fetched.
list(APPEND CMAKE_PREFIX_PATH ${PROJECT_SOURCE_DIR}/.cache/highway/install)

function(heed_require package target debian)
  find_package(${package} QUIET GLOBAL)
  if(NOT TARGET ${target})
    message(FATAL_ERROR "heed: ${package} not found. Run scripts/setup, or install it (Debian: ${debian}).")
  endif()
endfunction()

# A function, so that these settings reach Highway alone. Its options are cache variables of an old policy, hence FORCE.
function(heed_fetch_highway)
  message(STATUS "Fetching Highway 1.2.0")
  set(BUILD_SHARED_LIBS OFF)
  foreach(option CONTRIB TESTS EXAMPLES)
    set(HWY_ENABLE_${option} OFF CACHE BOOL "" FORCE)
  endforeach()
  set(CMAKE_POLICY_VERSION_MINIMUM 3.5)
  include(FetchContent)
  FetchContent_Declare(highway
    URL https://github.com/google/highway/archive/refs/tags/1.2.0.tar.gz
    URL_HASH SHA256=7e0be78b8318e8bdbf6fa545d2ecb4c90f947df03f7aadc42c1967f019e63343
    DOWNLOAD_EXTRACT_TIMESTAMP OFF
    SOURCE_SUBDIR none)  # added below, without its install rules
  FetchContent_MakeAvailable(highway)
  add_subdirectory(${highway_SOURCE_DIR} ${highway_BINARY_DIR} EXCLUDE_FROM_ALL SYSTEM)
  add_library(hwy::hwy ALIAS hwy)
endfunction()

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(hwy 1.2 CONFIG QUIET GLOBAL)
if(NOT TARGET hwy::hwy)
  heed_fetch_highway()
endif()
heed_require(nlohmann_json nlohmann_json::nlohmann_json nlohmann-json3-dev)
if(HEED_BUILD_CLI OR HEED_BUILD_BENCHMARKS)
  heed_require(fmt fmt::fmt-header-only libfmt-dev)
endif()
if(HEED_BUILD_CLI)
  heed_require(CLI11 CLI11::CLI11 libcli11-dev)
endif()
if(HEED_BUILD_TESTS)
  heed_require(GTest GTest::gmock "libgtest-dev libgmock-dev")
endif()
if(HEED_BUILD_BENCHMARKS)
  heed_require(benchmark benchmark::benchmark libbenchmark-dev)
endif()
if(HEED_BUILD_PYTHON)
  find_package(Python 3.9 REQUIRED COMPONENTS Interpreter Development.Module)
  if(NOT nanobind_DIR)
    execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
      OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  find_package(nanobind CONFIG QUIET)
  if(NOT nanobind_FOUND)
    message(FATAL_ERROR "heed: nanobind not found. Install it with pip for ${Python_EXECUTABLE}.")
  endif()
endif()
