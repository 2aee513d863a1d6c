# SPDX-License-Identifier: Apache-2.0
"""The order of calls: mistakes end as EP_ERR_ORDER, and what should work without one does."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from conftest import DEVICE, assert_close, dense, make_mesh, moe, parameters, route, specs, tokens
from jax.errors import JaxRuntimeError
from jax.sharding import PartitionSpec as P


finds_mistakes = pytest.mark.skipif(DEVICE != "cpu", reason="orders of GPUs are not looked at")


def run(mesh, body, params, x):
    apply = jax.shard_map(body, mesh=mesh, in_specs=(specs(), P("ep")), out_specs=P("ep"))
    return jax.block_until_ready(jax.jit(apply)(params, x))


def begins_twice(ep, params, x):
    y, _ = moe(ep, params, x, ep.order())
    z, _ = moe(ep, params, x + 1, ep.order())
    return y + z


def takes_an_order_twice(ep, params, x):
    y, order = moe(ep, params, x, ep.order())
    z, _ = moe(ep, params, x + 1, order)
    w, _ = moe(ep, params, x + 2, order)
    return y + z + w


def skips_a_call(ep, params, x):
    idx, weights = route(params, x)
    rows, row_weights, plan, order = ep.dispatch(ep.order(), x, idx, weights)
    y, _ = ep.combine(order, rows, plan, row_weights)
    z, _ = ep.combine(order, 2 * rows, plan, row_weights)
    return y + z


def makes_one_up(ep, params, x):
    return moe(ep, params, x, ep.order() + 7)[0]


@finds_mistakes
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    "mistake", [begins_twice, takes_an_order_twice, skips_a_call, makes_one_up]
)
def test_mistakes(bootstrap, size, mistake):
    """A mistake is found on every run, with one device or several, and nobody waits for 20 s."""
    mesh = make_mesh(size)
    params, x = parameters(1), tokens(1, size)
    for _ in range(3):
        ep = bootstrap(mesh)
        with pytest.raises(JaxRuntimeError, match="EP_ERR_ORDER|has given up|EP_ERR_ABORTED"):
            run(mesh, functools.partial(mistake, ep), params, x)
        ep.close()


@finds_mistakes
def test_the_sentence(bootstrap):
    mesh = make_mesh(1)
    ep = bootstrap(mesh)
    with pytest.raises(
        JaxRuntimeError,
        match=r"rank 0: prepare: expected the order that the last "
        r"call on this device returned.*\(EP_ERR_ORDER\)",
    ):
        run(mesh, functools.partial(begins_twice, ep), parameters(1), tokens(1, 1))


def test_frozen_inputs_under_checkpoint(bootstrap):
    """Experts alone are trained: dispatch has no gradient, and checkpoint must not repeat it."""
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    params, x = parameters(2), tokens(2, 2)

    def body(params, x):
        layer = jax.checkpoint(lambda params, x, order: moe(ep, params, x, order))
        y, order = layer(params, x, ep.order())
        z, _ = layer(params, x + 1, order)
        return y * z

    def reference(params, x):
        return dense(params, x) * dense(params, x + 1)

    apply = jax.shard_map(body, mesh=mesh, in_specs=(specs(), P("ep")), out_specs=P("ep"))
    experts = {name: params[name] for name in ("up", "down")}

    def grad(function):
        loss = lambda experts: jnp.sum(jnp.sin(function({**params, **experts}, x)))  # noqa: E731
        return jax.jit(jax.grad(loss))(experts)

    for _ in range(5):
        assert_close(grad(apply), grad(reference), 1e-5)


def test_jitted_layers_and_remat_of_remat(bootstrap):
    mesh = make_mesh(2)
    ep = bootstrap(mesh)
    params, x = parameters(3), tokens(3, 2)
    layer = jax.checkpoint(jax.jit(jax.checkpoint(functools.partial(moe, ep))))

    def body(params, x):
        y, order = layer(params, x, ep.order())
        return layer(params, y, order)[0]

    def reference(params, x):
        return dense(params, dense(params, x))

    apply = jax.shard_map(body, mesh=mesh, in_specs=(specs(), P("ep")), out_specs=P("ep"))
    grads = [
        jax.jit(jax.grad(lambda p, f=f: jnp.sum(f(p, x) ** 2)))(params) for f in (apply, reference)
    ]
    assert_close(*grads, 1e-5)


def with_tail(ep, join, params, x):
    """The gradient of a layer that another one without gradient follows."""

    def loss(x):
        y, order = moe(ep, params, x, ep.order())
        z, order = moe(ep, params, jax.lax.stop_gradient(y), order)
        return join(order, jnp.sum(y * y)), z

    grad, z = jax.grad(loss, has_aux=True)(x)
    return grad + 0 * z


def test_a_tail_without_gradient(bootstrap):
    """Backward begins before the tail; join puts it after the tail."""
    mesh = make_mesh(2)
    params, x = parameters(4), tokens(4, 2)
    if DEVICE == "cpu":
        ep = bootstrap(mesh)
        with pytest.raises(JaxRuntimeError, match="EP_ERR_ORDER|has given up|EP_ERR_ABORTED"):
            run(mesh, functools.partial(with_tail, ep, lambda order, loss: loss), params, x)
    ep = bootstrap(mesh)
    expected = jax.grad(lambda x: jnp.sum(dense(params, x) ** 2))(x)
    for _ in range(5):
        assert_close(
            run(mesh, functools.partial(with_tail, ep, ep.join), params, x), expected, 1e-5
        )
