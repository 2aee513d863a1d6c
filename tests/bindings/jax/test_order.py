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
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P

import libep.jax

REPEATS = 10


def on_devices(mesh, body):
    return jax.shard_map(body, mesh=mesh, in_specs=(specs(), P("ep")), out_specs=P("ep"))


def check(mesh, body, reference, seed, devices=4):
    """Values and gradients of body(params, x), again and again, against those of the reference."""
    params, x = parameters(seed), tokens(seed, devices)

    def step_of(function):
        return lambda params, x: jnp.sum(jnp.sin(function(params, x)))

    step = jax.jit(jax.value_and_grad(step_of(on_devices(mesh, body)), argnums=(0, 1)))
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


@pytest.mark.parametrize("shape", [many, loops, branches, jitted, custom, nested_checkpoints, tail])
def test_shapes(bootstrap, shape):
    mesh = make_mesh(4)
    ep = bootstrap(mesh)
    layer = functools.partial(moe, ep)
    check(mesh, functools.partial(shape, layer), functools.partial(shape, dense), 3)
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
def test_calls_are_chained(bootstrap):
    """Each call takes the order that the call before it returned, forward and backward."""
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    params, x = parameters(4), tokens(4, 2)
    apply = on_devices(mesh, lambda params, x: moe(ep, params, x) + moe(ep, params, x + 1))
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


def test_programs_in_flight(bootstrap):
    """Programs that need nothing of each other, of two groups, with nobody waiting in between."""
    mesh = make_mesh(4)
    params, x = parameters(6), tokens(6, 4)
    layers = [functools.partial(moe, bootstrap(mesh)) for _ in range(2)]

    def program(first, second):
        return jax.jit(on_devices(mesh, lambda p, x: first(p, x + 1) + second(p, x) + x))

    one, two = program(*layers), program(*reversed(layers))
    results = [run(params, x) for _ in range(REPEATS) for run in (one, two, one)]
    expected = dense(params, x + 1) + dense(params, x) + x
    for result in results:
        assert_close(result, expected, 1e-5)


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


@pytest.mark.parametrize("devices", [1, 4])
def test_signature(bootstrap, cached, devices):
    """A program has its own arguments and results alone, however it is compiled and called."""
    mesh = make_mesh(devices)
    ep = bootstrap(mesh)
    params, x = parameters(7), tokens(7, devices)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(dense(params, x))))(x)

    def step():
        layer = on_devices(mesh, functools.partial(moe, ep))
        return jax.jit(jax.grad(lambda x, params: jnp.sum(jnp.sin(layer(params, x)))))

    split = [jax.sharding.NamedSharding(mesh, spec) for spec in specs().values()]
    params = {name: jax.device_put(params[name], s) for name, s in zip(specs(), split)}
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
    mesh = make_mesh(2)
    params, x = parameters(8), tokens(8, 2)
    layer = on_devices(mesh, functools.partial(moe, bootstrap(mesh)))
    with jax.disable_jit():
        assert_close(libep.jax.jit(layer)(params, x), dense(params, x), 1e-5)


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

    program = jax.jit(step, static_argnums=2, donate_argnums=1)
    for kind, expected in [("layer", 3 * dense(params, x)), ("none", 3 * x)]:
        results, (same,) = program(params, x + 0, kind, scale=3.0)
        assert results["none"] is None and float(results["two"]) == 2
        assert_close((results["y"], same), (expected, x), 1e-5)


@pytest.mark.skipif(DEVICE != "cpu", reason="callbacks need CPU devices")
def test_other_effects(bootstrap):
    """Callbacks in order stay in order."""
    mesh = make_mesh(1)
    ep = bootstrap(mesh)
    params, seen = parameters(7), []
    layer = on_devices(mesh, functools.partial(moe, ep))

    @jax.jit
    def step(params, x):
        for i in range(3):
            jax.debug.callback(lambda i=i: seen.append(i), ordered=True)
            x = layer(params, x)
        return x

    jax.block_until_ready(step(params, tokens(7, 1)))
    jax.effects_barrier()
    assert seen == [0, 1, 2]
