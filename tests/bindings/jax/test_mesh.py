# SPDX-License-Identifier: Apache-2.0
"""The layer outside shard_map, on meshes: against one device, and what its program communicates."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import DEVICE, EXPERTS, HIDDEN, INNER, TOKENS, assert_close, make_mesh
from hlo import calls, collectives
from jax.sharding import PartitionSpec as P
from mesh_model import (
    LAYOUTS,
    dense_layer,
    dense_model,
    dense_stack,
    layer,
    mlp,
    model,
    parameters,
    route,
    scores,
    stack,
    tokens,
)

from libep.jax._weights import BLOCK, dequantise, quantise

SINGLE = 1e-5
STEPS, RATE = 10, 0.2


def value_and_grads(apply):
    """A loss whose gradient differs in every element, and the gradients."""

    def loss(params, x):
        y = apply(params, x).astype(jnp.float32)
        return jnp.sum(y * jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def assert_same_specs(grads, params):
    for name, grad in grads.items():
        expected = params[name].sharding
        assert grad.sharding.is_equivalent_to(expected, grad.ndim), (name, grad.sharding)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients(bootstrap, name, nodes):
    layout = LAYOUTS[name]
    ep = bootstrap(layout.mesh, "expert")
    params, x = parameters(1), tokens(1, layout)
    placed = layout.place(params, x)
    got = value_and_grads(functools.partial(model, ep, layout))(*placed)
    assert_close(got, value_and_grads(functools.partial(dense_model, layout))(params, x), SINGLE)
    ep.check()


def test_half_precision(bootstrap):
    layout = LAYOUTS["data-fsdp-expert"]
    ep = bootstrap(layout.mesh, "expert", dtype=jnp.bfloat16)
    params, x = parameters(2, dtype=jnp.bfloat16), tokens(2, layout, dtype=jnp.bfloat16)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (params, x))
    got = value_and_grads(functools.partial(model, ep, layout))(*layout.place(params, x))
    expected = value_and_grads(functools.partial(dense_model, layout))(*wide)
    assert got[1][0]["up"].dtype == jnp.bfloat16
    # The experts' rows are rounded in about four places, their gradients in some more.
    for name in ("up", "down"):
        assert_close(got[1][0][name], expected[1][0][name], 8 * float(jnp.finfo(jnp.bfloat16).eps))


def losses(apply, params, x, target):
    """Losses of some steps of gradient descent, and the parameters behind them."""

    def loss(params):
        return jnp.mean((apply(params, x) - target) ** 2)

    @jax.jit
    def step(params):
        value, grads = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - RATE * g, params, grads)

    values = []
    for _ in range(STEPS):
        value, params = step(params)
        values.append(float(value))
    return values, params


@pytest.mark.parametrize("name", LAYOUTS)
def test_training(bootstrap, name):
    """Ten steps of two layers under scan and checkpoint have the losses of one device."""
    layout, layers = LAYOUTS[name], 2
    ep = bootstrap(layout.mesh, "expert")
    params, x = parameters(3, layers), tokens(3, layout)
    target = jnp.sin(3 * x)
    expected, _ = losses(functools.partial(dense_stack, layout), params, x, target)
    placed, x = layout.place(params, x, layers)
    got, trained = losses(functools.partial(stack, ep, layout), placed, x, target)
    np.testing.assert_allclose(got, expected, rtol=SINGLE)
    assert got[-1] < 0.9 * got[0]
    assert_same_specs(trained, placed)
    ep.check()


@pytest.mark.parametrize("name", ["compound", "fp8"])
def test_inside_shard_map(bootstrap, name):
    """experts gathers shards in the caller's shard_map, too."""
    layout = LAYOUTS[name]
    ep = bootstrap(layout.mesh, "expert")
    params, x = parameters(7), tokens(7, layout)
    silent = {**params, "first": jnp.eye(HIDDEN), "shared_down": 0 * params["shared_down"]}
    split = P(layout.names)

    def body(params, x):
        weights, idx = route(scores(x, params["router"]))
        rows, row_weights, plan = ep.dispatch(x, idx, weights)
        experts = {name: params[name] for name in layout.experts}
        rows = ep.experts(mlp, rows, plan, experts, layout.experts, quantise=layout.fp8)
        return x + ep.combine(rows, plan, row_weights)

    specs = {"router": P(), **layout.experts}
    apply = jax.shard_map(body, mesh=layout.mesh, in_specs=(specs, split), out_specs=split)
    used = {name: params[name] for name in specs}
    got = value_and_grads(apply)(used, x)
    value, (grads, grad_x) = value_and_grads(functools.partial(dense_model, layout))(silent, x)
    expected = value, ({name: grads[name] for name in specs}, grad_x)
    assert_close(got, expected, SINGLE)


