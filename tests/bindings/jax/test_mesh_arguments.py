# SPDX-License-Identifier: Apache-2.0
"""Wrong meshes, specs and shapes outside shard_map: an exception with a sentence, and no wait."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from base import refused
from conftest import HIDDEN, TOKENS, assert_close, make_mesh
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_model import LAYOUTS, dense_model, mlp, parameters, route, scores, tokens

LAYOUT = LAYOUTS["data-fsdp-expert"]
NAMES = LAYOUT.names


def run(ep, params, x, specs=P("expert", "fsdp"), combine=None, quantise=False):
    """Experts alone, in one program."""

    @jax.jit
    def program(params, x):
        weights, idx = ep.per_device(route, scores(x, params["router"]))
        rows, row_weights, plan = ep.dispatch(x, idx, weights)
        experts = {name: params[name] for name in ("up", "down")}
        rows = ep.experts(mlp, rows, plan, experts, specs, quantise=quantise)
        return (combine or ep).combine(rows, plan, row_weights)

    return jax.block_until_ready(program(params, x))


def routed_alone(params, x):
    """The dense model without what `run` leaves out."""
    silent = {**params, "first": jnp.eye(HIDDEN), "shared_down": 0 * params["shared_down"]}
    return dense_model(LAYOUT, silent, x)


# ---- bootstrap ---------------------------------------------------------------------------------


@pytest.mark.parametrize("axis, token_axes, sentence", [
    ("experts", None, r"axis: expected one of the mesh's axes .*, got 'experts'"),
    (("expert", "expert"), None, "axis: expected one or more axes, each once"),
    ((), None, "axis: expected one or more axes, each once"),
    ("expert", ("tokens", "expert"), "token_axes: expected one of the mesh's axes"),
    ("expert", ("data", "fsdp"), r"token_axes: expected \('expert',\) among them"),
])  # fmt: skip
def test_axes(bootstrap, axis, token_axes, sentence):
    with refused(f"RANGE {sentence}"):
        bootstrap(LAYOUT.mesh, axis, token_axes=token_axes)


# ---- tokens and meshes -------------------------------------------------------------------------


def test_tokens_that_do_not_divide(bootstrap):
    ep = bootstrap(LAYOUT.mesh, "expert")
    x = tokens(1, LAYOUT)[:-1]
    sentence = r"a multiple of the 8 devices along .*'expert'\), got shape \[95, 8\]"
    with refused(f"SHAPE {sentence}"):
        run(ep, parameters(1), x)


def test_other_devices(bootstrap):
    """Tokens, or jax.set_mesh, of another mesh than the group's."""
    ep = bootstrap(LAYOUT.mesh, "expert")
    params, x = parameters(2), tokens(2, LAYOUT)
    turned = Mesh(LAYOUT.mesh.devices[::-1], NAMES)
    with refused("ValueError incompatible devices"):
        run(ep, params, jax.device_put(x, NamedSharding(turned, P(NAMES))))
    with jax.set_mesh(turned), refused("ValueError incompatible devices"):
        run(ep, params, x)
    smaller = make_mesh(2, 2, names=NAMES[1:])
    sentence = "expected the mesh that bootstrap got, .*'data': 2.*, got that of jax.set_mesh"
    with jax.set_mesh(smaller), refused(f"EpError {sentence}"):
        run(ep, params, x)
    assert np.isfinite(run(ep, params, x)).all()


def test_two_groups_mixed_up(bootstrap):
    one, two = bootstrap(LAYOUT.mesh, "expert"), bootstrap(LAYOUT.mesh, "fsdp")
    params, x = parameters(3), tokens(3, LAYOUT)
    with refused("FOREIGN combine: plan: expected one of this Ep's"):
        run(one, params, x, combine=two)


def test_a_part_of_the_axes_is_manual(bootstrap):
    mesh = LAYOUT.mesh
    ep = bootstrap(mesh, "expert")
    body = functools.partial(run, ep, parameters(4))
    partly = jax.shard_map(
        body, mesh=mesh, axis_names={"data"}, in_specs=P("data"), out_specs=P("data")
    )
    with refused(r"EpError or outside of any shard_map, .* over \('data',\)"):
        jax.jit(partly)(tokens(4, LAYOUT))


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2)])
def test_the_other_axes_are_left_to_xla(bootstrap, sizes):
    """Refused where the other axis has several devices, and on GPUs always."""
    mesh = make_mesh(*sizes, names=("data", "expert"))
    ep = bootstrap(mesh, "expert")
    given = {**dict.fromkeys(parameters(4), P()), "up": P("expert"), "down": P("expert")}
    partly = jax.shard_map(
        lambda params, x: run(ep, params, x, P("expert")),
        mesh=mesh,
        axis_names={"expert"},
        in_specs=(given, P("expert")),
        out_specs=P("expert"),
    )
    params, x = parameters(4), tokens(4, LAYOUT)[: 2 * TOKENS]
    if sizes == (1, 2) and mesh.devices.flat[0].platform == "cpu":
        assert_close(x + jax.jit(partly)(params, x), routed_alone(params, x), 1e-5)
        return
    sentence = (
        r"over all axes of the mesh, got one over \('expert',\) that leaves \('data',\) to XLA"
    )
    with refused(f"UNSUPPORTED {sentence}"):
        jax.jit(partly)(params, x)


# ---- specs of weights --------------------------------------------------------------------------


SPLIT = P("expert", None, "fsdp")


def zeros(*shape):
    return {"up": jnp.zeros(shape)}


