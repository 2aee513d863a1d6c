# SPDX-License-Identifier: Apache-2.0
"""Plans named per call: pipelines, checkpoints, copies, and backward in any order."""

import collections
import functools

import pytest
import torch
from base import refused
from conftest import assert_equal, make_group, ones, on_ranks, quarters, run_threads
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import libep
import libep.torch as ep
from libep.torch import _calls, _fast

SIZE, EXPERTS, TOP_K, HIDDEN = 2, 6, 2, 16


def micro_batch(seed, group, number=0):
    """Tokens, routing and weights of another number of tokens each, with gradients."""
    sizes = 5 + number, HIDDEN, EXPERTS, TOP_K
    x, idx, weights = quarters(seed + 100 * group.rank + number, *sizes, group.device)
    return x.requires_grad_(), idx, weights.requires_grad_()


class Layer:
    """Experts that multiply by their number plus one."""

    def __init__(self, group):
        self.group, self.handle = group, ep.Handle(group)

    def __call__(self, x, idx, weights):
        received = ep.dispatch(self.handle, x, idx, weights)
        plan, first = received.plan, self.group.first_expert
        factors = torch.arange(first + 1, first + 1 + plan.num_local_experts, device=x.device)
        factors = factors.repeat_interleave(plan.expert_padded.long()).float()
        return ep.combine(self.handle, plan, received.tokens * factors[:, None], received[1])


def check(inputs, out):
    """The output, and the gradients of its sum."""
    x, idx, weights = inputs
    factor = (weights * (1.0 + idx)).sum(1, keepdim=True).detach()
    assert_equal(out, factor * x.detach())
    assert_equal(x.grad, factor.expand_as(x))
    assert_equal(weights.grad, (1.0 + idx) * x.detach().sum(1, keepdim=True))


