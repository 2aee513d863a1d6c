# SPDX-License-Identifier: Apache-2.0
"""The handlers of libep_jax.so as primitives of JAX.

A call is primitive.bind(*operands, key=, outputs=), which returns the outputs. The comments in
bindings/jax/handlers.c of the source tree list the operands, and other attributes, integers.

All calls have one effect of JAX, which is ordered: JAX gives each call a token that the call before
it in the program returned, and takes one from it. So XLA runs them in the order in which they were
traced, on every device. The effect ends with the program: see _program.

Tokens are for JAX alone. What a handler takes and returns is an order, an array of one byte that it
does not look at. A call that does nothing makes one from a token, or a token from one. Between two
calls both are left out, so tokens remain at the bounds of functions and loops. XLA for GPUs needs
this: it fuses a call with the slice that an operand is, and its pass priority-fusion ends the
process where a token is in such a fusion (jaxlib 0.11.2).
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src import core, effects
from jax._src.interpreters import partial_eval as policies
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval, xla
from jax.sharding import Mesh, PartitionSpec
from jaxlib.mlir import ir

from .. import _abi
from .._abi import Status
from .._library import FOLDER, EpError
from .._operations import OPERATIONS
from ._regions import check_devices

# _library has loaded libep.so by now, so the handlers use that instance.
_PATH = os.path.join(FOLDER, "lib", "libep_jax.so")


def _load() -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(_PATH)
    except OSError as error:
        raise ImportError(f"libep.jax: its shared library cannot be loaded: {error}") from None
    key, ordinal = ctypes.c_int64, ctypes.c_int32
    loaded.ep_jax_rank_add.argtypes = [key, ordinal, *[ctypes.c_int32] * 4, *[ctypes.c_void_p] * 2]
    loaded.ep_jax_rank_count.argtypes = [key, ordinal, ctypes.c_void_p, ctypes.c_int32]
    loaded.ep_jax_rank_count.restype = None
    loaded.ep_jax_rank_close.argtypes = [key, ordinal, ctypes.c_double]
    loaded.ep_jax_rank_close.restype = None
    loaded.ep_jax_rank_waits.argtypes = [key, ordinal, ctypes.c_double]
    loaded.ep_jax_rank_mask.argtypes = [key, ordinal, ctypes.POINTER(ctypes.c_uint32)]
    loaded.ep_jax_rank_status.argtypes = [key, ordinal, ctypes.POINTER(_abi.EpFinding)]
    return loaded


library = _load()


Outputs = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and type of each output of a call."""


class _Call(effects.Effect):
    """The effect of a call: whatever the group, calls stay in the order of the program."""

    __str__ = lambda _: "libep"  # noqa: E731


def unknown_version(why: AttributeError) -> ImportError:
    """The error of a JAX that lacks what libep.jax uses of it."""
    return ImportError(f"libep.jax: expected JAX 0.10.2 to 0.11.2, got {jax.__version__}: {why}")


CALL = _Call()
try:
    for _kind in (
        effects.ordered_effects,
        effects.shardable_ordered_effects,  # each device has its own token
        effects.lowerable_effects,
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
    ):
        _kind.add_type(_Call)
except AttributeError as error:  # these are not public
    raise unknown_version(error) from None


def type_outputs(like: Any, *_: Any, outputs: Outputs, **__: Any) -> list[Any]:
    """Outputs vary over the mesh axes over which the operands vary."""
    sharding = like.sharding.update(spec=PartitionSpec())
    return [
        like.update(shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=sharding)
        for shape, dtype in outputs
    ]


def _keep_outputs(_saveable: Any, unknown: Any, instantiated: Any, eqn: Any) -> tuple[Any, ...]:
    """How jax.checkpoint treats a call: it saves the outputs, and never makes the call again."""
    count = len(eqn.outvars)
    if not any(unknown):
        return eqn, None, [False] * count, [False] * count, []
    return None, eqn, [True] * count, [True] * count, _residuals(instantiated, eqn)


def _residuals(instantiated: Any, eqn: Any) -> list[Any]:
    return [v for v, here in zip(eqn.invars, instantiated) if not here]


def _follow_policy(
    again: Primitive, saveable: Any, unknown: Any, instantiated: Any, eqn: Any
) -> tuple[Any, ...]:
    """Of dispatch: if the policy does not save the outputs, backward makes the call again.

    checkpoint_name comes behind the call. If a policy saves by that name, nothing needs the call
    again, and _drop_unused drops it.
    """
    if not any(unknown):
        types = [v.aval for v in eqn.invars]
        policy = policies.ensure_enum(saveable(eqn.primitive, *types, **eqn.params))
        if isinstance(policy, policies.RecomputeType):
            count, inputs = len(eqn.outvars), _residuals(instantiated, eqn)
            staged = eqn.replace(primitive=again)
            return eqn, staged, [False] * count, [True] * count, inputs
    return _keep_outputs(saveable, unknown, instantiated, eqn)


