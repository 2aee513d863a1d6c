# SPDX-License-Identifier: Apache-2.0
#
#   make demo     install what is missing, build, run ep_bench on 4 ranks
#   make check    the same, then run the tests
#   make check-gpu  run the tests on GPUs, if there are any; GPU_JOBS=4 at a time
#   make check-emulated  run the tests of kernels on CPUs; EMULATED_SEED=N: in another order
#   make check-nccl-ep, check-nccl-ep-te  the drop-in library in NVIDIA's wheels, downloaded
#   make python   lay the Python package out in build/python, for PYTHONPATH
#   make wheel    build/libep-*.whl, the Python package; downloads the tools for it
#   make jax-handlers  build libep_jax.so; JAXLIB_INCLUDE=: what jax.ffi.include_dir() returns
#   make check-python  test the wheel in virtual environments, with JAX and with PyTorch among them
#   make check-jax, check-torch  libep.jax or libep.torch alone; check-released: frameworks on them
#   make check-python-gpu  both on GPUs, with the python3 of PATH and its PyTorch and JAX
#   make          build libraries, tools and tests into build/
#   make install  PREFIX=/usr/local DESTDIR=; make clean, make format
#   make dist     build/libep-VERSION.tar.gz, the sources of the last commit
#
# Variables: V=1 shows commands; WERROR=1 makes warnings errors; ASAN=1 or TSAN=1 build with
# sanitizers into folders of their own, ARCH=aarch64 for Arm hosts (docs/arm.md), RELEASE=1 (also
# with install and wheel) for all GPUs and machines that releases serve, CODE=80 with code of
# capability 8.0 alone, to test it on newer GPUs; CC, CFLAGS, LDFLAGS as usual.

MAKEFLAGS += --no-builtin-rules
VERSION := $(shell sed -n 's/^.define EP_VERSION_\(MAJOR\|MINOR\|PATCH\) //p' include/ep/ep.h \
                   | paste -sd.)
VERSION_MAJOR := $(word 1,$(subst ., ,$(VERSION)))
VERSION_MINOR := $(word 2,$(subst ., ,$(VERSION)))
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
# Copies that the compiler inlines are hidden from it.
sanitize := -fsanitize=thread -fno-builtin-memcpy -fno-builtin-memset
else ifdef ARCH
include tools/cross.mk
endif
PKG_CONFIG ?= pkg-config
B := build$(variant)$(if $(RELEASE),-release)$(if $(CODE),-sm_$(CODE))
Q := $(if $(V),,@)
say = $(if $(V),,@printf '  %-7s %s\n' $(1) $(2);)

# ---- flags: recipes query pkg-config when they run, since a first run installs packages ---------

CFLAGS ?= $(if $(sanitize),-O1,-O3) -g
warnings := -Wall -Wextra -Wno-missing-field-initializers -Wshadow -Wstrict-prototypes \
            -Wmissing-prototypes -Wvla $(if $(WERROR),-Werror)
# Floating point: results are defined to the bit, so the compiler must not contract operations. No
# code reads errno or floating-point exceptions after them.
common_cflags = -std=c11 -D_GNU_SOURCE -fPIC -pthread -ffp-contract=off -fno-math-errno \
              -fno-trapping-math $(warnings) $(sanitize) -MMD -MP $(CFLAGS)
ldflags = -pthread $(sanitize) $(LDFLAGS)
mpi_cflags = $(shell $(PKG_CONFIG) --cflags ompi 2>/dev/null || mpicc --showme:compile)
mpi_libs = $(shell $(PKG_CONFIG) --libs ompi 2>/dev/null || mpicc --showme:link)
hwloc_libs = $(shell $(PKG_CONFIG) --libs hwloc)
openblas = $(if $(filter-out 0,$(OPENBLAS)),$(shell $(PKG_CONFIG) --exists openblas && echo 1))
openblas_cflags = $(if $(openblas),-DMOE_WITH_OPENBLAS=1 $(shell $(PKG_CONFIG) --cflags openblas))
openblas_libs = $(if $(openblas),$(shell $(PKG_CONFIG) --libs openblas))
# Sanitizers see the tool's own loops, but not into OpenBLAS.
OPENBLAS ?= $(if $(variant),0,1)
criterion_libs = $(shell $(PKG_CONFIG) --libs criterion)

