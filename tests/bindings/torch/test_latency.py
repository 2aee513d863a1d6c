# SPDX-License-Identifier: Apache-2.0
"""Latency mode: dispatch takes its routing, and the receive phase is a hook."""

import pytest
import torch
from base import refused
from conftest import (
    assert_equal, inputs_of, make_group, off, on_device, on_ranks, ones, other_device, refuse_each,
    run_threads
)  # fmt: skip
from reference import Received, World, expert_major
from torch.autograd import forward_ad

import libep
import libep.torch as ep
from libep import EpError, Layout, Mode

ROWS = 24  # of an expert


def batched(group):
    return ep.Handle(group, layout=Layout.BATCHED, rows_per_expert=ROWS)


@pytest.fixture
def small(alone):
    """A handle of one rank with slabs of fixed sizes, two tokens of ones, and their routing."""
    return batched(alone(mode=Mode.LATENCY)), *ones(2)[:2]


@pytest.mark.parametrize("is_split", [False, True])
@on_ranks(world=dict(size=2, tokens=[2, 2]), mode=Mode.LATENCY)
def test_a_refused_dispatch_took_no_part(group, rank, world, is_split):
    """Where rows go is checked before the send phase, not in the receive phase."""
    handle, (x, idx, _) = batched(group), inputs_of(world, rank)
    recv = x.new_empty(group.num_local_experts, ROWS, world.hidden)
    some = [recv[:1], recv[0], recv[:, 1:], recv.half(), recv.to(other_device()), off(recv)]
    some += [recv[..., :4].contiguous(), recv.tolist(), torch.cat([recv, recv], 2)[..., ::2]]

    def call(**options):
        return (ep.dispatch_send if is_split else ep.dispatch)(handle, x, idx, **options)

    if rank == 1:
        refuse_each(call, {}, dict(recv_tokens=some), (TypeError, EpError))
    received = call(recv_tokens=recv)
    if is_split:
        received, hook = received
        hook()
    assert received.tokens is recv
    slabs, _ = expert_major(world, rank, 1)
    assert received.plan.expert_counts.tolist() == [len(slab) for slab in slabs]


def test_two_layers_overlap(seed):
    """Two batches in flight: experts of one run while the other's rows travel."""
    worlds = [World(seed, max_tokens=6), World(seed + 1, max_tokens=6)]

    def body(bootstrap):
        rank = bootstrap.rank
        with make_group(bootstrap, worlds[0], mode=Mode.LATENCY) as group:
            handles = [batched(group) for _ in worlds]
            sent = [ep.dispatch_send(h, *inputs_of(w, rank)) for h, w in zip(handles, worlds)]
            for received, hook in reversed(sent):
                hook()
                with refused("ORDER second"):
                    hook()
            combined = []
            for world, handle, (received, _) in zip(worlds, handles, sent):
                scale = on_device(Received(world, rank, "batched", most=ROWS).scale)
                given = received.plan, received.tokens * scale[..., None], received.topk_weights
                combined.append(ep.combine_send(handle, *given))
            for world, (out, hook) in zip(reversed(worlds), reversed(combined)):
                hook()
                assert_equal(out, world.forward(rank))

    run_threads(worlds[0].size, body)


def test_order_of_the_phases(small):
    handle, x, idx = small
    received, hook = ep.dispatch_send(handle, x, idx)
    with refused("ORDER"):
        ep.dispatch(handle, x, idx)
    hook()
    with refused("EpError a Plan"):
        ep.dispatch(handle, x, received.plan)
    with refused("EpError throughput"):
        ep.prepare(handle, idx)
    assert_equal(ep.combine(handle, received.plan, received.tokens), 2 * x)


def test_phases_need_latency_mode(alone):
    group = alone()
    with refused("UNSUPPORTED dispatch"):
        ep.dispatch_send(ep.Handle(group), *ones(2)[:2])
    assert group.status().status == libep.Status.OK


def test_what_phases_refuse(small):
    """Gradients, tangents, and rows that memory does not hold as they are."""
    handle, x, idx = small
    weights = torch.ones(2, 2, device=x.device, requires_grad=True)
    graded = x.clone().requires_grad_()
    received = ep.dispatch(handle, x, idx)
    plan, rows = received.plan, received.tokens
    send, combine = ep.dispatch_send, ep.combine_send
    more = rows.clone().requires_grad_()
    for text, call in [
        ("UNSUPPORTED dispatch_send: .*without gradient", lambda: send(handle, graded, idx)),
        ("UNSUPPORTED dispatch_send: .*without gradient", lambda: send(handle, x, idx, weights)),
        ("UNSUPPORTED without gradient", lambda: ep.dispatch(handle, graded, idx)),
        ("UNSUPPORTED without gradient", lambda: ep.combine(handle, plan, more)),
        ("UNSUPPORTED combine_send: .*without gradient",
         lambda: combine(handle, plan, rows, topk_weights=weights)),
        ("TypeError tokens: .*resolve_neg", lambda: send(handle, torch._neg_view(x), idx)),
        ("TypeError expert_out: .*resolve_neg",
         lambda: combine(handle, plan, torch._neg_view(rows))),
        ("EpError tokens: .*tangent", lambda: send(handle, forward_ad.make_dual(x, x), idx)),
    ]:  # fmt: skip
        with forward_ad.dual_level(), refused(text):
            call()
    with torch.no_grad():
        out, hook = combine(handle, plan, rows, topk_weights=weights)
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
