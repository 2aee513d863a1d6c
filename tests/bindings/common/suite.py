# SPDX-License-Identifier: Apache-2.0
"""Steps of all faces against the brute-force reference. test_suite.py of a face runs these tests.

The module `face` is that of the folder: it says what the face can do, and `step` makes a step.
"""

from typing import NamedTuple

import face
import numpy as np
import pytest
from base import NODES
from reference import Received, World, expert_major


class Case(NamedTuple):
    """How a step is made. Its results do not depend on it."""

    layout: str = "expert_major"
    alignment: int = 1
    capacity: int = 200  # 0: exact sizes
    weights: str = "combine"  # who applies them: combine, experts, home (the token's rank), none
    dtype: str = "float32"
    biases: int = 0  # that combine adds
    is_split: bool = False  # latency mode in send and receive phases
    is_counted: bool = False  # by counters, to which all steps add
    steps: int = 1  # each with the plan and the outputs of its own
    checkpoint: bool = False  # the layer's forward is computed again for its backward
    is_padded: bool = False  # max_tokens rows, of which num_tokens says how many are tokens
    plans: str = "own"  # own, shared: another handle's; named: of the caller's, and moved
    choice: str = ""  # of a copy, near or spread: experts have copies, placed anew by each step
    masks: int = 0  # 1: the ranks are masked, as the world says


STEPS = [
    Case(alignment=alignment, capacity=capacity, weights=weights, steps=2 if capacity else 1)
    for alignment in (1, 4)
    for capacity in (0, 200)
    for weights in ("combine", "experts")
]
STEPS += [Case(weights="none", biases=2), Case(layout="flat", capacity=0, biases=1)]
STEPS += [Case(layout="flat", weights="experts"), Case(is_counted=True, steps=2)]
STEPS += [Case(is_padded=True), Case(is_padded=True, is_counted=True)]
STEPS += [Case(choice="spread", steps=2), Case(choice="near", layout="flat", steps=2)]
STEPS += [Case(choice="near", masks=1, steps=2), Case(masks=1), Case(masks=1, layout="flat")]
STEPS += [Case(alignment=4, capacity=0, plans=plans, steps=2) for plans in ("shared", "named")]
LATENCY = [
    Case(layout="batched", capacity=0, weights=weights, is_split=is_split, steps=2, biases=biases)
    for weights, biases in (("combine", 2), ("home", 0))
    for is_split in (False, True)
]
LATENCY += [
    Case(layout="rank_major", capacity=0, is_split=split, biases=1, is_counted=True, steps=2)
    for split in (False, True)
]
LATENCY += [Case(layout="batched", capacity=0, is_split=True, plans="named", steps=2)]
LATENCY += [Case(layout="batched", capacity=0, is_padded=True)]
LATENCY += [Case(layout="batched", capacity=0, choice="spread", masks=1, steps=2)]


def name_of(case):
    default = Case()
    return "-".join(f"{k}={v}" for k, v in case._asdict().items() if v != getattr(default, k))


def cases(rows):
    """The rows that the face has."""
    has = [row for row in rows if row.layout in face.LAYOUTS and row.dtype in face.DTYPES]
    has = [row for row in has if row.plans == "own" or face.HAS_PLANS]
    has = [row for row in has if not (row.is_padded and face.PADS_ALWAYS)]
    return pytest.mark.parametrize(
        "case", [r for r in has if r.capacity or face.HAS_EXACT_SIZES], ids=name_of
    )


