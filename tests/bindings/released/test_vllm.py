# SPDX-License-Identifier: Apache-2.0
"""vLLM's classes over libep: its own for DeepEP, and those that libep's plugin adds.

Experts multiply rows by a factor, and all numbers are small multiples of powers of two. So a layer
equals a dense one bit for bit, quantised or not.
"""

import pytest
from wheels import RELEASES

PROGRAMS = {"vllm": "vllm_layers.py"}
DEEP_EP = ("deepep_high_throughput", "deepep_low_latency", "deepep_v2")
OURS = ("libep", "libep_batched")
LARGE = 300  # tokens of a rank, more than a step of latency mode has

# Tokens of each rank, of three; with two ranks the first two. The last is a later step.
FEW, NONE, MANY = ([5, 3, 8], [2, 7, 1]), ([0, 6, 0], [0, 0, 0]), ([LARGE, 4, 17],)
SIZES = dict(experts=6, top_k=3, hidden=2048, most=32)
CASES = [
    *((backend, quant, FEW, {}) for backend in DEEP_EP + OURS for quant in (None, "fp8")),
    *((backend, None, NONE, {}) for backend in DEEP_EP + OURS),
    ("deepep_v2", "fp8", FEW, dict(is_eager=True)),
    ("deepep_v2", "mxfp8", FEW, {}),
    ("deepep_high_throughput", "fp8", MANY, dict(most=512)),
    ("libep", "mxfp8", FEW, {}),
    ("libep", "fp8", MANY, dict(most=512)),
    ("libep", None, MANY, dict(most=512, is_capturing=True)),
    ("libep", None, ([LARGE] * 3,), dict(most=512, top_k=2, moves=True)),
    ("libep", None, FEW, dict(hidden=72, experts=12, top_k=1, weighs_input=True)),
    ("libep_batched", None, FEW, dict(hidden=72, experts=12, top_k=1, weighs_input=True)),
]


def name(case):
    backend, quant, tokens, changes = case
    return "-".join([backend, quant or "bf16", str(tokens[0][0]), *changes])


@pytest.mark.parametrize("case", CASES, ids=name)
def test_layer(ranks, case):
    """Steps of different sizes, each at once and in its phases, equal a dense layer."""
    backend, quant, steps, changes = case
    ranks.play("layers", backend=backend, quant=quant, steps=steps, **{**SIZES, **changes})


@pytest.mark.parametrize("backend", DEEP_EP + OURS)
def test_micro_batches(ranks, backend):
    """Two micro-batches in turns, on two threads, as vLLM runs them."""
    ranks.play("micro_batches", backend=backend, steps=FEW, **SIZES)


def test_large_micro_batches(ranks):
    sizes = {**SIZES, "most": 512}
    ranks.play("micro_batches", backend="libep", steps=(MANY[0], NONE[0]), **sizes)


def test_names(ranks):
    """vLLM's configuration takes the names, and says what kinds of experts they are for."""
    pytest.importorskip("pydantic")
    ranks.play("names")


@pytest.mark.parametrize("version", ("0.32.1", "0.34.0"))
def test_other_release(ranks, version):
    (sentence, *_) = ranks.play("in_release", version=version)
    assert version in sentence and RELEASES["vllm"] in sentence


REFUSALS = {
    "too_many": "expected at most max_num_tokens of the layer, 32, got 40 tokens",
    "too_many_in_slabs": "expected at most max_num_tokens of the layer, 32, got 40 tokens",
    "too_many_here": "expected at most 5 rows, by num_tokens_across_dp_cpu, got 9",
    "wrong_type": "tokens: expected",
    "wrong_ids": "topk_idx: expected int32 or int64, got fp32",
    "wrong_weight": "expected one expert per token, got 3",
    "wrong_output": "out: expected",
    "no_gpu": "all2all_backend libep: expected NVIDIA GPUs, got cpu",
    "elastic": "expected a group of fixed size, got an elastic one",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refusals(ranks, what):
    for sentence in ranks.play("refused", what=what, **SIZES):
        assert REFUSALS[what] in sentence
