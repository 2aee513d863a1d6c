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


def count_calls(monkeypatch, function):
    """Have _fast.call or _fast.make note its operations and what it returns."""
    seen, run = [], getattr(_fast, function)

    def noted(facts, operation, *arguments):
        seen.append((operation, run(facts, operation, *arguments)))
        return seen[-1][1]

    noted.__name__ = function
    monkeypatch.setattr(_fast, function, noted)
    return seen


def leave_all(monkeypatch):
    """Have all calls go tensor by tensor."""
    monkeypatch.setattr(_fast, "call", None)
    monkeypatch.setattr(_fast, "make", None)


def test_pytorch_has_the_interface():
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert (_fast.call is not None) == ((major, minor) >= (2, 10))
    assert (_fast.make is None) == (_fast.call is None)


WANTED = sorted(2 * [form for name, form in _fast.FORMS.items() if name != "dispatch_routed"])


@needs_fast
def test_step_with_new_outputs(monkeypatch):
    seen = count_calls(monkeypatch, "make")
    monkeypatch.setattr(_fast, "call", None)
    check(World(size=2, seed=7), Case(capacity=0))
    assert sorted(operation for operation, _ in seen) == WANTED
    assert all(type(made) is tuple for _, made in seen)


@needs_fast
def test_step_with_given_outputs(monkeypatch):
    seen = count_calls(monkeypatch, "call")
    monkeypatch.setattr(_fast, "make", None)
    check(World(size=2, seed=7), Case(capacity=0))
    assert sorted(seen) == [(operation, 0) for operation in WANTED]


def test_step_tensor_by_tensor(monkeypatch):
    leave_all(monkeypatch)
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
    seen = count_calls(monkeypatch, "call"), count_calls(monkeypatch, "make")
    at_once = latency_step(handle, x, idx, weights)
    assert seen[0] == [(_fast.FORMS["dispatch_routed"], 0)]
    assert [operation for operation, _ in seen[1]] == [_fast.FORMS["combine"]]
    leave_all(monkeypatch)
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
        (plan.bytes, rows, *[None] * 4, out),  # not contiguous
        (plan.bytes, x.double(), *[None] * 4, out),
        (plan.bytes, x.to("meta"), *[None] * 4, out),
        (plan.bytes, x[0, 0], *[None] * 4, out),  # no dimension
        (plan.bytes, x[None, None], *[None] * 4, out),  # four
        (plan.bytes, "rows", *[None] * 4, out),
        (plan.bytes, x, None, None),  # too few
    ]:
        assert not handle.call_fast(_fast.FORMS["combine"], tensors)
    for wrong in (plan.numbers[:-1], plan.numbers.long()):
        assert not handle.call_fast(_fast.FORMS["prepare"], (idx, None, plan.bytes, wrong))
    assert torch.all(out == 5)
    dispatch = _fast.FORMS["dispatch"]
    for arguments in [
        (plan.bytes, rows, None, None, 4, 0),  # not contiguous
        (plan.bytes, x.double(), None, None, 4, 0),
        (plan.bytes, x.to("meta"), None, None, 4, 0),
        (plan.bytes, x[0], None, None, 4, 0),  # one dimension
        (plan.bytes, None, None, None, 4, 0),
        (plan.bytes, x, x.bfloat16(), None, 4, 0),  # weights that Python converts
        (plan.bytes, x, None, None, -1, 0),
        (plan.bytes, x, None, None, "rows", 0),
        (plan.bytes, x, None, None, 4),  # too few
        (),
    ]:
        assert handle.make_fast(dispatch, *arguments) is None


TYPES = "bfloat16 float16 float32 float8_e4m3fn float8_e5m2 uint8 int32 int64".split()


@needs_fast
@pytest.mark.parametrize("name", TYPES)
def test_new_outputs_are_tensors_of_pytorch(alone, monkeypatch, name):
    """They have the inputs' types, and memory of PyTorch's allocator: record_stream() works."""
    group = alone(hidden=64)
    handle = ep.Handle(group, layout=libep.Layout.FLAT)
    idx = torch.tensor([[0, 1], [5, -1]], device=group.device)
    x = torch.arange(64, device=group.device).view(2, 32).to(getattr(torch, name))
    seen = count_calls(monkeypatch, "make")
    received = ep.dispatch(handle, x, idx)
    assert len(seen) == 2 and type(received.tokens) is torch.Tensor
    assert received.tokens.dtype == x.dtype and received.topk_idx.dtype == torch.int64
    assert torch.equal(received.tokens[:2].view(torch.uint8), x.view(torch.uint8))
    for _, made in seen:
        for tensor in made:
            assert tensor is None or tensor.untyped_storage().resizable()
            assert tensor is None or (tensor.is_contiguous() and not tensor.requires_grad)


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
        handle.call_fast(_fast.FORMS["combine"], (plan.bytes, x[:2], *[None] * 4, x))
    with refused("BUFFER_SIZE expert_out"):
        handle.make_fast(_fast.FORMS["combine"], plan.bytes, x[:2], *[None] * 4, 4, 0)
