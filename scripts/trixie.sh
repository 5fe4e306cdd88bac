# Packages of Debian's release "trixie" for machines whose distribution has older ones. Sourced by lib.sh.
#
# They are fetched through apt, which checks signatures and hashes, from the mirror this machine already uses. apt keeps
# its lists in a temporary folder: the machine's configuration is untouched, and an unprivileged user can do this too.

RELEASE=trixie

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

# Runs apt-get on the release, as on a machine where nothing is installed, with lists and packages in the folder $1/apt.
trixie_apt() {  # DIR ARGUMENT...
  local dir=$1 mirror keyring
  shift
  mirror=$(apt_mirror) && [ -n "$mirror" ] || die "no archive address in this machine's apt source lists"
  keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  [ -e "$keyring" ] || die "missing $keyring (package debian-archive-keyring)"
  mkdir -p "$dir/apt/lists/partial" "$dir/apt/cache/archives/partial" "$dir/apt/empty"
  printf "%s [signed-by=$keyring] $mirror $RELEASE main\n" deb deb-src >"$dir/apt/sources.list"
  : >"$dir/apt/status"
  local options=(
    -o Dir::Etc::SourceList="$dir/apt/sources.list" -o Dir::Etc::SourceParts="$dir/apt/empty"
    -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts="$dir/apt/empty"
    -o Dir::State="$dir/apt" -o Dir::State::Lists="$dir/apt/lists" -o Dir::State::Status="$dir/apt/status"
    -o Dir::Cache="$dir/apt/cache" -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::Retries=3)
  (cd "$dir" && apt-get -qq "${options[@]}" "$@")
}

# Runs a function that downloads into the folder $1; once more if it fails, with the newest keyring: keys of a release may be
# newer than an old image's.
trixie_fetch() {  # DIR WHAT FUNCTION
  ("$3" "$1") >"$1/log" 2>&1 && return 0
  say "apt cannot fetch $2; once more with the newest keyring"
  install_packages debian-archive-keyring
  ("$3" "$1") >"$1/log" 2>&1 || { cat "$1/log" >&2; die "cannot fetch $2"; }
}
