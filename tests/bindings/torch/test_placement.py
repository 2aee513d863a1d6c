# SPDX-License-Identifier: Apache-2.0
"""A layer whose experts have copies, placed anew between steps."""

import pytest
import torch
from base import run_threads
from conftest import assert_equal

import libep
import libep.torch as ep

EXPERTS, PLACES, T, H = 5, 8, 7, 8


@pytest.mark.parametrize("choice", ["near", "spread"])
def test_place(seed, choice):
    """Experts multiply by their numbers, wherever they are; gradients arrive, too."""
    draw = torch.Generator().manual_seed(seed)
    idx = torch.stack([torch.randperm(EXPERTS, generator=draw)[:3] for _ in range(2 * T)])
    weights = torch.rand(2 * T, 3, generator=draw).mul(8).round() / 8
    maps = libep.placement_balance([9, 1, 4, 1, 1], PLACES, 2), [4, 3, 2, 1, 0, 0, -1, 2]

    def body(bootstrap):
        rank = bootstrap.rank
        mine = slice(rank * T, (rank + 1) * T)
        fields = dict(num_experts=EXPERTS, num_physical=PLACES, choice=choice, max_tokens=T)
        with ep.create_group(
            bootstrap, hidden=H, top_k=3, dtype=torch.float32, backend="host", **fields
        ) as group:
            handle = ep.Handle(group)
            assert group.num_local_experts == PLACES // 2
            for map in maps:
                group.place(map)
                x = torch.ones(T, H, requires_grad=True)
                got = ep.dispatch(handle, x, idx[mine], weights[mine])
                held = torch.tensor(map[group.first_expert :][: PLACES // 2]).float() + 1
                scale = held.repeat_interleave(got.plan.expert_counts.long())
                out = ep.combine(handle, got.plan, got.tokens * scale[:, None], got.topk_weights)
                out.sum().backward()
                expected = ((idx[mine] + 1) * weights[mine]).sum(1, keepdim=True).expand(T, H)
                assert_equal(out.detach(), expected.contiguous())
                assert_equal(x.grad, expected.contiguous())

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
