# Windows on x86-64, by the clang of Zig's package, which brings the libraries of MinGW-w64 and libc++; programs run
# under Wine. GCC's code for Windows does not align the stack for vectors of AVX (its bug 54412), and is not used.
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR AMD64)
# scripts/cross writes these commands, which call `zig cc` and the like, and Wine.
cmake_path(SET tools NORMALIZE ${CMAKE_CURRENT_LIST_DIR}/../../.cache/x86_64-windows/tools)
set(CMAKE_C_COMPILER ${tools}/cc)
set(CMAKE_CXX_COMPILER ${tools}/c++)
set(CMAKE_AR ${tools}/ar CACHE FILEPATH "")
set(CMAKE_RANLIB ${tools}/ranlib CACHE FILEPATH "")
set(CMAKE_RC_COMPILER ${tools}/rc)
set(CMAKE_CROSSCOMPILING_EMULATOR ${tools}/wine)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
