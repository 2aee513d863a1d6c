#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Print and install the Debian packages that the build needs and this machine lacks.
set -eu

missing=
need() { missing="$missing $1"; }

command -v cc >/dev/null || need "gcc libc6-dev"
command -v g++ >/dev/null || need g++ # for the emulated GPUs in the tests
command -v pkg-config >/dev/null || need pkg-config
command -v mpirun >/dev/null || need openmpi-bin
has() { command -v pkg-config >/dev/null && pkg-config --exists "$1"; }
has ompi || command -v mpicc >/dev/null || need libopenmpi-dev
has hwloc || need libhwloc-dev
has criterion || need libcriterion-dev
# For the GEMMs of ep_moe, which has loops of its own without it.
wanted=
has openblas || wanted=" libopenblas-dev"

[ -n "$missing$wanted" ] || exit 0
if ! command -v apt-get >/dev/null; then
    [ -n "$missing" ] || exit 0
    echo "libep needs, by their Debian names:$missing" >&2
    exit 1
fi
sudo=
[ "$(id -u)" = 0 ] || sudo=sudo
missing=$missing$wanted
echo "Installing Debian packages:$missing"
$sudo apt-get update -qq
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $missing >/dev/null
