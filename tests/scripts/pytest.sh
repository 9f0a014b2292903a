#!/usr/bin/env bash
# Runs one Python test file with the packages of .venv (./test makes it), or else with those of python3.
set -euo pipefail
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python="$root/.venv/bin/python"
[[ -x $python ]] || python=python3
if ! "$python" -c 'import pytest' 2>/dev/null; then
  echo "This test needs the Python packages of tests/python/requirements.txt in .venv: run ./test with network." >&2
  exit 1
fi
exec "$python" -m pytest -q -p no:cacheprovider "$@"
