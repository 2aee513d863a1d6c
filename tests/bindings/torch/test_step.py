# SPDX-License-Identifier: Apache-2.0
"""What steps of libep.torch have beside those of the common suite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
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
