# SPDX-License-Identifier: Apache-2.0
"""A small Mixture-of-Experts model that trains: torchrun --nproc-per-node 2 moe_torch.py"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import libep.torch
from libep.torch import MoE

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K, LAYERS, STEPS = 64, 32, 64, 8, 2, 2, 60
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
sizes = dict(num_experts=EXPERTS, max_tokens=TOKENS, hidden=HIDDEN, top_k=TOP_K)
with libep.torch.create_group(**sizes, dtype=torch.float32) as group:
    torch.manual_seed(dist.get_rank())
    model = nn.ModuleList(MoE(group, HIDDEN, INNER, shared=INNER) for _ in range(LAYERS))
    replicated = [p for name, p in model.named_parameters() if name.split(".")[1] not in MoE.LOCAL]
    for parameter in replicated:
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(TOKENS, HIDDEN, device=group.device)
    for step in range(STEPS):
        y = x
        for layer in model:
            y = y + layer(y)
        loss = F.mse_loss(y, torch.sin(2 * x)) / group.size  # the experts see all ranks' tokens
        optimizer.zero_grad()
        loss.backward()
        for parameter in replicated:
            dist.all_reduce(parameter.grad)
        optimizer.step()
        dist.all_reduce(loss)
        if group.rank == 0 and step % 20 in (0, 19):
            print(f"step {step:3}: loss {loss.item():.4f}")
dist.destroy_process_group()
