# Debian 13's Python for 64-bit ARM, which QEMU runs. Sourced by scripts/cross and scripts/wheel.

MULTIARCH=aarch64-linux-gnu DEBIAN=arm64 WHEELS=manylinux_2_28_aarch64
OLDEST=cortex-a72  # has what every 64-bit ARM CPU has
SYSROOT=$ROOT/.cache/aarch64-linux/python  # Debian 13's Python and NumPy, as at / of the machine

find_target_python() { find "$SYSROOT/usr/bin" -name 'python3.[0-9]*' -type f; }

# Python and NumPy are unpacked: nothing of them is installed, and no script of them runs.
ensure_target_python() {  # PIP
  [ ! -e "$SYSROOT/site" ] || return 0
  have apt-get || die "Debian's Python for $DEBIAN is fetched with apt, which is missing here"
  say "fetching Debian 13's Python for $DEBIAN"
  local package version
  rm -rf "$SYSROOT"
  mkdir -p "$SYSROOT"
  fetch() {
    local other=(-o APT::Architecture="$DEBIAN" -o APT::Architectures="$DEBIAN")
    trixie_apt "$1" "${other[@]}" update && trixie_apt "$1" "${other[@]}" install -y --download-only \
      --no-install-recommends python3-numpy python3-pytest libpython3-dev
  }
  trixie_fetch "$SYSROOT" "Debian 13's Python for $DEBIAN" fetch
  for package in "$SYSROOT"/apt/cache/archives/{python3,lib,zlib1g_}*.deb; do dpkg-deb -x "$package" "$SYSROOT"; done
  rm -rf "$SYSROOT/apt"
  ln -s usr/lib "$SYSROOT/lib"
  # Python's headers in one folder: with the C library's beside them, the compiler would take those for its own.
  version=$(basename "$(find "$SYSROOT/usr/include" -maxdepth 1 -name 'python3.*')")
  cp -r "$SYSROOT/usr/include/$version" "$SYSROOT/include"
  cp "$SYSROOT"/usr/include/*/"$version"/pyconfig.h "$SYSROOT/include"
  # What the module and its tests import is compiled per version of Python.
  "$1" install -q --target "$SYSROOT/site.part" --platform "$WHEELS" --python-version "${version#python}" \
    --only-binary :all: --no-deps nanobind-backend ml_dtypes
  mv "$SYSROOT/site.part" "$SYSROOT/site"
}
