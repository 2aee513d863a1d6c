#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure a step of megatron-core's MoELayer with libep beside Megatron's own dispatcher.

    torchrun --nproc-per-node 4 tools/frameworks/megatron_step.py [--megatron FOLDER] [OPTIONS]

FOLDER has Megatron's package `megatron` (default: MEGATRON_FOLDER, else the one that is installed).
A step is forward and backward in bfloat16. Samples of the two dispatchers alternate, and each is of
several steps in a row. Times are milliseconds of a step: the median, of the slowest rank.

"local" has a module for each expert, "grouped" one grouped GEMM of PyTorch in the place of the
package grouped_gemm. The last lines say what the host spends in libep's own calls of a step, the
wait for counts apart, and how often it waits there.
"""

import argparse
import collections
import os
import statistics
import sys
import time
import types
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F

EXAMPLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../bindings/torch/examples")


def read_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megatron", default=os.environ.get("MEGATRON_FOLDER"))
    parser.add_argument(
        "--beside", default="alltoall", help="Megatron's dispatcher; on CPUs allgather"
    )
    parser.add_argument(
        "--backend", choices=["hybridep", "deepep"], default="hybridep", help="of the flex dispatcher"
    )
    parser.add_argument("--num-sms", type=int, default=64, help="of libep's operations")
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=32, help="of all ranks")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", default=["local", "grouped"])
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="of a sample")
    return parser.parse_args()


def gmm(rows, weights, counts, trans_b=False):
    """grouped_gemm's operation, by PyTorch's own."""
    ends = counts.to(rows.device, torch.int32, non_blocking=True).cumsum(0, dtype=torch.int32)
    multiply = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return multiply(rows, weights.transpose(1, 2) if trans_b else weights, offs=ends)


def find_megatron(folder):
    """Import the example that makes layers, after what it needs."""
    package = types.ModuleType("grouped_gemm")
    package.ops = types.SimpleNamespace(gmm=gmm)
    sys.modules["grouped_gemm"] = package
    sys.path[:0] = [EXAMPLES, *([folder] if folder else [])]
    warnings.simplefilter("ignore")
    try:
        import triton  # noqa: F401
    except ImportError:
        torch._dynamo.config.disable = True  # Megatron compiles small functions
    import moe_megatron

    return moe_megatron


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make_steps(moe, options, kind):
    """A function for each dispatcher that makes a step. Their layers have the same weights."""
    layers = {}
    for name, dispatcher in {"libep": "flex", "megatron": options.beside}.items():
        torch.manual_seed(1 + dist.get_rank())
        layers[name] = moe.make_layer(
            options.hidden,
            options.inner,
            options.experts,
            options.top_k,
            dtype=torch.bfloat16,
            dispatcher=dispatcher,
            backend=options.backend,
            num_sms=options.num_sms,
            grouped=kind == "grouped",
        )
    same = zip(*(layer.state_dict().values() for layer in layers.values()))
    for ours, theirs in same:
        if isinstance(ours, torch.Tensor):
            theirs.copy_(ours)
    device = torch.cuda.current_device()
    x, grad = torch.randn(2, options.tokens, 1, options.hidden, device=device).bfloat16()
    x.requires_grad_()

    def step(layer):
        x.grad = None
        layer.zero_grad()
        out, _ = layer(x)
        out.backward(grad)
        return out.detach(), x.grad

    return {name: lambda layer=layer: step(layer) for name, layer in layers.items()}


def compare(steps):
    """The largest difference of the two dispatchers' outputs and gradients, relative."""
    ours, theirs = (step() for step in steps.values())
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs))


def sample(step, count):
    """Milliseconds of a step."""
    dist.barrier()
    synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    synchronize()
    return (time.perf_counter() - begin) / count * 1e3


