# SPDX-License-Identifier: Apache-2.0
"""Layers against a dense reference: values and gradients, scan, checkpoint, several layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from base import refused
from conftest import (
    EXPERTS, HIDDEN, TOKENS, TOP_K, assert_close, dense, indices, layer_on, make_mesh, mlp, moe,
    on_mesh, parameters, route, scores, specs, tokens, value_and_grads
)  # fmt: skip
from jax.sharding import PartitionSpec as P

from libep.jax._weights import quantise

SINGLE = 1e-5


@pytest.mark.parametrize("checks", [True, False])
def test_router(bootstrap, nodes, checks):
    """Gradients of all parameters, through the router; without check_vma those of the tokens."""
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    params, x = parameters(4), tokens(4, 2)
    apply = layer_on(mesh, functools.partial(moe, ep), check_vma=checks)
    got, expected = value_and_grads(apply)(params, x), value_and_grads(dense)(params, x)
    assert_close(*((got, expected) if checks else (got[1][1], expected[1][1])), SINGLE)
    assert_close(got[0][1], expected[0][1], SINGLE)
    ep.check()


WRAPPERS = {
    "plain": lambda layer: layer,
    "checkpoint": functools.partial(jax.checkpoint, prevent_cse=False),
    "prevent_cse": jax.checkpoint,
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
}


@pytest.mark.parametrize("size, wrap", [(4, "plain"), *((2, wrap) for wrap in WRAPPERS)])
def test_scan(bootstrap, size, wrap):
    """Layers under scan: each keeps its own plan for backward."""
    mesh, layers = make_mesh(size), 3
    ep = bootstrap(mesh)
    params, x = parameters(size, layers), tokens(size, size)

    def stack(layer, params, x):
        return jax.lax.scan(lambda x, params: (layer(params, x), None), x, params)[0]

    layer = WRAPPERS[wrap](functools.partial(moe, ep))
    step = value_and_grads(layer_on(mesh, functools.partial(stack, layer), layers))
    expected = value_and_grads(functools.partial(stack, dense))(params, x)
    for _ in range(3):
        assert_close(step(params, x), expected, SINGLE)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_arrays_without_rows(bootstrap, wrap):
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    layer = layer_on(mesh, WRAPPERS[wrap](functools.partial(moe, ep)))
    _, (of_params, of_x) = value_and_grads(layer)(parameters(2), tokens(2, 2)[:0])
    assert of_x.shape == (0, HIDDEN) and not any(g.any() for g in jax.tree.leaves(of_params))
    ep.check()


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("wrap", ["plain", "checkpoint"])
def test_placement(bootstrap, wrap, is_inside):
    """Each layer under scan has a placement of its own. The gradients of copies are summed."""
    mesh, layers, places = make_mesh(4), 2, EXPERTS + 4
    ep = bootstrap(mesh, num_physical=places, choice="spread")
    assert (ep.num_experts, ep.num_physical, ep.num_local_experts) == (EXPERTS, places, 3)
    params, x = parameters(21, layers), tokens(21, 4)
    body = WRAPPERS[wrap](functools.partial(moe, ep))
    if is_inside:
        body = on_mesh(mesh, body, (specs(), P("ep"), P()))

    def stack(maps, params, x):
        def layer(x, each):
            params, placement = each
            held = {name: params[name][placement] for name in ("up", "down")}
            return body(dict(params, **held), x, placement), None

        return jax.lax.scan(layer, x, (params, maps))[0]

    def reference(params, x):
        return jax.lax.scan(lambda x, params: (dense(params, x), None), x, params)[0]

    expected = value_and_grads(reference)(params, x)
    step = jax.jit(lambda maps, *given: value_and_grads(functools.partial(stack, maps))(*given))
    generator = np.random.default_rng(21)
    spare = [-1, *generator.integers(0, EXPERTS, 3)]
    for _ in range(2):
        maps = [generator.permutation([*range(EXPERTS), *spare]) for _ in range(layers)]
        assert_close(step(np.array(maps, np.int32), params, x), expected, SINGLE)
    assert step._cache_size() == 1


def test_pullbacks_of_two_micro_batches(bootstrap):
    """F0 F1 B0 B1 by hand."""
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    params, x, grads = parameters(11), tokens(11, 4), tokens(12, 4)

    def body(params, x, grads):
        parts, cotangents = jnp.split(x, 2), jnp.split(grads, 2)
        layer = functools.partial(moe, ep, params)
        pulls = [jax.vjp(layer, part)[1] for part in parts]
        return jnp.concatenate([pull(c)[0] for pull, c in zip(pulls, cotangents)])

    got = jax.jit(on_mesh(mesh, body, (specs(), P("ep"), P("ep"))))(params, x, grads)
    expected = jax.vjp(functools.partial(dense, params), x)[1](grads)[0]
    assert_close(got, expected, SINGLE)


def test_fewer_tokens_than_rows(bootstrap):
    """Outside shard_map each device has another number of tokens, one has none."""
    mesh, counts = make_mesh(4), jnp.asarray([5, 0, TOKENS, 1], jnp.int32)
    ep = bootstrap(mesh)
    params, x = parameters(16), tokens(16, 4)
    is_token = (jnp.arange(4 * TOKENS) % TOKENS < jnp.repeat(counts, TOKENS))[:, None]

    def apply(params, x):
        weights, idx = route(scores(x, params["router"]))
        idx = jnp.where(is_token, idx, EXPERTS + 1)  # an error, if it were read
        rows, row_weights, plan = ep.dispatch(x, idx, weights, counts)
        experts = {name: params[name] for name in ("up", "down")}
        return ep.combine(ep.experts(mlp, rows, plan, experts, P("ep")), plan, row_weights)

    def reference(params, x):
        return jnp.where(is_token, dense(params, x) - x, 0)

    assert_close(value_and_grads(apply)(params, x), value_and_grads(reference)(params, x), SINGLE)
    ep.check()


@pytest.mark.parametrize("names, axis", [(("data", "ep"), "ep"), (("a", "b"), ("a", "b"))])
def test_two_axes(bootstrap, names, axis):
    """Devices that differ along "data" share no experts; a group along two axes has them all."""
    mesh = make_mesh(2, 2, names=names)
    ep = bootstrap(mesh, axis)
    assert ep.num_ranks == (2 if axis == "ep" else 4)
    params, x = parameters(14), tokens(14, 4)
    split = {"router": P(), "up": P(axis), "down": P(axis)}
    body, options = functools.partial(moe, ep), dict(in_specs=(split, P(names)), out_specs=P(names))
    apply = jax.shard_map(body, mesh=mesh, **options)
    assert_close(value_and_grads(apply)(params, x), value_and_grads(dense)(params, x), SINGLE)


def there_and_back(ep, mesh):
    """A program of a dispatch and its combine. Returns the plan's totals, too."""

    def body(x, idx):
        rows, _, plan = ep.dispatch(x, idx)
        return ep.combine(rows, plan), plan.totals[None]

    return jax.jit(on_mesh(mesh, body))


