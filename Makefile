# SPDX-License-Identifier: Apache-2.0
#
#   make demo     install what is missing, build, run ep_bench on 4 ranks
#   make check    the same, then run the tests
#   make check-gpu  run the tests on GPUs, if there are any; GPU_JOBS=4 at a time
#   make check-emulated  run the tests of kernels on CPUs; EMULATED_SEED=N: in another order
#   make check-nccl-ep  hold the drop-in library against NVIDIA's wheel, which is downloaded;
#                       check-nccl-ep-te against Transformer Engine's, of 264 MiB
#   make python   lay the Python package out in build/python, for PYTHONPATH
#   make wheel    build/libep-*.whl, the Python package; downloads the tools for it
#   make jax-handlers  build libep_jax.so; JAXLIB_INCLUDE=: what jax.ffi.include_dir() returns
#   make check-python  install the wheel into virtual environments, with JAX and with PyTorch among
#                  them, and run its tests
#   make check-jax, check-torch  the tests of libep.jax, of libep.torch alone
#   make check-python-gpu  both on GPUs, with the python3 of PATH and its PyTorch and JAX
#   make          build libraries, tools and tests into build/
#   make install  PREFIX=/usr/local DESTDIR=
#   make clean, make format
#
# Variables: V=1 shows commands; WERROR=1 makes warnings errors; ASAN=1 or TSAN=1 build with
# sanitizers into folders of their own, RELEASE=1 (also with install and wheel) for all GPUs that
# releases serve; CC, CFLAGS, LDFLAGS as usual.

MAKEFLAGS += --no-builtin-rules

VERSION := $(shell sed -n 's/^.define EP_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' include/ep/ep.h \
                   | paste -sd.)
SOVERSION := 0
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
BINDIR ?= $(PREFIX)/bin
# ep_bench looks for its models in ../share/libep, as seen from its own folder.
SHAREDIR ?= $(BINDIR)/../share

ifdef ASAN
variant := -asan
sanitize := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
else ifdef TSAN
variant := -tsan
sanitize := -fsanitize=thread
endif
B := build$(variant)$(if $(RELEASE),-release)
Q := $(if $(V),,@)
say = $(if $(V),,@printf '  %-7s %s\n' $(1) $(2);)

# ---- flags: recipes query pkg-config when they run, since a first run installs packages ---------

CFLAGS ?= -O3 -g
warnings := -Wall -Wextra -Wno-missing-field-initializers -Wshadow -Wstrict-prototypes \
            -Wmissing-prototypes -Wvla $(if $(WERROR),-Werror)
# Floating point: results are defined to the bit, so the compiler must not contract operations. No
# code reads errno or floating-point exceptions after them.
host_cflags = -std=c11 -D_GNU_SOURCE -fPIC -pthread -ffp-contract=off -fno-math-errno \
              -fno-trapping-math $(warnings) $(sanitize) -Iinclude -I. -MMD -MP $(CFLAGS)
cflags = $(host_cflags) $(cuda_cflags)
ldflags = -pthread $(sanitize) $(LDFLAGS)
mpi_cflags = $(shell pkg-config --cflags ompi 2>/dev/null || mpicc --showme:compile)
mpi_libs = $(shell pkg-config --libs ompi 2>/dev/null || mpicc --showme:link)
hwloc_libs = $(shell pkg-config --libs hwloc)
openblas = $(if $(filter-out 0,$(OPENBLAS)),$(shell pkg-config --exists openblas && echo 1))
openblas_cflags = $(if $(openblas),-DMOE_WITH_OPENBLAS=1 $(shell pkg-config --cflags openblas))
openblas_libs = $(if $(openblas),$(shell pkg-config --libs openblas))
# Sanitizers see the tool's own loops, but not into OpenBLAS.
OPENBLAS ?= $(if $(variant),0,1)
criterion_libs = $(shell pkg-config --libs criterion)

# ---- CUDA: on if nvcc and NCCL's headers are found, unless CUDA=0 -------------------------------

CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(firstword $(shell command -v nvcc) \
                                                 $(wildcard /usr/local/cuda/bin/nvcc)))
nccl_include := $(patsubst %/nccl_device.h,%,$(firstword $(wildcard \
    $(addsuffix /nccl_device.h,$(NCCL_HOME)/include $(CUDA_HOME)/include /usr/local/include /usr/include))))
ifeq ($(variant),)
CUDA ?= $(if $(and $(CUDA_HOME),$(nccl_include)),1,0)
else
CUDA := 0
endif
NVCC ?= $(CUDA_HOME)/bin/nvcc
# Kernels are compiled ahead of time for sm_90, on which they are tested, and in releases for sm_100,
# on which they have not run. A GPU of another kind compiles the newest PTX that it can when it first
# loads them.
release_arch := -gencode arch=compute_100,code=[sm_100,compute_100]
NVCC_ARCH ?= -gencode arch=compute_90,code=[sm_90,compute_90] $(if $(RELEASE),$(release_arch))
ifeq ($(if $(RELEASE),$(CUDA)),1)
ifeq ($(findstring sm_100,$(shell $(NVCC) --list-gpu-code)),)
$(error RELEASE=1: expected an nvcc that knows sm_100 (CUDA 12.8 or newer), got $(NVCC), which does not)
endif
endif

