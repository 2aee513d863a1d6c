# SPDX-License-Identifier: Apache-2.0
"""The layer of moe_torch.py against a dense layer that has all experts, and the program itself."""

import os
import re
import subprocess
import sys

import moe_torch
import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, assert_close, make_group, run_threads

EXPERTS, TOP_K, TOKENS, HIDDEN, INNER = 6, 3, 37, 48, 56


SHAPES = {
    "router.weight": (EXPERTS, HIDDEN), "up": (EXPERTS, HIDDEN, INNER),
    "down": (EXPERTS, INNER, HIDDEN), "shared_up.weight": (INNER, HIDDEN),
    "shared_down.weight": (HIDDEN, INNER),
}  # fmt: skip


def parameters(seed, dtype):
    """All parameters of a layer, of all ranks."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape):
        values = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
        return values.to(dtype).to(DEVICE).requires_grad_()

    return {name: make(*shape) for name, shape in SHAPES.items()}


def choose(p, x):
    """The experts of each token. Where scores are rounded, other experts may win."""
    return torch.topk(F.linear(x, p["router.weight"]).float(), TOP_K, dim=-1)[1]


def dense(p, x, idx):
    """Every expert computes every token. In float32."""
    scores = F.softmax(x @ p["router.weight"].t(), dim=-1)
    weights = scores.gather(1, idx)
    weights = weights / weights.sum(-1, keepdim=True)
    gates = torch.zeros_like(scores).scatter(1, idx, weights)
    rows = F.gelu(torch.einsum("th,ehi->eti", x, p["up"])) @ p["down"]
    shared = F.gelu(x @ p["shared_up.weight"].t()) @ p["shared_down.weight"].t()
    return torch.einsum("eth,te->th", rows, gates) + shared


def tokens_of(seed, rank, dtype):
    """A rank's tokens and their outputs' gradient, on the CPU: a copy from another rank's GPU
    follows that rank's kernels, which may wait for this one."""
    generator = torch.Generator().manual_seed(seed + 1000 + rank)
    x = torch.randn(TOKENS - rank, HIDDEN, generator=generator)
    return x.to(dtype), torch.cos(torch.arange(x.numel())).view_as(x)


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer(dtype, size, is_early, nodes):
    seed = 5
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    wanted = {
        name: p.detach().float().requires_grad_() for name, p in parameters(seed, dtype).items()
    }
    parts = [tokens_of(seed, rank, dtype) for rank in range(size)]
    x = torch.cat([part[0] for part in parts]).to(DEVICE).float().requires_grad_()
    idx = torch.cat([choose(parameters(seed, dtype), part[0].to(DEVICE)) for part in parts])
    expected = dense(wanted, x, idx)
    expected.backward(torch.cat([part[1] for part in parts]).to(DEVICE))
    expected, x_grad = expected.detach().cpu(), x.grad.cpu()
    grads_wanted = {name: value.grad.cpu() for name, value in wanted.items()}
    first = [sum(len(part[0]) for part in parts[:rank]) for rank in range(size)]

    def body(bootstrap):
        rank = bootstrap.rank
        sizes = dict(num_experts=EXPERTS, max_tokens=TOKENS, hidden=HIDDEN, top_k=TOP_K)
        with make_group(bootstrap, alignment=moe_torch.ALIGNMENT, **sizes) as group:
            layer = moe_torch.MoE(group, HIDDEN, INNER, TOP_K, is_early=is_early, dtype=dtype)
            mine = slice(group.first_expert, group.first_expert + group.num_local_experts)
            with torch.no_grad():
                for name, value in parameters(seed, dtype).items():
                    is_local = moe_torch.is_local(name)
                    layer.get_parameter(name).copy_(value[mine] if is_local else value)
            mine_x, grad = (part.to(group.device) for part in parts[rank])
            mine_x = mine_x.clone().requires_grad_()
            y = layer(mine_x)
            y.backward(grad.to(dtype))
            rows = slice(first[rank], first[rank] + len(mine_x))
            assert_close(y, expected[rows], tolerance)
            assert_close(mine_x.grad, x_grad[rows], 4 * tolerance)
            for name in ("up", "down"):
                got = layer.get_parameter(name).grad
                assert_close(got, grads_wanted[name][mine], 4 * tolerance)
            return {n: p.grad for n, p in layer.named_parameters() if not moe_torch.is_local(n)}

    grads = run_threads(size, body)
    for name in grads[0]:
        total = sum(grad[name].float().cpu() for grad in grads)
        assert_close(total, grads_wanted[name], 4 * tolerance)


@pytest.mark.skipif(DEVICE == "cuda", reason="its ranks take GPUs of their own, or CPUs")
def test_program():
    """Trains on two processes, and learns."""
    options = dict(capture_output=True, text=True, timeout=120)
    environment = dict(os.environ, GLOO_SOCKET_IFNAME="lo")
    program = [sys.executable, moe_torch.__file__, "2"]
    done = subprocess.run(program, env=environment, **options)
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2, done.stdout
