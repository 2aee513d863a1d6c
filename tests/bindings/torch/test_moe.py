# SPDX-License-Identifier: Apache-2.0
"""libep.torch.MoE against a dense layer that has all experts, what it refuses, and the example."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys

import pytest
import torch
from base import refused
from conftest import BACKEND, DEVICE, EXAMPLES, assert_close, assert_equal, make_group, run_threads
from reference import choose_experts
from torch.utils.checkpoint import checkpoint

import libep
import libep.torch as ep
from libep import Quant
from libep._formats import FORMATS

EXPERTS, TOKENS, HIDDEN, INNER = 8, 21, 80, 72
SIZES = dict(num_experts=EXPERTS, max_tokens=TOKENS, hidden=HIDDEN, top_k=3)
V3 = dict(scores="sigmoid", num_groups=4, top_groups=2, normalise=True, scale=2.5)
MOST = dict(expert_bias=True, biases=True, shared=40)


def mlp(x, both, down, bias=(0, 0), quant=Quant.NONE, early=1, late=1):
    """early, late: [T, 1] weights of the rows before or after the last matrix."""
    gate, up = (x @ both + bias[0]).chunk(2, -1)
    middle = rounded(gate * torch.sigmoid(gate) * up * early, quant)
    return late * (middle @ down + early * bias[1])


def rounded(x, quant, tiles=False):
    """x as it is after quantising, with the gradient of x. tiles: those of a matrix, or MXFP8's
    blocks along its first dimension."""
    if quant == Quant.NONE:
        return x
    if tiles and quant == Quant.MXFP8:
        return rounded(x.mT, quant).mT
    given = x.detach()
    if tiles:
        high, wide = (n // 128 for n in x.shape[-2:])
        given = given.unflatten(-2, (high, 128)).unflatten(-1, (wide, 128)).transpose(-2, -3)
        given = given.flatten(-2)
    block = given.shape[-1] if tiles else FORMATS[quant].block
    amax = given.abs().unflatten(-1, (-1, block)).amax(-1)
    scale = amax.clamp(min=2.0**-100) / 448
    if quant != Quant.FP8:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    scale = scale.repeat_interleave(given.shape[-1] // scale.shape[-1], -1)
    given = (given / scale).to(torch.float8_e4m3fn).float() * scale
    if tiles:
        given = given.unflatten(-1, (128, 128)).transpose(-2, -3).flatten(-2).flatten(-3, -2)
    return x + (given - x.detach())


def dense(p, x, routing, quant=Quant.NONE, is_early=False):
    """Every expert computes every token. In float32."""
    gates = []
    bias = p.get("expert_bias")
    for logits in x @ p["router"].t():
        scores = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(-1)
        choice = scores if bias is None else scores + bias
        chosen = choose_experts(choice.tolist(), routing, bias is not None)
        weights = scores[chosen] / (scores[chosen].sum() if routing.normalise else 1)
        gates.append(torch.zeros(EXPERTS).index_put((torch.tensor(chosen),), weights))
    gates = (routing.scale * torch.stack(gates)).t()[..., None]
    weights = [gates, torch.ones(EXPERTS)] if is_early else [torch.ones(EXPERTS), gates]
    biases = zip(p["gate_up_bias"], p["down_bias"]) if "down_bias" in p else [(0, 0)] * EXPERTS
    matrices = (rounded(p[name], quant, tiles=True) for name in ("gate_up", "down"))
    given = zip(*matrices, biases, [quant] * EXPERTS, *weights)
    out = sum(mlp(rounded(x, quant), *each) for each in given)
    return out + mlp(x, p["shared_gate_up"], p["shared_down"]) if "shared_down" in p else out


def parameters(seed, layer):
    """Parameters of all ranks, of the layer's names and type, and the expert bias."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, value in layer.state_dict().items():
        shape = (EXPERTS, *value.shape[1:]) if name in layer.LOCAL else value.shape
        given = torch.randn(shape, generator=generator)
        scale = 1 if "bias" in name else shape[-1 if name == "router" else -2] ** -0.5
        made[name] = (given * scale).to(value.dtype)
    return made


