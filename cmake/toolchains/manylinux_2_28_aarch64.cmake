# Linux on 64-bit ARM with glibc 2.28 and GCC 8's libraries, or newer: the compiler of aarch64-linux, whose linker finds
# these before its own. scripts/manylinux makes them.
include(${CMAKE_CURRENT_LIST_DIR}/aarch64-linux.cmake)
cmake_path(SET older NORMALIZE ${CMAKE_CURRENT_LIST_DIR}/../../.cache/manylinux_2_28_aarch64)
# What is linked statically of libstdc++ 12 stays inside.
foreach(kind IN ITEMS EXE MODULE SHARED)
  set(CMAKE_${kind}_LINKER_FLAGS_INIT "-B${older} -Wl,--exclude-libs,libstdc++_pic.a")
endforeach()
