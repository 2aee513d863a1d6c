# SPDX-License-Identifier: Apache-2.0
"""Plans in memory of the caller's, phases of several handles, and what handles keep alive."""

import gc
import weakref

import libep
import numpy as np
import pytest
from base import refused, run_threads
from face import BATCHED_ROWS, Step, config, rows, send
from libep import Extras, Group, Handle, Layout, Mode, Plans, PlanTensors, Prepare, Status
from reference import Received, World, expert_major, flat
from suite import Case, check_received, check_results

ALIGNMENT, CASES = 4, 6
TRAIN = Case(alignment=ALIGNMENT, capacity=0)
BATCHED = Case(layout="batched", capacity=0)

pytestmark = pytest.mark.usefixtures("nodes")


def make_plan(handle):
    """Memory for a named plan, aligned to 64."""
    memory = np.empty(handle.plan_bytes + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][: handle.plan_bytes]


def worlds(seed):
    return [World(seed + case, size=1 + (seed + case) % 4) for case in range(CASES)]


def check_step(step, case, grads=(None, None)):
    expected = Received(step.world, step.rank, case.layout, case.alignment, BATCHED_ROWS)
    got = dict(recv=step.recv, recv_w=step.recv_w, recv_idx=step.idx, out=step.out)
    check_received(got, expected, case)
    check_results(step.world, step.rank, dict(got, grad_x=grads[0], grad_w=grads[1]), case)


def train(world, rank, handle, num_rows, **plan):
    """Dispatch, experts, combine, and both backwards, by the plan that is there."""
    step = Step(world, rank, handle, Received(world, rank, "expert_major", ALIGNMENT), **plan)
    step.outputs(TRAIN, num_rows)
    handle.dispatch(*step.given(), **step.received(), **plan)
    check_step(step, TRAIN, step.backward("combine", *step.combine("combine")))


def test_named_plans(seed):
    """Two steps in flight on one handle, each with a plan of its own; the second plan moves."""

    def body(bootstrap, first, second):
        rank = bootstrap.rank
        with Group(bootstrap, alignment=ALIGNMENT, **config(first)) as group:
            handle = Handle(group, plans=Plans.NAMED)
            plans, sizes = [make_plan(handle) for _ in "12"], [np.zeros(1, np.int32) for _ in "12"]
            for world, plan, size in zip((first, second), plans, sizes):
                handle.prepare(world.idx[rank], plan=plan, out=PlanTensors(recv_rows=size))
            moved = make_plan(handle)
            moved[:] = plans[1]
            plans[1][:] = 0xA5
            train(second, rank, handle, sizes[1][0], plan=moved)
            train(first, rank, Handle(group, plans=Plans.NAMED), sizes[0][0], plan=plans[0])
            assert group.status().status is Status.OK

    for case in range(CASES):
        first, second = World(seed + case), World(seed + case + 1000)
        run_threads(first.size, body, first, second)


def test_fields_and_extras(seed):
    """Sums that travel as fp8 are near; padding is kept; a gradient's sum has biases, too."""
    world = World(seed, size=2, tokens=[6, 6], hidden=16)

    def body(bootstrap):
        rank = bootstrap.rank
        x, weights = world.x[rank], world.weights[rank]
        slabs, offsets = expert_major(world, rank, 4)
        with Group(bootstrap, alignment=4, **config(world)) as group:
            recv, recv_w = (np.full((offsets[-1], *more), 77, np.float32) for more in ((16,), ()))
            fields, sums = dict(sum_quant=libep.Quant.FP8, padding=libep.Padding.KEEP), []
            plain, keeping = Handle(group), Handle(group, **fields)
            for handle in plain, keeping:
                out = np.empty_like(x)
                handle.prepare(world.idx[rank])
                recv[:] = recv_w[:] = 77
                handle.dispatch(x, weights, recv_tokens=recv, recv_topk_weights=recv_w)
                handle.combine(recv * 1.0625, out=out)
                sums.append(out)
            is_padding = np.ones(offsets[-1], bool)
            for slab, first in zip(slabs, offsets):
                is_padding[first : first + len(slab)] = False
            for kept in (recv == 77).all(1), recv_w == 77:
                assert (kept == is_padding).all()
            exact, packed = sums
            error = np.abs(packed - exact).max()
            assert error <= np.abs(exact).max() / 8
            one, two = (bias[rank] for bias in world.biases)
            plain.dispatch_backward(recv, grad_tokens=exact)
            plain.dispatch_backward(recv, grad_tokens=packed, extras=Extras(one, two))
            np.testing.assert_array_equal(packed, exact + one + two)
            counter = np.zeros(len(slabs), np.int64)
            with refused("EpError extras.expert_tokens: expected NULL, since this call"):
                handle.combine(recv, out=out, extras=Extras(expert_tokens=counter))
            return error

    assert max(run_threads(2, body)) > 0


