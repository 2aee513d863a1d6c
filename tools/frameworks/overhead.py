# SPDX-License-Identifier: Apache-2.0
"""Print what a call costs the host beside the C functions, and what a layer takes beside one
without libep.

    python overhead.py torch|jax [cpu|cuda]
    torchrun --nproc-per-node N overhead.py torch cuda      of N ranks

Times are microseconds, the fastest of several runs. First a call on one rank with 8 tokens, so that
the operation itself takes next to nothing. On GPUs the host's time of a call is that of enqueueing
it.

The layer is 8,192 tokens of 7168 bfloat16 on a rank, top-8 of 32 experts a rank, inner size 2048;
forward, then forward and backward; then once more without the experts, which return what they got.
The plain one sorts tokens by expert, and exchanges rows, one for every (token, expert). Both have
room for twice the rows of an even routing. What the frameworks measure beside that stands in
with_torch.py and with_jax.py.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Union

FRAMEWORKS = ("torch", "jax")
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cpu"


class Sizes(NamedTuple):
    """A layer on one device."""

    tokens: int
    hidden: int
    inner: int
    top_k: int
    experts: int


CALL = Sizes(8, 16, 0, 2, 8)
LAYER = Sizes(8192, 7168, 2048, 8, 32) if DEVICE == "cuda" else Sizes(256, 64, 32, 2, 4)
ENTRIES = LAYER.tokens * LAYER.top_k  # (token, expert)
ROWS = 2 * ENTRIES  # received
ALIGNMENT = 8  # rows of a slab, for the weights' gradients


def print_row(name: str, columns: Iterable[Union[str, float]]) -> None:
    cells = (c if isinstance(c, str) else f"{c:.1f}" for c in columns)
    print(f"{name:40}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


def fastest(
    run: Callable[[int], object], count: int, synchronize: Callable[[], None], runs: int = 7
) -> float:
    """Microseconds per call, where run(count) makes so many."""
    run(10)
    best = float("inf")
    for _ in range(runs):
        synchronize()
        begin = time.perf_counter()
        run(count)
        best = min(best, time.perf_counter() - begin)
    return best / count * 1e6


if __name__ == "__main__":
    if sys.argv[1:2] not in [[name] for name in FRAMEWORKS] or DEVICE not in ("cpu", "cuda"):
        raise SystemExit("usage: overhead.py torch|jax [cpu|cuda]")
    importlib.import_module(f"with_{sys.argv[1]}").main()
