# SPDX-License-Identifier: Apache-2.0
"""libep.deep_ep in low-latency mode, against the brute-force reference that sees all ranks."""

import copy
import threading

import numpy as np
import pytest
import torch
from base import refused
from conftest import (
    DEVICE, assert_equal, inputs_of, off, refuse_each, wrong_indices,
    wrong_rows, wrong_weights
)  # fmt: skip
from reference import expert_major
from test_deep_ep_normal import make_worlds, send_world, small, with_buffer  # noqa: F401
from test_quant import assert_same_bytes, quantise, quantise_fp4

from libep import Quant, Sums
from libep.deep_ep import Buffer

MAX_TOKENS = 8  # of a rank
HOOK = dict(return_recv_hook=True)
splits = pytest.mark.parametrize("is_split", [False, True])


def by_experts(world, rank, rows):
    """What the experts return for rows [L, rows, H]."""
    factors = [float(world.factor(e)) for e in world.experts_of(rank)]
    return rows * torch.tensor(factors, device=rows.device)[:, None, None]


def check_slabs(world, rank, x, counts):
    """The rows of each expert, in order of (source rank, token)."""
    slabs, _ = expert_major(world, rank, 1)
    assert x.shape == (len(slabs), world.size * MAX_TOKENS, world.hidden)
    assert counts.dtype == torch.int32 and counts.tolist() == [len(slab) for slab in slabs]
    for i, slab in enumerate(slabs):
        rows = np.array([world.x[s][t] for s, t, _ in slab], np.float32)
        assert_equal(x[i, : len(slab)], rows.reshape(-1, world.hidden))


def check_fields(world, rank, handle):
    """Which token each row is of, and where each source's rows of an expert begin."""
    slabs, _ = expert_major(world, rank, 1)
    rows = world.size * MAX_TOKENS
    tokens, ranges, *sizes = handle
    assert isinstance(handle, tuple) and len(handle) == 5
    assert sizes == [*handle[2:5]] == [MAX_TOKENS, world.hidden, world.experts]
    assert tokens.dtype == torch.int32 and ranges.dtype == torch.int64
    assert_equal(tokens, np.array([[t for _, t, _ in s] + (rows - len(s)) * [-1] for s in slabs]))
    sources = [[source for source, _, _ in slab] for slab in slabs]
    expected = [
        [sum(s < r for s in slab) << 32 | slab.count(r) for r in range(world.size)]
        for slab in sources
    ]
    assert_equal(ranges, np.array(expected))
    assert handle[0] is tokens and handle[1] is ranges


def run(call, is_split, *arguments, **options):
    """A call with a hook, which is then called, or one without."""
    *results, hook = call(*arguments, return_recv_hook=is_split, **options)
    assert (hook is not None) == is_split
    if is_split:
        hook()
    return results


def dispatch(buffer, world, x, idx, is_split=False, **options):
    given = x, idx, MAX_TOKENS, world.experts
    return run(buffer.low_latency_dispatch, is_split, *given, use_fp8=False, **options)


SERVER = dict(low_latency_mode=True, num_rdma_bytes=1 << 20, num_qps_per_rank=2)


@splits
@pytest.mark.parametrize("tokens", [None, [4, 0, 1], [0, 0, 0]])
@with_buffer("tokens", fields=SERVER)
def test_step(buffer, rank, world, is_split, nodes):
    x, idx, weights = inputs_of(world, rank)
    stats = torch.full((2,), 100, dtype=torch.int32, device=DEVICE)
    waits = torch.full((world.size,), 7, device=DEVICE)
    for step in (1, 2):
        counted = dict(cumulative_local_expert_recv_stats=stats, dispatch_wait_recv_cost_stats=waits)
        rx, counts, handle, event = dispatch(buffer, world, x, idx, is_split, **counted)
        assert event.event is None
        check_slabs(world, rank, rx, counts)
        check_fields(world, rank, handle)
        assert_equal(stats, 100 + step * counts)
        given = by_experts(world, rank, rx), idx, weights, handle
        out = torch.full_like(x, torch.nan)
        for options in dict(out=out, combine_wait_recv_cost_stats=waits), {}:
            got, _ = run(buffer.low_latency_combine, is_split, *given, **options)
            assert (got is out) == bool(options)
            assert_equal(got, world.forward(rank))
        assert waits[rank] == 7 and bool((waits >= 7).all())
    buffer.clean_low_latency_buffer(MAX_TOKENS, world.hidden, world.experts)


