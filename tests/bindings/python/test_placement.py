# SPDX-License-Identifier: Apache-2.0
"""Copies of experts: what placement_balance returns. The common suite places experts."""

import libep
import numpy as np
import pytest
from base import refused

def test_group_without_places():
    fields = dict(num_experts=4, max_tokens=5, max_top_k=2, max_row_bytes=16, backend="host")
    with libep.Bootstrap.local(1)[0] as bootstrap, libep.Group(bootstrap, **fields) as group:
        with refused("UNSUPPORTED config.num_physical"):
            group.place(np.zeros(4, np.int32))


def test_balance():
    map = libep.placement_balance(np.array([6.0, 2, 2, 1]), 6, 2)
    assert map == libep.placement_balance([6, 2, 2, 1], 6, 2, nodes=[0, 0])
    assert sorted(map[:3]) == map[:3] and map.count(0) == 2 and set(map) == {0, 1, 2, 3}
    with refused("RANGE num_physical: expected a multiple of num_ranks = 2 in 4"):
        libep.placement_balance([1, 2, 3, 4], 5, 2)
    with pytest.raises(ValueError, match="expected 2 numbers, got 1"):
        libep.placement_balance([1], 2, 2, nodes=[0])