def make_world(seed, size, case=Case(), **fields):
    """A World whose experts the face can place, with copies and masks if the case has them."""
    experts = fields.pop("experts", 7)
    if not face.HAS_UNEVEN_EXPERTS:
        experts = -(-experts // size) * size
    world = World(seed, size=size, experts=experts, **fields)
    if case.choice:
        world.place(seed, case.choice)
    if case.masks and size > 1:
        world.masked = (seed % size,)
    return world


def check(world, case, nodes=""):
    world.num_nodes = min(world.size, int(NODES.get(nodes) or 1))
    most = getattr(face, "BATCHED_ROWS", 0)
    expected = [
        Received(world, rank, case.layout, case.alignment, most) for rank in range(world.size)
    ]
    for rank, got in enumerate(face.step(world, case, expected)):
        if got is None:
            assert rank in world.masked
            continue
        check_received(got, expected[rank], case)
        check_numbers(world, rank, got, case)
        check_results(world, rank, got, case)
        if case.is_counted:
            check_counters(world, rank, case, *got["counters"])


def check_counters(world, rank, case, expert_tokens, peer_rows, peer_bytes, waits, longest):
    """Tokens that go there, and sums that come back for them; and the other way in backward, where
    the face counts that. Waits only grow."""

    def count(source, peer):
        return len({t for t, _, e in world.entries(source) if e in world.experts_of(peer)})

    slabs, _ = expert_major(world, rank, 1)
    assert list(expert_tokens) == [case.steps * len(slab) for slab in slabs]
    there = [count(rank, peer) for peer in range(world.size)]
    back = [count(peer, rank) for peer in range(world.size)]
    row, runs = 4 * world.hidden, case.steps * (2 if face.COUNTS_BACKWARD else 1)
    weights = [4 * world.top_k * (a + b * face.COUNTS_BACKWARD) for a, b in zip(there, back)]
    assert list(peer_rows) == [runs * (a + b) for a, b in zip(there, back)]
    expected = [runs * row * (a + b) + case.steps * w for a, b, w in zip(there, back, weights)]
    assert list(peer_bytes) == expected
    assert waits[rank] == 0 and all(w >= l >= 0 for w, l in zip(waits, longest))


def rounding(dtype):
    """The type to which sums are rounded. Those of bfloat16 are exact: it has no biases."""
    return np.float16 if dtype == "float16" else np.float32


def check_received(got, expected, case):
    where = expected.is_written
    rows = slice(len(where)) if where.ndim == 1 else slice(None)  # with static sizes there are more
    if where.ndim == 1 and not case.capacity:
        assert len(got["recv"]) == len(where)
    np.testing.assert_array_equal(got["recv"][rows][where], expected.tokens[where])
    if case.weights in ("combine", "experts"):
        np.testing.assert_array_equal(got["recv_w"][rows][where], expected.weights[where])
    else:
        assert got["recv_w"] is None
    if expected.idx is not None:
        named = ... if face.HAS_IDS_OF_TAILS else where
        np.testing.assert_array_equal(got["recv_idx"][rows][named], expected.idx[named])


def check_numbers(world, rank, got, case):
    """What prepare says of the plan. Faces may leave numbers out."""
    slabs, offsets = expert_major(world, rank, case.alignment)
    counts = [len(slab) for slab in slabs]
    everyone = range(world.size)
    sources = [[sum(s == source for s, *_ in slab) for source in everyone] for slab in slabs]
    wanted = dict(expert_counts=counts)
    if case.layout == "expert_major":
        wanted.update(
            expert_padded=list(np.diff(offsets)),
            expert_offsets=offsets,
            totals=[offsets[-1], offsets[-1], 0],
            source_counts=sources,
            source_rows=list(np.sum(sources, 0)) if sources else [0] * world.size,
            recv_rows=[offsets[-1]],
        )
        if offsets[-1]:
            wanted["expert_ends"] = offsets[1:]
    elif case.layout == "rank_major":
        found = Received(world, rank, case.layout)
        wanted["source_rows"] = list(found.is_written.sum(1))
    for name, numbers in wanted.items():
        if name in got:
            numbers = np.array(numbers).reshape(got[name].shape)
            np.testing.assert_array_equal(got[name], numbers, name)


def check_results(world, rank, got, case):
    if case.is_padded:  # there results are zero
        for name in {"out", "grad_x", "grad_w"} & {*got}:
            if got[name] is not None:
                got[name], rest = np.split(got[name], [world.tokens[rank]])
                assert not rest.any(), name
    out = world.forward(rank)
    grad_x, grad_w = world.backward(rank)
    if case.weights == "none":
        count = (world.idx[rank] >= 0).sum(1, keepdims=True)
        out, grad_x, grad_w = count * world.x[rank], count * world.grad_out[rank], None
    assert got.get("dtypes", {case.dtype}) == {case.dtype}  # of results and gradients
    for i, bias in enumerate(world.biases[: case.biases]):
        out = out + bias[rank]
        if f"grad_bias{i}" in got:
            np.testing.assert_array_equal(got[f"grad_bias{i}"], world.grad_out[rank])
    np.testing.assert_array_equal(got["out"], out.astype(rounding(case.dtype)))
    if got["grad_x"] is not None:
        np.testing.assert_array_equal(got["grad_x"], grad_x)
        if grad_w is not None:
            np.testing.assert_array_equal(got["grad_w"], grad_w)


@cases(STEPS)
@pytest.mark.parametrize("size", [size for size in face.SIZES if size in (1, 3, 4)])
def test_step(seed, size, case, nodes):
    check(make_world(seed, size, case), case, nodes)


if "batched" in face.LAYOUTS:

    @cases(LATENCY)
    @pytest.mark.parametrize("size", [size for size in face.SIZES if size in (1, 3, 4)])
    def test_latency(seed, size, case, nodes):
        check(make_world(seed, size, case), case, nodes)


@pytest.mark.parametrize("size", [1, 2])
def test_large_step(seed, size):
    sizes = dict(experts=13, top_k=5, max_tokens=150, hidden=1028)
    check(make_world(seed, size, **sizes), Case(alignment=8, capacity=2 * 150 * 5 + 13 * 8))


SIZE = 0 if face.HAS_EXACT_SIZES else 600  # the capacity of any routing


@pytest.mark.parametrize("tokens", [[0, 4, 1], [3, 0, 0], [0, 0, 0]])
@pytest.mark.parametrize("experts", [1, 2, 7])
@pytest.mark.parametrize("checkpoint", [False, True][: 1 + face.HAS_CHECKPOINTS])
def test_ranks_without_tokens_or_experts(seed, tokens, experts, checkpoint):
    world = make_world(seed, 3, experts=experts, tokens=tokens)
    check(world, Case(capacity=SIZE, checkpoint=checkpoint))


@pytest.mark.parametrize("experts", [3, 6])
@pytest.mark.parametrize("top_k", [1, 3, 5, 7, 31, 32])
def test_all_entries_on_one_rank(seed, top_k, experts):
    """The others receive nothing. Entries name the rank's experts again and again."""
    world = make_world(seed, 3, experts=experts, top_k=top_k)
    for idx in world.idx:
        idx[idx >= 0] %= experts // 3
    check(world, Case(capacity=SIZE))


@pytest.mark.parametrize("strange", [np.nan, np.inf])
def test_strange_rows(seed, strange):
    """As padding may be that a router has read: it stays in its token."""
    world = make_world(seed, 3, top_k=8, tokens=[4, 6, 0])
    for rank in range(2):
        world.x[rank][1], world.idx[rank][1] = strange, 0
        world.grad_out[rank][1], world.weights[rank] = 1, np.abs(world.weights[rank]) + 1
    check(world, Case(capacity=SIZE))


@cases([Case(dtype="bfloat16", weights="none"), Case(dtype="float16", weights="none", biases=2)])
def test_half_precision(seed, case, nodes):
    """Values are small multiples of 1/4: the sums of two such rows are exact in these types."""
    check(make_world(seed, 2), case)
