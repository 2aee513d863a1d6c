# SPDX-License-Identifier: Apache-2.0
"""The handlers of libep_jax.so as primitives of JAX.

A call is primitive.bind(*orders, *operands, key=, num_orders=, outputs=), which returns an order
and the outputs. The comments in bindings/jax/handlers.c of the source tree list the operands.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir, partial_eval, xla
from jax.sharding import Mesh, PartitionSpec

from . import _abi
from ._jax_regions import check_devices
from ._library import FOLDER

# _library has loaded libep.so by now, so the handlers use that instance.
_PATH = os.path.join(FOLDER, "lib", "libep_jax.so")


def _load() -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(_PATH)
    except OSError as error:
        raise ImportError(f"libep.jax: its shared library cannot be loaded: {error}") from None
    key, ordinal = ctypes.c_int64, ctypes.c_int32
    loaded.ep_jax_rank_add.argtypes = [key, ordinal, *[ctypes.c_int32] * 2, *[ctypes.c_void_p] * 2]
    loaded.ep_jax_rank_close.argtypes = [key, ordinal, ctypes.c_double]
    loaded.ep_jax_rank_close.restype = None
    loaded.ep_jax_rank_status.argtypes = [key, ordinal, ctypes.POINTER(_abi.EpFinding)]
    return loaded


library = _load()


Outputs = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and type of each output of a call, without the order."""


def type_outputs(*avals: Any, num_orders: int, outputs: Outputs, **_: Any) -> list[Any]:
    """Outputs vary over the mesh axes over which the operands vary, the order over its own."""
    like = avals[num_orders]
    sharding = like.sharding.update(spec=PartitionSpec())
    return [avals[0]] + [
        like.update(shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=sharding)
        for shape, dtype in outputs
    ]


def _keep_outputs(_saveable: Any, unknown: Any, instantiated: Any, eqn: Any) -> tuple[Any, ...]:
    """How jax.checkpoint treats a call: it saves the outputs, and never makes the call again.

    A repeated call would take the order of the first, which is not the last call's any more.
    """
    count = len(eqn.outvars)
    if not any(unknown):
        return eqn, None, [False] * count, [False] * count, []
    residuals = [v for v, here in zip(eqn.invars, instantiated) if not here]
    return None, eqn, [True] * count, [True] * count, residuals


def _make(name: str) -> Primitive:
    target = f"ep_jax_{name}"
    capsule = jax.ffi.pycapsule(getattr(library, target))
    for platform in ("cpu", "CUDA"):
        jax.ffi.register_ffi_target(target, capsule, platform=platform)

    def lower(ctx: Any, *operands: Any, key: int, num_orders: int, outputs: Outputs) -> Any:
        # While JAX traces, no mesh has devices. Here it has some, unless it is an AbstractMesh.
        mesh = getattr(ctx.module_context.axis_context, "mesh", None)
        if isinstance(mesh, Mesh):
            check_devices(name, key, mesh)
        return jax.ffi.ffi_lowering(target)(ctx, *operands, key=np.int64(key))

    primitive = Primitive(f"ep_{name}")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(type_outputs)
    mlir.register_lowering(primitive, lower)
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = _keep_outputs
    return primitive


prepare = _make("prepare")
dispatch = _make("dispatch")
combine = _make("combine")
dispatch_backward = _make("dispatch_backward")
combine_backward = _make("combine_backward")
