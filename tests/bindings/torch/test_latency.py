# SPDX-License-Identifier: Apache-2.0
"""Latency mode: dispatch takes its routing, and the receive phase is a hook."""

from __future__ import annotations

import pytest
import torch
from base import refused
from conftest import assert_equal, off, on_device, other_device, refuse_each, run_threads
from face import world_group
from reference import Received, World, expert_major
from torch.autograd import forward_ad

import libep
import libep.torch as ep
from libep import EpError, Layout, Mode

ROWS = 24  # of an expert


def inputs(world, rank):
    return (on_device(a[rank]) for a in (world.x, world.idx, world.weights))


def times_experts(world, received, rank):
    scale = on_device(Received(world, rank, "batched", most=ROWS).scale)
    return received.tokens * scale[..., None]


@pytest.fixture
def small(alone):
    """A handle of one rank with slabs of fixed sizes, two tokens of ones, and their routing."""
    handle = ep.Handle(alone(mode=Mode.LATENCY), layout=Layout.BATCHED, rows_per_expert=ROWS)
    x = torch.ones(2, 16, device=handle.device)
    return handle, x, torch.tensor([[0, 1]] * 2, device=handle.device)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_refused_dispatch_took_no_part(seed, is_split):
    """Where rows go is checked before the send phase, not in the receive phase."""
    world = World(seed, size=2, tokens=[2, 2])

    def body(bootstrap):
        with world_group(bootstrap, world, mode=Mode.LATENCY) as group:
            handle = ep.Handle(group, layout=Layout.BATCHED, rows_per_expert=ROWS)
            x, idx, _ = inputs(world, bootstrap.rank)
            recv = x.new_empty(group.num_local_experts, ROWS, world.hidden)
            some = [recv[:1], recv[0], recv[:, 1:], recv.half(), recv.to(other_device()), off(recv)]
            some += [
                recv[..., :4].contiguous(),
                recv.tolist(),
                torch.cat([recv, recv], 2)[..., ::2],
            ]

            def call(**options):
                send = ep.dispatch_send if is_split else ep.dispatch
                return send(handle, x, idx, **options)

            if bootstrap.rank == 1:
                changes = [dict(recv_tokens=given) for given in some]
                refuse_each(call, {}, changes, (TypeError, EpError))
            received = call(recv_tokens=recv)
            if is_split:
                received, hook = received
                hook()
            assert received.tokens is recv
            slabs, _ = expert_major(world, bootstrap.rank, 1)
            assert received.plan.expert_counts.tolist() == [len(slab) for slab in slabs]

    run_threads(2, body)


def test_two_layers_overlap(seed):
    """Two batches in flight: experts of one run while the other's rows travel."""
    worlds = [World(seed, max_tokens=6), World(seed + 1, max_tokens=6)]

    def body(bootstrap):
        rank = bootstrap.rank
        with world_group(bootstrap, worlds[0], mode=Mode.LATENCY) as group:
            handles = [
                ep.Handle(group, layout=Layout.BATCHED, rows_per_expert=ROWS) for _ in worlds
            ]
            data = [list(inputs(world, rank)) for world in worlds]
            sent = [ep.dispatch_send(h, *d) for h, d in zip(handles, data)]
            for received, hook in reversed(sent):
                hook()
                with refused("ORDER second"):
                    hook()
            combined = []
            for world, handle, (received, _) in zip(worlds, handles, sent):
                rows = times_experts(world, received, rank)
                combined.append(
                    ep.combine_send(handle, received.plan, rows, received.topk_weights)
                )
            for world, (out, hook) in zip(reversed(worlds), reversed(combined)):
                hook()
                assert_equal(out, world.forward(rank))

    run_threads(worlds[0].size, body)


def test_order_of_the_phases(alone):
    group = alone(mode=Mode.LATENCY)
    handle = ep.Handle(group)
    x = torch.ones(2, 16, device=group.device)
    idx = torch.tensor([[0, 1], [2, 3]], device=group.device)
    received, hook = ep.dispatch_send(handle, x, idx)
    with refused("ORDER"):
        ep.dispatch(handle, x, idx)
    hook()
    plan, rows = received.plan, received.tokens
    for text, call in [
        ("EpError a Plan", lambda: ep.dispatch(handle, x, plan)),
        ("EpError throughput", lambda: ep.prepare(handle, idx)),
        ("UNSUPPORTED without gradient",
         lambda: ep.dispatch(handle, x.clone().requires_grad_(), idx)),
        ("UNSUPPORTED without gradient",
         lambda: ep.combine(handle, plan, rows.clone().requires_grad_())),
    ]:  # fmt: skip
        with refused(text):
            call()
    assert_equal(ep.combine(handle, plan, rows), 2 * x)


def test_phases_need_latency_mode(alone):
    group = alone()
    x = torch.ones(2, 16, device=group.device)
    idx = torch.tensor([[0, 1], [2, 3]], device=group.device)
    with refused("UNSUPPORTED dispatch"):
        ep.dispatch_send(ep.Handle(group), x, idx)
    assert group.status().status == libep.Status.OK


def test_phases_have_no_gradient(small):
    handle, x, idx = small
    weights = torch.ones(2, 2, device=x.device, requires_grad=True)
    for arguments in ((x.clone().requires_grad_(), idx), (x, idx, weights)):
        with refused("UNSUPPORTED dispatch_send: .*without gradient"):
            ep.dispatch_send(handle, *arguments)
    received, hook = ep.dispatch_send(handle, x, idx)
    hook()
    with refused("UNSUPPORTED combine_send: .*without gradient"):
        ep.combine_send(handle, received.plan, received.tokens, topk_weights=weights)
    with torch.no_grad():
        out, hook = ep.combine_send(handle, received.plan, received.tokens, topk_weights=weights)
    hook()
    assert_equal(out, 2 * x)


def test_phases_refuse_rows_that_memory_does_not_hold(small):
    handle, x, idx = small
    with refused("TypeError tokens: .*resolve_neg"):
        ep.dispatch_send(handle, torch._neg_view(x), idx)
    with forward_ad.dual_level(), refused("EpError tokens: .*tangent"):
        ep.dispatch_send(handle, forward_ad.make_dual(x, x), idx)
    received, hook = ep.dispatch_send(handle, x, idx)
    hook()
    with refused("TypeError expert_out: .*resolve_neg"):
        ep.combine_send(handle, received.plan, torch._neg_view(received.tokens))
    out, hook = ep.combine_send(handle, received.plan, received.tokens)
    hook()
    assert_equal(out, 2 * x)


def test_a_hook_writes_the_given_rows(small):
    """Autograd notices it where it has saved them."""
    handle, x, idx = small
    recv = x.new_zeros(6, ROWS, 16)
    factor = torch.ones(6, 1, 1, device=x.device, requires_grad=True)
    product = recv * factor
    _, hook = ep.dispatch_send(handle, x, idx, recv_tokens=recv)
    hook()
    with refused("RuntimeError modified by an inplace operation"):
        product.sum().backward()
