# libheed_cuda: kernels for NVIDIA GPUs, a library of its own that libheed loads when a view is on one. It links the CUDA
# runtime statically and nothing of heed.
enable_language(CUDA)
# Only where its code is not run: what is tested on a GPU is what is shipped.
if(HEED_CUDA_FAST_COMPILE)
  add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:--Ofast-compile=max>)
endif()
file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/heed/cuda/*.cu ${PROJECT_SOURCE_DIR}/heed/engines/*.cu
  ${PROJECT_SOURCE_DIR}/heed/ops/*.cu)
set(for_hopper ${sources})
list(FILTER for_hopper INCLUDE REGEX "_hopper\\.cu$")
list(FILTER sources EXCLUDE REGEX "_hopper\\.cu$")
function(heed_compiles_kernels target)
  target_compile_definitions(${target} PRIVATE HEED_STATIC HEED_VERSION="${PROJECT_VERSION}")
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(${target} PRIVATE --expt-relaxed-constexpr)
  set_target_properties(${target} PROPERTIES
    CUDA_STANDARD 20
    CUDA_STANDARD_REQUIRED ON
    CUDA_RUNTIME_LIBRARY Static
    CUDA_VISIBILITY_PRESET hidden
    POSITION_INDEPENDENT_CODE ON)
endfunction()
add_library(heed_cuda MODULE ${sources})
heed_compiles_kernels(heed_cuda)
set_target_properties(heed_cuda PROPERTIES PREFIX lib LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})

# WGMMA exists on compute capability 9.0 alone and needs code for 9.0a. The instructions come from CUTLASS, whose
# headers scripts/setup puts into .cache; `pip install --no-deps nvidia-cutlass` has them too.
set(architectures ${CMAKE_CUDA_ARCHITECTURES})
if(architectures STREQUAL "native")
  set(architectures ${CMAKE_CUDA_ARCHITECTURES_NATIVE})
endif()
find_path(HEED_CUTLASS_INCLUDE cute/arch/mma_sm90_gmma.hpp
  HINTS ${PROJECT_SOURCE_DIR}/.cache/cutlass/cutlass_library/source/include
  DOC "Headers of CUTLASS, for kernels of Hopper GPUs")
if("${architectures}" MATCHES "90|all")
  if(HEED_CUTLASS_INCLUDE)
    # Compiles these sources for a target, as CMake has no architectures of single files.
    function(heed_add_hopper_objects target)
      add_library(${target}_hopper OBJECT ${ARGN})
      heed_compiles_kernels(${target}_hopper)
      target_include_directories(${target}_hopper SYSTEM PRIVATE ${HEED_CUTLASS_INCLUDE})
      set_target_properties(${target}_hopper PROPERTIES CUDA_ARCHITECTURES OFF)
      target_compile_options(${target}_hopper PRIVATE -gencode=arch=compute_90a,code=sm_90a)
      target_link_libraries(${target} PRIVATE ${target}_hopper)
      target_compile_definitions(${target} PRIVATE HEED_WITH_HOPPER)
    endfunction()
    heed_add_hopper_objects(heed_cuda ${for_hopper})
  else()
    message(STATUS "Kernels of Hopper GPUs are left out: HEED_CUTLASS_INCLUDE names no headers of CUTLASS")
  endif()
endif()
# Programs of the build tree find it beside themselves.
add_custom_command(TARGET heed_cuda POST_BUILD
  COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}
  COMMAND ${CMAKE_COMMAND} -E create_symlink $<TARGET_FILE:heed_cuda> ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/$<TARGET_FILE_NAME:heed_cuda>)
if(NOT HEED_CUDA_FAST_COMPILE)
  install(TARGETS heed_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cuda)
endif()