# ---- CUDA: on if nvcc and NCCL's headers are found, unless CUDA=0 -------------------------------

CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(firstword $(shell command -v nvcc) \
                                                 $(wildcard /usr/local/cuda/bin/nvcc)))
nccl_places := $(addsuffix /include,$(NCCL_HOME) $(CUDA_HOME) /usr/local /usr)
nccl_include := $(patsubst %/,%,$(dir $(firstword $(wildcard $(nccl_places:=/nccl_device.h)))))
CUDA := $(if $(sanitize),0,$(or $(CUDA),$(if $(and $(CUDA_HOME),$(nccl_include)),1,0)))
NVCC ?= $(CUDA_HOME)/bin/nvcc
# Kernels are compiled for sm_90, on which they are tested, and in releases for others, too: see
# docs/settings.md. Those for masks would be a third of a release, so it has them for 9.x alone.
# CODE=80: code of 8.0 alone, to test it on 9.0. Tools keep code of 9.0: libep is measured by them.
code_of = -gencode arch=compute_$1,code=sm_$(or $2,$1)
with_ptx = -gencode arch=compute_$1,code=[sm_$1,compute_$1]
more = $(if $(filter %_masked.cu.o,$@),,$(call code_of,80) $(call with_ptx,100) $(call code_of,120))
standard_arch = $(if $(RELEASE),$(call code_of,90) $(more) -compress-mode=size,$(call with_ptx,90))
old_for_90 := $(call code_of,$(CODE),90)
NVCC_ARCH ?= $(if $(CODE),$(call code_of,$(CODE)) $(old_for_90),$(standard_arch))
tools_arch = $(if $(CODE),$(subst $(old_for_90),$(call code_of,90),$(NVCC_ARCH)),$(NVCC_ARCH))
# Matrix units of sm_90 need code for it alone. Tools ask for the capability before they use them.
nvcc_arch = $(if $(filter %/fp8.cu.o %/overlap/gemm.cu.o,$@),-arch=sm_90a,\
                $(if $(call is,tools/%),$(tools_arch),$(NVCC_ARCH)))
$(if $(filter 1,$(if $(RELEASE),$(CUDA))),\
    $(if $(findstring sm_120,$(shell $(NVCC) --list-gpu-code)),,\
        $(error RELEASE=1: expected an nvcc that knows sm_120 (CUDA 12.8 or newer), got $(NVCC))))
ifeq ($(CUDA),1)
cuda_cflags := -DEP_WITH_CUDA=1 -isystem $(CUDA_HOME)/include -isystem $(nccl_include)
cuda_libs := $(if $(ARCH),,-L$(CUDA_HOME)/lib64) -lcudart_static -ldl -lrt
endif

# ---- sources: folders are searched, so files and folders may move -------------------------------

layers := runtime bootstrap handles dispatch combine
sources := $(sort $(shell find $(layers) bindings tools tests -name '*.c' -o -name '*.cu'))
in = $(filter $(addsuffix /%,$1),$(sources))
# Without CUDA no kernels are built, and of the library nothing in a folder cuda/.
has_cuda = $(foreach f,$1,$(if $(findstring /cuda/,$f)$(filter %.cu,$f),$f))
built = $(if $(filter 1,$(CUDA)),$1,$(filter-out $(call has_cuda,$1),$1))

