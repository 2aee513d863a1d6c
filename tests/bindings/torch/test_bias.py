# SPDX-License-Identifier: Apache-2.0
"""Biases of combine that the common suite has not: what is refused, and one of two."""

import pytest
import torch
from base import refused
from conftest import assert_equal, off, other_device

import libep
import libep.torch as ep

T, H = 3, 16


@pytest.mark.parametrize("mode", ["throughput", "latency"])
def test_refused(alone, mode):
    handle = ep.Handle(alone(mode=mode))
    x = torch.ones(T, H, device=handle.device)
    idx = torch.tensor([[0, 1]] * T, device=x.device)
    received = ep.dispatch(handle, x, idx)
    rows, plan = received.tokens, received.plan
    for text, bias in [
        ("SHAPE bias0", x[:2]),
        ("EpError bias1", (x, x[:, :8])),
        ("NDIM bias0", x[0]),
        ("TYPE bias0", x.half()),
        ("TypeError bias1.*float64", (None, x.double())),
        ("TypeError bias0: expected a tensor on", x.to(other_device())),
        ("TypeError bias: expected .*, got builtins.int", 3),
        ("TypeError bias: expected .* up to two of them, got 3", (x, x, x)),
        ("TypeError bias: .*resolve_neg", torch._neg_view(x)),
        ("TypeError bias: expected a dense tensor", x.to_sparse()),
    ]:
        with refused(text):
            ep.combine(handle, plan, rows, bias=bias)
    if mode == "latency":
        with refused("UNSUPPORTED combine: .*without gradient"):
            ep.combine(handle, plan, rows, bias=x.clone().requires_grad_())
    # One that begins anywhere or has strides is copied.
    for bias in (off(x), (None, x), (x.t().contiguous().t(), None)):
        assert_equal(ep.combine(handle, plan, rows, bias=bias), 3 * x)
    assert_equal(ep.combine(handle, plan, rows, bias=()), 2 * x)
    assert handle.group.status().status == libep.Status.OK


def test_gradient_of_a_bias_alone(alone):
    handle = ep.Handle(alone())
    x = torch.ones(T, H, device=handle.device)
    received = ep.dispatch(handle, x, torch.tensor([[0, 1]] * T, device=x.device))
    bias, grad = torch.zeros_like(x, requires_grad=True), torch.arange(T * H, device=x.device)
    out = ep.combine(handle, received.plan, received.tokens, bias=(x, bias))
    out.backward(grad.view(T, H).float())
    assert_equal(out, 3 * x)
    assert_equal(bias.grad, grad.view(T, H).float())