# ---- sources and targets ------------------------------------------------------------------------

folders := runtime bootstrap handles dispatch combine
# Folders are searched. Sources of the CUDA backend lie in a folder cuda/.
all_lib_c := $(filter-out bootstrap/mpi.c runtime/host/rowmath.c,\
                          $(sort $(shell find $(folders) -name '*.c')))
lib_c := $(all_lib_c)
cuda_c := $(foreach f,$(all_lib_c),$(if $(findstring /cuda/,$f),$f))
cuda_cu := $(sort $(shell find $(folders) -name '*.cu'))
ifeq ($(CUDA),1)
cuda_o := $(cuda_cu:%.cu=$B/%.cu.o)
cuda_cflags := -DEP_WITH_CUDA=1 -isystem $(CUDA_HOME)/include -isystem $(nccl_include)
cuda_libs := -L$(CUDA_HOME)/lib64 -lcudart_static -ldl -lrt
else
lib_c := $(filter-out $(cuda_c),$(lib_c))
endif
# rowmath.c is compiled once for each instruction set; the library chooses one at run time.
machine := $(shell $(CC) -dumpmachine 2>/dev/null)
row_sets := base $(if $(findstring x86_64,$(machine)),v3 v4)
row_flags_v3 := -march=x86-64-v3
row_flags_v4 := -march=x86-64-v4 -mprefer-vector-width=512
lib_o := $(lib_c:%.c=$B/%.o) $(row_sets:%=$B/runtime/host/rowmath_%.o) $(cuda_o)
# The drop-in library has a folder of its own, laid out as NCCL_EP_HOME is, so that nobody loads it by
# accident.
nccl_ep_c := $(wildcard bindings/nccl_ep/*.c)
nccl_ep_o := $(nccl_ep_c:%.c=$B/%.o)
nccl_ep_home := libep/nccl_ep
# The handlers of XLA programs are built against jaxlib's headers, which "make wheel" downloads.
jax_c := $(wildcard bindings/jax/*.c)
jax_o := $(jax_c:%.c=$B/%.o)
jax_so := $B/libep_jax.so
torch_c := $(wildcard bindings/torch/*.c)
torch_o := $(torch_c:%.c=$B/%.o)
torch_so := $B/libep_torch.so
JAXLIB_INCLUDE ?= $(firstword $(wildcard $B/python-jax/lib/python3*/site-packages/jaxlib/include))
common_c := $(wildcard tools/common/*.c)
bench_c := tools/ep_bench.c $(wildcard tools/bench/*.c)
bench_cu := $(if $(filter 1,$(CUDA)),$(wildcard tools/bench/*.cu))
info_c := tools/ep_info.c $(wildcard tools/info/*.c)
moe_c := tools/ep_moe.c $(wildcard tools/moe/*.c)
moe_cu := $(if $(filter 1,$(CUDA)),$(wildcard tools/moe/*.cu))
tools := $(foreach t,ep_bench ep_info ep_moe,$(if $(wildcard tools/$t.c),$B/$t))
tests_c := $(filter-out tests/gpu/% tests/emulator/%,$(wildcard tests/*.c tests/*/*.c))
tests := $(if $(tests_c),$B/tests/ep_tests)

package_files := $B/ep.pc $B/ep-mpi.pc $B/epConfig.cmake $B/epConfigVersion.cmake
nccl_ep_so := $B/$(nccl_ep_home)/lib/libnccl_ep.so
libs := $B/libep.so $B/libep.a $B/libep_mpi.so $B/libep_mpi.a $(nccl_ep_so) $(package_files)

.PHONY: all help libs demo check check-gpu check-emulated check-nodes-emulated check-nccl-ep \
        check-nccl-ep-te python wheel check-python check-python-gpu jax-handlers check-jax check-torch \
        run-demo run-check deps install clean format
all: libs $(tools) $(tests)
help:
	@sed -n '3,/^$$/s/^# \{0,1\}//p' Makefile
libs: $(libs)

$B/bootstrap/mpi.o $B/tools/%.o $B/tests/%.o: private cflags += $(mpi_cflags)

# Rebuild objects if the flags change.
flags := $(CC) $(CFLAGS) $(WERROR) CUDA=$(CUDA) $(NVCC_ARCH) OPENBLAS=$(OPENBLAS)
$(shell mkdir -p $B/tests)
$B/flags: $(if $(filter-out $(flags),$(file <$B/flags))$(filter-out $(file <$B/flags),$(flags)),again)
	$(file >$@,$(flags))
.PHONY: again
again:
$(lib_o) $(nccl_ep_o) $(jax_o) $(torch_o) $B/bootstrap/mpi.o $(common_c:%.c=$B/%.o) $(bench_c:%.c=$B/%.o) $(info_c:%.c=$B/%.o) $(moe_c:%.c=$B/%.o) $(tests_c:%.c=$B/%.o): $B/flags

$B/%.o: %.c
	@mkdir -p $(@D)
	$(call say,CC,$<)
	$Q$(CC) $(cflags) -c $< -o $@

