# SPDX-License-Identifier: Apache-2.0
"""torchtitan's MoE, whose dispatcher for DeepEP runs on libep, in a small training.

    torchrun --nproc-per-node 2 moe_torchtitan.py

It needs torchtitan 0.3 beside libep. The ranks have GPUs, or are CPUs over gloo. In a training of
torchtitan's own only install() is new, where the model's MoE communication backend is deepep.
"""

import os

import moe_training
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import libep.deep_ep

libep.deep_ep.install()  # before torchtitan is imported: it looks for deep_ep then

from torchtitan.distributed.deepep import deepep  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.moe import (  # noqa: E402
    GroupedExperts,
    MoE,
    RoutedExperts,
    TokenChoiceTopKRouter,
)
from torchtitan.models.common.token_dispatcher import DeepEPTokenDispatcher  # noqa: E402

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
if not HAS_GPU:  # torchtitan has its operations on GPUs alone
    deepep._lib.impl("dispatch", deepep._dispatch_op_impl, "CPU")
    deepep._lib.impl("combine", deepep._combine_op_impl, "CPU")

EXPERTS_PER_RANK, TOP_K, TOKENS, HIDDEN, INNER = 4, 2, 64, 32, 64


def start():
    """Join the ranks that torchrun has started."""
    if HAS_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if HAS_GPU else "gloo")


def make_layer(hidden, inner, experts, top_k, most_tokens):
    """A MoE with softmax router. All ranks share its experts, and have up to most_tokens tokens."""
    ranks = dist.get_world_size()
    inner_experts = GroupedExperts.Config(
        dim=hidden, hidden_dim=inner, num_experts=experts // ranks
    )
    dispatcher = DeepEPTokenDispatcher.Config(
        num_experts=experts, top_k=top_k, num_max_tokens_per_rank=most_tokens, hidden_dim=hidden
    )
    router = TokenChoiceTopKRouter.Config(
        num_experts=experts,
        gate=Linear.Config(in_features=hidden, out_features=experts),
        top_k=top_k,
        score_func="softmax",
        route_norm=True,
    )
    layer = MoE.Config(
        num_experts=experts,
        routed_experts=RoutedExperts.Config(
            inner_experts=inner_experts, token_dispatcher=dispatcher
        ),
        router=router,
        load_balance_coeff=None,
    ).build()
    mesh = init_device_mesh(DEVICE, (ranks,), mesh_dim_names=("ep",))
    layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return layer.to(DEVICE)


def train(steps=moe_training.STEPS):
    """Learn a function of the tokens. Returns the loss of each step."""
    torch.manual_seed(dist.get_rank())
    layer = make_layer(HIDDEN, INNER, EXPERTS_PER_RANK * dist.get_world_size(), TOP_K, TOKENS)
    x = torch.randn(1, TOKENS, HIDDEN, device=DEVICE)

    def is_local(name, _):
        return name.startswith("routed_experts.")

    return moe_training.train(layer, x, lambda each: each.shape[-1] ** -0.5, is_local, steps)


if __name__ == "__main__":
    start()
    train()
    dist.destroy_process_group()
