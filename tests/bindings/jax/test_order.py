# SPDX-License-Identifier: Apache-2.0
"""Calls that need nothing of each other, in one program: all devices make them in the same order.

Without an order two devices would soon wait for each other, and the program would end with the
deadline.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    DEVICE, TOP_K, assert_close, dense, indices, layer_on, make_mesh, moe, on_mesh, parameters,
    specs, tokens
)  # fmt: skip
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P

import libep.jax

REPEATS = 10


def program_of(function):
    """Values and gradients of a function of parameters and tokens."""
    step = lambda params, x: jnp.sum(jnp.sin(function(params, x)))  # noqa: E731
    return jax.jit(jax.value_and_grad(step, argnums=(0, 1)))


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


@pytest.mark.parametrize("shape", [many, loops, branches, jitted, custom, nested_checkpoints, tail])
def test_shapes(bootstrap, shape):
    """Values and gradients, again and again, against those of dense layers."""
    mesh = make_mesh(4)
    ep = bootstrap(mesh)
    params, x = parameters(3), tokens(3, 4)
    step = program_of(layer_on(mesh, functools.partial(shape, functools.partial(moe, ep))))
    expected = program_of(functools.partial(shape, dense))(params, x)
    for _ in range(REPEATS):
        assert_close(step(params, x), expected, 1e-5)
    ep.check()


def test_frozen_inputs_under_checkpoint(bootstrap):
    """Experts alone are trained: dispatch has no gradient, and runs again in backward."""
    mesh = make_mesh(2)
    params, x, ep = parameters(2), tokens(2, 2), bootstrap(mesh)
    experts = {name: params[name] for name in ("up", "down")}

    def twice(layer):
        return lambda params, x: layer(params, x) * layer(params, x + 1)

    def grad(function):
        loss = lambda experts: jnp.sum(jnp.sin(function({**params, **experts}, x)))  # noqa: E731
        return jax.jit(jax.grad(loss))

    step = grad(layer_on(mesh, twice(jax.checkpoint(functools.partial(moe, ep)))))
    expected = grad(twice(dense))(experts)
    for _ in range(REPEATS):
        assert_close(step(experts), expected, 1e-5)


@pytest.mark.skipif(DEVICE != "cpu", reason="GPUs have other programs")
def test_calls_are_chained(bootstrap):
    """Each call takes the order that the call before it returned, forward and backward."""
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    params, x = parameters(4), tokens(4, 2)
    apply = layer_on(mesh, lambda params, x: moe(ep, params, x) + moe(ep, params, x + 1))
    step = jax.jit(jax.grad(lambda params, x: jnp.sum(apply(params, x))))
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
    devices = make_mesh(4).devices
    meshes = [jax.sharding.Mesh(part, ("ep",)) for part in (devices, devices[:2], devices[2:])]
    layers = [functools.partial(moe, bootstrap(mesh)) for mesh in meshes]
    programs = [jax.jit(layer_on(mesh, layer)) for mesh, layer in zip(meshes, layers)]
    params = parameters(5)
    for i in range(REPEATS):
        for mesh, program in zip(meshes, programs):
            x = tokens(i, mesh.size)
            assert_close(program(params, x), dense(params, x), 1e-5)


def test_programs_in_flight(bootstrap):
    """Programs that need nothing of each other, of two groups, with nobody waiting in between."""
    mesh = make_mesh(4)
    params, x = parameters(6), tokens(6, 4)
    layers = [functools.partial(moe, bootstrap(mesh)) for _ in range(2)]

    def program(first, second):
        return jax.jit(layer_on(mesh, lambda p, x: first(p, x + 1) + second(p, x) + x))

    one, two = program(*layers), program(*reversed(layers))
    results = [run(params, x) for _ in range(REPEATS) for run in (one, two, one)]
    expected = dense(params, x + 1) + dense(params, x) + x
    for result in results:
        assert_close(result, expected, 1e-5)


@pytest.mark.skipif(DEVICE != "cpu", reason="XLA for GPUs keeps subnormal numbers")
def test_subnormal_numbers(bootstrap):
    """XLA for CPUs flushes them to zero, also where it goes on behind a call."""
    mesh = make_mesh(2)
    ep, x = bootstrap(mesh), jnp.full_like(tokens(0, 2), 2e-38)
    program = jax.jit(on_mesh(mesh, lambda *x: 0.125 * ep.combine(*ep.dispatch(*x)[::2])))
    for _ in range(REPEATS):
        np.testing.assert_array_equal(program(x, indices(2)), 0)


# ---- programs are as without libep -------------------------------------------------------------


@pytest.fixture
def cached(tmp_path):
    """A cache of compiled programs on disk."""
    values = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_signature(bootstrap, cached):
    """A program has its own arguments and results alone, however it is compiled and called."""
    devices = 4
    mesh = make_mesh(devices)
    ep = bootstrap(mesh)
    params, x = parameters(7), tokens(7, devices)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(dense(params, x))))(x)

    def step():
        layer = layer_on(mesh, functools.partial(moe, ep))
        return jax.jit(jax.grad(lambda x, params: jnp.sum(jnp.sin(layer(params, x)))))

    split = {name: jax.sharding.NamedSharding(mesh, spec) for name, spec in specs().items()}
    params = jax.device_put(params, split)
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("ep")))
    compiled = step().lower(x, params).compile()
    taken, returned = re.search(r"ENTRY .*?\((.*)\) -> (.*) {", compiled.as_text()).groups()
    assert taken.count("f32[") == 4 and "token" not in taken + returned
    loaded = serialize_executable.deserialize_and_load(
        *serialize_executable.serialize(compiled), execution_devices=list(mesh.devices)
    )
    hits = []
    jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
    from_disk = step()
    for program in (compiled, loaded, from_disk):
        for _ in range(3):
            assert_close(program(x, params), expected, 1e-5)
    assert "/jax/compilation_cache/cache_hits" in hits


def test_without_jit(bootstrap):
    """Every call is a program of its own."""
    mesh, x = make_mesh(2), tokens(8, 2)
    ep = bootstrap(mesh)

    def body(x, idx):
        rows, _, plan = ep.dispatch(x, idx)
        return ep.combine(rows, plan)

    with jax.disable_jit():
        assert_close(libep.jax.jit(on_mesh(mesh, body))(x, indices(2)), TOP_K * x, 1e-5)


@pytest.mark.skipif(DEVICE != "cpu", reason="callbacks need CPU devices")
def test_other_effects(bootstrap):
    """Callbacks in order stay in order."""
    mesh = make_mesh(1)
    params, seen = parameters(7), []
    layer = layer_on(mesh, functools.partial(moe, bootstrap(mesh)))

    @jax.jit
    def step(params, x):
        for i in range(3):
            jax.debug.callback(lambda i=i: seen.append(i), ordered=True)
            x = layer(params, x)
        return x

    jax.block_until_ready(step(params, tokens(7, 1)))
    jax.effects_barrier()
    assert seen == [0, 1, 2]
