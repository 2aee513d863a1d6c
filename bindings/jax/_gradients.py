# SPDX-License-Identifier: Apache-2.0
"""Derivatives of the calls.

A call's derivative is a linear call, such as ep_dispatch_tangent. It never runs: JAX transposes it,
and its transpose is libep's backward call.

This is not jax.custom_vjp, since jax.checkpoint would not find the rule of _calls inside a
custom_vjp that is not differentiated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from .._abi import Status
from .._library import EpError
from . import _calls as calls


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def _zero(output: jax.Array) -> Any:
    return ad.Zero(jax.typeof(output).to_tangent_aval())


def _types(arrays: Iterable[Any]) -> calls.Outputs:
    """The types of arrays, or of the unknowns of a transpose."""
    avals = [array.aval if ad.is_undefined_primal(array) else array for array in arrays]
    return tuple((aval.shape, aval.dtype.name) for aval in avals)


def _make_tangent(name: str, backward: Primitive) -> Primitive:
    """The derivative of a call. Operands: the plan, others that are kept, the linear ones."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise EpError(
            Status.UNSUPPORTED,
            f"{name}: expected reverse mode (jax.grad, jax.vjp), got forward mode",
        )

    def transpose(
        gradients: Sequence[Any], *operands: Any, key: int, num_kept: int, **_: Any
    ) -> list[Any]:
        (plan, *others), linear = operands[:num_kept], operands[num_kept:]
        grads = map(ad.instantiate_zeros, gradients)
        results = backward.bind(plan, *grads, *others, key=key, outputs=_types(linear))
        pairs = zip(linear, results)
        return [None] * num_kept + [g if ad.is_undefined_primal(x) else None for x, g in pairs]

    tangent = Primitive(f"ep_{name}_tangent")
    tangent.multiple_results = True
    tangent.def_impl(refuse)
    tangent.def_abstract_eval(calls.type_outputs)
    mlir.register_lowering(tangent, refuse)
    ad.primitive_transposes[tangent] = transpose
    return tangent


_dispatch_tangent = _make_tangent("dispatch", calls.dispatch_backward)
_combine_tangent = _make_tangent("combine", calls.combine_backward)


def _bind_tangent(
    tangent: Primitive, kept: Sequence[Any], linear: list[Any], key: int, outputs: calls.Outputs
) -> list[Any]:
    results: list[Any] = tangent.bind(
        *kept,
        *map(ad.instantiate_zeros, linear),
        key=key,
        num_kept=len(kept),
        outputs=outputs,
    )
    return results


def _differentiate_prepare(
    primals: Sequence[Any], _: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    numbers = calls.prepare.bind(*primals, **params)
    return numbers, list(map(_zero, numbers))


def _differentiate_dispatch(
    primals: Sequence[Any], tangents: Sequence[Any], key: int, outputs: calls.Outputs
) -> tuple[list[Any], list[Any]]:
    results = calls.dispatch.bind(*primals, key=key, outputs=outputs)
    _, t_tokens, *t_weights = tangents
    linear = [t_tokens, *[t for t in t_weights if not _is_zero(t)]]
    found = _bind_tangent(_dispatch_tangent, primals[:1], linear, key, outputs[: len(linear)])
    return results, found + [_zero(result) for result in results[len(found) :]]


def _differentiate_combine(
    primals: Sequence[Any], tangents: Sequence[Any], key: int, outputs: calls.Outputs
) -> tuple[list[Any], list[Any]]:
    results = calls.combine.bind(*primals, key=key, outputs=outputs)
    plan, expert_out, *weights = primals
    _, t_expert_out, *t_weights = tangents
    t_weights = [t for t in t_weights if not _is_zero(t)]
    kept = [plan, *weights, *([expert_out] if t_weights else [])]
    found = _bind_tangent(_combine_tangent, kept, [t_expert_out, *t_weights], key, outputs)
    return results, found


ad.primitive_jvps[calls.prepare] = _differentiate_prepare
ad.primitive_jvps[calls.dispatch] = _differentiate_dispatch
ad.primitive_jvps[calls.combine] = _differentiate_combine
