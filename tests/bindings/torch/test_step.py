# SPDX-License-Identifier: Apache-2.0
"""A step of all ranks, forward and backward, against the brute-force reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import assert_equal, make_group, on_device, run_threads
from reference import World, expert_major, flat

import libep
import libep.torch as ep
from libep import Layout

LARGE = dict(size=2, experts=13, top_k=5, max_tokens=150, hidden=1028)


def world_group(bootstrap, world, **fields):
    given = dict(
        num_experts=world.experts,
        max_tokens=world.max_tokens,
        hidden=world.hidden,
        top_k=world.top_k,
        max_recv_rows=0,
    )
    return make_group(bootstrap, **{**given, **fields})


def row_factors(world, rank, plan, rows):
    """What the experts multiply the rows of an expert-major buffer by, [rows, 1]."""
    factors = torch.zeros(rows)
    offsets = plan.expert_offsets.tolist()
    for i, expert in enumerate(world.experts_of(rank)):
        factors[offsets[i] : offsets[i + 1]] = float(world.factor(expert))
    return factors[:, None].to(plan.bytes.device)


def play(bootstrap, world, weights_by, group_fields, handle_fields):
    """One step on a rank. weights_by: combine, experts, or none."""
    rank = bootstrap.rank
    with world_group(bootstrap, world, **group_fields) as group:
        handle = ep.Handle(group, **handle_fields)
        x, weights = on_device(world.x[rank], grad=True), on_device(world.weights[rank], grad=True)
        received = ep.dispatch(handle, x, on_device(world.idx[rank]), weights)
        check_rows(world, rank, received, handle_fields.get("alignment", 1))
        rows = received.tokens * row_factors(world, rank, received.plan, len(received.tokens))
        if weights_by == "experts":
            out = ep.combine(handle, received.plan, rows * received.topk_weights[:, None])
        else:
            out = ep.combine(handle, received.plan, rows, received.topk_weights)
        out.backward(on_device(world.grad_out[rank]))
        assert_equal(out, world.forward(rank))
        grad_x, grad_w = world.backward(rank)
        assert_equal(x.grad, grad_x)
        assert_equal(weights.grad, grad_w)
        assert group.status().status == libep.Status.OK
        del received, rows, out


def check_rows(world, rank, received, alignment):
    slabs, offsets = expert_major(world, rank, alignment)
    plan = received.plan
    assert plan.expert_counts.tolist() == [len(slab) for slab in slabs]
    assert plan.expert_offsets.tolist() == offsets
    assert plan.expert_ends.tolist() == offsets[1:]
    assert plan.expert_padded.tolist() == list(np.diff(offsets))
    assert plan.totals.tolist() == [offsets[-1], offsets[-1], 0]
    assert plan.source_rows.sum().item() == sum(len(slab) for slab in slabs)
    tokens = np.zeros(received.tokens.shape, np.float32)
    weights = np.zeros(len(tokens), np.float32)
    for slab, offset in zip(slabs, offsets):
        for row, (source, token, k) in enumerate(slab, offset):
            tokens[row] = world.x[source][token]
            weights[row] = world.weights[source][token, k]
    assert_equal(received.tokens, tokens)
    assert_equal(received.topk_weights, weights)


@pytest.mark.parametrize("weights_by", ["combine", "experts"])
@pytest.mark.parametrize("sizes", ["exact", "static"])
@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("size", [1, 3])
def test_step(seed, size, alignment, sizes, weights_by, nodes):
    world = World(seed, size=size)
    fields = dict(max_recv_rows=0 if sizes == "exact" else 200)
    run_threads(size, play, world, weights_by, fields, dict(alignment=alignment))


@pytest.mark.parametrize("size", [1, 2])
def test_large_step(seed, size):
    world = World(seed, **{**LARGE, "size": size})
    fields = dict(max_recv_rows=2 * 150 * 5 + 13 * 8)
    run_threads(size, play, world, "combine", fields, dict(alignment=8))


@pytest.mark.parametrize("tokens", [[0, 4, 1], [3, 0, 0], [0, 0, 0]])
@pytest.mark.parametrize("experts", [1, 2, 7])
def test_ranks_without_tokens_or_experts(seed, tokens, experts):
    world = World(seed, size=3, experts=experts, tokens=tokens)
    run_threads(3, play, world, "combine", {}, {})


def test_without_weights(seed):
    world = World(seed)

    def body(bootstrap):
        rank = bootstrap.rank
        with world_group(bootstrap, world) as group:
            handle = ep.Handle(group)
            x = on_device(world.x[rank], grad=True)
            received = ep.dispatch(handle, x, on_device(world.idx[rank]))
            assert received.topk_weights is None
            out = ep.combine(handle, received.plan, received.tokens)
            out.backward(on_device(world.grad_out[rank]))
            count = on_device((world.idx[rank] >= 0).sum(1, keepdims=True))
            assert_equal(out, on_device(world.x[rank]) * count)
            assert_equal(x.grad, on_device(world.grad_out[rank]) * count)

    run_threads(world.size, body)


def test_only_weights_need_gradients(seed):
    """The first layer: the tokens are data."""
    world = World(seed)

    def body(bootstrap):
        rank = bootstrap.rank
        with world_group(bootstrap, world) as group:
            handle = ep.Handle(group)
            weights = on_device(world.weights[rank], grad=True)
            received = ep.dispatch(
                handle, on_device(world.x[rank]), on_device(world.idx[rank]), weights
            )
            factors = row_factors(world, rank, received.plan, len(received.tokens))
            out = ep.combine(
                handle, received.plan, received.tokens * factors, received.topk_weights
            )
            out.backward(on_device(world.grad_out[rank]))
            assert_equal(weights.grad, world.backward(rank)[1])

    run_threads(world.size, body)


def test_expanded_gradients(seed):
    """Gradients that are no contiguous tensors, such as those of sum()."""
    world = World(seed)

    def body(bootstrap):
        rank = bootstrap.rank
        with world_group(bootstrap, world) as group:
            handle = ep.Handle(group)
            x = on_device(world.x[rank], grad=True)
            received = ep.dispatch(handle, x, on_device(world.idx[rank]))
            ep.combine(handle, received.plan, received.tokens).sum().backward()
            count = on_device((world.idx[rank] >= 0).sum(1, keepdims=True)).float()
            assert_equal(x.grad, count.expand_as(x))

    run_threads(world.size, body)


def test_flat(seed, nodes):
    """One row per (token, rank); its weight at combine is the sum of the experts' factors."""
    world = World(seed)

    def body(bootstrap):
        rank = bootstrap.rank
        mine = world.experts_of(rank)
        with world_group(bootstrap, world) as group:
            handle = ep.Handle(group, layout=Layout.FLAT)
            x, weights = (on_device(a[rank], grad=True) for a in (world.x, world.weights))
            received = ep.dispatch(handle, x, on_device(world.idx[rank]), weights)
            rows = flat(world, rank)
            assert received.tokens.shape == (len(rows), world.hidden)
            assert received.topk_idx.shape == (len(rows), world.top_k)
            for i, (source, token) in enumerate(rows):
                assert_equal(received.tokens[i], world.x[source][token])
                local = [e - mine[0] if e in mine else -1 for e in world.idx[source][token]]
                assert received.topk_idx[i].tolist() == local
            table = torch.tensor([float(world.factor(e)) for e in mine] + [0.0])
            factors = (received.topk_weights * table.to(x.device)[received.topk_idx]).sum(1)
            out = ep.combine(handle, received.plan, received.tokens, factors)
            out.backward(on_device(world.grad_out[rank]))
            assert_equal(out, world.forward(rank))
            grad_x, grad_w = world.backward(rank)
            assert_equal(x.grad, grad_x)
            assert_equal(weights.grad, grad_w)

    run_threads(world.size, body)


