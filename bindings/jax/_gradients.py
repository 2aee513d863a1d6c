# SPDX-License-Identifier: Apache-2.0
"""Derivatives of the calls.

A call's derivative is a linear call, such as ep_dispatch_tangent. It never runs: JAX transposes it,
and its transpose is libep's backward call.

This is not jax.custom_vjp, since jax.checkpoint would not find the rule of _calls inside a
custom_vjp that is not differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from .._abi import Quant, ScaleOrder, Status
from .._library import EpError
from .._operations import OPERATIONS, Operation
from . import _calls as calls
from ._operations import dequantise, quantised_types


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

    refuse = calls.refuse(name, "reverse mode (jax.grad, jax.vjp)", "forward mode")

    def transpose(
        gradients: Sequence[Any],
        *operands: Any,
        key: int,
        num_kept: int,
        grad_quant: int,
        scale_order: int,
        **_: Any,
    ) -> list[Any]:
        (plan, *others), linear = operands[:num_kept], operands[num_kept:]
        grads = map(ad.instantiate_zeros, gradients)
        if grad_quant:
            form = Quant(grad_quant), ScaleOrder(scale_order)
            ((shape, dtype),) = _types(linear)
            outputs = tuple(quantised_types(*form, *shape))
            values, scales = backward.bind(plan, *grads, key=key, outputs=outputs, quantises=1)
            results = [dequantise(*form, values, scales, dtype)]
        else:
            results = backward.bind(plan, *grads, *others, key=key, outputs=_types(linear))
        pairs = zip(linear, results)
        return [None] * num_kept + [g if ad.is_undefined_primal(x) else None for x, g in pairs]

    tangent = Primitive(f"ep_{name}_tangent")
    tangent.multiple_results = True
    tangent.def_impl(refuse)
    tangent.def_abstract_eval(calls.type_outputs)
    mlir.register_lowering(tangent, refuse)
    ad.primitive_transposes[tangent] = transpose
    calls.refuse_batches(name, tangent)
    return tangent


def _bind_tangent(
    tangent: Primitive,
    kept: Sequence[Any],
    linear: list[Any],
    key: int,
    outputs: calls.Outputs,
    attributes: Mapping[str, int],
) -> list[Any]:
    results: list[Any] = tangent.bind(
        *kept,
        *map(ad.instantiate_zeros, linear),
        key=key,
        num_kept=len(kept),
        grad_quant=attributes.get("grad_quant", 0),
        scale_order=attributes.get("scale_order", 0),
        outputs=outputs,
    )
    return results


def _differentiate_prepare(
    primals: Sequence[Any], _: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    numbers = calls.CALLS["prepare"].bind(*primals, **params)
    return numbers, list(map(_zero, numbers))


def _differentiable(operation: Operation) -> Callable[..., tuple[list[Any], list[Any]]]:
    """The derivative of a call. Its operands are the plan, rows, weights if there are any, and as
    many biases as the call says."""
    call, backward = calls.CALLS[operation.name], OPERATIONS[operation.backward]
    tangent = _make_tangent(operation.name, calls.CALLS[backward.name])
    names = [argument.name for argument in operation.inputs]
    rows = names[1]

    def differentiate(
        primals: Sequence[Any],
        tangents: Sequence[Any],
        key: int,
        outputs: calls.Outputs,
        **attributes: int,
    ) -> tuple[list[Any], list[Any]]:
        if attributes.get("quantises"):
            raise EpError(
                Status.UNSUPPORTED,
                f"{operation.name}: expected no derivative, since rows are quantised: "
                "jax.lax.stop_gradient leaves it out",
            )
        results = call.bind(*primals, key=key, outputs=outputs, **attributes)
        first_bias = len(primals) - attributes.get("biases", 0)
        _, t_rows, *t_weights = tangents[:first_bias]
        linear = [t_rows, *[t for t in t_weights if not _is_zero(t)]]
        given = dict(zip(names, primals[:first_bias]))
        if attributes.get("grad_quant") and t_weights:
            raise EpError(
                Status.UNSUPPORTED,
                f"{operation.name}: recv_weights: expected None, since bootstrap has a grad_quant, "
                "whose derivative is unweighted: multiply the rows by their weights before",
            )
        if len(linear) == 1:
            del given[rows]  # backward reads the rows for the gradient of the weights
        kept = [given[each.name] for each in backward.inputs if each.name in given]
        found = _bind_tangent(tangent, kept, linear, key, outputs[: len(linear)], attributes)
        for t_bias in tangents[first_bias:]:  # the output is the sum plus its biases
            found[0] = ad.add_tangents(found[0], t_bias)
        return results, found + [_zero(result) for result in results[len(found) :]]

    return differentiate


ad.primitive_jvps[calls.CALLS["prepare"]] = _differentiate_prepare
for _operation in OPERATIONS.values():
    if _operation.backward:
        ad.primitive_jvps[calls.CALLS[_operation.name]] = _differentiable(_operation)
        ad.primitive_jvps[calls.CALLS[_operation.backward]] = calls.refuse(
            _operation.backward, "first derivatives alone", "a second one"
        )
