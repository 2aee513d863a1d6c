# SPDX-License-Identifier: Apache-2.0
"""What plans and handles have beside the steps of the common suite."""

import gc
import weakref

import libep
import numpy as np
from base import refused, run_threads
from face import config, rows
from libep import Extras, Group, Handle, PlanTensors, Prepare
from reference import World, expert_major, flat

ALIGNMENT = 4


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


def test_sources(seed, nodes):
    """Which token each receive row is of; rows behind the last one are of none."""
    world = World(seed)

    def body(bootstrap):
        with Group(bootstrap, alignment=ALIGNMENT, **config(world)) as group, Handle(group) as handle:
            handle.prepare(world.idx[bootstrap.rank])
            check_sources(world, bootstrap.rank, handle)

    run_threads(world.size, body)


def check_sources(world, rank, handle):
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


def test_a_dispatch_that_was_received_is_forgotten():
    """The handle keeps what a pending dispatch writes, and only until its receive phase."""
    (bootstrap,) = libep.Bootstrap.local(1)
    world = World(0, size=1)
    with Group(bootstrap, **config(world, mode="latency", max_recv_rows=100)) as group:
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
