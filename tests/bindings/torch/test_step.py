# SPDX-License-Identifier: Apache-2.0
"""What steps of libep.torch have beside those of the common suite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from base import refused
from conftest import assert_equal, on_device, run_threads
from face import world_group
from reference import Received, World, expert_major

import libep.torch as ep


def test_only_weights_need_gradients(seed):
    """The first layer: the tokens are data."""
    world = World(seed)

    def body(bootstrap):
        rank = bootstrap.rank
        with world_group(bootstrap, world) as group:
            handle = ep.Handle(group)
            weights = on_device(world.weights[rank], grad=True)
            x, idx = on_device(world.x[rank]), on_device(world.idx[rank])
            received = ep.dispatch(handle, x, idx, weights)
            scale = on_device(Received(world, rank, "expert_major").scale[:, None])
            rows = received.tokens * scale
            out = ep.combine(handle, received.plan, rows, received.topk_weights)
            out.backward(on_device(world.grad_out[rank]))
            assert_equal(weights.grad, world.backward(rank)[1])

    run_threads(world.size, body)


def test_expanded_gradients(seed):
    """Gradients that are no contiguous tensors, such as those of sum()."""
    world = World(seed)

    def body(bootstrap):
        rank = bootstrap.rank
        with world_group(bootstrap, world) as group:
            handle = ep.Handle(group)
            x = on_device(world.x[rank], grad=True)
            received = ep.dispatch(handle, x, on_device(world.idx[rank]))
            ep.combine(handle, received.plan, received.tokens).sum().backward()
            count = on_device((world.idx[rank] >= 0).sum(1, keepdims=True)).float()
            assert_equal(x.grad, count.expand_as(x))

    run_threads(world.size, body)


@pytest.mark.parametrize("is_latency", [False, True])
def test_first_tokens_alone(seed, is_latency):
    """num_tokens: buffers of a fixed shape with fewer tokens in them."""
    world = World(seed, tokens=[5, 3, 0], max_tokens=6)

    def pad(array, value):
        full = np.full((world.max_tokens, array.shape[1]), value, array.dtype)
        full[: len(array)] = array
        return on_device(full)

    def body(bootstrap):
        rank = bootstrap.rank
        with world_group(bootstrap, world, mode="latency" if is_latency else "auto") as group:
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

    run_threads(world.size, body)


def test_rows_past_the_last_slab_are_zero(alone):
    group = alone()
    handle = ep.Handle(group)
    x = torch.ones(3, 16, device=group.device)
    idx = torch.tensor([[0, 5], [2, -1], [-1, -1]], device=group.device)
    for _ in range(3):  # memory that comes back from the allocator has other contents
        received = ep.dispatch(handle, x, idx, torch.ones(3, 2, device=group.device))
        assert received.tokens.sum().item() == 3 * 16
        assert received.topk_weights.sum().item() == 3
        received.tokens.fill_(7)


def test_scales_travel(seed):
    """Rows that are quantised already, and their scales: plain bytes to libep."""
    world = World(seed)

    def body(bootstrap):
        rank = bootstrap.rank
        with world_group(bootstrap, world, max_scale_bytes=8) as group:
            handle = ep.Handle(group)
            x = on_device(world.x[rank])
            tokens = torch.cat([x, x], 1).to(torch.float8_e4m3fn)  # rows of 16 bytes
            received = ep.dispatch(handle, tokens, on_device(world.idx[rank]), None, x[:, :2] + 0)
            assert received.tokens.dtype == torch.float8_e4m3fn
            rows = [world.x[s][t] for slab in expert_major(world, rank, 1)[0] for s, t, _ in slab]
            expected = torch.tensor(np.array(rows).reshape(-1, world.hidden))
            assert_equal(received.scales, expected[:, :2])
            assert_equal(received.tokens.float()[:, : world.hidden], expected)

    run_threads(world.size, body)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("is_latency", [False, True])
def test_counters(seed, grad, is_latency):
    """What two steps add: with and without gradient, whole and in phases."""
    world = World(seed)

    def step(handle, x, idx, weights, counters):
        if not is_latency:
            received = ep.dispatch(handle, x, idx, weights, counters=counters)
        else:
            received, hook = ep.dispatch_send(handle, x, idx, weights, counters=counters)
            hook()
        counters = counters.without_experts
        plan, rows = received.plan, received.tokens
        if not is_latency:
            return ep.combine(handle, plan, rows, received.topk_weights, counters=counters)
        out, hook = ep.combine_send(handle, plan, rows, received.topk_weights, counters=counters)
        hook()
        return out

    def body(bootstrap):
        rank, size = bootstrap.rank, world.size
        with world_group(bootstrap, world, mode="latency" if is_latency else "auto") as group:
            handle = ep.Handle(group, **(dict(max_recv_rows=100) if is_latency else {}))
            x = on_device(world.x[rank], grad=grad and not is_latency)
            idx, weights = on_device(world.idx[rank]), on_device(world.weights[rank])
            counters = ep.Counters.zeros(handle)
            plain = step(handle, x, idx, weights, ep.Counters())
            for _ in range(2):
                out = step(handle, x, idx, weights, counters)
                assert_equal(out.detach(), plain.detach())
                if out.requires_grad:
                    out.sum().backward()
            slabs, _ = expert_major(world, rank, 1)
            assert counters.expert_tokens.tolist() == [2 * len(slab) for slab in slabs]
            tokens = [
                len({t for t, _, e in world.entries(rank) if e in world.experts_of(peer)})
                for peer in range(size)
            ]
            sums = [
                len({t for t, _, e in world.entries(peer) if e in world.experts_of(rank)})
                for peer in range(size)
            ]
            row = 4 * world.hidden
            rows = [2 * (there + back) for there, back in zip(tokens, sums)]
            sent = [2 * ((row + 4 * 2) * t + row * b) for t, b in zip(tokens, sums)]
            assert counters.peer_rows.tolist() == rows
            assert counters.peer_bytes.tolist() == sent
            assert counters.peer_wait_ns[rank] == 0
            assert bool((counters.peer_wait_ns >= counters.peer_longest_wait_ns).all())

    run_threads(world.size, body)


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