# -fmad=false: results are defined to the bit, so nvcc must not contract operations.
$B/%.cu.o: %.cu $B/flags Makefile
	@mkdir -p $(@D)
	$(call say,NVCC,$<)
	$Q$(NVCC) $(NVCC_ARCH) -O3 -std=c++17 -fmad=false -Iinclude -I. -I$(nccl_include) -MMD -MP \
	    $(if $(WERROR),-Werror all-warnings) -Xcompiler -fPIC,-pthread,-fno-exceptions,-fno-threadsafe-statics -c $< -o $@

$B/runtime/host/rowmath_%.o: runtime/host/rowmath.c
	@mkdir -p $(@D)
	$(call say,CC,"$< [$*]")
	$Q$(CC) $(cflags) $(row_flags_$*) -DEP_ROWMATH=ep_rowmath_$* -c $< -o $@

$B/libep.so.$(SOVERSION): $(lib_o) libep.map
	$(call say,LD,$@)
	$Q$(CC) -shared -Wl,-soname,$(@F) -Wl,--version-script=libep.map -o $@ $(lib_o) \
	    $(ldflags) $(hwloc_libs) $(cuda_libs) -lm

$B/libep_mpi.so.$(SOVERSION): $B/bootstrap/mpi.o libep_mpi.map $B/libep.so
	$(call say,LD,$@)
	$Q$(CC) -shared -Wl,-soname,$(@F) -Wl,--version-script=libep_mpi.map -o $@ $< \
	    $(ldflags) -L$B -lep $(mpi_libs)

# It finds libep.so three folders up, here and once installed. NVIDIA's has the same name and number.
$(nccl_ep_so).0: $(nccl_ep_o) bindings/nccl_ep/libnccl_ep.map $B/libep.so
	@mkdir -p $(@D)
	$(call say,LD,$@)
	$Q$(CC) -shared -Wl,-soname,$(@F) -Wl,--version-script=bindings/nccl_ep/libnccl_ep.map \
	    -Wl,-rpath,'$$ORIGIN/../../..' -o $@ $(nccl_ep_o) $(ldflags) -L$B -lep -ldl
$(nccl_ep_so): $(nccl_ep_so).0
	$Qln -sf $(<F) $@

# It lies beside libep.so, here and in the package, whose libep.so is loaded first.
$(jax_o): private cflags += $(if $(JAXLIB_INCLUDE),-isystem $(JAXLIB_INCLUDE),\
    $(error expected JAXLIB_INCLUDE, the folder that jax.ffi.include_dir() returns, got none))
$(jax_so): $(jax_o) bindings/jax/libep_jax.map $B/libep.so
	$(call say,LD,$@)
	$Q$(CC) -shared -Wl,--version-script=bindings/jax/libep_jax.map -Wl,-rpath,'$$ORIGIN' \
	    -o $@ $(jax_o) $(ldflags) -L$B -lep -lm

# As libep_jax.so. Python itself has the other symbols that it wants.
$(torch_so): $(torch_o) bindings/torch/libep_torch.map $B/libep.so
	$(call say,LD,$@)
	$Q$(CC) -shared -Wl,--version-script=bindings/torch/libep_torch.map -Wl,-rpath,'$$ORIGIN' \
	    -o $@ $(torch_o) $(ldflags) -L$B -lep

$B/%.so: $B/%.so.$(SOVERSION)
	$Qln -sf $(<F) $@

$B/libep.a: $(lib_o)
$B/libep_mpi.a: $B/bootstrap/mpi.o
$B/%.a:
	$(call say,AR,$@)
	$Qrm -f $@ && $(AR) rcs $@ $^

# Tools load the shared libraries from their own folder or, once installed, from lib.
rpath := -Wl,-rpath,'$$ORIGIN:$$ORIGIN/../lib:$$ORIGIN/..'
$B/ep_bench: $(bench_c:%.c=$B/%.o) $(common_c:%.c=$B/%.o) $(bench_cu:%.cu=$B/%.cu.o)
$B/ep_info: $(info_c:%.c=$B/%.o) $(common_c:%.c=$B/%.o)
$B/ep_moe: $(moe_c:%.c=$B/%.o) $(moe_cu:%.cu=$B/%.cu.o) $(common_c:%.c=$B/%.o)
# NCCL EP's interface, which is not libep's.
$B/tools/bench/nccl_ep.o $B/emulated/tools/bench/nccl_ep.o: private cflags += -isystem bindings/nccl_ep
# Of all that is built, ep_moe alone has matrices to multiply. OPENBLAS=0: with loops of its own.
$B/ep_moe: private tool_libs = $(openblas_libs)
$B/tools/moe/host.o: private cflags += $(openblas_cflags) $(mpi_cflags)
$(tools): $B/libep.so $B/libep_mpi.so
	$(call say,LD,$@)
	$Q$(CC) -o $@ $(filter %.o,$^) $(ldflags) $(rpath) -L$B -lep_mpi -lep $(mpi_libs) $(tool_libs) \
	    $(cuda_libs) -lm

# Tests link statically, since some use functions that the shared library hides.
$(tests): $(tests_c:%.c=$B/%.o) $(nccl_ep_o) $B/libep.a $B/libep_mpi.a
	$(call say,LD,$@)
	$Q$(CC) -o $@ $(filter %.o,$^) $(ldflags) $B/libep_mpi.a $B/libep.a $(mpi_libs) \
	    $(hwloc_libs) $(criterion_libs) $(cuda_libs) -lm

