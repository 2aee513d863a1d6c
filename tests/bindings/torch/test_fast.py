# SPDX-License-Identifier: Apache-2.0
"""Both ways in which libep.torch calls an operation: in one call of C, and tensor by tensor."""

from __future__ import annotations

import pytest
import torch
from base import refused
from conftest import assert_equal, on_device
from reference import World
from suite import Case, check

import libep
import libep.torch as ep
from libep.torch import _fast

needs_fast = pytest.mark.skipif(_fast.call is None, reason="this PyTorch has no exchange interface")


def count_calls(monkeypatch):
    """Have _fast.call note its operations and what it returns."""
    seen, call = [], _fast.call

    def noted(facts, operation, tensors):
        seen.append((operation, call(facts, operation, tensors)))
        return seen[-1][1]

    monkeypatch.setattr(_fast, "call", noted)
    return seen


def test_pytorch_has_the_interface():
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert (_fast.call is not None) == ((major, minor) >= (2, 10))


@needs_fast
def test_step_at_once(monkeypatch):
    seen = count_calls(monkeypatch)
    check(World(size=2, seed=7), Case(capacity=0))
    wanted = [form for name, form in _fast.FORMS.items() if name != "dispatch_routed"]
    assert sorted(seen) == sorted((operation, 0) for operation in wanted for _ in range(2))


def test_step_tensor_by_tensor(monkeypatch):
    monkeypatch.setattr(_fast, "call", None)
    check(World(size=2, seed=7), Case(capacity=0))
    for dtype in ("float16", "bfloat16"):
        check(World(size=2, seed=7), Case(weights="none", dtype=dtype))


def latency_step(handle, x, idx, weights):
    received = ep.dispatch(handle, x, idx, weights)
    out = ep.combine(handle, received.plan, received.tokens, received.topk_weights)
    return out, received.plan.numbers


@needs_fast
def test_latency_mode(alone, monkeypatch):
    group = alone(mode=libep.Mode.LATENCY)
    handle = ep.Handle(group)
    x = on_device(torch.randn(5, 16).numpy())
    idx = torch.randint(-1, 6, (5, 2), device=group.device)
    weights = torch.rand(5, 2, device=group.device)
    seen = count_calls(monkeypatch)
    at_once = latency_step(handle, x, idx, weights)
    assert seen == [(_fast.FORMS["dispatch_routed"], 0), (_fast.FORMS["combine"], 0)]
    monkeypatch.setattr(_fast, "call", None)
    for one, other in zip(at_once, latency_step(handle, x, idx, weights)):
        assert_equal(one, other)


@needs_fast
def test_left_to_python(alone):
    group = alone()
    handle = ep.Handle(group)
    x = torch.ones(4, 16, device=group.device)
    idx = torch.zeros(4, 2, dtype=torch.int64, device=group.device)
    plan = ep.prepare(handle, idx)
    out = torch.full_like(x, 5)
    rows = torch.ones(16, 4, device=group.device).t()
    for tensors in [
        (plan.bytes, rows, None, None, out),  # not contiguous
        (plan.bytes, x.double(), None, None, out),
        (plan.bytes, x.to("meta"), None, None, out),
        (plan.bytes, x[0, 0], None, None, out),  # no dimension
        (plan.bytes, x[None, None], None, None, out),  # four
        (plan.bytes, "rows", None, None, out),
        (plan.bytes, x, None, None),  # too few
    ]:
        assert not handle.call_fast(_fast.FORMS["combine"], tensors)
    for wrong in (plan.numbers[:-1], plan.numbers.long()):
        assert not handle.call_fast(_fast.FORMS["prepare"], (idx, None, plan.bytes, wrong))
    assert torch.all(out == 5)


@needs_fast
def test_strides_of_one_row(alone):
    """A dimension of one element, or a tensor of none, may have any stride."""
    group = alone()
    handle = ep.Handle(group)
    x = torch.ones(3, 32, device=group.device)[:1, :16]
    idx = torch.zeros(3, 4, dtype=torch.int64, device=group.device)[:1, :2]
    assert x.stride() == (32, 1)
    received = ep.dispatch(handle, x, idx)
    assert_equal(ep.combine(handle, received.plan, received.tokens), 2 * x)
    received = ep.dispatch(handle, x[:0], idx[:0])
    assert ep.combine(handle, received.plan, received.tokens).shape == (0, 16)


@needs_fast
def test_closed(alone):
    group = alone()
    handle = ep.Handle(group)
    x = torch.ones(4, 16, device=group.device)
    plan = ep.prepare(handle, torch.zeros(4, 2, dtype=torch.int64, device=group.device))
    handle.close()
    with refused("EpError closed"):
        ep.combine(handle, plan, x)


@needs_fast
def test_refusal_has_the_sentence(alone):
    group = alone()
    handle = ep.Handle(group)
    x = torch.ones(4, 16, device=group.device)
    plan = ep.prepare(handle, torch.zeros(4, 2, dtype=torch.int64, device=group.device))
    with refused("BUFFER_SIZE expert_out"):
        handle.call_fast(_fast.FORMS["combine"], (plan.bytes, x[:2], None, None, x))
