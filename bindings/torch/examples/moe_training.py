# SPDX-License-Identifier: Apache-2.0
"""The training of moe_megatron.py and moe_torchtitan.py: a layer learns a function of its tokens."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

STEPS, RATE = 60, 0.5


def train(layer, x, spread, is_local, steps=STEPS):
    """Learn a function of the tokens x. Returns the loss of each step.

    layer     takes x; returns as many tokens, alone or first in a tuple
    spread    the standard deviation from which a parameter starts
    is_local  whether a parameter, by its name and itself, belongs to this rank's experts alone
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parameters = [(each, is_local(name, each)) for name, each in layer.named_parameters()]
    for parameter, alone in parameters:
        torch.nn.init.normal_(parameter, std=spread(parameter))
        if not alone:
            dist.broadcast(parameter.data, 0)
    losses = []
    for step in range(steps):
        y = layer(x)
        loss = F.mse_loss(x + (y[0] if isinstance(y, tuple) else y), torch.sin(2 * x))
        layer.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter, alone in parameters:
                if not alone:
                    dist.all_reduce(parameter.grad)
                parameter -= RATE * parameter.grad / ranks
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
        if rank == 0 and (step % 20 == 0 or step == steps - 1):
            print(f"step {step:3}: loss {losses[-1]:.4f}", flush=True)
    return losses
