# SPDX-License-Identifier: Apache-2.0
"""The layer outside shard_map, on meshes: against one device, and what its program communicates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    DEVICE, EXPERTS, HIDDEN, INNER, TOKENS, assert_close, dense, make_mesh, parameters, tokens,
    value_and_grads
)  # fmt: skip
from hlo import calls, collectives
from jax.sharding import PartitionSpec as P
from mesh_model import (
    AXES, CUBE, LAYOUTS, dense_layer, dense_model, dense_stack, layer, model, routed, stack,
    whole_parameters
)  # fmt: skip

import libep
from libep import Blocks, Quant
from libep.jax._weights import BLOCK, Form, dequantise, quantise

SINGLE = 1e-5
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@pytest.mark.parametrize(
    "layers, nodes", [(None, "two_nodes"), (2, "one_node")], indirect=["nodes"]
)
@each_layout
def test_gradients(bootstrap, layout, layers, nodes):
    """Of a layer, and of two under scan and checkpoint. Those of experts are sharded as these."""
    ep = bootstrap(layout.mesh, "expert")
    params, x = whole_parameters(1, layers), tokens(1, layout.devices)
    placed, given = layout.place(params, x, layers)
    apply, reference = (model, dense_model) if layers is None else (stack, dense_stack)
    got = value_and_grads(functools.partial(apply, ep, layout))(placed, given)
    assert_close(got, value_and_grads(functools.partial(reference, layout))(params, x), SINGLE)
    for name in layout.experts:
        grad = got[1][0][name]
        assert grad.sharding.is_equivalent_to(placed[name].sharding, grad.ndim), name
    ep.check()


def test_half_precision(bootstrap):
    layout, half = LAYOUTS["data-fsdp-expert"], jnp.bfloat16
    ep = bootstrap(layout.mesh, "expert", dtype=half)
    given = whole_parameters(2, dtype=half), tokens(2, layout.devices, half)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), given)
    got = value_and_grads(functools.partial(model, ep, layout))(*layout.place(*given))[1][0]
    expected = value_and_grads(functools.partial(dense_model, layout))(*wide)[1][0]
    assert got["up"].dtype == half
    # The experts' rows are rounded in about four places, their gradients in some more.
    for name in ("up", "down"):
        assert_close(got[name], expected[name], 8 * float(jnp.finfo(half).eps))


@pytest.mark.parametrize("name", ["compound", "fp8"])
def test_inside_shard_map(bootstrap, name):
    """experts gathers shards in the caller's shard_map, too."""
    layout = LAYOUTS[name]
    ep = bootstrap(layout.mesh, "expert")
    params, x = parameters(7), tokens(7, layout.devices)
    split, specs = P(layout.names), {"router": P(), **layout.experts}

    def body(params, x):
        return x + routed(ep, params, x, layout.experts, quantise=layout.fp8)

    def reference(params, x):
        shared = {"shared_up": (HIDDEN, INNER), "shared_down": (INNER, HIDDEN)}
        nothing = {name: jnp.zeros(shape) for name, shape in shared.items()}
        return dense_layer(layout, {**params, **nothing}, x)

    apply = jax.shard_map(body, mesh=layout.mesh, in_specs=(specs, split), out_specs=split)
    assert_close(value_and_grads(apply)(params, x), value_and_grads(reference)(params, x), SINGLE)


# ---- what a program communicates: over which axes, the results above tell ----------------------

DENSE = [(HIDDEN, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)]


