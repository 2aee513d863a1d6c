# SPDX-License-Identifier: Apache-2.0
"""Arguments that are refused, each with a sentence; the group goes on."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import subprocess
import sys

import pytest
import torch
from conftest import (
    DEVICE,
    assert_equal,
    make_group,
    off,
    other_device,
    refuse_each,
    run_threads,
)

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


BAD = [
    ("x", lambda x: x.to(other_device()), (TypeError, EpError), "tokens"),
    ("x", lambda x: x.double(), TypeError, "tokens.*float64"),
    ("x", lambda x: x.to(torch.complex64), TypeError, "tokens.*complex64"),
    ("x", lambda x: off(x), EpError, "tokens: expected memory on a multiple of 16"),
    ("x", lambda x: x[:, :6].contiguous(), EpError, "tokens.*16"),
    ("x", lambda x: x.repeat(1, 8), EpError, "tokens.*row"),
    ("x", lambda x: x.repeat(4, 1), EpError, "tokens"),
    ("idx", lambda i: i.float(), EpError, "topk_idx"),
    ("idx", lambda i: i.short(), TypeError, "topk_idx: expected int32 or int64, got torch.int16"),
    ("idx", lambda i: i.repeat(1, 2), EpError, "topk_idx"),
    ("idx", lambda i: i.to(other_device()), TypeError, f"topk_idx: expected a tensor on {DEVICE}"),
    ("idx", lambda i: i.repeat(4, 1), EpError, "topk_idx|tokens"),
    ("weights", lambda w: w.double(), (TypeError, EpError), "topk_weights: expected .*float64"),
    ("weights", lambda w: w.to(other_device()), TypeError, "topk_weights: expected a tensor on"),
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


@pytest.mark.parametrize("capacity", [0, 12])
def test_a_refused_dispatch_took_no_part(capacity):
    """One rank is refused, corrects its call, and calls again; the other one notices nothing."""

    def body(bootstrap):
        with make_group(bootstrap, max_recv_rows=capacity, max_scale_bytes=16) as group:
            handle = ep.Handle(group)
            x = torch.ones(T, H, device=group.device)
            idx = torch.tensor([[0, 5]] * T, device=group.device)
            weights = torch.ones(T, 2, device=group.device)
            scales, recv = x[:, :4].contiguous(), x.new_empty(20, H)
            good = dict(tokens=x, routing=idx, topk_weights=weights, recv_tokens=recv)
            bad = [
                dict(tokens=x.double()),
                dict(tokens=x[:2]),
                dict(tokens=x[None]),
                dict(tokens=x.to(other_device())),
                dict(tokens=off(x)),
                dict(tokens=x.repeat(1, 2)),
                dict(topk_weights=weights.double()),
                dict(topk_weights=weights.to(other_device())),
                dict(topk_weights=weights[:, :1].contiguous()),
                dict(topk_weights=weights[:2]),
                dict(scales=scales.repeat(1, 2)),
                dict(scales=scales[:2]),
                dict(scales=scales.to(other_device())),
                dict(recv_tokens=recv.bfloat16()),
                dict(recv_tokens=recv[:, :8].contiguous()),
                dict(recv_tokens=recv.view(-1)),
                dict(recv_tokens=off(recv)),
                dict(recv_tokens=torch.cat([recv, recv], 1)[:, ::2]),
                dict(recv_tokens=recv.to(other_device())),
            ]
            if capacity:
                bad.append(dict(recv_tokens=recv[: capacity - 1]))
            if bootstrap.rank:
                refuse_each(functools.partial(ep.dispatch, handle), good, bad, (TypeError, EpError))
            received = ep.dispatch(handle, **good)
            assert_equal(ep.combine(handle, received.plan, received.tokens), 2 * x)

    run_threads(2, body)


HALF = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, HALF, torch.float16])
def test_strides_and_short_weights(step, dtype):
    """Inputs may have any strides, weights may be short: results are those of plain copies."""
    handle, x, idx, weights = step
    handle = ep.Handle(handle.group, quant=libep.Quant.NONE)
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(T, 2 * H, generator=generator).to(x.device)
    strided = wide[:, ::2], torch.cat([idx, idx], 1)[:, :2], weights.to(dtype).t().contiguous().t()
    plain = [tensor.contiguous() for tensor in strided]
    plain[2] = plain[2].float()
    results = []
    for tokens, idx, weights in (strided, plain):
        leaves = tokens.detach().requires_grad_(), weights.detach().requires_grad_()
        received = ep.dispatch(handle, leaves[0], idx, leaves[1])
        assert received.topk_weights.dtype == torch.float32
        rows = received.tokens.sin()
        short = received.topk_weights.to(dtype)
        out = ep.combine(handle, received.plan, torch.cat([rows, rows], 1)[:, :H], short)
        out.sum().backward()
        assert leaves[1].grad.dtype == weights.dtype
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, expected in zip(*results):
        assert_equal(got, expected.to(got.dtype))


def test_a_gradient_that_starts_anywhere(alone):
    """PyTorch makes contiguous gradients that do not start on 16 bytes: views into others."""
    handle = ep.Handle(alone())
    x = torch.ones(T, H, device=handle.device, requires_grad=True)
    idx = torch.tensor([[0, 1]] * T, device=handle.device)
    scale = torch.arange(T * H + 1.0, device=handle.device)
    for shift in ("combine", "dispatch"):
        received = ep.dispatch(handle, x, idx)
        rows = off(received.tokens).clone() if shift == "dispatch" else received.tokens
        y = ep.combine(handle, received.plan, rows)
        x.grad = None
        (torch.cat([y.new_zeros(1, requires_grad=True), y.reshape(-1)]) * scale).sum().backward()
        assert_equal(x.grad, 2 * scale[1:].view(T, H))


def test_tokens_that_num_tokens_leaves_out(step):
    """With num_tokens, tokens may have more rows than count, and other ones than topk_idx."""
    handle, x, idx, _ = step
    count = torch.tensor([2], device=x.device)
    received = ep.dispatch(handle, x, idx, num_tokens=count)
    assert received.plan.totals.tolist()[0] == 4


ARGUMENTS = [
    ("tokens", lambda x, idx, w: dict(tokens=x.tolist())),
    ("tokens", lambda x, idx, w: dict(tokens=x.cpu().numpy())),
    ("tokens", lambda x, idx, w: dict(tokens=None)),
    ("tokens", lambda x, idx, w: dict(tokens=torch._neg_view(x))),
    ("topk_idx", lambda x, idx, w: dict(routing=None)),
    ("topk_idx", lambda x, idx, w: dict(routing=idx.tolist())),
    ("weights", lambda x, idx, w: dict(topk_weights=w.tolist())),
    ("tokens", lambda x, idx, w: dict(tokens=x.to_sparse())),
    ("topk_idx", lambda x, idx, w: dict(routing=idx.to_sparse())),
    ("topk_weights", lambda x, idx, w: dict(topk_weights=w.to_sparse())),
    ("num_tokens", lambda x, idx, w: dict(num_tokens=3)),
    ("num_tokens", lambda x, idx, w: dict(num_tokens=idx[0, 0])),
    ("recv_tokens", lambda x, idx, w: dict(recv_tokens=x.view(-1))),
    ("recv_tokens", lambda x, idx, w: dict(recv_tokens=[x])),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", range(len(ARGUMENTS)))
def test_arguments_of_other_kinds(step, case, grad):
    handle, x, idx, weights = step
    weights = weights.clone().requires_grad_(grad)
    name, change = ARGUMENTS[case]
    given = dict(tokens=x, routing=idx, topk_weights=weights)
    with pytest.raises((TypeError, EpError), match=f"{name}: expected .*, got "):
        ep.dispatch(handle, **{**given, **change(x, idx, weights.detach())})


def test_words_of_objects_and_errors(alone):
    """repr says ranks, backend and shapes; errors are pickled, and take words of frameworks."""
    group = alone(max_tokens=8)
    handle = ep.Handle(group, layout="flat")
    idx = torch.tensor([[0, 1]] * T, device=group.device)
    plan = ep.prepare(handle, idx)
    backend = "cuda" if DEVICE == "cuda" else "host"
    assert repr(group) == (
        f"<libep.torch.Group: rank 0 of 1, backend {backend}, 6 experts, 6 of them here from 0 on, "
        "at most 8 tokens, top-2, rows of up to 64 bytes>"
    )
    assert repr(handle).startswith("<libep.torch.Handle: throughput mode, layout=flat, ")
    assert repr(handle).endswith(f"of {group!r}>")
    assert repr(libep.Handle(group)) == f"<libep.Handle: throughput mode, of {group!r}>"
    assert repr(plan).startswith(
        f"Plan(num_tokens={T}, num_local_experts=6, bytes=<uint8 [{handle.plan_bytes}] on {DEVICE}"
    )
    with pytest.raises(EpError) as caught:
        ep.prepare(handle, idx.repeat(9, 1))
    error, words = caught.value, str(caught.value)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.status, str(again)) == (EpError, Status.TOKENS, words)
    assert repr(error) == f"EpError({words!r})"
    error.args = (f"{error.args[0]}, while executing a node",)
    assert str(error) == f"{words}, while executing a node"
    handle.close()
    group.close()
    assert repr(group).endswith("; it is closed>") and repr(handle).endswith("; it is closed>")


def test_handles_and_plans_of_other_kinds(step):
    handle, x, idx, _ = step
    received = ep.dispatch(handle, x, idx)
    for other in (None, handle.group, libep.Handle(handle.group)):
        for call in (
            lambda: ep.prepare(other, idx),
            lambda: ep.dispatch(other, x, idx),
            lambda: ep.combine(other, received.plan, received.tokens),
        ):
            with pytest.raises(TypeError, match="handle: expected a libep.torch.Handle, got "):
                call()
    with pytest.raises(TypeError, match="plan: expected .*, got .*Received: give its plan"):
        ep.combine(handle, received, received.tokens)
    with pytest.raises(TypeError, match="topk_idx: expected a torch.Tensor, got .*Received"):
        ep.dispatch(handle, x, received)


def test_forward_mode_of_weights_is_refused(step):
    handle, x, idx, weights = step
    received = ep.dispatch(handle, x, idx, weights)
    with torch.autograd.forward_ad.dual_level():
        dual = [
            torch.autograd.forward_ad.make_dual(w, torch.ones_like(w))
            for w in (weights, received.topk_weights)
        ]
        with pytest.raises(EpError, match="weights: expected a tensor without tangent"):
            ep.dispatch(handle, x, idx, dual[0])
        with pytest.raises(EpError, match="weights: expected a tensor without tangent"):
            ep.combine(handle, received.plan, received.tokens, dual[1])


@pytest.mark.parametrize("which", ["tokens", "expert_out"])
def test_forward_mode_is_refused(step, which):
    handle, x, idx, _ = step
    received = ep.dispatch(handle, x, idx)
    with torch.autograd.forward_ad.dual_level():
        ep.combine(handle, received.plan, received.tokens)  # no tangent
        rows = x if which == "tokens" else received.tokens
        dual = torch.autograd.forward_ad.make_dual(rows, torch.ones_like(rows))
        with pytest.raises(EpError, match=f"{which}: expected a tensor without tangent") as caught:
            if which == "tokens":
                ep.dispatch(handle, dual, idx)
            else:
                ep.combine(handle, received.plan, dual)
        assert caught.value.status == Status.UNSUPPORTED


def test_transforms_of_torch_func_are_refused(step):
    handle, x, idx, weights = step

    def layer(x):
        received = ep.dispatch(handle, x, idx, weights)
        return ep.combine(handle, received.plan, received.tokens, received.topk_weights).sum()

    def weigh(weights):
        return ep.dispatch(handle, x, idx, weights).topk_weights.sum()

    for call in (
        lambda: torch.func.grad(layer)(x),
        lambda: torch.func.jvp(layer, (x,), (x,)),
        lambda: torch.vmap(layer)(x[None]),
        lambda: torch.func.grad(weigh)(weights),
    ):
        with pytest.raises(EpError, match="torch.func|tangent") as caught:
            call()
        assert caught.value.status == Status.UNSUPPORTED


def test_combine_refuses(step):
    handle, x, idx, weights = step
    received = ep.dispatch(handle, x, idx, weights)
    rows, plan = received.tokens, received.plan
    for bad, error, words in [
        (rows.to(torch.float8_e4m3fn), EpError, "fp8_e4m3"),
        (rows[:2], EpError, "expert_out"),
        (off(rows), EpError, "expert_out: expected data on a multiple of 16"),
        (rows.to(other_device()), TypeError, "expert_out: expected a tensor on"),
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


def test_blocks_keep_the_type():
    """`with` has the type of a subclass, for programs whose types are checked."""
    for kind in ep.Group, ep.Handle:
        signature = inspect.signature(kind.__enter__)
        given = signature.parameters["self"].annotation
        assert given.startswith("Any") and signature.return_annotation == given


GROUP = dict(num_experts=4, max_tokens=4, hidden=16, top_k=1)


def test_process_groups_of_other_kinds():
    with pytest.raises(EpError, match="process_group: .*init_process_group") as caught:
        ep.create_group(process_group=None, **GROUP)
    assert caught.value.status == Status.BOOTSTRAP
    bootstraps = libep.Bootstrap.local(1)

    class Mesh:
        def get_group(self, name):
            raise NotImplementedError

    for other, words in [
        ("gloo", "got builtins.str"),
        (bootstraps, "got builtins.list: give the element of this rank"),
        (Mesh(), "Mesh: take one of its dimensions"),
        (torch.distributed.GroupMember.NON_GROUP_MEMBER, "belongs to, got NON_GROUP_MEMBER"),
    ]:
        with pytest.raises(TypeError, match=f"process_group: expected .*{words}"):
            ep.create_group(other, **GROUP)
    with pytest.raises(TypeError, match="dtype: expected a torch.dtype, got 'float32'"):
        ep.create_group(bootstraps[0], dtype="float32", **GROUP)
    with pytest.raises(TypeError, match="group: expected a libep.torch.Group, got .*NoneType"):
        ep.Handle(None)
    bootstraps[0].close()


def test_names_of_members(alone):
    """The package compares fields itself: names become members first."""
    group = alone(mode="latency", backend="host" if DEVICE == "cpu" else "cuda")
    handle = ep.Handle(group, layout="batched", rows_per_expert=8)
    assert handle.is_latency and handle.layout is libep.Layout.BATCHED
    idx = torch.tensor([[0, 1]] * T, device=group.device)
    assert ep.dispatch(handle, torch.ones(T, H, device=group.device), idx).tokens.shape == (6, 8, H)
    with pytest.raises(ValueError, match="layout: expected one of .*flat.*, got 'round'"):
        ep.Handle(group, layout="round")


def test_import_of_libep_does_not_import_torch():
    program = "import libep, sys; assert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [-1, 1 << 30])
def test_numbers_that_prepare_has_not_written(alone, number):
    """What failed on the device may have left anything there: no memory is made for such rows."""
    group = alone(max_recv_rows=0)
    handle = ep.Handle(group)
    x = torch.zeros(4, 16, device=group.device)
    plan = ep.prepare(handle, torch.zeros(4, 2, dtype=torch.int64, device=group.device))
    plan.numbers.fill_(number)
    with pytest.raises(EpError, match="that prepare has written") as caught:
        ep.dispatch(handle, x, plan)
    assert caught.value.status == Status.NOT_PREPARED
    group.abort("the loss is not a number")
    with pytest.raises(EpError, match="not a number") as caught:
        ep.dispatch(handle, x, plan)
    assert caught.value.status == Status.ABORTED
