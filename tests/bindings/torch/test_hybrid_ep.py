# SPDX-License-Identifier: Apache-2.0
"""libep.deep_ep.HybridEPBuffer, against the brute-force reference that sees all ranks."""

import copy
import ctypes
import functools
import sys

import numpy as np
import pytest
import torch
from base import refused
from conftest import (
    DEVICE, assert_equal, destroyed, inputs_of, on_device, other_device, refuse_each, strided
)  # fmt: skip
from reference import Received
from test_deep_ep_normal import with_buffer

import libep
from libep.deep_ep import Buffer, HybridEPBuffer
from libep.deep_ep.hybrid_ep_buffer import indices_to_map
from libep.torch import _fast

SIZE, HIDDEN, BOUND = 3, 16, 6
FIELDS = dict(hidden_dim=HIDDEN, max_num_of_tokens_per_rank=BOUND, num_local_experts=2)


def with_hybrid(**sizes):
    return with_buffer(kind=HybridEPBuffer, fields=FIELDS, **sizes)


def prepare(world, rank):
    """The world without experts that a token names twice; the inputs; the routing as a map."""
    world = copy.copy(world)
    world.idx = [idx.copy() for idx in world.idx]
    for idx in world.idx:
        for k in range(1, world.top_k):
            idx[:, k][(idx[:, :k] == idx[:, k : k + 1]).any(1)] = -1
    x, idx, weights = inputs_of(world, rank)
    routing_map, probs = indices_to_map(idx, weights, len(x), world.experts)
    return world, x, dict(routing_map=routing_map, probs=probs)


@pytest.mark.parametrize("pad_multiple", [None, 4])
@pytest.mark.parametrize("non_blocking", [False, True])
@with_hybrid(top_k=3)
def test_step(buffer, rank, world, non_blocking, pad_multiple):
    """Forward and backward equal the dense layer; the rows lie in the order of the experts."""
    world, x, routing = prepare(world, rank)
    options = dict(pad_multiple=pad_multiple, non_blocking=non_blocking)
    if non_blocking:
        options["num_permuted_tokens"] = 96
    rows, probs, scales, counts, handle = buffer.dispatch_with_permute(
        hidden=x, num_of_experts_per_rank=2, **routing, **options
    )
    expected = Received(world, rank, "expert_major", pad_multiple or 1)
    used = len(expected.tokens)
    assert scales is None and len(rows) == len(probs) == (96 if non_blocking else used)
    assert counts.is_cpu or non_blocking
    assert counts.sum().item() == handle[3].item() == used and handle[10].item() == 0
    assert_equal(rows[:used], expected.tokens)
    assert_equal(probs[:used], expected.weights)
    scale = on_device(np.nan_to_num(expected.scale))
    factors = torch.zeros(len(rows), 1, device=rows.device)
    factors[:used, 0] = probs[:used] * scale
    rows = torch.where(factors != 0, rows, 0)
    out, none = buffer.combine_with_unpermute(hidden=rows * factors, handle=handle)
    assert none is None
    assert_equal(out, world.forward(rank))

    again = buffer.dispatch_with_permute(hidden=x, probs=routing["probs"], handle=handle)
    assert_equal(again[1][:used], expected.weights)
    grad = buffer.dispatch_with_permute(
        hidden=on_device(world.grad_out[rank]), handle=handle, num_permuted_tokens=used
    )[0]
    grad = torch.where(factors != 0, grad, 0)
    grad_probs = torch.zeros(len(rows), device=rows.device)
    grad_probs[:used] = (rows * grad).sum(1)[:used] * scale
    grad_x, dense = buffer.combine_with_unpermute(
        hidden=grad * factors, probs=grad_probs, handle=handle
    )
    expected_x, expected_probs = world.backward(rank)
    assert_equal(grad_x, expected_x)
    table = np.zeros((len(x), world.experts), np.float32)
    for t, k, expert in world.entries(rank):
        if world.weights[rank][t, k]:  # rows of weight 0 are left out above
            table[t, expert] = expected_probs[t, k]
    assert_equal(dense, table)


@with_hybrid()
def test_lost_rows(buffer, rank, world):
    """Without a wait rows past num_permuted_tokens are lost, and the handle says so."""
    world, x, routing = prepare(world, rank)
    fixed = dict(num_permuted_tokens=2, non_blocking=True)
    rows, *_, handle = buffer.dispatch_with_permute(hidden=x, **routing, **fixed)
    expected = Received(world, rank, "expert_major").tokens
    assert_equal(rows[: len(expected)], expected[:2])
    assert (handle[-1].item() > 0) == (len(expected) > 2)


@with_hybrid()
def test_steps_that_grow(buffer, rank, world):
    """A step with more tokens than any before makes room, on all ranks."""
    for tokens in (1, BOUND, 1500):
        x = torch.full((tokens, HIDDEN), rank, device=world_device(world, rank)).bfloat16()
        routing = torch.zeros(tokens, world.experts, dtype=torch.bool, device=x.device)
        routing[:, 2 * rank] = True
        rows, probs, _, counts, handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=routing
        )
        assert probs is None and counts.tolist() == [tokens, 0] and torch.equal(rows, x)
        assert torch.equal(buffer.combine_with_unpermute(hidden=rows, handle=handle)[0], x)


def world_device(world, rank):
    return inputs_of(world, rank)[0].device


