# SPDX-License-Identifier: Apache-2.0
"""libep.deep_ep.utils: what DeepEP's own programs import beside Buffer."""

import gc
import math
import os
import time
import weakref

import pytest
import torch
from conftest import DEVICE, assert_equal

from libep.deep_ep.utils import math as tools
from libep.deep_ep.utils.gate import get_unbalanced_scores
from libep.deep_ep.utils.semantic import value_or, weak_lru
from libep.deep_ep.utils.testing import bench, bench_kineto, suppress_stdout_stderr


@pytest.mark.parametrize("hidden", [128, 200, 512])
def test_quantised_and_back(hidden):
    x = torch.randn(5, hidden, device=DEVICE).bfloat16()
    x[1] = 0
    values, scales = tools.per_token_cast_to_fp8(x)
    assert values.shape == x.shape and scales.shape == (5, tools.align(hidden, 128) // 128)
    assert scales.dtype == torch.float32 and scales[1].max() == torch.tensor(1e-4) / 448
    back = tools.per_token_cast_back(values, scales.t().contiguous().t())
    assert back.dtype == torch.bfloat16 and tools.calc_diff(back, x) < 1e-3
    assert tools.per_token_cast_back(values[:0], scales[:0]).shape == (0, hidden)


@pytest.mark.parametrize("blocks", [4, 8])
def test_packed_scales(blocks):
    """Four exponents in an int32, in column-major order, too."""
    exponents = torch.randint(120, 130, (4, blocks), dtype=torch.uint8, device=DEVICE)
    packed = exponents.view(torch.int32)
    ones = torch.ones(4, 128 * blocks, device=DEVICE).to(torch.float8_e4m3fn)
    factors = torch.ldexp(torch.ones(4, blocks), exponents.cpu().int() - 127)
    for scales in (packed, packed.t().contiguous().t()):
        assert_equal(tools.per_token_cast_back(ones, scales)[:, ::128], factors.bfloat16())


def test_small_functions():
    x = torch.tensor([[2, 0, 2, -1], [1, 1, 1, 1], [-1, -1, -1, -1]], device=DEVICE)
    tools.inplace_unique(x, 3)
    assert x.tolist() == [[2, 0, -1, -1], [1, -1, -1, -1], [-1, -1, -1, -1]]
    x = torch.arange(4.0, device=DEVICE)
    assert tools.calc_diff(x, x) == 0
    assert tools.calc_diff(x, -x) == pytest.approx(1 + 20 / 36)
    assert tools.hash_tensor(torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)) == 3
    one, two = (torch.ones(count, dtype=torch.int32, device=DEVICE) for count in (1, 2))
    assert tools.count_bytes(one, (two, None), [(two,)]) == 20 and tools.count_bytes() == 0
    assert tools.hash_tensors(one, (two, None)) == 1 ^ 2
    assert (tools.safe_div(3, 2), tools.safe_div(0, 0)) == (1.5, 0)
    with pytest.raises(ZeroDivisionError):
        tools.safe_div(1, 0)
    scores, chosen = torch.arange(1.0, 7, device=DEVICE)[None], torch.tensor([[2, 0]]).to(DEVICE)
    assert tools.create_grouped_scores(scores, chosen, 3).tolist() == [[1, 2, 0, 0, 5, 6]]
    assert (value_or(None, 3), value_or(0, 3)) == (3, 0)


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("ratio", [1.0, 1.5, 3.0])
def test_unbalanced_scores(precise, ratio):
    """The first rank gets so many times as many tokens as the others on average."""
    torch.manual_seed(0)
    scores = get_unbalanced_scores(4000, 16, 4, 3, ratio, precise)
    assert scores.shape == (4000, 16) and scores.dtype == torch.float32
    ranks = scores.topk(3, 1).indices // 4
    counts = torch.stack([(ranks == rank).any(1).sum() for rank in range(4)]).float()
    assert (counts[0] / counts[1:].mean()).item() == pytest.approx(ratio, rel=0.1)
    with pytest.raises(ValueError, match="ratio: expected at least 1, got 0.5"):
        get_unbalanced_scores(4, 4, 2, 1, 0.5, precise)


def test_cached_methods():
    """Results are cached for each object while it lives."""

    class Counter:
        calls = 0

        @weak_lru(maxsize=None)
        def add(self, a, b=0):
            self.calls += 1
            return a + b

    one, two = Counter(), Counter()
    assert [one.add(1), one.add(1), one.add(1, b=2), two.add(1)] == [1, 1, 3, 1]
    assert (one.calls, two.calls) == (2, 1)
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None


def test_bench(capfd):
    """Times of a call; of kernels there are none without GPUs. And silence."""
    calls = []
    mean, least, most = bench(lambda: calls.append(time.sleep(1e-3)), 2, 5, lambda: calls.append(0))
    assert len(calls) == 2 + 5 + 5 and 0 < least <= mean <= most
    times = bench_kineto(lambda: None, ("dispatch", "combine"), 2, num_kernels_per_period=2)
    assert [math.isnan(time) for pair in times for time in pair] == 4 * [True]
    assert math.isnan(bench_kineto(lambda: None, "no such kernel", 2))
    capfd.readouterr()
    with suppress_stdout_stderr():
        os.write(1, b"unseen\n")
    os.write(1, b"seen\n")
    assert capfd.readouterr().out == "seen\n"