def kept(*names):
    return lambda layer, x: checkpoint(layer, x, use_reentrant=False, context_fn=ep.keep(*names))


APPLY = {"plain": lambda layer, x: layer(x), "plans": kept(), "all": kept("dispatch", "combine")}


@pytest.mark.parametrize(
    "size, apply", [(1, "plain"), (4, "plain"), *[(2, name) for name in APPLY]]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [
    {}, dict(V3, **MOST), dict(V3, **MOST, is_early=True), dict(V3, capacity_factor=6.0),
    dict(is_early=True, shared=40, normalise=True),
])  # fmt: skip
def test_layer(seed, dtype, size, apply, options):
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    generator = torch.Generator().manual_seed(seed)
    xs, grads = torch.randn(2, size, TOKENS, HIDDEN, generator=generator).to(dtype)

    def body(bootstrap):
        rank = bootstrap.rank
        with make_group(bootstrap, **SIZES, dtype=dtype) as group:
            layer = ep.MoE(group, HIDDEN, INNER, dtype=dtype, **options)
            whole = parameters(seed, layer)
            mine = slice(group.first_expert, group.first_expert + group.num_local_experts)
            local = {n: v[mine] if n in layer.LOCAL else v for n, v in whole.items()}
            layer.load_state_dict(local)
            x = xs[rank].to(DEVICE).requires_grad_()
            shaped = x.view(1, TOKENS, HIDDEN) if rank else x
            y = APPLY[apply](layer, shaped)
            y.backward(grads[rank].to(DEVICE).view_as(y))
            assert y.shape == shaped.shape and group.status().status == libep.Status.OK
            made = dict({n: p.grad for n, p in layer.named_parameters()}, y=y[0] if rank else y)
            return layer.routing, whole, mine, dict(made, x=x.grad)

    got = run_threads(size, body)
    routing, whole = got[0][:2]
    given = {n: v.float().requires_grad_(n != "expert_bias") for n, v in whole.items()}
    x = xs.float().flatten(0, 1).requires_grad_()
    y = dense(given, x, routing)
    y.backward(grads.float().flatten(0, 1))
    for rank, (*_, mine, made) in enumerate(got):
        part = slice(rank * TOKENS, (rank + 1) * TOKENS)
        assert_close(made["y"], y[part], tolerance)
        assert_close(made["x"], x.grad[part], tolerance)
        for name in set(made) & set(ep.MoE.LOCAL):
            assert_close(made[name], given[name].grad[mine], tolerance)
    for name in set(made) & set(given) - set(ep.MoE.LOCAL):
        total = sum(made[name].double().cpu() for *_, made in got)
        assert_close(total, given[name].grad, tolerance)


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("quant", ["none", "fp8", "fp8_pow2", "mxfp8"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_quantised(seed, quant, is_sharded, is_early):
    """Rows and weights that are quantised, these resident or in shards over fsdp: the dense layer
    rounds what they round. GPUs multiply e4m3 where they can."""
    hidden, inner, kind = 256, 128, Quant[quant.upper()]
    multiplies = DEVICE == "cuda" and kind in (Quant.FP8, Quant.FP8_POW2)
    dtype = torch.bfloat16 if multiplies else torch.float32
    generator = torch.Generator().manual_seed(seed)
    xs, grads = torch.randn(2, 4, TOKENS, hidden, generator=generator).to(dtype)
    mesh = libep.Mesh("fsdp=2,expert=2" if is_sharded else "expert=4")

    def body(world):
        sizes = dict(SIZES, hidden=hidden, max_scale_bytes=64, dtype=dtype)
        with libep.MeshComm(world, mesh, backend=BACKEND) as comm, mesh.bootstrap(
            world, "expert"
        ) as meeting, make_group(meeting, **sizes) as group:
            options = dict(quant=quant, dequantise=not multiplies, dtype=dtype, is_early=is_early)
            options["comm"] = comm if is_sharded else None
            layer = ep.MoE(group, hidden, inner, biases=True, **options)
            whole = parameters(seed, ep.MoE(group, hidden, inner, biases=True, dtype=dtype))
            mine = {n: slice(None) for n in whole}
            for name in layer.LOCAL:
                spec = ["expert", *(["fsdp"] if is_sharded else [])]
                shape = whole[name].shape
                part = mesh.shard(spec + [None] * (len(shape) - len(spec)), shape, world.rank)
                mine[name] = tuple(slice(b, b + n) for b, n in zip(part.begin, part.shape))
            layer.load_state_dict({n: whole[n][mine[n]] for n in whole})
            x = xs[world.rank].to(group.device).requires_grad_()
            layer = copy.deepcopy(layer)  # which shares what is not its parameters
            y = layer(x)
            y.backward(grads[world.rank].to(group.device))
            if is_sharded:
                down, largest = layer.weights["down"], whole["down"].float().abs().amax((1, 2))
                amax = down.max_(layer.down.detach().float().abs().amax((1, 2)), per_expert=True)
                assert_equal(amax, largest[mine["down"][0]])
                with refused("SHAPE down: expected a shard of .*, got"):
                    down.whole(x)
            made = {n: p.grad for n, p in layer.named_parameters()}
            return layer.routing, whole, mine, dict(made, x=x.grad, y=y)

    got = run_threads(4, body)
    given = {n: v.float().requires_grad_() for n, v in got[0][1].items()}
    x = xs.float().flatten(0, 1).requires_grad_()
    y = dense(given, x, got[0][0], kind, is_early)
    y.backward(grads.float().flatten(0, 1))
    # Sums of another order now and then become the neighbour of e4m3. Half of the elements see none
    # of that, unless a GPU rounds gradients, too.
    tolerance, typical = (1e-5, 1e-5) if kind == Quant.NONE else (8e-2, 8e-2 if multiplies else 1e-5)
    for rank, (_, _, mine, made) in enumerate(got):
        part = slice(rank * TOKENS, (rank + 1) * TOKENS)
        pairs = [(made["y"], y[part]), (made["x"], x.grad[part])]
        for name in ep.MoE.LOCAL[: 4 if "gate_up_bias" in made else 2]:
            pairs.append((made[name], given[name].grad[mine[name]]))
        for each in pairs:
            assert_close(*each, tolerance)
            assert_close(*each, typical, quantile=0.5)


def broken(name, shape):
    """A layer with another parameter."""

    def make(group, **options):
        layer = ep.MoE(group, HIDDEN, INNER, **options)
        value = None if shape is None else torch.nn.Parameter(torch.zeros(shape))
        setattr(layer, name, value)
        return layer(torch.zeros(3, HIDDEN))

    return make


REFUSED = [
    (dict(biases=True), "SHAPE moe: biases: expected all of .*, or none, got gate_up_bias alone",
     broken("down_bias", None)),
    (dict(expert_bias=True), r"SHAPE moe: expert_bias: expected \[8\], got \[7\]",
     broken("expert_bias", 7)),
    ({}, r"SHAPE moe: down: expected \[8, 72, 80\], got \[8, 71, 80\]",
     broken("down", (8, 71, 80))),
    ({}, r"SHAPE moe: x: expected \[T, 80\] or \[B, S, 80\], got \[80\]",
     lambda group: ep.MoE(group, HIDDEN, INNER)(torch.zeros(HIDDEN))),
    ({}, "RANGE keep: names: expected 'dispatch' or 'combine', got 'rows'",
     lambda group: ep.keep("rows")),
    (dict(capacity_factor=0.9), "RANGE moe: capacity_factor: expected at least 1 with Overflow"),
    (dict(capacity_factor=0.0), "RANGE moe: capacity_factor: expected a positive number, got 0"),
    (dict(quant="fp8"), "RANGE moe: max_scale_bytes of the group: expected at least 4, got 0",
     lambda group, **given: ep.MoE(group, 128, 128, **given)),
    (dict(quant="fp8"), "SHAPE moe: hidden: expected a multiple of 128, the block of FP8, got 80"),
    (dict(quant="mxfp8"), "SHAPE moe: hidden: expected a multiple of 32, .* of MXFP8, got 80"),
    (dict(quant="fp8"), "SHAPE moe: inner: expected a multiple of 128, the block of FP8, got 72",
     lambda group, **given: ep.MoE(group, 128, INNER, **given)),
    (dict(scores="tanh"), "RANGE moe: scores: expected softmax or sigmoid, got 'tanh'"),
    (dict(num_groups=3), "RANGE moe: num_groups: expected a divisor of the 8 experts, got 3"),
    (dict(num_groups=4, top_groups=5), "RANGE moe: top_groups: expected 1 .. 4 .*, got 5"),
    (dict(top_k=9), "TOP_K moe: top_k: expected 1 .. 8, got 9"),
    ({}, r"ROW_BYTES moe: dtype: expected rows of at most \d+ bytes, as those of the group, got 4096",
     lambda group: ep.MoE(group, 4096, INNER)),
    (dict(num_groups=4), "TOP_K moe: top_k: expected 1 .. 2, the experts of 1 groups, got 3"),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row[1].split(",")[0])
def test_refused(alone, row):
    options, sentence, *make = row
    with refused(sentence):
        (make or [lambda group, **given: ep.MoE(group, HIDDEN, INNER, **given)])[0](
            alone(**SIZES), **options
        )


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU multiplies some of these")
@pytest.mark.parametrize("quant", ["fp8", "fp8_pow2", "fp8_ue8m0", "mxfp8"])
def test_quantised_where_nothing_multiplies_it(alone, quant):
    sentence = f"UNSUPPORTED moe: quant: expected FP8 .* got {quant.upper()} with .*32 on cpu"
    with refused(sentence):
        ep.MoE(alone(**SIZES, max_scale_bytes=64), 128, 128, quant=quant)


def test_layers_of_other_shapes():
    """Ranks whose rows differ in length are told so, each of them."""

    def body(bootstrap):
        hidden = 16 * (1 + bootstrap.rank)
        with make_group(bootstrap, num_experts=4, hidden=32, top_k=2) as group:
            layer = ep.MoE(group, hidden, 24)
            with refused("EpError dispatch: (row bytes differs|expected the same sizes on all)"):
                layer(torch.zeros(3, hidden, device=group.device))

    run_threads(2, body)


def test_gradients_that_travel_as_fp8(alone):
    """They differ from the others, but by no more than e4m3 rounds."""
    group, found = alone(**SIZES), []
    x = torch.randn(TOKENS, HIDDEN, device=DEVICE)
    layers = [ep.MoE(group, HIDDEN, INNER, is_early=True)]
    layers.append(ep.MoE(group, HIDDEN, INNER, is_early=True, grad_quant="fp8"))
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        given = x.clone().requires_grad_()
        layer(given).square().sum().backward()
        found.append(given.grad)
    error = float((found[0] - found[1]).norm() / found[0].norm())
    assert 1e-4 < error < 0.06, error


def test_capacity_that_drops(alone):
    """With Overflow.DROP a factor below 1 loses rows, and nobody reports it."""
    group = alone(**SIZES)
    layer = ep.MoE(group, HIDDEN, INNER, capacity_factor=0.5, overflow="drop")
    assert layer.handle.capacity == -(-TOKENS * 3 // 2)
    whole = ep.MoE(group, HIDDEN, INNER)
    whole.load_state_dict(layer.state_dict())
    x = torch.randn(TOKENS, HIDDEN, device=DEVICE)
    assert not torch.allclose(layer(x), whole(x))
    assert group.status().status == libep.Status.OK


@pytest.mark.skipif(DEVICE == "cuda", reason="its ranks take GPUs of their own, or CPUs")
def test_program():
    """Trains on two processes, and learns."""
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    done = subprocess.run([*program, os.path.join(EXAMPLES, "moe_torch.py")], env=environment,
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 6 and losses[-1] < losses[0] / 2, done.stdout
