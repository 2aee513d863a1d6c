# SPDX-License-Identifier: Apache-2.0
"""Calls that need nothing of each other, in one program: all devices make them in the same order.

Without an order two devices would soon wait for each other, and the program would end with the
deadline.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from conftest import DEVICE, assert_close, dense, make_mesh, moe, parameters, specs, tokens
from jax.sharding import PartitionSpec as P

import libep.jax
from libep import EpError, Status

REPEATS = 10


def on_devices(mesh, body):
    return jax.shard_map(body, mesh=mesh, in_specs=(specs(), P("ep")), out_specs=P("ep"))


def check(mesh, body, reference, seed, jit=jax.jit, devices=4):
    """Values and gradients of body(params, x), again and again, against those of the reference."""
    params, x = parameters(seed), tokens(seed, devices)

    def step_of(function):
        return lambda params, x: jnp.sum(jnp.sin(function(params, x)))

    step = jit(jax.value_and_grad(step_of(on_devices(mesh, body)), argnums=(0, 1)))
    expected = jax.value_and_grad(step_of(reference), argnums=(0, 1))(params, x)
    for _ in range(REPEATS):
        assert_close(step(params, x), expected, 1e-5)


def many(layer, params, x):
    """Six layers side by side."""
    return functools.reduce(jnp.add, [layer(params, x + i) for i in range(6)])


def loops(layer, params, x):
    """Two loops and a layer, none of which needs the others."""

    def loop(x):
        return jax.lax.scan(lambda x, _: (layer(params, x), None), x, length=2)[0]

    return loop(x) + layer(params, x + 1) + loop(x + 2)


def branches(layer, params, x):
    """All devices take the same branch."""

    def branch(number):
        return lambda x: layer(params, x + number)

    return jax.lax.switch(2, [branch(0), branch(1), branch(2)], x) + layer(params, x)


def jitted(layer, params, x):
    inner = jax.jit(functools.partial(layer, params))
    return inner(x) * jax.checkpoint(inner)(x + 1)


def custom(layer, params, x):
    """A layer within a function that has a derivative of its own."""

    @jax.custom_vjp
    def outer(params, x):
        return layer(params, x)

    outer.defvjp(
        lambda params, x: jax.vjp(layer, params, x), lambda pullback, gradient: pullback(gradient)
    )
    return outer(params, x) + outer(params, x + 1)


def nested_checkpoints(layer, params, x):
    inner = jax.checkpoint(jax.jit(jax.checkpoint(layer)))
    return inner(params, inner(params, x)) + inner(params, x + 1)


def tail(layer, params, x):
    """A layer without gradient follows, and one that nobody needs."""
    y = layer(params, x)
    layer(params, x + 1)
    return y + 0 * layer(params, jax.lax.stop_gradient(y))


@pytest.mark.parametrize("jit", [jax.jit, libep.jax.jit])
@pytest.mark.parametrize("shape", [many, loops, branches, jitted, custom, nested_checkpoints, tail])
def test_shapes(bootstrap, shape, jit):
    mesh = make_mesh(4)
    ep = bootstrap(mesh)
    layer = functools.partial(moe, ep)
    check(mesh, functools.partial(shape, layer), functools.partial(shape, dense), 3, jit)
    ep.check()


def test_frozen_inputs_under_checkpoint(bootstrap):
    """Experts alone are trained: dispatch has no gradient, and checkpoint must not repeat it."""
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    params, x = parameters(2), tokens(2, 2)

    def body(params, x):
        layer = jax.checkpoint(functools.partial(moe, ep))
        return layer(params, x) * layer(params, x + 1)

    def reference(params, x):
        return dense(params, x) * dense(params, x + 1)

    experts = {name: params[name] for name in ("up", "down")}

    def grad(function):
        loss = lambda experts: jnp.sum(jnp.sin(function({**params, **experts}, x)))  # noqa: E731
        return jax.jit(jax.grad(loss))(experts)

    for _ in range(REPEATS):
        assert_close(grad(on_devices(mesh, body)), grad(reference), 1e-5)


@pytest.mark.skipif(DEVICE != "cpu", reason="GPUs have other programs")
@pytest.mark.parametrize("outer", [jax.jit, libep.jax.jit])
def test_calls_are_chained(bootstrap, outer):
    """Each call takes the order that the call before it returned, forward and backward."""
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    params, x = parameters(4), tokens(4, 2)
    apply = on_devices(mesh, lambda params, x: moe(ep, params, x) + moe(ep, params, x + 1))
    step = outer(jax.grad(lambda params, x: jnp.sum(apply(params, x))))
    text = step.lower(params, x).compile().as_text()
    name, first = r"%([\w.\-]+)", r"\((?:[^%\s]+ )?%([\w.\-]+)"
    elements = dict(re.findall(rf"{name} = \S+ get-tuple-element{first}\), index=0", text))
    converted = dict(re.findall(rf'{name} = \S+ custom-call{first}\).*"ep_jax_order"', text))
    calls = dict(re.findall(rf'{name} = \(.* custom-call{first},.*"ep_jax_\w+"', text))
    assert len(calls) == 10

    def call_before(call):
        order = calls[call]
        while order in converted:
            order = converted[order]
        return elements.get(order)

    assert len({call_before(call) for call in calls}) == 10
    assert len(converted) <= 4  # where functions begin and end
    call = next(call for call in calls if call not in map(call_before, calls))  # the last one
    chain = 0
    while call in calls:
        call, chain = call_before(call), chain + 1
    assert chain == 10


def test_programs_of_other_devices(bootstrap):
    """A group on some devices, one on others, and one on all, in programs one after the other."""
    meshes = [make_mesh(4), libep_mesh(2, 0), libep_mesh(2, 2)]
    params, programs = parameters(5), []
    for mesh in meshes:
        ep = bootstrap(mesh)
        programs.append(jax.jit(on_devices(mesh, functools.partial(moe, ep))))
    for i in range(REPEATS):
        for mesh, program in zip(meshes, programs):
            x = tokens(i, mesh.size)
            assert_close(program(params, x), dense(params, x), 1e-5)


def libep_mesh(size, first):
    make_mesh(first + size)  # or skip
    return jax.sharding.Mesh(jax.devices()[first : first + size], ("ep",))


# ---- libep.jax.jit -----------------------------------------------------------------------------


def test_options_of_jit(bootstrap):
    """Static, named and donated arguments, trees, and results that are not arrays of a call."""
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    params, x = parameters(6), tokens(6, 2)
    layer = on_devices(mesh, functools.partial(moe, ep))

    def step(params, x, kind, *, scale):
        """The step."""
        y = layer(params, x) if kind == "layer" else x
        return {"y": scale * y, "none": None, "two": jnp.float32(2)}, (x,)

    program = libep.jax.jit(static_argnums=2, donate_argnums=1)(step)
    assert (program.__name__, program.__doc__) == ("step", "The step.")
    for kind, expected in [("layer", 3 * dense(params, x)), ("none", 3 * x)]:
        results, (same,) = program(params, x + 0, kind, scale=3.0)
        assert results["none"] is None and float(results["two"]) == 2
        assert_close((results["y"], same), (expected, x), 1e-5)


@pytest.mark.skipif(DEVICE != "cpu", reason="callbacks need CPU devices")
def test_other_effects_within_jit(bootstrap):
    """Callbacks in order stay in order."""
    mesh = make_mesh(1)
    ep = bootstrap(mesh)
    params, seen = parameters(7), []
    layer = on_devices(mesh, functools.partial(moe, ep))

    @libep.jax.jit
    def step(params, x):
        for i in range(3):
            jax.debug.callback(lambda i=i: seen.append(i), ordered=True)
            x = layer(params, x)
        return x

    jax.block_until_ready(step(params, tokens(7, 1)))
    jax.effects_barrier()
    assert seen == [0, 1, 2]


def test_jit_of_no_function():
    with pytest.raises(EpError, match="jit: expected a function, got int") as caught:
        libep.jax.jit(3)
    assert caught.value.status is Status.TYPE


def test_jit_within_jit(bootstrap):
    """A program within a program uses values from outside."""
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    params, x = parameters(8), tokens(8, 2)
    layer = on_devices(mesh, functools.partial(moe, ep))
    outer = jax.jit(lambda params, x: libep.jax.jit(lambda x: layer(params, x))(x) + 1)
    assert_close(outer(params, x), dense(params, x) + 1, 1e-5)


@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.vmap(f, (None, 0))])
def test_not_a_whole_program(bootstrap, transform):
    mesh = make_mesh(1)
    ep = bootstrap(mesh)
    params, x = parameters(9), tokens(9, 1)
    layer = on_devices(mesh, functools.partial(moe, ep))
    program = libep.jax.jit(lambda params, x: jnp.sum(layer(params, x)))
    with pytest.raises(EpError, match="jit: expected a whole program, got a function") as caught:
        transform(program)(params, x if transform is jax.grad else x[None])
    assert caught.value.status is Status.UNSUPPORTED
