# SPDX-License-Identifier: Apache-2.0
"""Both ways in which libep.torch calls an operation: in one call of C, and tensor by tensor."""

import ctypes

import conftest
import pytest
import torch
from base import refused
from conftest import assert_equal, ones
from reference import World
from suite import Case, check

import libep
import libep.torch as ep
from libep.deep_ep import _layout
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


def test_pytorch_has_the_interface():
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert (_fast.call is not None) == ((major, minor) >= (2, 10))
    assert (_fast.make is None) == (_fast.call is None)


WANTED = sorted(2 * [form for name, form in _fast.FORMS.items() if name != "dispatch_routed"])


@needs_fast
@pytest.mark.parametrize("function, other", [("make", "call"), ("call", "make")])
def test_step(monkeypatch, function, other):
    """make: operations with new outputs; call: with given outputs."""
    seen = count_calls(monkeypatch, function)
    monkeypatch.setattr(_fast, other, None)
    check(World(size=2, seed=7), Case(capacity=0, alignment=4))
    assert sorted(operation for operation, _ in seen) == WANTED
    assert all(done == 0 or type(done) is tuple for _, done in seen)


def test_step_tensor_by_tensor(monkeypatch):
    monkeypatch.setattr(_fast, "call", None)
    monkeypatch.setattr(_fast, "make", None)
    check(World(size=2, seed=7), Case(capacity=0, alignment=4))
    for dtype in ("float16", "bfloat16"):
        check(World(size=2, seed=7), Case(weights="none", dtype=dtype))


@needs_fast
def test_latency_mode(alone, monkeypatch):
    handle = ep.Handle(alone(mode="latency"))
    x, _, weights = ones(5)
    idx = torch.randint(-1, 6, (5, 2), device=x.device)
    seen = count_calls(monkeypatch, "call"), count_calls(monkeypatch, "make")
    results = []
    for _ in range(2):
        received = ep.dispatch(handle, x, idx, weights)
        out = ep.combine(handle, received.plan, received.tokens, received.topk_weights)
        results.append((out, received.plan.numbers))
        assert seen[0] == [(_fast.FORMS["dispatch_routed"], 0)]
        assert [operation for operation, _ in seen[1]] == [_fast.FORMS["combine"]]
        monkeypatch.setattr(_fast, "call", None)
        monkeypatch.setattr(_fast, "make", None)
    for one, other in zip(*results):
        assert_equal(one, other)


@needs_fast
def test_left_to_python(alone):
    handle, (x, _, _) = ep.Handle(alone()), ones(4)
    idx = torch.zeros(4, 2, dtype=torch.int64, device=x.device)
    plan, forms = ep.prepare(handle, idx), _fast.FORMS
    out, rows = torch.full_like(x, 5), torch.ones(16, 4, device=x.device).t()
    # Not contiguous, another type, another device, no dimension, four dimensions, no tensor.
    wrong = [rows, x.double(), x.to("meta"), x[0, 0], x[None, None], "rows"]
    for tensors in [(plan.bytes, given, *[None] * 4, out) for given in wrong]:
        assert not handle.call_fast(forms["combine"], tensors)
    assert not handle.call_fast(forms["combine"], (plan.bytes, x, None, None))  # too few
    for numbers in (plan.numbers[:-1], plan.numbers.long()):
        assert not handle.call_fast(forms["prepare"], (idx, None, plan.bytes, numbers))
    assert torch.all(out == 5)
    wrong = [(given, None, None, 4, 0) for given in (rows, x.double(), x.to("meta"), x[0], None)]
    wrong += [(x, x.bfloat16(), None, 4, 0)]  # weights that Python converts
    wrong += [(x, None, None, -1, 0), (x, None, None, "rows", 0), (x, None, None, 4)]
    for arguments in [*((plan.bytes, *given) for given in wrong), ()]:
        assert handle.make_fast(forms["dispatch"], *arguments) is None


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
    for tensor in (t for _, made in seen for t in made if t is not None):
        assert tensor.untyped_storage().resizable()
        assert tensor.is_contiguous() and not tensor.requires_grad


