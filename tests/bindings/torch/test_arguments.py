# SPDX-License-Identifier: Apache-2.0
"""What libep.torch refuses beside the rows of the common suite; the group goes on."""

import contextlib
import copy
import inspect
import pickle

import pytest
import torch
from base import refused
from conftest import (
    DEVICE, assert_equal, make_buffer, off, on_ranks, ones, other_device, refuse_each, strided,
    wrong_rows, wrong_weights
)  # fmt: skip
from torch.autograd import forward_ad

import libep
import libep.torch as ep
from libep import EpError, Status
from libep.deep_ep import Buffer, ElasticBuffer

T, H = 3, 16
EITHER = (TypeError, EpError)


@pytest.fixture
def step(alone):
    group = alone()
    handle, (x, idx, weights) = ep.Handle(group), ones()
    yield handle, x, idx, weights
    received = ep.dispatch(handle, x, idx, weights)  # after any refusal the group works
    assert_equal(ep.combine(handle, received.plan, received.tokens), 2 * x)


@pytest.mark.parametrize("max_recv_rows", [0, 12])
@on_ranks("max_recv_rows", max_scale_bytes=16)
def test_a_refused_dispatch_took_no_part(group, max_recv_rows):
    """One rank is refused, corrects its call, and calls again; the other one notices nothing."""
    handle, (x, _, weights) = ep.Handle(group), ones()
    idx = torch.tensor([[0, 5]] * T, device=group.device)
    scales, recv, far = x[:, :4].contiguous(), x.new_empty(20, H), other_device()
    sparse = torch.Tensor.to_sparse

    def call(topk_idx, **given):
        return ep.dispatch(handle, routing=topk_idx, **given)

    good = dict(tokens=x, topk_idx=idx, topk_weights=weights, recv_tokens=recv)
    changes = dict(
        tokens=[*wrong_rows(x)[:-2], x[:, :8].double(), x[:2], x.repeat(1, 2), x.cpu().numpy(),
                torch._neg_view(x), sparse(x)],
        topk_idx=[idx.to(far), sparse(idx)],
        topk_weights=[*wrong_weights(weights)[:-1], weights[:, :1].contiguous(), sparse(weights)],
        num_tokens=[torch.tensor(3)],
        scales=[scales.repeat(1, 2), scales[:2], scales.to(far)],
        recv_tokens=[*wrong_rows(recv)[:-1], recv.bfloat16(), recv.view(-1), [1],
                     torch.cat([recv, recv], 1)[:, ::2],
                     *([recv[: max_recv_rows - 1]] if max_recv_rows else [])],
    )  # fmt: skip
    if group.rank:
        graded = {**good, "topk_weights": weights.clone().requires_grad_()}
        for given in good, graded:
            refuse_each(call, given, changes, EITHER)
            changes.pop("scales", None)  # travel without gradient
            # Without rows of the caller's a quicker test comes first.
            del given["recv_tokens"]
            plain = {name: values for name, values in changes.items() if name != "recv_tokens"}
            refuse_each(call, given, plain, EITHER)
            with refused("EpError tokens: expected memory on a multiple of 16"):
                call(**{**given, "tokens": off(x)})
            with refused("TypeError topk_weights: expected a dense tensor"):
                call(**{**given, "topk_weights": sparse(weights)})
        with refused("EpError tokens: expected bfloat16, float16 or float32, got torch.int32"):
            ep.dispatch(ep.Handle(group, quant=libep.Quant.FP8), x.int(), idx)
        good["recv_tokens"] = recv
    received = call(**good)
    assert_equal(ep.combine(handle, received.plan, received.tokens), 2 * x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strides_and_short_weights(step, dtype):
    """Inputs may have any strides, weights may be short: results are those of plain copies."""
    handle, x, idx, weights = step
    handle = ep.Handle(handle.group, quant=libep.Quant.NONE)
    wide = torch.randn(T, 2 * H, generator=torch.Generator().manual_seed(1)).to(x.device)
    given = wide[:, ::2], strided(idx), weights.to(dtype).t().contiguous().t()
    plain = [tensor.contiguous() for tensor in given]
    plain[2] = plain[2].float()
    results = []
    for tokens, idx, weights in (given, plain):
        leaves = tokens.detach().requires_grad_(), weights.detach().requires_grad_()
        received = ep.dispatch(handle, leaves[0], idx, leaves[1])
        assert received.topk_weights.dtype == torch.float32
        rows, short = received.tokens.sin(), received.topk_weights.to(dtype)
        out = ep.combine(handle, received.plan, strided(rows), short)
        out.sum().backward()
        assert leaves[1].grad.dtype == weights.dtype
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, expected in zip(*results):
        assert_equal(got, expected.to(got.dtype))


@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_a_gradient_that_starts_anywhere(alone, call):
    """PyTorch makes contiguous gradients that do not start on 16 bytes: views into others."""
    handle, (x, idx, _) = ep.Handle(alone()), ones()
    x.requires_grad_()
    scale = torch.arange(T * H + 1.0, device=x.device)
    received = ep.dispatch(handle, x, idx)
    rows = off(received.tokens).clone() if call == "dispatch" else received.tokens
    y = ep.combine(handle, received.plan, rows)
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
    handle, (_, idx, _) = ep.Handle(group, layout="flat"), ones()
    plan = ep.prepare(handle, idx)
    backend = "cuda" if DEVICE == "cuda" else "host"
    assert repr(group) == (
        f"<libep.torch.Group: rank 0 of 1, backend {backend}, 6 experts, 6 of them here from 0 on, "
        "at most 8 tokens, top-2, rows of up to 64 bytes>"
    )
    assert repr(handle).startswith("<libep.torch.Handle: throughput mode, layout=flat, ")
    assert repr(handle).endswith(f"of {group!r}>")
    assert repr(libep.Handle(group)) == f"<libep.Handle: throughput mode, of {group!r}>"
    block = f"bytes=<uint8 [{handle.plan_bytes}] on {DEVICE}"
    assert repr(plan).startswith(f"Plan(num_tokens={T}, num_local_experts=6, {block}")
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


def test_derivatives_that_are_refused(step):
    """Forward mode, transforms of torch.func, and second derivatives."""
    handle, x, idx, weights = step
    received = ep.dispatch(handle, x, idx, weights)
    plan, rows, given = received.plan, received.tokens, received.topk_weights

    def dual(tensor):
        return forward_ad.make_dual(tensor, torch.ones_like(tensor))

    def layer(x):
        received = ep.dispatch(handle, x, idx, weights)
        return ep.combine(handle, received.plan, received.tokens**2, received.topk_weights).sum()

    def weigh(weights):
        return ep.dispatch(handle, x, idx, weights).topk_weights.sum()

    leaf = x.clone().requires_grad_()
    for text, call in [
        ("weights: .*without tangent", lambda: ep.dispatch(handle, x, idx, dual(weights))),
        ("weights: .*without tangent", lambda: ep.combine(handle, plan, rows, dual(given))),
        ("tokens: .*without tangent", lambda: ep.dispatch(handle, dual(x), idx)),
        ("expert_out: .*without tangent", lambda: ep.combine(handle, plan, dual(rows))),
        ("torch.func|tangent", lambda: torch.func.grad(layer)(x)),
        ("torch.func|tangent", lambda: torch.func.jvp(layer, (x,), (x,))),
        ("torch.func|tangent", lambda: torch.vmap(layer)(x[None])),
        ("torch.func|tangent", lambda: torch.func.grad(weigh)(weights)),
        ("second derivatives", lambda: torch.autograd.grad(layer(leaf), leaf, create_graph=True)),
    ]:
        has_tangents = forward_ad.dual_level() if "without" in text else contextlib.nullcontext()
        with has_tangents, refused(f"UNSUPPORTED {text}"):
            ep.combine(handle, plan, rows)  # no tangent
            call()


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_combine_refuses(alone, mode):
    handle, (x, idx, weights) = ep.Handle(alone(mode=mode)), ones()
    received, far = ep.dispatch(handle, x, idx, weights), other_device()
    rows, plan, given = received.tokens, received.plan, received.topk_weights
    for text, arguments, bias in [
        ("EpError fp8_e4m3", (rows.to(torch.float8_e4m3fn),), None),
        ("EpError expert_out", (rows[:2],), None),
        ("EpError expert_out: expected data on a multiple of 16", (off(rows),), None),
        ("TypeError expert_out: expected a tensor on", (rows.to(far),), None),
        ("EpError slot_weights", (rows, given[:3]), None),
        ("TypeError slot_weights.*float64", (rows, given.double()), None),
        ("SHAPE bias0", (rows,), x[:2]),
        ("EpError bias1", (rows,), (x, x[:, :8])),
        ("NDIM bias0", (rows,), x[0]),
        ("TYPE bias0", (rows,), x.half()),
        ("TypeError bias1.*float64", (rows,), (None, x.double())),
        ("TypeError bias0: expected a tensor on", (rows,), x.to(far)),
        ("TypeError bias: expected .*, got builtins.int", (rows,), 3),
        ("TypeError bias: expected .* up to two of them, got 3", (rows,), (x, x, x)),
        ("TypeError bias: .*resolve_neg", (rows,), torch._neg_view(x)),
        ("TypeError bias: expected a dense tensor", (rows,), x.to_sparse()),
    ]:
        with refused(text):
            ep.combine(handle, plan, *arguments, bias=bias)
    if mode == "latency":
        with refused("UNSUPPORTED combine: .*without gradient"):
            ep.combine(handle, plan, rows, bias=x.clone().requires_grad_())
    # A bias that begins anywhere or has strides is copied.
    for bias in (off(x), (None, x), (x.t().contiguous().t(), None)):
        assert_equal(ep.combine(handle, plan, rows, bias=bias), 3 * x)
    assert_equal(ep.combine(handle, plan, rows, bias=()), 2 * x)
    assert handle.group.status().status == Status.OK


def test_gradient_of_a_bias_alone(step):
    handle, x, idx, _ = step
    received = ep.dispatch(handle, x, idx)
    bias, grad = torch.zeros_like(x, requires_grad=True), torch.arange(T * H, device=x.device)
    out = ep.combine(handle, received.plan, received.tokens, bias=(x, bias))
    out.backward(grad.view(T, H).float())
    assert_equal(out, 3 * x)
    assert_equal(bias.grad, grad.view(T, H).float())


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


def test_numbers_of_another_shape(step):
    handle, _, idx, _ = step
    plan = ep.prepare(handle, idx)
    for numbers in (plan.numbers[1:].clone(), plan.numbers.long()):
        with refused("TypeError numbers"):
            torch.ops.libep.prepare(handle.key, idx, None, plan.bytes, numbers)


@pytest.mark.parametrize("number", [-1, 1 << 30])
@pytest.mark.parametrize("compiles", [False, True])
def test_numbers_that_prepare_has_not_written(alone, number, compiles):
    """What failed on the device may have left anything there: no memory is made for such rows."""
    group = alone(max_recv_rows=0)

    def spoiled(handle, x, idx):
        plan = ep.prepare(handle, idx)
        plan.numbers.fill_(number)
        return 2 * ep.dispatch(handle, x, plan).tokens

    compiled = torch.compile(spoiled, fullgraph=True, backend="aot_eager")
    with refused("NOT_PREPARED that prepare has written"):
        (compiled if compiles else spoiled)(ep.Handle(group), *ones()[:2])
    group.abort("the loss is not a number")
    with refused("ABORTED not a number"):
        spoiled(ep.Handle(group), *ones()[:2])


@pytest.mark.parametrize("which", ["handle", "group", "dropped"])
def test_closed(alone, which):
    """Backward keeps a handle that was dropped."""
    group = alone()
    handle, (x, idx, _) = ep.Handle(group), ones()
    x.requires_grad_()
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
        for call in (
            lambda: ep.prepare(handle, idx),
            lambda: ep.combine(handle, received.plan, received.tokens.detach()),
            lambda: out.sum().backward(retain_graph=True),
        ):
            with refused(f"DESTROYED {which} is closed"):
                call()


def test_copies_of_a_layer(alone):
    handle, bootstrap = ep.Handle(alone()), libep.Bootstrap.local(1)[0]
    with contextlib.ExitStack() as ends:
        kinds = Buffer, ElasticBuffer
        buffer, elastic = (ends.enter_context(make_buffer(bootstrap, kind=kind)) for kind in kinds)
        x, idx, weights = ones()
        received = elastic.dispatch(x, idx, weights, num_experts=2, num_max_tokens_per_rank=4)
        for value in handle, handle.group, bootstrap, buffer, elastic, received[3]:
            assert copy.deepcopy([value])[0] is value
            with refused("TypeError a .* belongs to its process: "):
                pickle.dumps(value)
        for wrong in "2", True, 2.0:
            with refused("RANGE num_experts: expected a whole number of at least 1, got "):
                elastic.dispatch(x, idx, weights, num_experts=wrong, num_max_tokens_per_rank=4)


def test_bootstraps():
    (local,) = bootstraps = libep.Bootstrap.local(1)
    absent = torch.distributed.GroupMember.NON_GROUP_MEMBER

    class Mesh:
        def get_group(self, name):
            raise NotImplementedError

    for text, meeting, fields in [
        ("BOOTSTRAP init_process_group", [], {}),
        ("BOOTSTRAP process_group: .*init_process_group", [None], {}),
        ("TypeError NCCL communicator", [local], dict(lend_nccl=True)),
        ("ROW_BYTES max_row_bytes", [local], dict(hidden=17)),
        ("TypeError process_group: expected .*got builtins.str", ["gloo"], {}),
        ("TypeError process_group: expected .*got builtins.list: give the element of this rank",
         [bootstraps], {}),
        ("TypeError process_group: expected .*Mesh: take one of its dimensions", [Mesh()], {}),
        ("TypeError process_group: expected .*belongs to, got NON_GROUP_MEMBER", [absent], {}),
        ("TypeError dtype: expected a torch.dtype, got 'float32'", [local], dict(dtype="float32")),
    ]:  # fmt: skip
        with refused(text):
            ep.create_group(
                *meeting, **{**dict(num_experts=4, max_tokens=4, hidden=16, top_k=1), **fields}
            )
    with refused("TypeError group: expected a libep.torch.Group, got .*NoneType"):
        ep.Handle(None)
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
    assert ep.dispatch(handle, *ones()[:2]).tokens.shape == (6, 8, H)
    with refused("ValueError layout: expected one of .*flat.*, got 'round'"):
        ep.Handle(group, layout="round")


