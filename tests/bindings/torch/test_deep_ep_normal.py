# SPDX-License-Identifier: Apache-2.0
"""libep.deep_ep in normal mode, against the brute-force reference that sees all ranks."""

import functools

import numpy as np
import pytest
import torch
from base import refused
from conftest import (
    DEVICE, assert_close, assert_equal, inputs_of, make_buffer, off, on_device, on_ranks, refuse_each,
    run_threads, strided, wrong_indices, wrong_rows, wrong_weights
)  # fmt: skip
from reference import World, flat

import libep
from libep import Quant, Status
from libep.deep_ep import Buffer, Config, EventHandle, EventOverlap
from libep.torch import _fast

SIZE = 3
SIZES = dict(size=SIZE, experts=2 * SIZE, hidden=16)
BESIDE = dict(async_finish=True, allocate_on_comm_stream=True)


def with_buffer(*parameters, kind=Buffer, fields=None, **sizes):
    """on_ranks with a Buffer of these fields and a World of these sizes."""
    options = dict(make=make_buffer, kind=kind, **(fields or {}))
    return on_ranks(*parameters, world={**SIZES, **sizes}, **options)


def make_worlds(seed, *sizes):
    """A World for each dict of sizes."""
    return [World(seed + i, **{**SIZES, **given}) for i, given in enumerate(sizes)]


def layout_of(buffer, idx, num_experts, **options):
    """What get_dispatch_layout says, by the names of dispatch's arguments, and the event."""
    found = buffer.get_dispatch_layout(idx, num_experts, **options)
    names = "rank rdma_rank expert".split()
    given = {f"num_tokens_per_{name}": value for name, value in zip(names, found)}
    return dict(given, is_token_in_rank=found[3]), found[4]


def send(buffer, x, idx, weights, num_experts, **options):
    """The two calls that every program makes."""
    layout, event = layout_of(buffer, idx, num_experts)
    assert layout["num_tokens_per_rdma_rank"] is None and event.event is None
    return buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **layout, **options)


def send_world(buffer, world, rank, **options):
    return send(buffer, *inputs_of(world, rank), world.experts, **options)


