# SPDX-License-Identifier: Apache-2.0
"""A step of all ranks by brute force, in loops over NumPy arrays. Uses nothing of libep.

Values are small multiples of 1/4, so that every sum is exact in FP32, in any order.
"""

import random

import numpy as np


class World:
    """The inputs of all ranks: routing, weights, tokens and gradients of a random step.

    With `choice` experts have any number of copies, at places that `map` says. Masked ranks have no
    part.
    """

    choice, num_nodes, masked = None, 1, ()

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
        # Exact in FP16, where their sum is not: it tells whether sums are rounded once.
        self.biases = [
            [(numbers.integers(-most, most, (t, hidden)) * unit).astype(np.float32)
             for t in self.tokens] for most, unit in ((1024, 2.0**-10), (8, 64))
        ]  # fmt: skip

        self.map = np.arange(experts)

    def place(self, seed, choice):
        """Give the experts copies at random places, equally many on each rank."""
        places = -(-(self.experts + 4) // self.size) * self.size
        self.choice = choice
        self.map = np.random.default_rng(seed).integers(-1, self.experts, places, np.int32)

    @staticmethod
    def _quarters(numbers, shape):
        return (numbers.integers(-16, 17, shape) / 4).astype(np.float32)

    def experts_of(self, rank):
        """The places of a rank: equally many, and one more for the first ranks."""
        each, more = divmod(len(self.map), self.size)
        first = rank * each + min(rank, more)
        return range(first, first + each + (rank < more))

    def factor(self, place):
        """The expert of a place multiplies its rows by this."""
        return np.float32(self.map[place] % 5 + 1)

    def places(self, rank, token):
        """The place of each entry of a token, or -1."""
        return [self._choose(rank, token, expert) for expert in self.idx[rank][token]]

    def _choose(self, rank, token, expert):
        if expert < 0 or rank in self.masked:
            return -1
        if not self.choice and not self.masked:
            return int(expert)
        living = [r for r in range(self.size) if r not in self.masked]
        copies = [p for r in living for p in self.experts_of(r) if self.map[p] == expert]
        if self.choice == "near":
            on_node = [r for r in living if self._node(r) == self._node(rank)]
            for ranks in ([rank], on_node):
                near = [p for p in copies if any(p in self.experts_of(r) for r in ranks)]
                if near:
                    copies = near
                    break
        return copies[(rank + token) % len(copies)] if copies else -1

    def _node(self, rank):
        return rank * self.num_nodes // self.size

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
        """(token, k, place) of a rank's routing, without entries that name no expert."""
        for t in range(self.tokens[rank]):
            for k, place in enumerate(self.places(rank, t)):
                if place >= 0:
                    yield t, k, place


def pad(case, world, array, value):
    """A rank's array with rows of a value that nobody may read behind its tokens, if it is padded."""
    if not case.is_padded:
        return array
    full = np.full((world.max_tokens, *array.shape[1:]), value, array.dtype)
    full[: len(array)] = array
    return full


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
        if any(e in mine for e in world.places(s, t))
    ]


class Received:
    """What dispatch delivers to a rank, in any layout.

    tokens, weights, idx  as dispatch writes them; idx: FLAT and RANK_MAJOR alone
    scale                 shaped like weights: what the experts multiply by. NaN: nobody may read it
    is_written            the rows that dispatch writes, padding included
    """

    def __init__(self, world, rank, layout, alignment=1, most=0):
        """most: rows of an expert in BATCHED."""
        self.world, self.mine = world, world.experts_of(rank)
        places = {"flat": self._flat, "rank_major": self._rank_major}
        self.is_per_token = layout in places
        if self.is_per_token:
            lead, rows = places[layout](rank)
        else:
            lead, rows = self._slots(rank, layout, alignment, most)
        entries = (world.top_k,) if self.is_per_token else ()
        self.tokens = np.zeros((*lead, world.hidden), np.float32)
        self.weights = np.zeros((*lead, *entries), np.float32)
        self.scale = np.full((*lead, *entries), np.nan, np.float32)
        self.idx = np.full((*lead, *entries), -1) if self.is_per_token else None
        self.is_written = np.full(lead, layout in ("expert_major", "flat"))
        for at, source, token, k in rows:
            self._fill(at, source, token, k)

    def _fill(self, at, source, token, k):
        self.tokens[at], self.is_written[at] = self.world.x[source][token], True
        experts, weights = self.world.places(source, token), self.world.weights[source][token]
        if not self.is_per_token:
            self.weights[at], self.scale[at] = weights[k], self.world.factor(experts[k])
            return
        for k, expert in enumerate(experts):
            is_here = expert in self.mine
            self.scale[at][k] = self.world.factor(expert) if is_here else 0
            if is_here:
                self.weights[at][k], self.idx[at][k] = weights[k], expert - self.mine[0]

    def _slots(self, rank, layout, alignment, most):
        slabs, offsets = expert_major(self.world, rank, alignment)
        if layout == "batched":
            lead, places = (len(slabs), most), [(i, 0) for i in range(len(slabs))]
        else:
            lead, places = offsets[-1:], [(first,) for first in offsets]
        rows = (
            ((*place[:-1], place[-1] + row), *slot)
            for place, slab in zip(places, slabs)
            for row, slot in enumerate(slab)
        )
        return tuple(lead), rows

    def _flat(self, rank):
        rows = flat(self.world, rank)
        return (len(rows),), [((i,), *row, 0) for i, row in enumerate(rows)]

    def _rank_major(self, rank):
        rows, seen = [], [0] * self.world.size
        for source, token in flat(self.world, rank):
            rows.append(((source, seen[source]), source, token, 0))
            seen[source] += 1
        return (self.world.size, self.world.max_tokens), rows


def choose_experts(choice, routing, is_biased):
    """The experts of a token by the numbers of a router, one for each expert, as DeepSeek-V3
    chooses them. Best first."""
    size, best = len(choice) // routing.num_groups, 2 if is_biased else 1
    groups = [range(g * size, (g + 1) * size) for g in range(routing.num_groups)]
    groups.sort(key=lambda g: sum(sorted((choice[e] for e in g), reverse=True)[:best]))
    left = [e for g in groups[-routing.top_groups :] for e in g]
    return sorted(left, key=lambda e: -choice[e])[: routing.top_k]
