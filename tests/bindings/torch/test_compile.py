# SPDX-License-Identifier: Apache-2.0
"""Ops and compiled programs: the schemas tell the truth, and nothing breaks the graph."""

from __future__ import annotations

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


def layer(handle, x, idx, weights):
    received = ep.dispatch(handle, x, idx, weights)
    rows = torch.sin(received.tokens)
    out = ep.combine(handle, received.plan, rows, received.topk_weights, bias=(x, torch.cos(x)))
    return out, received.plan.totals


def op_cases():
    names = ["prepare", "dispatch", "combine", "combine_backward", "dispatch_backward"]
    return [*names, "dispatch_routed", "prepare_new", "dispatch_new", "combine_new"]


@pytest.mark.parametrize("name", op_cases())
def test_opcheck(alone, name):
    is_routed = name == "dispatch_routed"
    group = alone(mode=libep.Mode.LATENCY if is_routed else libep.Mode.THROUGHPUT)
    handle = ep.Handle(group, zero_tail=libep.Tail.ZERO)
    x, idx, weights = inputs(group, grad=False)
    rows, key = handle.capacity, handle.key

    def zeros(*shape, **options):
        return torch.zeros(*shape, device=group.device, **options)

    block, numbers = zeros(handle.plan_bytes, dtype=torch.uint8), zeros(handle.num_numbers).int()
    recv, recv_weights = zeros(rows, 16), zeros(rows)
    plan = block if is_routed else ep.prepare(handle, idx).bytes
    arguments = {
        "prepare": (key, idx, None, block, numbers),
        "dispatch": (key, plan, x, weights, None, recv, recv_weights, None, None),
        "dispatch_routed": (
            *(key, idx, None, x, weights, None, block, numbers),
            *(recv, recv_weights, None, None),
        ),
        "prepare_new": (key, idx, None),
        "dispatch_new": (key, plan, x, weights, rows),
        "combine_new": (key, plan, recv + 1, recv_weights + 1, x, None, 7),
        "combine": (key, plan, recv + 1, recv_weights + 1, None, None, x, zeros(7, 16)),
        "combine_backward": (*(key, plan, x, recv_weights + 1, recv + 1, recv, recv_weights),),
        "dispatch_backward": (key, plan, recv + 1, recv_weights + 1, zeros(7, 16), zeros(7, 2)),
    }
    # A plan has the number of the operation that wrote it: two calls do not give the same bytes.
    utils = ("test_schema", "test_faketensor") if name == "prepare_new" else None
    op = getattr(torch.ops.libep, name).default
    torch.library.opcheck(op, arguments[name], **({"test_utils": utils} if utils else {}))


def test_ops_write_into_given_outputs(alone):
    group = alone()
    handle = ep.Handle(group)
    x, idx, weights = inputs(group, grad=False)
    plan = ep.prepare(handle, idx)
    recv = torch.full((handle.capacity, 16), 9.0, device=group.device)
    recv_weights = recv[:, 0].clone()
    out = torch.full_like(x, 9)
    before = recv.data_ptr(), recv._version
    torch.ops.libep.dispatch(
        handle.key, plan.bytes, x, weights, None, recv, recv_weights, None, None
    )
    assert recv.data_ptr() == before[0]
    torch.ops.libep.combine(handle.key, plan.bytes, recv, recv_weights, None, None, None, out)
    assert_close(out, x * weights.sum(1, keepdim=True), 1e-6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_fullgraph(alone, backend):
    """Forward and backward of a compiled layer, and other numbers of tokens."""
    group = alone()
    handle = ep.Handle(group)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for tokens in (7, 5, 8):
        got, wanted = inputs(group, tokens), inputs(group, tokens)
        y, totals = compiled(handle, *got)
        expected, expected_totals = layer(handle, *wanted)
        assert_equal(totals, expected_totals)
        assert_close(y, expected, 1e-6)
        grad = torch.cos(torch.arange(y.numel(), device=y.device)).view_as(y)
        y.backward(grad)
        expected.backward(grad)
        assert_close(got[0].grad, wanted[0].grad, 1e-6)
        assert_close(got[2].grad, wanted[2].grad, 1e-6)


def test_inductor(alone):
    group = alone()
    handle = ep.Handle(group)

    # Without arithmetic of its own, so that no kernel is compiled.
    def echo(x, idx, weights):
        received = ep.dispatch(handle, x, idx, weights)
        return ep.combine(handle, received.plan, received.tokens, received.topk_weights)

    got, wanted = inputs(group), inputs(group)
    y, expected = torch.compile(echo, fullgraph=True)(*got), echo(*wanted)
    assert_equal(y, expected.detach())
    y.backward(torch.ones_like(y))
    expected.backward(torch.ones_like(y))
    assert_equal(got[0].grad, wanted[0].grad)
    assert_equal(got[2].grad, wanted[2].grad)


def test_exact_sizes_in_a_graph(alone):
    """The number of rows is data, and another one in the next step."""
    group = alone(max_recv_rows=0)
    handle = ep.Handle(group)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for divisor in (100, 3, 1):
        got, wanted = inputs(group), inputs(group)
        idx = torch.where(got[1] % divisor == 0, -1, got[1])
        y, totals = compiled(handle, got[0], idx, got[2])
        expected, expected_totals = layer(handle, wanted[0], idx, wanted[2])
        assert_equal(y, expected)
        assert_equal(totals, expected_totals)
        y.sum().backward()
        expected.sum().backward()
        assert_equal(got[0].grad, wanted[0].grad)
        assert_equal(got[2].grad, wanted[2].grad)


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


@pytest.mark.parametrize("number", [-1, 1 << 30])
def test_numbers_that_prepare_has_not_written(alone, number):
    """What failed on the device may have left anything there: no memory is made for such rows."""

    def spoiled(handle, x, idx):
        plan = ep.prepare(handle, idx)
        plan.numbers.fill_(number)
        return 2 * ep.dispatch(handle, x, plan).tokens

    group = alone(max_recv_rows=0)
    x, idx, _ = inputs(group, grad=False)
    compiled = torch.compile(spoiled, fullgraph=True)
    with refused("NOT_PREPARED that prepare has written"):
        compiled(ep.Handle(group), x, idx)


def test_latency_mode(alone):
    group = alone(mode=libep.Mode.LATENCY)
    handle = ep.Handle(group)
    x, idx, weights = inputs(group, grad=False)
    y, _ = torch.compile(layer, fullgraph=True, backend="aot_eager")(handle, x, idx, weights)
    expected = torch.sin(x) * weights.sum(1, keepdim=True) + x + torch.cos(x)
    assert_close(y, expected, 1e-6)


def test_a_handle_that_is_gone(alone):
    group = alone()
    handle = ep.Handle(group)
    x, idx, weights = inputs(group, grad=False)
    plan, key, rows = ep.prepare(handle, idx), handle.key, handle.capacity
    del handle
    gc.collect()
    with refused("DESTROYED is gone"):
        torch.ops.libep.combine(key, plan.bytes, x.new_empty(rows, 16), *[None] * 4, x)
