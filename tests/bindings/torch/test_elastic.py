# SPDX-License-Identifier: Apache-2.0
"""libep.deep_ep.ElasticBuffer, against the brute-force reference that sees all ranks."""

import contextlib
import itertools

import numpy as np
import pytest
import torch
from base import refused
from conftest import (
    DEVICE, assert_equal, destroyed, inputs_of, make_buffer, on_device, refuse_each, run_threads,
    wrong_indices, wrong_rows, wrong_weights
)  # fmt: skip
from reference import Received, World, expert_major, flat
from test_deep_ep_normal import make_worlds, refuse_combines, with_buffer

import libep
from libep.deep_ep import ElasticBuffer, EPHandle, EventHandle, EventOverlap, _elastic

SIZE, HIDDEN, BOUND = 3, 16, 7
MODES = [*itertools.product([False, True], [False, True])]  # do_expand, do_cpu_sync
each_mode = pytest.mark.parametrize("do_expand, do_cpu_sync", MODES)


def with_elastic(*parameters, **sizes):
    """on_ranks with an ElasticBuffer and a World."""
    fields = dict(num_max_tokens_per_rank=BOUND)
    return with_buffer(*parameters, kind=ElasticBuffer, fields=fields, **sizes)


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


def check_received(expected, given, do_expand, has_padding=True):
    """Compare what dispatch has delivered. has_padding: it is zero."""
    x, idx, weights = given
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


def run_experts(expected, given):
    """What the experts return for the rows of a dispatch, weighted. Other rows are NaN."""
    x, _, weights = given
    rows = len(expected.scale)
    factors = weights[:rows] * torch.from_numpy(expected.scale).to(x.device)
    if factors.ndim == 2:
        factors = factors.sum(1)
    out = torch.full_like(x, torch.nan)
    out[:rows] = x[:rows] * factors[:, None]
    return out


@each_mode
@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("tokens", [None, [4, 0, 1], [0, 0, 0]])
@with_elastic("tokens")
def test_step(buffer, rank, world, do_expand, do_cpu_sync, alignment, is_async):
    """A step, and the backward calls of a framework, equal the dense layer in all modes."""
    x, idx, weights = inputs_of(world, rank)
    previous = buffer.capture() if is_async else None
    options = dict(do_expand=do_expand, async_with_compute_stream=is_async, previous_event=previous)
    more = dict(num_experts=6, expert_alignment=alignment, do_cpu_sync=do_cpu_sync, **options)
    *received, handle, event = buffer.dispatch(x, idx, weights, do_zero_padding=do_expand, **more)
    assert (event.event is not None) == is_async and isinstance(handle, EPHandle)
    with event:
        pass
    expected = Received(world, rank, layout(do_expand), alignment)
    rows = len(expected.tokens) if do_cpu_sync else most_rows(world, do_expand, alignment)
    assert received[0].shape == (rows, HIDDEN) and len(received[2]) == rows
    check_received(expected, received, do_expand)
    done = run_experts(expected, received)
    out, none, event = buffer.combine(done, handle)
    assert none is None and event.event is None
    assert_equal(out, world.forward(rank))
    *again, same, event = buffer.dispatch(x, topk_weights=weights, handle=handle, **options)
    with event(release_handle=True):
        pass
    assert same is handle and event.event is None
    check_received(expected, again, do_expand, has_padding=False)
    grad, none, no_weights, *_ = buffer.dispatch(
        on_device(world.grad_out[rank]), handle=handle, do_expand=do_expand
    )
    assert no_weights is None and (none is None) == do_expand
    scale = torch.zeros(received[2].shape, device=x.device)
    scale[: len(expected.scale)] = torch.from_numpy(expected.scale).nan_to_num(0)
    live = ~torch.isnan(done[:, :1])
    grad = torch.where(live, grad, 0)
    products = (torch.where(live, received[0], 0) * grad).sum(1)
    grad_weights = products.view(-1, *[1] * (scale.ndim - 1)) * scale
    grads = buffer.combine(run_experts(expected, (grad, None, received[2])), handle, grad_weights)
    for got, expected in zip(grads, world.backward(rank)):
        assert_equal(got, expected)