mpi_c := $(filter bootstrap/%mpi.c,$(sources))
lib := $(filter-out $(mpi_c),$(call in,$(layers)))
nccl_ep := $(call in,bindings/nccl_ep)
bench := tools/ep_bench.c $(call in,tools/bench tools/common)
info := tools/ep_info.c tools/bench/routing.c tools/bench/trace.c $(call in,tools/info tools/common)
moe := tools/ep_moe.c $(call in,tools/moe tools/common)
tune := tools/ep_tune.c $(call in,tools/tune tools/common)
overlap := tools/ep_overlap.c $(call in,tools/overlap tools/common)
tests_c := $(filter-out tests/gpu/% tests/emulator/% tests/bindings/nccl_ep/%,$(call in,tests))
host_only := $(wildcard $(shell sed '/^\#/d' tests/gpu/host_only))
gpu_tests_c := $(filter-out $(host_only),$(tests_c)) $(call in,tests/gpu)

# $(call objects,FOLDER/,SOURCES): their objects, in a folder of $B. rowmath.c is compiled once for
# each instruction set; the library chooses one at run time.
# Kernels of latency mode are compiled for several nodes, too; those that wait for ranks for masks.
objects = $(foreach f,$2,$(if $(filter %/rowmath.c,$f),\
              $(row_sets:%=$B/$1$(basename $f)_%.o),$B/$1$(f:.c=).o)\
              $(if $(filter $(nodes_cu),$f),$B/$1$(basename $f)_nodes.cu.o)\
              $(if $(filter $(masked_cu),$f),$B/$1$(basename $f)_masked.cu.o))
nodes_cu := dispatch/cuda/latency_scatter.cu combine/cuda/latency_gather.cu
masked_cu := handles/prepare/cuda/prepare.cu handles/placement/cuda/place.cu \
             dispatch/cuda/scatter.cu combine/cuda/gather.cu $(nodes_cu) \
             handles/weights/cuda/push_rows.cu runtime/cuda/code.cu
kernel_form = $(if $(filter %_nodes.cu.o,$@),-DEP_SEVERAL_NODES) \
              $(if $(filter %_masked.cu.o,$@),-DEP_MASKED $(if $(RELEASE),-DEP_HAS_PTX=0))
row_sets := base $(if $(findstring x86_64,$(shell $(CC) -dumpmachine 2>/dev/null)),v3 v4)
row_flags_v3 := -march=x86-64-v3
row_flags_v4 := -march=x86-64-v4 -mprefer-vector-width=512
rowmath := $(filter %/rowmath.c,$(lib))

# ---- targets ------------------------------------------------------------------------------------

# PORTABLE=1, of release wheels: shared libraries in a folder of their own, linked for glibc 2.28 and
# newer and with hwloc inside. bindings/python/portable makes what that takes.
L := $B$(if $(PORTABLE),/portable)
linker := $(if $(PORTABLE),$L/cc)

