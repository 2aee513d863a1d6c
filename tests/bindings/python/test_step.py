# SPDX-License-Identifier: Apache-2.0
"""Whole steps on threads, against the reference: every layout, exact and static sizes, plans."""

from __future__ import annotations

import libep
import numpy as np
import pytest
from conftest import config, run_threads
from libep import EpError, Group, Handle, Layout, Plans, PlanTensors, Status
from reference import World, expert_major, flat

pytestmark = pytest.mark.usefixtures("nodes")

CASES = 8
ALIGNMENT = 4


def rows(*shape):
    """Memory for an output, of which no byte is right before the call."""
    return np.full(shape, np.nan, np.float32)


def worlds(seed):
    for case in range(CASES):
        yield World(seed + case, size=1 + (seed + case) % 4)


def make_plan(handle):
    """Memory for a named plan, aligned to 64."""
    memory = np.empty(handle.plan_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + handle.plan_bytes]


def apply_experts(world, rank, slabs, offsets, memory):
    """Multiply each slab by its expert's factor."""
    out = np.full_like(memory, np.nan)
    for expert, slab, first in zip(world.experts_of(rank), slabs, offsets):
        out[first : first + len(slab)] = world.factor(expert) * memory[first : first + len(slab)]
    return out


# ---- expert-major: training --------------------------------------------------------------------


def check_recv(world, rank, recv, recv_w):
    slabs, offsets = expert_major(world, rank, ALIGNMENT)
    expected = np.zeros((offsets[-1], world.hidden), np.float32)
    expected_w = np.zeros(offsets[-1], np.float32)
    for slab, first in zip(slabs, offsets):
        for row, (source, t, k) in enumerate(slab, first):
            expected[row], expected_w[row] = world.x[source][t], world.weights[source][t, k]
    np.testing.assert_array_equal(recv[: offsets[-1]], expected)
    np.testing.assert_array_equal(recv_w[: offsets[-1]], expected_w)


def train_step(world, rank, handle, num_rows, **plan):
    """Dispatch, experts, combine, and both backwards, by the plan that is there."""
    slabs, offsets = expert_major(world, rank, ALIGNMENT)
    x, w = world.x[rank], world.weights[rank]
    recv, recv_w = rows(num_rows, world.hidden), rows(num_rows)
    handle.dispatch(x, w, recv_tokens=recv, recv_topk_weights=recv_w, **plan)
    check_recv(world, rank, recv, recv_w)

    done, out = apply_experts(world, rank, slabs, offsets, recv), rows(*x.shape)
    handle.combine(done, recv_w, out=out, **plan)
    np.testing.assert_array_equal(out, world.forward(rank))

    grad, grad_w = rows(*recv.shape), rows(num_rows)
    handle.combine_backward(
        world.grad_out[rank], recv_w, done, grad_expert_out=grad, grad_slot_weights=grad_w, **plan
    )
    grad_recv = apply_experts(world, rank, slabs, offsets, grad)
    grad_x, grad_topk = rows(*x.shape), rows(*w.shape)
    handle.dispatch_backward(
        grad_recv, grad_w, grad_tokens=grad_x, grad_topk_weights=grad_topk, **plan
    )
    expected_x, expected_w = world.backward(rank)
    np.testing.assert_array_equal(grad_x, expected_x)
    np.testing.assert_array_equal(grad_topk, expected_w)


def exact_rank(bootstrap, world):
    rank = bootstrap.rank
    slabs, offsets = expert_major(world, rank, ALIGNMENT)
    with Group(bootstrap, alignment=ALIGNMENT, **config(world)) as group:
        with Handle(group) as handle:
            handle.prepare(world.idx[rank])
            info = handle.info()
            assert info.expert_counts == tuple(len(slab) for slab in slabs)
            assert info.expert_offsets == tuple(offsets)
            assert info.recv_rows == offsets[-1]
            train_step(world, rank, handle, info.recv_rows)
            assert group.status().status is Status.OK


def test_exact_sizes(seed):
    for world in worlds(seed):
        run_threads(world.size, exact_rank, world)


def static_rank(bootstrap, world, kind):
    rank = bootstrap.rank
    fields = config(world, alignment=ALIGNMENT)
    capacity = max(
        libep.max_recv_rows(world.size, r, flags=libep.Rows.DUPLICATES, **fields)
        for r in range(world.size)
    )
    slabs, offsets = expert_major(world, rank, ALIGNMENT)
    counts, starts = np.empty(len(slabs), kind), np.empty(len(slabs) + 1, kind)
    sources, totals = np.empty((len(slabs), world.size), kind), np.empty(3, kind)
    out = PlanTensors(
        expert_counts=counts, expert_offsets=starts, source_counts=sources, totals=totals
    )
    with Group(bootstrap, max_recv_rows=capacity, **fields) as group:
        handle = Handle(group)
        for _ in range(2):
            handle.prepare(world.idx[rank], out=out)
            assert list(counts) == [len(slab) for slab in slabs]
            assert list(starts) == offsets
            assert list(totals) == [offsets[-1], offsets[-1], 0]
            assert (sources.sum(axis=1) == counts).all()
            train_step(world, rank, handle, capacity)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_static_sizes(seed, kind):
    for world in worlds(seed):
        run_threads(world.size, static_rank, world, kind)


