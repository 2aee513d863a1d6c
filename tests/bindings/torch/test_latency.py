# SPDX-License-Identifier: Apache-2.0
"""Latency mode: dispatch takes its routing, and the receive phase is a hook."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import (
    assert_equal,
    make_group,
    off,
    on_device,
    other_device,
    refuse_each,
    run_threads,
)
from reference import World, expert_major
from torch.autograd import forward_ad

import libep
import libep.torch as ep
from libep import EpError, Layout, Mode, Status

ROWS = 24  # of an expert


def latency_group(bootstrap, world, **fields):
    return make_group(
        bootstrap,
        num_experts=world.experts,
        max_tokens=world.max_tokens,
        hidden=world.hidden,
        top_k=world.top_k,
        mode=Mode.LATENCY,
        **fields,
    )


def inputs(world, rank):
    return (on_device(a[rank]) for a in (world.x, world.idx, world.weights))


def batched_factors(world, rank, device):
    factors = [float(world.factor(e)) for e in world.experts_of(rank)]
    return torch.tensor(factors, device=device)[:, None, None]


def send_and_receive(handle, x, idx, weights, is_split):
    if not is_split:
        return ep.dispatch(handle, x, idx, weights)
    received, hook = ep.dispatch_send(handle, x, idx, weights)
    hook()
    return received


@pytest.mark.parametrize("is_split", [False, True])
def test_a_refused_dispatch_took_no_part(seed, is_split):
    """Where rows go is checked before the send phase, not in the receive phase."""
    world = World(seed, size=2, tokens=[2, 2])

    def body(bootstrap):
        with latency_group(bootstrap, world) as group:
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


@pytest.mark.parametrize("is_split", [False, True])
def test_batched(seed, is_split, nodes):
    """[L, rows, H]: a slab of fixed size per expert; weights at combine travel or are at home."""
    world = World(seed)

    def body(bootstrap):
        rank = bootstrap.rank
        with latency_group(bootstrap, world) as group:
            handle = ep.Handle(group, layout=Layout.BATCHED, rows_per_expert=ROWS)
            x, idx, weights = inputs(world, rank)
            for is_home in (False, True):
                carried = None if is_home else weights
                received = send_and_receive(handle, x, idx, carried, is_split)
                slabs, _ = expert_major(world, rank, 1)
                assert received.tokens.shape == (len(slabs), ROWS, world.hidden)
                assert received.plan.expert_counts.tolist() == [len(slab) for slab in slabs]
                for i, slab in enumerate(slabs):
                    rows = [world.x[s][t] for s, t, _ in slab]
                    expected = np.array(rows, np.float32).reshape(-1, world.hidden)
                    assert_equal(received.tokens[i, : len(slab)], expected)
                rows = received.tokens * batched_factors(world, rank, x.device)
                options = dict(topk_weights=weights) if is_home else {}
                slot_weights = received.topk_weights
                if is_split:
                    out, hook = ep.combine_send(
                        handle, received.plan, rows, slot_weights, **options
                    )
                    hook()
                else:
                    out = ep.combine(handle, received.plan, rows, slot_weights, **options)
                assert_equal(out, world.forward(rank))

    run_threads(world.size, body)


def test_rank_major(seed, nodes):
    """[R, max_tokens, H]: a block of each source rank, with local experts and weights per row."""
    world = World(seed)

    def body(bootstrap):
        rank = bootstrap.rank
        mine = world.experts_of(rank)
        with latency_group(bootstrap, world) as group:
            handle = ep.Handle(group, layout=Layout.RANK_MAJOR)
            received = ep.dispatch(handle, *inputs(world, rank))
            assert received.tokens.shape == (world.size, world.max_tokens, world.hidden)
            assert received.topk_idx.shape == (world.size, world.max_tokens, world.top_k)
            factors = torch.zeros(received.tokens.shape[:2], device=group.device)
            for source, count in enumerate(received.plan.source_rows.tolist()):
                for i in range(count):
                    for e, w in zip(
                        received.topk_idx[source, i].tolist(),
                        received.topk_weights[source, i].tolist(),
                    ):
                        if e >= 0:
                            factors[source, i] += float(world.factor(mine[e])) * w
            out = ep.combine(handle, received.plan, received.tokens, factors)
            assert_equal(out, world.forward(rank))

    run_threads(world.size, body)


def test_two_layers_overlap(seed):
    """Two batches in flight: experts of one run while the other's rows travel."""
    worlds = [World(seed, max_tokens=6), World(seed + 1, max_tokens=6)]

    def body(bootstrap):
        rank = bootstrap.rank
        with latency_group(bootstrap, worlds[0]) as group:
            handles = [
                ep.Handle(group, layout=Layout.BATCHED, rows_per_expert=ROWS) for _ in worlds
            ]
            data = [list(inputs(world, rank)) for world in worlds]
            sent = [ep.dispatch_send(h, *d) for h, d in zip(handles, data)]
            combined = []
            for i in (1, 0):
                received, hook = sent[i]
                hook()
                with pytest.raises(EpError, match="second") as caught:
                    hook()
                assert caught.value.status == Status.ORDER
            for i in (0, 1):
                received = sent[i][0]
                rows = received.tokens * batched_factors(worlds[i], rank, group.device)
                combined.append(
                    ep.combine_send(handles[i], received.plan, rows, received.topk_weights)
                )
            for i in (1, 0):
                out, hook = combined[i]
                hook()
                assert_equal(out, worlds[i].forward(rank))

    run_threads(worlds[0].size, body)


