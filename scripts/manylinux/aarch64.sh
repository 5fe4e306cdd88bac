# The wheel for 64-bit ARM: what it is linked with, and how it is used under QEMU. Sourced by scripts/wheel.
#
# Debian's g++ 12 compiles it, as it compiles the tests, but its own glibc and libstdc++ are newer than the wheel's users
# have. The linker binds a file to the oldest libraries that it needs if it sees old ones: glibc 2.28 as Zig's package
# describes it, and of libstdc++ and libgcc the symbols that GCC 8 had. Newer parts of libstdc++ are linked statically,
# as Red Hat's compilers do for RHEL 8. libc++, which Zig would link, serves no module: a module and nanobind's backend
# throw exceptions that the other catches, so that both need the system's libstdc++.

OLDER=$ROOT/.cache/manylinux_2_28_aarch64
# The newest versions that manylinux_2_28 allows.
OLDER_LIBSTDCXX="GLIBCXX_3.4.24 CXXABI_1.3.11"
OLDER_LIBGCC="GCC_7.0.0"

# --- what it is linked with -----------------------------------------------------------------------------------------------

older_library() {  # FOLDER NAME VERSION...: FOLDER/NAME from the compiler's library
  local output=$1/$2 compiler=$MULTIARCH-gcc library
  library=$($compiler -print-file-name="$2")
  python3 scripts/manylinux/older_library.py "$MULTIARCH-readelf" "$library" "$output" "${@:3}"
  $compiler -nostdlib -shared -Wl,-soname,"$2" -Wl,--version-script="$output.map" "$output.s" -o "$output"
}

ensure_older_libraries() {  # PYTHON that has Zig's package
  local part=$OLDER.part name
  [ ! -e "$OLDER" ] || return 0
  say "making glibc 2.28 and GCC 8's libraries for the linker, once"
  rm -rf "$part"
  mkdir -p "$part"
  # Zig makes a glibc's files when it first links for it.
  echo 'int main(void) { return 0; }' >"$part/main.c"
  ZIG_GLOBAL_CACHE_DIR=$part/zig "$1" -m ziglang cc -target "$MULTIARCH.2.28" -O2 -fPIE -pie "$part/main.c" \
    -o "$part/main" >"$part/log" 2>&1 || { cat "$part/log" >&2; die "Zig does not link for glibc 2.28"; }
  find "$part/zig" '(' -name Scrt1.o -o -name libc_nonshared.a -o -name 'lib*.so.*' ')' -exec mv -t "$part" {} +
  for name in m pthread dl rt util; do ln -s "$(basename "$part/lib$name.so".[0-9])" "$part/lib$name.so"; done
  # shellcheck disable=SC2086
  older_library "$part" libstdc++.so.6 $OLDER_LIBSTDCXX
  older_library "$part" libgcc_s.so.1 $OLDER_LIBGCC
  $MULTIARCH-gcc -O2 -fPIC -c scripts/manylinux/newer_functions.c -o "$part/newer_functions.o"
  $MULTIARCH-ar rcs "$part/libnewer_functions.a" "$part/newer_functions.o"
  # Found first by -lc and the like, these name the files. Before glibc 2.34 threads are a library of their own; -lc has
  # it too, as with the compiler's glibc, so that CMake adds no -pthread and the wheel is compiled as the tests are.
  echo "GROUP ( $OLDER/libc.so.6 $OLDER/libc_nonshared.a $OLDER/libnewer_functions.a" \
    "AS_NEEDED ( $OLDER/libpthread.so.0 $OLDER/libdl.so.2 ) )" >"$part/libc.so"
  echo "GROUP ( $OLDER/libstdc++.so.6 $($MULTIARCH-gcc -print-file-name=libstdc++_pic.a) )" >"$part/libstdc++.so"
  echo "GROUP ( $OLDER/libgcc_s.so.1 -lgcc )" >"$part/libgcc_s.so"
  rm -rf "$part/zig"
  mv "$part" "$OLDER"
}

