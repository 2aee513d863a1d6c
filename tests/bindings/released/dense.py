# SPDX-License-Identifier: Apache-2.0
"""Layers that have all experts and all ranks' tokens: what those of programs are compared with."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# ---- engines: all sums are exact in bfloat16 ----------------------------------------------------


def inputs(seed, tokens, hidden, experts, top_k):
    """Tokens, expert ids and weights. A fourth of the entries has no expert."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (tokens, hidden), generator=generator).bfloat16()
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].contiguous()
    ids[torch.rand(tokens, top_k, generator=generator) < 0.25] = -1
    weights = torch.randint(1, 3, (tokens, top_k), generator=generator) / 2
    return x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)


def factor(ids, experts=1 << 30):
    """What the experts multiply by; 0 for none."""
    return torch.where((ids >= 0) & (ids < experts), ids % 4 + 1, 0)


def layer(x, ids, weights):
    return x.float() * (factor(ids) * weights).sum(1, keepdim=True)


# ---- trainers -----------------------------------------------------------------------------------

TOP_K, LOCAL, HIDDEN, INNER = 3, 4, 32, 48

# Tokens of each rank, and the rank whose experts all of them choose; None: any.
CASES = {
    "even": ((9, 9, 9), None),
    "to the last rank": ((7, 7, 7), -1),
    "uneven": ((5, 12, 3), None),
    "none on rank 0": ((0, 6, 4), None),
    "none on rank 1, to rank 0": ((8, 0, 1), 0),
}


class Case:
    """Tokens, gradients of outputs, and weights of all ranks, the same on every rank."""

    def __init__(self, name, seed):
        size = dist.get_world_size()
        tokens, target = CASES[name]
        self.tokens = tokens[:size]
        self.experts = LOCAL * size
        generator = torch.Generator().manual_seed(seed)

        def make(*shape):
            made = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
            return made.to(DEVICE)

        self.x, self.grad = ([make(count, HIDDEN) for count in self.tokens] for _ in range(2))
        self.router = make(self.experts, HIDDEN)
        if target is not None:
            for x in self.x:
                x[:, 0] = 1
            self.router[:, 0] = 0
            self.router[range(self.experts)[target % size * LOCAL :][:LOCAL], 0] = 8
        up = self.experts, INNER, HIDDEN
        self.weights = make(*up), make(*up), make(self.experts, HIDDEN, INNER)  # gate, up, down

    def part(self, weight):
        """This rank's experts."""
        return weight[dist.get_rank() * LOCAL :][:LOCAL]

    def mine(self):
        """This rank's tokens, and the gradient of their outputs."""
        return self.x[dist.get_rank()].clone().requires_grad_(), self.grad[dist.get_rank()]

    def expect(self):
        """Outputs and gradients of this rank: out, x, router, gate, up, down."""
        experts = [w.clone().requires_grad_() for w in self.weights]
        for rank, (x, grad) in enumerate(zip(self.x, self.grad)):
            x, router = (t.clone().requires_grad_() for t in (x, self.router))
            out = _forward(x, router, *experts)
            out.backward(grad)
            if rank == dist.get_rank():
                mine = out.detach(), x.grad, router.grad
        return Results(*mine, *(self.part(weight.grad) for weight in experts))


class Results(SimpleNamespace):
    """Tensors of a step."""

    def __init__(self, *tensors):
        super().__init__(**dict(zip(("out", "x", "router", "gate", "up", "down"), tensors)))

    def differ(self, expected):
        """The largest difference of each tensor, over the largest element of the expected one."""
        found = {}
        for name, wanted in vars(expected).items():
            got = getattr(self, name)
            assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
            both = got - wanted, wanted
            worst, largest = (t.abs().amax() if t.numel() else 0 for t in both)
            found[name] = float(worst / largest if largest else worst)
        return found


def _forward(x, router, gate, up, down):
    scores, idx = torch.topk(x @ router.t(), TOP_K)
    scores = torch.softmax(scores, 1)
    rows = F.silu(torch.einsum("th,eih->eti", x, gate)) * torch.einsum("th,eih->eti", x, up)
    rows = torch.einsum("eti,ehi->teh", rows, down)
    return (rows.gather(1, idx[..., None].expand(-1, -1, HIDDEN)) * scores[..., None]).sum(1)
