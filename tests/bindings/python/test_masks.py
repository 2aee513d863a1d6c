# SPDX-License-Identifier: Apache-2.0
"""Groups whose ranks go on without others."""

import threading

import libep
import pytest
from base import SECONDS, refused, run_threads

FIELDS = {"num_experts": 6, "max_tokens": 8, "max_top_k": 2, "max_row_bytes": 64}


def test_ranks_leave_and_come_back():
    barrier = threading.Barrier(3)

    def body(bootstrap):
        fields = dict(FIELDS, masks=1, on_late="mask", late_us=1000, mode="latency")
        group = libep.Group(bootstrap, timeout_seconds=SECONDS, **fields)
        assert group.alive() == [0, 1, 2]
        barrier.wait()
        if group.rank < 2:
            group.mask([0, 1])
            assert group.alive() == [0, 1]
            group.cut(1 - group.rank)
            assert group.alive() == [group.rank]
        barrier.wait()
        group.mask(range(3))
        assert group.alive() == [0, 1, 2] and group.status().status == libep.Status.OK
        with pytest.raises(ValueError, match="expected ranks 0 .. 2, got 3"):
            group.mask([group.rank, 3])
        with refused("RANGE .*expected this rank's own bit"):
            group.mask([(group.rank + 1) % 3])
        group.close()

    run_threads(3, body)


def test_groups_without_masks():
    def body(bootstrap):
        with libep.Group(bootstrap, **FIELDS) as group:
            assert group.alive() == [0, 1]
            with refused("UNSUPPORTED .*config.masks"):
                group.mask([0, 1])
            with refused("UNSUPPORTED .*EP_LATE_MASK"):
                group.cut(1 - group.rank)

    run_threads(2, body)
