#!/usr/bin/env bash
# Installs what the preset `aarch64` (tools/aarch64.cmake) needs on an x86-64 Debian or Ubuntu: the cross compiler, the
# libraries for arm64, and qemu to run what comes out. As root. With it the test aarch64.ops is there.
set -euo pipefail
if [[ $(dpkg --print-architecture) == arm64 ]]; then exit 0; fi  # the ordinary tests run these kernels
[[ $(id -u) == 0 ]] || exec sudo -n "$0"
apt=(env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120)
dpkg --add-architecture arm64
# A list that cannot be had would stop every later update, too.
"${apt[@]}" update || { dpkg --remove-architecture arm64; exit 1; }
"${apt[@]}" install -y --no-install-recommends g++-aarch64-linux-gnu qemu-user-static \
  libfmt-dev:arm64 libpcre2-dev:arm64 libutf8proc-dev:arm64 libedit-dev:arm64 libgtest-dev:arm64