def without(world, gone):
    """The world as ranks see it that go on without one."""
    left = copy.copy(world)
    left.masked = (gone,)
    return left


def masks_of(buffer, size):
    words = torch.full((size,), 7, dtype=torch.int32, device=DEVICE)
    buffer.low_latency_query_mask_buffer(words)
    return words.tolist()


@pytest.fixture
def barrier():
    return threading.Barrier(3, timeout=60)


# Some waits must expire, and all others must not, even on a loaded machine.


@pytest.fixture
def given_up_in_five_seconds(monkeypatch):
    monkeypatch.setenv("LIBEP_TIMEOUT", "5")


@pytest.fixture
def late_in_three_seconds(monkeypatch):
    monkeypatch.setattr(Buffer, "low_latency_late_us", 3_000_000)


def shrunk_step(buffer, rank, world, seen):
    x, idx, weights = inputs_of(world, rank)
    rx, counts, handle, _ = dispatch(buffer, world, x, idx)
    check_slabs(seen, rank, rx, counts)
    given = by_experts(world, rank, rx), idx, weights, handle
    got, _ = run(buffer.low_latency_combine, False, *given)
    assert_equal(got, seen.forward(rank))


@pytest.mark.usefixtures("late_in_three_seconds")
@with_buffer(fields=dict(SERVER, enable_shrink=True))
def test_a_rank_is_late_and_comes_back(buffer, rank, world, barrier):
    with refused("EpError low-latency call before"):
        buffer.low_latency_update_mask_buffer((rank + 1) % 3, True)
    shrunk_step(buffer, rank, world, world)
    assert masks_of(buffer, 3) == [0, 0, 0]
    for by_hand in False, True:
        barrier.wait()
        if rank != 1:
            if by_hand:
                buffer.low_latency_update_mask_buffer(1, True)
            for _ in range(2):
                shrunk_step(buffer, rank, world, without(world, 1))
            assert masks_of(buffer, 3) == [0, 1, 0]
            with refused("EpError to bring rank 1 back, all ranks call"):
                buffer.low_latency_update_mask_buffer(1, False)
            buffer.low_latency_update_mask_buffer(2 - rank, False)
            x, idx, _ = inputs_of(world, rank)
            with refused("EpError needs all ranks, and rank 1 is masked"):
                buffer.low_latency_dispatch(x, idx, MAX_TOKENS + 1, world.experts)
        barrier.wait()
        buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
        buffer.low_latency_clean_mask_buffer()
        assert masks_of(buffer, 3) == [0, 0, 0]
        shrunk_step(buffer, rank, world, world)
    for wrong in rank, 3, -1:
        with refused("EpError expected another rank below 3"):
            buffer.low_latency_update_mask_buffer(wrong, True)
    with refused("EpError mask_status"):
        buffer.low_latency_query_mask_buffer(torch.zeros(2, dtype=torch.int32, device=DEVICE))


@pytest.mark.usefixtures("given_up_in_five_seconds")
@with_buffer(fields=dict(SERVER, enable_shrink=True))
def test_a_rank_never_comes_back(buffer, rank, world, barrier):
    shrunk_step(buffer, rank, world, world)
    barrier.wait()
    if rank != 1:
        buffer.low_latency_update_mask_buffer(1, True)
        shrunk_step(buffer, rank, world, without(world, 1))
        buffer.low_latency_clean_mask_buffer()
        assert masks_of(buffer, 3) == [0, 1, 0]
        shrunk_step(buffer, rank, world, without(world, 1))
    barrier.wait()
    for peer in (0, 2) if rank == 1 else ():  # so that its end waits for nobody
        buffer.low_latency_update_mask_buffer(peer, True)