# The tests for GPUs (see tests/gpu/on_gpu.h): the same sources without the tests that use no
# backend, plus the tests that need a GPU. watch.c counts the library's own allocations and must see
# the real ones, so it is compiled without on_gpu.h.
host_tests_c := tests/harness/selftest.c tests/bootstrap/local.c tests/bootstrap/sockets.c tests/bootstrap/topology.c \
                $(addprefix tests/bootstrap/,adopt.c bind.c gpus.c killed.c memory.c mesh.c \
                  mesh_groups.c segments.c sharding.c system.c windows.c) \
                $(addprefix tests/runtime/,bounds.c divide.c exports.c quant.c settings.c status.c) \
                $(wildcard tests/tools/*.c tests/bindings/*.c)
gpu_tests := $B/tests/ep_gpu_tests
gpu_tests_c := $(filter-out $(host_tests_c),$(tests_c)) $(wildcard tests/gpu/*.c)
gpu_o := $(gpu_tests_c:%.c=$B/gpu/%.o)
on_gpu = $(if $(filter tests/harness/watch.c tests/gpu/%,$<),,-include tests/gpu/on_gpu.h)
$B/gpu/%.o: private cflags += $(mpi_cflags) $(on_gpu)
$B/gpu/%.o: %.c $B/flags
	@mkdir -p $(@D)
	$(call say,CC,"$< [gpu]")
	$Q$(CC) $(cflags) -c $< -o $@
$(gpu_tests): $(gpu_o) $(nccl_ep_o) $B/libep.a $B/libep_mpi.a
	$(call say,LD,$@)
	$Q$(CC) -o $@ $(filter %.o,$^) $(ldflags) $B/libep_mpi.a $B/libep.a $(mpi_libs) \
	    $(hwloc_libs) $(criterion_libs) $(cuda_libs) -lm

# The tests for GPUs, on CPUs: the CUDA backend's sources are compiled against replacements of CUDA
# and NCCL (see tests/emulator/), without an installation of either. Rings are short, so that they
# wrap, and so is the wait for NCCL.
emulated_tests := $B/tests/ep_emulated_tests
emulated_c := $(all_lib_c) $(nccl_ep_c) $(gpu_tests_c) $(wildcard tests/emulator/*.c)
emulated_o := $(emulated_c:%.c=$B/emulated/%.o) $(cuda_cu:%.cu=$B/emulated/%.cu.o) \
              $(row_sets:%=$B/emulated/runtime/host/rowmath_%.o)
emulated_cflags = $(filter-out -I% -O3,$(host_cflags)) -O2 -DEP_WITH_CUDA=1 -DEP_RING_BYTES=16384 -DEP_SLICE_BYTES=1024 \
                  -DEP_NCCL_SECONDS=2 -DTESTS_EMULATED=1 \
                  -Itests/emulator/include -Iinclude -I.
$B/emulated/%.o: private cflags = $(emulated_cflags) \
    $(if $(filter tests/%,$<),$(mpi_cflags) $(if $(filter tests/emulator/%,$<),,$(on_gpu)))
$B/emulated/%.o: %.c $B/flags
	@mkdir -p $(@D)
	$(call say,CC,"$< [emulated]")
	$Q$(CC) $(cflags) -c $< -o $@
$B/emulated/runtime/host/rowmath_%.o: runtime/host/rowmath.c
	@mkdir -p $(@D)
	$(call say,CC,"$< [$* emulated]")
	$Q$(CC) $(cflags) $(row_flags_$*) -DEP_ROWMATH=ep_rowmath_$* -c $< -o $@
$B/emulated/%.cu.o: %.cu tests/emulator/kernel.sed $B/flags
	@mkdir -p $(@D)
	$(call say,CXX,"$< [emulated]")
	$Qsed -E -f tests/emulator/kernel.sed $< >$(@:.o=.cpp)
	$Q$(CXX) $(filter-out -std=% -Wstrict-prototypes -Wmissing-prototypes,$(emulated_cflags)) \
	    -std=c++17 -fno-strict-aliasing -Wno-unknown-pragmas -Wno-unused-parameter \
	    -include cuda_runtime.h -c $(@:.o=.cpp) -o $@
$(emulated_tests): $(emulated_o) $B/bootstrap/mpi.o
	$(call say,LD,$@)
	$Q$(CXX) -o $@ $(filter %.o,$^) $(ldflags) $(mpi_libs) $(hwloc_libs) $(criterion_libs) -lm

# ep_moe with emulated GPUs inside: its ranks are threads, and loops stand in for cuBLAS.
emulated_moe := $B/emulated/ep_moe
emulated_moe_o := $(filter-out $B/emulated/tests/% $B/emulated/bindings/%,$(emulated_o)) \
                  $(patsubst %,$B/emulated/%.o,$(basename $(wildcard tests/emulator/*.c) $(moe_c) $(common_c)) \
                    $(wildcard tools/moe/*.cu))
$B/emulated/tools/%.o: private cflags = $(emulated_cflags) $(mpi_cflags)
$(emulated_moe): $(emulated_moe_o) $B/bootstrap/mpi.o
	$(call say,LD,$@)
	$Q$(CXX) -o $@ $(filter %.o,$^) $(ldflags) $(mpi_libs) $(hwloc_libs) -lm

# ep_bench likewise, without the baseline, which takes MPI.
emulated_bench := $B/emulated/ep_bench
emulated_bench_o := $(filter-out $B/emulated/tests/% $B/emulated/bindings/%,$(emulated_o)) \
                    $(patsubst %,$B/emulated/%.o,$(basename $(wildcard tests/emulator/*.c) $(common_c) \
                        $(filter-out %/baseline_nccl.c,$(bench_c))) tools/bench/kernels.cu)
$(emulated_bench): $(emulated_bench_o) $B/bootstrap/mpi.o
	$(call say,LD,$@)
	$Q$(CXX) -o $@ $(filter %.o,$^) -Wl,--defsym=baseline_measure_nccl=abort $(ldflags) $(mpi_libs) \
	    $(hwloc_libs) -lm

# The drop-in library with emulated GPUs inside, for clients in Python: see tests/bindings/nccl_ep.
emulated_nccl_ep := $B/emulated/libnccl_ep.so
emulated_nccl_ep_o := $(filter-out $B/emulated/tests/%,$(emulated_o)) \
                      $(patsubst %.c,$B/emulated/%.o,$(wildcard tests/emulator/*.c))
$(emulated_nccl_ep): $(emulated_nccl_ep_o) tests/emulator/client.map
	$(call say,LD,$@)
	$Q$(CXX) -shared -Wl,--version-script=tests/emulator/client.map -o $@ $(filter %.o,$^) \
	    $(ldflags) $(hwloc_libs) -lm

define pc
prefix=$(PREFIX)
libdir=$(LIBDIR)
includedir=$(INCLUDEDIR)

endef
define ep_pc
$(pc)
Name: ep
Description: expert-parallel communication for Mixture-of-Experts models
Version: $(VERSION)
Requires.private: hwloc
Libs: -L$${libdir} -lep
Libs.private: -pthread $(cuda_libs) -lm
Cflags: -I$${includedir}
endef
define ep-mpi_pc
$(pc)
Name: ep-mpi
Description: MPI bootstrap for libep
Version: $(VERSION)
Requires: ep
Libs: -L$${libdir} -lep_mpi $(mpi_libs)
Cflags: $(mpi_cflags)
endef

# CMake's package files find everything relative to their own folder, so an installed tree may be
# moved. Before 1.0.0 a minor version may change the interface.
include_from_cmake = $(shell realpath -ms --relative-to='$(LIBDIR)/cmake/ep' '$(INCLUDEDIR)')
version_part = $(word $1,$(subst ., ,$(VERSION)))
ifeq ($(CUDA),1)
define ep_cmake_cuda
find_package(CUDAToolkit QUIET)
if(TARGET CUDA::cudart_static)
  list(APPEND _ep_private CUDA::cudart_static)
else()
  list(APPEND _ep_private "-L$(CUDA_HOME)/lib64" cudart_static dl rt)
endif()

endef
endif
define epConfig_cmake
# Targets: ep::ep (shared) and ep::ep_static; with COMPONENTS mpi also ep::mpi (shared) and
# ep::mpi_static, which bring these.
if(CMAKE_VERSION VERSION_LESS 3.12)
  set(ep_FOUND FALSE)
  set(ep_NOT_FOUND_MESSAGE "libep expects CMake 3.12 or newer, got $${CMAKE_VERSION}")
  return()
endif()
cmake_policy(VERSION 3.12...3.28)

get_filename_component(_ep_here "$${CMAKE_CURRENT_LIST_DIR}" REALPATH)
get_filename_component(_ep_lib "$${_ep_here}/../.." ABSOLUTE)
get_filename_component(_ep_include "$${_ep_here}/$(include_from_cmake)" ABSOLUTE)

macro(_ep_add target kind file)
  if(NOT TARGET ep::$${target})
    add_library(ep::$${target} $${kind} IMPORTED)
    set_target_properties(ep::$${target} PROPERTIES
      IMPORTED_LOCATION "$${_ep_lib}/$${file}"
      INTERFACE_INCLUDE_DIRECTORIES "$${_ep_include}"
      INTERFACE_LINK_LIBRARIES "$${ARGN}")
    if("$${kind}" STREQUAL "SHARED")
      set_target_properties(ep::$${target} PROPERTIES IMPORTED_SONAME "$${file}")
    endif()
  endif()
endmacro()

find_library(EP_HWLOC_LIBRARY hwloc)
mark_as_advanced(EP_HWLOC_LIBRARY)
if(EP_HWLOC_LIBRARY)
  set(_ep_private "$${EP_HWLOC_LIBRARY}")
else()
  set(_ep_private hwloc)
endif()
$(ep_cmake_cuda)list(APPEND _ep_private -pthread m)
_ep_add(ep SHARED libep.so.$(SOVERSION))
_ep_add(ep_static STATIC libep.a $${_ep_private})

if("mpi" IN_LIST ep_FIND_COMPONENTS)
  get_property(_ep_languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  set(_ep_language CXX)
  if("C" IN_LIST _ep_languages)
    set(_ep_language C)
  endif()
  find_package(MPI QUIET COMPONENTS $${_ep_language})
  set(ep_mpi_FOUND $${MPI_$${_ep_language}_FOUND})
  if(ep_mpi_FOUND)
    _ep_add(mpi SHARED libep_mpi.so.$(SOVERSION) ep::ep MPI::MPI_$${_ep_language})
    _ep_add(mpi_static STATIC libep_mpi.a ep::ep_static MPI::MPI_$${_ep_language})
  endif()
endif()

foreach(_ep_component IN LISTS ep_FIND_COMPONENTS)
  if(ep_FIND_REQUIRED_$${_ep_component} AND NOT ep_$${_ep_component}_FOUND)
    set(ep_FOUND FALSE)
    if(_ep_component STREQUAL "mpi")
      set(ep_NOT_FOUND_MESSAGE "the component mpi of libep expects MPI, got none")
    else()
      set(ep_NOT_FOUND_MESSAGE "libep has the component mpi alone, got $${_ep_component}")
    endif()
  endif()
endforeach()
endef
define epConfigVersion_cmake
set(PACKAGE_VERSION "$(VERSION)")
set(PACKAGE_VERSION_COMPATIBLE FALSE)
if(PACKAGE_FIND_VERSION_RANGE)
  if(PACKAGE_VERSION VERSION_GREATER_EQUAL PACKAGE_FIND_VERSION_MIN AND
     (PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION_MAX OR
      (PACKAGE_FIND_VERSION_RANGE_MAX STREQUAL "INCLUDE" AND
       PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION_MAX)))
    set(PACKAGE_VERSION_COMPATIBLE TRUE)
  endif()
elseif(NOT PACKAGE_FIND_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
elseif(PACKAGE_FIND_VERSION_MAJOR EQUAL $(call version_part,1) AND
       ($(call version_part,1) GREATER 0 OR PACKAGE_FIND_VERSION_COUNT EQUAL 1 OR
        PACKAGE_FIND_VERSION_MINOR EQUAL $(call version_part,2)) AND
       PACKAGE_VERSION VERSION_GREATER_EQUAL PACKAGE_FIND_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
  if(PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION)
    set(PACKAGE_VERSION_EXACT TRUE)
  endif()
endif()
if(CMAKE_SIZEOF_VOID_P AND NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
  set(PACKAGE_VERSION_UNSUITABLE TRUE)
endif()
endef

# Written at each run, since PREFIX may differ from the last run's.
$B/ep.pc $B/ep-mpi.pc: $B/%.pc: again
	$(file >$@,$($*_pc))
$B/epConfig.cmake $B/epConfigVersion.cmake: $B/%.cmake: again
	$(file >$@,$($*_cmake))

-include $(shell find $B -name '*.d' 2>/dev/null)

# ---- running ------------------------------------------------------------------------------------

export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
mpirun := mpirun --oversubscribe --bind-to none --timeout 300

demo: deps
	@$(MAKE) --no-print-directory run-demo
check: deps
	@$(MAKE) --no-print-directory run-demo
	@$(MAKE) --no-print-directory run-check

run-demo: all
	$(mpirun) -n 4 $B/ep_bench
	@echo 'A whole MoE layer: $(mpirun) -n 4 $B/ep_moe'

# Sanitizers do not work with MPI, so their builds run only the tests whose ranks are threads. The
# thread sanitizer does not support fibers, and emulated kernels take long, so "make check" runs these
# in the plain build alone; "make ASAN=1 check-nodes-emulated" runs them with the address sanitizer.
run-check: all $(if $(variant),,$(emulated_tests) $(emulated_moe) $(emulated_bench))
	$B/tests/ep_tests -j1 $(CHECK_ARGS)
	$(if $(variant)$(CHECK_ARGS),,$(emulated_tests) -j2 --filter '$(emulated_few)')
	$(if $(variant)$(CHECK_ARGS),,$(emulate_small))
	$(if $(variant)$(CHECK_ARGS),,$(emulate_nodes) --filter '$(nodes_few)')
	$(if $(variant)$(CHECK_ARGS),,$(emulate_layer))
	$(if $(variant)$(CHECK_ARGS),,$(emulate_bench))

# The tests that emulated GPUs can run: separate processes cannot share them, and ten thousand steps
# would take a day. emulated_wide runs with many blocks, which divide the work more finely but take
# long. any: a filter for all of these patterns.
space := $(subst ,, )
any = @($(subst $(space),|,$(strip $1)))
emulated_few := $(call any,$(addsuffix /*,dispatch_* combine_* handles_* runtime_group runtime_abort \
    bootstrap_cuda_windows bootstrap_lying bootstrap_nccl gpu_abort gpu_routes gpu_pointers gpu_shared \
    gpu_ipc gpu_order gpu_nodes gpu_beside gpu_weights gpu_weight_slices gpu_adopt_graphs) \
    gpu_graphs/and_plain_calls_1 gpu_plan_graphs/latency*_1 gpu_nccl_ep_graphs/decode_in_halves_2 \
    gpu_backends/@(equal_4|num_sms) gpu_zero_copy/as_staged_[12] gpu_resident/two_blocks_2 \
    gpu_adopt/@(rows_2|unknown_2|released_2|nothing_lent|memory_as_promised) \
    gpu_adopt_old/wrong_arguments_2 gpu_streams/pipeline_1 gpu_plans/*_2 gpu_faults/nothing*_2 \
    gpu_nccl/borrowed_2 gpu_nccl_split/@(uneven*|fails_4) \
    gpu_nccl_bootstrap/@(gathers_4|different_calls|groups_2|absent_rank_3|departs_before_mem_alloc) \
    gpu_nccl_ep/@(train_2|flat_global*|dropped*|overflow*|decode_*_2|quantised*|two_in_flight) \
    gpu_nccl_ep/@(rows_in_windows|wrong*|group_goes*|counts*|unwritten*|refused*|num_sms))
emulated_all := $(call any,$(addsuffix /*,dispatch_* combine_* handles_* runtime_group runtime_abort \
    runtime_random runtime_deadline bootstrap_cuda_windows bootstrap_departed bootstrap_lying \
    bootstrap_nccl gpu_nccl gpu_nccl_split gpu_nccl_bootstrap gpu_nccl_ep gpu_backends gpu_abort \
    gpu_routes gpu_pointers gpu_shared gpu_ipc gpu_order gpu_nodes gpu_beside gpu_streams \
    gpu_plans gpu_weights gpu_weight_slices gpu_graphs gpu_plan_graphs gpu_nccl_ep_graphs gpu_adopt_graphs gpu_zero_copy \
    gpu_adopt gpu_adopt_old gpu_resident gpu_faults gpu_late*))
emulated_wide := gpu_backends/equal_[12]
# GPUs with little shared memory and few blocks: rows pass in many pieces, several at once a block.
emulate_small = EMULATED_SMS=2 EMULATED_SHARED=49152 $(emulated_tests) -j2 \
                --filter '@(@(combine_backward|dispatch_rows)/*|combine_quantised/@(expert_major|flat|batched|lost_slots))'
# The same tests on two nodes, and those of cases with nodes of their own, of up to eight ranks.
emulate_nodes = LIBEP_TEST_NODES=2 EMULATED_GPUS=8 $(emulated_tests) -j2
nodes_few := $(call any,$(addsuffix /*,dispatch_layouts dispatch_overflow runtime_group \
    runtime_deadline gpu_weights) runtime_abort/[!o]* combine_sums/nodes* runtime_random/several* \
    dispatch_quant/two_nodes* gpu_plans/*_2 gpu_backends/equal_2 gpu_graphs/and_plain_calls_2 \
    gpu_faults/overwritten_memory_* gpu_nccl_ep/@(train_4|no_low*))
nodes_all := $(call any,$(addsuffix /*,dispatch_* combine_* handles_pipeline handles_arguments \
    runtime_group runtime_deadline runtime_random gpu_plans gpu_graphs gpu_weights gpu_zero_copy \
    gpu_streams gpu_pointers gpu_nccl gpu_nccl_ep bootstrap_departed) gpu_plan_graphs/@(expert_major|flat)* \
    runtime_abort/[!o]* handles_plans/[!o]* handles_plan_words/throughput_2 gpu_backends/equal_[24] \
    gpu_faults/overwritten_memory_* gpu_nccl_bootstrap/@(groups*|absent*|departs_before*))
# A layer on emulated GPUs: products in its own type, with weights and then tokens on two nodes; of
# dequantised weights in fp32; on one stream. Dispatch and NCCL's kernels do not fit on a GPU
# together: see tools/moe/step.c.
run_layer = $(emulated_moe) --backend cuda --threads 4 --hidden 64 --ffn 48 --tokens 24 -n 2 -w 0 \
            --floor 0
emulate_layer = \
    LIBEP_TOPOLOGY=2 EMULATED_PLACES=4 $(run_layer) --mesh fsdp=2,expert=2 --uneven --regather 1 && \
    LIBEP_TOPOLOGY=2 EMULATED_PLACES=4 $(run_layer) --mesh expert=2,fsdp=2 --weights early && \
    EMULATED_PLACES=4 EMULATED_NCCL_BLOCKS=2 $(run_layer) --quant fp8 --blocks rows --dtype fp16 && \
    $(run_layer) --mesh data=2,expert=2 --overlap 0
# What ep_bench does on GPUs: calls, graphs, floors, latency mode in halves, and weights.
run_bench = $(emulated_bench) --backend cuda --threads 2 --hidden 512 --experts 8 --top-k 2 -n 1 -w 0
emulate_bench = $(run_bench) --tokens 10 && $(run_bench) --tokens 6 --graphs --zero-copy && \
                $(run_bench) --tokens 6 --mode latency --split && \
                $(run_bench) --tokens 256 --case weights --hidden 256 --ffn 128
check-emulated: $(emulated_tests) $(emulated_moe) $(emulated_bench)
	$(emulated_tests) -j2 $(if $(CHECK_ARGS),$(CHECK_ARGS),--filter '$(emulated_all)')
	$(if $(CHECK_ARGS),,EMULATED_SMS=64 $(emulated_tests) -j2 --filter '$(emulated_wide)')
	$(if $(CHECK_ARGS),,$(emulate_small))
	$(if $(CHECK_ARGS),,$(emulate_nodes) --filter '$(nodes_all)')
	$(if $(CHECK_ARGS),,$(emulate_layer))
	$(if $(CHECK_ARGS),,$(emulate_bench))

# The small part of it that is about several nodes. The stacks of fibers hide leaks.
check-nodes-emulated: $(emulated_tests)
	ASAN_OPTIONS=detect_leaks=0 $(emulate_nodes) --filter '$(nodes_few)'

check-nccl-ep: $(nccl_ep_so) $(emulated_nccl_ep)
	tests/bindings/nccl_ep/check $B
check-nccl-ep-te: $(nccl_ep_so)
	tests/bindings/nccl_ep/check-te $B

jax-handlers: $(jax_so)

# The Python package where its parts meet: links to its sources and libraries, and its version.
python: $B/libep.so $(nccl_ep_so) $(torch_so) $(if $(JAXLIB_INCLUDE),$(jax_so))
	$Qrm -rf $B/python && mkdir -p $B/python/libep/lib $B/python/libep/nccl_ep/lib
	$Qcp -rs '$(CURDIR)/bindings/python/.' $B/python
	$Qln -s '$(CURDIR)/LICENSE' $B/python/LICENSE
	$Qln -s '$(CURDIR)/$B/libep.so.$(SOVERSION)' '$(CURDIR)/$(torch_so)' $B/python/libep/lib
	$Qln -s '$(CURDIR)/$(nccl_ep_so).0' $B/python/libep/nccl_ep/lib
	$(if $(JAXLIB_INCLUDE),$Qln -s '$(CURDIR)/$(jax_so)' $B/python/libep/lib)
	$Qprintf '# Made from ep.h.\n__version__ = "%s"\n' $(VERSION) >$B/python/libep/_version.py

# The second make sees the headers that the first has downloaded.
wheel:
	bindings/jax/environment $B
	@$(MAKE) --no-print-directory python
	bindings/python/wheel $B

check-python: wheel $(tools)
	tests/bindings/python/check $B
	tests/bindings/jax/check $B
	tests/bindings/torch/check $B

check-jax: wheel
	tests/bindings/jax/check $B $(CHECK_ARGS)

check-torch: wheel
	tests/bindings/torch/check $B $(CHECK_ARGS)

check-python-gpu:
	@$(MAKE) --no-print-directory python \
	    JAXLIB_INCLUDE=$$(python3 -c 'import jax; print(jax.ffi.include_dir())' 2>/dev/null)
	tests/bindings/check-gpu $B $(CHECK_ARGS)

# GPU_JOBS tests at a time share the GPUs. Tests of thousands of short steps run alone, since they
# would spend their time waiting for a turn. Without a GPU the program says so and exits with 0.
GPU_JOBS ?= 4
gpu_alone := @(gpu_steps|gpu_replays)/*
ifeq ($(CUDA),1)
ifdef CHECK_ARGS
check-gpu: $(gpu_tests)
	$(gpu_tests) -j$(GPU_JOBS) $(CHECK_ARGS)
else
check-gpu: $(gpu_tests)
	$(gpu_tests) -j$(GPU_JOBS) --filter '!($(gpu_alone))'
	$(gpu_tests) -j1 --filter '$(gpu_alone)'
endif
else
check-gpu:
	@echo 'SKIP: all tests: this build has no CUDA: it takes nvcc and nccl_device.h, no sanitizer'
endif

deps:
	@sh tools/deps.sh

install: libs $(tools)
	$(if $(filter-out 1,$(words $(DESTDIR)$(LIBDIR)$(INCLUDEDIR)$(BINDIR)$(SHAREDIR))),\
	    $(error install: expected folders without blanks, got $(DESTDIR)$(PREFIX)))
	install -d $(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(LIBDIR)/cmake/ep \
	    $(DESTDIR)$(INCLUDEDIR)/ep $(DESTDIR)$(BINDIR)
	install -m 644 include/ep/*.h $(DESTDIR)$(INCLUDEDIR)/ep
	install -m 644 $B/libep.a $B/libep_mpi.a $(DESTDIR)$(LIBDIR)
	install -m 755 $B/libep.so.$(SOVERSION) $B/libep_mpi.so.$(SOVERSION) $(DESTDIR)$(LIBDIR)
	ln -sf libep.so.$(SOVERSION) $(DESTDIR)$(LIBDIR)/libep.so
	ln -sf libep_mpi.so.$(SOVERSION) $(DESTDIR)$(LIBDIR)/libep_mpi.so
	install -d $(DESTDIR)$(LIBDIR)/$(nccl_ep_home)/lib
	install -m 755 $(nccl_ep_so).0 $(DESTDIR)$(LIBDIR)/$(nccl_ep_home)/lib
	ln -sf libnccl_ep.so.0 $(DESTDIR)$(LIBDIR)/$(nccl_ep_home)/lib/libnccl_ep.so
	install -m 644 $(filter %.pc,$(package_files)) $(DESTDIR)$(LIBDIR)/pkgconfig
	install -m 644 $(filter %.cmake,$(package_files)) $(DESTDIR)$(LIBDIR)/cmake/ep
	install -m 755 $(tools) $(DESTDIR)$(BINDIR)
	install -d $(DESTDIR)$(SHAREDIR)/libep
	install -m 644 tools/models.txt $(DESTDIR)$(SHAREDIR)/libep

clean:
	rm -rf build build-asan build-tsan build-release

format:
	clang-format -i $(shell git ls-files '*.c' '*.h' '*.cu' '*.cuh')
