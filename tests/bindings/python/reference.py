# SPDX-License-Identifier: Apache-2.0
"""A step of all ranks by brute force, in loops over NumPy arrays. Uses nothing of libep.

Values are small multiples of 1/4, so that every sum is exact in FP32, in any order.
"""

from __future__ import annotations

import random

import numpy as np


class World:
    """The inputs of all ranks: routing, weights, tokens and gradients of a random step."""

    def __init__(self, seed, size=3, experts=7, top_k=2, max_tokens=6, hidden=8, tokens=None):
        self.size, self.experts, self.top_k, self.hidden = size, experts, top_k, hidden
        self.max_tokens = max_tokens
        choose = random.Random(seed)
        numbers = np.random.default_rng(seed)
        self.tokens = tokens or [choose.randint(0, max_tokens) for _ in range(size)]
        self.idx = [
            numbers.integers(-1, experts, (t, top_k)).astype(choose.choice([np.int32, np.int64]))
            for t in self.tokens
        ]
        self.weights = [self._quarters(numbers, (t, top_k)) for t in self.tokens]
        self.x = [self._quarters(numbers, (t, hidden)) for t in self.tokens]
        self.grad_out = [self._quarters(numbers, (t, hidden)) for t in self.tokens]

    @staticmethod
    def _quarters(numbers, shape):
        return (numbers.integers(-16, 17, shape) / 4).astype(np.float32)

    def experts_of(self, rank):
        """The experts of a rank: equally many, and one more for the first ranks."""
        each, more = divmod(self.experts, self.size)
        first = rank * each + min(rank, more)
        return range(first, first + each + (rank < more))

    def factor(self, expert):
        """An expert multiplies its rows by this."""
        return np.float32(expert % 5 + 1)

    def forward(self, rank):
        """The output of the layer for the tokens of a rank."""
        out = np.zeros_like(self.x[rank])
        for t, k, expert in self.entries(rank):
            out[t] += self.weights[rank][t, k] * self.factor(expert) * self.x[rank][t]
        return out

    def backward(self, rank):
        """The gradients of the tokens and of the weights of a rank."""
        grad_x, grad_w = np.zeros_like(self.x[rank]), np.zeros_like(self.weights[rank])
        for t, k, expert in self.entries(rank):
            grad_x[t] += self.weights[rank][t, k] * self.factor(expert) * self.grad_out[rank][t]
            grad_w[t, k] = self.factor(expert) * (self.x[rank][t] * self.grad_out[rank][t]).sum()
        return grad_x, grad_w

    def entries(self, rank):
        """(token, k, expert) of a rank's routing, without entries that name no expert."""
        for t in range(self.tokens[rank]):
            for k in range(self.top_k):
                if self.idx[rank][t, k] >= 0:
                    yield t, k, int(self.idx[rank][t, k])


def expert_major(world, rank, alignment):
    """(slabs, offsets): for each local expert the (source, token, k) of its slots, in slot order,
    and the first row of its slab; then the number of rows."""
    slabs, offsets, row = [], [], 0
    for expert in world.experts_of(rank):
        slab = [(s, t, k) for s in range(world.size) for t, k, e in world.entries(s) if e == expert]
        slabs.append(slab)
        offsets.append(row)
        row += -(-len(slab) // alignment) * alignment
    return slabs, offsets + [row]


def flat(world, rank):
    """(source, token) of each row, one for each token that has an expert here."""
    mine = world.experts_of(rank)
    return [
        (s, t)
        for s in range(world.size)
        for t in range(world.tokens[s])
        if any(e in mine for e in world.idx[s][t])
    ]
