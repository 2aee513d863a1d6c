# SPDX-License-Identifier: Apache-2.0
"""Ranks that are missing or late, and come back. The common suite has steps of masked ranks."""

import copy
import threading

import pytest
import torch
from conftest import DEVICE, assert_equal, inputs_of, make_group, on_device, run_threads
from reference import Received, World

import libep
import libep.torch as ep

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="masks are for the host backend")


def step(group, world, masked, layout="expert_major", **options):
    """A step of a rank, which has these ranks masked, forward and backward."""
    world, rank = copy.copy(world), group.rank
    world.masked = masked
    handle = ep.Handle(group, layout=layout, **options)
    x, idx, weights = inputs_of(world, rank)
    x.requires_grad_(layout == "expert_major")
    got = ep.dispatch(handle, x, idx, weights)
    scale = Received(world, rank, layout, most=got.tokens.shape[1]).scale
    done = got.tokens * torch.from_numpy(scale)[..., None]
    out = ep.combine(handle, got.plan, done, got.topk_weights)
    assert_equal(out, world.forward(rank))
    if x.requires_grad:
        out.backward(on_device(world.grad_out[rank]))
        assert_equal(x.grad, world.backward(rank)[0])


def test_missing_rank(seed):
    """The other is suspended, goes on alone, and takes it back."""
    world, went_on = World(seed, size=2), threading.Event()

    def body(bootstrap):
        with make_group(bootstrap, world, masks=1, timeout_seconds=5) as group:
            if group.rank == 0:
                with pytest.raises(libep.EpError, match="rank 1 did not arrive") as caught:
                    step(group, world, ())
                assert caught.value.status == group.status().status == libep.Status.TIMEOUT
                assert group.status().peer == 1
                with pytest.raises(libep.EpError, match="until ep_group_mask"):
                    step(group, world, ())
                group.mask([0])
                step(group, world, (1,))
                went_on.set()
            assert went_on.wait(60) and group.alive() == [0, 1][: 1 + group.rank]
            group.mask([0, 1])
            step(group, world, ())
            assert group.status().status == libep.Status.OK

    run_threads(2, body)


def test_late_rank(seed):
    """Each goes on alone, and reports it once."""
    world, went_on = World(seed, size=2), threading.Event()
    fields = dict(masks=1, mode="latency", on_late="mask", late_us=10_000)

    def body(bootstrap):
        with make_group(bootstrap, world, **fields) as group:
            assert group.rank == 0 or went_on.wait(60)
            alone = (1 - group.rank,)
            step(group, world, alone, "batched", rows_per_expert=24)
            assert group.status().status == libep.Status.MASKED and group.alive() == [group.rank]
            went_on.set()
            group.mask([0, 1])
            assert group.status().status == libep.Status.OK and group.alive() == [0, 1]
            group.cut(*alone)
            step(group, world, alone, "batched", rows_per_expert=24)
            group.mask([0, 1])

    run_threads(2, body)
