# SPDX-License-Identifier: Apache-2.0
"""What the tests share: the device, ranks as threads, seeds, and a group of one rank."""

from __future__ import annotations

import os
import sys

import pytest
import torch

import libep
import libep.torch as ep

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLES = os.path.join(HERE, "../../../bindings/torch/examples")
sys.path[:0] = [HERE, os.path.join(HERE, "../common"), EXAMPLES]

import base  # noqa: E402
from base import DEVICE, NODES, SECONDS, make_nodes  # noqa: E402

DEEP_EP = os.environ.pop("LIBEP_TEST_DEEP_EP", None)  # a folder with DeepEP's sources
BACKEND = libep.Backend.CUDA if DEVICE == "cuda" else libep.Backend.HOST

seed, nodes = base.seed, make_nodes(*NODES)
torch.set_num_threads(1)


def make_group(meeting, **fields):
    """libep.torch.create_group with small sizes."""
    given = dict(
        num_experts=6,
        max_tokens=8,
        hidden=16,
        top_k=2,
        dtype=torch.float32,
        backend=BACKEND,
        timeout_seconds=SECONDS,
    )
    return ep.create_group(meeting, **{**given, **fields})


def use_gpu(ordinal):
    """Make a GPU current, with memory and cuBLAS. In one process their first use may wait for all
    GPUs, also for one whose kernel waits for this rank."""
    torch.cuda.set_device(ordinal)
    square = torch.ones(64, 64, device="cuda")
    torch.mm(square, square)
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()


def run_threads(size, body, *arguments):
    """base.run_threads. Rank r has GPU r."""

    def play(bootstrap):
        if DEVICE == "cuda":
            use_gpu(bootstrap.rank)
        return body(bootstrap, *arguments)

    if DEVICE == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    return base.run_threads(size, play)


@pytest.fixture
def alone():
    """A function that makes groups of one rank, with static sizes unless told otherwise."""
    made = []

    def make(**fields):
        (bootstrap,) = libep.Bootstrap.local(1)
        group = make_group(bootstrap, **{"max_recv_rows": None, **fields})
        made.append((group, bootstrap))
        return group

    yield make
    for group, bootstrap in made:
        group.abort("the test is over")
        group.leave()
        bootstrap.close()


def quarters(seed, tokens, hidden, experts, top_k, device):
    """Tokens, routing without repeats, and weights: multiples of 1/4, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-16, 17, (tokens, hidden), generator=generator) / 4
    idx = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].contiguous()
    weights = torch.randint(1, 9, (tokens, top_k), generator=generator) / 4
    return x.to(device), idx.to(device), weights.to(device)


def other_device():
    """One on which no group of the tests is, and whose tensors have no elements on CPUs."""
    return "cpu" if DEVICE == "cuda" else "meta"


def off(tensor):
    """A copy that starts one element behind a multiple of 16 bytes."""
    return torch.cat([tensor.new_empty(1), tensor.flatten()])[1:].view(tensor.shape)


def refuse_each(call, good, changes, error=libep.EpError):
    """Each of the changes to the arguments of a call is refused, with a sentence that names one."""
    for change in changes:
        *_, name = change
        with pytest.raises(error, match=f"{name}: expected .*, got "):
            call(**{**good, **change})


def on_device(array, **options):
    """A tensor on the device of a NumPy array."""
    return torch.from_numpy(array).to(DEVICE).requires_grad_(options.get("grad", False))


def assert_equal(got, expected):
    """Compare a tensor with a NumPy array or a tensor, bit for bit except the sign of zero."""
    expected = torch.as_tensor(expected)
    assert got.shape == expected.shape
    assert torch.equal(got.detach().cpu().to(expected.dtype), expected.cpu())


def assert_close(got, expected, tolerance):
    """Compare tensors, relative to the largest element of `expected`."""
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    assert got.shape == expected.shape
    if expected.numel():
        worst = (got - expected).abs().max().item()
        limit = tolerance * expected.abs().max().item()
        assert worst <= limit, f"differ by {worst}, expected at most {limit}"