@with_hybrid(tokens=[4, 5, 6])
def test_refusals(buffer, rank, world):
    """Before the first operation. Then the buffer works as before."""
    world, x, routing = prepare(world, rank)
    send, far = buffer.dispatch_with_permute, other_device()
    good = dict(hidden=x, **routing)
    with destroyed(HybridEPBuffer(buffer.group, **FIELDS)) as other:
        foreign = other.dispatch_with_permute(**good)[-1]
        if rank == 0:
            bad = dict(
                hidden=[x[0], x[1:], x[:, :3], x.to(far), None],
                routing_map=[routing["probs"], routing["routing_map"][1:], 3],
                probs=[routing["probs"].double(), routing["probs"][:, 1:]],
                pad_multiple=[3, -1],
                handle=[(), foreign],
            )
            for name, values in bad.items():
                for value in values:
                    with refused("EpError dispatch_with_permute: .*expected .*, got "):
                        send(**{**good, name: value})
            with refused("EpError num_permuted_tokens: expected a whole number of at least 1"):
                send(**good, non_blocking=True)
            with refused("EpError expected a number with topk_idx, got None"):
                send(hidden=x, topk_idx=torch.zeros(len(x), 2, dtype=torch.int64, device=x.device))
            with refused("UNSUPPORTED dispatch: expected dispatch_with_permute"):
                buffer.dispatch(hidden=x)
    rows, probs, *_, handle = send(**good)
    if rank == 0:
        bad = dict(hidden=[rows.double(), rows.to(far), rows[None]], probs=[probs[None, 1:]])
        combine = dict(hidden=rows, probs=probs, handle=handle)
        refuse_each(buffer.combine_with_unpermute, combine, bad if len(rows) > 1 else {})
    buffer.combine_with_unpermute(hidden=rows, handle=handle)


@with_hybrid(top_k=3)
def test_in_one_call(buffer, rank, world):
    """Once a configuration is known, C makes the calls. Python makes other tensors plain first."""
    world, x, routing = prepare(world, rank)
    send, sum, results = buffer.dispatch_with_permute, buffer.combine_with_unpermute, []
    for change in (lambda t: t, lambda t: t, strided):
        assert bool(buffer._facts.steps) == bool(results)
        given = {name: change(each) for name, each in dict(routing, hidden=x).items()}
        rows, probs, _, counts, handle = send(**given)
        back = sum(hidden=change(rows), probs=change(probs[:, None])[:, 0], handle=handle)
        results.append((rows, probs, counts, *back))
        for one, other in zip(results[0], results[-1]):
            assert_equal(one, other)
    with refused("TYPE routing_map: expected bool, got torch.uint8"):
        send(hidden=x, routing_map=routing["routing_map"].byte())
    calls = [
        functools.partial(send, hidden=x, **routing),
        functools.partial(send, hidden=x, handle=handle),
        functools.partial(sum, hidden=rows, handle=handle),
    ]

    entered = []
    sys.setprofile(lambda frame, event, _: entered.append(event))
    for call in calls:
        call()
    sys.setprofile(None)
    assert "call" not in entered  # no function of Python
    rows, *_, handle = send(hidden=x, use_host_meta=True, num_dispatched_tokens=8, **routing)
    assert_equal(sum(hidden=rows, handle=handle)[0], results[0][3])

    def refuse(call):
        with refused("RuntimeError one thread at a time .* of libep.torch while another"):
            call()

    for call in calls:
        buffer._groups._all[-1].group.run(refuse, call)
        call()


def test_no_memory(monkeypatch):
    """Where PyTorch has none, its own error is raised, by each call that C makes."""
    (alone,) = libep.Bootstrap.local(1)
    x, w = torch.ones(8, HIDDEN, device=DEVICE), torch.ones(8, 4, device=DEVICE)
    idx = torch.arange(4, device=DEVICE).repeat(8, 1)
    hybrid, buffer = HybridEPBuffer(alone, **FIELDS), Buffer(alone)
    routing_map, _ = indices_to_map(idx, None, 8, 4)
    *_, in_rank, _ = (layout := buffer.get_dispatch_layout(idx, 4))
    given = dict(is_token_in_rank=in_rank, num_tokens_per_expert=layout[2], topk_idx=idx)
    sent = [
        functools.partial(hybrid.dispatch_with_permute, hidden=x, routing_map=routing_map),
        functools.partial(buffer.dispatch, x, topk_weights=w, **given),
    ]
    (rows, *_, handle), (flat, _, flat_w, _, plain, _) = (call() for call in sent)
    for _ in range(2):
        calls = [
            *sent,
            functools.partial(hybrid.dispatch_with_permute, hidden=x, handle=handle),
            functools.partial(hybrid.combine_with_unpermute, hidden=rows, handle=handle),
            functools.partial(buffer.dispatch, x, handle=plain),
            functools.partial(buffer.combine, flat, plain, topk_weights=flat_w),
        ]
        for call in calls:
            call()
    none = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 7)(lambda *_: 1)
    monkeypatch.setattr(_fast._functions, "empty", ctypes.cast(none, ctypes.c_void_p).value)
    for call in calls:
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            call()
    monkeypatch.undo()
    for call in calls:
        call()
    hybrid.destroy(), buffer.destroy()
    for call in calls:
        with refused("EpError destroyed|closed"):
            call()
    alone.close()