# Sets `options` of the build. scikit-build-core takes the machine's name from a variable that Python's own cross builds
# set. Stubs are made by the module itself, in Python under the emulator.
prepare_aarch64() {
  local package
  have dpkg-query || die "the cross compiler and the emulator are Debian packages"
  for package in g++-aarch64-linux-gnu libstdc++-12-pic-arm64-cross qemu-user; do
    dpkg-query -W -f '${Status}\n' "$package" 2>/dev/null | grep -q ' installed$' || install_packages "$package"
  done
  ensure_highway aarch64-linux -DCMAKE_TOOLCHAIN_FILE="$ROOT/cmake/toolchains/aarch64-linux.cmake"
  ensure_target_python "$TOOLS/bin/pip"
  # shellcheck disable=SC2046
  [ -e "$OLDER" ] || "$TOOLS/bin/pip" install -q $(extra wheel-aarch64)
  ensure_older_libraries "$TOOLS/bin/python"
  emulated_environment "$WORK/stubs"
  echo "$SYSROOT/site" >"$(echo "$WORK"/stubs/lib/python*/site-packages)/site.pth"
  options=(-C env._PYTHON_HOST_PLATFORM=linux-aarch64
    -C cmake.toolchain-file="$ROOT/cmake/toolchains/manylinux_2_28_aarch64.cmake"
    -C cmake.define.HEED_TARGET_PYTHON="$WORK/stubs/bin/python"
    -C cmake.define.Python_INCLUDE_DIRS="$SYSROOT/include"
    -C cmake.define.hwy_DIR="$ROOT/.cache/aarch64-linux/install/lib/cmake/hwy"
    -C cmake.define.fmt_DIR="$(dirname "$(dpkg -L libfmt-dev | grep '/fmt-config.cmake$')")")
}

# --- how it is used under QEMU --------------------------------------------------------------------------------------------

emulated() {  # FILE PROGRAM: makes FILE a script that runs PROGRAM under the emulator
  local emulator="qemu-aarch64 -cpu \${QEMU_CPU:-$OLDEST} -L '$SYSROOT' -0 '$1'"
  printf '%s\n' '#!/bin/sh' "exec /usr/bin/$emulator '$2' \"\$@\"" >"$1"
  chmod +x "$1"
}

# A virtual environment of Debian 13's Python for 64-bit ARM. Its programs are scripts that start the emulator, so that
# they start each other too where the system runs no programs of other machines, as in most containers.
emulated_environment() {  # FOLDER
  local python
  python=$(find_target_python)
  rm -rf "$1"
  mkdir -p "$1/bin" "$1/lib/$(basename "$python")/site-packages"
  printf '%s\n' "home = $(dirname "$python")" 'include-system-site-packages = false' >"$1/pyvenv.cfg"
  emulated "$1/bin/python" "$python"
}

check_pages() {  # WHEEL
  local file sizes
  rm -rf "$WORK/files"
  "$TOOLS/bin/python" -m zipfile --extract "$1" "$WORK/files"
  for file in "$WORK"/files/heed/*.so "$WORK"/files/*.data/scripts/heed; do
    sizes=$("$MULTIARCH-readelf" --program-headers --wide "$file" | awk '$1 == "LOAD" { print $NF }' | sort -u)
    [ "$sizes" = 0x10000 ] || die "$(basename "$file") is for pages of $sizes bytes, expected 0x10000"
  done
}

# Uses it as the oldest CPU, and certified attention also as one that has dot products of bytes.
use_aarch64() {  # WHEEL
  local environment=$WORK/own
  check_pages "$1"
  emulated_environment "$environment"
  install_wheel "$environment" "$1"
  mv "$environment/bin/heed" "$environment/heed"
  emulated "$environment/bin/heed" "$environment/heed"
  use "$environment" --emulated
  say "heed verify"
  "$environment/bin/heed" verify --random 10  # 150, the default, take an emulator long
  QEMU_CPU=max "$environment/bin/heed" verify certified_attention --random 10
}
