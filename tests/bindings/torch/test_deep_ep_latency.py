# SPDX-License-Identifier: Apache-2.0
"""libep.deep_ep in low-latency mode, against the brute-force reference that sees all ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from base import refused
from conftest import DEVICE, assert_equal, off, refuse_each
from reference import expert_major
from test_deep_ep_normal import inputs, make_world, on_ranks, play, send
from test_quant import quantise, quantise_fp4

import libep
from libep import Quant
from libep.deep_ep import Buffer

MAX_TOKENS = 8  # of a rank


def expert_factors(world, rank, device):
    factors = [float(world.factor(e)) for e in world.experts_of(rank)]
    return torch.tensor(factors, device=device)[:, None, None]


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
    assert sizes == [MAX_TOKENS, world.hidden, world.experts] and len(handle) == 5
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


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("tokens", [None, [4, 0, 1]])
def test_step(seed, tokens, is_split, nodes):
    world = make_world(seed, tokens=tokens)

    def body(buffer, rank):
        x, idx, weights = inputs(world, rank)
        stats = torch.full((2,), 100, dtype=torch.int32, device=DEVICE)
        for step in (1, 2):
            rx, counts, handle, event = dispatch(
                buffer, world, x, idx, is_split, cumulative_local_expert_recv_stats=stats
            )
            assert event.event is None and isinstance(handle, tuple)
            assert handle[2:5] == (MAX_TOKENS, world.hidden, world.experts)
            check_slabs(world, rank, rx, counts)
            check_fields(world, rank, handle)
            assert_equal(stats, 100 + step * counts)
            rows = rx * expert_factors(world, rank, x.device)
            out = torch.full_like(x, torch.nan)
            given, event = run(
                buffer.low_latency_combine, is_split, rows, idx, weights, handle, out=out
            )
            assert given is out
            assert_equal(out, world.forward(rank))
            out, _ = run(buffer.low_latency_combine, is_split, rows, idx, weights, handle)
            assert_equal(out, world.forward(rank))
        buffer.clean_low_latency_buffer(MAX_TOKENS, world.hidden, world.experts)

    play(world, body, low_latency_mode=True, num_rdma_bytes=1 << 20, num_qps_per_rank=2)


def as_rows(scales, hidden):
    """Scales [L, rows, H / 128] as float32, of any of DeepEP's formats."""
    if scales.dtype == torch.float32:
        return scales
    assert scales.dtype == torch.int32 and scales.shape[-1] == hidden // 512
    exponents = (
        scales.clone(memory_format=torch.contiguous_format).view(torch.uint8).cpu().int() - 127
    )
    return torch.ldexp(torch.ones(exponents.shape), exponents).to(scales.device)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(
    "quant, options",
    [
        (Quant.FP8, {}),
        (Quant.FP8_POW2, dict(round_scale=True)),
        (Quant.FP8_UE8M0, dict(round_scale=True, use_ue8m0=True)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantised(seed, quant, options, is_split, dtype):
    hidden = 1024
    world = make_world(seed, hidden=hidden, max_tokens=MAX_TOKENS)
    rows = world.size * MAX_TOKENS
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(t, hidden, generator=generator).to(dtype) for t in world.tokens]

    def body(buffer, rank):
        _, idx, _ = inputs(world, rank)
        given = xs[rank].to(DEVICE), idx, MAX_TOKENS, world.experts  # use_fp8 is the default
        (values, scales), *_ = run(buffer.low_latency_dispatch, is_split, *given, **options)
        assert values.dtype == torch.float8_e4m3fn and values.shape == (2, rows, hidden)
        assert scales.shape[:2] == (2, rows)
        assert scales.stride() == (rows * scales.shape[2], 1, rows)  # column-major
        slabs, _ = expert_major(world, rank, 1)
        got = as_rows(scales, hidden)
        for i, slab in enumerate(slabs):
            for row, (source, token, _) in enumerate(slab):
                expected, factors = quantise(xs[source][token : token + 1], quant)
                assert torch.equal(
                    values[i, row].cpu().view(torch.uint8), expected[0].view(torch.uint8)
                )
                assert_equal(got[i, row], factors[0])

    play(world, body)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("factor", [None, 400.0])
def test_nvfp4(seed, factor, is_split):
    """As vLLM and FlashInfer read them: views [rows, H / 2, L] and [32, 4, rm, 4, rk, L]."""
    world = make_world(seed, hidden=160, max_tokens=MAX_TOKENS)
    rows = world.size * MAX_TOKENS
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(t, 160, generator=generator).to(torch.bfloat16) for t in world.tokens]

    def body(buffer, rank):
        _, idx, _ = inputs(world, rank)
        given = xs[rank].to(DEVICE), idx, MAX_TOKENS, world.experts
        options = dict(use_fp8=False, use_nvfp4=True)
        if factor:
            options["x_global_scale"] = torch.full((1,), factor, device=DEVICE)
        (values, scales), *_ = run(buffer.low_latency_dispatch, is_split, *given, **options)
        assert values.shape == (rows, 80, 2) and values.dtype == torch.uint8
        assert scales.shape == (32, 4, 1, 4, 3, 2) and scales.dtype == torch.float8_e4m3fn
        slabs, _ = expert_major(world, rank, 1)
        got = scales.view(torch.uint8).cpu()
        for i, slab in enumerate(slabs):
            for row, (source, token, _) in enumerate(slab):
                expected, factors = quantise_fp4(xs[source][token : token + 1], factor or 1.0)
                assert_equal(values[row, :, i], expected[0].to(DEVICE))
                place = got[row % 32, row // 32, 0, :, :, i].t().flatten()
                assert torch.equal(place[:10], factors[0]) and not place[10:].any()

    play(world, body)


def test_two_in_flight(seed):
    """Two micro-batches: the experts of one run while rows of the other travel."""
    worlds = [make_world(seed + i, max_tokens=MAX_TOKENS) for i in range(2)]

    def body(buffer, rank):
        options = dict(return_recv_hook=True)
        for _ in range(3):
            data = [list(inputs(world, rank)) for world in worlds]
            sent = [
                buffer.low_latency_dispatch(
                    x, idx, MAX_TOKENS, worlds[0].experts, use_fp8=False, **options
                )
                for x, idx, _ in data
            ]
            combined = []
            for world, (x, idx, weights), (rx, counts, handle, _, hook) in zip(worlds, data, sent):
                hook()
                check_slabs(world, rank, rx, counts)
                rows = rx * expert_factors(world, rank, x.device)
                combined.append(buffer.low_latency_combine(rows, idx, weights, handle, **options))
            for world, (out, _, hook) in zip(worlds, combined):
                hook()
                assert_equal(out, world.forward(rank))
                with refused("EpError one call"):
                    hook()

    play(worlds[0], body)


@on_ranks()
def test_zero_copy(buffer, rank, world):
    """The experts write to the buffer that the next combine reads."""
    x, idx, weights = inputs(world, rank)
    rx, counts, handle, _ = dispatch(buffer, world, x, idx)
    rows = buffer.get_next_low_latency_combine_buffer(handle)
    assert rows.shape == rx.shape and rows.dtype == rx.dtype
    rows[:, :, :] = rx * expert_factors(world, rank, x.device)
    out, _ = run(buffer.low_latency_combine, True, rx, idx, weights, handle, zero_copy=True)
    assert_equal(out, world.forward(rank))


@on_ranks()
def test_both_modes_on_one_buffer(buffer, rank, world):
    """As servers do: normal mode for prefill, low latency for decoding."""
    x, idx, weights = inputs(world, rank)
    for _ in range(2):
        rx, *_, handle, _ = send(buffer, x, idx, weights, world.experts)
        buffer.combine(rx, handle)
        buffer.clean_low_latency_buffer(MAX_TOKENS, world.hidden, world.experts)
        rx, _, handle, event = dispatch(buffer, world, x, idx, async_finish=True)
        event.current_stream_wait()
        rows = rx * expert_factors(world, rank, x.device)
        given = rows, idx, weights, handle
        out, event = run(buffer.low_latency_combine, False, *given, async_finish=True)
        event.current_stream_wait()
        assert_equal(out, world.forward(rank))


# ---- errors -------------------------------------------------------------------------------------


@on_ranks(tokens=[3, 3, 3])
def test_a_refused_call_took_no_part(buffer, rank, world):
    """One rank is refused, corrects its call, and calls again; the others notice nothing."""
    x, idx, weights = inputs(world, rank)
    far, most, options = "meta", MAX_TOKENS, dict(use_fp8=False, num_experts=6)
    good = dict(
        x=x,
        topk_idx=idx,
        num_max_dispatch_tokens_per_rank=most,
        cumulative_local_expert_recv_stats=torch.zeros(2, dtype=torch.int32, device=x.device),
        return_recv_hook=True,
        **options,
    )
    stats = "cumulative_local_expert_recv_stats"
    some = [x.double(), x[None], x[:, :3].contiguous(), off(x), x.to(far), x.tolist()]
    bad = [dict(x=given) for given in some]
    some = [idx.short(), idx.float(), idx[:1], idx[0], idx.to(far), idx[:, :0], None]
    bad += [dict(topk_idx=given) for given in some]
    bad += [{stats: given} for given in (weights[0, :2], idx.int(), idx[0].to(far))]
    bad += [dict(num_max_dispatch_tokens_per_rank=given) for given in (0, None)]
    for _ in range(2):  # before there is a group, and with one
        if rank == 1:
            refuse_each(buffer.low_latency_dispatch, good, bad)
        rx, _, handle, _, hook = buffer.low_latency_dispatch(**good)
        hook()
    out = torch.empty_like(x)
    good = dict(
        x=rx * expert_factors(world, rank, x.device),
        topk_idx=idx,
        topk_weights=weights,
        handle=handle,
        out=out,
        return_recv_hook=True,
    )
    some = [rx.double(), rx[:1], rx[0], off(rx), rx.to(far), None]
    bad = [dict(x=given) for given in some]
    some = [weights.double(), weights[:1], weights[:, :1], weights.to(far), 1.0]
    bad += [dict(topk_weights=given) for given in some]
    some = [out.half(), out[:1], off(out), out.to(far), torch.cat([out, out], 1)[:, ::2]]
    bad += [dict(out=given) for given in some]
    bad += [dict(handle=None), dict(handle=tuple(handle))]
    for _ in range(2):
        if rank == 1:
            refuse_each(buffer.low_latency_combine, good, bad)
        out.fill_(torch.nan)
        buffer.low_latency_combine(**good)[2]()
        assert_equal(out, world.forward(rank))


def test_sentences(caplog):
    (bootstrap,) = libep.Bootstrap.local(1)
    buffer = Buffer(bootstrap, low_latency_mode=True)
    x = torch.ones(2, 128, device=DEVICE)
    idx = torch.tensor([[0, 1], [2, -1]], device=DEVICE)
    weights = torch.ones(2, 2, device=DEVICE)
    rx, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 4, 4, use_fp8=False)
    more = x.repeat(3, 1)[:5], idx.repeat(3, 1)[:5]
    for call, arguments, table in [
        (buffer.low_latency_dispatch, (x, idx, 4, 4), {
            "async_finish or return_recv_hook": dict(async_finish=True, return_recv_hook=True),
            "use_ue8m0.*round_scale": dict(use_ue8m0=True),
            "multiple of 512.*got 128": dict(round_scale=True, use_ue8m0=True),
            "cost of waiting": dict(dispatch_wait_recv_cost_stats=idx),
            "use_ue8m0.*use_nvfp4": dict(use_nvfp4=True, use_ue8m0=True),
            "x_global_scale.*None without use_nvfp4": dict(x_global_scale=x[0, :1]),
            "x_global_scale.*float32.*float64": dict(use_nvfp4=True, x_global_scale=x[0].double()),
            "is x_global_scale": dict(use_nvfp4=True, sf_scale_for_nvfp4=x[0, :1]),
        }),
        (buffer.low_latency_dispatch, (x[:, :48].contiguous(), idx, 4, 4), {
            "multiple of 32 elements.*got 48": dict(use_nvfp4=True),
        }),
        (buffer.low_latency_dispatch, (*more, 4, 4), {
            "max_tokens = 4 tokens, got 5": dict(use_fp8=False),
        }),
        (buffer.low_latency_combine, (rx, idx, weights, (None, None, 4, 128, 4)), {
            "one that low_latency_dispatch returned": {},
        }),
        (buffer.low_latency_combine, (rx, idx, weights, handle), {
            "signals of single blocks": dict(overlap=True),
        }),
    ]:  # fmt: skip
        for words, options in table.items():
            with refused(f"EpError {words}"):
                call(*arguments, **options)
    assert not caplog.records
    for _ in range(2):
        out, _, _ = buffer.low_latency_combine(
            rx, idx, weights, handle, use_logfmt=True, overlap=False, src_signals=None
        )
    assert_equal(out, x * torch.tensor([[2.0], [1.0]], device=x.device))
    assert [record.getMessage() for record in caplog.records] == [
        "low_latency_combine: use_logfmt is ignored: rows travel in their own type"
    ]
    buffer.destroy()
