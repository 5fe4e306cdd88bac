# Helpers shared by the scripts of this folder. Sourced, never run.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
JOBS=${HEED_JOBS:-$(nproc 2>/dev/null || echo 2)}
VENV=$ROOT/.venv
export PIP_DISABLE_PIP_VERSION_CHECK=1
cd "$ROOT"

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'heed: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

. "$ROOT/scripts/trixie.sh"
. "$ROOT/scripts/highway.sh"

# --- what the machine must have -------------------------------------------------------------------------------------------

newer() { [ "$(printf '%s\n' "$1" "$2" | sort -V | head -n 1)" = "$1" ]; }  # $2 is $1 or newer
has_cmake() { have cmake && newer 3.25 "$(cmake --version | awk 'NR == 1 { print $3 }')"; }
has_python() {
  have python3 && python3 -c '
import ensurepip, os, sys, sysconfig, venv
sys.exit(sys.version_info < (3, 10) or not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' 2>/dev/null
}

# Debian packages that are missing for the job (demo), for a wheel, or for everything.
missing_packages() {
  have c++ || have g++ || echo g++
  has_cmake || echo cmake
  have ninja || echo ninja-build
  local packages="libfmt-dev nlohmann-json3-dev libcli11-dev"
  if [ "$1" = everything ]; then
    packages="$packages libgtest-dev libgmock-dev libbenchmark-dev"
    # The pages are tested in a browser. Elsewhere it has other names, and its tests are skipped where it is missing.
    ! grep -q '^ID=debian' /etc/os-release || packages="$packages chromium chromium-driver fonts-liberation"
    # It says the words of examples/speech.
    ! grep -q '^ID=debian' /etc/os-release || packages="$packages espeak-ng"
    have pkg-config || have pkgconf || echo pkg-config
  fi
  [ "$1" = job ] || has_python || echo python3 python3-venv python3-dev
  for p in $packages; do
    dpkg-query -W -f '${Status}\n' "$p" 2>/dev/null | grep -q ' installed$' || echo "$p"
  done
}

install_packages() {
  local root=
  if [ "$(id -u)" != 0 ]; then
    root="sudo -n"
    $root true 2>/dev/null || die "missing packages, install as root: apt-get install $*"
  fi
  say "installing $*"
  $root apt-get -qq update || say "apt-get update failed, trying with the lists that are there"
  $root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null ||
    die "apt-get could not install $*"
}

ensure_packages() {
  if ! have dpkg-query; then
    has_cmake && have ninja && have c++ || die "missing: a C++20 compiler, CMake 3.25 or newer, ninja"
    return 0  # not Debian: CMake names what else is missing
  fi
  local missing
  missing=$(missing_packages "$1" | xargs)
  # shellcheck disable=SC2086
  [ -z "$missing" ] || install_packages $missing
}

# The compiler of the presets `dev` and `fuzz`, which scripts/test --deep alone needs.
ensure_clang() {
  have clang++-19 && [ -n "$(find "$(clang++-19 -print-resource-dir)" -name 'libclang_rt.fuzzer*' 2>/dev/null)" ] && return 0
  have dpkg-query || die "missing: clang++-19 with libFuzzer"
  install_packages clang-19 libclang-rt-19-dev
}

# --- building -------------------------------------------------------------------------------------------------------------

configure() {  # PRESET [-D...]; again only where an option differs
  local preset=$1 cache=$ROOT/build/$1/CMakeCache.txt
  shift
  local option current=yes
  [ -e "$ROOT/build/$preset/build.ninja" ] || current=no
  for option in "$@"; do
    grep -q "^$(printf %s "${option#-D}" | sed 's/=.*//')\(:[A-Z]*\)=${option#*=}$" "$cache" 2>/dev/null || current=no
  done
  [ $current = yes ] || cmake --preset "$preset" "$@" >&2
}

build() {  # PRESET [TARGET...]
  local preset=$1
  shift
  say "building $preset"
  cmake --build "build/$preset" -j "$JOBS" ${1:+--target "$@"} >&2
}

# --- the Python package ---------------------------------------------------------------------------------------------------

python_inputs() {
  find CMakeLists.txt pyproject.toml README.md cmake heed cli python/heed python/caches python/mechanism python/*.cc python/*.h tools -type f \
    ! -name '*_test.cc' ! -path '*/__pycache__/*' 2>/dev/null | LC_ALL=C sort | xargs sha256sum
  [ ! -e .cache/highway/install ] || echo cached-highway
  python3 --version
}

# What the package and its tests ask for, without the package, which pip has no word for.
python_requirements() {  # EXTRA...
  "$VENV/bin/python" - "$@" <<'PYTHON'
import re, sys
try:
    import tomllib
except ImportError:  # before Python 3.11
    from pip._vendor import tomli as tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
extras, found = sys.argv[1:], project["build-system"]["requires"] + project["project"]["dependencies"]
for extra in extras:
    for requirement in project["project"]["optional-dependencies"][extra]:
        own = re.fullmatch(r"heed-attention\[(.*)\]", requirement)
        if own:
            extras += own[1].split(",")
        else:
            found.append(requirement)
print(*found)
PYTHON
}

ensure_requirements() {
  local stamp=$VENV/requirements-stamp key
  key=$({ sha256sum <pyproject.toml; python3 --version; } | sha256sum)
  [ "$(cat "$stamp" 2>/dev/null)" != "$key" ] || return 0
  say "installing what the Python package needs into .venv"
  [ -x "$VENV/bin/python" ] || python3 -m venv "$VENV"
  # Python compiles modules when they are first imported: most of these never are.
  # shellcheck disable=SC2046
  "$VENV/bin/pip" install -q --no-compile $(python_requirements test test-torch docs)
  printf '%s\n' "$key" >"$stamp"
}

ensure_venv() {
  local stamp=$VENV/heed-stamp key
  key=$(python_inputs | sha256sum)
  [ "$(cat "$stamp" 2>/dev/null)" != "$key" ] || return 0
  ensure_requirements
  say "installing the Python package into .venv"
  # The package's name of before, whose module Python would find first.
  "$VENV/bin/pip" uninstall -q -y heed 2>/dev/null || true
  # Without isolation, in the build folder of the release and with its options: nothing is compiled twice. The module
  # and the program link the library's objects, so that what is installed stands alone here too.
  CMAKE_BUILD_PARALLEL_LEVEL=$JOBS "$VENV/bin/pip" install -q --no-deps --no-build-isolation -C build-dir=build/release \
    -C cmake.define.HEED_TARGETS=all -C cmake.define.BUILD_SHARED_LIBS=ON -C cmake.define.HEED_BUILD_TESTS=ON \
    -C cmake.define.HEED_BUILD_BENCHMARKS=ON .
  printf '%s\n' "$key" >"$stamp"
}

# --- what the scripts ask for ---------------------------------------------------------------------------------------------

setup_job() {  # all|native: the SIMD targets of a build that is not there yet
  ensure_packages job
  ensure_highway
  [ -e build/release/build.ninja ] || configure release -DHEED_TARGETS="$1" -DHEED_BUILD_TESTS=OFF -DHEED_BUILD_BENCHMARKS=OFF
  build release heed_cli
}

# Options for a machine with CUDA: code for its own GPU or, without one, for a common one, so that it compiles at least;
# as nothing runs it then, the fastest way that there is.
with_cuda() {
  have nvcc && newer 12.8 "$(nvcc --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')" || return 0
  local architecture=90 fast=OFF
  if nvidia-smi -L >/dev/null 2>&1; then
    architecture=native
  elif ! compgen -G '/dev/nvidia[0-9]*' >/dev/null && [[ $(nvcc --help) == *--Ofast-compile* ]]; then
    fast=ON
  fi
  echo "-DHEED_WITH_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=$architecture -DHEED_CUDA_FAST_COMPILE=$fast"
}

# CUTLASS's headers, for kernels of Hopper GPUs.
ensure_cutlass() {
  [ -n "$(with_cuda)" ] && [ ! -e .cache/cutlass ] || return 0
  say "fetching CUTLASS's headers"
  rm -rf .cache/cutlass.part
  [ -x "$VENV/bin/python" ] || python3 -m venv "$VENV"
  "$VENV/bin/pip" install -q --no-deps --target .cache/cutlass.part 'nvidia-cutlass==4.2.0.0' ||
    { say "no CUTLASS: kernels of Hopper GPUs are left out"; return 0; }
  mv .cache/cutlass.part .cache/cutlass
}

setup_everything() {
  ensure_packages everything
  ensure_highway
  ensure_cutlass
  # shellcheck disable=SC2046
  configure release -DHEED_TARGETS=all -DHEED_BUILD_TESTS=ON -DHEED_BUILD_BENCHMARKS=ON $(with_cuda)
  # Packages are unpacked by one core, and fetched by none: meanwhile others compile.
  ensure_requirements &
  local requirements=$!
  build release
  wait "$requirements"
  ensure_venv
}