# Two steps in flight on one handle, each with a plan of its own; the second plan moves.
def named_rank(bootstrap, first, second):
    rank = bootstrap.rank
    with Group(bootstrap, alignment=ALIGNMENT, **config(first)) as group:
        handle = Handle(group, plans=Plans.NAMED)
        plans, sizes = [make_plan(handle), make_plan(handle)], [np.zeros(1, np.int32) for _ in "12"]
        for world, plan, size in zip((first, second), plans, sizes):
            handle.prepare(world.idx[rank], plan=plan, out=PlanTensors(recv_rows=size))
        moved = make_plan(handle)
        moved[:] = plans[1]
        plans[1][:] = 0xA5
        train_step(second, rank, handle, sizes[1][0], plan=moved)
        train_step(first, rank, Handle(group, plans=Plans.NAMED), sizes[0][0], plan=plans[0])
        assert group.status().status is Status.OK


def test_named_plans(seed):
    for case in range(CASES):
        first, second = World(seed + case), World(seed + case + 1000)
        run_threads(first.size, named_rank, first, second)


# A handle's own plan serves another handle of an equal configuration.
def shared_plan_rank(bootstrap, world):
    rank = bootstrap.rank
    with Group(bootstrap, alignment=ALIGNMENT, **config(world)) as group:
        handle = Handle(group)
        handle.prepare(world.idx[rank])
        train_step(
            world,
            rank,
            Handle(group, plans=Plans.NAMED),
            handle.info().recv_rows,
            plan=handle.plan(),
        )
        check_sources(world, rank, handle)


def check_sources(world, rank, handle):
    """Which token each receive row is of; rows behind the last one are of none."""
    slabs, offsets = expert_major(world, rank, ALIGNMENT)
    expected = np.full((2, offsets[-1] + 1), -1, np.int32)
    for slab, begin in zip(slabs, offsets):
        for at, (source, token, _) in enumerate(slab):
            expected[:, begin + at] = source, token
    ranks, tokens = np.empty(expected.shape, np.int32)
    handle.plan_sources(ranks=ranks, tokens=tokens)
    assert [ranks.tolist(), tokens.tolist()] == expected.tolist()
    if offsets[-1]:
        with pytest.raises(EpError, match=f"rows: expected at least {offsets[-1]}, got 0"):
            handle.plan_sources(ranks=ranks[:0], tokens=tokens)
    for wrong in (ranks.astype(np.int64), ranks[None], None):
        with pytest.raises(TypeError, match="ranks: expected an INT32 tensor of 1 dimension, got"):
            handle.plan_sources(ranks=wrong, tokens=tokens)


def test_own_plan_on_another_handle(seed):
    world = World(seed)
    run_threads(world.size, shared_plan_rank, world)


# ---- flat --------------------------------------------------------------------------------------


def flat_rank(bootstrap, world):
    rank, expected = bootstrap.rank, flat(world, bootstrap.rank)
    mine = world.experts_of(rank)
    with Group(bootstrap, **config(world)) as group:
        handle = Handle(group, layout=Layout.FLAT)
        handle.prepare(world.idx[rank])
        num_rows = handle.info().recv_rows
        assert num_rows == len(expected)
        recv, recv_w = rows(num_rows, world.hidden), rows(num_rows, world.top_k)
        recv_idx = np.full((num_rows, world.top_k), -7, np.int64)
        handle.dispatch(
            world.x[rank],
            world.weights[rank],
            recv_tokens=recv,
            recv_topk_weights=recv_w,
            recv_topk_idx=recv_idx,
        )
        done = np.zeros_like(recv)
        for row, (source, t) in enumerate(expected):
            np.testing.assert_array_equal(recv[row], world.x[source][t])
            for k, expert in enumerate(world.idx[source][t]):
                here = expert in mine
                assert recv_idx[row, k] == (expert - mine[0] if here else -1)
                assert recv_w[row, k] == (world.weights[source][t, k] if here else 0)
                done[row] += recv_w[row, k] * world.factor(expert) * recv[row]
        out = rows(*world.x[rank].shape)
        handle.combine(done, out=out)
        np.testing.assert_array_equal(out, world.forward(rank))


def test_flat(seed):
    for world in worlds(seed):
        run_threads(world.size, flat_rank, world)
