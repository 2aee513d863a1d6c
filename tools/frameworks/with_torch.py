# SPDX-License-Identifier: Apache-2.0
"""Calls of libep.torch and libep.deep_ep, and a layer beside all_to_all_single: see overhead.py.

Of the ranks of torchrun it also prints how much of a call's time passes in C, in the wait for
counts, and in Python.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
import types

import torch
import torch.distributed as dist
import torch.nn.functional as F
from overhead import ALIGNMENT, CALL, DEVICE, LAYER, ROWS, fastest, print_row

import libep
import libep.torch as ep
from libep._library import library
from libep.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer
from libep.torch import _fast

BACKEND = libep.Backend.CUDA if DEVICE == "cuda" else libep.Backend.HOST


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def time_of(call, count=2000):
    """Microseconds of the host per call."""

    def run(count):
        for _ in range(count):
            call()

    return fastest(run, count, synchronize)


# ---- the host's time ---------------------------------------------------------------------------


def host_times():
    """Calls of 8 tokens on one rank, where the operation itself takes next to nothing."""
    (bootstrap,) = libep.Bootstrap.local(1)
    sizes = dict(num_experts=CALL.experts, max_tokens=CALL.tokens, hidden=CALL.hidden)
    sizes.update(top_k=CALL.top_k, dtype=torch.float32, max_recv_rows=None, backend=BACKEND)
    group = ep.create_group(bootstrap, **sizes)
    layer, shape = ep.Handle(group), (CALL.tokens, CALL.top_k)
    x = torch.randn(CALL.tokens, CALL.hidden, device=group.device)
    idx = torch.randint(0, CALL.experts, shape, device=group.device)
    w = torch.rand(shape, device=group.device)
    plan = ep.prepare(layer, idx)
    received = ep.dispatch(layer, x, plan, w)
    recv, recv_w, out = received.tokens, received.topk_weights, torch.empty_like(x)
    grad = [t.clone().requires_grad_() for t in (x, w, recv, recv_w)]
    c = [libep.tensor(t) for t in (idx, x, w, plan.bytes, recv, recv_w, out)]
    c_idx, c_x, c_w, c_plan, c_recv, c_recv_w, c_out = c
    received_into = dict(recv_topk_weights=c_recv_w, plan=c_plan, stream=layer.stream())
    pointer, stream, core, ops = layer._pointer, layer.stream(), libep.Handle, torch.ops.libep
    rows = {
        "the C function, by ctypes": (
            lambda: library.ep_prepare(pointer, c_plan, c_idx, None, stream, None),
            lambda: library.ep_dispatch(
                pointer, c_plan, None, c_x, c_w, None, stream, c_recv, c_recv_w, None, None
            ),
            lambda: library.ep_combine(pointer, c_plan, c_recv, c_recv_w, None, stream, c_out),
        ),
        "libep, with libep.Tensor": (
            lambda: core.prepare(layer, c_idx, plan=c_plan, stream=stream),
            lambda: core.dispatch(layer, c_x, c_w, recv_tokens=c_recv, **received_into),
            lambda: core.combine(layer, c_recv, c_recv_w, out=c_out, plan=c_plan, stream=stream),
        ),
        "torch.ops.libep, given outputs": (
            lambda: ops.prepare(layer.key, idx, None, plan.bytes, plan.numbers),
            lambda: ops.dispatch(layer.key, plan.bytes, x, w, None, recv, recv_w, None, None),
            lambda: ops.combine(layer.key, plan.bytes, recv, recv_w, *[None] * 3, out),
        ),
        "libep.torch, new outputs": (
            lambda: ep.prepare(layer, idx),
            lambda: ep.dispatch(layer, x, plan, w),
            lambda: ep.combine(layer, plan, recv, recv_w),
        ),
        "libep.torch, with gradient": (
            None,
            lambda: ep.dispatch(layer, grad[0], plan, grad[1]),
            lambda: ep.combine(layer, plan, grad[2], grad[3]),
        ),
    }
    print(f"# libep {libep.version()}, torch {torch.__version__}, {DEVICE}, 1 rank, 8 tokens")
    print_row("# host us per call", ["prepare", "dispatch", "combine"])
    for name, calls in rows.items():
        print_row(name, ("-" if call is None else time_of(call) for call in calls))
    if DEVICE == "cuda":
        print_row("a step in a CUDA graph, on the GPU", [graph_time(layer, x, idx, w)])
    group.close()
    bootstrap.close()


def capture(step):
    """A CUDA graph of a function."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def gpu_time(call, count=20):
    """Microseconds of the GPU per call, the fastest of five runs."""
    best = float("inf")
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best / count * 1e3


