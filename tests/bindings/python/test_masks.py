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


def test_ranks_join():
    """Two places of four are taken at first, by ranks of a store; then the others are."""
    stored, changed = {}, threading.Condition()

    def put(key, value):
        with changed:
            stored[key] = value
            changed.notify_all()

    def get(key, seconds):
        with changed:
            changed.wait_for(lambda: key in stored, seconds)
            return stored.get(key)

    fields = dict(FIELDS, masks=1, max_ranks=4, num_physical=8, timeout_seconds=SECONDS)

    def body(world):
        meetings = [[1, 2], [0, 1, 2], [0, 1, 2, 3]]
        group = None
        for number, places in enumerate(meetings):
            world.allgather(b"0", SECONDS)
            if world.rank not in places:
                continue
            rank = places.index(world.rank)
            boot = libep.Bootstrap.from_store(rank, len(places), put, get, prefix=str(number))
            if group is not None:
                before = group.bootstrap
                group.admit(boot)
                before.close()
            elif number == 0:
                group = libep.Group(boot, place=world.rank, **fields)
            else:
                group = libep.Group.join(boot, place=world.rank, **fields)
                assert group.alive() == meetings[number - 1]
            assert (group.rank, group.size) == (world.rank, 4)
            group.mask(places)
            assert group.alive() == places
            assert group.status().status == libep.Status.OK
        with refused("RANGE .*ep_group_admit: bootstrap.size: .*4 places, got 5 ranks"):
            group.admit(libep.Bootstrap.from_store(0, 5, put, get, prefix="more"))
        world.allgather(b"0", SECONDS)
        group.close()

    run_threads(4, body)
