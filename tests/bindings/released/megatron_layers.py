# SPDX-License-Identifier: Apache-2.0
"""On every rank: a step of Megatron's MoELayer on libep, and of a dense layer."""

from __future__ import annotations

import functools
import os
import sys

import dense
import torch
from dense import Case, Results
from wheels import unpack

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLES = os.path.join(HERE, "../../../bindings/torch/examples")


@functools.cache
def prepare():
    """Import the release and the example that makes a layer of it."""
    sys.path[:0] = [EXAMPLES, str(unpack("megatron-core"))]
    import moe_megatron

    moe_megatron.divide()
    return moe_megatron


def forward(layer, x):
    """The layer. The release's router cannot do without tokens."""
    if len(x):
        return layer(x)[0]
    probs = x[:, 0] @ layer.router.weight.t()
    rows, probs = layer.dispatch(*layer.preprocess(x, probs, probs > 0))
    rows, _ = layer.routed_experts_compute(rows, probs)
    return layer.postprocess(layer.combine(rows), None)


def step(name, backend, seed):
    """Compare a step with the dense layer."""
    case, rank = Case(name, seed), torch.distributed.get_rank()
    layer = prepare().make_layer(
        dense.HIDDEN, dense.INNER, case.experts, dense.TOP_K, backend=backend
    )
    experts = layer.experts.local_experts
    fc1, fc2 = ([getattr(e, fc).weight for e in experts] for fc in ("linear_fc1", "linear_fc2"))
    with torch.no_grad():
        layer.router.weight.copy_(case.router)
        for i, parts in enumerate(zip(*map(case.part, (case.gate, case.up, case.down)))):
            fc1[i].copy_(torch.cat(parts[:2]))
            fc2[i].copy_(parts[2])
    x = case.x[rank].clone().requires_grad_()
    out = forward(layer, x[:, None])
    out.backward(case.grad[rank][:, None])
    first, second = (torch.stack([w.grad for w in weights]) for weights in (fc1, fc2))
    got = Results(out[:, 0].detach(), x.grad, layer.router.weight.grad, *first.chunk(2, 1), second)
    return got.differ(case.expect())


def train(steps):
    return prepare().train(steps)