SCHEDULES = ["F0 F1 B0 B1", "F0 F1 B1 B0", "F0 F1 F2 B1 F3 B0 B3 B2", "F0 B0 F1 F2 B2 B1"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks()
def test_pipelines(group, seed, schedule):
    """One handle, several micro-batches of different sizes in flight."""
    layer, live = Layer(group), {}
    for action in schedule.split():
        number = int(action[1:])
        if action[0] == "F":
            inputs = micro_batch(seed, group, number)
            live[number] = inputs, layer(*inputs)
        else:
            inputs, out = live.pop(number)
            out.sum().backward()
            check(inputs, out)
    assert not live


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks()
def test_checkpoint(group, seed, reentrant):
    """Backward computes the layer again, with a plan of its own, and then its derivative."""
    layer = Layer(group)
    batches = [micro_batch(seed, group, i) for i in range(3)]
    outs = [checkpoint(layer, *batch, use_reentrant=reentrant) for batch in batches]
    for batch, out in zip(batches, outs):
        out.sum().backward()
        check(batch, out)


@pytest.fixture
def calls(monkeypatch):
    """The names of the operations that were called, in order."""
    seen = []
    for name in ("prepare", "dispatch", "combine", "dispatch_backward", "combine_backward"):
        call = getattr(_calls, name)
        noted = lambda *given, call=call, name=name: (seen.append(name), call(*given))  # noqa: E731
        monkeypatch.setattr(_calls, name, noted)
    monkeypatch.setattr(_fast, "make", None)  # does not go through _calls
    return seen


KEEP = functools.partial(create_selective_checkpoint_contexts, ep.EXCHANGES)
# What is kept, and the operations that run again in backward.
KEPT = [(KEEP, ()), (ep.keep("dispatch", "combine"), ()), (ep.keep("combine"), ("dispatch",)),
        (ep.keep(), ("dispatch", "combine"))]  # fmt: skip
both_layouts = pytest.mark.parametrize("layout", [libep.Layout.EXPERT_MAJOR, libep.Layout.FLAT])


@both_layouts
@pytest.mark.parametrize("capacity", [0, 64])
@pytest.mark.parametrize("kept", KEPT, ids=["ops", "both", "combine", "plan"])
def test_selective_checkpoint(seed, capacity, layout, kept, calls):
    """What is kept runs once, and always the exchange of routing. The experts run again."""
    context, again = kept

    def body(bootstrap):
        with make_group(bootstrap, max_recv_rows=capacity) as group:
            handle = ep.Handle(group, layout=layout, zero_tail=libep.Tail.ZERO)
            scale = torch.full((16,), 3.0, device=group.device, requires_grad=True)

            def layer(x, idx, weights):
                received = ep.dispatch(handle, x, idx, weights)
                by = received.topk_weights.reshape(len(received.tokens), -1).sum(1, keepdim=True)
                return ep.combine(handle, received.plan, torch.sin(received.tokens * scale) * by)

            results = []
            options = dict(use_reentrant=False, context_fn=context)
            for apply in layer, functools.partial(checkpoint, layer, **options):
                x, idx, weights = micro_batch(seed, group)
                scale.grad = None
                out = apply(x, idx, weights)
                out.sum().backward()
                results.append((out.detach(), x.grad, weights.grad, scale.grad))
            assert all(torch.equal(got, expected) for got, expected in zip(*results))

    run_threads(SIZE, body)
    counts = collections.Counter(calls)
    # Two runs on each rank: as many forward calls as backward ones, without those that run again.
    counts.subtract(SIZE * again)
    assert set(counts.values()) == {2 * SIZE}, counts


@both_layouts
def test_selective_checkpoint_where_the_experts_alone_have_gradients(alone, layout, calls):
    """Operations without gradient are kept, too."""
    handle, (x, idx, _) = ep.Handle(alone(), layout=layout), ones()
    scale = torch.full((16,), 3.0, device=x.device, requires_grad=True)

    def layer(x):
        received = ep.dispatch(handle, x, idx)
        still = ep.combine(handle, received.plan, received.tokens)
        return still + ep.combine(handle, received.plan, torch.sin(received.tokens * scale))

    checkpoint(layer, x, use_reentrant=False, context_fn=KEEP).sum().backward()
    counts = {"prepare": 1, "dispatch": 1, "combine": 2}
    assert {name: calls.count(name) for name in counts} == counts
    slots = 6 if layout == libep.Layout.EXPERT_MAJOR else 3  # FLAT: one for a token
    expected = slots * torch.cos(torch.tensor(3.0, device=x.device))
    assert torch.allclose(scale.grad, expected.expand(16))


@on_ranks()
def test_backward_twice(group, seed):
    inputs = micro_batch(seed, group)
    out = Layer(group)(*inputs)
    for retain in True, False:
        inputs[0].grad = inputs[2].grad = None
        out.sum().backward(retain_graph=retain)
        check(inputs, out)
    with refused("RuntimeError second time"):
        out.sum().backward()


@on_ranks()
def test_a_plan_may_be_moved_and_used_by_another_handle(group, seed):
    x, idx, _ = micro_batch(seed, group)
    handle, other = ep.Handle(group), ep.Handle(group)
    plan = ep.prepare(handle, idx)
    saved = plan._replace(bytes=plan.bytes.cpu().clone())
    plan.bytes.zero_()
    ep.prepare(handle, idx.flip(0))
    moved = saved._replace(bytes=saved.bytes.to(group.device))
    received = ep.dispatch(other, x, moved)
    assert received.plan is moved
    ep.combine(other, moved, received.tokens).sum().backward()
    assert_equal(x.grad, torch.full_like(x, TOP_K))


@on_ranks()
def test_one_plan_for_two_dispatches(group, seed):
    """As where tokens travel once more with other data, without routing work."""
    handle, (x, idx, _) = ep.Handle(group), micro_batch(seed, group)
    first = ep.dispatch(handle, x, idx)
    second = ep.dispatch(handle, 2 * x, first.plan)
    assert_equal(second.tokens, 2 * first.tokens.detach())
    ep.combine(handle, first.plan, first.tokens + second.tokens).sum().backward()
    assert_equal(x.grad, torch.full_like(x, 3 * TOP_K))


def test_a_group_that_disagrees_is_told(seed):
    """Rank 0 dispatches where rank 1 combines: an error on both, no wrong data."""

    def body(bootstrap):
        with pytest.raises(libep.EpError) as caught, make_group(bootstrap) as group:
            handle, (x, idx, weights) = ep.Handle(group), micro_batch(seed, group)
            with torch.no_grad():
                received = ep.dispatch(handle, x, idx, weights)
                if bootstrap.rank == 0:
                    ep.dispatch(handle, x, received.plan, weights)
                else:
                    ep.combine(handle, received.plan, received.tokens)
                if group.device.type == "cuda":
                    torch.cuda.synchronize()
                    raise libep.EpError(group.status().status, group.status().sentence)
        assert caught.value.status in (libep.Status.ORDER, libep.Status.PEER)
        return caught.value.status

    assert libep.Status.ORDER in run_threads(SIZE, body)
