# SPDX-License-Identifier: Apache-2.0
"""The order of the calls in a program does not show in the program's signature.

JAX makes the token of an ordered effect an argument and a result of each program. It takes the
token from one program to the next, and calls such programs by a slow path. Such a program can be
neither cached on disk, nor serialised, nor called ahead of time on CPUs: jaxlib 0.10.2 ends the
process.

So a program becomes one equation, ep_program, whose calls get a token of their own. This happens
where JAX lowers a program, after it has dropped what the program does not use.

XLA itself orders programs: those that a thread calls run one after the other on each device.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING

from jax._src import core
from jax._src.interpreters import pxla
from jax.extend.core import Primitive
from jax.interpreters import mlir

from . import _calls as calls

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def _one_equation(jaxpr: Any) -> Any:
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    outputs = [core.Var(variable.aval) for variable in jaxpr.outvars]
    effects = set(jaxpr.effects) - {calls.CALL}
    # A copy, since what is kept for a program must not hold the program itself.
    params = dict(jaxpr=jaxpr.replace(), count=len(jaxpr.constvars))
    equation = core.new_jaxpr_eqn(inputs, outputs, _program, params, effects)
    return jaxpr.replace(
        eqns=[equation], outvars=outputs, effects=effects, debug_info=jaxpr.debug_info
    )


def _with_own_token(lower: Callable[..., Any]) -> Callable[..., Any]:
    """JAX's function that lowers programs, for programs with calls of libep."""
    # JAX finds what it has lowered by the program, so the same one must come out each time.
    known: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @functools.wraps(lower)
    def lower_program(program: Any, *args: Any, **keywords: Any) -> Any:
        if calls.CALL in program.effects:
            if program not in known:
                known[program] = program.map_jaxpr(_one_equation)
            program = known[program]
        return lower(program, *args, **keywords)

    return lower_program


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


_program = Primitive("ep_program")
_program.multiple_results = True
mlir.register_lowering(_program, _lower, cacheable=False)

try:
    _lower_to_hlo = pxla._cached_lowering_to_hlo
except AttributeError as error:  # it is not public
    raise calls.unknown_version(error) from None
pxla._cached_lowering_to_hlo = _with_own_token(_lower_to_hlo)  # type: ignore[assignment]