@pytest.fixture
def by_entry(monkeypatch):
    monkeypatch.setattr(Buffer, "low_latency_sums", Sums.BY_ENTRY)


@splits
@pytest.mark.usefixtures("by_entry")
# So few tokens that no expert gets more rows than it has room for.
@with_buffer(top_k=4, hidden=64, max_tokens=MAX_TOKENS, tokens=[5, 4, 5])
def test_sums_by_entry(buffer, rank, world, seed, is_split):
    """DeepEP's order of summation: a token's rows one after another, each term fused."""
    x, idx, _ = inputs_of(world, rank)
    weights = torch.rand(idx.shape, generator=torch.Generator().manual_seed(seed + rank))
    rx, counts, handle, _ = dispatch(buffer, world, x.bfloat16(), idx, is_split)
    given = by_experts(world, rank, rx).bfloat16(), idx, weights.to(DEVICE), handle
    got, _ = run(buffer.low_latency_combine, is_split, *given)
    expected = torch.zeros(x.shape)
    for t, k, expert in world.entries(rank):
        row = float(world.factor(expert)) * torch.from_numpy(world.x[rank][t]).double()
        expected[t] = (weights[t, k].double() * row + expected[t]).float()  # exact in doubles
    assert_same_bytes(got, expected.bfloat16())


def as_rows(scales, hidden):
    """Scales [L, rows, H / 128] as float32, of any of DeepEP's formats."""
    if scales.dtype == torch.float32:
        return scales
    assert scales.dtype == torch.int32 and scales.shape[-1] == hidden // 512
    packed = scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    exponents = packed.cpu().int() - 127
    return torch.ldexp(torch.ones(exponents.shape), exponents).to(scales.device)


