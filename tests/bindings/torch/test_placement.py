# SPDX-License-Identifier: Apache-2.0
"""Ranks that join a group with a placement, and weights that move to a new one."""

import pytest
import torch
from base import run_threads
from conftest import assert_equal

import libep
import libep.torch as ep

EXPERTS, PLACES, T, H = 5, 8, 7, 8


def test_join():
    """Rank 1 joins a group of rank 0, over a store, and gets the placement; experts add numbers."""
    store = torch.distributed.HashStore()
    fields = dict(num_experts=2, num_physical=4, max_tokens=T, max_top_k=1, max_row_bytes=4 * H)
    fields.update(masks=1, max_ranks=2, backend="host")

    def body(world):
        rank = world.rank
        if rank == 0:
            first = torch.distributed.PrefixStore("first", store)
            group = ep.Group(ep.from_store(first, 0, 1), **fields)
            group.place([1, 0, 1, 0])
        second = torch.distributed.PrefixStore("second", store)
        both = ep.from_store(second, rank, 2)
        if rank == 0:
            group.admit(both)
        else:
            group = ep.Group.join(both, place=1, **fields)
        group.mask([0, 1])
        handle = ep.Handle(group)
        idx = torch.arange(T)[:, None] % 2
        got = ep.dispatch(handle, torch.zeros(T, H), idx, torch.ones(T, 1))
        added = torch.tensor([2.0, 1.0]).repeat_interleave(got.plan.expert_counts.long())
        out = ep.combine(handle, got.plan, got.tokens + added[:, None], got.topk_weights)
        assert_equal(out, (idx + 1).float().expand(T, H))
        group.close()

    run_threads(2, body)


@pytest.mark.parametrize("in_place", [False, True])
def test_move_weights(in_place):
    """Parameters and codes, of types that libep has and has not, of any number of dimensions."""
    before, after = [0, 1, 2, 3, 4, -1, 0, -1], [4, 3, 2, 1, 0, 0, -1, 2]

    def body(bootstrap):
        mine = slice(bootstrap.rank * 4, bootstrap.rank * 4 + 4)
        fields = dict(num_experts=EXPERTS, num_physical=PLACES, max_tokens=T, backend="host")
        types = (2, 3, 5, 7), torch.bfloat16, (9,), torch.int8, (), torch.float8_e4m3fn
        weights = [
            torch.tensor(before[mine]).reshape(4, *[1] * len(shape)).expand(4, *shape).to(dtype)
            for shape, dtype in zip(types[::2], types[1::2])
        ]
        weights = [torch.nn.Parameter(each.contiguous(), requires_grad=False) for each in weights]
        out = None if in_place else [torch.zeros_like(each) for each in weights]
        kept = before if in_place else [0] * PLACES
        rows = torch.tensor([b if a < 0 else a for a, b in zip(after, kept)][mine])
        with ep.create_group(bootstrap, hidden=H, top_k=3, dtype=torch.float32, **fields) as group:
            group.move_weights(before, after, weights, out=out)
            for each in out or weights:
                moved = each.detach().float().reshape(4, -1)
                assert_equal(moved, rows.float()[:, None].expand_as(moved).contiguous())
            with pytest.raises(ValueError, match=r"weights\[0\]: expected a contiguous tensor"):
                group.move_weights(before, after, [weights[0].transpose(1, 2)])

    run_threads(2, body)
