#!/usr/bin/env bash
# clang-tidy, with the checks of .clang-tidy, over every .cc of src/ and apps/, or over the files named.
#   tools/tidy.sh [FILE...]       e.g. tools/tidy.sh $(git diff --name-only main -- '*.cc')
# Prints findings only; exits 1 when there is one. Needs a configured build/release (./run or ./test).
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

tidy=${CLANG_TIDY:-clang-tidy}
command -v "$tidy" >/dev/null || { echo "tools/tidy.sh: $tidy is missing (Debian package clang-tidy)" >&2; exit 1; }
[[ -f build/release/compile_commands.json ]] || { echo "tools/tidy.sh: run ./test first: no build/release" >&2; exit 1; }

findings=$(mktemp)
trap 'rm -f "$findings"' EXIT
# The file names go through a NUL list; -n 1 keeps all cores busy to the end. The "N warnings generated" lines
# and the count of hidden ones go to stderr even with --quiet, and a failure of clang-tidy itself (a file that
# does not parse) is printed on stdout as a finding, so that nothing is lost with stderr.
# Without nvcc the cuda backend is not built, and its headers may not be there.
grep -q src/ops/cuda/ build/release/compile_commands.json && skipped='' || skipped=src/ops/cuda
if [[ $# -gt 0 ]]; then printf '%s\0' "$@"; else
  find src apps -name '*.cc' -not -path "${skipped:-none}/*" -print0 | sort -z
fi |
  xargs -0 -r -n 1 -P "$(nproc)" "$tidy" -p build/release --quiet 2>/dev/null >"$findings" || failed=1
# A header's finding comes once for every file that includes it.
awk '/^[^ ].*:[0-9]+:[0-9]+: / { show = !seen[$0]++ } show' "$findings"
[[ -z ${failed:-} && ! -s $findings ]]
