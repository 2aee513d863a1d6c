# SPDX-License-Identifier: Apache-2.0
"""libep.deep_ep.ElasticBuffer, against the brute-force reference that sees all ranks."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch
from base import refused
from conftest import DEVICE, assert_equal, off, on_device, other_device, refuse_each, run_threads
from reference import Received, World, expert_major, flat

import libep
from libep import Status
from libep.deep_ep import ElasticBuffer, EPHandle, EventHandle, EventOverlap

SIZE, HIDDEN, BOUND = 3, 16, 7
MODES = [*itertools.product([False, True], [False, True])]  # do_expand, do_cpu_sync
each_mode = pytest.mark.parametrize("do_expand, do_cpu_sync", MODES)


def make_world(seed, **fields):
    return World(seed, **{**dict(size=SIZE, experts=2 * SIZE, hidden=HIDDEN), **fields})


def inputs(world, rank):
    return (on_device(a[rank]) for a in (world.x, world.idx, world.weights))


@contextlib.contextmanager
def destroyed(buffer):
    """Destroy a buffer at the end of the block, before its bootstrap. Tell the peers of an error."""
    try:
        yield buffer
    except BaseException as error:
        for made in buffer._groups._all:
            made.group.abort(f"the test failed: {error}")
        raise
    finally:
        buffer.destroy()


def play(world, body, **fields):
    """Call body(buffer, rank) on a thread for each rank."""

    def run(bootstrap):
        given = {"num_max_tokens_per_rank": BOUND, **fields}
        with destroyed(ElasticBuffer(bootstrap, **given)) as buffer:
            return body(buffer, bootstrap.rank)

    return run_threads(world.size, run)


def layout(do_expand):
    return "expert_major" if do_expand else "flat"


def most_rows(world, do_expand, alignment):
    """Rows of a dispatch without do_cpu_sync, as DeepEP counts them."""
    rows = world.size * BOUND
    if not do_expand:
        return rows
    local = world.experts // world.size
    slots = rows * min(world.top_k, local) + (alignment - 1) * local
    return -(-slots // alignment) * alignment


def check_received(world, rank, given, do_expand, alignment, has_padding=True):
    """Compare what dispatch has delivered. has_padding: it is zero."""
    x, idx, weights = given
    expected = Received(world, rank, layout(do_expand), alignment)
    rows = len(expected.tokens)
    filled = np.ones(rows, bool)
    if do_expand and not has_padding:
        filled = ~np.isnan(expected.scale)
    assert_equal(x[:rows].cpu()[filled], expected.tokens[filled])
    assert weights.dtype == torch.float32
    assert_equal(weights[:rows].cpu()[filled], expected.weights[filled])
    if do_expand:
        assert idx is None
        return
    assert_equal(idx[:rows], torch.from_numpy(expected.idx).to(idx.dtype))
    assert (idx[rows:] == -1).all()


def run_experts(world, rank, given, do_expand, alignment):
    """What the experts return for the rows of a dispatch, weighted. Other rows are NaN."""
    x, _, weights = given
    scale = torch.from_numpy(Received(world, rank, layout(do_expand), alignment).scale)
    rows = len(scale)
    factors = weights[:rows] * scale.to(x.device)
    if not do_expand:
        factors = factors.sum(1)
    out = torch.full_like(x, torch.nan)
    out[:rows] = x[:rows] * factors[:, None]
    return out


@each_mode
@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("is_async", [False, True])
def test_step(seed, do_expand, do_cpu_sync, alignment, is_async):
    """A step equals the dense layer in all modes; so do dispatches with its handle."""
    world = make_world(seed)

    def body(buffer, rank):
        x, idx, weights = inputs(world, rank)
        options = dict(
            do_expand=do_expand,
            async_with_compute_stream=is_async,
            previous_event=buffer.capture() if is_async else None,
        )
        *received, handle, event = buffer.dispatch(
            x,
            idx,
            weights,
            num_experts=world.experts,
            expert_alignment=alignment,
            do_cpu_sync=do_cpu_sync,
            do_zero_padding=do_expand,
            **options,
        )
        assert (event.event is not None) == is_async and isinstance(handle, EPHandle)
        with event:
            pass
        rows = len(Received(world, rank, layout(do_expand), alignment).tokens)
        if not do_cpu_sync:
            rows = most_rows(world, do_expand, alignment)
        assert received[0].shape == (rows, HIDDEN) and len(received[2]) == rows
        check_received(world, rank, received, do_expand, alignment)
        out, none, event = buffer.combine(
            run_experts(world, rank, received, do_expand, alignment), handle
        )
        assert none is None and event.event is None
        assert_equal(out, world.forward(rank))
        *again, same, event = buffer.dispatch(x, topk_weights=weights, handle=handle, **options)
        with event(release_handle=True):
            pass
        assert same is handle and event.event is None
        check_received(world, rank, again, do_expand, alignment, has_padding=False)
        bare = buffer.dispatch(2 * x, handle=handle, do_expand=do_expand)
        assert bare[2] is None and (bare[1] is None) == do_expand
        some = [2 * given for given in (received[0], again[0])]
        live = ~torch.isnan(run_experts(world, rank, received, do_expand, alignment)[:, 0])
        assert_equal(bare[0][live], some[0][live])

    play(world, body)


class Dispatch(torch.autograd.Function):
    """As training programs define it: backward is a combine with weights."""

    @staticmethod
    def forward(ctx, buffer, x, idx, weights, experts, options):
        rx, ridx, rweights, handle, _ = buffer.dispatch(
            x, idx, weights, num_experts=experts, **options
        )
        ctx.buffer, ctx.handle = buffer, handle
        if ridx is not None:
            ctx.mark_non_differentiable(ridx)
        return rx, ridx, rweights, handle

    @staticmethod
    def backward(ctx, grad_x, _, grad_weights, *rest):
        grad_x, grad_weights, _ = ctx.buffer.combine(grad_x, ctx.handle, grad_weights.float())
        return None, grad_x, None, grad_weights, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x, handle):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(x, handle)[0]

    @staticmethod
    def backward(ctx, grad):
        grad, *_ = ctx.buffer.dispatch(grad, handle=ctx.handle, do_expand=ctx.handle.do_expand,
                                       do_zero_padding=ctx.handle.do_expand)  # fmt: skip
        return None, grad, None


@each_mode
def test_gradients(seed, do_expand, do_cpu_sync):
    """A pair of autograd functions has the derivatives of the dense layer."""
    world = make_world(seed)

    def body(buffer, rank):
        x, idx, weights = inputs(world, rank)
        x.requires_grad_(), weights.requires_grad_()
        options = dict(do_expand=do_expand, do_cpu_sync=do_cpu_sync, expert_alignment=2)
        options["do_zero_padding"] = do_expand
        *received, handle = Dispatch.apply(buffer, x, idx, weights, world.experts, options)
        scale = torch.from_numpy(Received(world, rank, layout(do_expand), 2).scale).nan_to_num(0)
        padded = torch.zeros(received[2].shape, device=x.device)
        padded[: len(scale)] = scale
        factors = torch.where(padded > 0, received[2] * padded, 0)
        if not do_expand:
            factors = factors.sum(1)
        is_row = (padded if padded.ndim == 2 else padded[:, None]).any(1, keepdim=True)
        rows = torch.where(is_row, received[0], 0)
        out = Combine.apply(buffer, rows * factors[:, None], handle)
        assert_equal(out, world.forward(rank))
        out.backward(on_device(world.grad_out[rank]))
        for got, expected in zip((x.grad, weights.grad), world.backward(rank)):
            assert_equal(got, expected)

    play(world, body)


@each_mode
def test_sums_of_combine_with_weights(seed, do_expand, do_cpu_sync):
    """They are those without weights, bit for bit; biases are added."""
    world = make_world(seed)

    def body(buffer, rank):
        x, idx, weights = inputs(world, rank)
        *received, handle, _ = buffer.dispatch(
            x, idx, weights, num_experts=world.experts, do_expand=do_expand, do_cpu_sync=do_cpu_sync
        )
        rows = torch.randn(received[0].shape, device=DEVICE).bfloat16()
        plain, none, _ = buffer.combine(rows, handle)
        out, back, _ = buffer.combine(rows, handle, topk_weights=received[2])
        assert none is None and torch.equal(plain, out) and back.dtype == torch.float32
        assert_equal(back, np.where(world.idx[rank] >= 0, world.weights[rank], 0))
        one, two = (torch.randn(out.shape, device=DEVICE).bfloat16() for _ in range(2))
        # Without do_expand a row is its rank's sum, so float32 rows give the sums before rounding.
        exact = buffer.combine(rows.float(), handle)[0] if not do_expand else out.float()
        for bias in one, (one, two), (None, one):
            total = exact
            for term in bias if isinstance(bias, tuple) else (bias,):
                total = total if term is None else total + term.float()
            got, again = (
                buffer.combine(rows, handle, topk_weights=weights, bias=bias)[0]
                for weights in (None, received[2])
            )
            assert got.dtype == torch.bfloat16 and torch.equal(got, again)
            if do_expand:
                assert torch.allclose(got.float(), total, rtol=2**-7, atol=2**-7)
            else:
                assert torch.equal(got, total.bfloat16())

    play(world, body)


@pytest.mark.parametrize("packed", [False, True])
@each_mode
def test_quantised_rows(seed, do_expand, do_cpu_sync, packed):
    """fp8 rows travel with scales as they are; received scales may lie in column-major order."""
    world = make_world(seed, hidden=256)
    alignment = 2

    def body(buffer, rank):
        x, idx, weights = inputs(world, rank)
        values = x.to(torch.float8_e4m3fn)
        scales = x[:, :2].contiguous()
        scales = scales.view(torch.int32) if packed else scales
        for by_column in (False, True):
            (rx, rscales), *_, handle, _ = buffer.dispatch(
                (values, scales.t().contiguous().t() if by_column else scales),
                idx,
                weights,
                num_experts=world.experts,
                do_expand=do_expand,
                do_cpu_sync=do_cpu_sync,
                expert_alignment=alignment,
                do_zero_padding=do_expand,
                use_tma_aligned_col_major_sf=by_column,
            )
            expected = torch.from_numpy(Received(world, rank, layout(do_expand), alignment).tokens)
            rows, count = len(expected), len(rx)
            assert rx.dtype == torch.float8_e4m3fn and rscales.dtype == scales.dtype
            assert_equal(rx[:rows].float(), expected.to(torch.float8_e4m3fn).float())
            assert rscales.shape == (count, 2)
            strides = (1, -(-count // 4) * 4) if by_column else (2, 1)
            assert rscales.stride() == strides or not count
            assert_equal(rscales[:rows].contiguous().view(torch.float32), expected[:, :2])
            out, _, _ = buffer.combine(rx.bfloat16(), handle)
            assert out.shape == x.shape and out.dtype == torch.bfloat16

    play(world, body)


@each_mode
def test_handle(seed, do_expand, do_cpu_sync):
    """All fields of a handle."""
    world, alignment = make_world(seed, top_k=3), 4

    def body(buffer, rank):
        x, idx, weights = inputs(world, rank)
        local = world.experts // SIZE
        stats = torch.ones(local, dtype=torch.int32, device=DEVICE)
        _, _, _, handle, _ = buffer.dispatch(
            x,
            idx,
            weights,
            stats,
            num_experts=world.experts,
            expert_alignment=alignment,
            num_sms=24,
            do_expand=do_expand,
            do_cpu_sync=do_cpu_sync,
            do_handle_copy=do_expand,
        )
        names = "num_experts expert_alignment num_max_tokens_per_rank num_sms do_expand".split()
        given = [getattr(handle, name) for name in names]
        assert given == [world.experts, alignment, BOUND, 24, do_expand]
        assert (handle.topk_idx is idx) != do_expand and torch.equal(handle.topk_idx, idx)
        slabs, offsets = expert_major(world, rank, alignment)
        counts = [len(slab) for slab in slabs]
        padded = np.diff(offsets)
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
        assert (stats - 1).tolist() == counts
        assert handle.num_recv_tokens_per_expert_list == (padded.tolist() if do_cpu_sync else [])
        ends = [at + count for at, count in zip(offsets, counts)] if do_expand else offsets[1:]
        assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
        rows = flat(world, rank)
        sums = [sum(s <= source for s, _ in rows) for source in range(SIZE)]
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == sums
        assert handle.num_recv_tokens == (len(rows) if do_cpu_sync else SIZE * BOUND)
        most = most_rows(world, True, alignment)
        assert handle.num_expanded_tokens == (offsets[-1] if do_cpu_sync else most)
        check_metadata(world, rank, handle, slabs, offsets)
        assert handle.token_metadata_at_forward is None and handle.channel_linked_list is None
        for name in ("psum_num_recv_tokens_per_expert", "psum_num_recv_tokens_per_scaleup_rank",
                     "num_unaligned_recv_tokens_per_expert", "recv_src_metadata",
                     "dst_buffer_slot_idx"):  # fmt: skip
            tensor = getattr(handle, name)
            assert tensor.dtype == torch.int32 and tensor.device == x.device
            assert getattr(handle, name) is tensor
        handle.recv_src_metadata = handle.recv_src_metadata[:1]
        assert len(handle.recv_src_metadata) <= 1

    play(world, body)


def check_metadata(world, rank, handle, slabs, offsets):
    rows = flat(world, rank)
    expected = np.full((handle.num_recv_tokens, world.top_k + 2), -1)
    for at, (source, token) in enumerate(rows):
        expected[at, 0] = source * BOUND + token
    if handle.do_expand:
        for slab, begin in zip(slabs, offsets):
            for slot, (source, token, k) in enumerate(slab, begin):
                expected[rows.index((source, token)), 2 + k] = slot
    assert handle.recv_src_metadata.tolist() == expected.tolist()
    numbers = np.full(world.idx[rank].shape, -1)
    sent = [[] for _ in range(SIZE)]
    for token, k, expert in world.entries(rank):
        places = sent[expert // (world.experts // SIZE)]
        if token not in places:
            places.append(token)
        numbers[token, k] = rank * BOUND + places.index(token)
    assert handle.dst_buffer_slot_idx.tolist() == numbers.tolist()


def test_bounds_of_steps(seed):
    """A step may have its own bound, above the buffer's, too. Handles of older steps still work."""
    worlds = [make_world(seed, max_tokens=most) for most in (4, 40, 9)]

    def body(buffer, rank):
        steps = []
        for world, bound in zip(worlds, (4, 40, 9)):
            x, idx, weights = inputs(world, rank)
            *received, handle, _ = buffer.dispatch(
                x,
                idx,
                weights,
                num_experts=world.experts,
                num_max_tokens_per_rank=bound,
                do_cpu_sync=False,
            )
            assert len(received[0]) == SIZE * bound and handle.num_max_tokens_per_rank == bound
            steps.append((world, received, handle))
        assert len(buffer._groups._all) == 2
        for world, received, handle in steps:
            rows = run_experts(world, rank, received, False, 1)
            assert_equal(buffer.combine(rows, handle)[0], world.forward(rank))

    play(worlds[0], body)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_above_its_bound(seed, is_first):
    """All ranks learn that one has more tokens than the step's bound, before a deadline passes."""
    world = make_world(seed, tokens=[BOUND, BOUND, 2])
    refusals = [Status.PEER, Status.TOKENS, Status.PEER]

    def body(buffer, rank):
        x, idx, _ = inputs(world, rank)
        options = dict(num_experts=world.experts, do_cpu_sync=False)
        if not is_first:
            buffer.dispatch(x, idx, **options)
        if rank != 1:
            x, idx = x[:2], idx[:2]
        words = "at most num_max_tokens_per_rank = 3 tokens on each rank, got 7 on rank 1"
        with refused(f"{refusals[rank].name} {words}"):
            handle = buffer.dispatch(x, idx, num_max_tokens_per_rank=3, **options)[3]
            handle.recv_src_metadata  # noqa: B018
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            for made in buffer._groups._all:
                found = made.group.status()
                raise libep.EpError(found.status, found.sentence)

    play(world, body)


