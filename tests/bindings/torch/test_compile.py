# SPDX-License-Identifier: Apache-2.0
"""Ops and compiled programs: the schemas tell the truth, and nothing breaks the graph."""

import functools
import gc

import pytest
import torch
from base import refused
from conftest import assert_close, assert_equal
from torch.fx.experimental.proxy_tensor import make_fx

import libep
import libep.torch as ep


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(group, tokens=7, grad=True):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, 16, generator=generator).to(group.device)
    idx = torch.rand(tokens, 6, generator=generator).argsort(1)[:, :2].contiguous().to(group.device)
    weights = torch.rand(tokens, 2, generator=generator).to(group.device)
    return x.requires_grad_(grad), idx, weights.requires_grad_(grad)


def echo(rows):
    return rows


def layer(handle, x, idx, weights, experts=torch.sin, is_biased=True):
    received = ep.dispatch(handle, x, idx, weights)
    rows, bias = experts(received.tokens), (x, experts(x)) if is_biased else None
    out = ep.combine(handle, received.plan, rows, received.topk_weights, bias=bias)
    return out, received.plan.totals


NEW = ["prepare_new", "dispatch_new", "combine_new"]
GIVEN = ["prepare", "dispatch", "combine", "combine_backward", "dispatch_backward"]


@pytest.mark.parametrize("name", [*GIVEN, "dispatch_routed", *NEW])
def test_opcheck(alone, name):
    is_routed = name == "dispatch_routed"
    group = alone(mode="latency" if is_routed else "throughput")
    handle = ep.Handle(group, zero_tail=libep.Tail.ZERO)
    x, idx, weights = inputs(group, grad=False)
    rows, key = handle.capacity, handle.key

    def zeros(*shape, **options):
        return torch.zeros(*shape, device=group.device, **options)

    block, numbers = zeros(handle.plan_bytes, dtype=torch.uint8), zeros(handle.num_numbers).int()
    recv, recv_w = zeros(rows, 16), zeros(rows)
    plan = block if is_routed else ep.prepare(handle, idx).bytes
    routed = key, idx, None, x, weights, None, block, numbers, recv, recv_w, None, None
    arguments = {
        "prepare": (key, idx, None, block, numbers),
        "dispatch": (key, plan, x, weights, None, recv, recv_w, None, None),
        "dispatch_routed": routed,
        "prepare_new": (key, idx, None),
        "dispatch_new": (key, plan, x, weights, rows),
        "combine_new": (key, plan, recv + 1, recv_w + 1, x, None, 7),
        "combine": (
            *(key, plan, recv + 1, recv_w + 1, None, None, x, zeros(7, 16)),
            *(None, *zeros(4, 1).long()),
        ),
        "combine_backward": (key, plan, x, recv_w + 1, recv + 1, recv, recv_w),
        "dispatch_backward": (key, plan, recv + 1, recv_w + 1, zeros(7, 16), zeros(7, 2)),
    }
    # A plan has the number of the operation that wrote it: two calls do not give the same bytes.
    utils = ("test_schema", "test_faketensor") if name == "prepare_new" else None
    op = getattr(torch.ops.libep, name).default
    torch.library.opcheck(op, arguments[name], **({"test_utils": utils} if utils else {}))


def check_compiled(handle, compiled, plain, tokens=7, divisor=100):
    """Results and gradients of a compiled layer equal those of the plain one."""
    results = []
    for call in compiled, plain:
        x, idx, weights = inputs(handle.group, tokens)
        y, totals = call(handle, x, torch.where(idx % divisor == 0, -1, idx), weights)
        y.backward(torch.cos(torch.arange(y.numel(), device=y.device)).view_as(y))
        results.append((y.detach(), totals, x.grad, weights.grad))
    for got, expected in zip(*results):
        assert_close(got, expected, 1e-6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_counters(alone, backend):
    """A compiled program adds to them, and reads them afterwards."""
    group = alone()
    handle = ep.Handle(group)
    counters = ep.Counters.zeros(handle)
    x, idx, weights = inputs(group)

    def counted(*given):
        received = ep.dispatch(handle, *given, counters=counters)
        rows, weights = torch.sin(received.tokens), received.topk_weights
        biases, counts = (given[0], torch.sin(given[0])), counters.without_experts
        out = ep.combine(handle, received.plan, rows, weights, bias=biases, counters=counts)
        return out, counters.peer_rows.clone()

    compiled = torch.compile(counted, fullgraph=True, backend=backend)
    for step in (1, 2):
        out, rows = compiled(x, idx, weights)
        out.sum().backward()
        assert rows.tolist() == [14 * step] and counters.expert_tokens.sum() == 14 * step
    wanted = inputs(group)
    expected = layer(handle, *wanted)[0]
    expected.sum().backward()
    assert_close(out, expected, 1e-6)
    assert_close(x.grad, 2 * wanted[0].grad, 1e-6)


@pytest.mark.parametrize("experts", [torch.sin, echo])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_fullgraph(alone, backend, experts):
    """Forward and backward of a compiled layer, and other numbers of tokens. With echo both biases
    are one tensor."""
    handle, plain = ep.Handle(alone()), functools.partial(layer, experts=experts)
    compiled = torch.compile(plain, fullgraph=True, backend=backend)
    for tokens in (7, 5, 8):
        check_compiled(handle, compiled, plain, tokens)


def test_inductor(alone):
    """Without arithmetic beside the operations, so that no kernel is compiled."""
    plain = functools.partial(layer, experts=echo, is_biased=False)
    check_compiled(ep.Handle(alone()), torch.compile(plain, fullgraph=True), plain)


def test_exact_sizes_in_a_graph(alone):
    """The number of rows is data, and another one in the next step."""
    handle = ep.Handle(alone(max_recv_rows=0))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for divisor in (100, 3, 1):
        check_compiled(handle, compiled, layer, divisor=divisor)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("rows", [0, None])
def test_make_fx(alone, mode, rows):
    """Programs that are traced without torch.compile; exact sizes are data there, too."""
    handle = ep.Handle(alone(max_recv_rows=rows))
    x, idx, weights = inputs(handle.group, grad=False)

    def step(x, idx, weights):
        return layer(handle, x, idx, weights)[0]

    traced = make_fx(step, tracing_mode=mode)(x, idx, weights)
    idx = idx if mode == "real" else torch.where(idx == 0, -1, idx)
    assert_equal(traced(x, idx, weights), step(x, idx, weights))


def test_latency_mode(alone):
    group = alone(mode="latency")
    x, idx, weights = inputs(group, grad=False)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, _ = compiled(ep.Handle(group), x, idx, weights)
    assert_close(y, torch.sin(x) * (1 + weights.sum(1, keepdim=True)) + x, 1e-6)


def test_a_handle_that_is_gone(alone):
    group = alone()
    handle, (x, idx, _) = ep.Handle(group), inputs(group, grad=False)
    plan, key, rows = ep.prepare(handle, idx), handle.key, handle.capacity
    del handle
    gc.collect()
    with refused("DESTROYED is gone"):
        torch.ops.libep.combine(key, plan.bytes, x.new_empty(rows, 16), *[None] * 4, x)
