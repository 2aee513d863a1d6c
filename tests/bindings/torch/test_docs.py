# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/torch.md and of README.md, as they stand there."""

import functools
import re

import pytest
import torch
from conftest import on_ranks
from programs import printed, programs
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import libep
import libep.torch as ep


PROGRAMS = programs("docs/torch.md")


@pytest.mark.parametrize("program, lines", [
    (PROGRAMS[0], [f"rank {r}: 6 rows came, y {10 * (r + 1)}, gradient 10" for r in (0, 1)]),
    (programs("README.md")[0], [f"rank {r}: y 10, gradient 10" for r in (0, 1)]),
], ids=["torch.md", "README.md"])  # fmt: skip
def test_first_program(program, lines):
    # The ranks are threads: a line of one may end within that of the other.
    assert sorted(re.findall(r"rank \d: .*?gradient 10", printed("-c", program))) == lines


def given(group, dtype=torch.float32):
    """What the programs take from their surroundings."""
    tokens = torch.ones(3, 16, dtype=dtype, device=group.device)
    topk_idx = torch.tensor([[0, 5]] * 3, device=group.device)
    weights = torch.full((3, 2), 0.5, device=group.device)
    facts = dict(group=group, tokens=tokens, x=tokens, topk_idx=topk_idx, weights=weights)
    return dict(facts, libep=libep, torch=torch, functools=functools)


@on_ranks()
def test_selective_checkpoint(group):
    handle, names = ep.Handle(group), given(group)
    topk_idx, weights = names["topk_idx"], names["weights"]

    def layer(x):
        received = ep.dispatch(handle, x, topk_idx, weights)
        return ep.combine(handle, received.plan, 3 * received.tokens, received.topk_weights)

    x = names["x"].requires_grad_()
    names.update(layer=layer, checkpoint=checkpoint)
    names["create_selective_checkpoint_contexts"] = create_selective_checkpoint_contexts
    exec(PROGRAMS[1], names)
    names.pop("y").sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


@on_ranks()
def test_counters(group):
    names = dict(given(group), layer=ep.Handle(group))
    exec(PROGRAMS[2], names)
    assert names["counters"].peer_rows.tolist() == [6, 6]  # three tokens there, and back
    assert torch.equal(names["out"], names["x"])


@on_ranks()
def test_blocks(group):
    layer, seen = ep.Handle(group, alignment=64, max_recv_rows=640), []

    def experts(rows, ready, done):
        seen.append(ready.tolist())
        done.fill_(1)
        return rows

    names = dict(given(group), layer=layer, experts=experts)
    exec(PROGRAMS[3], names)
    counts = names["received"].plan.expert_counts.tolist()
    filled = [1 + count for count in counts if count]  # a block of 64 rows for each
    assert seen[0] == filled + [1] * (10 - len(filled))
    assert torch.equal(names["out"], names["x"])


@on_ranks(dtype=torch.bfloat16)
def test_receive_memory(group):
    layer, names = ep.Handle(group), given(group, torch.bfloat16)
    names.update(layer=layer, rows=16, hidden=16)
    exec(PROGRAMS[4], names)
    received = names.pop("received")
    out = ep.combine(layer, received.plan, received.tokens, received.topk_weights)
    assert torch.equal(out, names["tokens"])
    assert received.tokens.data_ptr() == names.pop("recv").data_ptr()


@on_ranks(mode=libep.Mode.LATENCY)
def test_two_phases(group):
    layer = ep.Handle(group, layout=libep.Layout.BATCHED, rows_per_expert=16)
    names = dict(given(group), layer=layer, ep=ep)
    names.update(shared_expert=torch.neg, experts=lambda rows, counts: 3 * rows)
    exec(PROGRAMS[5], names)
    assert torch.equal(names["out"], 2 * names["x"]) and torch.equal(names["shared"], -names["x"])


def test_every_program_is_run():
    assert len(PROGRAMS) == 6