# The drop-in library has a folder of its own, laid out as NCCL_EP_HOME is, so that nobody loads it
# by accident. XLA's handlers are built against jaxlib's headers, which "make wheel" downloads.
nccl_ep_home := libep/nccl_ep
nccl_ep_so := $L/$(nccl_ep_home)/lib/libnccl_ep.so
jax_so := $L/libep_jax.so
torch_so := $L/libep_torch.so
JAXLIB_INCLUDE ?= $(firstword $(wildcard $B/python-jax/lib/python3*/site-packages/jaxlib/include))
package_files := $(patsubst tools/package/%.in,$B/%,$(wildcard tools/package/*.in))
libs := $B/libep.so $B/libep.a $B/libep_mpi.so $B/libep_mpi.a $(nccl_ep_so) $(package_files)
tools := $B/ep_bench $B/ep_info $B/ep_moe $(if $(filter 1,$(CUDA)),$B/ep_overlap $B/ep_tune)
tests := $B/tests/ep_tests
gpu_tests := $B/tests/ep_gpu_tests
emulated_tests := $B/tests/ep_emulated_tests
emulated := $(emulated_tests) $(addprefix $B/emulated/,ep_moe ep_bench ep_info ep_overlap ep_tune)

.PHONY: all help libs demo check check-gpu check-emulated check-nodes-emulated check-nccl-ep \
        check-nccl-ep-te python wheel check-python check-python-gpu jax-handlers check-package \
        check-jax check-torch check-released run-demo run-check deps install dist clean format again
all: libs $(tools) $(tests)
libs: $(libs)
jax-handlers: $(jax_so)
help:
	@sed -n '3,/^$$/s/^# \{0,1\}//p' Makefile

# ---- compiling ----------------------------------------------------------------------------------

# Rebuild objects if the flags change.
flags := $(CC) $(CFLAGS) $(sanitize) $(WERROR) CUDA=$(CUDA) $(NVCC_ARCH) OPENBLAS=$(OPENBLAS)
old_flags := $(shell mkdir -p $B; cat $B/flags 2>/dev/null)
$B/flags: $(if $(filter-out $(flags),$(old_flags))$(filter-out $(old_flags),$(flags)),again)
	$(file >$@,$(flags))
again:

# A source may be compiled several times: for the host, in gpu/ (tests alone) and in emulated/.
cflags = $(if $(filter $B/emulated/%,$@),$(emulated_cflags),$(host_cflags)) $(file_cflags)
host_cflags = $(common_cflags) -Iinclude -I. $(cuda_cflags)
is = $(filter $1,$<)
file_cflags = $(if $(call is,$(mpi_c) tools/% tests/%),$(mpi_cflags)) \
    $(if $(call is,tools/bench/nccl_ep.c),-isystem bindings/nccl_ep) \
    $(if $(filter $B/tools/moe/host.o,$@),$(openblas_cflags)) \
    $(if $(call is,bindings/jax/%),$(jax_cflags)) \
    $(if $(call is,bindings/torch/%),-fno-plt) \
    $(if $(call is,$(rowmath)),$(row_flags_$*) -DEP_ROWMATH=ep_rowmath_$*) \
    $(if $(filter $B/gpu/% $B/emulated/tests/%,$@),\
        $(if $(call is,$(not_on_gpu)),,-include tests/gpu/on_gpu.h))
jax_cflags = -isystem $(or $(JAXLIB_INCLUDE),\
    $(error expected JAXLIB_INCLUDE, the folder that jax.ffi.include_dir() returns, got none))
# The tests for GPUs are the same sources (see tests/gpu/on_gpu.h). watch.c counts the library's own
# allocations and must see the real ones.
not_on_gpu := tests/harness/watch.c tests/gpu/% tests/emulator/%

define compile
@mkdir -p $(@D)
$(call say,CC,$@)
$Q$(CC) $(cflags) -c $< -o $@
endef
$B/%.o: %.c $B/flags
	$(compile)
$B/gpu/%.o: %.c $B/flags
	$(compile)
$B/emulated/%.o: %.c $B/flags
	$(compile)
$B/$(basename $(rowmath))_%.o: $(rowmath) $B/flags
	$(compile)
$B/emulated/$(basename $(rowmath))_%.o: $(rowmath) $B/flags
	$(compile)

# -fmad=false: results are defined to the bit, so nvcc must not contract operations.
define compile_kernels
@mkdir -p $(@D)
$(call say,NVCC,$@)
$Q$(NVCC) $(nvcc_target) $(nvcc_arch) $(kernel_form) -O3 -std=c++17 -fmad=false -Iinclude -I. \
    -I$(nccl_include) -MMD -MP $(if $(WERROR),-Werror all-warnings) \
    -Xcompiler -fPIC,-pthread,-ffp-contract=off,-fno-exceptions,-fno-threadsafe-statics -c $< -o $@
endef
$(foreach v,.cu _nodes.cu _masked.cu,$(eval $B/%$v.o: %.cu $B/flags; $$(compile_kernels)))

# Emulated GPUs: CUDA and NCCL are those of tests/emulator. Rings are short, and wrap; so are waits.
popcnt := $(if $(findstring x86_64,$(shell $(CC) -dumpmachine)),-mpopcnt)
emulated_cflags = $(patsubst -g,-g1,$(filter-out -O3,$(common_cflags))) -O2 $(popcnt) \
                  -fno-semantic-interposition -DEP_WITH_CUDA=1 -DEP_RING_BYTES=16384 \
                  -DEP_SLICE_BYTES=1024 -DEP_PUSH_BYTES=512 -DEP_WHOLE_SUM_BYTES=3000 \
                  -DEP_NCCL_SECONDS=2 -DEP_POLLS_PER_CLOCK_READ=32 -DTESTS_EMULATED=1 \
                  -Itests/emulator/include -Iinclude -I.
define emulate_kernels
@mkdir -p $(@D)
$(call say,CXX,$@)
$Qsed -E -f tests/emulator/kernel.sed $< >$(@:.o=.cpp)
$Q$(CXX) $(kernel_form) \
    $(filter-out -std=% -Wstrict-prototypes -Wmissing-prototypes,$(cflags)) \
    -std=c++17 -fno-strict-aliasing -Wno-unknown-pragmas -Wno-unused-parameter \
    -include cuda_runtime.h -c $(@:.o=.cpp) -o $@
endef
$(foreach v,.cu _nodes.cu _masked.cu,\
    $(eval $B/emulated/%$v.o: %.cu tests/emulator/kernel.sed $B/flags; $$(emulate_kernels)))

-include $(shell find $B -name '*.d' 2>/dev/null)

# ---- linking ------------------------------------------------------------------------------------

# $(call link,FLAGS AND LIBRARIES,COMPILER) of all objects and archives that the target needs.
define link
@mkdir -p $(@D)
$(call say,LD,$@)
$Q$(or $2,$(CC)) -o $@ $(filter %.o,$^) $(filter %.a,$^) $(ldflags) $1
endef
rpath = -Wl,-rpath,'$$ORIGIN$1'
shared = -shared -Wl,--version-script=$(filter %.map,$^)
soname = -Wl,-soname,$(@F)

$L/libep.so.$(SOVERSION): $(call objects,,$(call built,$(lib))) libep.map
	$(call link,$(shared) $(soname) $(if $(PORTABLE),$L/lib/libhwloc.a,$(hwloc_libs)) \
	    $(cuda_libs) -lm,$(linker))
$B/libep_mpi.so.$(SOVERSION): $(call objects,,$(mpi_c)) libep_mpi.map $B/libep.so
	$(call link,$(shared) $(soname) -L$B -lep $(mpi_libs))
# It finds libep.so three folders up, here and once installed. NVIDIA's has the same name.
$(nccl_ep_so).0: $(call objects,,$(nccl_ep)) bindings/nccl_ep/libnccl_ep.map $L/libep.so
	$(call link,$(shared) $(soname) $(call rpath,/../../..) -L$L -lep -ldl,$(linker))
# These lie beside libep.so, here and in the package, whose libep.so is loaded first. Python itself
# has the other symbols that libep_torch.so wants.
$(jax_so): $(call objects,,$(call in,bindings/jax)) bindings/jax/libep_jax.map
$(torch_so): $(call objects,,$(call in,bindings/torch)) bindings/torch/libep_torch.map
$(jax_so) $(torch_so): $L/libep.so
	$(call link,$(shared) $(call rpath) -L$L -lep -lm,$(linker))

$(nccl_ep_so): $(nccl_ep_so).0
	$Qln -sf $(<F) $@
$L/%.so: $L/%.so.$(SOVERSION)
	$Qln -sf $(<F) $@

$B/libep.a: $(call objects,,$(call built,$(lib)))
$B/libep_mpi.a: $(call objects,,$(mpi_c))
$B/%.a:
	$(call say,AR,$@)
	$Qrm -f $@ && $(AR) rcs $@ $^

# Tools load the shared libraries from their own folder or, once installed, from lib. Of all that is
# built, ep_moe alone has matrices to multiply. OPENBLAS=0: with loops of its own.
tool_rpath := $(call rpath,:$$ORIGIN/../lib:$$ORIGIN/..)
$B/ep_bench: $(call objects,,$(call built,$(bench)))
$B/ep_info: $(call objects,,$(info))
$B/ep_moe: $(call objects,,$(call built,$(moe)))
$B/ep_overlap: $(call objects,,$(overlap))
$B/ep_tune: $(call objects,,$(tune))
$(tools): $B/libep.so $B/libep_mpi.so
	$(call link,$(tool_rpath) -L$B -lep_mpi -lep $(mpi_libs) \
	    $(if $(filter %/ep_moe,$@),$(openblas_libs)) $(cuda_libs) -lm)

# Tests link statically, since some use functions that the shared library hides.
$(tests): $(call objects,,$(tests_c))
$(gpu_tests): $(call objects,gpu/,$(gpu_tests_c))
$(tests) $(gpu_tests): $(call objects,,$(nccl_ep)) $B/libep_mpi.a $B/libep.a
	$(call link,$(mpi_libs) $(hwloc_libs) $(criterion_libs) $(cuda_libs) -lm)

# Programs with emulated GPUs inside: the tests, the drop-in library and tools. Ranks of the tools
# are threads: loops serve instead of cuBLAS, and no baseline, which takes MPI.
emulator_c := $(filter-out tests/emulator/tests/%,$(call in,tests/emulator))
emulator := $(call objects,emulated/,$(lib) $(emulator_c))
emulated_nccl_ep := $B/emulated/libnccl_ep.so
$(emulated_tests): $(call objects,emulated/,$(nccl_ep) $(gpu_tests_c) $(call in,tests/emulator/tests))
$B/emulated/ep_moe: $(call objects,emulated/,$(moe))
$B/emulated/ep_bench: $(call objects,emulated/,\
                          $(filter-out %/baseline.cu %/baseline_nccl.c,$(bench)))
$B/emulated/ep_info: $(call objects,emulated/,$(info))
$B/emulated/ep_overlap: $(call objects,emulated/,$(overlap))
$B/emulated/ep_tune: $(call objects,emulated/,$(tune))
$(emulated): $(emulator) $(call objects,,$(mpi_c))
	$(call link,$(if $(filter %/ep_bench,$@),$(no_baseline)) $(mpi_libs) $(hwloc_libs) \
	    $(criterion_libs) -lm,$(CXX))
no_baseline := -Wl,--defsym=baseline_measure_nccl=abort
$(emulated_nccl_ep): $(emulator) $(call objects,emulated/,$(nccl_ep)) tests/emulator/client.map
	$(call link,$(shared) $(hwloc_libs) -lm,$(CXX))

# ---- package files ------------------------------------------------------------------------------

include_from_cmake = $(shell realpath -ms --relative-to='$(LIBDIR)/cmake/ep' '$(INCLUDEDIR)')
# Written at each run, since PREFIX may differ from the last run's.
$(package_files): $B/%: tools/package/%.in again
	$Qsed $(foreach v,$(package_values),-e 's|@$v@|$($v)|g') $< >$@
package_values := PREFIX LIBDIR INCLUDEDIR VERSION VERSION_MAJOR VERSION_MINOR SOVERSION CUDA \
                  CUDA_HOME cuda_libs mpi_libs mpi_cflags include_from_cmake

# ---- running ------------------------------------------------------------------------------------

export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
mpirun := mpirun --oversubscribe --bind-to none --timeout 300

# These build with all cores, unless they are told otherwise.
jobs = $(if $(filter -j% --jobserver%,$(MAKEFLAGS)),,-j$(shell nproc))
demo: deps
	@$(MAKE) $(jobs) --no-print-directory run-demo
check: demo
	@$(MAKE) $(jobs) --no-print-directory run-check

run-demo: all
	$(mpirun) -n 4 $B/ep_bench
	@echo 'A whole MoE layer: $(mpirun) -n 4 $B/ep_moe'

# Many tests mostly wait, so more run at a time than there are cores (TEST_JOBS). Sanitizers
# do not work with MPI, so their builds run the tests whose ranks are threads, and no emulated ones:
# the thread sanitizer knows no fibers. "make ASAN=1 check-nodes-emulated" runs some of these.
export TEST_JOBS ?= $(shell echo $$((2 * $$(nproc) + 2)))
run-check: all $(if $(variant),,$(emulated))
	$B/tests/ep_tests -j$(TEST_JOBS) $(CHECK_ARGS)
	$(if $(variant)$(CHECK_ARGS),,tests/emulator/check $B few)
check-emulated: $(emulated)
	tests/emulator/check $B $(or $(CHECK_ARGS),all)
# The small part of it that is about several nodes. The stacks of fibers hide leaks.
check-nodes-emulated: $(emulated_tests)
	ASAN_OPTIONS=detect_leaks=0 tests/emulator/check $B nodes

# GPU_JOBS tests at a time share the GPUs. Without a GPU the program says so and exits with 0.
GPU_JOBS ?= 4
check-gpu: $(if $(filter 1,$(CUDA)),$(gpu_tests))
	$(if $(filter 1,$(CUDA)),tests/gpu/check $B -j$(GPU_JOBS) $(CHECK_ARGS),\
	    @echo 'SKIP: all tests: this build lacks CUDA: it takes nvcc and nccl_device.h')

check-nccl-ep: $(nccl_ep_so) $(emulated_nccl_ep)
	tests/bindings/nccl_ep/check $B
check-nccl-ep-te: $(nccl_ep_so)
	tests/bindings/nccl_ep/check-te $B

include bindings/python/rules.mk

# ---- installing ---------------------------------------------------------------------------------

deps:
	@sh tools/deps.sh

install: libs $(tools)
	$(if $(filter-out 1,$(words $(DESTDIR)$(LIBDIR)$(INCLUDEDIR)$(BINDIR)$(SHAREDIR))),\
	    $(error install: expected folders without blanks, got $(DESTDIR)$(PREFIX)))
	install -d $(addprefix $(DESTDIR),$(LIBDIR)/pkgconfig $(LIBDIR)/cmake/ep $(INCLUDEDIR)/ep \
	    $(BINDIR) $(SHAREDIR)/libep $(LIBDIR)/$(nccl_ep_home)/lib)
	install -m 644 include/ep/*.h $(DESTDIR)$(INCLUDEDIR)/ep
	install -m 644 $B/libep.a $B/libep_mpi.a $(DESTDIR)$(LIBDIR)
	install -m 755 $B/libep.so.$(SOVERSION) $B/libep_mpi.so.$(SOVERSION) $(DESTDIR)$(LIBDIR)
	for each in libep.so libep_mpi.so; do ln -sf $$each.$(SOVERSION) $(DESTDIR)$(LIBDIR)/$$each; done
	install -m 755 $(nccl_ep_so).0 $(DESTDIR)$(LIBDIR)/$(nccl_ep_home)/lib
	ln -sf libnccl_ep.so.0 $(DESTDIR)$(LIBDIR)/$(nccl_ep_home)/lib/libnccl_ep.so
	install -m 644 $(filter %.pc,$(package_files)) $(DESTDIR)$(LIBDIR)/pkgconfig
	install -m 644 $(filter %.cmake,$(package_files)) $(DESTDIR)$(LIBDIR)/cmake/ep
	install -m 755 $(tools) $(DESTDIR)$(BINDIR)
	install -m 644 tools/models.txt $(DESTDIR)$(SHAREDIR)/libep

# The same commit gives the same bytes: git takes all times from it, and gzip writes none.
dist:
	$Qgit archive --format=tar --prefix=libep-$(VERSION)/ HEAD | gzip -9n >$B/libep-$(VERSION).tar.gz
	@echo '$B/libep-$(VERSION).tar.gz: $(shell git rev-parse --short HEAD)'

clean:; rm -rf build build-*

format:
	clang-format -i $(shell git ls-files '*.c' '*.h' '*.cu' '*.cuh')
