# SPDX-License-Identifier: Apache-2.0
"""What GPUs alone have: streams, CUDA graphs, and hooks on other streams."""

import pytest
import torch
from base import refused
from conftest import DEVICE, assert_equal, make_group, quarters, run_threads

import libep
import libep.torch as ep
from libep import Status

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs LIBEP_TEST_DEVICE=cuda")

T, H, EXPERTS, K = 50, 128, 6, 2
FIELDS = dict(num_experts=EXPERTS, max_tokens=T, hidden=H, top_k=K, max_recv_rows=None)


def on_one_and_two_ranks(body, **fields):
    """The test runs on one rank and on two. It gets a handle and its rank's inputs."""

    @pytest.mark.parametrize("size", [1, 2])
    def test(seed, size):
        def play(bootstrap):
            with make_group(bootstrap, **FIELDS, **fields) as group:
                body(ep.Handle(group), *inputs(seed + bootstrap.rank, group.device))
                assert group.status().status == Status.OK

        run_threads(size, play)

    test.__doc__ = body.__doc__
    return test


def inputs(seed, device):
    return quarters(seed, T, H, EXPERTS, K, device)


def layer(handle, x, idx, weights):
    received = ep.dispatch(handle, x, idx, weights)
    return ep.combine(handle, received.plan, 2 * received.tokens, received.topk_weights)


def expected(x, weights):
    return 2 * x * weights.sum(1, keepdim=True)


def wait_long():
    torch.cuda._sleep(50_000_000)


@on_one_and_two_ranks
def test_current_stream(handle, x, idx, weights):
    """Calls follow what was enqueued before them on the current stream, forward and backward."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.full_like(x, float("nan")).requires_grad_()
        wait_long()
        with torch.no_grad():
            late.copy_(x)
        y = layer(handle, late, idx, weights)
        grad = torch.full_like(y, float("nan"))
        wait_long()
        grad.fill_(1)
        y.backward(grad)
        result, grad_x = y.clone(), late.grad.clone()
    torch.cuda.current_stream().wait_stream(stream)
    assert_equal(result, expected(x, weights))
    assert_equal(grad_x, (2 * weights.sum(1, keepdim=True)).expand_as(x))


@on_one_and_two_ranks
def test_graph(handle, x, idx, weights):
    """Forward and backward captured once, replayed with other tokens and other routing."""
    x.requires_grad_()
    grad, rank = torch.ones_like(x), handle.group.rank
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(handle, x, idx, weights).backward(grad)
        x.grad = None
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        y = layer(handle, x, idx, weights)
        (grad_x,) = torch.autograd.grad(y, x, grad)
    for replay in range(3):
        data = inputs(10 * replay + rank, x.device)
        with torch.no_grad():
            for tensor, value in zip((x, idx, weights), data):
                tensor.copy_(value)
        graph.replay()
        assert_equal(y, expected(data[0], data[2]))
        assert_equal(grad_x, (2 * data[2].sum(1, keepdim=True)).expand_as(x))


def test_exact_sizes_cannot_be_captured(alone):
    handle = ep.Handle(alone(**dict(FIELDS, max_recv_rows=0)))
    data = inputs(1, handle.device)
    layer(handle, *data)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with refused("UNSUPPORTED static size"), torch.cuda.graph(graph):
        layer(handle, *data)


def hook_on_another_stream(handle, x, idx, weights):
    """The outputs may be dropped while the other stream still writes them."""
    main, other = torch.cuda.current_stream(), torch.cuda.Stream()
    for _ in range(3):
        received, hook = ep.dispatch_send(handle, x, idx, weights)
        other.wait_stream(main)
        with torch.cuda.stream(other):
            wait_long()
            hook()
            rows = 2 * received.tokens
            out, hook = ep.combine_send(handle, received.plan, rows, received.topk_weights)
            hook()
        del received
        for _ in range(4):  # memory that the allocator gives out too early would be hit
            torch.full((handle.capacity, H), 99.0, device=x.device)
        main.wait_stream(other)
        assert_equal(out, expected(x, weights))


test_hook_on_another_stream = on_one_and_two_ranks(hook_on_another_stream, mode=libep.Mode.LATENCY)