# ---- what a program communicates ---------------------------------------------------------------


def lines(layout, *axes):
    """The groups of devices along axes, by their place in the mesh."""
    numbers = np.arange(layout.devices).reshape(layout.sizes)
    places = [layout.names.index(axis) for axis in axes]
    moved = np.moveaxis(numbers, places, range(-len(axes), 0))
    size = math.prod(layout.sizes[place] for place in places)
    return frozenset(frozenset(row) for row in moved.reshape(-1, size).tolist())


@pytest.mark.parametrize("name", LAYOUTS)
def test_collectives(bootstrap, name):
    layout = LAYOUTS[name]
    ep = bootstrap(layout.mesh, "expert")
    placed = layout.place(parameters(4), tokens(4, layout))
    step = value_and_grads(functools.partial(model, ep, layout)).lower(*placed).compile()
    text = step.as_text()
    assert calls(text) == [
        "combine",
        "combine_backward",
        "dispatch",
        "dispatch_backward",
        "prepare",
    ]

    found = collectives(text)
    assert not [c for c in found if c.operation in ("all-to-all", "collective-permute")]
    # On GPUs XLA may gather several weights at once, and transpose one before.
    order = tuple if DEVICE == "cpu" else sorted
    gathers = [
        ((kind, order(shape)), c.groups)
        for c in found
        if c.operation == "all-gather"
        for kind, shape in c.arrays
    ]
    local = EXPERTS // ep.num_ranks
    everyone = lines(layout, *[a for a in ("fsdp", "expert") if a in layout.names])
    dense_shapes = [(HIDDEN, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)]
    expected = [(("f32", shape), everyone) for shape in dense_shapes]
    shapes = {"up": (local, HIDDEN, INNER), "down": (local, INNER, HIDDEN)}
    if "fsdp" in layout.names:
        fsdp = lines(layout, "fsdp")
        for shape in shapes.values():
            if layout.fp8:
                scales = (*shape[:2], -(-shape[2] // BLOCK))
                expected += [(("u8", shape), fsdp), (("f32", scales), fsdp)]
            else:
                expected += [(("f32", shape), fsdp)]
        scattered = [c for c in found if c.operation == "reduce-scatter"]
        assert {c.groups for c in scattered} == {fsdp}
        assert sum(len(c.arrays) for c in scattered) == 2
    expected = [((kind, order(shape)), groups) for (kind, shape), groups in expected]
    assert sorted(gathers) == sorted(expected)


def test_collectives_of_a_scan(bootstrap):
    """One call per direction in the loops, and nothing but weights is gathered, under checkpoint."""
    layout, layers = LAYOUTS["compound"], 2
    ep = bootstrap(layout.mesh, "expert")
    placed = layout.place(parameters(5, layers), tokens(5, layout), layers)
    step = value_and_grads(functools.partial(stack, ep, layout)).lower(*placed).compile()
    text = step.as_text()
    assert len(calls(text)) == 5
    gathered = [c for c in collectives(text) if c.operation == "all-gather"]
    weights = {(HIDDEN, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)}
    assert {shape[-2:] for c in gathered for _, shape in c.arrays} == weights
    fsdp = lines(layout, "fsdp")
    # Forward, and again in backward, since checkpoint does not keep them.
    experts = [c for c in gathered if c.arrays[0][1][:-2] == (ep.num_local_experts,)]
    assert [c.groups for c in experts] == [fsdp] * 4


# ---- quantised weights -------------------------------------------------------------------------


@pytest.mark.parametrize("last", [16, BLOCK, 3 * BLOCK + 32])
def test_quantise(last):
    """The bytes and scales of docs/semantics.md, by another implementation of fp8."""
    generator = np.random.default_rng(last)
    x = generator.standard_normal((3, 4, last)) * 10.0 ** generator.integers(-8, 8, (3, 4, 1))
    x = x.astype(np.float32)
    x[0, 0] = 0
    x[1, 1, 3], x[1, 1, 5] = np.inf, np.nan
    elements, scales = map(np.asarray, jax.jit(quantise)(x))
    for block in range(-(-last // BLOCK)):
        part = x[..., block * BLOCK : (block + 1) * BLOCK]
        amax = np.where(np.isfinite(part), np.abs(part), 0).max(-1, keepdims=True)
        amax = np.maximum(amax, np.float32(2**-100))
        rounding = 0 if DEVICE == "cpu" else 2.0**-22  # of XLA's divisions on GPUs
        np.testing.assert_allclose(scales[..., block], (amax / 448)[..., 0], rounding)
        scaled = np.clip(part * (np.float32(448) / amax), -448, 448)
        expected = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        got = elements[..., block * BLOCK : (block + 1) * BLOCK].view(np.uint8)
        steps = np.abs(got.astype(int) - expected.astype(int))
        assert steps.max() <= (rounding > 0)
    back = np.asarray(dequantise(elements, scales, jnp.float32))
    assert np.abs(back - x)[0].max() <= np.abs(x[0]).max() / 16


# ---- several meshes, several groups ------------------------------------------------------------


def test_four_groups(bootstrap):
    """data 2, fsdp 2, expert 2: four groups of two devices, each with its own tokens."""
    layout = LAYOUTS["data-fsdp-expert"]
    ep = bootstrap(layout.mesh, "expert")
    assert (ep.num_ranks, ep.num_local_experts) == (2, EXPERTS // 2)
    x = tokens(5, layout)
    # Tokens of group g go to the experts g and g + 4, which have other devices.
    group = np.arange(8 * TOKENS) // (2 * TOKENS)
    idx = jnp.asarray(np.stack([group, group + 4, -np.ones_like(group)], 1), jnp.int32)

    @jax.jit
    def program(x, idx):
        rows, _, plan = ep.dispatch(x, idx)
        return ep.combine(rows, plan), plan.expert_counts

    y, counts = program(x, idx)
    assert_close(y, 2 * x, SINGLE)
    expected = np.zeros((4, EXPERTS), int)
    for g in range(4):
        expected[g, [g, g + 4]] = 2 * TOKENS
    assert counts.reshape(4, EXPERTS).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "names, sizes, axis, token_axes",
    [
        (("data", "fsdp", "expert"), (2, 2, 2), ("data", "fsdp"), None),
        (("data", "fsdp", "expert"), (2, 2, 2), ("data", "fsdp"), ("data", "fsdp")),
        (("a", "b"), (2, 4), "b", None),
    ],
)
def test_two_groups(bootstrap, names, sizes, axis, token_axes):
    """Layers with groups along different axes, or on different meshes, in one program."""
    first = LAYOUTS["data-fsdp-expert"]
    mesh = make_mesh(*sizes, names=names)
    one = bootstrap(first.mesh, "expert")
    two = bootstrap(mesh, axis, token_axes=token_axes, max_tokens=2 * TOKENS)
    assert (one.num_ranks, two.num_ranks) == (2, 4)
    params, x = parameters(6), tokens(6, first)

    def other_layer(x):
        weights, idx = two.per_device(route, scores(x, params["router"]))
        rows, row_weights, plan = two.dispatch(x, idx, weights)
        experts = {name: params[name] for name in first.experts}
        rows = two.experts(mlp, rows, plan, experts, P(axis))
        return x + two.combine(rows, plan, row_weights)

    def apply(params, x):
        y, z = layer(one, first, params, x), other_layer(x)  # neither needs the other
        return y + layer(one, first, params, z)

    def reference(params, x):
        def no_shared(x):
            silent = {**params, "shared_down": 0 * params["shared_down"]}
            return dense_layer(first, silent, x)

        return dense_layer(first, params, x) + dense_layer(first, params, no_shared(x))

    fixed = parameters(6)
    got_step = value_and_grads(lambda _, x: apply(fixed, x))
    want_step = value_and_grads(lambda _, x: reference(fixed, x))
    expected = want_step(0.0, x)
    for _ in range(5):
        assert_close(got_step(0.0, x), expected, SINGLE)