def slowest(times):
    """The median over samples of the slowest rank's time."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, times)
    return statistics.median(map(max, zip(*gathered)))


class Meter:
    """Adds up the host's time in libep's calls, without their waits for counts, and in these."""

    def __init__(self):
        self.spent, self.depth, self.is_strict = collections.Counter(), 0, False
        self.watch(torch.Tensor, "tolist", "wait")
        from libep.deep_ep import Buffer, EventHandle, EventOverlap, HybridEPBuffer
        from libep.torch import _fast

        self.waits = _fast.waits  # those in C

        self.watch(HybridEPBuffer, "dispatch_with_permute", "dispatch")
        self.watch(HybridEPBuffer, "combine_with_unpermute", "combine")
        for name in ("get_dispatch_layout", "dispatch", "combine"):
            self.watch(Buffer, name, name)
        self.watch(EventHandle, "__init__", "events")
        self.watch(EventOverlap, "current_stream_wait", "events")

    def watch(self, owner, name, kind):
        function = getattr(owner, name)

        def run(*given, **named):
            if (kind == "wait") != bool(self.depth):  # within another call; a tolist elsewhere
                return function(*given, **named)
            if self.is_strict:
                torch.cuda.set_sync_debug_mode("warn")
            self.depth += 1
            waited, begin = self.waited(), time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                self.spent[kind] += time.perf_counter() - begin - (self.waited() - waited)
                self.depth -= 1
                if self.is_strict and not self.depth:
                    torch.cuda.set_sync_debug_mode("default")

        setattr(owner, name, run)

    def waited(self):
        """Seconds of waits, in Python and in C."""
        return self.spent["wait"] + self.waits.ns * 1e-9

    def measure(self, step, count, samples):
        """Microseconds of a step by kind: the median of samples."""
        found = collections.defaultdict(list)
        for _ in range(samples):
            self.spent.clear()
            self.waits.ns = 0
            sample(step, count)
            for kind, spent in {**self.spent, "wait": self.waited()}.items():
                found[kind].append(spent / count * 1e6)
        return {kind: statistics.median(times) for kind, times in found.items()}

    def count_waits(self, step):
        """How often the host waits for a GPU within libep's calls, by PyTorch's own warnings and
        the count of those in C."""
        self.is_strict = torch.cuda.is_available()
        self.waits.count = 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
        self.is_strict = False
        # The first use of the mode has a warning of its own, of "all synchronizing operations".
        found = ("called a synchronizing" in str(each.message) for each in caught)
        return self.waits.count + sum(found)


def print_host(step, count, samples):
    """What libep's calls of a step cost this rank's host."""
    meter = Meter()
    spent = meter.measure(step, count, samples)
    waits = spent.pop("wait")
    own = sum(spent.values())
    say("# host us per step: " + ", ".join(f"{kind} {us:.0f}" for kind, us in spent.items()))
    say(f"# libep's own calls {own:.0f}, in {meter.count_waits(step)} waits for counts {waits:.0f}")


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def main():
    options = read_options()
    moe = find_megatron(options.megatron)
    moe.start()
    say(f"# {dist.get_world_size()} ranks, {options.tokens} x {options.hidden}, F {options.inner}, "
        f"top-{options.top_k} of {options.experts}, bf16, PyTorch {torch.__version__}")  # fmt: skip
    say(f"# experts   differ   libep ms {options.beside:>10} ms   ratio")
    for kind in options.kinds:
        steps = make_steps(moe, options, kind)
        differ = compare(steps)
        times = {name: [] for name in steps}
        for turn in range(options.samples + 2):
            for name, step in steps.items():
                spent = sample(step, options.steps)
                if turn >= 2:
                    times[name].append(spent)
        ours, theirs = (slowest(found) for found in times.values())
        say(f"{kind:10} {differ:8.1e} {ours:10.2f} {theirs:13.2f} {ours / theirs:7.2f}")
    print_host(steps["libep"], options.steps, options.samples)
    dist.destroy_process_group()


main()
