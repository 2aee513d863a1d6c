# SPDX-License-Identifier: Apache-2.0
"""On every rank: a step of Megatron's MoELayer on libep, and of a dense layer."""

import sys

import dense
import torch
from dense import Case, Results
from wheels import unpack

sys.path.append(str(unpack("megatron-core")))

import moe_megatron  # noqa: E402

moe_megatron.divide()
train = moe_megatron.train


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
    case, sizes = Case(name, seed), (dense.HIDDEN, dense.INNER)
    layer = moe_megatron.make_layer(*sizes, case.experts, dense.TOP_K, backend=backend)
    experts = layer.experts.local_experts
    fc1, fc2 = ([getattr(e, fc).weight for e in experts] for fc in ("linear_fc1", "linear_fc2"))
    with torch.no_grad():
        layer.router.weight.copy_(case.router)
        for i, (gate, up, down) in enumerate(zip(*map(case.part, case.weights))):
            fc1[i].copy_(torch.cat([gate, up]))
            fc2[i].copy_(down)
    x, grad = case.mine()
    out = forward(layer, x[:, None])
    out.backward(grad[:, None])
    first, second = (torch.stack([w.grad for w in weights]) for weights in (fc1, fc2))
    got = Results(out[:, 0].detach(), x.grad, layer.router.weight.grad, *first.chunk(2, 1), second)
    return got.differ(case.expect())
