#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times dispatch and combine of vLLM's classes over libep, against the bare C calls.

    PYTHONPATH=build/python tools/frameworks/vllm_step.py [--gpus 4] [--tokens 128] ...

Each rank has a GPU. A step is what vLLM's modular kernel calls, with experts that return the rows as
they are: prepare_async, its receive phase, finalize_async, its receive phase. Steps are chained in a
CUDA graph, and so are the C calls with the same layout and mode, into tensors made before. Both
graphs are replayed in turns. Times are of the slowest rank, per step, median over replays. The
files of vLLM come from the cache that wheels.py keeps, or are downloaded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

BACKENDS = ("deepep_v2", "deepep_low_latency", "libep", "libep_batched")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in dict(
        gpus=4, tokens=128, hidden=7168, top_k=8, experts=256, chain=64, replays=40, warm=10
    ).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=29517)
    return parser.parse_args()


def start(options):
    """Run the ranks. Returns the exit status."""
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--rank", str(rank)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(options.gpus)
    ]
    return max(abs(rank.wait()) for rank in ranks)


class Rank:
    """What a rank has for all backends."""

    def __init__(self, options):
        import torch
        import torch.distributed as dist

        import libep.deep_ep
        import libep.vllm

        torch.cuda.set_device(options.rank)
        address = f"tcp://127.0.0.1:{options.port}"
        dist.init_process_group("gloo", address, rank=options.rank, world_size=options.gpus)
        libep.deep_ep.install()
        import vllm_release

        self.options = options
        self.config = vllm_release.prepare()
        assert libep.vllm.register()
        self.x, self.weights, self.ids = self._make_inputs()
        self._set_tokens()

    def _make_inputs(self):
        import torch

        options = self.options
        generator = torch.Generator().manual_seed(options.rank)
        x = torch.randint(-2, 3, (options.tokens, options.hidden), generator=generator)
        scores = torch.rand(options.tokens, options.experts, generator=generator)
        weights = torch.full((options.tokens, options.top_k), 1 / options.top_k)
        return x.bfloat16().cuda(), weights.cuda(), scores.topk(options.top_k).indices.cuda()

    def _set_tokens(self):
        from types import SimpleNamespace

        import torch
        import vllm.forward_context as context

        counts = torch.full((self.options.gpus,), self.options.tokens)
        context._forward_context = SimpleNamespace(
            dp_metadata=SimpleNamespace(num_tokens_across_dp_cpu=counts)
        )

    def expect(self, is_batched):
        """The output, where experts return rows as they are."""
        if is_batched:
            return self.x
        each = self.options.experts // self.options.gpus
        ranks = (self.ids // each).sort(1).values
        count = 1 + (ranks[:, 1:] != ranks[:, :-1]).sum(1, keepdim=True)
        return (self.x.float() * count).bfloat16()

    def make_step(self, backend):
        """A step of vLLM's, which returns its output, and the layer."""
        import torch
        from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce as sums
        from vllm_release import make_layer

        options = self.options
        layer = make_layer(
            self.config,
            backend,
            experts=options.experts,
            top_k=options.top_k,
            hidden=options.hidden,
            most=options.tokens,
        )
        made = layer.prepare_finalize
        ids = self.ids.to(made.topk_indices_dtype())
        is_batched = made.max_num_tokens_per_rank() is not None
        impl = sums.TopKWeightAndReduceDelegate() if is_batched else sums.TopKWeightAndReduceNoOP()

        def run(call):
            hook, receive = call if isinstance(call, tuple) else (None, call)
            if hook is not None:
                hook()
            return receive()

        def step():
            output = torch.empty_like(self.x)
            given = self.x, self.weights, ids, options.experts, None, False, layer.quant_config
            rows, _, _, new_ids, new_weights = run(made.prepare_async(*given))
            if is_batched:
                new_ids, new_weights = ids, self.weights
            run(made.finalize_async(output, rows, new_weights, new_ids, False, impl))
            return output

        return step, is_batched, ids, layer

    def make_bare(self, backend, ids):
        """The C calls with the backend's layout and mode."""
        import torch

        import libep
        import libep.torch as ep
        from libep.deep_ep import Buffer
        from libep.torch import _calls
        from libep.torch._autograd import make_plan

        options = self.options
        is_large, rows = backend == "deepep_v2", options.gpus * options.tokens
        group = ep.create_group(
            num_experts=options.experts,
            max_tokens=options.tokens,
            hidden=options.hidden,
            top_k=options.top_k,
            mode=libep.Mode.THROUGHPUT if is_large else libep.Mode.LATENCY,
        )
        is_batched = backend in ("deepep_low_latency", "libep_batched")
        fields = dict(layout="RANK_MAJOR", zero_tail="IDS", expert_ids="GLOBAL")
        if is_batched:
            fields = dict(layout="BATCHED", rows_per_expert=rows)
        elif is_large:
            fields = dict(
                layout="FLAT", max_recv_rows=rows, zero_tail="IDS", num_sms=Buffer.num_sms
            )
        handle = ep.Handle(group, **fields)
        plan, x, weights = make_plan(handle, ids), self.x, self.weights
        numbers, lead = (plan.bytes, plan.numbers), handle.lead(rows)
        recv = x.new_empty((*lead, options.hidden))
        recv_weights = recv_idx = sent = None
        if not is_batched:
            sent, recv_weights = weights, weights.new_empty((*lead, options.top_k))
            recv_idx = ids.new_empty((*lead, options.top_k))
        received, home = (recv, recv_weights, None, recv_idx), weights if is_batched else None
        out = torch.empty_like(x)

        def step():
            if is_large:
                _calls.prepare(handle, ids, None, *numbers)
                _calls.dispatch(handle, plan.bytes, x, sent, None, *received)
                _calls.combine(handle, plan.bytes, recv, None, None, None, None, out)
                return out
            if is_batched:
                _calls.dispatch_send(handle, ids, None, x, sent, None, *numbers)
                _calls.dispatch_wait(handle, *received)
            else:
                _calls.dispatch_routed(handle, ids, None, x, sent, None, *numbers, *received)
            _calls.combine_send(handle, plan.bytes, recv, None, home)
            _calls.combine_wait(handle, None, None, out)
            return out

        return step, group

    def capture(self, step):
        """A graph of a chain of steps, and the output of the last."""
        import torch

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.options.chain):
                output = step()
        return graph, output

    def time(self, graphs):
        """Microseconds of a step of each graph, of the slowest rank."""
        import torch
        import torch.distributed as dist

        times = [[] for _ in graphs]
        for number in range(self.options.warm + self.options.replays):
            for graph, measured in zip(graphs, times):
                dist.barrier()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                if number >= self.options.warm:
                    measured.append(1000 * begin.elapsed_time(end) / self.options.chain)
        made = torch.tensor([statistics.median(each) for each in times])
        dist.all_reduce(made, dist.ReduceOp.MAX)
        return made.tolist()

    def measure(self, backend):
        import torch

        step, is_batched, ids, layer = self.make_step(backend)
        bare, group = self.make_bare(backend, ids)
        made = [self.capture(each) for each in (step, bare)]
        ours, floor = self.time([graph for graph, _ in made])
        expected = self.expect(is_batched)
        wrong = sum(int((output != expected).any(1).sum()) for _, output in made)
        del made
        torch.cuda.synchronize()
        layer.manager.destroy()
        group.close()
        if self.options.rank == 0:
            print(
                f"{backend:>20} {ours:9.1f} {floor:9.1f} {ours / floor:7.2f} {wrong:7}", flush=True
            )
        return wrong


def main():
    options = parse()
    if options.rank is None:
        return start(options)
    rank = Rank(options)
    if options.rank == 0:
        sizes = f"{options.tokens} tokens x {options.hidden}, top-{options.top_k}"
        from vllm.triton_utils import HAS_TRITON

        kernels = "with Triton" if HAS_TRITON else "its kernel of Triton stood in for"
        sizes = f"{sizes} of {options.experts}"
        print(f"# {options.gpus} GPUs, {sizes}, in graphs, us per step, {kernels}")
        print(f"#{'backend':>19} {'vLLM':>9} {'C calls':>9} {'ratio':>7} {'#wrong':>7}")
    return int(any([rank.measure(backend) for backend in options.backends]))


if __name__ == "__main__":
    sys.exit(main())
