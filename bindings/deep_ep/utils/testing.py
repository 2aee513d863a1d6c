# SPDX-License-Identifier: Apache-2.0
"""How DeepEP's own programs measure. On a machine without GPUs times are the host's."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from typing import Callable, Iterator, Optional, Union

    Times = Union[float, list[float]]

__all__ = ["bench", "bench_kineto", "flush_l2_cache", "suppress_stdout_stderr"]

_FLUSHED_BYTES = 256_000_000
_SLEEP_CYCLES = 20_000_000  # some 10 ms
_KERNELS = {"dispatch": "scatter_kernel", "combine": "gather_kernel"}
"""What libep's kernels are called."""


def flush_l2_cache(enabled: bool = True) -> None:
    """Overwrite what a GPU's cache holds."""
    if enabled and torch.cuda.is_available():
        torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda").zero_()


def bench(
    fn: Callable[[], object],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Optional[Callable[[], object]] = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Measure a call: its mean, least and largest seconds, without the first of num_tests."""
    for _ in range(num_warmups):
        fn()
    measure = _measure_stream if torch.cuda.is_available() else _measure_host
    seconds = measure(fn, num_tests, post_fn, flush_l2)[1:]
    return statistics.fmean(seconds), min(seconds), max(seconds)


def _measure_stream(
    fn: Callable[[], object],
    num_tests: int,
    post_fn: Optional[Callable[[], object]],
    flush_l2: bool,
) -> list[float]:
    torch.cuda.synchronize()
    pairs = []
    for _ in range(num_tests):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush_l2_cache(flush_l2)
        start.record()
        fn()
        end.record()
        pairs.append((start, end))
        if post_fn is not None:
            post_fn()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in pairs]


def _measure_host(
    fn: Callable[[], object],
    num_tests: int,
    post_fn: Optional[Callable[[], object]],
    flush_l2: bool,
) -> list[float]:
    seconds = []
    for _ in range(num_tests):
        flush_l2_cache(flush_l2)
        start = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - start)
        if post_fn is not None:
            post_fn()
    return seconds


@contextlib.contextmanager
def suppress_stdout_stderr() -> Iterator[None]:
    """Send the process's standard output and error to nowhere."""
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number, old in zip((1, 2), kept):
            os.dup2(old, number)
            os.close(old)
        os.close(nowhere)


def bench_kineto(
    fn: Callable[[], object],
    kernel_names: Union[str, tuple[str, ...]],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: Optional[str] = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Optional[Callable[[], object]] = None,
) -> Union[Times, list[Times]]:
    """Measure the kernels of a call: their mean seconds, by PyTorch's profiler.

    kernel_names            parts of names, or one; "dispatch" and "combine" are libep's kernels
    barrier_comm_profiling  let the ranks begin each call together
    num_kernels_per_period  kernels of this name in one call: then a list of as many times

    A time is not a number where no such kernel has run, as on a machine without GPUs.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    fn()
    events: list[tuple[str, float, float]] = []
    if torch.cuda.is_available():
        quiet = suppress_stdout_stderr() if suppress_kineto_output else contextlib.nullcontext()
        with quiet:
            events = _profile(fn, num_tests, trace_path, flush_l2, barrier_comm_profiling, barrier)
    times = [_mean_times(events, _KERNELS.get(n, n), num_kernels_per_period) for n in names]
    return times[0] if isinstance(kernel_names, str) else times


def _profile(
    fn: Callable[[], object],
    num_tests: int,
    trace_path: Optional[str],
    flush_l2: bool,
    is_together: bool,
    barrier: Optional[Callable[[], object]],
) -> list[tuple[str, float, float]]:
    """The name, start and microseconds of each kernel."""
    word = torch.ones(1, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_tests):
            flush_l2_cache(flush_l2)
            if is_together:
                torch.cuda._sleep(_SLEEP_CYCLES)
                dist.all_reduce(word) if barrier is None else barrier()
            fn()
        torch.cuda.synchronize()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    return [
        (event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type == torch._C._autograd.DeviceType.CUDA
    ]


def _mean_times(events: list[tuple[str, float, float]], name: str, per_period: int) -> Times:
    found = sorted((start, length) for kernel, start, length in events if name in kernel)
    assert len(found) % per_period == 0, (
        f"{len(found)} kernels named {name} in periods of {per_period}"
    )
    means = []
    for at in range(per_period):
        lengths = [length * 1e-6 for _, length in found[at::per_period]]
        means.append(statistics.fmean(lengths) if lengths else float("nan"))
    return means if per_period > 1 else means[0]
