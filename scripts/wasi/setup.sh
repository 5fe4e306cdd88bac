# Programs for wasm32-wasi need, besides Zig's clang, a libc++ with exceptions and wasmtime. Sourced by scripts/cross.
#
# Zig compiles its libc++ for WASI without exceptions, <fstream>, <filesystem> and <mutex>. The sources in its package have
# all of them, and its libc has POSIX threads of which none starts: std::thread throws, and a lock is always free.

ensure_wasi() {
  ensure_zig -target wasm32-wasi -mcpu=lime1+exception_handling+reference_types+simd128 -fwasm-exceptions \
    -mllvm -wasm-use-legacy-eh=false -Wno-macro-redefined -U_LIBCPP_HAS_FILESYSTEM -D_LIBCPP_HAS_FILESYSTEM=1 \
    -U_LIBCPP_HAS_THREADS -D_LIBCPP_HAS_THREADS=1 -D_LIBCPP_HAS_THREAD_API_PTHREAD=1
  # CMake and Highway ask for position-independent code, for which Zig would compile its C library once more.
  sed -i 's/ "\$@"$/ "$@" -fno-PIC -no-pie/' "$ROOT"/.cache/wasm32-wasi/tools/{cc,c++}
  ensure_wasi_libcxx
  # wasmtime's package is a library for Python.
  local python=$ROOT/.cache/zig/bin/python
  "$python" -c 'import wasmtime' 2>/dev/null || "$ROOT/.cache/zig/bin/pip" install -q 'wasmtime==50.0.1'
  write_tool wasmtime "exec '$python' '$ROOT/scripts/wasi/run.py' \"\$@\""
}

ensure_wasi_libcxx() {
  local library=$ROOT/.cache/wasm32-wasi/install/lib/libc++.a work=$ROOT/.cache/wasm32-wasi/libcxx zig sources
  [ ! -e "$library" ] || return 0
  say "building libc++ for wasm32-wasi, once"
  zig=$(compgen -G "$ROOT/.cache/zig/lib/python3*/site-packages/ziglang/lib")
  rm -rf "$work"
  mkdir -p "$work" "$(dirname "$library")"
  sources=("$zig"/libcxx/src/{*,filesystem/*,ryu/*}.cpp "$zig"/libcxxabi/src/*.cpp "$zig"/libunwind/src/Unwind-wasm.c
    "$ROOT"/scripts/wasi/{absent_calls.c,exception_tag.s})
  printf '%s\n' "${sources[@]}" | grep -vE '/(src/new|int128_builtins)\.cpp$' | xargs -P "$JOBS" -I{} bash -c '
    set -e
    zig=$1 work=$2 source=$4 object=$2/$(printf %s "${4#"$1/"}" | tr / _).o
    shared="-O2 -DNDEBUG -w -fvisibility=hidden"
    case $source in
      *.s) "$work/../tools/cc" -Wno-unused-command-line-argument -c "$source" -o "$object" ;;
      *.c) "$work/../tools/cc" $shared -std=c23 -D_LIBUNWIND_HIDE_SYMBOLS -I"$zig/libunwind/include" -c "$source" -o "$object" ;;
      *) "$work/../tools/c++" $shared -std=c++23 -include "$3/absent_calls.h" -D_LIBCPP_BUILDING_LIBRARY -DLIBCXX_BUILDING_LIBCXXABI \
           -D_LIBCXXABI_BUILDING_LIBRARY -I"$zig/libcxx/src" -I"$zig/libcxx/libc" -I"$zig/libcxxabi/src" -c "$source" -o "$object" ;;
    esac' - "$zig" "$work" "$ROOT/scripts/wasi" {} || die "libc++ for WASI does not build"
  "$work/../tools/ar" rcs "$library.part" "$work"/*.o
  mv "$library.part" "$library"
  rm -rf "$work"
}