def test_own_plan_on_another_handle(seed):
    """A handle's own plan serves another handle of an equal configuration."""
    world = World(seed)

    def body(bootstrap):
        rank = bootstrap.rank
        with Group(bootstrap, alignment=ALIGNMENT, **config(world)) as group:
            handle, other = Handle(group), Handle(group, plans=Plans.NAMED)
            handle.prepare(world.idx[rank])
            train(world, rank, other, handle.info().recv_rows, plan=handle.plan())
            check_sources(world, rank, handle)

    run_threads(world.size, body)


def check_sources(world, rank, handle):
    """Which token each receive row is of; rows behind the last one are of none."""
    slabs, offsets = expert_major(world, rank, ALIGNMENT)
    expected = np.full((3, offsets[-1] + 1), -1, np.int32)
    for slab, begin in zip(slabs, offsets):
        for at, entry in enumerate(slab):
            expected[:, begin + at] = entry
    ranks, tokens, entries = np.empty(expected.shape, np.int32)
    handle.plan_sources(ranks=ranks, tokens=tokens, entries=entries)
    assert [ranks.tolist(), tokens.tolist(), entries.tolist()] == expected.tolist()
    handle.plan_sources(ranks=tokens, tokens=ranks)
    assert [tokens.tolist(), ranks.tolist()] == expected[:2].tolist()
    if offsets[-1]:
        with refused(f"EpError rows: expected at least {offsets[-1]}, got 0"):
            handle.plan_sources(ranks=ranks[:0], tokens=tokens)
    counts = np.empty(world.size, np.int32)
    handle.plan_source_tokens(counts=counts)
    rows = flat(world, rank)
    assert counts.tolist() == [sum(s == source for s, _ in rows) for source in range(world.size)]
    with refused(f"EpError counts: expected at least {world.size} elements, got 1"):
        handle.plan_source_tokens(counts=counts[:1])
    for wrong in (ranks.astype(np.int64), ranks[None], None):
        with refused("TypeError ranks: expected an INT32 tensor of 1 dimension, got"):
            handle.plan_sources(ranks=wrong, tokens=tokens)


# ---- latency mode --------------------------------------------------------------------------------


class Batched(Step):
    """A step in the batched layout."""

    def __init__(self, group, world, **fields):
        handle = Handle(group, layout=Layout.BATCHED, rows_per_expert=BATCHED_ROWS, **fields)
        expected = Received(world, group.rank, "batched", 1, BATCHED_ROWS)
        super().__init__(world, group.rank, handle, expected)
        self.outputs(BATCHED, 0)

    def finish(self):
        """The combine of rows that the receive phase has delivered, in both of its phases."""
        self.combine("combine", self.handle.combine_send)
        self.handle.combine_wait(out=self.out)
        check_step(self, BATCHED)


def latency_group(bootstrap, world, **fields):
    return Group(bootstrap, **config(world, mode=Mode.LATENCY, **fields))


def phases_rank(bootstrap, world):
    with latency_group(bootstrap, world) as group:
        steps = Batched(group, world), Batched(group, world)
        for repeat in range(3):
            for step in steps:
                assert step.handle.mode is Mode.LATENCY
                # The handle keeps what prepare records: these arrays have no other reference.
                step.handle.prepare(world.idx[group.rank].copy())
                if repeat == group.rank == 0:
                    gc.collect()
                np.full_like(world.idx[group.rank], -3)  # likely where freed memory would have been
                send(step, None)
            for step in reversed(steps):
                step.handle.dispatch_wait(**step.received())
            for step in steps:
                step.finish()
        assert group.status().status is Status.OK


def routed_rank(bootstrap, world):
    """A dispatch with its routing, and a plan of the caller's."""
    with latency_group(bootstrap, world) as group:
        step, totals = Batched(group, world, plans=Plans.NAMED), np.empty(3, np.int64)
        step.plan = dict(plan=make_plan(step.handle))
        send(step, Prepare(world.idx[group.rank].copy(), out=PlanTensors(totals=totals)))
        step.handle.dispatch_wait(**step.received())
        assert totals[2] == 0
        step.finish()


@pytest.mark.parametrize("body", [phases_rank, routed_rank])
def test_latency_mode(seed, body):
    for world in worlds(seed):
        run_threads(world.size, body, world)


def test_a_dispatch_that_was_received_is_forgotten():
    """The handle keeps what a pending dispatch writes, and only until its receive phase."""
    (bootstrap,) = libep.Bootstrap.local(1)
    world = World(0, size=1)
    with latency_group(bootstrap, world, max_recv_rows=100) as group:
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
