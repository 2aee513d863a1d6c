# SPDX-License-Identifier: Apache-2.0
"""Wrong meshes, specs and shapes outside shard_map: an exception with a sentence, and no wait."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from base import refused
from conftest import HIDDEN, TOKENS, assert_close, dense, make_mesh, mlp, parameters, tokens
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_model import LAYOUTS, routed

from libep import Blocks, Quant

LAYOUT = LAYOUTS["data-fsdp-expert"]
NAMES = LAYOUT.names
PARAMS = parameters(1)
X = tokens(1, LAYOUT.devices)


def run(ep, params=PARAMS, x=X, specs=P("expert", "fsdp"), **options):
    """Experts alone, in one program."""
    program = jax.jit(lambda params, x: routed(ep, params, x, specs, **options))
    return jax.block_until_ready(program(params, x))


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


def test_other_tokens_and_devices(bootstrap):
    """Tokens that do not divide; tokens, or jax.set_mesh, of another mesh than the group's."""
    ep = bootstrap(LAYOUT.mesh, "expert")
    with refused(r"SHAPE a multiple of the 8 devices along .*'expert'\), got shape \[95, 8\]"):
        run(ep, x=X[:-1])
    turned = Mesh(LAYOUT.mesh.devices[::-1], NAMES)
    with refused("ValueError incompatible devices"):
        run(ep, x=jax.device_put(X, NamedSharding(turned, P(NAMES))))
    with jax.set_mesh(turned), refused("ValueError incompatible devices"):
        run(ep)
    smaller = make_mesh(2, 2, names=NAMES[1:])
    sentence = "expected the mesh that bootstrap got, .*'data': 2.*, got that of jax.set_mesh"
    with jax.set_mesh(smaller), refused(f"EpError {sentence}"):
        run(ep)
    assert np.isfinite(run(ep)).all()


def test_a_part_of_the_axes_is_manual(bootstrap):
    ep, options = bootstrap(LAYOUT.mesh, "expert"), dict(in_specs=P("data"), out_specs=P("data"))
    partly = jax.shard_map(lambda x: run(ep, x=x), mesh=LAYOUT.mesh, axis_names={"data"}, **options)
    with refused(r"EpError or outside of any shard_map, .* over \('data',\)"):
        jax.jit(partly)(X)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2)])
def test_the_other_axes_are_left_to_xla(bootstrap, sizes):
    """Refused where the other axis has several devices, and on GPUs always."""
    mesh = make_mesh(*sizes, names=("data", "expert"))
    ep, x = bootstrap(mesh, "expert"), X[: 2 * TOKENS]
    given = {"router": P(), "up": P("expert"), "down": P("expert")}
    partly = jax.jit(jax.shard_map(
        lambda params, x: run(ep, params, x, P("expert")), mesh=mesh, axis_names={"expert"},
        in_specs=(given, P("expert")), out_specs=P("expert"),
    ))  # fmt: skip
    if sizes == (1, 2) and mesh.devices.flat[0].platform == "cpu":
        assert_close(x + partly(PARAMS, x), dense(PARAMS, x), 1e-5)
        return
    words = r"over all axes of the mesh, got one over \('expert',\) that leaves \('data',\) to XLA"
    with refused(f"UNSUPPORTED {words}"):
        partly(PARAMS, x)


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
    (r"SHAPE weights\['up'\] \[\], .* as first dimension, got a scalar", SPLIT, zeros()),
    ("SHAPE dimension 2 to be a multiple of the 2 devices .* got 7", SPLIT, zeros(8, HIDDEN, 7)),
    ("UNSUPPORTED a multiple of 128 elements .* to quantise, got 8", SPLIT, zeros(8, HIDDEN, 8)),
])  # fmt: skip
def test_specs_and_weights(bootstrap, text, spec, weights):
    ep = bootstrap(LAYOUT.mesh, "expert")
    with refused(text):
        run(ep, {**PARAMS, **weights}, specs=spec, quantise="to quantise" in text)


