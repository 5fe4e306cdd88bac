# Helpers shared by the scripts of this folder. Sourced, never run.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
JOBS=${HEED_JOBS:-$(nproc)}
cd "$ROOT"

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'heed: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

. "$ROOT/scripts/highway.sh"
