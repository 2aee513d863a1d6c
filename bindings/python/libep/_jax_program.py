# SPDX-License-Identifier: Apache-2.0
"""A function that is a whole program: JAX does not see that there is an order in it.

JAX takes a token from one program with ordered calls to the next, and calls such programs by a slow
path. Here the calls of a function get a token of their own, which ends with the function.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
from jax._src import core
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import _jax_calls as calls
from ._abi import Status
from ._library import EpError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, to be called while jax.jit traces it. Arguments that are no tracers are static."""

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        tree: Any
        leaves, tree = jax.tree.flatten((args, keywords))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]

        def apply(*traced: Any) -> Any:
            filled = list(leaves)
            for place, leaf in zip(places, traced):
                filled[place] = leaf
            args, keywords = tree.unflatten(filled)
            return function(*args, **keywords)

        traced = [leaves[i] for i in places]
        jaxpr, shapes = jax.make_jaxpr(apply, return_shape=True)(*traced)
        results = _program.bind(*jaxpr.consts, *traced, jaxpr=jaxpr.jaxpr, count=len(jaxpr.consts))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _type_outputs(*_: Any, jaxpr: Any, **__: Any) -> tuple[list[Any], set[Any]]:
    return [variable.aval for variable in jaxpr.outvars], jaxpr.effects - {calls.CALL}


def _evaluate(*operands: Any, jaxpr: Any, count: int) -> list[Any]:
    return core.eval_jaxpr(jaxpr, operands[:count], *operands[count:])


def _lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    tokens = dict(ctx.tokens_in.items())
    own = mlir.TokenSet.create([calls.CALL])
    inner = ctx.replace(tokens_in=mlir.TokenSet({**tokens, calls.CALL: own.get(calls.CALL)}))
    results = mlir.lower_fun(_evaluate)(inner, *operands, **params)
    if tokens:  # of other effects
        ctx.set_tokens_out(inner.tokens_out.subset(list(tokens)))
    return results


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise EpError(
        Status.UNSUPPORTED,
        "jit: expected a whole program, got a function that is differentiated or mapped: use "
        "libep.jax.jit outside of that, or jax.jit",
    )


_program = Primitive("ep_program")
_program.multiple_results = True
_program.def_effectful_abstract_eval(_type_outputs)
mlir.register_lowering(_program, _lower)
ad.primitive_jvps[_program] = _refuse
batching.primitive_batchers[_program] = _refuse