def _drop_unused(used: list[bool], eqn: Any) -> tuple[list[bool], Any]:
    """A call that backward makes again, and nobody needs. All devices drop it alike."""
    return [any(used)] * len(eqn.invars), eqn if any(used) else None


def _register(name: str) -> str:
    """Let programs call a handler by the name that this returns."""
    target = f"ep_jax_{name}"
    capsule = jax.ffi.pycapsule(getattr(library, target))
    for platform in ("cpu", "CUDA"):
        jax.ffi.register_ffi_target(target, capsule, platform=platform)
    return target


_CONVERT = _register("order")
_ORDER = core.ShapedArray((1,), np.dtype(np.uint8))


def _convert(ctx: Any, value: Any, source: Any, target: Any) -> Any:
    """A token from an order, or an order from a token."""
    kinds = ctx.replace(avals_in=[source], avals_out=[target])
    return jax.ffi.ffi_lowering(_CONVERT)(kinds, value)[0]


def _order_from(ctx: Any, token: Any) -> Any:
    made_by = token.owner
    attributes: Any = getattr(made_by, "attributes", ())  # the owner of an argument is a block
    name = "call_target_name"
    if name in attributes and ir.StringAttr(attributes[name]).value == _CONVERT:
        return made_by.operands[0]
    return _convert(ctx, token, core.abstract_token, _ORDER)


def refuse(name: str, expected: str, got: str) -> Callable[..., NoReturn]:
    """A rule of JAX that raises."""

    def rule(*_: Any, **__: Any) -> NoReturn:
        raise EpError(Status.UNSUPPORTED, f"{name}: expected {expected}, got {got}")

    return rule


def refuse_batches(name: str, primitive: Primitive) -> None:
    """Refuse vmap: ranks make one call at a time."""
    rule = refuse(name, "a call outside of jax.vmap", "one inside")
    batching.primitive_batchers[primitive] = rule


def _make(name: str, target: str) -> Primitive:
    lower_call = jax.ffi.ffi_lowering(target, has_side_effect=True)

    def lower(ctx: Any, *operands: Any, key: int, outputs: Outputs, **others: int) -> Any:
        # While JAX traces, no mesh has devices. Here it has some, unless it is an AbstractMesh.
        mesh = getattr(ctx.module_context.axis_context, "mesh", None)
        if isinstance(mesh, Mesh):
            check_devices(name, key, mesh)
        order = _order_from(ctx, ctx.tokens_in.get(CALL))
        kinds = ctx.replace(avals_in=[_ORDER, *ctx.avals_in], avals_out=[_ORDER, *ctx.avals_out])
        attributes = {name: np.int64(value) for name, value in dict(others, key=key).items()}
        order, *results = lower_call(kinds, order, *operands, **attributes)
        token = _convert(ctx, order, _ORDER, core.abstract_token)
        ctx.set_tokens_out(mlir.TokenSet({CALL: token}))
        return results

    primitive = Primitive(f"ep_{name}")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_effectful_abstract_eval(lambda *a, **k: (type_outputs(*a, **k), {CALL}))
    # Not in a function of its own, whose bounds would need tokens.
    mlir.register_lowering(primitive, lower, cacheable=False)
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = _keep_outputs
    refuse_batches(name, primitive)
    return primitive


# Latency mode, with phases and routing in dispatch, is not for XLA.
CALLS = {
    name: _make(name, _register(name))
    for name, operation in OPERATIONS.items()
    if name == operation.function and not operation.is_phase
}
"""By the names of the operations."""

# Dispatch that backward makes again, with the plan that forward has made: no routing is exchanged.
_AGAIN = _make("dispatch_again", "ep_jax_dispatch")
for _primitive in (CALLS["dispatch"], _AGAIN):
    _rule = functools.partial(_follow_policy, _AGAIN)
    partial_eval.partial_eval_jaxpr_custom_rules[_primitive] = _rule
partial_eval.dce_rules[_AGAIN] = _drop_unused


# ---- what every checkpoint keeps -----------------------------------------------------------------

KEEP = Primitive("ep_keep")
"""The identity of an array of integers, which jax.checkpoint keeps under any policy."""
KEEP.def_impl(lambda array: array)
KEEP.def_abstract_eval(lambda kind: kind)
mlir.register_lowering(KEEP, lambda _, array: [array])
ad.primitive_jvps[KEEP] = lambda arrays, tangents: (KEEP.bind(*arrays), tangents[0])
partial_eval.partial_eval_jaxpr_custom_rules[KEEP] = _keep_outputs
refuse_batches("moe", KEEP)