def test_first_tokens_alone(seed):
    """num_tokens: buffers of a fixed shape with fewer tokens in them."""
    world = World(seed, tokens=[5, 3, 0], max_tokens=6)

    def pad(array, value):
        full = np.full((world.max_tokens, array.shape[1]), value, array.dtype)
        full[: len(array)] = array
        return on_device(full)

    def body(bootstrap):
        rank = bootstrap.rank
        with world_group(bootstrap, world) as group:
            handle = ep.Handle(group)
            count = torch.tensor([world.tokens[rank]], device=group.device)
            x = pad(world.x[rank], np.nan).requires_grad_()
            received = ep.dispatch(
                handle,
                x,
                pad(world.idx[rank], 2),
                pad(world.weights[rank], np.nan),
                num_tokens=count,
            )
            factors = row_factors(world, rank, received.plan, len(received.tokens))
            out = ep.combine(
                handle, received.plan, received.tokens * factors, received.topk_weights
            )
            out.backward(pad(world.grad_out[rank], np.nan))
            assert_equal(out, pad(world.forward(rank), 0))
            assert_equal(x.grad, pad(world.backward(rank)[0], 0))

    run_threads(world.size, body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(seed, dtype, nodes):
    """Values are small multiples of 1/4: the sums of two such rows are exact in these types."""
    world = World(seed, top_k=2)

    def body(bootstrap):
        rank = bootstrap.rank
        with world_group(bootstrap, world) as group:
            handle = ep.Handle(group)
            x = on_device(world.x[rank]).to(dtype).requires_grad_()
            received = ep.dispatch(handle, x, on_device(world.idx[rank]))
            out = ep.combine(handle, received.plan, received.tokens)
            out.backward(on_device(world.grad_out[rank]).to(dtype))
            count = on_device((world.idx[rank] >= 0).sum(1, keepdims=True))
            assert out.dtype == x.grad.dtype == dtype
            assert_equal(out, (on_device(world.x[rank]) * count).to(dtype))
            assert_equal(x.grad, (on_device(world.grad_out[rank]) * count).to(dtype))

    run_threads(world.size, body)


def test_rows_past_the_last_slab_are_zero(alone):
    group = alone()
    handle = ep.Handle(group)
    x = torch.ones(3, 16, device=group.device)
    idx = torch.tensor([[0, 5], [2, -1], [-1, -1]], device=group.device)
    for _ in range(3):  # memory that comes back from the allocator has other contents
        received = ep.dispatch(handle, x, idx, torch.ones(3, 2, device=group.device))
        assert received.tokens.sum().item() == 3 * 16
        assert received.topk_weights.sum().item() == 3
        received.tokens.fill_(7)


def test_scales_travel(seed):
    """Rows that are quantised already, and their scales: plain bytes to libep."""
    world = World(seed)

    def body(bootstrap):
        rank = bootstrap.rank
        with world_group(bootstrap, world, max_scale_bytes=8) as group:
            handle = ep.Handle(group)
            x = on_device(world.x[rank])
            tokens = torch.cat([x, x], 1).to(torch.float8_e4m3fn)  # rows of 16 bytes
            received = ep.dispatch(handle, tokens, on_device(world.idx[rank]), None, x[:, :2] + 0)
            assert received.tokens.dtype == torch.float8_e4m3fn
            rows = [world.x[s][t] for slab in expert_major(world, rank, 1)[0] for s, t, _ in slab]
            expected = torch.tensor(np.array(rows).reshape(-1, world.hidden))
            assert_equal(received.scales, expected[:, :2])
            assert_equal(received.tokens.float()[:, : world.hidden], expected)

    run_threads(world.size, body)