def graph_time(layer, x, idx, w):
    def step():
        received = ep.dispatch(layer, x, idx, w)
        ep.combine(layer, received.plan, received.tokens, received.topk_weights)

    return gpu_time(capture(step).replay)


def parts_of(call, count=200, runs=40):
    """Microseconds of the host per call: all, in C, in the wait for counts, and the rest. Of the run
    with the least rest, and without what timing takes. All ranks call it alike."""
    spent, timed_calls = {}, [0]

    def timed(name, function):
        def run(*given):
            begin = time.perf_counter()
            try:
                return function(*given)
            finally:
                spent[name] += time.perf_counter() - begin
                timed_calls[0] += 1

        run.__name__ = name
        return run

    def cost_of_timing():
        nothing, spent["nothing"] = timed("nothing", lambda *_: None), 0.0
        return time_of(lambda: nothing(0, 0, 0, 0)) * 1e-6

    cost = cost_of_timing()
    names = "make", "send", "count", "normal_dispatch", "normal_combine"
    functions, tolist = {name: getattr(_fast, name) for name in names}, torch.Tensor.tolist
    for name, function in functions.items():
        setattr(_fast, name, timed("C", function))
    torch.Tensor.tolist = timed("wait", tolist)
    found = []
    for _ in range(runs):
        synchronize()
        spent.update(C=0.0, wait=0.0)
        timed_calls[0] = _fast.waits.ns = 0
        begin = time.perf_counter()
        for _ in range(count):
            call()
        whole = time.perf_counter() - begin - timed_calls[0] * cost
        in_c = _fast.waits.ns * 1e-9  # of the wait
        parts = whole, spent["C"] - in_c, spent["wait"] + in_c, whole - spent["C"] - spent["wait"]
        found.append([part / count * 1e6 for part in parts])
    for name, function in functions.items():
        setattr(_fast, name, function)
    torch.Tensor.tolist = tolist
    synchronize()
    return min(found, key=lambda parts: parts[-1])