@splits
@pytest.mark.parametrize("quant, options", [
    (Quant.FP8, {}),
    (Quant.FP8_POW2, dict(round_scale=True)),
    (Quant.FP8_UE8M0, dict(round_scale=True, use_ue8m0=True)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@with_buffer(hidden=1024, max_tokens=MAX_TOKENS)
def test_quantised(buffer, rank, world, seed, quant, options, is_split, dtype):
    generator, rows = torch.Generator().manual_seed(seed), world.size * MAX_TOKENS
    xs = [torch.randn(t, 1024, generator=generator).to(dtype) for t in world.tokens]
    given = xs[rank].to(DEVICE), inputs_of(world, rank)[1], MAX_TOKENS, world.experts
    # use_fp8 is the default
    (values, scales), *_ = run(buffer.low_latency_dispatch, is_split, *given, **options)
    assert values.dtype == torch.float8_e4m3fn and values.shape == (2, rows, 1024)
    assert scales.shape[:2] == (2, rows)
    assert scales.stride() == (rows * scales.shape[2], 1, rows)  # column-major
    got = as_rows(scales, 1024)
    for i, slab in enumerate(expert_major(world, rank, 1)[0]):
        for row, (source, token, _) in enumerate(slab):
            expected, factors = quantise(xs[source][token : token + 1], quant)
            assert_same_bytes(values[i, row], expected[0])
            assert_equal(got[i, row], factors[0])


@splits
@pytest.mark.parametrize("factor", [None, 400.0])
@with_buffer(hidden=160, max_tokens=MAX_TOKENS)
def test_nvfp4(buffer, rank, world, seed, factor, is_split):
    """As vLLM and SGLang read them: views [rows, H / 2, L] and [32, 4, rm, 4, rk, L]."""
    generator, rows = torch.Generator().manual_seed(seed), world.size * MAX_TOKENS
    xs = [torch.randn(t, 160, generator=generator).to(torch.bfloat16) for t in world.tokens]
    given = xs[rank].to(DEVICE), inputs_of(world, rank)[1], MAX_TOKENS, world.experts
    options = dict(use_fp8=False, use_nvfp4=True)
    if factor:
        options["x_global_scale"] = torch.full((1,), factor, device=DEVICE)
    (values, scales), *_ = run(buffer.low_latency_dispatch, is_split, *given, **options)
    assert values.shape == (rows, 80, 2) and values.dtype == torch.uint8
    assert scales.shape == (32, 4, 1, 4, 3, 2) and scales.dtype == torch.float8_e4m3fn
    got = scales.view(torch.uint8).cpu()
    for i, slab in enumerate(expert_major(world, rank, 1)[0]):
        for row, (source, token, _) in enumerate(slab):
            expected, factors = quantise_fp4(xs[source][token : token + 1], factor or 1.0)
            assert_same_bytes(values[row, :, i], expected[0])
            place = got[row % 32, row // 32, 0, :, :, i].t().flatten()
            assert torch.equal(place[:10], factors[0]) and not place[10:].any()


@with_buffer()
def test_zero_copy(buffer, rank, world):
    """The experts write to the buffer that the next combine reads."""
    x, idx, weights = inputs_of(world, rank)
    rx, counts, handle, _ = dispatch(buffer, world, x, idx)
    rows = buffer.get_next_low_latency_combine_buffer(handle)
    assert rows.shape == rx.shape and rows.dtype == rx.dtype
    rows[:, :, :] = by_experts(world, rank, rx)
    out, _ = run(buffer.low_latency_combine, True, rx, idx, weights, handle, zero_copy=True)
    assert_equal(out, world.forward(rank))


@with_buffer()
def test_both_modes_on_one_buffer(buffer, rank, world):
    """As servers do: normal mode for prefill, low latency for decoding."""
    x, idx, weights = inputs_of(world, rank)
    for _ in range(2):
        rx, *_, handle, _ = send_world(buffer, world, rank)
        buffer.combine(rx, handle)
        buffer.clean_low_latency_buffer(MAX_TOKENS, world.hidden, world.experts)
        rx, _, handle, event = dispatch(buffer, world, x, idx, async_finish=True)
        event.current_stream_wait()
        given = by_experts(world, rank, rx), idx, weights, handle
        out, event = run(buffer.low_latency_combine, False, *given, async_finish=True)
        event.current_stream_wait()
        assert_equal(out, world.forward(rank))


# ---- errors -------------------------------------------------------------------------------------


@with_buffer(tokens=[3, 3, 3])
def test_a_refused_call_took_no_part(buffer, rank, world):
    """One rank is refused, corrects its call, and calls again; the others notice nothing."""
    x, idx, weights = inputs_of(world, rank)
    counts = torch.zeros(2, dtype=torch.int32, device=x.device)
    good = dict(
        x=x, topk_idx=idx, num_max_dispatch_tokens_per_rank=MAX_TOKENS, num_experts=6,
        cumulative_local_expert_recv_stats=counts, use_fp8=False, **HOOK,
    )  # fmt: skip
    bad = dict(
        x=wrong_rows(x),
        topk_idx=[*wrong_indices(idx), idx[:, :0], None],
        cumulative_local_expert_recv_stats=[weights[0, :2], idx.int(), idx[0].to("meta")],
        num_max_dispatch_tokens_per_rank=[0, None],
    )
    for _ in range(2):  # before there is a group, and with one
        if rank == 1:
            refuse_each(buffer.low_latency_dispatch, good, bad)
        rx, _, handle, _, hook = buffer.low_latency_dispatch(**good)
        hook()
    out, rows = torch.empty_like(x), by_experts(world, rank, rx)
    good = dict(x=rows, topk_idx=idx, topk_weights=weights, handle=handle, out=out, **HOOK)
    bad = dict(
        x=[*wrong_rows(rx), rx[:1], rx[0]],
        topk_weights=[*wrong_weights(weights), weights[:, :1]],
        out=[out.half(), out[:1], off(out), out.to("meta"), torch.cat([out, out], 1)[:, ::2]],
        handle=[None, tuple(handle)],
    )
    for _ in range(2):
        if rank == 1:
            refuse_each(buffer.low_latency_combine, good, bad)
        out.fill_(torch.nan)
        buffer.low_latency_combine(**good)[2]()
        assert_equal(out, world.forward(rank))


def test_sentences(small, caplog):  # noqa: F811
    bootstrap, _, idx = small
    buffer = Buffer(bootstrap, low_latency_mode=True)
    x, weights = torch.ones(2, 128, device=DEVICE), torch.ones(2, 2, device=DEVICE)
    send, combine = buffer.low_latency_dispatch, buffer.low_latency_combine
    rx, _, handle, _, _ = send(x, idx, 4, 4, use_fp8=False)
    sent, returned = (x, idx, 4, 4), (rx, idx, weights, handle)
    more = x.repeat(3, 1)[:5], idx.repeat(3, 1)[:5], 4, 4
    for words, call, arguments, options in [
        ("async_finish or return_recv_hook", send, sent, dict(async_finish=True, **HOOK)),
        ("use_ue8m0.*round_scale", send, sent, dict(use_ue8m0=True)),
        ("multiple of 512.*got 128", send, sent, dict(round_scale=True, use_ue8m0=True)),
        ("cost_stats: expected .1., got .2, 2.", send, sent, dict(dispatch_wait_recv_cost_stats=idx)),
        ("use_ue8m0.*use_nvfp4", send, sent, dict(use_nvfp4=True, use_ue8m0=True)),
        ("None without use_nvfp4", send, sent, dict(x_global_scale=x[0, :1])),
        ("float32.*float64", send, sent, dict(use_nvfp4=True, x_global_scale=x[0].double())),
        ("is x_global_scale", send, sent, dict(use_nvfp4=True, sf_scale_for_nvfp4=x[0, :1])),
        ("multiple of 32.*got 48", send, (x[:, :48], idx, 4, 4), dict(use_nvfp4=True)),
        ("max_tokens = 4 tokens, got 5", send, more, dict(use_fp8=False)),
        ("one that low_latency_dispatch returned", combine,
         (rx, idx, weights, (None, None, 4, 128, 4)), {}),
        ("cost_stats: expected int64, got torch.float32", combine, returned,
         dict(combine_wait_recv_cost_stats=weights[0])),
        ("comp_signal or src_signals with it, got neither", combine, returned, dict(overlap=True)),
        ("comp_signal: expected .*int32.*got torch.int64", combine, returned,
         dict(overlap=True, comp_signal=idx[0], threshold=1)),
        ("block_rows: expected at least 1 row, got 0", combine, returned,
         dict(overlap=True, comp_signal=idx[0].int(), block_m=0, threshold=1)),
    ]:  # fmt: skip
        with refused(f"EpError {words}"):
            call(*arguments, **options)
    assert not caplog.records
    done = torch.full((4 * 3,), 5, dtype=torch.int32, device=x.device)
    for options in [
        dict(use_logfmt=True, overlap=False, src_signals=None),
        dict(use_logfmt=True, **HOOK),
        dict(overlap=True, comp_signal=done, block_m=2, threshold=5, num_sms=3),
        dict(overlap=True, comp_signal=done, block_m=2, threshold=4, num_sms=1, **HOOK),
        dict(overlap=True, src_signals=done[:4].view(torch.uint32), src_signal_expect_value=5),
    ]:
        out, _, hook = combine(*returned, **options)
        if hook:
            hook()
        assert_equal(out, x * torch.tensor([[2.0], [1.0]], device=x.device))
    sentence = "low_latency_combine: use_logfmt is ignored: rows travel in their own type"
    assert [record.getMessage() for record in caplog.records] == [sentence]
    buffer.destroy()
