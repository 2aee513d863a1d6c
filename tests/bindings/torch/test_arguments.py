# SPDX-License-Identifier: Apache-2.0
"""Arguments that are refused, each with a sentence; the group goes on."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from conftest import DEVICE, assert_equal

import libep
import libep.torch as ep
from libep import EpError, Status

T, H = 3, 16


@pytest.fixture
def step(alone):
    group = alone()
    handle = ep.Handle(group)
    x = torch.ones(T, H, device=group.device)
    idx = torch.tensor([[0, 1]] * T, device=group.device)
    weights = torch.ones(T, 2, device=group.device)
    yield handle, x, idx, weights
    received = ep.dispatch(handle, x, idx, weights)  # after any refusal the group works
    assert_equal(ep.combine(handle, received.plan, received.tokens), 2 * x)


def other_device():
    return "cpu" if DEVICE == "cuda" else "meta"


BAD = [
    ("x", lambda x: x.to(other_device()), (TypeError, EpError), "tokens"),
    ("x", lambda x: x.double(), TypeError, "tokens.*float64"),
    ("x", lambda x: x.to(torch.complex64), TypeError, "tokens.*complex64"),
    ("x", lambda x: torch.cat([x, x], 1)[:, ::2], TypeError, "tokens.*C-contiguous"),
    ("x", lambda x: x[:, :6].contiguous(), EpError, "tokens.*16"),
    ("x", lambda x: x.repeat(1, 8), EpError, "tokens.*row"),
    ("x", lambda x: x.repeat(4, 1), EpError, "tokens"),
    ("idx", lambda i: i.float(), EpError, "topk_idx"),
    ("idx", lambda i: i.short(), TypeError, "topk_idx.*int16"),
    ("idx", lambda i: i.repeat(1, 2), EpError, "topk_idx"),
    ("idx", lambda i: i.t().contiguous().t(), TypeError, "topk_idx.*C-contiguous"),
    ("idx", lambda i: i.repeat(4, 1), EpError, "topk_idx|tokens"),
    ("weights", lambda w: w.bfloat16(), EpError, "topk_weights"),
    ("weights", lambda w: w[:2], EpError, "topk_weights"),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", range(len(BAD)))
def test_refused(step, case, grad):
    which, spoil, error, words = BAD[case]
    handle, x, idx, weights = step
    given = dict(x=x.clone().requires_grad_(grad), idx=idx, weights=weights)
    given[which] = spoil(given[which])
    with pytest.raises(error, match=words):
        ep.dispatch(handle, given["x"], given["idx"], given["weights"])


def test_combine_refuses(step):
    handle, x, idx, weights = step
    received = ep.dispatch(handle, x, idx, weights)
    rows, plan = received.tokens, received.plan
    for bad, error, words in [
        (rows.to(torch.float8_e4m3fn), EpError, "fp8_e4m3"),
        (rows[:2], EpError, "expert_out"),
        (rows.t(), TypeError, "expert_out.*C-contiguous"),
    ]:
        with pytest.raises(error, match=words):
            ep.combine(handle, plan, bad)
    with pytest.raises(EpError, match="slot_weights"):
        ep.combine(handle, plan, rows, received.topk_weights[:3])
    with pytest.raises(TypeError, match="slot_weights.*float64"):
        ep.combine(handle, plan, rows, received.topk_weights.double())


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels find these errors, and fail the group")
def test_plans_that_are_none(step, alone):
    handle, x, idx, _ = step
    plan = ep.prepare(handle, idx)
    rows = x.new_empty(handle.capacity, H)
    other = ep.Handle(alone())
    for block, status in [
        (torch.zeros_like(plan.bytes), Status.NOT_PREPARED),
        (plan.bytes[:128], Status.BUFFER_SIZE),
        (ep.prepare(other, idx).bytes, Status.FOREIGN),
    ]:
        with pytest.raises(EpError) as caught:
            ep.combine(handle, plan._replace(bytes=block), rows)
        assert caught.value.status == status
    with pytest.raises(TypeError, match="plan.*cpu|plan.*UINT8|plan"):
        ep.combine(handle, plan._replace(bytes=plan.bytes[::2]), rows)


def test_routing_errors_are_reported(step):
    handle, x, idx, _ = step
    idx = idx.clone()
    idx[1, 1] = 99
    received = ep.dispatch(handle, x, idx)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert received.plan.totals.tolist()[0] == 2 * T - 1
    finding = handle.group.status()
    assert finding.status == Status.ROUTING and (finding.token, finding.k) == (1, 1)


def test_numbers_of_another_shape(step):
    handle, _, idx, _ = step
    plan = ep.prepare(handle, idx)
    for numbers in (plan.numbers[1:].clone(), plan.numbers.long()):
        with pytest.raises(TypeError, match="numbers"):
            torch.ops.libep.prepare(handle.key, idx, None, plan.bytes, numbers)


def test_second_derivatives(step):
    handle, x, idx, weights = step
    x = x.clone().requires_grad_()
    received = ep.dispatch(handle, x, idx, weights)
    out = ep.combine(handle, received.plan, received.tokens**2, received.topk_weights)
    with pytest.raises(EpError, match="second derivatives") as caught:
        torch.autograd.grad(out.sum(), x, create_graph=True)
    assert caught.value.status == Status.UNSUPPORTED


def test_closed_handle(alone):
    handle = ep.Handle(alone())
    x = torch.ones(T, H, device=handle.device, requires_grad=True)
    idx = torch.tensor([[0, 1]] * T, device=handle.device)
    received = ep.dispatch(handle, x, idx)
    out = ep.combine(handle, received.plan, received.tokens)
    handle.close()
    for call in (lambda: ep.prepare(handle, idx), lambda: out.sum().backward()):
        with pytest.raises(EpError, match="handle is closed") as caught:
            call()
        assert caught.value.status == Status.DESTROYED


def test_dropped_handle(alone):
    """Backward keeps the handle that it needs."""
    handle = ep.Handle(alone())
    x = torch.ones(T, H, device=handle.device, requires_grad=True)
    idx = torch.tensor([[0, 1]] * T, device=handle.device)
    received = ep.dispatch(handle, x, idx)
    out = ep.combine(handle, received.plan, received.tokens)
    del handle
    out.sum().backward()
    assert_equal(x.grad, torch.full_like(x, 2))


def test_copies_of_a_layer(alone):
    handle = ep.Handle(alone())
    assert copy.deepcopy([handle])[0] is handle
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(handle)


def test_closed_group(alone):
    group = alone()
    handle = ep.Handle(group)
    x = torch.ones(T, H, device=group.device, requires_grad=True)
    idx = torch.tensor([[0, 1]] * T, device=group.device)
    received = ep.dispatch(handle, x, idx)
    out = ep.combine(handle, received.plan, received.tokens)
    group.close()
    assert received.tokens.sum().item() == 2 * T * H  # the memory is PyTorch's
    for call in (lambda: ep.prepare(handle, idx), lambda: out.sum().backward()):
        with pytest.raises(EpError, match="group is closed") as caught:
            call()
        assert caught.value.status == Status.DESTROYED
    group.close()


def test_bootstraps():
    with pytest.raises(EpError, match="init_process_group") as caught:
        ep.create_group(num_experts=4, max_tokens=4, hidden=16, top_k=1)
    assert caught.value.status == Status.BOOTSTRAP
    (local,) = libep.Bootstrap.local(1)
    with pytest.raises(TypeError, match="NCCL communicator"):
        ep.create_group(local, num_experts=4, max_tokens=4, hidden=16, top_k=1, lend_nccl=True)
    with pytest.raises(EpError, match="max_row_bytes") as caught:
        ep.create_group(local, num_experts=4, max_tokens=4, hidden=17, top_k=1)
    assert caught.value.status in (Status.RANGE, Status.ROW_BYTES)
    local.close()


def test_import_of_libep_does_not_import_torch():
    program = "import libep, sys; assert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
