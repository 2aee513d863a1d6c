# SPDX-License-Identifier: Apache-2.0
"""libep.deep_ep in normal mode, against the brute-force reference that sees all ranks."""

from __future__ import annotations

import contextlib
import inspect

import numpy as np
import pytest
import torch
from base import refused
from conftest import (
    DEVICE,
    assert_close,
    assert_equal,
    off,
    on_device,
    refuse_each,
    run_threads,
)
from reference import World, flat

import libep
from libep import Quant, Status
from libep.deep_ep import Buffer, Config, EventHandle, EventOverlap

SIZE = 3


def make_world(seed, **fields):
    return World(seed, **{**dict(size=SIZE, experts=2 * SIZE, hidden=16), **fields})


def inputs(world, rank):
    return (on_device(a[rank]) for a in (world.x, world.idx, world.weights))


@contextlib.contextmanager
def destroyed(buffer):
    """Destroy a buffer at the end of the block, before its bootstrap. Tell the peers of an error."""
    try:
        yield buffer
    except BaseException as error:
        for group in buffer._groups._all:
            group.abort(f"the test failed: {error}")
        raise
    finally:
        buffer.destroy()


def play(world, body, **fields):
    """Call body(buffer, rank) on a thread for each rank."""

    def run(bootstrap):
        with destroyed(Buffer(bootstrap, **fields)) as buffer:
            return body(buffer, bootstrap.rank)

    return run_threads(world.size, run)


def on_ranks(**fields):
    """The test runs on each rank, with a Buffer, in a World of these fields and its parameters."""

    def decorate(body):
        own = [*inspect.signature(body).parameters][3:]  # after buffer, rank, world

        def test(seed, **given):
            sizes = {name: given[name] for name in ("tokens", "top_k") if name in given}
            world = make_world(seed, **fields, **sizes)
            play(world, lambda buffer, rank: body(buffer, rank, world, **given))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        taken = [inspect.Parameter(name, kind) for name in ("seed", *own)]
        test.__signature__, test.__doc__ = inspect.Signature(taken), body.__doc__
        return test

    return decorate


def send(buffer, x, idx, weights, num_experts, **options):
    """The two calls that every program makes."""
    per_rank, per_rdma_rank, per_expert, is_in, event = buffer.get_dispatch_layout(idx, num_experts)
    assert per_rdma_rank is None and event.event is None
    return buffer.dispatch(
        x,
        topk_idx=idx,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=is_in,
        num_tokens_per_expert=per_expert,
        **options,
    )


def local_counts(world, rank):
    entries = [e for s in range(world.size) for _, _, e in world.entries(s)]
    return [entries.count(e) for e in world.experts_of(rank)]


def check_received(world, rank, x, idx, weights):
    mine, rows = world.experts_of(rank), flat(world, rank)
    assert idx.shape == weights.shape == (len(rows), world.top_k)
    assert idx.dtype == on_device(world.idx[rank]).dtype and weights.dtype == torch.float32
    assert_equal(x, np.array([world.x[s][t] for s, t in rows], np.float32).reshape(-1, 16))
    for i, (source, token) in enumerate(rows):
        experts = world.idx[source][token]
        assert idx[i].tolist() == [e - mine[0] if e in mine else -1 for e in experts]
        expected = np.where([e in mine for e in experts], world.weights[source][token], 0)
        assert_equal(weights[i], expected.astype(np.float32))


def factors(world, rank, idx, weights):
    """What an expert-parallel layer multiplies each row by: its local experts' factors, weighted."""
    table = torch.tensor([float(world.factor(e)) for e in world.experts_of(rank)] + [0.0])
    return (weights * table.to(idx.device)[idx.long()]).sum(1, keepdim=True)


def finish(buffer, world, rank, received, **options):
    """Experts multiply the rows that `send` has returned, and combine sums them."""
    rx, ridx, rweights, _, handle, _ = received
    return buffer.combine(rx * factors(world, rank, ridx, rweights), handle, **options)[0]


