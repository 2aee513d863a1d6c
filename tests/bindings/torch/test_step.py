# SPDX-License-Identifier: Apache-2.0
"""What steps of libep.torch have beside those of the common suite."""

import torch
from base import refused
from conftest import ones

import libep.torch as ep


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