def test_refused_arguments(seed):
    """A refused call took no part: the rank calls again with better arguments."""
    world = make_world(seed, tokens=[4, 3, 5], hidden=256)

    def body(buffer, rank):
        x, idx, weights = inputs(world, rank)
        idx[0, 0] = world.experts_of(1)[0]  # so that rows come to the rank that is refused
        far = other_device()
        scales = x[:, :2].contiguous()
        good = dict(x=(x, scales), topk_idx=idx, topk_weights=weights, num_experts=world.experts)
        some = [x.t(), x[:, :3].contiguous(), x[None], off(x), x.to(far), x > 0, None, "x"]
        bad = [dict(x=given) for given in some]
        some = [scales.double(), scales[1:], scales.half(), torch.cat(5 * [scales], 1), 1]
        bad_scales = [{"x": (x, given)} for given in some]
        some = [idx.float(), idx[1:], idx[:, 0], idx.to(far), None, idx.new_zeros((len(x), 33))]
        bad += [dict(topk_idx=given) for given in some]
        some = [weights.double(), weights[1:], weights[:, 1:], weights.to(far), [1.0]]
        bad += [dict(topk_weights=given) for given in some]
        some = [torch.zeros(2, device=DEVICE), torch.zeros(3, dtype=torch.int32, device=DEVICE)]
        bad += [dict(cumulative_local_expert_recv_stats=given) for given in some]
        some = dict(num_max_tokens_per_rank=[0, -1, "all"], expert_alignment=[0, 3, 1.5])
        bad += [{name: given} for name, values in some.items() for given in values]
        bad += [dict(num_experts=None)]
        for _ in range(2):  # before there is a group, and with one
            if rank == 1:
                refuse_each(buffer.dispatch, {**good, "do_expand": True}, bad)
                for change in bad_scales:
                    with refused("EpError scales of x: expected .*, got "):
                        buffer.dispatch(**{**good, **change})
                for change in (dict(num_experts=4), dict(do_zero_padding=True)):
                    with refused("EpError expected .*, got "):
                        buffer.dispatch(**{**good, **change})
            *received, handle, _ = buffer.dispatch(**good)
        refuse_handles(buffer, rank, good, handle, world)
        rx = received[0][0]
        good = dict(x=rx, handle=handle, topk_weights=received[2], bias=(x, x))
        some = [rx.double(), rx.to(torch.float8_e4m3fn), off(rx), rx.to(far), rx[None], rx[1:]]
        bad = [dict(x=given) for given in [*some, rx[:, :3].contiguous(), None]]
        some = [received[2].double(), received[2][1:], received[2].to(far), [1.0]]
        bad += [dict(topk_weights=given) for given in some]
        bad += [dict(bias=given) for given in (x[1:], (x, x[:, :1]), x.double(), (x, x, x))]
        if rank == 2:
            refuse_each(buffer.combine, good, bad)
        buffer.combine(**good)

    play(world, body)


