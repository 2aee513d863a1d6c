# SPDX-License-Identifier: Apache-2.0
"""Copies of experts: maps from loads, and weights that move. The common suite places experts."""

import libep
import numpy as np
import pytest
from base import refused, run_threads
from libep import Group

EXPERTS, PLACES, T = 4, 6, 5


def test_group_without_places():
    fields = dict(num_experts=4, max_tokens=5, max_top_k=2, max_row_bytes=16, backend="host")
    with libep.Bootstrap.local(1)[0] as bootstrap, Group(bootstrap, **fields) as group:
        with refused("UNSUPPORTED config.num_physical"):
            group.place(np.zeros(4, np.int32))


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
