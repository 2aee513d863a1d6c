# SPDX-License-Identifier: Apache-2.0
"""Copies of experts: what placement_balance returns, and what Group.place does to a routing."""

import libep
import numpy as np
import pytest
from base import SECONDS, refused, run_threads
from libep import Group, Handle, PlanTensors

EXPERTS, PLACES, T = 4, 6, 5


def expected(map, idx, size, rank):
    """The slots of a rank's places, by the rule of ep_group_place with SPREAD."""
    counts = np.zeros(PLACES, np.int32)
    for source in range(size):
        for t in range(T):
            for expert in idx[source, t]:
                copies = [place for place, held in enumerate(map) if held == expert]
                if copies:
                    counts[copies[(source + t) % len(copies)]] += 1
    return counts[rank * PLACES // size : (rank + 1) * PLACES // size].tolist()


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_place(seed, mode):
    idx = np.random.default_rng(seed).integers(0, EXPERTS, (2, T, 2), np.int32)
    maps = libep.placement_balance([8, 1, 1, 1], PLACES, 2), [3, 3, -1, 3, 2, 0]

    def body(bootstrap):
        rank, x = bootstrap.rank, np.ones((T, 4), np.float32)
        fields = dict(num_experts=EXPERTS, max_tokens=T, max_top_k=2, max_row_bytes=16)
        fields.update(backend="host", timeout_seconds=SECONDS, max_recv_rows=64, mode=mode)
        with Group(bootstrap, num_physical=PLACES, choice="spread", **fields) as group:
            assert group.query().num_physical == PLACES and group.query().num_local_experts == 3
            handle = Handle(group)
            for map in maps:
                counts = np.zeros(3, np.int32)
                group.place(np.array(map, np.int32))
                handle.prepare(idx[rank], out=PlanTensors(expert_counts=counts))
                handle.dispatch(x, recv_tokens=np.empty((64, 4), np.float32))
                assert counts.tolist() == expected(map, idx, 2, rank)
        with Group(bootstrap, **fields) as group, refused("UNSUPPORTED config.num_physical"):
            group.place(np.zeros(EXPERTS, np.int32))

    run_threads(2, body)


@pytest.mark.parametrize("in_place", [False, True])
def test_move_weights(in_place):
    """Rows are their expert's number; places without one keep what they have."""
    before, after = [0, 1, 2, 3, -1, 1], [3, 3, -1, 0, 1, 2]

    def body(bootstrap):
        mine = slice(3 * bootstrap.rank, 3 * bootstrap.rank + 3)
        fields = dict(num_experts=EXPERTS, max_tokens=T, max_top_k=2, max_row_bytes=16)
        weights = [np.empty((3, 5, 7), np.float32), np.empty(3, np.int32)]
        out = [np.full_like(each, -2) for each in weights]
        for each in weights:
            each[...] = np.array(before[mine]).reshape(3, *[1] * (each.ndim - 1))
        kept = before if in_place else [-2] * PLACES
        rows = [b if a < 0 else a for a, b in zip(after, kept)][mine]
        memory = np.empty(3 * 64 + 64, np.uint8)
        workspace = memory[-memory.ctypes.data % 64 :][: 3 * 64]
        with Group(bootstrap, num_physical=PLACES, backend="host", **fields) as group:
            how = dict(workspace=workspace) if in_place else dict(out=out)
            group.move_weights(before, after, weights, **how)
            for each in weights if in_place else out:
                assert each.reshape(3, -1).T.tolist() == [rows] * (each.size // 3)
            with refused("ROUTING from: expected a copy of expert 3"):
                group.move_weights([0] * PLACES, after, weights, **how)
            with pytest.raises(ValueError, match="before: expected 6 numbers, got 1"):
                group.move_weights([0], after, weights, **how)

    run_threads(2, body)


def test_balance():
    map = libep.placement_balance(np.array([6.0, 2, 2, 1]), 6, 2)
    assert map == libep.placement_balance([6, 2, 2, 1], 6, 2, nodes=[0, 0])
    assert sorted(map[:3]) == map[:3] and map.count(0) == 2 and set(map) == {0, 1, 2, 3}
    with refused("RANGE num_physical: expected a multiple of num_ranks = 2 in 4"):
        libep.placement_balance([1, 2, 3, 4], 5, 2)
    with pytest.raises(ValueError, match="expected 2 numbers, got 1"):
        libep.placement_balance([1], 2, 2, nodes=[0])
