#!/bin/bash
# Packs what tools/gpu_check.sh needs on a machine that has this tree and a GPU, but no build: nibble, the test
# binaries, and the libraries that such a machine may lack.
#
#   tools/gpu_bundle.sh BUILD_DIRECTORY BUNDLE.tar.xz
#
# There: tar -xJf BUNDLE.tar.xz && tools/gpu_check.sh gpu LOGS
set -eu
build=$(cd "${1:?usage: gpu_bundle.sh BUILD_DIRECTORY BUNDLE.tar.xz}" && pwd)
bundle=$(realpath "${2:?usage: gpu_bundle.sh BUILD_DIRECTORY BUNDLE.tar.xz}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/gpu/lib" "$work/gpu/tests"

for program in nibble tests/ops_test tests/kv_test tests/model_test tests/engine_test; do
  strip -o "$work/gpu/$program" "$build/$program"
done
# All but the C and C++ libraries, which a machine has or which do not move alone.
for program in "$work/gpu/nibble" "$work"/gpu/tests/*; do ldd "$program"; done |
  awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
  grep -Ev '/(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux[^/]*)\.so' |
  while read -r library; do cp -L "$library" "$work/gpu/lib/"; done
tar -C "$work" -cf - gpu | xz -T0 -9 >"$bundle"
limit=$((8 << 20))
size=$(stat -c %s "$bundle")
echo "$bundle: $size bytes"
if [ "$size" -gt $limit ]; then
  echo "gpu_bundle.sh: more than $limit bytes" >&2
  exit 1
fi
