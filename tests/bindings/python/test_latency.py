# SPDX-License-Identifier: Apache-2.0
"""Latency mode on threads, against the reference: whole calls, send and receive phases."""

from __future__ import annotations

import gc
import weakref

import libep
import numpy as np
import pytest
from conftest import config, run_threads
from libep import EpError, Group, Handle, Layout, Mode, Plans, PlanTensors, Prepare, Status
from reference import World, expert_major, flat
from test_step import rows

pytestmark = pytest.mark.usefixtures("nodes")

CASES = 6


def worlds(seed):
    for case in range(CASES):
        yield World(seed + case, size=1 + (seed + case) % 4)


def slab_rows(world):
    """Rows of each slab with which nothing is lost, whatever the routing."""
    return libep.max_recv_rows(
        world.size, 0, Layout.BATCHED, libep.Rows.DUPLICATES, **config(world)
    )


def check_batched(world, rank, recv, recv_w):
    slabs, _ = expert_major(world, rank, 1)
    for slab, tokens, weights in zip(slabs, recv, recv_w):
        for row, (source, t, k) in enumerate(slab):
            np.testing.assert_array_equal(tokens[row], world.x[source][t])
            assert weights[row] == world.weights[source][t, k]


def apply_experts(world, rank, recv):
    factors = np.array([world.factor(e) for e in world.experts_of(rank)], np.float32)
    return recv * factors.reshape(-1, 1, 1)


class BatchedStep:
    """A step in the batched layout, as calls that may lie apart."""

    def __init__(self, group, world, handle):
        self.world, self.rank, self.handle = world, group.rank, handle
        count = len(world.experts_of(self.rank))
        self.recv = rows(count, slab_rows(world), world.hidden)
        self.recv_w = rows(count, slab_rows(world))
        self.out = rows(*world.x[self.rank].shape)

    def send(self, **plan):
        x, w = self.world.x[self.rank].copy(), self.world.weights[self.rank].copy()
        self.handle.dispatch_send(x, w, **plan)
        x[:], w[:] = np.nan, np.nan  # inputs may be overwritten once the send phase has run

    def wait(self):
        self.handle.dispatch_wait(recv_tokens=self.recv, recv_topk_weights=self.recv_w)
        check_batched(self.world, self.rank, self.recv, self.recv_w)

    def combine(self, **plan):
        self.handle.combine_send(
            apply_experts(self.world, self.rank, self.recv), self.recv_w, **plan
        )
        self.handle.combine_wait(out=self.out)
        np.testing.assert_array_equal(self.out, self.world.forward(self.rank))


def latency_group(bootstrap, world, **fields):
    return Group(bootstrap, mode=Mode.LATENCY, **config(world, **fields))


# ---- whole calls -------------------------------------------------------------------------------


def whole_rank(bootstrap, world):
    rank = bootstrap.rank
    with latency_group(bootstrap, world) as group:
        handle = Handle(group, layout=Layout.BATCHED, rows_per_expert=slab_rows(world))
        assert handle.mode is Mode.LATENCY
        step = BatchedStep(group, world, handle)
        counts = np.empty(len(world.experts_of(rank)), np.int32)
        # The handle keeps what prepare records alive: the arrays below have no other reference.
        handle.prepare(world.idx[rank].copy(), out=PlanTensors(expert_counts=counts))
        gc.collect()
        np.full_like(world.idx[rank], -3)  # likely where freed memory would have been
        for _ in range(2):
            handle.dispatch(
                world.x[rank],
                world.weights[rank],
                recv_tokens=step.recv,
                recv_topk_weights=step.recv_w,
            )
            check_batched(world, rank, step.recv, step.recv_w)
            assert list(counts) == [len(slab) for slab in expert_major(world, rank, 1)[0]]
            # The weights at the token's rank take the place of the slots' weights.
            handle.combine(
                apply_experts(world, rank, step.recv),
                topk_weights=world.weights[rank],
                out=step.out,
            )
            np.testing.assert_array_equal(step.out, world.forward(rank))
        assert group.status().status is Status.OK


def test_whole_calls(seed):
    for world in worlds(seed):
        run_threads(world.size, whole_rank, world)


# ---- send and receive phases ---------------------------------------------------------------------


