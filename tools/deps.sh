# What ./run and ./test share: the packages that the build needs, and the build itself. Sourced, not run; the
# caller has set `root` (the repository) and `me` (its name in messages). Everything here speaks on stderr:
# stdout belongs to the model's text and to ctest.
# shellcheck shell=bash

: "${root:?}" "${me:?}"
log="$root/build/run.log"
build="$root/build/release"

say() { printf '%s: %s\n' "$me" "$*" >&2; }
die() {
  say "$@"
  exit 1
}

# The one list of needs: tier | check | Debian package | what it is for.
# A tool is there when it is on the PATH, a library when pkg-config finds it: that holds on every Linux, and takes
# milliseconds.
needs='
run  | command g++             | g++                | C++20 compiler
run  | command cmake           | cmake              | build, 3.25 or newer
run  | command ninja           | ninja-build        | build
run  | command pkg-config      | pkg-config         | finds the libraries
run  | library fmt             | libfmt-dev         | messages
run  | library nlohmann_json   | nlohmann-json3-dev | JSON
run  | library CLI11           | libcli11-dev       | command line
run  | library libpcre2-8      | libpcre2-dev       | regular expressions of tokenizers
run  | library libutf8proc     | libutf8proc-dev    | Unicode normalization
run  | library libedit         | libedit-dev        | line editing in chat
test | library gtest           | libgtest-dev       | tests in C++
test | command python3         | python3            | tests against Hugging Face code
test | python  venv,ensurepip  | python3-venv       | holds their packages in .venv
tidy | command clang-tidy      | clang-tidy         | static checks
venv | python  venv,ensurepip  | python3-venv       | a newer cmake in .cache/cmake
'

present() {  # KIND NAME
  case $1 in
    command) command -v "$2" ;;
    library) pkg-config --exists "$2" ;;
    python) python3 -c "import $2" ;;
  esac >/dev/null 2>&1
}

