# SPDX-License-Identifier: Apache-2.0
"""What steps of libep.torch have beside those of the common suite."""

import numpy as np
import pytest
import torch
from base import refused
from conftest import assert_equal, on_device, on_ranks, ones
from reference import Received, expert_major

import libep.torch as ep


@pytest.mark.parametrize("mode", ["auto", "latency"])
@on_ranks("mode", world=dict(tokens=[5, 3, 0], max_tokens=6))
def test_first_tokens_alone(group, rank, world, mode):
    """num_tokens: buffers of a fixed shape with fewer tokens in them."""

    def pad(array, value):
        full = np.full((world.max_tokens, array.shape[1]), value, array.dtype)
        full[: len(array)] = array
        return on_device(full)

    is_latency = mode == "latency"
    handle = ep.Handle(group, **(dict(max_recv_rows=100) if is_latency else {}))
    count = torch.tensor([world.tokens[rank]], device=group.device)
    x, idx = pad(world.x[rank], np.nan), pad(world.idx[rank], 2)
    x.requires_grad_(not is_latency)
    weights = pad(world.weights[rank], np.nan)
    received = ep.dispatch(handle, x, idx, weights, num_tokens=count)
    rows, scale = received.tokens, Received(world, rank, "expert_major").scale[:, None]
    rows = torch.cat([rows[: len(scale)] * on_device(scale), rows[len(scale) :]])
    out = ep.combine(handle, received.plan, rows, received.topk_weights)
    assert_equal(out, pad(world.forward(rank), 0))
    if not is_latency:
        out.backward(pad(world.grad_out[rank], np.nan))
        assert_equal(x.grad, pad(world.backward(rank)[0], 0))


def test_rows_past_the_last_slab_are_zero(alone):
    handle, (x, _, weights) = ep.Handle(alone()), ones()
    idx = torch.tensor([[0, 5], [2, -1], [-1, -1]], device=x.device)
    for _ in range(3):  # memory that comes back from the allocator has other contents
        received = ep.dispatch(handle, x, idx, weights)
        assert received.tokens.sum().item() == 3 * 16
        assert received.topk_weights.sum().item() == 3
        received.tokens.fill_(7)


def counted_step(handle, x, idx, weights, counters, is_latency):
    """Dispatch and combine, in latency mode in phases."""
    if not is_latency:
        received = ep.dispatch(handle, x, idx, weights, counters=counters)
        returned = handle, received.plan, received.tokens, received.topk_weights
        return ep.combine(*returned, counters=counters.without_experts)
    received, hook = ep.dispatch_send(handle, x, idx, weights, counters=counters)
    hook()
    returned = handle, received.plan, received.tokens, received.topk_weights
    out, hook = ep.combine_send(*returned, counters=counters.without_experts)
    hook()
    return out


@pytest.mark.parametrize("mode", ["auto", "latency"])
@pytest.mark.parametrize("grad", [False, True])
@on_ranks("mode", world={})
def test_counters(group, rank, world, mode, grad):
    """What two steps add: with and without gradient, whole and in phases."""
    is_latency = mode == "latency"
    handle = ep.Handle(group, **(dict(max_recv_rows=100) if is_latency else {}))
    x = on_device(world.x[rank], grad=grad and not is_latency)
    idx, weights = on_device(world.idx[rank]), on_device(world.weights[rank])
    counters = ep.Counters.zeros(handle)
    plain = counted_step(handle, x, idx, weights, ep.Counters(), is_latency)
    for _ in range(2):
        out = counted_step(handle, x, idx, weights, counters, is_latency)
        assert_equal(out.detach(), plain.detach())
        if out.requires_grad:
            out.sum().backward()

    def count(source, peer):
        """The tokens of a rank that another one receives."""
        return len({t for t, _, e in world.entries(source) if e in world.experts_of(peer)})

    slabs, _ = expert_major(world, rank, 1)
    assert counters.expert_tokens.tolist() == [2 * len(slab) for slab in slabs]
    moved = [(count(rank, peer), count(peer, rank)) for peer in range(world.size)]
    row = 4 * world.hidden
    assert counters.peer_rows.tolist() == [2 * (there + back) for there, back in moved]
    assert counters.peer_bytes.tolist() == [2 * ((row + 8) * t + row * b) for t, b in moved]
    assert counters.peer_wait_ns[rank] == 0
    assert bool((counters.peer_wait_ns >= counters.peer_longest_wait_ns).all())


def test_wrong_counters(alone):
    group = alone()
    handle = ep.Handle(group)
    x, idx = torch.ones(3, 16, device=group.device), torch.zeros(3, 2, device=group.device).long()
    right = ep.Counters.zeros(handle)
    for words, wrong in {
        "EpError expert_tokens.*expected int32 or int64": dict(expert_tokens=x[0, :6].clone()),
        "EpError peer_rows.*ranks = 1 in dimension 0, got 2": dict(peer_rows=idx[0]),
        "TypeError peer_bytes: expected a C-contiguous tensor": dict(peer_bytes=idx[::2, 0]),
        "EpError overlaps extras.peer_rows": dict(peer_wait_ns=right.peer_rows),
    }.items():
        with refused(words):
            ep.dispatch(handle, x, idx, counters=right._replace(**wrong))
    plan = ep.dispatch(handle, x, idx, counters=right).plan
    with refused("EpError extras.expert_tokens: expected NULL, since this call has no use for it"):
        ep.combine(handle, plan, x.new_zeros(handle.capacity, 16), counters=right)