@each_layout
def test_collectives(bootstrap, layout):
    ep = bootstrap(layout.mesh, "expert")
    placed = layout.place(whole_parameters(4), tokens(4, layout.devices))
    step = value_and_grads(functools.partial(model, ep, layout)).lower(*placed).compile()
    text = step.as_text()
    names = "combine combine_backward dispatch dispatch_backward prepare"
    assert calls(text) == names.split()
    found = collectives(text)
    assert not [c for c in found if c.operation in ("all-to-all", "collective-permute")]
    expected = [("f32", shape) for shape in DENSE]
    if "fsdp" in layout.names:
        local = EXPERTS // ep.num_ranks
        for shape in (local, HIDDEN, INNER), (local, INNER, HIDDEN):
            scales = (*shape[:2], -(-shape[2] // BLOCK))
            expected += [("u8", shape), ("f32", scales)] if layout.fp8 else [("f32", shape)]
        scattered = [c for c in found if c.operation == "reduce-scatter"]
        assert sum(len(c.arrays) for c in scattered) == 2
    gathers = [array for c in found if c.operation == "all-gather" for array in c.arrays]
    # On GPUs XLA may gather several weights at once, and transpose one before.
    order = tuple if DEVICE == "cpu" else sorted
    got, wanted = (
        sorted((kind, order(shape)) for kind, shape in all) for all in (gathers, expected)
    )
    assert got == wanted


def test_collectives_of_a_scan(bootstrap):
    """One call per direction in the loops, and in backward dispatch once more; nothing but weights
    is gathered, under checkpoint."""
    layout, layers = LAYOUTS["compound"], 2
    ep = bootstrap(layout.mesh, "expert")
    placed = layout.place(whole_parameters(5, layers), tokens(5, layout.devices), layers)
    step = value_and_grads(functools.partial(stack, ep, layout)).lower(*placed).compile()
    text = step.as_text()
    assert len(calls(text)) == 6
    gathered = [c for c in collectives(text) if c.operation == "all-gather"]
    assert {shape[-2:] for c in gathered for _, shape in c.arrays} == {*DENSE}
    # Forward, and again in backward, since checkpoint does not keep them.
    experts = [c for c in gathered if c.arrays[0][1][:-2] == (ep.num_local_experts,)]
    assert len(experts) == 4


# ---- quantised weights -------------------------------------------------------------------------


@pytest.mark.parametrize("quant, blocks", [
    (Quant.FP8, Blocks.TILES), (Quant.FP8_UE8M0, Blocks.TILES), (Quant.MXFP8, Blocks.ROWS),
    (Quant.FP8_POW2, Blocks.ROWS), (Quant.FP8, Blocks.ROWS),
])  # fmt: skip
def test_forms_as_in_c(quant, blocks):
    """The bytes and scales of libep's own kernels, which quantise a slab for each expert."""
    generator = np.random.default_rng(5)
    x = generator.standard_normal((2, 256, 160)) * 10.0 ** generator.integers(-8, 8, (2, 256, 1))
    x = x.astype(np.float32)
    x[0, 0], x[1, 1, 3], x[1, 1, 5] = 0, np.inf, np.nan
    elements, scales = map(np.asarray, jax.jit(quantise, static_argnums=1)(x, Form(quant, blocks)))
    values, wanted = np.empty(x.shape, np.uint8), np.empty_like(scales)
    (alone,) = libep.Bootstrap.local(1)
    fields = dict(num_experts=2, max_tokens=1, max_top_k=1, max_row_bytes=16, backend="host")
    with alone, libep.Group(alone, **fields) as group:
        out = libep.tensor(values, libep.Type.FP8_E4M3)
        group.quantise_rows(x, out=out, scales=wanted, quant=quant, blocks=blocks)
    is_exact = DEVICE == "cpu"  # XLA's divisions on GPUs are not
    np.testing.assert_allclose(scales.astype(float), wanted, 0 if is_exact else 2.0**-22)
    steps = np.abs(elements.view(np.uint8).astype(int) - values.astype(int))
    assert steps.max() <= (0 if is_exact else 1)
    back = dequantise(elements, scales, jnp.float32, Form(quant, blocks))
    assert np.abs(back - x)[0].max() <= np.abs(x[0]).max() / 16


@pytest.mark.parametrize("per_expert", [False, True])
def test_amax(bootstrap, per_expert):
    layout = LAYOUTS["data-fsdp-expert"]
    ep, spec = bootstrap(layout.mesh, "expert"), P("expert", "fsdp")
    x = jnp.asarray(np.random.default_rng(5).standard_normal((EXPERTS, 4, 6)), jnp.float32)
    function = functools.partial(ep.amax, spec=spec, per_expert=per_expert)
    expected = np.abs(x).max((1, 2) if per_expert else None)
    inside = jax.shard_map(function, mesh=layout.mesh, in_specs=spec,
                           out_specs=P("expert") if per_expert else P())  # fmt: skip
    for amax in (inside, function):
        np.testing.assert_array_equal(jax.jit(amax)(x), expected)


# ---- several meshes, several groups ------------------------------------------------------------


def test_four_groups(bootstrap):
    """data 2, fsdp 2, expert 2: four groups of two devices, each with its own tokens."""
    layout = LAYOUTS["data-fsdp-expert"]
    ep = bootstrap(layout.mesh, "expert")
    assert (ep.num_ranks, ep.num_local_experts) == (2, EXPERTS // 2)
    x = tokens(5, layout.devices)
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


@pytest.mark.parametrize("names, sizes, axis, token_axes", [
    (AXES, CUBE, ("data", "fsdp"), None),
    (AXES, CUBE, ("data", "fsdp"), ("data", "fsdp")),
    (("a", "b"), (2, 4), "b", None),
])  # fmt: skip
def test_two_groups(bootstrap, names, sizes, axis, token_axes):
    """Layers with groups along different axes, or on different meshes, in one program."""
    first, mesh = LAYOUTS["data-fsdp-expert"], make_mesh(*sizes, names=names)
    one = bootstrap(first.mesh, "expert")
    two = bootstrap(mesh, axis, token_axes=token_axes, max_tokens=2 * TOKENS)
    assert (one.num_ranks, two.num_ranks) == (2, 4)
    params, x = whole_parameters(6), tokens(6, first.devices)

    def apply(_, x):
        y, z = layer(one, first, params, x), x + routed(two, params, x, P(axis))  # independent
        return y + layer(one, first, params, z)

    def reference(_, x):
        return dense_layer(first, params, x) + dense_layer(first, params, dense(params, x))

    step, expected = value_and_grads(apply), value_and_grads(reference)(0.0, x)
    for _ in range(5):
        assert_close(step(0.0, x), expected, SINGLE)