@each_mode
@with_elastic()
def test_sums_of_combine_with_weights(buffer, rank, world, do_expand, do_cpu_sync):
    """They are those without weights, bit for bit; biases are added."""
    options = dict(num_experts=world.experts, do_expand=do_expand, do_cpu_sync=do_cpu_sync)
    *received, handle, _ = buffer.dispatch(*inputs_of(world, rank), **options)
    rows = torch.randn(received[0].shape, device=DEVICE).bfloat16()
    plain, none, _ = buffer.combine(rows, handle)
    out, back, _ = buffer.combine(rows, handle, topk_weights=received[2])
    assert none is None and torch.equal(plain, out) and back.dtype == torch.float32
    assert_equal(back, np.where(world.idx[rank] >= 0, world.weights[rank], 0))
    one, two = (torch.randn(out.shape, device=DEVICE).bfloat16() for _ in range(2))
    # Without do_expand a row is its rank's sum, so float32 rows give the sums before rounding.
    exact = buffer.combine(rows.float(), handle)[0] if not do_expand else out.float()
    for bias in one, (one, two), (None, one):
        terms = bias if isinstance(bias, tuple) else (bias,)
        total = sum((term.float() for term in terms if term is not None), exact)
        got, again = (
            buffer.combine(rows, handle, topk_weights=weights, bias=bias)[0]
            for weights in (None, received[2])
        )
        assert got.dtype == torch.bfloat16 and torch.equal(got, again)
        if do_expand:
            assert torch.allclose(got.float(), total, rtol=2**-7, atol=2**-7)
        else:
            assert torch.equal(got, total.bfloat16())


