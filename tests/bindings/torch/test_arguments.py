# SPDX-License-Identifier: Apache-2.0
"""What libep.torch refuses beside the rows of the common suite; the group goes on."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import subprocess
import sys

import pytest
import torch
from base import refused
from conftest import DEVICE, assert_equal, make_group, off, other_device, refuse_each, run_threads
from torch.autograd import forward_ad

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


def dual(tensor):
    return forward_ad.make_dual(tensor, torch.ones_like(tensor))


EITHER = (TypeError, EpError)
ARGUMENTS = [
    ("tokens", lambda x: x.to(other_device()), EITHER, "tokens"),
    ("tokens", off, EpError, "tokens: expected memory on a multiple of 16"),
    ("tokens", lambda x: x.cpu().numpy(), TypeError, "tokens: expected .*, got "),
    ("tokens", torch._neg_view, TypeError, "tokens: expected .*, got "),
    ("tokens", torch.Tensor.to_sparse, EITHER, "tokens: expected .*, got "),
    ("routing", lambda i: i.to(other_device()), TypeError,
     f"topk_idx: expected a tensor on {DEVICE}"),
    ("routing", torch.Tensor.to_sparse, EITHER, "topk_idx: expected .*, got "),
    ("topk_weights", lambda w: w.to(other_device()), TypeError,
     "topk_weights: expected a tensor on"),
    ("topk_weights", torch.Tensor.to_sparse, EITHER, "topk_weights: expected .*, got "),
    ("num_tokens", lambda _: torch.tensor(3), EITHER, "num_tokens: expected .*, got "),
    ("recv_tokens", lambda _: torch.ones(T * H), EITHER, "recv_tokens: expected .*, got "),
    ("recv_tokens", lambda _: [1], EITHER, "recv_tokens: expected .*, got "),
]  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name, spoil, error, words", ARGUMENTS)
def test_refused_tensors(step, name, spoil, error, words, grad):
    handle, x, idx, weights = step
    given = dict(tokens=x, routing=idx, topk_weights=weights.clone().requires_grad_(grad))
    spoiled = spoil(given[name].detach() if name in given else None)
    if torch.is_tensor(spoiled) and name not in given:
        spoiled = spoiled.to(x.device)
    with pytest.raises(error, match=words):
        ep.dispatch(handle, **{**given, name: spoiled})


@pytest.mark.parametrize("capacity", [0, 12])
def test_a_refused_dispatch_took_no_part(capacity):
    """One rank is refused, corrects its call, and calls again; the other one notices nothing."""

    def body(bootstrap):
        with make_group(bootstrap, max_recv_rows=capacity, max_scale_bytes=16) as group:
            handle = ep.Handle(group)
            x = torch.ones(T, H, device=group.device)
            idx = torch.tensor([[0, 5]] * T, device=group.device)
            weights = torch.ones(T, 2, device=group.device)
            scales, recv, far = x[:, :4].contiguous(), x.new_empty(20, H), other_device()
            good = dict(tokens=x, routing=idx, topk_weights=weights, recv_tokens=recv)
            wide = torch.cat([recv, recv], 1)[:, ::2]
            changes = dict(
                tokens=[x.double(), x[:2], x[None], x.to(far), off(x), x.repeat(1, 2)],
                topk_weights=[
                    weights.double(), weights.to(far), weights[:, :1].contiguous(), weights[:2]
                ],
                scales=[scales.repeat(1, 2), scales[:2], scales.to(far)],
                recv_tokens=[
                    recv.bfloat16(), recv[:, :8].contiguous(), recv.view(-1), off(recv), wide,
                    recv.to(far), *([recv[: capacity - 1]] if capacity else []),
                ],
            )  # fmt: skip
            if bootstrap.rank:
                bad = [{name: value} for name, values in changes.items() for value in values]
                refuse_each(functools.partial(ep.dispatch, handle), good, bad, EITHER)
            received = ep.dispatch(handle, **good)
            assert_equal(ep.combine(handle, received.plan, received.tokens), 2 * x)

    run_threads(2, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strides_and_short_weights(step, dtype):
    """Inputs may have any strides, weights may be short: results are those of plain copies."""
    handle, x, idx, weights = step
    handle = ep.Handle(handle.group, quant=libep.Quant.NONE)
    wide = torch.randn(T, 2 * H, generator=torch.Generator().manual_seed(1)).to(x.device)
    strided = wide[:, ::2], torch.cat([idx, idx], 1)[:, :2], weights.to(dtype).t().contiguous().t()
    plain = [tensor.contiguous() for tensor in strided]
    plain[2] = plain[2].float()
    results = []
    for tokens, idx, weights in (strided, plain):
        leaves = tokens.detach().requires_grad_(), weights.detach().requires_grad_()
        received = ep.dispatch(handle, leaves[0], idx, leaves[1])
        assert received.topk_weights.dtype == torch.float32
        rows, short = received.tokens.sin(), received.topk_weights.to(dtype)
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
    received = ep.dispatch(handle, x, idx, num_tokens=torch.tensor([2], device=x.device))
    assert received.plan.totals.tolist()[0] == 4


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
    with refused("TOKENS") as caught:
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
            with refused("TypeError handle: expected a libep.torch.Handle, got "):
                call()
    with refused("TypeError plan: expected .*, got .*Received: give its plan"):
        ep.combine(handle, received, received.tokens)
    with refused("TypeError topk_idx: expected a torch.Tensor, got .*Received"):
        ep.dispatch(handle, x, received)


def test_forward_mode_is_refused(step):
    handle, x, idx, weights = step
    received = ep.dispatch(handle, x, idx, weights)
    plan, rows = received.plan, received.tokens
    tangent = "expected a tensor without tangent"
    with forward_ad.dual_level():
        ep.combine(handle, plan, rows)  # no tangent
        for name, call in [
            ("weights", lambda: ep.dispatch(handle, x, idx, dual(weights))),
            ("weights", lambda: ep.combine(handle, plan, rows, dual(received.topk_weights))),
            ("tokens", lambda: ep.dispatch(handle, dual(x), idx)),
            ("expert_out", lambda: ep.combine(handle, plan, dual(rows))),
        ]:
            with refused(f"UNSUPPORTED {name}: {tangent}"):
                call()


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
        with refused("UNSUPPORTED torch.func|tangent"):
            call()


def test_combine_refuses(step):
    handle, x, idx, weights = step
    received = ep.dispatch(handle, x, idx, weights)
    rows, plan, given = received.tokens, received.plan, received.topk_weights
    for text, arguments in [
        ("EpError fp8_e4m3", (rows.to(torch.float8_e4m3fn),)),
        ("EpError expert_out", (rows[:2],)),
        ("EpError expert_out: expected data on a multiple of 16", (off(rows),)),
        ("TypeError expert_out: expected a tensor on", (rows.to(other_device()),)),
        ("EpError slot_weights", (rows, given[:3])),
        ("TypeError slot_weights.*float64", (rows, given.double())),
    ]:
        with refused(text):
            ep.combine(handle, plan, *arguments)


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels find these errors, and fail the group")
def test_plans_that_are_none(step, alone):
    handle, x, idx, _ = step
    plan = ep.prepare(handle, idx)
    rows, other = x.new_empty(handle.capacity, H), ep.Handle(alone())
    for text, block in [
        ("NOT_PREPARED", torch.zeros_like(plan.bytes)),
        ("BUFFER_SIZE", plan.bytes[:128]),
        ("FOREIGN", ep.prepare(other, idx).bytes),
        ("TypeError plan.*cpu|plan.*UINT8|plan", plan.bytes[::2]),
    ]:
        with refused(text):
            ep.combine(handle, plan._replace(bytes=block), rows)


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
        with refused("TypeError numbers"):
            torch.ops.libep.prepare(handle.key, idx, None, plan.bytes, numbers)


@pytest.mark.parametrize("number", [-1, 1 << 30])
def test_numbers_that_prepare_has_not_written(alone, number):
    """What failed on the device may have left anything there: no memory is made for such rows."""
    group = alone(max_recv_rows=0)
    handle = ep.Handle(group)
    x = torch.zeros(4, 16, device=group.device)
    plan = ep.prepare(handle, torch.zeros(4, 2, dtype=torch.int64, device=group.device))
    plan.numbers.fill_(number)
    with refused("NOT_PREPARED that prepare has written"):
        ep.dispatch(handle, x, plan)
    group.abort("the loss is not a number")
    with refused("ABORTED not a number"):
        ep.dispatch(handle, x, plan)


def test_second_derivatives(step):
    handle, x, idx, weights = step
    x = x.clone().requires_grad_()
    received = ep.dispatch(handle, x, idx, weights)
    out = ep.combine(handle, received.plan, received.tokens**2, received.topk_weights)
    with refused("UNSUPPORTED second derivatives"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("which", ["handle", "group", "dropped"])
def test_closed(alone, which):
    """Backward keeps a handle that was dropped."""
    group = alone()
    handle = ep.Handle(group)
    x = torch.ones(T, H, device=group.device, requires_grad=True)
    idx = torch.tensor([[0, 1]] * T, device=group.device)
    received = ep.dispatch(handle, x, idx)
    out = ep.combine(handle, received.plan, received.tokens)
    if which == "dropped":
        del handle
        out.sum().backward()
        assert_equal(x.grad, torch.full_like(x, 2))
        return
    for _ in range(2):
        (group if which == "group" else handle).close()
        assert received.tokens.sum().item() == 2 * T * H  # the memory is PyTorch's
        backward = lambda: out.sum().backward(retain_graph=True)  # noqa: E731
        for call in (lambda: ep.prepare(handle, idx), backward):
            with refused(f"DESTROYED {which} is closed"):
                call()


def test_copies_of_a_layer(alone):
    handle = ep.Handle(alone())
    assert copy.deepcopy([handle])[0] is handle
    with refused("TypeError state_dict"):
        pickle.dumps(handle)


def test_bootstraps():
    fields = dict(num_experts=4, max_tokens=4, hidden=16, top_k=1)
    bootstraps = libep.Bootstrap.local(1)
    local = bootstraps[0]

    class Mesh:
        def get_group(self, name):
            raise NotImplementedError

    expected = "TypeError process_group: expected .*"
    absent = torch.distributed.GroupMember.NON_GROUP_MEMBER
    for text, call in [
        ("BOOTSTRAP init_process_group", lambda: ep.create_group(**fields)),
        ("BOOTSTRAP process_group: .*init_process_group",
         lambda: ep.create_group(process_group=None, **fields)),
        ("TypeError NCCL communicator", lambda: ep.create_group(local, lend_nccl=True, **fields)),
        ("EpError max_row_bytes", lambda: ep.create_group(local, **{**fields, "hidden": 17})),
        (expected + "got builtins.str", lambda: ep.create_group("gloo", **fields)),
        (expected + "got builtins.list: give the element of this rank",
         lambda: ep.create_group(bootstraps, **fields)),
        (expected + "Mesh: take one of its dimensions", lambda: ep.create_group(Mesh(), **fields)),
        (expected + "belongs to, got NON_GROUP_MEMBER", lambda: ep.create_group(absent, **fields)),
        ("TypeError dtype: expected a torch.dtype, got 'float32'",
         lambda: ep.create_group(local, dtype="float32", **fields)),
        ("TypeError group: expected a libep.torch.Group, got .*NoneType", lambda: ep.Handle(None)),
    ]:  # fmt: skip
        with refused(text) as caught:
            call()
        if "max_row_bytes" in text:
            assert caught.value.status in (Status.RANGE, Status.ROW_BYTES)
    local.close()


def test_blocks_keep_the_type():
    """`with` has the type of a subclass, for programs whose types are checked."""
    for kind in ep.Group, ep.Handle:
        signature = inspect.signature(kind.__enter__)
        given = signature.parameters["self"].annotation
        assert given.startswith("Any") and signature.return_annotation == given


def test_names_of_members(alone):
    """The package compares fields itself: names become members first."""
    group = alone(mode="latency", backend="host" if DEVICE == "cpu" else "cuda")
    handle = ep.Handle(group, layout="batched", rows_per_expert=8)
    assert handle.is_latency and handle.layout is libep.Layout.BATCHED
    idx = torch.tensor([[0, 1]] * T, device=group.device)
    assert ep.dispatch(handle, torch.ones(T, H, device=group.device), idx).tokens.shape == (6, 8, H)
    with refused("ValueError layout: expected one of .*flat.*, got 'round'"):
        ep.Handle(group, layout="round")


def test_import_of_libep_does_not_import_torch():
    program = "import libep, sys; assert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
