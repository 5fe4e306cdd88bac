# WebAssembly with WASI (preview 1), by the clang of Zig's package; programs run under wasmtime. Zig's own libc++ has
# neither exceptions nor files nor mutexes there: scripts/cross compiles its sources with them, and with the standard
# instructions for exceptions. The instructions of 128-bit vectors are required.
set(CMAKE_SYSTEM_NAME WASI)
set(CMAKE_SYSTEM_PROCESSOR wasm32)
# scripts/cross writes these commands, which call `zig cc` and the like, and wasmtime.
cmake_path(SET tools NORMALIZE ${CMAKE_CURRENT_LIST_DIR}/../../.cache/wasm32-wasi/tools)
set(CMAKE_C_COMPILER ${tools}/cc)
set(CMAKE_CXX_COMPILER ${tools}/c++)
set(CMAKE_AR ${tools}/ar CACHE FILEPATH "")
set(CMAKE_RANLIB ${tools}/ranlib CACHE FILEPATH "")
set(CMAKE_EXECUTABLE_SUFFIX_CXX .wasm)
set(CMAKE_HAVE_LIBC_PTHREAD ON)  # not all of it, but -pthread would ask for instructions of threads
# GoogleTest does not know the system, which has no dup().
set(CMAKE_CXX_FLAGS_INIT -DGTEST_HAS_STREAM_REDIRECTION=0)
set(gtest_disable_pthreads ON CACHE BOOL "")
set(CMAKE_EXE_LINKER_FLAGS_INIT "-s -nostdlib++ -Wl,-z,stack-size=8388608")
set(CMAKE_CXX_STANDARD_LIBRARIES ${tools}/../install/lib/libc++.a)
set(CMAKE_CROSSCOMPILING_EMULATOR ${tools}/wasmtime)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
