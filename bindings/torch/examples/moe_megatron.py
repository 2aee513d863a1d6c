# SPDX-License-Identifier: Apache-2.0
"""Megatron's MoELayer, whose flex dispatcher runs on libep, in a small training.

    torchrun --nproc-per-node 2 moe_megatron.py

It needs megatron-core 0.16 beside libep. The ranks have GPUs, or are CPUs over gloo. In a training
script of one's own only install() is new, with --moe-token-dispatcher-type flex and
--moe-flex-dispatcher-backend hybridep, whose rows libep sorts by experts, or deepep.
"""

import os

import moe_training
import torch
import torch.distributed as dist
import torch.nn.functional as F

import libep.deep_ep

libep.deep_ep.install()  # before Megatron is imported: it looks for deep_ep then

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:  # Megatron asks for the current GPU, and compiles small functions for it
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch._dynamo.config.disable = True

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

EXPERTS_PER_RANK, TOP_K, TOKENS, HIDDEN, INNER = 4, 2, 64, 32, 64


def start():
    """Join the ranks that torchrun has started. All of them share the experts."""
    if HAS_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if HAS_GPU else "gloo")
    divide()


def divide():
    """Tell Megatron that each rank has its part of the experts, and all of the rest."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    if HAS_GPU:
        model_parallel_cuda_manual_seed(1)
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 reads it without Transformer Engine, too
        moe_utils.te_general_gemm = None


def make_layer(
    hidden,
    inner,
    experts,
    top_k,
    dtype=torch.float32,
    dispatcher="flex",
    backend="hybridep",
    num_sms=64,
    grouped=False,
):
    """An MoELayer with softmax router and gated experts.

    dispatcher  "flex": libep, as DeepEP's `backend` "hybridep" or "deepep"; "alltoall": Megatron's
    num_sms     multiprocessors of libep's operations (--moe-hybridep-num-sms, --moe-deepep-num-sms)
    grouped     the experts are one grouped GEMM in place of one module each
    """
    config = TransformerConfig(
        num_layers=1,
        num_attention_heads=1,
        hidden_size=hidden,
        ffn_hidden_size=inner,
        moe_ffn_hidden_size=inner,
        num_moe_experts=experts,
        moe_router_topk=top_k,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=dispatcher,
        moe_flex_dispatcher_backend=backend,
        moe_hybridep_num_sms=num_sms,
        moe_deepep_num_sms=num_sms,
        moe_grouped_gemm=grouped,
        moe_use_legacy_grouped_gemm=grouped,
        expert_model_parallel_size=dist.get_world_size(),
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        use_cpu_initialization=not HAS_GPU,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    spec = get_moe_module_spec(
        use_te=False,
        num_experts=experts,
        moe_grouped_gemm=grouped,
        moe_use_legacy_grouped_gemm=grouped,
    )
    layer = MoELayer(config, spec.submodules)
    return layer.cuda() if HAS_GPU else layer


def train(steps=moe_training.STEPS):
    """Learn a function of the tokens. Returns the loss of each step."""
    torch.manual_seed(dist.get_rank())
    layer = make_layer(HIDDEN, INNER, EXPERTS_PER_RANK * dist.get_world_size(), TOP_K)
    x = torch.randn(TOKENS, 1, HIDDEN, device="cuda" if HAS_GPU else "cpu")

    def is_local(_, parameter):
        return not getattr(parameter, "allreduce", True)

    return moe_training.train(layer, x, lambda _: HIDDEN**-0.5, is_local, steps)


if __name__ == "__main__":
    start()
    train()
    dist.destroy_process_group()
