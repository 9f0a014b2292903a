#!/usr/bin/env bash
# ./run on machines that this one is not: packages missing, no rights, no network, an old cmake, a moved tree.
# The PATH holds a few real tools and fakes for the rest; nothing is installed and nothing is compiled.
# shellcheck disable=SC2016  # the fakes expand their own variables
set -euo pipefail
source_root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tree="$scratch/a tree"  # with a space
bin="$scratch/bin"
failures=0

fake() {  # NAME BODY
  rm -f "$bin/$1"
  printf '#!/bin/bash\n%s\n' "$2" >"$bin/$1"
  chmod +x "$bin/$1"
}

# A machine that has all, where the user is not root and has no sudo.
new_machine() {
  rm -rf "$bin" "$tree"
  mkdir -p "$bin" "$tree/tools"
  cp "$source_root/run" "$tree"
  cp "$source_root/tools/deps.sh" "$tree/tools"
  local tool
  for tool in bash env dirname sed grep tail head sort mkdir rm nproc cat touch chmod true df awk; do
    ln -s "$(type -P $tool)" "$bin/$tool"
  done
  fake id 'echo 1000'
  fake g++ ''
  fake ninja ''
  fake pkg-config ''
  fake apt-get "echo \"\$*\" >>'$scratch/apt'"
  # Stands for a build of a nibble that prints its arguments and its directory.
  fake cmake "
case \$1 in
  --version) echo 'cmake version 3.25.1' ;;
  --preset)
    mkdir -p build/release && touch build/release/build.ninja
    printf '%s\n' \"CMAKE_HOME_DIRECTORY:INTERNAL=\$PWD\" \"CMAKE_CACHEFILE_DIR:INTERNAL=\$PWD/build/release\" \
      CMAKE_GENERATOR:INTERNAL=Ninja 'CMAKE_COMMAND:INTERNAL=$bin/cmake' >build/release/CMakeCache.txt ;;
  --build)
    [[ -e \$2/nibble ]] && exit 0
    echo '[1/1] Linking'
    printf '%s\n' '#!/bin/bash' 'printf \"<%s>\" \"\$@\" \"\$PWD\"' 'exit 7' >\"\$2/nibble\"
    chmod +x \"\$2/nibble\" ;;
esac"
  rm -f "$scratch/apt"
}

run() {  # ARGS...; leaves rc, out, err
  rc=0
  (cd / && PATH="$bin" "$tree/run" "$@" </dev/null >"$scratch/out" 2>"$scratch/err") || rc=$?
  out=$(<"$scratch/out")
  err=$(<"$scratch/err")
}

expect() {  # WHAT CONDITION...
  local what=$1
  shift
  if ! "$@"; then
    printf 'FAILED: %s\n  rc %s\n  stdout: %s\n  stderr: %s\n' "$what" "$rc" "$out" "$err"
    failures=$((failures + 1))
  fi
}
fails_with() { [[ $rc == 1 && -z $out && $err == *"$1"* ]]; }
one_line() { [[ $err != *$'\n'* ]]; }
apt_not_called() { [[ ! -e $scratch/apt ]]; }

new_machine
run -p "two words" -n 5
expect "arguments, directory and exit code are the program's" \
  [ "$rc:$out" = "7:<run><-m><$tree/models/demo><-p><two words><-n><5></>" ]
run
expect "a story by default" [ "$out" = "<run><-m><$tree/models/demo><-p><Once upon a time there was a little></>" ]
expect "a second call is silent" [ -z "$err" ]
mv "$tree" "$scratch/b tree"
tree="$scratch/b tree"
run
expect "a moved tree is built again" [ "$rc:$out" = "7:<run><-m><$tree/models/demo><-p><Once upon a time there was a little></>" ]
expect "... and says so" [ "${err/configuring/}" != "$err" ]
tree="$scratch/a tree"
rm -rf "$scratch/b tree"