@on_ranks()
def test_layout(buffer, rank, world):
    idx = on_device(world.idx[rank])
    per_rank, none, per_expert, is_in, event = buffer.get_dispatch_layout(idx, world.experts)
    assert none is None and isinstance(event, EventOverlap) and event.event is None
    entries = list(world.entries(rank))
    assert per_expert.dtype == per_rank.dtype == torch.int32 and is_in.dtype == torch.bool
    assert per_expert.tolist() == [
        sum(e == expert for _, _, e in entries) for expert in range(world.experts)
    ]
    expected = np.zeros((world.tokens[rank], world.size), bool)
    for token, _, expert in entries:
        expected[token, expert // 2] = True
    assert_equal(is_in, expected)
    assert_equal(per_rank, expected.sum(0).astype(np.int32))


@pytest.mark.parametrize("tokens", [None, [4, 0, 1], [0, 0, 0]])
@pytest.mark.parametrize("alignment", [1, 8])
@on_ranks()
def test_step(buffer, rank, world, tokens, alignment, nodes):
    """dispatch, experts, combine; then the two backward calls of a framework."""
    x, idx, weights = inputs(world, rank)
    rx, ridx, rweights, counts, handle, event = send(
        buffer, x, idx, weights, world.experts, expert_alignment=alignment
    )
    assert event.event is None and isinstance(handle, tuple) and isinstance(counts, list)
    assert counts == [-(-c // alignment) * alignment for c in local_counts(world, rank)]
    check_received(world, rank, rx, ridx, rweights)
    scale = factors(world, rank, ridx, rweights)
    out, no_weights, event = buffer.combine(rx * scale, handle)
    assert no_weights is None and event.event is None
    assert_equal(out, world.forward(rank))
    # backward of combine: a dispatch by the same routing
    grad, *nothing, event = buffer.dispatch(on_device(world.grad_out[rank]), handle=handle)
    assert nothing == [None] * 4
    # backward of dispatch: a combine with the weights' gradients
    table = torch.tensor([float(world.factor(e)) for e in world.experts_of(rank)] + [0.0])
    grad_weights = (rx * grad).sum(1, keepdim=True) * table.to(rx.device)[ridx.long()]
    grad_x, grad_weights, _ = buffer.combine(grad * scale, handle, topk_weights=grad_weights)
    expected_x, expected_weights = world.backward(rank)
    assert_equal(grad_x, expected_x)
    assert_equal(grad_weights, expected_weights)


def test_worst_tokens(seed):
    """Rows of a fixed number, without a look at the counts."""
    world = make_world(seed)
    most = SIZE * world.max_tokens

    def body(buffer, rank):
        x, idx, weights = inputs(world, rank)
        rx, ridx, rweights, counts, handle, _ = send(
            buffer, x, idx, weights, world.experts, num_worst_tokens=most
        )
        rows = len(flat(world, rank))
        assert counts == [] and rx.shape == (most, 16) and ridx.shape == (most, world.top_k)
        check_received(world, rank, rx[:rows], ridx[:rows], rweights[:rows])
        assert (ridx[rows:] == -1).all()
        live = torch.zeros_like(rx)
        live[:rows] = rx[:rows] * factors(world, rank, ridx[:rows], rweights[:rows])
        assert_equal(buffer.combine(live, handle)[0], world.forward(rank))

    play(world, body)


@on_ranks(hidden=256)
def test_quantised_rows(buffer, rank, world):
    """(rows, scales) travel as they are; scales in column-major order, too."""
    x, idx, weights = inputs(world, rank)
    rows = flat(world, rank)
    fp8 = x.to(torch.float8_e4m3fn)
    values = x[:, :2].contiguous()
    expected = np.array([world.x[s][t] for s, t in rows], np.float32).reshape(-1, 256)
    for scales in (values, values.t().contiguous().t()):
        (rx, rscales), _, _, _, handle, _ = send(
            buffer, (fp8, scales), idx, weights, world.experts
        )
        assert rx.dtype == torch.float8_e4m3fn and rscales.is_contiguous()
        assert_equal(rx.float(), torch.tensor(expected).to(torch.float8_e4m3fn).float())
        assert_equal(rscales, expected[:, :2])
        again, *_ = buffer.dispatch((fp8, scales), handle=handle)
        assert_equal(again[0].float(), rx.float())
        assert_equal(again[1], rscales)
    # the experts' outputs are bf16
    out, _, _ = buffer.combine(rx.bfloat16(), handle)
    ranks = [len({e // 2 for e in world.idx[rank][t] if e >= 0}) for t in range(len(x))]
    assert_equal(
        out, (fp8.bfloat16().float() * torch.tensor(ranks)[:, None].to(x.device)).bfloat16()
    )


@on_ranks(hidden=256, tokens=[3, 0, 5])
def test_rows_without_a_layout(buffer, rank, world):
    """dispatch_rows delivers what dispatch does, and quantises."""
    x, idx, weights = inputs(world, rank)
    good = dict(x=x, topk_idx=idx, topk_weights=weights, num_experts=world.experts)
    rx, ridx, rweights, counts, handle, _ = send(buffer, x, idx, weights, world.experts)
    for quant in Quant.NONE, Quant.FP8, Quant.FP8_UE8M0:
        (got, scales, *others), event = buffer.dispatch_rows(**good, quant=quant)
        assert event.event is None and others[2] == counts
        assert_equal(others[0], ridx)
        assert_equal(others[1], rweights)
        if quant != Quant.NONE:
            got = (got.float().unflatten(1, (2, 128)) * scales.float()[..., None]).flatten(1)
        assert_close(got, rx, 1 / 16 if quant != Quant.NONE else 0)
        assert_equal(buffer.combine(rx, others[3])[0], buffer.combine(rx, handle)[0])
    bad = [dict(x=given) for given in (x.int(), off(x), x[:, :24].contiguous(), x.to("meta"))]
    bad += [dict(topk_idx=idx[1:]), dict(topk_idx=idx.float()), dict(expert_alignment=0)]
    bad += [dict(topk_weights=weights[:, :1])]
    if rank == 2:
        refuse_each(buffer.dispatch_rows, dict(good, quant=Quant.FP8), bad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@on_ranks()
def test_bias(buffer, rank, world, dtype):
    x, idx, weights = inputs(world, rank)
    x = x.to(dtype)
    rx, *_, handle, _ = send(buffer, x, idx, weights, world.experts)
    plain, _, _ = buffer.combine(rx, handle)
    one, _, _ = buffer.combine(rx, handle, bias=x)
    two, _, _ = buffer.combine(rx, handle, bias=(x, 2 * x))
    assert one.dtype == two.dtype == dtype
    assert_equal(one, (plain.float() + x.float()).to(dtype))
    assert_equal(two, (plain.float() + 3 * x.float()).to(dtype))


@pytest.mark.parametrize("top_k", [2, 3])  # fewer than ranks, or as many
def test_one_rank_needs_more(seed, top_k):
    """A rank with more tokens than the group has room for: all ranks make a larger one."""
    small = make_world(seed, top_k=top_k)
    large = make_world(seed + 1, tokens=[2, 1100, 0], max_tokens=1100, top_k=top_k)
    larger = make_world(seed + 2, tokens=[2100, 300, 2049], max_tokens=2100, top_k=top_k)
    largest = make_world(seed + 3, tokens=[0, 5, 4200], max_tokens=4200, top_k=top_k)

    def body(buffer, rank):
        def step(world):
            x, idx, weights = inputs(world, rank)
            rx, ridx, rweights, counts, handle, _ = send(buffer, x, idx, weights, world.experts)
            assert counts == local_counts(world, rank)
            return world, handle, rx * factors(world, rank, ridx, rweights)

        steps = [step(world) for world in (small, large, small, larger, large)]
        assert len(buffer._groups._all) == 3
        for world, handle, rows in reversed(steps):  # of groups that are not the newest, too
            assert_equal(buffer.combine(rows, handle)[0], world.forward(rank))
        steps = steps[-1:] if rank == 1 else []  # one rank may still combine
        del world, handle, rows
        last, handle, rows = step(largest)
        assert len(buffer._groups._all) == 2  # the others are closed
        assert_equal(buffer.combine(rows, handle)[0], last.forward(rank))

    play(small, body)


@pytest.mark.parametrize("top_k", [2, 3])
@on_ranks(tokens=[1024] * SIZE, max_tokens=1024)
def test_full_room_is_enough(buffer, rank, world, top_k):
    """As many tokens as there is room for, all of them to one rank: no rank asks for more."""
    x, idx, weights = inputs(world, rank)
    idx = torch.arange(top_k, device=idx.device).expand(1024, top_k) % 2
    for _ in range(2):
        rx, *_, handle, _ = send(buffer, x, idx, weights, world.experts)
        assert len(rx) == (SIZE * 1024 if rank == 0 else 0)
        assert_equal(buffer.combine(rx, handle)[0], x)
    assert len(buffer._groups._all) == 1


@on_ranks()
def test_asynchronous(buffer, rank, world):
    """With async_finish a call gives an event; the next call may wait for it."""
    x, idx, weights = inputs(world, rank)
    before = buffer.capture()
    assert isinstance(before.event, EventHandle)
    options = dict(async_finish=True, allocate_on_comm_stream=True)
    *layout, event = buffer.get_dispatch_layout(
        idx, world.experts, previous_event=EventOverlap(EventHandle()), **options
    )
    rx, ridx, rweights, counts, handle, event = buffer.dispatch(
        x,
        topk_idx=idx,
        topk_weights=weights,
        num_tokens_per_rank=layout[0],
        num_tokens_per_rdma_rank=layout[1],
        num_tokens_per_expert=layout[2],
        is_token_in_rank=layout[3],
        previous_event=event,
        config=Config(24, 8, 256),
        **options,
    )
    event.current_stream_wait()
    rows = rx * factors(world, rank, ridx, rweights)
    out, _, event = buffer.combine(
        rows, handle, previous_event=buffer.capture(), config=Config(24), **options
    )
    with event:
        del rows
    assert_equal(out, world.forward(rank))


@on_ranks()
def test_ids_of_32_bits_and_no_weights(buffer, rank, world):
    x, idx, _ = inputs(world, rank)
    for dtype in (torch.int32, torch.int64):
        rx, ridx, rweights, _, handle, _ = send(buffer, x, idx.to(dtype), None, world.experts)
        assert ridx.dtype == dtype and rweights is None
        assert len(rx) == len(flat(world, rank))


@pytest.mark.parametrize("tokens", [None, [4, 0, 1]])
@on_ranks(max_tokens=70)
def test_without_experts(buffer, rank, world, tokens):
    """Tokens go to ranks alone: the counts are the caller's."""
    x, idx, _ = inputs(world, rank)
    per_rank, _, per_expert, is_in, _ = buffer.get_dispatch_layout(idx, world.experts)
    rx, ridx, rweights, counts, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=is_in,
        num_tokens_per_expert=per_expert,
        expert_alignment=4,
    )
    assert ridx is None and rweights is None
    assert counts == [-(-c // 4) * 4 for c in local_counts(world, rank)]
    rows = [world.x[s][t] for s, t in flat(world, rank)]
    assert_equal(rx, np.array(rows, np.float32).reshape(-1, 16))
    out, none, _ = buffer.combine(rx, handle)
    assert none is None
    assert_equal(out, x * is_in.sum(1, keepdim=True))


def test_two_models_on_one_buffer(seed):
    """Other experts, top-k, hidden sizes and types: a group for each."""
    worlds = [
        make_world(seed, **fields)
        for fields in (dict(), dict(experts=9, top_k=1), dict(hidden=32, top_k=3))
    ]

    def body(buffer, rank):
        for world in 2 * worlds:
            x, idx, weights = inputs(world, rank)
            received = send(buffer, x, idx, weights, world.experts)
            assert_equal(finish(buffer, world, rank, received), world.forward(rank))

    play(worlds[0], body)


@on_ranks()
def test_fields_of_a_handle(buffer, rank, world):
    """What DeepEP's programs look at: computed when it is read."""
    x, idx, weights = inputs(world, rank)
    rows = flat(world, rank)
    for worst in (0, SIZE * world.max_tokens):
        handle = send(buffer, x, idx, weights, world.experts, num_worst_tokens=worst)[4]
        assert len(handle) == 6 and not {"recv_src_idx", "rank_prefix_matrix"} & {*vars(handle)}
        matrix, none, no_channels, tokens, is_in, no_heads = handle
        assert [none, no_channels, no_heads] == 3 * [None]
        expected = np.full((SIZE, SIZE), -1, np.int32)
        expected[:, rank] = [sum(s <= source for s, _ in rows) for source in range(SIZE)]
        assert_equal(matrix, expected)
        absent = (worst - len(rows)) * [-1] if worst else []
        assert_equal(tokens, np.array([t for _, t in rows] + absent, np.int32))
        assert matrix.dtype == tokens.dtype == torch.int32 and handle[3] is tokens
        assert handle[4] is is_in and is_in.shape == (len(x), SIZE)


@pytest.mark.parametrize("top_k", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks()
def test_weights_without_an_expert(buffer, rank, world, top_k, dtype):
    """combine adds the weights of all ranks, those of entries of other ranks included."""
    x, idx, weights = inputs(world, rank)
    rx, ridx, _, _, handle, _ = send(buffer, x, idx, weights, world.experts)
    given = torch.full(ridx.shape, 1.0 + rank, dtype=dtype, device=x.device)
    out, total, _ = buffer.combine(rx, handle, topk_weights=given)
    expected = (handle.is_token_in_rank * torch.arange(1.0, SIZE + 1, device=x.device)).sum(1)
    assert total.dtype == torch.float32 and total.is_contiguous()
    assert_equal(total, expected[:, None].expand(-1, top_k))
    assert_equal(out, buffer.combine(rx, handle)[0])


def test_strides(seed):
    """Inputs may have any strides."""
    world = make_world(seed)

    def strided(tensor):
        return torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]]

    def body(buffer, rank):
        x, idx, weights = inputs(world, rank)
        rx, ridx, rweights, _, handle, _ = send(
            buffer, strided(x), strided(idx), strided(weights.bfloat16()), world.experts
        )
        assert rweights.dtype == torch.float32
        check_received(world, rank, rx, ridx, rweights)  # multiples of 1/4
        rows = strided(rx * factors(world, rank, ridx, rweights))
        assert_equal(buffer.combine(rows, handle)[0], world.forward(rank))

    play(world, body)


# ---- errors -------------------------------------------------------------------------------------


@on_ranks(hidden=256, tokens=[3, 3, 3])
def test_a_refused_call_took_no_part(buffer, rank, world):
    """One rank is refused, corrects its call, and calls again; the others notice nothing."""
    x, idx, weights = inputs(world, rank)
    idx[0, 0] = world.experts_of(1)[0]  # so that rows come to the rank that is refused
    _, _, per_expert, is_in, _ = buffer.get_dispatch_layout(idx, world.experts)
    fp8, scales = x.to(torch.float8_e4m3fn), x[:, :2].contiguous()
    good = dict(
        x=(fp8, scales),
        topk_idx=idx,
        topk_weights=weights,
        is_token_in_rank=is_in,
        num_tokens_per_expert=per_expert,
    )
    far = "meta"  # a CPU serves as well as a GPU
    rows = [x.double(), x.cdouble(), x[None], x[:, :3].contiguous(), off(x), x.to(far)]
    rows += [x.cpu().numpy(), x.repeat(1, 65), x.to_sparse()]
    bad = [dict(x=row) for row in rows]
    some = [scales[:1], scales.double(), scales.to(far), off(fp8)[:, :9], scales.repeat(1, 2)]
    bad += [dict(x=(fp8, given)) for given in some]
    some = [idx.short(), idx.float(), idx[:1], idx[0], idx.to(far), idx.tolist()]
    some += [idx[:, :0], idx.repeat(1, 17)]
    bad += [dict(topk_idx=given) for given in some]
    some = [weights.double(), weights[:, :1], weights[:1], weights.to(far), 1.0]
    bad += [dict(topk_weights=given) for given in some]
    some = [per_expert.float(), per_expert[None], per_expert.to(far), per_expert.tolist()]
    bad += [dict(num_tokens_per_expert=given) for given in some]
    bad += [dict(expert_alignment=0), dict(num_worst_tokens=-1), dict(num_worst_tokens="all")]
    to_ranks = dict(x=x, is_token_in_rank=is_in, num_tokens_per_expert=per_expert)
    some = [is_in.int(), is_in[:, :1], is_in[:1], is_in.to(far), [True]]
    for _ in range(2):  # before there is a group, and with one
        if rank == 1:
            refuse_each(buffer.dispatch, good, bad)
            refuse_each(buffer.dispatch, to_ranks, [dict(is_token_in_rank=i) for i in some])
        buffer.dispatch(**good)
        buffer.dispatch(**to_ranks)
        rx, _, rweights, _, handle, _ = buffer.dispatch(**{**good, "x": x})
    good = dict(x=rx, handle=handle, topk_weights=rweights, bias=(x, x))
    some = [rx.double(), rx.to(torch.float8_e4m3fn), off(rx), rx.to(far), rx[None], rx[1:]]
    bad = [dict(x=given) for given in [*some, rx[:, :3].contiguous(), None]]
    some = [rweights.double(), rweights[1:], rweights[:, 1:], rweights.to(far), [1.0]]
    bad += [dict(topk_weights=given) for given in some]
    bad += [dict(bias=given) for given in (x[1:], (x, x[:, :1]), x.double(), x.to(far), 1)]
    bad += [dict(handle=None), dict(handle=tuple(handle))]
    if rank == 1:
        refuse_each(buffer.combine, good, bad)
        refuse_each(buffer.dispatch, dict(x=x, handle=handle), [dict(x=x[1:]), dict(x=off(x))])
    out, _, _ = buffer.combine(**good)
    assert_equal(out, x * (2 + is_in.sum(1, keepdim=True)))


def test_worst_tokens_do_not_grow(seed):
    """The rank that cannot go on says so to all."""
    world = make_world(seed, tokens=[1, 1, 1])

    def run(bootstrap):
        rank = bootstrap.rank
        x, idx, weights = inputs(world, rank)
        with destroyed(Buffer(bootstrap)) as buffer:
            send(buffer, x, idx, weights, world.experts)
            if rank == 1:
                x, idx, weights = (t.expand(2000, -1).contiguous() for t in (x, idx, weights))
            with refused("EpError at most 1024 tokens.*got 2000") as caught:
                send(buffer, x, idx, weights, world.experts, num_worst_tokens=9000)
                if DEVICE == "cuda":  # it was only enqueued: the next call says what became of it
                    torch.cuda.synchronize()
                    send(buffer, x, idx, weights, world.experts, num_worst_tokens=9000)
            assert caught.value.status == (Status.TOKENS if rank == 1 else Status.PEER)

    run_threads(world.size, run)


@pytest.mark.parametrize("top_k", [2, 3])
@on_ranks(tokens=[2, 2, 2])
def test_routing_and_lost_rows(buffer, rank, world, top_k):
    """An expert that does not exist, and rows that did not fit, are errors of their rank."""
    note = ".*one more" if top_k < SIZE else "((?!one more).)*$"
    x, idx, weights = inputs(world, rank)
    wrong = idx.clone()
    if rank == 1:
        wrong[1, 0] = world.experts
    options = dict(
        topk_idx=wrong, topk_weights=weights, num_tokens_per_expert=idx.new_zeros(world.experts)
    )
    if rank == 1:
        with refused(f"ROUTING rank 1.*token 1{note}"):
            buffer.dispatch(x, **options)
    else:
        buffer.dispatch(x, **options)
    everywhere = torch.zeros_like(idx)
    everywhere[:, 1:] = -1
    send(buffer, x, everywhere, weights, world.experts, num_worst_tokens=5)
    if rank == 0:
        with refused(f"OVERFLOW rank 0{note}"):
            send(buffer, x, idx, weights, world.experts)
    else:
        send(buffer, x, idx, weights, world.experts)
    send(buffer, x, idx, weights, world.experts)


def test_sentences():
    (bootstrap,) = libep.Bootstrap.local(1)
    buffer = Buffer(bootstrap)
    x = torch.ones(2, 16, device=DEVICE)
    idx = torch.tensor([[0, 1], [2, -1]], device=DEVICE)
    weights = torch.ones(2, 2, device=DEVICE)
    *_, counts, handle, event = send(buffer, x, idx, weights, 4)
    assert counts == [1, 1, 1, 0]
    table = [
        ("enable_shrink.*mask", lambda: Buffer(bootstrap, enable_shrink=True)),
        ("MPI", lambda: Buffer(None, comm=object())),
        ("without async_finish", event.current_stream_wait),
        ("x alone with a handle", lambda: buffer.dispatch(x, handle, topk_idx=idx)),
        ("one that dispatch returned", lambda: buffer.combine(x, (1, 2, 3))),
        ("expected num_tokens_per_expert", lambda: buffer.dispatch(x)),
        ("expected topk_idx, or is_token_in_rank",
         lambda: buffer.dispatch(x, num_tokens_per_expert=idx.new_zeros(4))),
        ("Buffer: process_group: expected a ProcessGroup", lambda: Buffer("gloo")),
        ("even number", lambda: Buffer.set_num_sms(7)),
        ("mask of ranks", lambda: buffer.low_latency_update_mask_buffer(0, True)),
        ("mask of ranks", lambda: buffer.low_latency_query_mask_buffer(x)),
        ("mask of ranks", buffer.low_latency_clean_mask_buffer),
        ("no communication buffer",
         lambda: buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)),
        ("bf16 or fp8", lambda: send(buffer, x, idx, None, 4, use_nvfp4=True)),
    ]  # fmt: skip
    if DEVICE == "cpu" and not torch.cuda.is_available():
        table.append(("GPU", buffer.get_comm_stream))
    for words, call in table:
        with refused(f"EpError {words}"):
            call()
    buffer.destroy()
    buffer.destroy()
    with refused("EpError destroyed"):
        send(buffer, x, idx, weights, 4)


def test_uneven_experts():
    bootstraps = libep.Bootstrap.local(2)
    buffer = Buffer(bootstraps[0])
    with refused("EpError equally many experts on each of 2 ranks, got 3"):
        buffer.get_dispatch_layout(torch.zeros(1, 1, dtype=torch.int64), 3)


def test_unknown_keywords(caplog):
    (bootstrap,) = libep.Bootstrap.local(1)
    x = torch.ones(2, 16, device=DEVICE)
    idx = torch.tensor([[0, 1], [2, -1]], device=DEVICE)
    buffer = Buffer(bootstrap, use_fabric=True, nothing=None)
    for _ in range(2):
        send(buffer, x, idx, None, 4, brand_new=3)
    assert [record.getMessage() for record in caplog.records] == [
        "Buffer: use_fabric is ignored: libep has no such argument",
        "dispatch: brand_new is ignored: libep has no such argument",
    ]
    buffer.destroy()


def test_configurations():
    assert Buffer.num_sms == 20 and Buffer.get_dispatch_config(8).num_sms == 20
    Buffer.set_num_sms(24)
    try:
        assert Buffer.get_combine_config(3).num_sms == 24
    finally:
        Buffer.set_num_sms(20)
    config = Config(num_sms=16, num_max_nvl_chunked_send_tokens=4)
    assert (config.num_sms, config.num_max_nvl_chunked_recv_tokens) == (16, 256)
    assert config.get_nvl_buffer_size_hint(14336, 8) == 0
    assert config.get_rdma_buffer_size_hint(14336, 8) == 0
    hint = Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256)
    assert isinstance(hint, int) and 0 < hint < 1 << 32
    assert Buffer.is_sm90_compiled() is True