def refuse_handles(buffer, rank, good, handle, world):
    """What a dispatch with a handle refuses, and handles that are none of this buffer's."""
    x, idx = good["x"], good["topk_idx"]
    with destroyed(ElasticBuffer(buffer.group, num_max_tokens_per_rank=BOUND)) as other:
        foreign = other.dispatch(**good)[3]
        if rank != 0:
            return
        again = dict(x=x, handle=handle)
        refuse_each(
            buffer.dispatch,
            again,
            [
                dict(topk_idx=idx),
                dict(do_cpu_sync=True),
                dict(do_expand=True),
                dict(num_experts=12),
                dict(expert_alignment=2),
                dict(num_max_tokens_per_rank=BOUND + 1),
                dict(x=x[0][1:]),
                dict(topk_weights=x[0]),
                dict(handle=foreign),
                dict(handle=(1, 2)),
            ],
        )
        with refused("FOREIGN dispatch: handle: expected one of this ElasticBuffer"):
            buffer.dispatch(x, handle=foreign)
        with refused("FOREIGN combine: handle: expected one of this ElasticBuffer"):
            buffer.combine(x[0], foreign)
        with refused("TYPE combine: handle: expected one that dispatch returned, got NoneType"):
            buffer.combine(x[0], None)


def test_after_destroy(seed):
    world = make_world(seed)

    def body(buffer, rank):
        x, idx, weights = inputs(world, rank)
        rx, *_, handle, _ = buffer.dispatch(x, idx, weights, num_experts=world.experts)
        buffer.barrier()
        buffer.destroy()
        buffer.destroy()
        for call in (
            lambda: buffer.dispatch(x, idx, num_experts=world.experts),
            lambda: buffer.dispatch(x, handle=handle),
            lambda: buffer.combine(rx, handle),
            buffer.barrier,
        ):
            with refused("DESTROYED the ElasticBuffer was destroyed"):
                call()

    play(world, body)