def call_times(meeting, rank, ranks):
    """Calls of few tokens on several ranks. `meeting`: a process group or a Bootstrap."""
    tokens, hidden, top_k, experts = 64, 1024, 8, 8 * ranks
    sizes = dict(num_experts=experts, max_tokens=tokens, hidden=hidden, top_k=top_k)
    group = ep.create_group(meeting, **sizes, max_recv_rows=None, backend=BACKEND)
    layer, buffer = ep.Handle(group), Buffer(meeting)
    x = torch.randn(tokens, hidden, device=group.device, dtype=torch.bfloat16)
    idx = torch.rand(tokens, experts, device=group.device).topk(top_k)[1]
    w = torch.rand(tokens, top_k, device=group.device)
    plan = ep.prepare(layer, idx)
    received = ep.dispatch(layer, x, plan, w)
    recv, recv_w = received.tokens, received.topk_weights
    grad = [t.clone().requires_grad_() for t in (x, w, recv, recv_w)]
    per_rank, _, per_expert, is_in, _ = buffer.get_dispatch_layout(idx, experts)

    names = "topk_idx topk_weights num_tokens_per_rank is_token_in_rank num_tokens_per_expert"
    given = dict(zip(names.split(), (idx, w, per_rank, is_in, per_expert)))
    dispatch = functools.partial(buffer.dispatch, x, **given)
    rows, _, row_w, _, handle, _ = dispatch()
    elastic = ElasticBuffer(meeting, num_max_tokens_per_rank=tokens)
    flat, _, flat_w, plain, _ = elastic.dispatch(x, idx, w, num_experts=experts)
    calls = {
        "libep.torch prepare": lambda: ep.prepare(layer, idx),
        "libep.torch dispatch": lambda: ep.dispatch(layer, x, plan, w),
        "libep.torch combine": lambda: ep.combine(layer, plan, recv, recv_w),
        "with gradient: dispatch": lambda: ep.dispatch(layer, grad[0], plan, grad[1]),
        "with gradient: combine": lambda: ep.combine(layer, plan, grad[2], grad[3]),
        "deep_ep get_dispatch_layout": lambda: buffer.get_dispatch_layout(idx, experts),
        "deep_ep dispatch": dispatch,
        "deep_ep dispatch, handle": lambda: buffer.dispatch(x, handle=handle),
        "deep_ep combine": lambda: buffer.combine(rows, handle),
        "deep_ep combine, weights": lambda: buffer.combine(rows, handle, topk_weights=row_w),
        "deep_ep dispatch, async_finish": lambda: dispatch(async_finish=True),
        "deep_ep combine, async_finish": lambda: buffer.combine(rows, handle, async_finish=True),
        "ElasticBuffer dispatch": lambda: elastic.dispatch(x, idx, w, num_experts=experts),
        "ElasticBuffer combine": lambda: elastic.combine(flat, plain),
        "ElasticBuffer combine, weights": lambda: elastic.combine(flat, plain, flat_w),
    }
    if rank == 0:
        print_row(f"# host us per call, ranks: {ranks}", ["all", "in C", "wait", "rest"])
    for name, call in calls.items():
        parts = parts_of(call)
        if rank == 0:
            print_row(name, parts)
    buffer.destroy()
    elastic.destroy()
    group.close()


# ---- calls whose code and data have left the caches ----------------------------------------------

LINES = (  # of a layer's Python, each with its number
    "held[{n}] = ['{n}', {n} * 1.5, (len(held), {n}), {{'key{n}': held.get({n} - 1)}}]",
    "text = f'{{{n}:>8}} of {{len(held)}}'.replace('0', str({n} % 7)).split(' ')",
    "x = (x + {n} % 5).view(-1, 8).sum(1, keepdim=True).expand(-1, 8).reshape(x.shape) * 0.1",
    "record = types.SimpleNamespace(n={n}, text=text, shape=tuple(x.shape)); record.n += {n}",
    "found = sorted(held.items(), key=lambda pair: (pair[0] * {n} % 11, pair[0]))[:3]",
    "y = torch.cat([x[:2], x[2:]]).softmax(-1); x = torch.where(y > 0, y, x).contiguous()",
    "held.pop({n} - 40, None); found = [each for each in found if isinstance(each, tuple)]",
    "x = torch.nn.functional.silu(x @ x.t()) @ x",
)


def make_filler():
    """A function that does what lies between two calls: 2,000 lines of Python and torch, once, and
    64 MB that are read."""
    body = "".join(f"    {LINES[n % len(LINES)].format(n=n)}\n" for n in range(2000))
    scope = {"torch": torch, "types": types}
    exec(f"def fill(x):\n    held, text, found = {{}}, '', []\n{body}", scope)
    memory, x = torch.ones(1 << 24), torch.randn(16, 16)

    def fill():
        scope["fill"](x)
        memory.sum()
        synchronize()

    return fill


def count_python(call):
    """The Python functions that a call enters, the functions of C that they call, and bytecodes."""
    seen = {"call": 0, "c_call": 0, "opcode": 0}

    def note(frame, event, _):
        seen[event] = seen.get(event, 0) + 1

    def trace(frame, event, _):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        note(frame, event if event == "opcode" else "", None)
        return trace

    sys.setprofile(note)
    call()
    sys.setprofile(None)
    seen["c_call"] -= 1  # that of setprofile
    sys.settrace(trace)
    call()
    sys.settrace(None)
    return list(seen.values())[:3]


