#!/usr/bin/env bash
# What git tracks stays small and clean: under 55 MiB in all, no file of over 50 MB, no build outputs, environments or
# paths of a machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
git rev-parse --git-dir >/dev/null 2>&1 || { echo "not a git checkout: nothing to look at"; exit 0; }
failed=0
total=$(git ls-files -z | xargs -0 -r stat -c %s | awk '{sum += $1} END {printf "%d", sum}')
echo "tracked: $total bytes"
if ((total > 55 * 1024 * 1024)); then echo "the tree is larger than 55 MiB"; failed=1; fi
if git ls-files -z | xargs -0 -r stat -c '%s %n' | awk '$1 > 50000000 {print; found = 1} END {exit !found}'; then
  echo "files of over 50 MB"; failed=1
fi
if git ls-files | grep -E '(^|/)(build|venv|\.venv|__pycache__|site-packages|node_modules)/|\.(o|a|so|pyc)$'; then
  echo "build outputs or environments are tracked"; failed=1
fi
exit $failed