@pytest.mark.parametrize("text, spec, weights", [
    (r"UNSUPPORTED sharded by \('expert',\), then by others, got \('fsdp',\)", P("fsdp"), {}),
    ("UNSUPPORTED then by others", P(("fsdp", "expert")), {}),
    (r"UNSUPPORTED then by others, got \(\)", P(None, "fsdp"), {}),
    ("RANGE expected the mesh's axes .*, got 'tensor'", P("expert", "tensor"), {}),
    ("RANGE each axis once, got 'expert' twice", P("expert", ("fsdp", "expert")), {}),
    ("TYPE expected a PartitionSpec, got NoneType", {"up": P("expert"), "down": None}, {}),
    (r"SHAPE \['down'\] .* a spec of 1 .. 3 entries, got 4", P("expert", None, None, "fsdp"), {}),
    ("SHAPE specs: expected a PartitionSpec for all weights, or a tree", {"up": P("expert")}, {}),
    ("SHAPE expected the 8 experts as first dimension, got 4", SPLIT, zeros(4, HIDDEN, 8)),
    ("SHAPE dimension 2 to be a multiple of the 2 devices .* got 7", SPLIT, zeros(8, HIDDEN, 7)),
    ("UNSUPPORTED a multiple of 128 elements .* to quantise, got 8", SPLIT, zeros(8, HIDDEN, 8)),
])  # fmt: skip
def test_specs_and_weights(bootstrap, text, spec, weights):
    ep = bootstrap(LAYOUT.mesh, "expert")
    with refused(text):
        params = {**parameters(5), **weights}
        run(ep, params, tokens(5, LAYOUT), spec, quantise="to quantise" in text)


def test_weights_that_are_no_arrays(bootstrap):
    ep = bootstrap(LAYOUT.mesh, "expert")
    x = tokens(6, LAYOUT)
    rows, _, plan = ep.dispatch(x, jnp.zeros((len(x), 3), jnp.int32))
    for weight, sentence in [
        (3.0, r"weights\['up'\]: expected an array, got float"),
        (jnp.ones(()), r"weights\['up'\] \[\], .* the 8 experts as first dimension, got a scalar"),
    ]:
        with refused(f"EpError {sentence}"):
            ep.experts(mlp, rows, plan, {"up": weight}, P("expert"))


@pytest.mark.parametrize("text, spec", [
    (r"UNSUPPORTED all of a device's experts .*, got \('fsdp',\)", P(("expert", "fsdp"))),
    (r"SHAPE function failed: .* stay sharded over \('fsdp',\), which", P("expert", "fsdp")),
])  # fmt: skip
def test_fsdp_outside_token_axes(bootstrap, text, spec):
    """An axis that does not split the tokens, where the function does not add over it."""
    ep = bootstrap(LAYOUT.mesh, "expert", token_axes=("data", "expert"), max_tokens=2 * TOKENS)
    with refused(f"{text}.*token_axes of bootstrap"):
        run(ep, parameters(7), tokens(7, LAYOUT), spec)


def test_gathered_and_split(bootstrap):
    mesh = make_mesh(2, 2, 2, names=("fsdp", "expert", "tensor"))
    ep = bootstrap(mesh, "expert", token_axes=("fsdp", "expert"))
    sentence = r"either gathered, .* or staying sharded, got \('fsdp', 'tensor'\)"
    with refused(f"EpError {sentence}"):
        run(ep, parameters(7), tokens(7, LAYOUT)[:48], P("expert", ("fsdp", "tensor")))


# ---- axes with types ---------------------------------------------------------------------------


def test_explicit_axes(bootstrap):
    """A mesh of jax.make_mesh, whose arrays have a spec in their type."""
    make_mesh(*LAYOUT.sizes, names=NAMES)  # or skip
    mesh = jax.make_mesh(LAYOUT.sizes, NAMES, axis_types=(AxisType.Explicit,) * 3)
    ep = bootstrap(mesh, "expert")
    params, x = parameters(8), tokens(8, LAYOUT)
    specs = {**dict.fromkeys(params, P()), "up": P("expert", "fsdp"), "down": P("expert", "fsdp")}
    placed = {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in params.items()}
    with refused(r"EpError sharded by P\(.*\), got P\('data', .*: use jax.reshard"):
        run(ep, placed, jax.device_put(x, NamedSharding(mesh, P("data"))))
    split = jax.device_put(x, NamedSharding(mesh, P(NAMES)))
    assert_close(x + run(ep, placed, split), routed_alone(params, x), 1e-5)


def test_an_axis_that_does_not_split_tokens(bootstrap):
    """Tensor parallelism within experts: its axis stays in the weights, and has equal tokens."""
    mesh = make_mesh(2, 2, 2, names=("data", "expert", "tensor"))
    ep = bootstrap(mesh, "expert", token_axes=("data", "expert"))
    params, x = parameters(9), tokens(9, LAYOUT)[: 4 * TOKENS]
    specs = {"up": P("expert", None, "tensor"), "down": P("expert", "tensor")}

    def apply(params, x):
        weights, idx = ep.per_device(route, scores(x, params["router"]))
        rows, row_weights, plan = ep.dispatch(x, idx, weights)

        def half(*operands):
            return jax.lax.psum(mlp(*operands), "tensor")

        rows = ep.experts(half, rows, plan, {k: params[k] for k in specs}, specs)
        return x + ep.combine(rows, plan, row_weights)

    def grads(function):
        return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(3 * function(*a))), (0, 1)))(params, x)

    got, expected = grads(apply), grads(routed_alone)
    for name in ("router", "up", "down"):
        assert_close(got[0][name], expected[0][name], 1e-5)
    assert_close(got[1], expected[1], 1e-5)