def test_an_expert_that_does_not_exist(seed):
    """Where the host reads the sizes, the rank learns it from its dispatch."""
    world = make_world(seed, tokens=[3, 3, 3])

    def body(buffer, rank):
        x, idx, _ = inputs(world, rank)
        if rank == 1:
            idx[1, 0] = world.experts
        is_refused = refused("ROUTING token 1") if rank == 1 else contextlib.nullcontext()
        with is_refused:
            buffer.dispatch(x, idx, num_experts=world.experts)

    play(world, body)


def test_without_a_group():
    """Sizes, attributes, events, and what libep does not have. One rank."""
    (bootstrap,) = libep.Bootstrap.local(1)
    hint = ElasticBuffer.get_buffer_size_hint(bootstrap, 64, 256, 4)
    assert hint > 0 and hint % (2 << 20) == 0
    assert ElasticBuffer.get_buffer_size_hint(bootstrap, 4096, 7168) > hint
    buffer = ElasticBuffer(bootstrap, num_max_tokens_per_rank=64, hidden=256, num_topk=4,
                           explicitly_destroy=True, num_allocated_qps=5)  # fmt: skip
    assert buffer.num_bytes == hint and buffer.num_max_tokens_per_rank == 64
    assert ElasticBuffer(bootstrap, 12345).num_bytes == 12345
    assert (buffer.num_ranks, buffer.rank_idx) == (1, 0)
    assert buffer.get_logical_domain_size() == buffer.get_physical_domain_size() == (1, 1)
    assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks) == (1, 1)
    assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, 0)
    assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (1, 1)
    assert buffer.get_theoretical_num_sms(256, 8) % 2 == 0
    assert buffer.get_theoretical_num_qps(20) == buffer.num_allocated_qps == 5
    assert isinstance(buffer.capture(), EventHandle)
    with refused("UNSUPPORTED num_cpu_bytes: expected 0, got 4096"):
        ElasticBuffer(bootstrap, num_cpu_bytes=4096)
    for name in ("engram_write", "engram_fetch", "get_engram_storage_size_hint", "pp_set_config",
                 "pp_send", "pp_recv", "get_pp_buffer_size_hint", "create_agrs_session",
                 "destroy_agrs_session", "agrs_new_session", "agrs_set_config",
                 "agrs_get_inplace_tensor", "all_gather", "get_agrs_num_max_session_bytes",
                 "get_agrs_buffer_size_hint"):  # fmt: skip
        with refused(f"UNSUPPORTED {name}: expected .* libep has no"):
            getattr(buffer, name)(1, 2)
    buffer.destroy()
    bootstrap.close()