# Without rights: the one command to type.
new_machine
fake pkg-config '[[ $2 != libedit && $2 != libpcre2-8 ]]'
rm "$bin/ninja"
run
expect "names what is missing and why" fails_with "missing: ninja-build (build), libpcre2-dev (regular expressions of tokenizers), libedit-dev (line editing in chat)"
expect "gives the command" fails_with "apt-get update && apt-get install -y --no-install-recommends ninja-build libpcre2-dev libedit-dev"
expect "installs nothing" apt_not_called
fake sudo 'exit 1'  # would ask for a password, and there is no terminal
run
expect "sudo that would ask" fails_with "please type this as root"
rm "$bin/apt-get" "$bin/sudo"
run
expect "a system without apt" fails_with "please install, under the names that your system has for them: ninja-build (build)"
expect "a system without apt: one line" one_line

# With rights.
apt_prints() {  # TEXT
  fake apt-get "echo \"\$*\" >>'$scratch/apt'; [[ \$* != *install* ]] || { echo '$1'; exit 100; }"
}
new_machine
rm "$bin/ninja"
fake sudo '[[ $1 == -n ]] && shift && exec "$@"'
fake apt-get "echo \"\$*\" >>'$scratch/apt'; touch '$bin/ninja'; chmod +x '$bin/ninja'"
run
expect "installs through sudo, then runs" [ "$rc:${out:0:5}" = "7:<run>" ]
expect "says what it installs" [ "${err/installing with sudo apt-get: ninja-build (build)/}" != "$err" ]
expect "asked apt for it" grep -q 'install -y --no-install-recommends ninja-build' "$scratch/apt"
fake id 'echo 0'
for case in "Temporary failure resolving x|no network" "Could not get lock x|another package manager is running" \
  "x: No space left on device|the disk is full" "E: Unable to locate package x|Unable to locate package x"; do
  rm -f "$bin/ninja"
  apt_prints "${case%|*}"
  run
  expect "apt-get as root: ${case%|*}" fails_with "${case#*|}"
done

# An old cmake, and no network for a newer one; then with network.
new_machine
mv "$bin/cmake" "$bin/new_cmake"
fake cmake 'echo "cmake version 3.22.1"'
fake python3 '[[ $1 != -m ]] || { echo "Temporary failure in name resolution"; exit 1; }'
run
expect "an old cmake" fails_with "cmake 3.22 is older than 3.25"
expect "an old cmake, no network" fails_with "could not fetch cmake 3.25 or newer: no network"
fake python3 "
if [[ \$2 == venv ]]; then mkdir -p \"\$3/bin\"; cat '$bin/new_cmake' >\"\$3/bin/cmake\"; chmod +x \"\$3/bin/cmake\"
  cat '$bin/python3' >\"\$3/bin/python\"; chmod +x \"\$3/bin/python\"; fi"
run
expect "an old cmake, network" [ "$rc:${out:0:5}" = "7:<run>" ]
run
expect "... is fetched once" [ -z "$err" ]

# Builds that fail.
new_machine
run
rm "$tree/build/release/nibble"
fake cmake 'for i in {1..30}; do echo "x.cc:$i: error: bad"; done; exit 1'
sed -i '2i [[ $1 != --version ]] || { echo "cmake version 3.25.1"; exit; }' "$bin/cmake"
run
expect "a compile error shows the log's end" fails_with "x.cc:30: error: bad"
expect "... its last 20 lines" [ "${err/x.cc:10:/}" = "$err" ]
expect "... and keeps the build" [ -e "$tree/build/release/CMakeCache.txt" ]
new_machine
run
rm "$tree/build/release/nibble"
sed -i '2i [[ $1 != --build || -e "'"$scratch"'/broke" ]] || { touch "'"$scratch"'/broke"; echo "ninja: error: loading build.ninja"; exit 1; }' "$bin/cmake"
run
expect "a broken build directory is made again" [ "$rc:${out:0:5}" = "7:<run>" ]

[[ $failures == 0 ]] && echo "all passed"
