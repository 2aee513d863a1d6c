# SPDX-License-Identifier: Apache-2.0
"""On every rank: a step of torchtitan's MoE on libep, and of a dense layer."""

import dense
import torch
from dense import Case, Results
from stand_ins import stand_in
from wheels import unpack

HOLLOW = "torchtitan torchtitan.models torchtitan.models.common torchtitan.distributed"
stand_in(unpack("torchtitan"), HOLLOW.split(), "spmd_types tyro triton".split())

import moe_torchtitan  # noqa: E402

train = moe_torchtitan.train
MOST = 64  # tokens of a rank, as in the example: the release keeps one buffer


def forward(layer, x, most):
    """The layer, which has equally many tokens on all ranks; or its parts, where they differ."""
    from torchtitan.distributed.deepep import deepep

    if most is None:
        return layer(x[None])[0]
    scores, ids, _ = layer.router(x[None])
    experts = layer.router.num_experts
    rows, counts, state = deepep.dispatch_tokens(
        x, ids[0], scores[0], dense.LOCAL, experts, num_tokens_per_rank=most
    )
    out = deepep.combine_tokens(layer.routed_experts.inner_experts(rows, counts), state)
    deepep.sync_combine()
    return out


def step(name, backend, seed):
    """Compare a step, and the same layer for inference, with the dense layer."""
    case = Case(name, seed)
    layer = moe_torchtitan.make_layer(dense.HIDDEN, dense.INNER, case.experts, dense.TOP_K, MOST)
    experts, router = layer.routed_experts.inner_experts, layer.router.gate.weight
    weights = experts.w1_EFD, experts.w3_EFD, experts.w2_EDF
    with torch.no_grad():
        router.copy_(case.router)
        for weight, whole in zip(weights, case.weights):
            weight.copy_(case.part(whole))
    x, grad = case.mine()
    is_even = len(set(case.tokens)) == 1
    out = forward(layer, x, None if is_even else max(case.tokens))
    out.backward(grad)
    expected = case.expect()
    got = Results(out.detach(), x.grad, router.grad, *(weight.grad for weight in weights))
    found = got.differ(expected)
    if is_even:
        layer.routed_experts.token_dispatcher.cudagraphable = True
        with torch.no_grad():
            found["expanded"] = Results(layer(x[None])[0]).differ(Results(expected.out))["out"]
    return found