def layer_calls(meeting, ranks, tokens=8, hidden=64, top_k=4):
    """The calls of a layer's forward and backward, as Megatron's dispatchers make them."""
    experts = 8 * ranks
    device = "cuda" if DEVICE == "cuda" else "cpu"
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    idx = torch.rand(tokens, experts, device=device).topk(top_k)[1]
    w = torch.rand(tokens, top_k, device=device)
    routing = torch.zeros(tokens, experts, device=device).bool().scatter_(1, idx, True)
    probs = torch.zeros(tokens, experts, device=device).scatter_(1, idx, w)
    buffer, given = Buffer(meeting), dict(num_sms_dispatch_api=24, num_sms_combine_api=24)
    hybrid = HybridEPBuffer(meeting, hidden, tokens, 8, **given)

    def send():
        return hybrid.dispatch_with_permute(
            hidden=x, routing_map=routing, probs=probs, scaling_factor=None,
            num_of_experts_per_rank=8, pad_multiple=None, num_permuted_tokens=None,
            non_blocking=False,
        )  # fmt: skip

    rows, row_probs, _, counts, handle = send()
    given = counts.sum()

    def back(probs=None):
        return hybrid.combine_with_unpermute(
            hidden=rows, probs=probs, handle=handle, pad_multiple=None
        )

    def again():
        return hybrid.dispatch_with_permute(
            hidden=x, scaling_factor=None, handle=handle, pad_multiple=None,
            num_permuted_tokens=given,
        )  # fmt: skip

    yield "HybridEPBuffer", [send, back, again, lambda: back(row_probs)], hybrid

    def route():
        per_rank, _, per_expert, is_in, event = buffer.get_dispatch_layout(
            idx, experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
        )
        return buffer.dispatch(
            x, topk_idx=idx, topk_weights=w, num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=None, is_token_in_rank=is_in,
            num_tokens_per_expert=per_expert, previous_event=event, async_finish=False,
            allocate_on_comm_stream=False,
        )  # fmt: skip

    rows, _, row_w, _, plain, _ = route()
    plainly = dict(previous_event=None, async_finish=False, allocate_on_comm_stream=False)
    calls = [
        route,
        lambda: buffer.combine(rows, handle=plain, **plainly),
        lambda: buffer.dispatch(x, handle=plain, **plainly),
        lambda: buffer.combine(rows, plain, topk_weights=row_w, **plainly),
    ]
    yield "Buffer", calls, buffer


def cold_times(meeting, rank, ranks, count=60):
    """What a layer's calls cost the host in a layer, and what they cost in a loop."""
    fill = make_filler()
    names = ["dispatch", "combine", "bwd. dispatch", "bwd. combine", "all"]
    for kind, calls, owner in layer_calls(meeting, ranks):
        times = [[] for _ in calls]
        for turn in range(count + 5):
            for call, taken in zip(calls, times):
                fill()
                begin = time.perf_counter()
                call()
                if turn >= 5:
                    taken.append(time.perf_counter() - begin)
        cold = [statistics.median(taken) * 1e6 for taken in times]
        hot = [time_of(call, 200) for call in calls]
        counts = zip(*map(count_python, calls))
        if rank == 0:
            print_row(f"# {kind}, host us", names)
            print_row("after other code and data", [*cold, sum(cold)])
            print_row("in a loop", [*hot, sum(hot)])
            for name, numbers in zip(("Python functions", "functions of C", "bytecodes"), counts):
                print_row(name, [f"{n}" for n in (*numbers, sum(numbers))])
        owner.destroy()


# ---- a layer -----------------------------------------------------------------------------------


