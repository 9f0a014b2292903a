#!/usr/bin/env bash
# Installs what the preset `aarch64` (tools/aarch64.cmake) needs on an x86-64 Debian or Ubuntu: the cross compiler, the
# libraries for arm64, and qemu to run what comes out. As root. With it the test aarch64.ops is there.
set -euo pipefail
if [[ $(dpkg --print-architecture) == arm64 ]]; then exit 0; fi  # the ordinary tests run these kernels
[[ $(id -u) == 0 ]] || exec sudo -n "$0"
apt=(env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120)
# What is added here goes again if the rest does not come: a list that cannot be had stops every later update.
if ! dpkg --print-foreign-architectures | grep -qx arm64; then
  dpkg --add-architecture arm64
  trap '[[ $? -eq 0 ]] || dpkg --remove-architecture arm64' EXIT
fi
"${apt[@]}" update
"${apt[@]}" install -y --no-install-recommends g++-aarch64-linux-gnu qemu-user-static \
  libfmt-dev:arm64 libpcre2-dev:arm64 libutf8proc-dev:arm64 libedit-dev:arm64 libgtest-dev:arm64