@pytest.mark.parametrize("given, sentence", [
    ("fp8", "RANGE experts: quantise: expected a bool, a libep.Quant, .* got 'fp8'"),
    ((Quant.MXFP8, Blocks.TILES), "UNSUPPORTED quantise: expected blocks of rows with MXFP8"),
    ((Quant.FP8, Blocks.TILES), "UNSUPPORTED a multiple of 128 elements along the dimension before"),
    (Quant.MXFP8, "UNSUPPORTED a multiple of 32 elements along the last dimension to quantise"),
])  # fmt: skip
def test_forms(bootstrap, given, sentence):
    ep, is_tiles = bootstrap(LAYOUT.mesh, "expert"), given == (Quant.FP8, Blocks.TILES)
    with refused(sentence):
        run(ep, {**PARAMS, **zeros(8, HIDDEN, 8)}, quantise=given,
            specs=P("expert", "fsdp") if is_tiles else SPLIT)  # fmt: skip


@pytest.mark.parametrize("text, spec", [
    (r"UNSUPPORTED all of a device's experts .*, got \('fsdp',\)", P(("expert", "fsdp"))),
    (r"SHAPE function failed: .* stay sharded over \('fsdp',\), which", P("expert", "fsdp")),
])  # fmt: skip
def test_fsdp_outside_token_axes(bootstrap, text, spec):
    """An axis that does not split the tokens, where the function does not add over it."""
    ep = bootstrap(LAYOUT.mesh, "expert", token_axes=("data", "expert"), max_tokens=2 * TOKENS)
    with refused(f"{text}.*token_axes of bootstrap"):
        run(ep, specs=spec)


def test_other_refusals(bootstrap):
    """Two groups mixed up; weights that are no arrays; an axis gathered, and one that is not."""
    one, two = bootstrap(LAYOUT.mesh, "expert"), bootstrap(LAYOUT.mesh, "fsdp")
    rows, _, plan = one.dispatch(X, jnp.zeros((len(X), 3), jnp.int32))
    mesh = make_mesh(2, 2, 2, names=("fsdp", "expert", "tensor"))
    three, both = bootstrap(mesh, "expert", token_axes=mesh.axis_names[:2]), ("fsdp", "tensor")
    for text, call in [
        ("FOREIGN combine: plan: expected one of this Ep's", lambda: two.combine(rows, plan)),
        (r"EpError weights\['up'\]: expected an array, got float",
         lambda: one.experts(mlp, rows, plan, {"up": 3.0}, P("expert"))),
        (r"EpError either gathered, .* or staying sharded, got \('fsdp', 'tensor'\)",
         lambda: run(three, x=X[:48], specs=P("expert", both))),
    ]:  # fmt: skip
        with refused(text):
            call()


# ---- axes with types ---------------------------------------------------------------------------


def test_explicit_axes(bootstrap):
    """A mesh of jax.make_mesh, whose arrays have a spec in their type."""
    make_mesh(*LAYOUT.sizes, names=NAMES)  # or skip
    mesh = jax.make_mesh(LAYOUT.sizes, NAMES, axis_types=(AxisType.Explicit,) * 3)
    ep, split = bootstrap(mesh, "expert"), NamedSharding(mesh, P("expert", "fsdp"))
    splits = {"router": NamedSharding(mesh, P()), "up": split, "down": split}
    placed = jax.device_put(PARAMS, splits)
    with refused(r"EpError sharded by P\(.*\), got P\('data', .*: use jax.reshard"):
        run(ep, placed, jax.device_put(X, NamedSharding(mesh, P("data"))))
    x = jax.device_put(X, NamedSharding(mesh, P(NAMES)))
    assert_close(x + run(ep, placed, x), dense(PARAMS, X), 1e-5)


def test_an_axis_that_does_not_split_tokens(bootstrap):
    """Tensor parallelism within experts: its axis stays in the weights, and has equal tokens."""
    mesh = make_mesh(2, 2, 2, names=("data", "expert", "tensor"))
    ep, x = bootstrap(mesh, "expert", token_axes=("data", "expert")), X[: 4 * TOKENS]
    specs = {"up": P("expert", None, "tensor"), "down": P("expert", "tensor")}

    def half(*operands):
        return jax.lax.psum(mlp(*operands), "tensor")

    def grads(function):
        loss = lambda *given: jnp.sum(jnp.sin(3 * function(*given)))  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1)))(PARAMS, x)

    apply = lambda params, x: x + routed(ep, params, x, specs, half)  # noqa: E731
    assert_close(grads(apply), grads(dense), 1e-5)
