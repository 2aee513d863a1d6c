# SPDX-License-Identifier: Apache-2.0
"""libep.jax.moe against a dense layer on one device, what it keeps, and what it refuses."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from base import refused
from conftest import DEVICE, EXPERTS, HIDDEN, TOKENS, TOP_K, assert_close, make_mesh, tokens
from conftest import value_and_grads
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import choose_experts

import libep.jax
from libep._layer import Routing
from libep.jax import _products

INNER = 24
V3 = dict(scores="sigmoid", num_groups=4, top_groups=2, normalise=True, scale=2.5)
MOST = dict(biases=True, expert_bias=True, shared=40)
named = jax.checkpoint_policies.save_only_these_names("libep_dispatch")
WRAPPERS = {  # a policy, and how often backward dispatches again
    "plain": (lambda layer: layer, 0),
    "nothing": (jax.checkpoint, 1),
    "named": (functools.partial(jax.checkpoint, policy=named), 0),
    "dots": (functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable), 1),
    "all": (functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable), 0),
}  # fmt: skip


def mlp(x, both, down, bias=(0, 0)):
    gate, up = jnp.split(x @ both + bias[0], 2, -1)
    return (gate * jax.nn.sigmoid(gate) * up) @ down + bias[1]


def choose(routing, is_biased, choice):
    return np.array([choose_experts(row, routing, is_biased) for row in choice.tolist()], np.int32)


def dense(routing, params, x):
    """Every expert computes every token. In float32."""
    p = jax.tree.map(lambda array: array.astype(jnp.float32), params)
    x, bias = x.astype(jnp.float32), p.get("expert_bias", 0)
    scores = jax.nn.sigmoid if routing.scores == "sigmoid" else jax.nn.softmax
    scores = scores(x @ p["router"])
    kind = jax.ShapeDtypeStruct((len(x), TOP_K), jnp.int32)
    find = functools.partial(choose, routing, "expert_bias" in p)
    idx = jax.pure_callback(find, kind, jax.lax.stop_gradient(scores + bias))
    weights = jnp.take_along_axis(scores, idx, -1)
    weights = weights / weights.sum(-1, keepdims=True) if routing.normalise else weights
    out = mlp(x, p["shared_gate_up"], p["shared_down"]) if "shared_down" in p else 0
    for e in range(EXPERTS):
        bias = (p["gate_up_bias"][e], p["down_bias"][e]) if "down_bias" in p else (0, 0)
        gate = routing.scale * (weights * (idx == e)).sum(-1, keepdims=True)
        out = out + gate * mlp(x, p["gate_up"][e], p["down"][e], bias)
    return out


def make_parameters(ep, dtype=jnp.float32, **options):
    """All of them other than zero."""
    made = libep.jax.moe_parameters(jax.random.key(3), ep, HIDDEN, INNER, dtype=dtype, **options)
    keys = iter(jax.random.split(jax.random.key(4), len(made)))
    return {n: v + jax.random.normal(next(keys), v.shape, v.dtype) * ("bias" in n)
            for n, v in made.items()}  # fmt: skip


def as_batches(layer, params, x):
    """The layer of tokens as [B, S, H], a batch for each two devices or less."""
    return layer(params, x.reshape(-1, TOKENS // 2, x.shape[-1])).reshape(x.shape)


FORMS = [({}, {}), (dict(V3, is_early=True), MOST), (dict(V3), MOST),
         (dict(is_early=True, normalise=True), dict(shared=40))]  # fmt: skip
CASES = [(1, "plain", "float32", False, 1), (2, "plain", "bfloat16", True, 1),
         (4, "plain", "float32", False, 2), (4, "plain", "bfloat16", False, 1)]  # fmt: skip
CASES += [(2, wrap, "float32", form != 1, form) for wrap in WRAPPERS for form in (1, 3)]
CASES += [(4, "nothing", "bfloat16", True, 0), (4, "named", "float32", True, 0)]


@pytest.mark.parametrize("size, wrap, dtype, is_inside, form", CASES)
def test_layer(bootstrap, capsys, size, wrap, dtype, is_inside, form):
    (options, fields), dtype = FORMS[form], jnp.dtype(dtype)
    mesh, (wrapper, again) = make_mesh(size), WRAPPERS[wrap]
    ep = bootstrap(mesh, **(dict(capacity_factor=2.7) if wrap == "named" else {}))
    params, x = make_parameters(ep, dtype, **fields), tokens(7, size, dtype)
    layer = wrapper(functools.partial(libep.jax.moe, ep, **options))
    layer = functools.partial(as_batches, layer) if wrap == "all" else layer
    if is_inside:
        split = {n: P("ep") if v.ndim == 3 or n[-4:] == "bias" and v.ndim == 2 else P()
                 for n, v in params.items()}  # fmt: skip
        layer = jax.shard_map(layer, mesh=mesh, in_specs=(split, P("ep")), out_specs=P("ep"))
    routing = Routing(EXPERTS, TOP_K, **{n: v for n, v in options.items() if n != "is_early"})
    reference = functools.partial(dense, routing)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    step = value_and_grads(layer)
    ((_, y), grads), ((_, dense_y), dense_grads) = (
        run(params, x) for run in (step, value_and_grads(reference))
    )
    assert_close((y, grads), (dense_y, dense_grads), tolerance)
    ep.check()
    text = str(jax.make_jaxpr(step)(params, x))
    calls = {name: len(re.findall(rf"= ep_{name}\b", text)) for name in (
        "prepare", "dispatch", "dispatch_again", "combine")}  # fmt: skip
    assert calls == dict(prepare=1, dispatch=1, dispatch_again=again, combine=1)
    if wrap in ("nothing", "named"):  # receive rows are kept where a policy names them
        capsys.readouterr()
        jax.ad_checkpoint.print_saved_residuals(layer, params, x)
        rows = ep.max_recv_rows
        kept = re.findall(rf"\[({rows}|{size * rows})[],]", capsys.readouterr().out)
        assert len(kept) == (2 if wrap == "named" else 0)


def test_fsdp(bootstrap):
    """Parameters of the experts in shards along another axis, and the same gradients."""
    mesh = make_mesh(2, 2, names=("fsdp", "ep"))
    ep = bootstrap(mesh, dtype=jnp.float32)
    params, x = make_parameters(ep, biases=True), tokens(7, 4)
    specs = dict(gate_up=P("ep", "fsdp"), down=P("ep", None, "fsdp"), down_bias=P("ep", "fsdp"))
    place = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))  # noqa: E731
    placed = {name: place(value, specs.get(name, P())) for name, value in params.items()}
    layer = functools.partial(libep.jax.moe, ep, specs=specs)
    reference = functools.partial(dense, Routing(EXPERTS, TOP_K))
    got = value_and_grads(layer)(placed, place(x, P(("fsdp", "ep"))))
    assert_close(got, value_and_grads(reference)(params, x), 1e-5)


@pytest.mark.parametrize("block", [64, 128])
def test_kernels(block):
    """The products for GPUs, on CPUs interpreted: an expert without rows, and rows behind the last
    slab."""
    sizes = jnp.array([2, 0, 1, 3], jnp.int32) * block
    used, generator = 6 * block, np.random.default_rng(block)
    rows, grads = (jnp.asarray(generator.standard_normal((8 * block, n)), jnp.bfloat16)
                   for n in (256, 384))  # fmt: skip
    weights = jnp.asarray(generator.standard_normal((4, 256, 384)), jnp.bfloat16)
    dots = (lambda r, w: _products.grouped_dot(r, w, sizes, block, DEVICE == "cpu"),
            lambda r, w: jax.lax.ragged_dot(r, w, sizes))  # fmt: skip
    (y, pull), (expected, pull_expected) = (jax.vjp(dot, rows, weights) for dot in dots)
    nothing = grads.at[used:].set(0)
    assert_close(y[:used], expected[:used], 1e-2)
    got, wanted = pull(grads), pull_expected(nothing)
    assert_close([got[0][:used], got[1]], [wanted[0][:used], wanted[1]], 1e-2)


def refuse(change, **options):
    """A call with other parameters."""

    def call(ep):
        params = change(make_parameters(ep, biases=True))
        libep.jax.moe(ep, params, jnp.zeros((2 * TOKENS, HIDDEN)), **options)

    return call


REFUSED = [
    (lambda p: p.pop("down_bias") is None or p,
     "SHAPE moe: biases: expected all of gate_up_bias, down_bias, or none, got gate_up_bias alone"),
    (lambda p: dict(p, expert_bias=jnp.zeros(7)),
     r"SHAPE moe: expert_bias: expected \[8\], got \[7\]"),
    (lambda p: dict(p, down=p["down"][:, 1:]),
     r"SHAPE moe: gate_up: expected \[4, 16, 46\], got \[4, 16, 48\]"),
    (lambda p: dict(p, router=p["router"][1:]),
     r"SHAPE moe: router: expected \[16, 8\], got \[15, 8\]"),
    (lambda p: dict(p, gate=p["down"]), "RANGE moe: parameters: expected names of .*, got 'gate'"),
    (lambda p: {"router": p["router"]},
     "SHAPE moe: parameters: expected router, .*, got no gate_up"),
    (lambda p: dict(p, router=1), "TYPE moe: router: expected an array, got int"),
]  # fmt: skip


@pytest.mark.parametrize("change, sentence", REFUSED, ids=lambda each: str(each)[:30])
def test_refused(bootstrap, change, sentence):
    ep = bootstrap(make_mesh(2))
    with refused(sentence):
        refuse(change)(ep)


def test_refused_routing(bootstrap):
    """As in PyTorch, whose test has all of these; and the capacity of bootstrap."""
    with refused("TOP_K moe: top_k: expected 1 .. 2, the experts of 1 groups, got 3"):
        refuse(dict, num_groups=4)(bootstrap(make_mesh(2)))
    with refused("UNSUPPORTED moe: quant of the Ep: expected NONE, .*, got FP8"):
        refuse(dict)(bootstrap(make_mesh(2), quant="fp8"))
    with refused("RANGE moe: capacity_factor: expected at least 1 with Overflow.ERROR"):
        bootstrap(make_mesh(1), capacity_factor=0.9)
    with refused("UNSUPPORTED bootstrap: capacity_factor: expected none, with max_recv_rows"):
        bootstrap(make_mesh(1), capacity_factor=1.0, max_recv_rows=5)