def test_capacity(bootstrap):
    """With a small capacity rows are lost, counted, and reported by check."""
    mesh = make_mesh(2)
    ep = bootstrap(mesh, max_recv_rows=4)
    y, totals = there_and_back(ep, mesh)(jnp.ones((2 * TOKENS, HIDDEN)), indices(2))
    needed = 2 * TOKENS * TOP_K
    assert totals.tolist() == [[4, needed, needed - 4], [0, 0, 0]]
    assert float(y.sum()) == 4 * HIDDEN
    sentence = rf"dispatch: expected at most 4 receive rows \(max_recv_rows\), needed {needed}; "
    with refused(f"OVERFLOW {sentence}"):
        ep.check()


@pytest.mark.parametrize("duplicates, rows", [("keep", 8 * TOP_K), ("merge", 8)])
def test_default_capacity(bootstrap, duplicates, rows):
    """No row is lost where a token names an expert in all its entries."""
    mesh = make_mesh(8)
    ep = bootstrap(mesh, duplicates=duplicates)
    assert ep.max_recv_rows == rows * TOKENS
    x = tokens(16, 8)
    y, _ = there_and_back(ep, mesh)(x, jnp.zeros((8 * TOKENS, TOP_K), jnp.int32))
    assert_close(y, x * (TOP_K if duplicates == "keep" else 1), SINGLE)
    ep.check()


def nvfp4(x, factor):
    """(bytes, scales) of rows [T, H]; each operation is rounded by itself."""
    blocks, one = np.asarray(x).reshape(len(x), -1, 16), np.float32(1)
    amax = np.abs(blocks).max(-1)
    scales = np.minimum(factor * (amax * np.float32(1 / 6)), 448).astype(jnp.float8_e4m3fn)
    inverse = one / (scales.astype(np.float32) * (one / factor))
    scaled = np.clip(blocks * inverse[..., None], -6, 6).astype(jnp.float4_e2m1fn)
    codes = scaled.reshape(len(x), -1).view(np.uint8) & 15
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.view(np.uint8)


