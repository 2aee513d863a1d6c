# SPDX-License-Identifier: Apache-2.0
#
# The part of the Makefile that builds for another processor, ARCH=aarch64: Debian's compiler, and
# libraries in a folder that tools/sysroot makes. See docs/arm.md.

variant := -$(ARCH)
SYSROOT := $(shell SYSROOT='$(SYSROOT)' CUDA=$(CUDA) tools/sysroot $(ARCH))
$(if $(filter SKIP:,$(SYSROOT)),$(error ARCH=$(ARCH): $(SYSROOT:SKIP:=)))
triplet := $(ARCH)-linux-gnu
override CC := $(triplet)-gcc --sysroot=$(SYSROOT)
nvcc_target = -ccbin $(triplet)-g++ -Xcompiler --sysroot=$(SYSROOT) \
              $(addprefix -isystem $(CUDA_HOME)/include,/ /cccl)
AR := $(triplet)-ar
pkg_config_path := $(SYSROOT)/usr/lib/$(triplet)/pkgconfig
PKG_CONFIG := PKG_CONFIG_SYSROOT_DIR=$(SYSROOT) PKG_CONFIG_LIBDIR=$(pkg_config_path) pkg-config
