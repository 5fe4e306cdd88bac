# Highway (SIMD) >= 1.2 for machines whose distribution has an older one. Sourced by lib.sh.
#
# The source package of Debian's release "trixie" is fetched through apt, which checks its signature and hashes, from the
# mirror this machine already uses. apt keeps its lists in a temporary folder: the machine's configuration is untouched.
# Built once, static, into .cache/highway/install, where cmake/dependencies.cmake looks.

HIGHWAY_RELEASE=trixie
HIGHWAY_MIN=1.2
HIGHWAY_PREFIX=$ROOT/.cache/highway/install

highway_installed() {
  [ -e "$HIGHWAY_PREFIX/lib/libhwy.a" ] && return 0
  local version
  version=$(pkg-config --modversion libhwy 2>/dev/null || dpkg-query -W -f '${Version}' libhwy-dev 2>/dev/null) || return 1
  [ "$(printf '%s\n' "$HIGHWAY_MIN" "$version" | sort -V | head -n 1)" = "$HIGHWAY_MIN" ]
}

# The first archive address in this machine's own source lists, in either of apt's two formats.
apt_mirror() {
  local files=()
  for f in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list /etc/apt/sources.list.d/*.sources; do
    [ -f "$f" ] && files+=("$f")
  done
  [ ${#files[@]} -gt 0 ] || return 1
  awk '/^URIs:/ { print $2; exit }
       /^deb / { for (i = 2; i <= NF; i++) if ($i ~ /^[a-z+]+:/) { print $i; exit } }' "${files[@]}"
}

# Downloads the source archive into the folder $1. An unprivileged user can do this too.
highway_download() {
  local dir=$1 mirror keyring
  mirror=$(apt_mirror) && [ -n "$mirror" ] || die "no archive address in this machine's apt source lists"
  keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  [ -e "$keyring" ] || die "missing $keyring (package debian-archive-keyring)"
  mkdir -p "$dir/apt/lists/partial" "$dir/apt/cache/archives/partial" "$dir/apt/empty"
  printf 'deb-src [signed-by=%s] %s %s main\n' "$keyring" "$mirror" "$HIGHWAY_RELEASE" >"$dir/apt/sources.list"
  : >"$dir/apt/status"
  local options=(
    -o Dir::Etc::SourceList="$dir/apt/sources.list" -o Dir::Etc::SourceParts="$dir/apt/empty"
    -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts="$dir/apt/empty"
    -o Dir::State="$dir/apt" -o Dir::State::Lists="$dir/apt/lists" -o Dir::State::Status="$dir/apt/status"
    -o Dir::Cache="$dir/apt/cache" -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::Retries=3)
  (cd "$dir" && apt-get -qq "${options[@]}" update && apt-get -qq "${options[@]}" source --download-only highway)
}

highway_build() {
  local source=$1 build=$2
  # Nine tenths of its time are two files that heed calls nothing of.
  : >"$source/hwy/per_target.cc"
  : >"$source/hwy/nanobenchmark.cc"
  cmake -S "$source" -B "$build" -G Ninja -Wno-dev \
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DCMAKE_POSITION_INDEPENDENT_CODE=ON \
    -DCMAKE_CXX_VISIBILITY_PRESET=hidden -DCMAKE_VISIBILITY_INLINES_HIDDEN=ON \
    -DCMAKE_INSTALL_PREFIX="$HIGHWAY_PREFIX" -DCMAKE_INSTALL_LIBDIR=lib \
    -DHWY_ENABLE_CONTRIB=OFF -DHWY_ENABLE_TESTS=OFF -DHWY_ENABLE_EXAMPLES=OFF
  cmake --build "$build" --target hwy -j "$JOBS"
  cmake --install "$build"
  # With contrib off its headers are not installed; they are header-only and wanted (math, for one).
  (cd "$source" && find hwy/contrib -name '*.h' -exec cp --parents {} "$HIGHWAY_PREFIX/include" \;)
}

ensure_highway() {
  highway_installed && return 0
  have apt-get || die "Highway $HIGHWAY_MIN or newer is missing: install it (library and CMake package) and run again"
  say "building Highway, once"
  local work=$ROOT/.cache/highway/work
  rm -rf "$work" "$HIGHWAY_PREFIX"
  mkdir -p "$work/source"
  if ! (highway_download "$work") 2>"$work/log"; then
    # Keys of a release may be newer than the keyring of an old image.
    say "apt cannot fetch the source package; once more with the newest keyring"
    install_packages debian-archive-keyring
    (highway_download "$work") 2>"$work/log" || { cat "$work/log" >&2; die "cannot fetch Highway's source package"; }
  fi
  tar -xf "$work"/highway_*.orig.tar.* -C "$work/source" --strip-components=1
  highway_build "$work/source" "$work/build" >>"$work/log" 2>&1 || { tail -n 40 "$work/log" >&2; die "Highway does not build"; }
  rm -rf "$work"
}
