# SPDX-License-Identifier: Apache-2.0
"""Receive memory: rows without a copy, and memory that does not go while tensors live."""

import gc

import pytest
import torch
from base import refused
from conftest import DEVICE, assert_equal, on_ranks, ones

import libep.torch as ep
from libep import EpError, Status

ROWS, HIDDEN = 40, 16


@pytest.mark.parametrize("max_recv_rows", [0, ROWS])
@on_ranks("max_recv_rows")
def test_rows_in_receive_memory(group):
    """Again and again in the same memory, with exact and static sizes."""
    handle, memory = ep.Handle(group), ep.ReceiveMemory(group, ROWS * HIDDEN * 4)

    def step(seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(6, HIDDEN, generator=generator).to(group.device).requires_grad_()
        idx = torch.rand(6, 6, generator=generator).argsort(1)[:, :2].contiguous().to(group.device)
        recv = memory.tensor((ROWS, HIDDEN), torch.float32)
        received = ep.dispatch(handle, x, idx, recv_tokens=recv)
        assert received.tokens.data_ptr() == recv.data_ptr()
        assert not recv.requires_grad and recv.grad_fn is None
        out = ep.combine(handle, received.plan, received.tokens)
        out.sum().backward()
        assert_equal(x.grad, torch.full_like(x, 2))
        assert torch.allclose(out, 2 * x)

    for seed in range(3):
        step(seed)
    gc.collect()
    assert not memory.is_used()
    memory.free()
    memory.free()
    with refused("DESTROYED was freed"):
        memory.tensor((1, HIDDEN), torch.float32)


@pytest.fixture
def rows(alone):
    """A handle, tokens and their routing, and a function that makes receive memory of tensors."""
    group = alone()
    handle, memory = ep.Handle(group), ep.ReceiveMemory(group, ROWS * HIDDEN * 4)
    recv = lambda: memory.tensor((handle.capacity, HIDDEN), torch.float32)  # noqa: E731
    return handle, torch.randn(3, HIDDEN, device=group.device), ones()[1], recv


def test_tensors_are_views(alone):
    group = alone()
    memory = ep.ReceiveMemory(group, 1024)
    whole = memory.tensor((1024,), torch.uint8)
    part = memory.tensor((2, 4), torch.bfloat16, offset=64)
    part.fill_(1)
    assert part.data_ptr() == whole.data_ptr() + 64 and part.device == group.device
    assert whole[64:80].view(torch.bfloat16).sum().item() == 8 and whole[:64].sum().item() == 0


def test_memory_stays_while_tensors_live(alone):
    group = alone()
    memory = ep.ReceiveMemory(group, 1024)
    view = memory.tensor((4, 16), torch.float32)[1:, ::2].t()
    with refused("ORDER drop it first"):
        memory.free()
    with refused("ORDER expected no tensor"):
        group.close()
    view.fill_(3)
    assert memory.tensor((4, 16), torch.float32).sum().item() == 3 * 3 * 8
    del view
    group.close()
    with pytest.raises(EpError):
        memory.tensor((4, 16), torch.float32)
    memory.free()


def test_what_autograd_saved_lives(rows):
    handle, x, idx, recv = rows
    x.requires_grad_()
    received = ep.dispatch(handle, x, idx, recv_tokens=recv())
    out = ep.combine(handle, received.plan, received.tokens**2)
    del received
    with refused("EpError drop them first"):
        handle.group.close()
    out.sum().backward()
    assert torch.allclose(x.grad, 4 * x)
    del out
    handle.group.close()


@pytest.mark.parametrize("is_inference", [False, True])
def test_another_tensor_of_the_memory_is_noticed(rows, is_inference):
    """Weights' gradients need the rows, which the second step overwrites through a new tensor."""
    handle, x, idx, recv = rows
    weights = torch.ones(3, 2, device=x.device, requires_grad=True)

    def step(x, weights):
        received = ep.dispatch(handle, x, idx, weights, recv_tokens=recv())
        return ep.combine(handle, received.plan, received.tokens, received.topk_weights)

    out = step(x, weights)
    with torch.inference_mode(is_inference):
        step(2 * x, weights.detach())
    with refused("RuntimeError modified by an inplace operation"):
        out.sum().backward()
    del out
    step(x, weights).sum().backward()
    assert torch.allclose(weights.grad, x.sum(1, keepdim=True).expand(3, 2), atol=1e-5)


def test_tensors_do_not_share_histories(alone):
    """Rows with a gradient that are copied into the memory concern one tensor alone."""
    memory = ep.ReceiveMemory(alone(), 1024)
    first = memory.tensor((4, 16), torch.float32)
    first.copy_(torch.ones(4, 16, device=first.device, requires_grad=True))
    assert first.requires_grad and first._base is None  # it is no view of the whole
    assert not memory.tensor((4, 16), torch.float32).requires_grad
    del first
    memory.free()


def test_arguments_of_receive_memory(alone):
    group = alone()
    memory = ep.ReceiveMemory(group, 1024)
    for text, make, arguments in [
        *(("TypeError bytes: expected", ep.ReceiveMemory, (group, size))
          for size in (3.5, "8", True)),
        ("EpError bytes: expected", ep.ReceiveMemory, (group, -5)),
        ("TypeError shape: expected", memory.tensor, (8, torch.float32)),
        ("TypeError shape: expected", memory.tensor, ((2.0, 4), torch.float32)),
        ("EpError shape: expected", memory.tensor, ((-1, -16), torch.float32)),
        ("TypeError dtype: .* a torch.dtype, got 'float32'", memory.tensor, ((4,), "float32")),
        *(("RANGE multiple of 16", memory.tensor, (shape, torch.uint8, offset))
          for shape, offset in [((1025,), 0), ((16,), 1016), ((16,), 8), ((16,), -16)]),
    ]:  # fmt: skip
        with refused(text):
            make(*arguments)
    storage = memory.tensor((0, 16), torch.float32).untyped_storage()
    assert memory.is_used()
    del storage
    assert not memory.is_used()


def test_an_exception_is_not_masked(alone):
    """The frames of an exception hold tensors. The group is aborted, and closed at the end."""
    group = alone()

    def fail():
        rows = ep.ReceiveMemory(group, 1024).tensor((4, 16), torch.float32)
        raise ValueError(f"the program's own, with {len(rows)} rows")

    with refused("ValueError own"), group:
        fail()
    gc.collect()
    with refused("EpError own"):
        ep.prepare(ep.Handle(group), ones(1)[1])


def test_end_of_a_block_with_tensors(alone):
    group = alone()
    with refused("EpError drop them first"), group:
        rows = ep.ReceiveMemory(group, 1024).tensor((4, 16), torch.float32)
    assert group.status().status == Status.ABORTED  # so that the peers do not wait
    rows.fill_(1)
    del rows
    group.close()


@pytest.mark.skipif(DEVICE == "cuda", reason="the kernel finds this, and fails the group")
def test_too_small(alone):
    group = alone(max_recv_rows=0)
    recv = ep.ReceiveMemory(group, 1024).tensor((5, HIDDEN), torch.float32)
    with refused("BUFFER_SIZE recv_tokens"):
        ep.dispatch(ep.Handle(group), *ones()[:2], recv_tokens=recv)