def test_order_of_the_phases(alone):
    group = alone(mode=Mode.LATENCY)
    handle = ep.Handle(group)
    x = torch.ones(2, 16, device=group.device)
    idx = torch.tensor([[0, 1], [2, 3]], device=group.device)
    received, hook = ep.dispatch_send(handle, x, idx)
    with pytest.raises(EpError) as caught:
        ep.dispatch(handle, x, idx)
    assert caught.value.status == Status.ORDER
    hook()
    with pytest.raises(EpError, match="a Plan"):
        ep.dispatch(handle, x, received.plan)
    with pytest.raises(EpError, match="throughput"):
        ep.prepare(handle, idx)
    with pytest.raises(EpError, match="without gradient") as caught:
        ep.dispatch(handle, x.clone().requires_grad_(), idx)
    assert caught.value.status == Status.UNSUPPORTED
    with pytest.raises(EpError, match="without gradient"):
        ep.combine(handle, received.plan, received.tokens.clone().requires_grad_())
    assert_equal(ep.combine(handle, received.plan, received.tokens), 2 * x)


def test_phases_need_latency_mode(alone):
    group = alone()
    handle = ep.Handle(group)
    x = torch.ones(2, 16, device=group.device)
    idx = torch.tensor([[0, 1], [2, 3]], device=group.device)
    with pytest.raises(EpError, match="dispatch") as caught:
        ep.dispatch_send(handle, x, idx)
    assert caught.value.status == Status.UNSUPPORTED
    assert group.status().status == libep.Status.OK


def test_phases_have_no_gradient(alone):
    group = alone(mode=Mode.LATENCY)
    handle = ep.Handle(group, layout=Layout.BATCHED, rows_per_expert=ROWS)
    x = torch.ones(2, 16, device=group.device, requires_grad=True)
    idx = torch.tensor([[0, 1]] * 2, device=group.device)
    weights = torch.ones(2, 2, device=group.device, requires_grad=True)

    def refused(call, *arguments, **options):
        with pytest.raises(EpError, match=f"{call.__name__}: .*without gradient") as caught:
            call(*arguments, **options)
        assert caught.value.status == Status.UNSUPPORTED

    refused(ep.dispatch_send, handle, x, idx)
    refused(ep.dispatch_send, handle, x.detach(), idx, weights)
    received, hook = ep.dispatch_send(handle, x.detach(), idx)
    hook()
    refused(ep.combine_send, handle, received.plan, received.tokens, topk_weights=weights)
    with torch.no_grad():
        out, hook = ep.combine_send(handle, received.plan, received.tokens, topk_weights=weights)
    hook()
    assert_equal(out, 2 * x.detach())


def test_phases_refuse_rows_that_memory_does_not_hold(alone):
    group = alone(mode=Mode.LATENCY)
    handle = ep.Handle(group, layout=Layout.BATCHED, rows_per_expert=ROWS)
    x = torch.ones(2, 16, device=group.device)
    idx = torch.tensor([[0, 1]] * 2, device=group.device)
    with pytest.raises(TypeError, match="tokens: .*resolve_neg"):
        ep.dispatch_send(handle, torch._neg_view(x), idx)
    with forward_ad.dual_level(), pytest.raises(EpError, match="tokens: .*tangent"):
        ep.dispatch_send(handle, forward_ad.make_dual(x, x), idx)
    received, hook = ep.dispatch_send(handle, x, idx)
    hook()
    with pytest.raises(TypeError, match="expert_out: .*resolve_neg"):
        ep.combine_send(handle, received.plan, torch._neg_view(received.tokens))
    out, hook = ep.combine_send(handle, received.plan, received.tokens)
    hook()
    assert_equal(out, 2 * x)


def test_a_hook_writes_the_given_rows(alone):
    """Autograd notices it where it has saved them."""
    group = alone(mode=Mode.LATENCY)
    handle = ep.Handle(group, layout=Layout.BATCHED, rows_per_expert=ROWS)
    x = torch.ones(2, 16, device=group.device)
    idx = torch.tensor([[0, 1]] * 2, device=group.device)
    recv = x.new_zeros(6, ROWS, 16)
    factor = torch.ones(6, 1, 1, device=group.device, requires_grad=True)
    product = recv * factor
    _, hook = ep.dispatch_send(handle, x, idx, recv_tokens=recv)
    hook()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
