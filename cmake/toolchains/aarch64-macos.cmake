# macOS on Apple's CPUs, by the clang of Zig's package, which brings libc++ and the names in the system's library.
# Nothing here runs its programs.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
# scripts/cross writes these commands, which call `zig cc` and the like.
cmake_path(SET tools NORMALIZE ${CMAKE_CURRENT_LIST_DIR}/../../.cache/aarch64-macos/tools)
set(CMAKE_C_COMPILER ${tools}/cc)
set(CMAKE_CXX_COMPILER ${tools}/c++)
set(CMAKE_AR ${tools}/ar CACHE FILEPATH "")
set(CMAKE_RANLIB ${tools}/ranlib CACHE FILEPATH "")
# The system's math.h asks float.h for two macros, and libc++'s float.h gives nothing more to those that include it
# later: the first asks for all.
set(CMAKE_CXX_FLAGS_INIT "-D__need_float_float -D__need_infinity_nan -include float.h")
# Files look for each other beside themselves, in the build folder as where they are installed. CMake wants a tool that
# changes such names, but has none to change then; a changed file would have to be signed again.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH @loader_path @loader_path/.. @loader_path/../lib)
set(CMAKE_INSTALL_NAME_TOOL /bin/false CACHE FILEPATH "")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