def test_events():
    """Hooks run once, after the next wait; a wait may drop the event."""
    calls = []
    event = EventOverlap(EventHandle())
    event.register_hook_after_wait(lambda: calls.append(1))
    with refused("ORDER register_hook_after_wait: expected one hook"):
        event.register_hook_after_wait(lambda: None)
    event.current_stream_wait()
    event.current_stream_wait()
    assert calls == [1] and event.event is not None
    with event(release_handle=True) as inside:
        assert inside is event and event.event is not None
    assert event.event is None
    with event, refused("ORDER current_stream_wait: expected an event, got none"):
        event.current_stream_wait()


@pytest.mark.parametrize("is_read", [True, False])
def test_captured(monkeypatch, seed, is_read):
    """A capture refuses what the host waits for. Tensors of its handle are computed at each read."""
    from libep.deep_ep import _elastic

    world = make_world(seed)

    def body(buffer, rank):
        x, idx, _ = inputs(world, rank)
        options = dict(num_experts=world.experts)
        if is_read:
            with refused("UNSUPPORTED dispatch: do_cpu_sync: expected False while a CUDA graph"):
                buffer.dispatch(x, idx, **options)
            return
        handle = buffer.dispatch(x, idx, do_cpu_sync=False, **options)[3]
        first = handle.num_unaligned_recv_tokens_per_expert
        expected = first.clone()
        handle.plan.expert_counts.add_(1)
        assert torch.equal(handle.num_unaligned_recv_tokens_per_expert, expected + 1)
        assert torch.equal(first, expected)

    monkeypatch.setattr(_elastic, "_is_capturing", lambda tensor: True)
    play(world, body)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs GPUs")
