# SPDX-License-Identifier: Apache-2.0
"""sum_quant against NumPy, from the definition in docs/semantics.md, and padding that is kept."""

import numpy as np
from base import refused, run_threads
from face import config
from libep import Bootstrap, Extras, Group, Handle, Padding, Quant
from reference import World, expert_major
from test_quantise import e4m3_values, quantise


def travel(row):
    """What another rank makes of a partial sum: its codes times their scales."""
    codes, scales = quantise(row[None], (1, 128))
    values = e4m3_values()[codes & 0x7F] * np.where(codes & 0x80, np.float32(-1), np.float32(1))
    return (values * np.repeat(scales, 128, axis=1)[:, : row.size])[0]


def forward(world, rank):
    """The output of the layer for the tokens of a rank: partial sums are exact, and ascend."""
    out = np.zeros_like(world.x[rank])
    for owner in range(world.size):
        for t in range(world.tokens[rank]):
            mine = [(k, e) for s, k, e in world.entries(rank) if s == t]
            mine = [(k, e) for k, e in mine if e in world.experts_of(owner)]
            part = np.zeros(world.hidden, np.float32)
            for k, expert in mine:
                part += world.weights[rank][t, k] * world.factor(expert) * world.x[rank][t]
            if mine:
                out[t] += part if owner == rank else travel(part)
    return out


def dispatched(world, rank, handle, rows, weights):
    """Dispatch, and what the experts make of the rows; nothing is read of padding."""
    slabs, offsets = expert_major(world, rank, 4)
    handle.prepare(world.idx[rank])
    given = world.x[rank], world.weights[rank]
    handle.dispatch(*given, recv_tokens=rows, recv_topk_weights=weights)
    done = np.full_like(rows, np.nan)
    for expert, slab, first in zip(world.experts_of(rank), slabs, offsets):
        done[first : first + len(slab)] = world.factor(expert) * rows[first : first + len(slab)]
    return done


def test_sums_and_padding(seed):
    def body(bootstrap):
        rank = bootstrap.rank
        slabs, offsets = expert_major(world, rank, 4)
        with Group(bootstrap, alignment=4, **config(world)) as group:
            handle = Handle(group, sum_quant=Quant.FP8, padding=Padding.KEEP)
            rows = np.full((offsets[-1], world.hidden), 77, np.float32)
            weights = np.full(offsets[-1], 77, np.float32)
            done = dispatched(world, rank, handle, rows, weights)
            for slab, first, end in zip(slabs, offsets, offsets[1:]):
                assert (rows[first + len(slab) : end] == 77).all()
                assert (weights[first + len(slab) : end] == 77).all()
                assert not (rows[first : first + len(slab)] == 77).any()
            out = np.full_like(world.x[rank], np.nan)
            handle.combine(done, weights, out=out)
            np.testing.assert_array_equal(out, forward(world, rank))

    for case in range(4):
        world = World(seed + case, size=1 + (seed + case) % 4, hidden=16 * (1 + 5 * case))
        run_threads(world.size, body)


def test_biases_of_gradients(seed):
    """dispatch_backward is the same sum. The common suite has biases of combine."""
    world = World(seed, size=3)

    def body(bootstrap):
        rank = bootstrap.rank
        rows = np.ones((expert_major(world, rank, 1)[1][-1], 8), np.float32)
        with Group(bootstrap, **config(world)) as group, Handle(group) as handle:
            handle.prepare(world.idx[rank])
            plain, out = np.empty_like(world.x[rank]), np.empty_like(world.x[rank])
            one, two = (bias[rank] for bias in world.biases)
            handle.dispatch_backward(rows, grad_tokens=plain)
            handle.dispatch_backward(rows, grad_tokens=out, extras=Extras(one, two))
            assert np.array_equal(out, plain + one + two)

    run_threads(3, body)


def test_counters_of_another_operation(seed):
    (bootstrap,) = Bootstrap.local(1)
    world = World(seed, size=1)
    with bootstrap, Group(bootstrap, **config(world)) as group, Handle(group) as handle:
        handle.prepare(world.idx[0])
        rows, counter = np.zeros((handle.info().recv_rows, world.hidden), "f4"), np.zeros(7, "i8")
        with refused("EpError extras.expert_tokens: expected NULL, since this call"):
            handle.combine(rows, out=world.x[0].copy(), extras=Extras(expert_tokens=counter))