def local_counts(world, rank, alignment=1):
    entries = [e for s in range(world.size) for _, _, e in world.entries(s)]
    return [-(-entries.count(e) // alignment) * alignment for e in world.experts_of(rank)]


def rows_of(world, rank, values=None):
    """The rows that a rank receives."""
    rows = [(values or world.x)[s][t] for s, t in flat(world, rank)]
    return np.array(rows, np.float32).reshape(-1, world.hidden)


def check_received(world, rank, x, idx, weights):
    mine, rows = world.experts_of(rank), flat(world, rank)
    assert idx.shape == weights.shape == (len(rows), world.top_k)
    assert idx.dtype == on_device(world.idx[rank]).dtype and weights.dtype == torch.float32
    assert_equal(x, rows_of(world, rank))
    for i, (source, token) in enumerate(rows):
        experts = world.idx[source][token]
        assert idx[i].tolist() == [e - mine[0] if e in mine else -1 for e in experts]
        expected = np.where([e in mine for e in experts], world.weights[source][token], 0)
        assert_equal(weights[i], expected.astype(np.float32))


def factors(world, rank, idx, weights):
    """What an expert-parallel layer multiplies each row by: its local experts' factors, weighted."""
    return (weights * scale_of(world, rank, idx)).sum(1, keepdim=True)


def scale_of(world, rank, idx):
    """The factors of local experts; 0 of entries without one."""
    table = torch.tensor([float(world.factor(e)) for e in world.experts_of(rank)] + [0.0])
    return table.to(idx.device)[idx.long()]


def experts(world, rank, received):
    """What the experts return for the rows that `send` has returned."""
    return received[0] * factors(world, rank, received[1], received[2])


@pytest.mark.parametrize("tokens", [None, [4, 0, 1], [0, 0, 0]])
@pytest.mark.parametrize("alignment", [1, 8])
@with_buffer("tokens")
def test_step(buffer, rank, world, alignment, nodes):
    """dispatch, experts, combine; then the two backward calls of a framework."""
    received = send_world(buffer, world, rank, expert_alignment=alignment)
    rx, ridx, rweights, counts, handle, event = received
    assert event.event is None and isinstance(handle, tuple) and isinstance(counts, list)
    assert counts == local_counts(world, rank, alignment)
    check_received(world, rank, rx, ridx, rweights)
    out, no_weights, event = buffer.combine(experts(world, rank, received), handle)
    assert no_weights is None and event.event is None
    assert_equal(out, world.forward(rank))
    # backward of combine: a dispatch by the same routing
    grad, *nothing, event = buffer.dispatch(on_device(world.grad_out[rank]), handle=handle)
    assert nothing == [None] * 4
    # backward of dispatch: a combine with the weights' gradients
    grad_weights = (rx * grad).sum(1, keepdim=True) * scale_of(world, rank, ridx)
    grad = grad * factors(world, rank, ridx, rweights)
    grads = buffer.combine(grad, handle, topk_weights=grad_weights)[:2]
    for got, expected in zip(grads, world.backward(rank)):
        assert_equal(got, expected)


@with_buffer()
def test_worst_tokens(buffer, rank, world):
    """Rows of a fixed number, without a look at the counts."""
    most, rows = SIZE * world.max_tokens, len(flat(world, rank))
    *received, counts, handle, _ = send_world(buffer, world, rank, num_worst_tokens=most)
    rx, ridx, _ = received
    assert counts == [] and rx.shape == (most, 16) and ridx.shape == (most, world.top_k)
    check_received(world, rank, *(t[:rows] for t in received))
    assert (ridx[rows:] == -1).all()
    live = torch.zeros_like(rx)
    live[:rows] = experts(world, rank, [t[:rows] for t in received])
    assert_equal(buffer.combine(live, handle)[0], world.forward(rank))


@with_buffer(hidden=256)
def test_quantised_rows(buffer, rank, world):
    """(rows, scales) travel as they are; scales in column-major order, too."""
    x, idx, weights = inputs_of(world, rank)
    fp8, values, expected = x.to(torch.float8_e4m3fn), x[:, :2].contiguous(), rows_of(world, rank)
    for scales in (values, values.t().contiguous().t()):
        given = (fp8, scales), idx, weights, world.experts
        (rx, rscales), _, _, _, handle, _ = send(buffer, *given)
        assert rx.dtype == torch.float8_e4m3fn and rscales.is_contiguous()
        assert_equal(rx.float(), torch.tensor(expected).to(torch.float8_e4m3fn).float())
        assert_equal(rscales, expected[:, :2])
        again, *_ = buffer.dispatch((fp8, scales), handle=handle)
        assert_equal(again[0].float(), rx.float())
        assert_equal(again[1], rscales)
    # the experts' outputs are bf16
    out, _, _ = buffer.combine(rx.bfloat16(), handle)
    ranks = [len({e // 2 for e in world.idx[rank][t] if e >= 0}) for t in range(len(x))]
    total = fp8.float() * torch.tensor(ranks, device=x.device)[:, None]
    assert_equal(out, total.bfloat16())


@with_buffer(hidden=256, tokens=[3, 0, 5])
def test_rows_without_a_layout(buffer, rank, world):
    """dispatch_rows delivers what dispatch does, and quantises."""
    x, idx, weights = inputs_of(world, rank)
    good = dict(x=x, topk_idx=idx, topk_weights=weights, num_experts=world.experts)
    rx, ridx, rweights, counts, handle, _ = send_world(buffer, world, rank)
    for quant in Quant.NONE, Quant.FP8, Quant.FP8_UE8M0:
        (got, scales, *others), event = buffer.dispatch_rows(**good, quant=quant)
        assert event.event is None and others[2] == counts
        assert_equal(others[0], ridx)
        assert_equal(others[1], rweights)
        if quant != Quant.NONE:
            got = (got.float().unflatten(1, (2, 128)) * scales.float()[..., None]).flatten(1)
        assert_close(got, rx, 1 / 16 if quant != Quant.NONE else 0)
        assert_equal(buffer.combine(rx, others[3])[0], buffer.combine(rx, handle)[0])
    bad = dict(
        x=[x.int(), off(x), x[:, :24].contiguous(), x.to("meta")], expert_alignment=[0],
        topk_idx=[idx[1:], idx.float()], topk_weights=[weights[:, :1]],
    )  # fmt: skip
    if rank == 2:
        refuse_each(buffer.dispatch_rows, dict(good, quant=Quant.FP8), bad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@with_buffer()
def test_bias(buffer, rank, world, dtype):
    x, idx, weights = inputs_of(world, rank)
    x = x.to(dtype)
    rx, *_, handle, _ = send(buffer, x, idx, weights, world.experts)
    plain, _, _ = buffer.combine(rx, handle)
    for bias, total in (x, x.float()), ((x, 2 * x), 3 * x.float()):
        out, _, _ = buffer.combine(rx, handle, bias=bias)
        assert out.dtype == dtype
        assert_equal(out, (plain.float() + total).to(dtype))


@pytest.mark.parametrize("calls", [1, 2])  # of C, for prepare and dispatch
@pytest.mark.parametrize("top_k", [2, 3])  # fewer than ranks, or as many
def test_one_rank_needs_more(seed, top_k, calls, monkeypatch):
    """A rank with more tokens than the group has room for: all ranks make a larger one."""
    if calls == 2:
        monkeypatch.setattr(_fast, "send", None)
    counts = [2, 1100, 0], [2100, 300, 2049], [0, 5, 4200]
    sizes = [dict(tokens=each, max_tokens=max(each), top_k=top_k) for each in counts]
    small, large, larger, largest = make_worlds(seed, dict(top_k=top_k), *sizes)

    def body(bootstrap):
        rank = bootstrap.rank
        with make_buffer(bootstrap) as buffer:

            def step(world):
                received = send_world(buffer, world, rank)
                assert received[3] == local_counts(world, rank)
                return world, received[4], experts(world, rank, received)

            steps = [step(world) for world in (small, large, small, larger, large)]
            assert len(buffer._groups._all) == 3
            for world, handle, rows in reversed(steps):  # of groups that are not the newest, too
                assert_equal(buffer.combine(rows, handle)[0], world.forward(rank))
            steps = steps[-1:] if rank == 1 else []  # one rank may still combine
            del world, handle, rows
            last, handle, rows = step(largest)
            assert len(buffer._groups._all) == 2  # the others are closed
            assert_equal(buffer.combine(rows, handle)[0], last.forward(rank))

    run_threads(SIZE, body)


@pytest.mark.parametrize("top_k", [2, 3])
@with_buffer(tokens=[1024] * SIZE, max_tokens=1024)
def test_full_room_is_enough(buffer, rank, world, top_k):
    """As many tokens as there is room for, all of them to one rank: no rank asks for more."""
    x, idx, weights = inputs_of(world, rank)
    idx = torch.arange(top_k, device=idx.device).expand(1024, top_k) % 2
    for _ in range(2):
        rx, *_, handle, _ = send(buffer, x, idx, weights, world.experts)
        assert len(rx) == (SIZE * 1024 if rank == 0 else 0)
        assert_equal(buffer.combine(rx, handle)[0], x)
    assert len(buffer._groups._all) == 1


@with_buffer()
def test_asynchronous(buffer, rank, world):
    """With async_finish a call gives an event; the next call may wait for it."""
    x, idx, weights = inputs_of(world, rank)
    assert isinstance(buffer.capture().event, EventHandle)
    after = dict(previous_event=EventOverlap(EventHandle()), **BESIDE)
    layout, event = layout_of(buffer, idx, world.experts, **after)
    options = dict(layout, previous_event=event, config=Config(24, 8, 256), **BESIDE)
    *received, handle, event = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **options)
    event.current_stream_wait()
    rows = experts(world, rank, received)
    after["previous_event"] = buffer.capture()
    out, _, event = buffer.combine(rows, handle, config=Config(24), **after)
    with event:
        del rows
    assert_equal(out, world.forward(rank))


@pytest.mark.parametrize("tokens", [None, [4, 0, 1], [0, 0, 0]])
@with_buffer("tokens", max_tokens=70)
def test_without_experts(buffer, rank, world):
    """Tokens go to ranks alone: the counts are the caller's."""
    x, idx, _ = inputs_of(world, rank)
    layout, _ = layout_of(buffer, idx, world.experts)
    rx, ridx, rweights, counts, handle, _ = buffer.dispatch(x, expert_alignment=4, **layout)
    assert ridx is None and rweights is None
    assert counts == local_counts(world, rank, 4)
    assert_equal(rx, rows_of(world, rank))
    out, none, _ = buffer.combine(rx, handle)
    assert none is None
    assert_equal(out, x * layout["is_token_in_rank"].sum(1, keepdim=True))


def test_two_models_on_one_buffer(seed):
    """Other experts, top-k, hidden sizes and types: a group for each."""
    worlds = make_worlds(seed, {}, dict(experts=9, top_k=1), dict(hidden=32, top_k=3))

    def body(bootstrap):
        rank = bootstrap.rank
        with make_buffer(bootstrap) as buffer:
            for world in 2 * worlds:
                received = send_world(buffer, world, rank)
                out, _, _ = buffer.combine(experts(world, rank, received), received[4])
                assert_equal(out, world.forward(rank))

    run_threads(SIZE, body)


@with_buffer()
def test_fields_of_a_handle(buffer, rank, world):
    """What DeepEP's programs look at: computed when it is read."""
    rows = flat(world, rank)
    for worst in (0, SIZE * world.max_tokens):
        handle = send_world(buffer, world, rank, num_worst_tokens=worst)[4]
        assert len(handle) == 6 and not {"recv_src_idx", "rank_prefix_matrix"} & {*vars(handle)}
        matrix, none, no_channels, tokens, is_in, no_heads = handle
        assert [none, no_channels, no_heads] == 3 * [None]
        expected = np.full((SIZE, SIZE), -1, np.int32)
        expected[:, rank] = [sum(s <= source for s, _ in rows) for source in range(SIZE)]
        assert_equal(matrix, expected)
        absent = (worst - len(rows)) * [-1] if worst else []
        assert_equal(tokens, np.array([t for _, t in rows] + absent, np.int32))
        assert matrix.dtype == tokens.dtype == torch.int32 and handle[3] is tokens
        assert handle[4] is is_in and is_in.shape == (world.tokens[rank], SIZE)


@pytest.mark.parametrize("top_k", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@with_buffer()
def test_weights_without_an_expert(buffer, rank, world, top_k, dtype):
    """combine adds the weights of all ranks, those of entries of other ranks included."""
    rx, ridx, _, _, handle, _ = send_world(buffer, world, rank)
    given = torch.full(ridx.shape, 1.0 + rank, dtype=dtype, device=rx.device)
    out, total, _ = buffer.combine(rx, handle, topk_weights=given)
    expected = (handle.is_token_in_rank * torch.arange(1.0, SIZE + 1, device=rx.device)).sum(1)
    assert total.dtype == torch.float32 and total.is_contiguous()
    assert_equal(total, expected[:, None].expand(-1, top_k))
    assert_equal(out, buffer.combine(rx, handle)[0])


@with_buffer()
def test_strides(buffer, rank, world):
    """Inputs may have any strides."""
    x, idx, weights = inputs_of(world, rank)
    given = map(strided, (x, idx, weights.bfloat16()))
    received = send(buffer, *given, world.experts)
    assert received[2].dtype == torch.float32
    check_received(world, rank, *received[:3])  # multiples of 1/4
    rows = strided(experts(world, rank, received))
    assert_equal(buffer.combine(rows, received[4])[0], world.forward(rank))


# ---- errors -------------------------------------------------------------------------------------


@with_buffer(hidden=256, tokens=[3, 3, 3])
def test_a_refused_call_took_no_part(buffer, rank, world):
    """One rank is refused, corrects its call, and calls again; the others notice nothing."""
    x, idx, weights = inputs_of(world, rank)
    idx[0, 0] = world.experts_of(1)[0]  # so that rows come to the rank that is refused
    layout, _ = layout_of(buffer, idx, world.experts)
    counts, is_in = layout["num_tokens_per_expert"], layout["is_token_in_rank"]
    fp8, scales = x.to(torch.float8_e4m3fn), x[:, :2].contiguous()
    to_ranks = dict(x=x, is_token_in_rank=is_in, num_tokens_per_expert=counts)
    good = dict(to_ranks, x=(fp8, scales), topk_idx=idx, topk_weights=weights)
    some = [*wrong_weights(scales)[:3], off(fp8)[:, :9], scales.repeat(1, 2)]
    bad = dict(
        x=[*wrong_rows(x)[:-1], x.cdouble(), x.cpu().numpy(), x.repeat(1, 65), x.to_sparse(),
           *((fp8, given) for given in some)],
        topk_idx=[*wrong_indices(idx), idx[:, :0]],
        topk_weights=[*wrong_weights(weights), weights[:, :1]],
        num_tokens_per_expert=[counts.float(), counts[None], counts.to("meta"), counts.tolist()],
        expert_alignment=[0],
        num_worst_tokens=[-1, "all"],
    )  # fmt: skip
    bad_to_ranks = [is_in.int(), is_in[:, :1], is_in[:1], is_in.to("meta"), [True]]
    for _ in range(2):  # before there is a group, and with one
        if rank == 1:
            refuse_each(buffer.dispatch, good, bad)
            refuse_each(buffer.dispatch, to_ranks, dict(is_token_in_rank=bad_to_ranks))
        buffer.dispatch(**good)
        buffer.dispatch(**to_ranks)
        rx, _, rweights, _, handle, _ = buffer.dispatch(**{**good, "x": x})
    good = dict(x=rx, handle=handle, topk_weights=rweights, bias=(x, x))
    if rank == 1:
        refuse_combines(buffer, good, tuple(handle))
        refuse_each(buffer.dispatch, dict(x=x, handle=handle), dict(x=[x[1:], off(x)]))
    out, _, _ = buffer.combine(**good)
    assert_equal(out, x * (2 + is_in.sum(1, keepdim=True)))


def refuse_combines(buffer, good, *handles):
    """What combine refuses in either of DeepEP's forms."""
    x, rx, weights = good["bias"][0], good["x"], good["topk_weights"]
    bad = dict(
        x=[*wrong_rows(rx), rx.to(torch.float8_e4m3fn), rx[1:]],
        topk_weights=wrong_weights(weights),
        bias=[x[1:], (x, x[:, :1]), x.double(), x.to("meta"), 1, (x, x, x)],
        handle=[None, *handles],
    )  # fmt: skip
    refuse_each(buffer.combine, good, bad)


@with_buffer(tokens=[1, 1, 1])
def test_worst_tokens_do_not_grow(buffer, rank, world):
    """The rank that cannot go on says so to all."""
    given = inputs_of(world, rank)
    send(buffer, *given, world.experts)
    if rank == 1:
        given = [t.expand(2000, -1).contiguous() for t in given]
    status = Status.TOKENS if rank == 1 else Status.PEER
    with refused(f"{status.name} at most 1024 tokens.*got 2000"):
        send(buffer, *given, world.experts, num_worst_tokens=9000)
        if DEVICE == "cuda":  # it was only enqueued: the next call says what became of it
            torch.cuda.synchronize()
            send(buffer, *given, world.experts, num_worst_tokens=9000)


@pytest.mark.parametrize("top_k", [2, 3])
@with_buffer(tokens=[2, 2, 2])
def test_routing_and_lost_rows(buffer, rank, world, top_k):
    """An expert that does not exist, and rows that did not fit, are errors of their rank."""
    note = ".*one more" if top_k < SIZE else "((?!one more).)*$"
    x, idx, weights = inputs_of(world, rank)
    wrong, counts = idx.clone(), idx.new_zeros(world.experts)
    call = functools.partial(buffer.dispatch, x, topk_weights=weights, num_tokens_per_expert=counts)
    if rank == 1:
        wrong[1, 0] = world.experts
        with refused(f"ROUTING rank 1.*token 1{note}"):
            call(topk_idx=wrong)
    else:
        call(topk_idx=wrong)
    everywhere = torch.zeros_like(idx)
    everywhere[:, 1:] = -1
    send(buffer, x, everywhere, weights, world.experts, num_worst_tokens=5)
    if rank == 0:
        with refused(f"OVERFLOW rank 0{note}"):
            send(buffer, x, idx, weights, world.experts)
    else:
        send(buffer, x, idx, weights, world.experts)
    send(buffer, x, idx, weights, world.experts)


@pytest.fixture
def small(request):
    """A bootstrap of one rank, two tokens of 16, and their routing."""
    (bootstrap,) = libep.Bootstrap.local(1)
    yield (
        bootstrap,
        torch.ones(2, 16, device=DEVICE),
        torch.tensor([[0, 1], [2, -1]], device=DEVICE),
    )
    bootstrap.close()


def test_sentences(small):
    bootstrap, x, idx = small
    buffer = Buffer(bootstrap)
    *_, counts, handle, event = send(buffer, x, idx, torch.ones(2, 2, device=DEVICE), 4)
    assert counts == [1, 1, 1, 0]
    table = [
        ("MPI", lambda: Buffer(None, comm=object())),
        ("without async_finish", event.current_stream_wait),
        ("x alone with a handle", lambda: buffer.dispatch(x, handle, topk_idx=idx)),
        ("one that dispatch returned", lambda: buffer.combine(x, (1, 2, 3))),
        ("expected num_tokens_per_expert", lambda: buffer.dispatch(x)),
        ("expected topk_idx, or is_token_in_rank",
         lambda: buffer.dispatch(x, num_tokens_per_expert=idx.new_zeros(4))),
        ("Buffer: process_group: expected a ProcessGroup", lambda: Buffer("gloo")),
        ("even number", lambda: Buffer.set_num_sms(7)),
        ("with enable_shrink", lambda: buffer.low_latency_update_mask_buffer(0, True)),
        ("with enable_shrink", lambda: buffer.low_latency_query_mask_buffer(x)),
        ("with enable_shrink", buffer.low_latency_clean_mask_buffer),
        ("no communication buffer",
         lambda: buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)),
        ("bf16 or fp8", lambda: send(buffer, x, idx, None, 4, use_nvfp4=True)),
        ("equally many experts on each of 2 ranks, got 3",
         lambda: Buffer(libep.Bootstrap.local(2)[0]).get_dispatch_layout(idx, 3)),
    ]  # fmt: skip
    if DEVICE == "cpu" and not torch.cuda.is_available():
        table.append(("GPU", buffer.get_comm_stream))
    for words, call in table:
        with refused(f"EpError {words}"):
            call()
    buffer.destroy()
    buffer.destroy()
    with refused("EpError destroyed"):
        send(buffer, x, idx, None, 4)


def test_unknown_keywords(small, caplog):
    bootstrap, x, idx = small
    with make_buffer(bootstrap, use_fabric=True, nothing=None) as buffer:
        for _ in range(2):
            send(buffer, x, idx, None, 4, brand_new=3)
    assert [record.getMessage() for record in caplog.records] == [
        "Buffer: use_fabric is ignored: libep has no such argument",
        "dispatch: brand_new is ignored: libep has no such argument",
    ]


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
