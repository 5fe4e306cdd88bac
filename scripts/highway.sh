# Highway (SIMD) >= 1.2 for machines whose distribution has an older one. Sourced by lib.sh.
#
# The source package of Debian's release "trixie" (trixie.sh), built once, static, into .cache/highway/install, where
# cmake/dependencies.cmake looks; for another machine (scripts/cross) into .cache/TARGET/install.

HIGHWAY_MIN=1.2

highway_installed() {  # PREFIX
  [ -e "$1/lib/libhwy.a" ] && return 0
  [ "$1" = "$ROOT/.cache/highway/install" ] || return 1
  local version
  version=$(pkg-config --modversion libhwy 2>/dev/null || dpkg-query -W -f '${Version}' libhwy-dev 2>/dev/null) || return 1
  [ "$(printf '%s\n' "$HIGHWAY_MIN" "$version" | sort -V | head -n 1)" = "$HIGHWAY_MIN" ]
}

highway_download() {  # DIR
  trixie_apt "$1" update && trixie_apt "$1" source --download-only highway
}

highway_build() {  # SOURCE BUILD PREFIX [-D...]
  local source=$1 build=$2 prefix=$3
  shift 3
  # Nine tenths of its time are two files that heed calls nothing of. On ARM, Highway itself calls one.
  [ $# -gt 0 ] || [ "$(uname -m)" != x86_64 ] || : >"$source/hwy/per_target.cc"
  : >"$source/hwy/nanobenchmark.cc"
  cmake -S "$source" -B "$build" -G Ninja -Wno-dev \
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DCMAKE_POSITION_INDEPENDENT_CODE=ON \
    -DCMAKE_CXX_VISIBILITY_PRESET=hidden -DCMAKE_VISIBILITY_INLINES_HIDDEN=ON \
    -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_INSTALL_LIBDIR=lib \
    -DHWY_ENABLE_CONTRIB=OFF -DHWY_ENABLE_TESTS=OFF -DHWY_ENABLE_EXAMPLES=OFF "$@"
  cmake --build "$build" --target hwy -j "$JOBS"
  cmake --install "$build"
  # With contrib off its headers are not installed; they are header-only and wanted (math, for one).
  (cd "$source" && find hwy/contrib -name '*.h' -exec cp --parents {} "$prefix/include" \;)
}

ensure_highway() {  # [FOLDER OF .cache, -D...: for another machine]
  local folder=${1:-highway}
  shift $(($# > 0))
  local work=$ROOT/.cache/$folder/work prefix=$ROOT/.cache/$folder/install
  highway_installed "$prefix" && return 0
  have apt-get || die "Highway $HIGHWAY_MIN or newer is missing: install it (library and CMake package) and run again"
  say "building Highway, once"
  rm -rf "$work" "$prefix/include/hwy" "$prefix"/lib/libhwy.a
  mkdir -p "$work/source"
  trixie_fetch "$work" "Highway's source package" highway_download
  tar -xf "$work"/highway_*.orig.tar.* -C "$work/source" --strip-components=1
  highway_build "$work/source" "$work/build" "$prefix" "$@" >>"$work/log" 2>&1 || { tail -n 40 "$work/log" >&2; die "Highway does not build"; }
  rm -rf "$work"
}
