# Installs the built tree BUILD_DIR into a fresh prefix under WORK_DIR, then builds and runs the consumer against it, through
# the CMake package and through pkg-config. Highway is hidden from both: an installed heed must not need it.
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# The root is a new folder, so that all installed files can be listed: they must be below the prefix, in the usual folders,
# whatever else the build tree was configured for.
set(root ${WORK_DIR}/root)
file(REMOVE_RECURSE ${WORK_DIR})
run(${CMAKE_COMMAND} -E env DESTDIR=${root} ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix /prefix)
file(GLOB_RECURSE installed RELATIVE ${root} ${root}/*)
foreach(file IN LISTS installed)
  if(NOT file MATCHES "^prefix/(bin|include|lib[^/]*|share)/")
    message(FATAL_ERROR "cmake --install --prefix /prefix wrote /${file}")
  endif()
endforeach()
# The tree is moved before it is used: an installed tree must not contain the path of its installation.
set(prefix ${WORK_DIR}/moved)
file(RENAME ${root}/prefix ${prefix})

file(GLOB pc_files ${prefix}/*/pkgconfig/heed.pc ${prefix}/*/*/pkgconfig/heed.pc)
cmake_path(GET pc_files PARENT_PATH pc_dir)
cmake_path(GET pc_dir PARENT_PATH lib_dir)
set(ENV{PKG_CONFIG_LIBDIR} ${pc_dir})
unset(ENV{PKG_CONFIG_PATH})
unset(ENV{CMAKE_PREFIX_PATH})
find_program(pkg_config NAMES pkg-config pkgconf)

# A shared libheed exports heed's symbols only, none of a library inside it.
find_program(nm NAMES nm)
file(GLOB shared_libraries ${lib_dir}/libheed.so ${lib_dir}/libheed_distributed.so)
if(nm AND shared_libraries)
  execute_process(COMMAND ${nm} -DC --defined-only ${shared_libraries} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  if(symbols MATCHES "[^\n]*(hwy|fmt|nlohmann)::[^\n]*")
    message(FATAL_ERROR "libheed exports ${CMAKE_MATCH_0}")
  endif()
endif()

set(variants OFF)
if(pkg_config)
  list(APPEND variants ON)
endif()
foreach(use_pkg_config IN LISTS variants)
  set(build ${WORK_DIR}/build_${use_pkg_config})
  run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${build} -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_CXX_FLAGS=${CXX_FLAGS} -DCMAKE_BUILD_TYPE=Release -DUSE_PKG_CONFIG=${use_pkg_config}
    -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_DISABLE_FIND_PACKAGE_hwy=ON
    -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF -DCMAKE_FIND_USE_SYSTEM_PACKAGE_REGISTRY=OFF)
  run(${CMAKE_COMMAND} --build ${build})
  run(${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${lib_dir} ${build}/consumer)
  run(${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${lib_dir} ${build}/consumer_ranks)
endforeach()