@needs_fast
def test_strides_of_one_row(alone):
    """A dimension of one element, or a tensor of none, may have any stride."""
    handle = ep.Handle(alone())
    x = torch.ones(3, 32, device=handle.device)[:1, :16]
    idx = torch.zeros(3, 4, dtype=torch.int64, device=handle.device)[:1, :2]
    assert x.stride() == (32, 1)
    received = ep.dispatch(handle, x, idx)
    assert_equal(ep.combine(handle, received.plan, received.tokens), 2 * x)
    received = ep.dispatch(handle, x[:0], idx[:0])
    assert ep.combine(handle, received.plan, received.tokens).shape == (0, 16)


@needs_fast
def test_refusal_has_the_sentence(alone):
    handle, (x, idx, _) = ep.Handle(alone()), ones(4)
    plan, form = ep.prepare(handle, idx), _fast.FORMS["combine"]
    with refused("BUFFER_SIZE expert_out"):
        handle.call_fast(form, (plan.bytes, x[:2], *[None] * 4, x))
    with refused("BUFFER_SIZE expert_out"):
        handle.make_fast(form, plan.bytes, x[:2], *[None] * 4, 4, 0)


def test_events_come_from_a_pool():
    """Made on their device once; what is dropped serves again. Errors of CUDA are returned."""
    seen, error = [], [0]

    def note(name, *kinds):
        def run(*given):
            seen.append((name, *given[:2]))
            return error[0]

        return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(run)

    pointer, number = ctypes.c_void_p, ctypes.c_int
    current = lambda out: out.__setitem__(0, 0) or 0  # noqa: E731
    device = ctypes.CFUNCTYPE(number, ctypes.POINTER(number))(current)
    table = [
        note("create", pointer, ctypes.c_uint), note("record", pointer, pointer),
        note("wait", pointer, pointer, ctypes.c_uint), device, note("device", number),
    ]  # fmt: skip
    events = _fast._Events(*(ctypes.cast(each, pointer).value for each in table))
    at, names = ctypes.addressof(events), lambda: [name for name, *_ in seen]
    event = _fast.record(at, 61, 7)
    assert _fast.wait(at, 8, event) is None
    assert [each[:2] for each in seen if each[0] == "device"] == [("device", 61), ("device", 0)]
    assert names() == ["device", "create", "device", "record", "wait"] and seen[-1][1] == 8
    other = _fast.record(at, 61, 7)
    del event, seen[:]
    again = _fast.record(at, 61, 9)
    assert names() == ["record"] and seen[0][2] == 9 and again is not other
    error[0] = 700
    assert _fast.wait(at, 8, again) == 700 and _fast.record(at, 61, 7) == 700
    assert _fast.record(at, 64, 7) == 101 and _fast.record(at, -1, 7) == 101


def test_counts_of_a_routing(monkeypatch):
    """In one call and without it; negative ids and those of no expert count nowhere."""
    idx = torch.randint(-3, 20, (700, 5), generator=torch.Generator().manual_seed(5))
    for given in (idx.to(conftest.DEVICE), idx.to(conftest.DEVICE).int()):
        names = given.unsqueeze(2) == torch.arange(18, device=given.device)
        expected = names.unflatten(2, (6, 3)).any((1, 3))
        for count in (_fast.count, None):
            for strided in (given, given.t().contiguous().t()):
                monkeypatch.setattr(_fast, "count", count)
                per_rank, per_expert, is_in = _layout.count(strided, 18, 6)
                assert is_in.dtype == torch.bool and per_rank.dtype == torch.int32
                assert_equal(is_in, expected)
                assert_equal(per_rank, expected.sum(0))
                assert_equal(per_expert, names.sum((0, 1)))
