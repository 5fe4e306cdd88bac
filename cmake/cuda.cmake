# libheed_cuda: kernels for NVIDIA GPUs, a library of its own that libheed loads when a view is on one. It links the CUDA
# runtime statically and nothing of heed.
enable_language(CUDA)
# Only where its code is not run: what is tested on a GPU is what is shipped.
if(HEED_CUDA_FAST_COMPILE)
  add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:--Ofast-compile=max>)
endif()
file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/heed/cuda/*.cu ${PROJECT_SOURCE_DIR}/heed/engines/*.cu
  ${PROJECT_SOURCE_DIR}/heed/ops/*.cu)
add_library(heed_cuda MODULE ${sources})
target_compile_definitions(heed_cuda PRIVATE HEED_STATIC HEED_VERSION="${PROJECT_VERSION}")
target_include_directories(heed_cuda PRIVATE ${PROJECT_SOURCE_DIR})
target_compile_options(heed_cuda PRIVATE --expt-relaxed-constexpr)
set_target_properties(heed_cuda PROPERTIES
  PREFIX lib
  CUDA_STANDARD 20
  CUDA_STANDARD_REQUIRED ON
  CUDA_RUNTIME_LIBRARY Static
  CUDA_VISIBILITY_PRESET hidden
  LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
# Programs of the build tree find it beside themselves.
add_custom_command(TARGET heed_cuda POST_BUILD
  COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}
  COMMAND ${CMAKE_COMMAND} -E create_symlink $<TARGET_FILE:heed_cuda> ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/$<TARGET_FILE_NAME:heed_cuda>)
if(NOT HEED_CUDA_FAST_COMPILE)
  install(TARGETS heed_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cuda)
endif()