def phases_rank(bootstrap, world):
    with latency_group(bootstrap, world) as group:
        fields = dict(layout=Layout.BATCHED, rows_per_expert=slab_rows(world))
        first, second = (BatchedStep(group, world, Handle(group, **fields)) for _ in "12")
        for _ in range(3):
            for step in first, second:
                step.handle.prepare(world.idx[group.rank])
                step.send()
            second.wait()
            first.wait()
            first.combine()
            second.combine()
        assert group.status().status is Status.OK


def test_phases_of_two_handles(seed):
    for world in worlds(seed):
        run_threads(world.size, phases_rank, world)


def routed_rank(bootstrap, world):
    with latency_group(bootstrap, world) as group:
        handle = Handle(
            group, layout=Layout.BATCHED, rows_per_expert=slab_rows(world), plans=Plans.NAMED
        )
        memory = np.empty(handle.plan_bytes + 64, np.uint8)
        plan = memory[-memory.ctypes.data % 64 :][: handle.plan_bytes]
        step = BatchedStep(group, world, handle)
        totals = np.empty(3, np.int64)
        step.send(
            plan=plan, prepare=Prepare(world.idx[group.rank].copy(), out=PlanTensors(totals=totals))
        )
        step.wait()
        assert totals[2] == 0
        step.combine(plan=plan)


def test_dispatch_with_its_routing(seed):
    for world in worlds(seed):
        run_threads(world.size, routed_rank, world)


def pending_rank(bootstrap, world):
    with latency_group(bootstrap, world) as group:
        handle = Handle(group, layout=Layout.BATCHED, rows_per_expert=slab_rows(world))
        step = BatchedStep(group, world, handle)
        with pytest.raises(EpError, match="dispatch_wait") as error:
            step.wait()
        assert error.value.status is Status.ORDER
        handle.prepare(world.idx[group.rank])
        step.send()
        with pytest.raises(EpError) as error:
            handle.info()
        assert error.value.status is Status.ORDER
        step.wait()
        step.combine()


def test_calls_between_phases_are_refused(seed):
    world = World(seed)
    run_threads(world.size, pending_rank, world)


# ---- rank-major ----------------------------------------------------------------------------------


def rank_major_rank(bootstrap, world):
    rank, expected = bootstrap.rank, flat(world, bootstrap.rank)
    with latency_group(bootstrap, world) as group:
        handle = Handle(
            group,
            layout=Layout.RANK_MAJOR,
            zero_tail=libep.Tail.IDS,
            expert_ids=libep.ExpertIds.GLOBAL,
        )
        shape = (world.size, world.max_tokens)
        recv, recv_idx = rows(*shape, world.hidden), np.empty((*shape, world.top_k), np.int32)
        sources = np.empty(world.size, np.int64)
        handle.dispatch(
            world.x[rank],
            recv_tokens=recv,
            recv_topk_idx=recv_idx,
            prepare=Prepare(world.idx[rank], out=PlanTensors(source_rows=sources)),
        )
        assert sources.sum() == len(expected)
        for source in range(world.size):
            tokens = [t for s, t in expected if s == source]
            np.testing.assert_array_equal(recv[source, : len(tokens)], world.x[source][tokens])
            assert (recv_idx[source, len(tokens) :] == -1).all()
            for row, t in enumerate(tokens):
                here = [e if e in world.experts_of(rank) else -1 for e in world.idx[source][t]]
                assert list(recv_idx[source, row]) == here


def test_rank_major(seed):
    for world in worlds(seed):
        run_threads(world.size, rank_major_rank, world)


def test_a_dispatch_that_was_received_is_forgotten():
    """The handle keeps what a pending dispatch writes, and only until its receive phase."""
    (bootstrap,) = libep.Bootstrap.local(1)
    world = World(0, size=1)
    with Group(bootstrap, **config(world, mode=Mode.LATENCY, max_recv_rows=100)) as group:
        handle = Handle(group)
        counts = []
        for _ in range(3):
            written = np.zeros(world.experts, np.int32)
            routing = Prepare(world.idx[0], out=PlanTensors(expert_counts=written))
            counts.append(weakref.ref(written))
            del written
            handle.dispatch_send(world.x[0], prepare=routing)
            del routing
            gc.collect()
            assert counts[-1]() is not None
            handle.dispatch_wait(recv_tokens=rows(100, world.hidden))
            gc.collect()
            assert counts[-1]() is None
    bootstrap.close()