@pytest.mark.parametrize("packed", [False, True])
@each_mode
@with_elastic(hidden=256)
def test_quantised_rows(buffer, rank, world, do_expand, do_cpu_sync, packed):
    """fp8 rows travel with scales as they are; received scales may lie in column-major order."""
    x, idx, weights = inputs_of(world, rank)
    values, scales = x.to(torch.float8_e4m3fn), x[:, :2].contiguous()
    scales = scales.view(torch.int32) if packed else scales
    options = dict(do_expand=do_expand, do_cpu_sync=do_cpu_sync, do_zero_padding=do_expand)
    options.update(num_experts=world.experts, expert_alignment=2)
    expected = torch.from_numpy(Received(world, rank, layout(do_expand), 2).tokens)
    for by_column in (False, True):
        given = values, scales.t().contiguous().t() if by_column else scales
        options["use_tma_aligned_col_major_sf"] = by_column
        (rx, rscales), *_, handle, _ = buffer.dispatch(given, idx, weights, **options)
        rows, count = len(expected), len(rx)
        assert rx.dtype == torch.float8_e4m3fn and rscales.dtype == scales.dtype
        assert_equal(rx[:rows].float(), expected.to(torch.float8_e4m3fn).float())
        assert rscales.shape == (count, 2)
        strides = (1, -(-count // 4) * 4) if by_column else (2, 1)
        assert rscales.stride() == strides or not count
        assert_equal(rscales[:rows].contiguous().view(torch.float32), expected[:, :2])
        out, _, _ = buffer.combine(rx.bfloat16(), handle)
        assert out.shape == x.shape and out.dtype == torch.bfloat16


TENSORS = (
    "psum_num_recv_tokens_per_expert psum_num_recv_tokens_per_scaleup_rank recv_src_metadata "
    "num_unaligned_recv_tokens_per_expert dst_buffer_slot_idx"
).split()


@each_mode
@with_elastic(top_k=3)
def test_handle(buffer, rank, world, do_expand, do_cpu_sync):
    """All fields of a handle."""
    alignment, (x, idx, weights) = 4, inputs_of(world, rank)
    stats = torch.ones(world.experts // SIZE, dtype=torch.int32, device=DEVICE)
    fields = dict(num_experts=world.experts, expert_alignment=alignment, num_sms=24)
    fields["do_expand"] = do_expand
    options = dict(fields, do_cpu_sync=do_cpu_sync, do_handle_copy=do_expand)
    handle = buffer.dispatch(x, idx, weights, stats, **options)[3]
    fields["num_max_tokens_per_rank"] = BOUND
    assert {name: getattr(handle, name) for name in fields} == fields
    assert (handle.topk_idx is idx) != do_expand and torch.equal(handle.topk_idx, idx)
    slabs, offsets = expert_major(world, rank, alignment)
    counts, padded = [len(slab) for slab in slabs], np.diff(offsets).tolist()
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts
    assert (stats - 1).tolist() == counts
    assert handle.num_recv_tokens_per_expert_list == (padded if do_cpu_sync else [])
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
    for name in TENSORS:
        tensor = getattr(handle, name)
        assert tensor.dtype == torch.int32 and tensor.device == x.device
        assert getattr(handle, name) is tensor
    handle.recv_src_metadata = handle.recv_src_metadata[:1]
    assert len(handle.recv_src_metadata) <= 1


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
    bounds = 4, 40, 9
    worlds = make_worlds(seed, *(dict(max_tokens=bound) for bound in bounds))

    def body(bootstrap):
        rank, steps = bootstrap.rank, []
        with make_buffer(bootstrap, kind=ElasticBuffer, num_max_tokens_per_rank=BOUND) as buffer:
            for world, bound in zip(worlds, bounds):
                options = dict(num_max_tokens_per_rank=bound, do_cpu_sync=False, num_experts=6)
                *received, handle, _ = buffer.dispatch(*inputs_of(world, rank), **options)
                assert len(received[0]) == SIZE * bound and handle.num_max_tokens_per_rank == bound
                steps.append((world, received, handle))
            assert len(buffer._groups._all) == 2
            for world, received, handle in steps:
                rows = run_experts(Received(world, rank, "flat"), received)
                assert_equal(buffer.combine(rows, handle)[0], world.forward(rank))

    run_threads(SIZE, body)


@pytest.mark.parametrize("is_first", [True, False])
@with_elastic(tokens=[BOUND, BOUND, 2])
def test_a_rank_above_its_bound(buffer, rank, world, is_first):
    """All ranks learn that one has more tokens than the step's bound, before a deadline passes."""
    x, idx, _ = inputs_of(world, rank)
    options = dict(num_experts=world.experts, do_cpu_sync=False)
    if not is_first:
        buffer.dispatch(x, idx, **options)
    if rank != 1:
        x, idx = x[:2], idx[:2]
    words = "at most num_max_tokens_per_rank = 3 tokens on each rank, got 7 on rank 1"
    with refused(f"{'TOKENS' if rank == 1 else 'PEER'} {words}"):
        handle = buffer.dispatch(x, idx, num_max_tokens_per_rank=3, **options)[3]
        handle.recv_src_metadata  # noqa: B018
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        for made in buffer._groups._all:
            found = made.group.status()
            raise libep.EpError(found.status, found.sentence)


@with_elastic(tokens=[4, 3, 5], hidden=256)
def test_refused_arguments(buffer, rank, world):
    """A refused call took no part: the rank calls again with better arguments."""
    x, idx, weights = inputs_of(world, rank)
    idx[0, 0] = world.experts_of(1)[0]  # so that rows come to the rank that is refused
    scales = x[:, :2].contiguous()
    good = dict(x=(x, scales), topk_idx=idx, topk_weights=weights, num_experts=world.experts)
    bad_scales = [scales.double(), scales[1:], scales.half(), torch.cat(5 * [scales], 1), 1]
    wrong_counts = [torch.zeros(2, device=DEVICE), torch.zeros(3, dtype=torch.int32, device=DEVICE)]
    bad = dict(
        x=[*wrong_rows(x), x.t(), x > 0, "x"],
        topk_idx=[*wrong_indices(idx)[1:], None],
        topk_weights=[*wrong_weights(weights), weights[:, 1:]],
        cumulative_local_expert_recv_stats=wrong_counts,
        num_max_tokens_per_rank=[0, -1, "all"],
        expert_alignment=[0, 3, 1.5],
        num_experts=[None],
    )
    for _ in range(2):  # before there is a group, and with one
        if rank == 1:
            refuse_each(buffer.dispatch, {**good, "do_expand": True}, bad)
            changes = [dict(num_experts=4), dict(do_zero_padding=True)]
            for change in [*changes, *(dict(x=(x, given)) for given in bad_scales)]:
                words = "scales of x: " if "x" in change else ""
                with refused(f"EpError {words}expected .*, got "):
                    buffer.dispatch(**{**good, **change})
        *received, handle, _ = buffer.dispatch(**good)
    refuse_handles(buffer, rank, good, handle)
    good = dict(x=received[0][0], handle=handle, topk_weights=received[2], bias=(x, x))
    if rank == 2:
        refuse_combines(buffer, good)
    buffer.combine(**good)


def refuse_handles(buffer, rank, good, handle):
    """What a dispatch with a handle refuses, and handles that are none of this buffer's."""
    x = good["x"]
    with destroyed(ElasticBuffer(buffer.group, num_max_tokens_per_rank=BOUND)) as other:
        foreign = other.dispatch(**good)[3]
        if rank != 0:
            return
        changes = dict(
            topk_idx=[good["topk_idx"]], do_cpu_sync=[True], do_expand=[True], num_experts=[12],
            expert_alignment=[2], num_max_tokens_per_rank=[BOUND + 1], x=[x[0][1:]],
            topk_weights=[x[0]], handle=[foreign, (1, 2)],
        )  # fmt: skip
        refuse_each(buffer.dispatch, dict(x=x, handle=handle), changes)
        with refused("FOREIGN dispatch: handle: expected one of this ElasticBuffer"):
            buffer.dispatch(x, handle=foreign)
        with refused("FOREIGN combine: handle: expected one of this ElasticBuffer"):
            buffer.combine(x[0], foreign)
        with refused("TYPE combine: handle: expected one that dispatch returned, got NoneType"):
            buffer.combine(x[0], None)


@with_elastic()
def test_after_destroy(buffer, rank, world):
    x, idx, weights = inputs_of(world, rank)
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
        with refused("DESTROYED the buffer was destroyed"):
            call()


@with_elastic(tokens=[3, 3, 3])
def test_an_expert_that_does_not_exist(buffer, rank, world):
    """Where the host reads the sizes, the rank learns it from its dispatch."""
    x, idx, _ = inputs_of(world, rank)
    if rank == 1:
        idx[1, 0] = world.experts
    with refused("ROUTING token 1") if rank == 1 else contextlib.nullcontext():
        buffer.dispatch(x, idx, num_experts=world.experts)


ABSENT = (
    "engram_write engram_fetch get_engram_storage_size_hint pp_set_config pp_send pp_recv "
    "get_pp_buffer_size_hint create_agrs_session destroy_agrs_session agrs_new_session "
    "agrs_set_config agrs_get_inplace_tensor all_gather get_agrs_num_max_session_bytes "
    "get_agrs_buffer_size_hint"
).split()


def test_without_a_group():
    """Sizes, attributes, events, and what libep does not have. One rank."""
    (bootstrap,) = libep.Bootstrap.local(1)
    hint = ElasticBuffer.get_buffer_size_hint(bootstrap, 64, 256, 4)
    assert hint > 0 and hint % (2 << 20) == 0
    assert ElasticBuffer.get_buffer_size_hint(bootstrap, 4096, 7168) > hint
    sizes = dict(num_max_tokens_per_rank=64, hidden=256, num_topk=4, num_allocated_qps=5)
    buffer = ElasticBuffer(bootstrap, explicitly_destroy=True, **sizes)
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
    for name in ABSENT:
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


@pytest.fixture
def captured(monkeypatch):
    monkeypatch.setattr(_elastic, "_is_capturing", lambda tensor: True)


@pytest.mark.parametrize("is_read", [True, False])
@with_elastic()
def test_captured(buffer, rank, world, captured, is_read):
    """A capture refuses what the host waits for. Tensors of its handle are computed at each read."""
    x, idx, _ = inputs_of(world, rank)
    if is_read:
        with refused("UNSUPPORTED dispatch: do_cpu_sync: expected False while a CUDA graph"):
            buffer.dispatch(x, idx, num_experts=world.experts)
        return
    handle = buffer.dispatch(x, idx, do_cpu_sync=False, num_experts=world.experts)[3]
    first = handle.num_unaligned_recv_tokens_per_expert
    expected = first.clone()
    handle.plan.expert_counts.add_(1)
    assert torch.equal(handle.num_unaligned_recv_tokens_per_expert, expected + 1)
    assert torch.equal(first, expected)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs GPUs")
@pytest.mark.parametrize("do_expand", [False, True])
def test_graph(do_expand):
    """A captured step, replayed with other tokens and another routing."""
    first, second = (World(s, 1, 4, hidden=HIDDEN, tokens=[5]) for s in (1, 2))

    def body(bootstrap):
        x, idx, weights = (given.clone() for given in inputs_of(first, 0))
        idx = idx.long()
        scale = torch.tensor([float(first.factor(e)) for e in range(4)], device=DEVICE)
        options = dict(num_experts=4, do_expand=do_expand, do_cpu_sync=False)

        def step():
            rx, ridx, rweights, handle, _ = buffer.dispatch(x, idx, weights, **options)
            if do_expand:
                ends = handle.psum_num_recv_tokens_per_expert
                rows = torch.arange(len(rx), device=DEVICE)
                expert = torch.bucketize(rows, ends, right=True).clamp(max=3)
                factors = rweights * scale[expert]
            else:
                factors = (rweights * scale[ridx.clamp(min=0)]).sum(1)
            return buffer.combine(rx * factors[:, None], handle)[0], handle

        with make_buffer(bootstrap, kind=ElasticBuffer, num_max_tokens_per_rank=BOUND) as buffer:
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out, handle = step()
            for world in (second, first):
                for tensor, given in zip((x, idx, weights), inputs_of(world, 0)):
                    tensor.copy_(given)
                graph.replay()
                assert_equal(out, world.forward(0))
                entries = idx[idx >= 0].bincount(minlength=4)
                assert_equal(handle.num_unaligned_recv_tokens_per_expert, entries)

    run_threads(1, body)
