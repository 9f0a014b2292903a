#!/usr/bin/env bash
# The operations on the kernels for NEON: built by the preset `aarch64`, run by qemu. What does not name an
# instruction set (reference, generic) is left to the ordinary tests, but for what compares them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ -f build/aarch64/build.ninja ]] || cmake --preset aarch64 >/dev/null
cmake --build build/aarch64 --target ops_test --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}" | tail -n 5
# A filter that finds nothing passes.
tests=$(qemu-aarch64-static build/aarch64/tests/ops_test --gtest_list_tests)
grep -q cpu_neon_dot <<<"$tests"
qemu-aarch64-static build/aarch64/tests/ops_test --gtest_brief=1 \
  --gtest_filter='*cpu_neon_dot*:Isa.*:VectorMath.*:WeightTiles.*:FixedRows.*'
