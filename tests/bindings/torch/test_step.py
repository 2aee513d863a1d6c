# SPDX-License-Identifier: Apache-2.0
"""What steps of libep.torch have beside those of the common suite."""

import numpy as np
import pytest
import torch
from base import refused
from conftest import assert_equal, on_device, on_ranks, ones
from reference import Received

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
    # Where it is counted, prepare goes another way.
    again = ep.dispatch(
        handle, x.detach(), idx, weights, num_tokens=count, counters=ep.Counters.zeros(handle)
    )
    assert_equal(again.plan.numbers, received.plan.numbers)
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
