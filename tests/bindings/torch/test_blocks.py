# SPDX-License-Identifier: Apache-2.0
"""Words of blocks of rows: what dispatch stores, what combine waits for, and what is refused."""

from __future__ import annotations

import pytest
import torch
from base import refused
from conftest import assert_equal

import libep
import libep.torch as ep
from libep import Layout

T, H, WORDS = 3, 16, 12


def words_of(handle, value, count):
    return torch.full((count,), value, dtype=torch.int32, device=handle.device)


def step(handle, x, idx, is_split):
    """Dispatch with ready words of blocks of 2 rows, and combine that waits for words of at least 3."""
    ready, done = words_of(handle, 0, WORDS), words_of(handle, 3, WORDS)
    blocks = ep.Blocks(ready, 2), ep.Blocks(done, 2, 3)
    if not is_split:
        received = ep.dispatch(handle, x, idx, ready=blocks[0])
        out = ep.combine(handle, received.plan, received.tokens, done=blocks[1])
        return out, received, ready
    received, hook = ep.dispatch_send(handle, x, idx, ready=blocks[0])
    hook()
    out, hook = ep.combine_send(handle, received.plan, received.tokens, done=blocks[1])
    hook()
    return out, received, ready


@pytest.mark.parametrize("mode", ["throughput", "latency", "split"])
def test_step(alone, mode):
    is_split = mode == "split"
    group = alone(mode="latency" if is_split else mode)
    handle = ep.Handle(group, layout=Layout.BATCHED, rows_per_expert=4)
    x = torch.ones(T, H, device=handle.device, requires_grad=mode == "throughput")
    idx = torch.tensor([[0, 1], [0, -1], [0, -1]], device=handle.device)
    out, received, ready = step(handle, x, idx, is_split)
    counts = received.plan.expert_counts.tolist()
    assert counts[:2] == [3, 1]
    expected = [1 + min(2, max(0, count - first)) for count in counts for first in (0, 2)]
    assert ready.tolist()[: len(expected)] == expected
    assert_equal(out.detach(), x.detach() * torch.tensor([[2.0], [1], [1]], device=x.device))
    if x.requires_grad:
        out.sum().backward()
        assert_equal(x.grad[:, 0], torch.tensor([2.0, 1, 1], device=x.device))


def test_refused(alone):
    handle = ep.Handle(alone(), layout=Layout.BATCHED, rows_per_expert=4)
    x, idx = torch.ones(T, H, device=handle.device), torch.tensor([[0, 1]] * T)
    idx, words = idx.to(x.device), words_of(handle, 0, WORDS)
    for text, blocks in [
        ("RANGE extras.block_rows", ep.Blocks(words, 0)),
        ("BUFFER_SIZE extras.ready", ep.Blocks(words[:1], 2)),
        ("TYPE extras.ready", ep.Blocks(words.long(), 2)),
        ("UNSUPPORTED extras.done", ep.Blocks(words, 2, 1)),
    ]:
        with refused(text):
            ep.dispatch(handle, x, idx, ready=blocks)
    received = ep.dispatch(handle, x, idx)
    with refused("UNSUPPORTED extras.ready"):
        ep.combine(handle, received.plan, received.tokens, done=ep.Blocks(words, 2))
    assert handle.group.status().status == libep.Status.OK


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(alone, backend):
    """Words are arguments that the ops mutate: a program may read them afterwards."""
    handle = ep.Handle(alone(), layout=Layout.BATCHED, rows_per_expert=4)
    x, idx = torch.ones(T, H, device=handle.device), torch.tensor([[0, 1]] * T)

    def program(x, idx):
        ready, done = words_of(handle, 0, WORDS), words_of(handle, 3, WORDS)
        with torch.no_grad():
            received = ep.dispatch(handle, x, idx, ready=ep.Blocks(ready, 2))
            blocks = ep.Blocks(done, 2, 3)
            return ep.combine(handle, received.plan, received.tokens, done=blocks), ready + 0

    out, ready = torch.compile(program, backend=backend, fullgraph=True)(x, idx.to(x.device))
    assert_equal(out, 2 * x)
    assert ready.tolist()[:4] == [3, 2, 3, 2]
