# SPDX-License-Identifier: Apache-2.0
"""A Mixture-of-Experts layer with libep.torch, and a small model that trains with it.

    python moe_torch.py [RANKS]

The ranks are processes. Tokens and experts are split over them; routers and shared experts are
replicated. The model learns to reproduce a function of its input.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import libep.torch

ALIGNMENT = 8  # rows of bfloat16 that start on 16 bytes along the rows of an expert


class MoE(nn.Module):
    """A layer: softmax router, routed experts, and one shared expert that sees every token.

    group       libep.torch.Group; this rank has group.num_local_experts of the experts. Made with
                alignment=ALIGNMENT, as grouped_mm on GPUs needs it for the weights' gradients
    hidden      elements of a token
    inner       elements between the two matrices of an expert
    top_k       experts per token
    is_early    weights multiply the experts' activations, so that rows are weighted before the last
                matrix; else combine multiplies the experts' outputs
    """

    def __init__(self, group, hidden, inner, top_k, is_early=False, dtype=torch.float32):
        super().__init__()
        make = {"dtype": dtype, "device": group.device}
        local = group.num_local_experts
        self.handle = libep.torch.Handle(group, top_k=top_k)
        self.top_k, self.is_early = top_k, is_early
        self.router = nn.Linear(hidden, group.fields["num_experts"], bias=False, **make)
        self.up = nn.Parameter(torch.randn(local, hidden, inner, **make) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(local, inner, hidden, **make) * inner**-0.5)
        self.shared_up = nn.Linear(hidden, inner, bias=False, **make)
        self.shared_down = nn.Linear(inner, hidden, bias=False, **make)

    def route(self, x):
        """The experts of each token, [T, K], and their weights, [T, K] float32."""
        scores = F.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, idx = torch.topk(scores, self.top_k, dim=-1)
        return idx, weights / weights.sum(-1, keepdim=True)

    def forward(self, x):
        """[T, hidden] -> [T, hidden]."""
        idx, weights = self.route(x)
        received = libep.torch.dispatch(self.handle, x, idx, weights)
        plan, row_weights = received.plan, received.topk_weights
        rows = F.gelu(grouped_mm(received.tokens, self.up, plan))
        if self.is_early:
            rows = (rows * row_weights[:, None]).to(x.dtype)
        rows = grouped_mm(rows, self.down, plan)
        shared = self.shared_down(F.gelu(self.shared_up(x)))
        row_weights = None if self.is_early else row_weights
        return libep.torch.combine(self.handle, plan, rows, row_weights, bias=shared)


def grouped_mm(rows, weight, plan):
    """Multiply the rows of each local expert by its matrix. Rows past the last expert's are lost.

    rows [rows, in], weight [L, in, out] -> [rows, out]
    """
    # PyTorch has kernels for bfloat16 on GPUs, and a loop of its own on CPUs.
    if hasattr(F, "grouped_mm") and (rows.dtype == torch.bfloat16 or rows.device.type == "cpu"):
        return F.grouped_mm(rows, weight, offs=plan.expert_ends)
    counts = plan.expert_padded.tolist()
    parts = torch.split(rows, [*counts, len(rows) - sum(counts)])
    tail = rows.new_zeros(len(parts[-1]), weight.shape[-1])
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight)] + [tail])


# ---- a model -------------------------------------------------------------------------------------

LAYERS, EXPERTS, TOP_K, TOKENS, HIDDEN, INNER = 2, 8, 2, 64, 32, 64
STEPS, RATE = 60, 0.1


def is_local(name):
    """Whether a parameter belongs to this rank's experts, and is not replicated."""
    return name.rsplit(".", 1)[-1] in ("up", "down")


def average_gradients(model):
    """Sum over the ranks' tokens what is replicated. Experts have seen all tokens already."""
    for name, parameter in model.named_parameters():
        if not is_local(name):
            dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(rank, ranks, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    with libep.torch.create_group(
        num_experts=EXPERTS,
        max_tokens=TOKENS,
        hidden=HIDDEN,
        top_k=TOP_K,
        dtype=torch.float32,
        alignment=ALIGNMENT,
    ) as group:
        torch.manual_seed(rank)
        model = nn.ModuleList(MoE(group, HIDDEN, INNER, TOP_K) for _ in range(LAYERS))
        model.to(group.device)
        for name, parameter in model.named_parameters():
            if not is_local(name):
                dist.broadcast(parameter.data, 0)
        x = torch.randn(TOKENS, HIDDEN, device=group.device)
        for step in range(STEPS):
            y = x
            for layer in model:
                y = y + layer(y)
            loss = F.mse_loss(y, torch.sin(2 * x))
            model.zero_grad()
            loss.backward()
            average_gradients(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= RATE * parameter.grad
            dist.all_reduce(loss.detach())
            if rank == 0 and (step % 20 == 0 or step == STEPS - 1):
                print(f"step {step:3}: loss {loss.item() / ranks:.4f}", flush=True)
        finding = group.status()
        if finding.status:
            raise RuntimeError(finding.sentence)
    dist.destroy_process_group()


def free_port():
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    torch.multiprocessing.spawn(train, (ranks, free_port()), nprocs=ranks)