@pytest.mark.parametrize("quant, order", [
    ("nvfp4", "by_row"), ("nvfp4", "swizzled"), ("fp8", "by_row"), ("fp8", "by_column")
])  # fmt: skip
def test_quantised_rows(bootstrap, quant, order):
    mesh, hidden, rows = make_mesh(2), 512, 128
    fields = dict(num_experts=2, top_k=1, hidden=hidden, max_recv_rows=rows, alignment=rows)
    ep = bootstrap(mesh, quant=quant, scale_order=order, **fields)
    x = jax.random.normal(jax.random.key(3), (2 * TOKENS, hidden))
    factor = np.float32(2688) / np.abs(np.asarray(x)).max()
    scale = jnp.full(2, factor) if quant == "nvfp4" else None
    idx = jnp.arange(2 * TOKENS)[:, None] % 2

    def step(x):
        (values, scales), weights, plan = ep.dispatch(x, idx, global_scale=scale)
        assert weights is None
        return values, scales, ep.combine(jnp.ones((2 * rows, hidden)), plan)

    values, scales, out = (np.asarray(array) for array in jax.jit(step)(x))
    wanted = nvfp4(x, factor) if quant == "nvfp4" else map(np.asarray, quantise(x))
    if order == "swizzled":
        scales = scales.reshape(2, -1, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    scales = scales.reshape(2, -1, rows).swapaxes(1, 2) if order == "by_column" else scales
    for got, expected in zip((values, scales), wanted):
        for device, part in enumerate(got.reshape(2, rows, -1)):
            assert np.array_equal(part[:TOKENS], expected[device::2])
    assert (out == 1).all()
    with refused("UNSUPPORTED dispatch: expected no derivative"):
        jax.jvp(lambda x: ep.dispatch(x, idx, global_scale=scale), (x,), (x,))
    needs = "NULL .*expected one, .* NVFP4" if quant == "nvfp4" else "UNSUPPORTED .*None, .* FP8"
    with refused(needs):
        ep.dispatch(x, idx, global_scale=None if quant == "nvfp4" else x[0, :2])
    if quant == "nvfp4":
        with refused("ROW_BYTES a multiple of 32 elements .*, got 48"):
            ep.dispatch(x[:, :48], idx, global_scale=scale)


@pytest.mark.parametrize("order", ["by_row", "by_column"])
def test_quantised_gradients(bootstrap, order):
    """They travel as e4m3, in blocks of 128 of which the last one is not full."""
    mesh, hidden, rows = make_mesh(2), 400, 32
    fields = dict(num_experts=2, top_k=1, hidden=hidden, max_recv_rows=rows)
    ep = bootstrap(mesh, grad_quant="fp8", scale_order=order, **fields)
    x, grad_out = jax.random.normal(jax.random.key(3), (2, 2 * TOKENS, hidden))
    idx = jnp.arange(2 * TOKENS)[:, None] % 2

    def step(rows, grad_out):
        _, _, plan = ep.dispatch(x, idx)
        return jax.vjp(lambda rows: ep.combine(rows, plan), rows)[1](grad_out)[0]

    got = np.asarray(jax.jit(step)(jnp.ones((2 * rows, hidden)), grad_out)).reshape(2, rows, -1)
    values, scales = map(np.asarray, quantise(grad_out))
    each = np.repeat(scales, 128, axis=1)[:, :hidden]
    wanted = values.astype(np.float32) * each
    for device in range(2):
        assert np.array_equal(got[device, :TOKENS], wanted[device::2])
        assert not got[device, TOKENS:].any()
    with refused("UNSUPPORTED recv_weights: expected None"):
        _, weights, plan = ep.dispatch(x, idx, jnp.ones((2 * TOKENS, 1)))
        jax.grad(lambda rows: ep.combine(rows, plan, weights).sum())(jnp.ones((2 * rows, hidden)))
    with refused("UNSUPPORTED scale_order"):
        bootstrap(mesh, grad_quant="mxfp8", scale_order="swizzled", alignment=128, **fields)


def test_without_counters(bootstrap):
    with refused("EpError expected bootstrap's counters=True"):
        bootstrap(make_mesh(2)).counters()
