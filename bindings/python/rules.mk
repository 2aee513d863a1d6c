# SPDX-License-Identifier: Apache-2.0
#
# The part of the Makefile that makes and tests the Python package.

# The Python package: links to its sources and libraries, its version, and the headers in ctypes.
python: $L/libep.so $(nccl_ep_so) $(torch_so) $(if $(JAXLIB_INCLUDE),$(jax_so))
	$Qrm -rf $B/python && mkdir -p $(addprefix $B/python/libep/,jax lib nccl_ep/lib torch)
	$Qcp -rs '$(CURDIR)/bindings/python/.' $B/python
	$Qcp -rs $(addprefix '$(CURDIR)'/bindings/,deep_ep flashinfer sglang vllm) $B/python/libep
	$Qfor each in jax torch; do ln -s '$(CURDIR)'/bindings/$$each/*.py $B/python/libep/$$each; done
	$Qln -s '$(CURDIR)/LICENSE' $B/python/LICENSE
	$Qln -s '$(CURDIR)/$L/libep.so.$(SOVERSION)' '$(CURDIR)/$(torch_so)' $B/python/libep/lib
	$Qln -s '$(CURDIR)/$(nccl_ep_so).0' $B/python/libep/nccl_ep/lib
	$(if $(JAXLIB_INCLUDE),$Qln -s '$(CURDIR)/$(jax_so)' $B/python/libep/lib)
	$Qprintf '# Made from ep.h.\n__version__ = "%s"\n' $(VERSION) >$B/python/libep/_version.py
	$QCC='$(CC)' bindings/python/make-abi include >$B/python/libep/_abi.py

# The second make sees the headers that the first has downloaded.
wheel:
	bindings/jax/environment $B
	$(if $(RELEASE),ARCH=$(ARCH) bindings/python/portable $B)
	@$(MAKE) --no-print-directory PORTABLE=$(RELEASE) python
	ARCH=$(ARCH) SYSROOT=$(SYSROOT) $(if $(RELEASE),MOST_BYTES=12000000) bindings/python/wheel $B

# The package itself, with libep.jax and libep.torch: three at a time with -j.
check-python: check-package check-jax check-torch
check-package: $(tools)
check-package check-jax check-torch check-released: check-%: wheel
	tests/bindings/$(*:package=python)/check $B $(CHECK_ARGS)

check-python-gpu:
	@$(MAKE) --no-print-directory python \
	    JAXLIB_INCLUDE=$$(python3 -c 'import jax; print(jax.ffi.include_dir())' 2>/dev/null)
	tests/bindings/check-gpu $B $(CHECK_ARGS)
