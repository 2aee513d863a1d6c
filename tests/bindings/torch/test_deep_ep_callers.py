# SPDX-License-Identifier: Apache-2.0
"""Programs' calls on deep_ep: each fits our signatures, and runs."""

import contextlib
import re
import sys

import pytest
import torch
from conftest import DEVICE, assert_close, destroyed, run_threads
from deep_ep_callers import CALLERS, IMPORTS
from test_deep_ep_latency import as_rows

import libep.deep_ep
from libep.deep_ep import Buffer, Config, EventHandle, EventOverlap

SIZE, EXPERTS, HIDDEN, MOST = 2, 8, 512, 16
TOKENS = (MOST, 5)


def dequantise(rows, scales):
    """bf16 rows [L, rows, H] of what a low-latency dispatch delivers in fp8."""
    factors = as_rows(scales, HIDDEN).repeat_interleave(128, dim=2)
    return torch.where(factors > 0, rows.float() * factors, 0).bfloat16()


def names(bootstrap, seed):
    """What the tables' expressions are about, on a rank."""
    rank = bootstrap.rank
    generator = torch.Generator().manual_seed(seed + rank)
    x = torch.randn(TOKENS[rank], HIDDEN, generator=generator).bfloat16()
    scores = torch.rand(TOKENS[rank], EXPERTS, generator=generator)
    weights, idx = torch.topk(scores, 3)
    idx[0, 2] = -1
    x, idx, weights = x.to(DEVICE), idx.to(DEVICE), weights.to(DEVICE)
    return dict(
        group=bootstrap, rank=rank, size=SIZE, experts=EXPERTS, hidden=HIDDEN, most=MOST, x=x,
        idx=idx, weights=weights, num_sms=Buffer.num_sms, fp8=x.to(torch.float8_e4m3fn),
        fp8_scales=torch.ones(len(x), HIDDEN // 128, device=DEVICE), output=torch.empty_like(x),
        stats=torch.zeros(EXPERTS // SIZE, dtype=torch.int32, device=DEVICE), Config=Config,
        Buffer=Buffer, EventHandle=EventHandle, EventOverlap=EventOverlap, dequantise=dequantise,
    )  # fmt: skip


IGNORED = "overlap|src_signals|src_signal_expect_value"


@pytest.mark.parametrize("caller", CALLERS, ids=lambda caller: caller.program)
def test_calls(seed, caller, caplog):
    """They fit our signatures: keywords that Buffer does not know are ignored by name alone."""

    def body(bootstrap):
        known = names(bootstrap, seed)
        with contextlib.ExitStack() as stack:

            def make_buffer(*arguments, **keywords):
                return stack.enter_context(destroyed(Buffer(*arguments, **keywords)))

            before, after = caller.calls.split("buffer = Buffer(")
            known["make_buffer"] = make_buffer
            exec(f"{before}buffer = make_buffer({after}", known)
        # The experts leave rows as they are: in low latency each token comes back times its
        # weights, in normal mode times the number of ranks that own experts of it.
        idx = known["idx"]
        if "hint" in known:
            factors = (known["weights"] * (idx >= 0)).sum(1, keepdim=True)
        else:
            ranks = torch.arange(SIZE, device=idx.device)
            owners = idx.div(EXPERTS // SIZE, rounding_mode="floor")
            factors = (owners[..., None] == ranks).any(1).sum(1, keepdim=True)
        assert_close(known["out"], known["x"].float() * factors, 0.07)

    run_threads(SIZE, body)
    for record in caplog.records:
        assert re.search(f": ({IGNORED}) is ignored", record.getMessage()), record


@pytest.mark.parametrize("program", IMPORTS)
def test_imports(program):
    modules = dict(sys.modules)
    libep.deep_ep.install()
    try:
        known: dict[str, object] = {}
        statement, expression = IMPORTS[program]
        exec(statement, known)
        eval(expression, known)
    finally:
        for name in set(sys.modules) - set(modules):
            del sys.modules[name]