class Exchange(torch.autograd.Function):
    """all_to_all_single of rows, and back."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.counts = sent, received
        out = rows.new_empty((sum(received), rows.shape[1]))
        dist.all_to_all_single(out, rows, received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.counts
        out = grad.new_empty((sum(sent), grad.shape[1]))
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


def experts_of(rows, up, down, ends):
    return F.grouped_mm(F.gelu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)


def plain_layer(x, idx, weights, local, experts):
    """A layer without libep: sort, count, exchange, sort again. `local` is the number of experts."""
    ranks = dist.get_world_size()
    order = idx.flatten().argsort(stable=True)
    sent = torch.bincount(idx.flatten(), minlength=ranks * local)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    sizes = torch.stack([c.view(ranks, local).sum(1) for c in (sent, received)]).tolist()
    rows = Exchange.apply(x[order // LAYER.top_k], *sizes)
    expert = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(received)
    by_expert = expert.argsort(stable=True)
    counts = received.view(ranks, local).sum(0)
    padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    place = torch.arange(len(rows), device=x.device) + shift[expert[by_expert]]
    slabs = rows.new_zeros(len(rows) + ALIGNMENT * local, rows.shape[1])
    slabs = slabs.index_copy(0, place, rows[by_expert])
    rows = experts(slabs, ends.int())[place]
    back = torch.empty_like(rows).index_copy(0, by_expert, rows)
    rows = Exchange.apply(back, *sizes[::-1])
    rows = rows * weights.flatten()[order, None].to(rows.dtype)
    return torch.zeros_like(x).index_add(0, order // LAYER.top_k, rows)


def layer_times():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts = ranks * LAYER.experts
    torch.manual_seed(rank)
    sizes = dict(num_experts=experts, max_tokens=LAYER.tokens, hidden=LAYER.hidden)
    sizes.update(top_k=LAYER.top_k, max_recv_rows=ROWS, alignment=ALIGNMENT, backend=BACKEND)
    group = ep.create_group(**sizes)
    layer, tokens = ep.Handle(group), (LAYER.tokens, LAYER.hidden)
    make = {"device": group.device, "dtype": torch.bfloat16}
    x, grad = torch.randn(tokens, **make).requires_grad_(), torch.randn(tokens, **make)
    up = torch.randn(LAYER.experts, LAYER.hidden, LAYER.inner, **make).mul_(0.01).requires_grad_()
    down = torch.randn(LAYER.experts, LAYER.inner, LAYER.hidden, **make).mul_(0.01).requires_grad_()
    idx = torch.rand(LAYER.tokens, experts, device=group.device).topk(LAYER.top_k)[1]
    weights = torch.rand(LAYER.tokens, LAYER.top_k, device=group.device).requires_grad_()

    def mlp(rows, ends):
        return experts_of(rows, up, down, ends)

    def nothing(rows, ends):
        return rows

    def with_libep(experts=mlp):
        received = ep.dispatch(layer, x, idx, weights)
        plan = received.plan
        rows = experts(received.tokens, plan.expert_ends)
        return ep.combine(layer, plan, rows, received.topk_weights)

    def plain(experts=mlp):
        return plain_layer(x, idx, weights, LAYER.experts, experts)

    def both_ways(forward):
        def step():
            forward().backward(grad)
            x.grad = up.grad = down.grad = weights.grad = None

        return step

    difference = (with_libep() - plain()).abs().max() / plain().abs().max()
    if rank == 0:
        print(f"# a layer on {ranks} ranks; results differ by {difference.item():.1e} at most")
        print_row("# us per step", ["forward", "with bwd."])
    rows = {
        "libep.torch": with_libep,
        "all_to_all_single and sorts": plain,
        "libep.torch, without experts": functools.partial(with_libep, nothing),
        "all_to_all_single, without experts": functools.partial(plain, nothing),
    }
    for name, forward in rows.items():
        times = [gpu_time(forward, 5), gpu_time(both_ways(forward), 5)]
        if rank == 0:
            print_row(name, (f"{t:.0f}" for t in times))
    with torch.no_grad():
        times = gpu_time(capture(with_libep).replay, 5)
    if rank == 0:
        print_row("libep.torch, in a CUDA graph", [f"{times:.0f}"])
    finding = group.status()
    if finding.status:
        raise SystemExit(finding.sentence)
    group.close()


def main():
    if "RANK" in os.environ and DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        if dist.get_rank() == 0:
            host_times()
        call_times(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
        cold_times(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
        layer_times()
        dist.destroy_process_group()
    else:
        torch.set_num_threads(1)
        host_times()
        (alone,) = libep.Bootstrap.local(1)
        call_times(alone, 0, 1)
        cold_times(alone, 0, 1)
        alone.close()