@pytest.mark.parametrize("do_expand", [False, True])
def test_graph(do_expand):
    """A captured step, replayed with other tokens and another routing."""
    first, second = (World(s, 1, 4, hidden=HIDDEN, tokens=[5]) for s in (1, 2))

    def body(buffer, rank):
        x, idx, weights = (given.clone() for given in inputs(first, rank))
        idx = idx.long()
        scale = torch.tensor([float(first.factor(e)) for e in range(4)], device=DEVICE)

        def step():
            rx, ridx, rweights, handle, _ = buffer.dispatch(
                x, idx, weights, num_experts=4, do_expand=do_expand, do_cpu_sync=False
            )
            if do_expand:
                ends = handle.psum_num_recv_tokens_per_expert
                rows = torch.arange(len(rx), device=DEVICE)
                expert = torch.bucketize(rows, ends, right=True).clamp(max=3)
                factors = rweights * scale[expert]
            else:
                factors = (rweights * scale[ridx.clamp(min=0)]).sum(1)
            return buffer.combine(rx * factors[:, None], handle)[0], handle

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, handle = step()
        for world in (second, first):
            for tensor, given in zip((x, idx, weights), inputs(world, rank)):
                tensor.copy_(given)
            graph.replay()
            assert_equal(out, world.forward(rank))
            entries = idx[idx >= 0].bincount(minlength=4)
            assert_equal(handle.num_unaligned_recv_tokens_per_expert, entries)

    play(first, body)