# Installs what the tiers named need and this machine lacks, or says what to type and ends.
need() {  # TIER...
  local tier check package purpose packages=() reasons='' listed
  while IFS='|' read -r tier check package purpose; do
    tier=${tier// /} package=${package// /}
    [[ -n $tier && " $* " == *" $tier "* ]] || continue
    # shellcheck disable=SC2086  # two words: kind and name
    present $check && continue
    packages+=("$package")
    reasons+=", $package (${purpose# })"
  done <<<"$needs"
  [[ ${#packages[@]} -gt 0 ]] || return 0
  listed=${reasons#, }

  command -v apt-get >/dev/null || die "please install, under the names that your system has for them: $listed"
  local install=(apt-get install -y --no-install-recommends "${packages[@]}") sudo=()
  if [[ $(id -u) != 0 ]]; then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
      sudo=(sudo -n)
    elif command -v sudo >/dev/null && [[ -t 0 && -t 2 ]]; then
      sudo=(sudo)  # asks for the password
    else
      say "missing: $listed"
      say "please type this as root, then run again:  apt-get update && ${install[*]}"
      exit 1
    fi
  fi
  say "installing with ${sudo[*]:+sudo }apt-get: $listed"
  mkdir -p "$root/build" || die "cannot write to $root"
  # Another apt may hold the lock for a moment (unattended upgrades of a fresh machine): wait for it. An update
  # that fails may be some third party's list, so that the install has the last word.
  local apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive LC_ALL=C apt-get -o DPkg::Lock::Timeout=120)
  "${apt[@]}" update </dev/null >"$log" 2>&1 || true
  "${apt[@]}" "${install[@]:1}" </dev/null >>"$log" 2>&1 || explain "apt-get could not install them"
}

# Not every tool says so when a disk is full: cmake, for one, "could not load cache".
disk_full() {
  grep -qi 'No space left on device\|not have enough free space' "$log" ||
    [[ $(df -Pk "$root/build" | awk 'NR == 2 { print $4 }') -lt 10000 ]]
}

# Ends with the log's cause in one line, if it is one that we know, or else with the log's last lines.
explain() {  # WHAT_FAILED
  if disk_full; then
    die "$1: the disk is full"
  elif grep -qi 'fatal error: Killed\|virtual memory exhausted\|out of memory' "$log"; then
    die "$1: out of memory; try with fewer jobs: CMAKE_BUILD_PARALLEL_LEVEL=1 ./$me"
  elif grep -qi 'Could not get lock\|Unable to acquire the dpkg' "$log"; then
    die "$1: another package manager is running; try again when it is done"
  elif grep -qi 'dpkg was interrupted' "$log"; then
    die "$1: an earlier installation was interrupted; as root: dpkg --configure -a"
  elif grep -qi 'Could not resolve\|Temporary failure\|Could not connect\|Unable to connect\|unreachable\|NewConnectionError\|Failed to fetch' "$log"; then
    die "$1: no network (log: $log)"
  elif grep -q 'No matching distribution found' "$log"; then
    die "$1: no network, or no such package for $(python3 --version) (log: $log)"
  elif grep -qi 'Permission denied' "$log"; then
    die "$1: permission denied (log: $log)"
  fi
  say "$1; the end of $log:"
  tail -n 20 "$log" >&2
  exit 1
}

# Sets `cmake`. Where the system's is older than CMakeLists.txt asks for (Ubuntu 22.04), a newer one goes into
# .cache/cmake, once.
find_cmake() {
  cmake="$root/.cache/cmake/bin/cmake"
  if [[ -x $cmake ]] && "$cmake" --version >/dev/null 2>&1; then return; fi
  cmake=cmake
  local version
  version=$(cmake --version | sed -n '1s/[^0-9]*\([0-9]*\.[0-9]*\).*/\1/p')
  if [[ $(printf '%s\n' 3.25 "$version" | sort -V | head -n 1) == 3.25 ]]; then return; fi
  say "cmake $version is older than 3.25: fetching a newer one into .cache/cmake"
  need venv
  mkdir -p "$root/build"
  rm -rf "$root/.cache/cmake"
  if ! { python3 -m venv "$root/.cache/cmake" &&
         "$root/.cache/cmake/bin/python" -m pip install --disable-pip-version-check cmake==3.31.6; } >"$log" 2>&1
  then
    rm -rf "$root/.cache/cmake"
    explain "could not fetch cmake 3.25 or newer"
  fi
  cmake="$root/.cache/cmake/bin/cmake"
}

cache_value() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }

# A build directory is of use when it was made from this tree (not from where the tree stood before it was moved
# or copied), for ninja, by a cmake that is still there. Any other is made again.
usable_build() {
  [[ -f $build/CMakeCache.txt && -f $build/build.ninja ]] &&
    [[ $(cache_value CMAKE_HOME_DIRECTORY) -ef $root && $(cache_value CMAKE_CACHEFILE_DIR) -ef $build ]] &&
    [[ $(cache_value CMAKE_GENERATOR) == Ninja && -x $(cache_value CMAKE_COMMAND) ]]
}

configure() { (cd "$root" && "$cmake" --preset release) >>"$log" 2>&1; }

compile() {  # TARGET
  "$cmake" --build "$build" --target "$1" --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}" 2>&1 | progress
}

# Log in, one line out: rewritten in place on a terminal, written once elsewhere. Nothing when nothing is built.
progress() {
  local line shown=
  while IFS= read -r line; do
    printf '%s\n' "$line" >>"$log"
    [[ $line =~ ^\[([1-9][0-9]*)/([0-9]+)\] ]] || continue
    if [[ -t 2 ]]; then
      printf '\r%s: building, %d of %d ' "$me" "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}" >&2
    elif [[ -z $shown ]]; then
      say "building (minutes the first time; log: build/run.log)"
    fi
    shown=1
  done
  if [[ -n $shown && -t 2 ]]; then printf '\r\033[K' >&2; fi
}

# Builds the target; configures first where that is due or asked for. A directory that cmake or ninja itself
# trips over (as opposed to a compiler) is made again, once.
build_target() {  # TARGET [configure]
  mkdir -p "$root/build" 2>/dev/null || die "cannot write to $root"
  # Two calls at once take turns.
  if command -v flock >/dev/null; then
    exec 9>"$root/build/.lock"
    flock 9
  fi
  { : >"$log"; } 2>/dev/null || die "cannot write $log"
  find_cmake

  local fresh=
  if ! usable_build; then
    rm -rf "$build"
    fresh=1
  fi
  while :; do
    if [[ -n $fresh || ${2:-} == configure ]]; then
      if [[ -n $fresh ]]; then say "configuring"; fi
      configure && compile "$1" && break
    else
      compile "$1" && break
    fi
    if [[ -n $fresh ]] && disk_full; then
      rm -rf "$build"  # its files may be cut short
      die "the build failed: the disk is full"
    fi
    if [[ -n $fresh ]] || ! grep -q '^CMake Error\|^ninja: error:' "$log"; then explain "the build failed"; fi
    say "build/release is broken: starting it afresh"
    rm -rf "$build"
    fresh=1
  done
  if command -v flock >/dev/null; then exec 9>&-; fi  # not for the program that runs next
}
