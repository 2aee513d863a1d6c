# SPDX-License-Identifier: Apache-2.0
"""Print what a call of libep.jax costs, beside the C functions.

    python overhead.py [cpu|cuda]

One rank, 8 tokens, so that a call is what the host does for it. Times are microseconds, the fastest
of several runs. What a call takes in a compiled program is the difference between a program with
many calls and one with few, over the number of calls. Programs wait for each other by the order,
which one returns and the next one takes.

On GPUs the time of a program is that of the host or of the GPU, whichever takes longer, and XLA may
put calls into command buffers. XLA_FLAGS=--xla_gpu_enable_command_buffer= keeps it from that.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
os.environ["JAX_PLATFORMS"] = DEVICE
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import libep.jax  # noqa: E402
from libep import _jax_calls as calls  # noqa: E402
from libep._handle import PlanTensors  # noqa: E402
from libep._jax_operations import _vary_alike  # noqa: E402
from libep._library import check, library  # noqa: E402

TOKENS, HIDDEN, TOP_K, EXPERTS = 8, 16, 2, 8
FEW, MANY = 10, 110  # calls in a program
PLAN_NUMBERS = ("expert_counts", "expert_padded", "expert_offsets", "totals")
COLUMNS = ("prepare", "dispatch", "combine", "step", "with backward")


def print_row(name, columns):
    cells = (c if isinstance(c, str) else f"{c:.1f}" for c in columns)
    print(f"{name:40}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


def fastest(run, count, runs=7):
    """Microseconds per call, where run(count) makes so many."""
    run(10)
    best = float("inf")
    for _ in range(runs):
        synchronize()
        begin = time.perf_counter()
        run(count)
        best = min(best, time.perf_counter() - begin)
    return best / count * 1e6


# ---- the C functions ---------------------------------------------------------------------------


def call_driver(name, *arguments):
    """Call CUDA's driver, which JAX has loaded."""
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status:
        raise SystemExit(f"{name} returned {status}")


def enter_context():
    """Make the context of JAX and libep that of this thread, for synchronize."""
    if DEVICE == "cuda":
        context = ctypes.c_void_p()
        call_driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        call_driver("cuCtxSetCurrent", context)


def synchronize():
    if DEVICE == "cuda":
        call_driver("cuCtxSynchronize")


def tensor(array):
    """A Tensor over the memory of an array of JAX, which C functions may write."""
    kind = {"float32": libep.Type.FP32, "int32": libep.Type.INT32, "uint8": libep.Type.UINT8}
    return libep.Tensor(array.unsafe_buffer_pointer(), kind[array.dtype.name], array.shape, array)


def c_calls(ep, arrays):
    """Calls on the rank that programs use. Each takes the function that it calls."""
    pointer = ep._ranks.ranks[0].handle._require()
    t = {name: tensor(array) for name, array in arrays.items()}
    plan, x, w, recv, recv_w = (t[name] for name in ("bytes", "x", "w", "recv", "recv_w"))
    numbers = PlanTensors(**{name: t[name] for name in PLAN_NUMBERS})
    return {
        "ep_prepare": lambda f: f(pointer, plan, t["idx"], None, None, numbers),
        "ep_dispatch": lambda f: f(pointer, plan, None, x, w, None, None, recv, recv_w, None, None),
        "ep_combine": lambda f: f(pointer, plan, recv, recv_w, None, None, t["out"]),
        "ep_combine_backward": lambda f: f(
            pointer, plan, t["out"], recv_w, recv, None, t["grad_recv"], t["grad_recv_w"]
        ),
        "ep_dispatch_backward": lambda f: f(
            pointer, plan, t["grad_recv"], t["grad_recv_w"], None, t["grad_x"], t["grad_w"]
        ),
    }


def ctypes_alone(function):
    """A function that does nothing, with the arguments of another."""
    nothing = library["ep_version"]
    nothing.argtypes = function.argtypes
    return nothing


def print_c_times(name, pairs, waits=False):
    """Times of pairs of a call and the function for it, and of steps."""

    def time_of(pairs):
        def run(count):
            for _ in range(count):
                for call, function in pairs:
                    call(function)
            if waits:
                synchronize()

        return fastest(run, 2000)

    columns = pairs[:1], pairs[1:2], pairs[2:3], pairs[:3], pairs
    print_row(name, map(time_of, columns))


def print_all_c_times(ep, arrays):
    enter_context()
    pairs = [(call, getattr(library, name)) for name, call in c_calls(ep, arrays).items()]
    for call, function in pairs:
        check(call(function))
    synchronize()
    nothing = [(call, ctypes_alone(function)) for call, function in pairs]
    print_c_times("ctypes alone", nothing)
    print_c_times("the C function, by ctypes", pairs)
    if DEVICE == "cuda":
        print_c_times("the C function, until the GPU is done", pairs, waits=True)


# ---- programs ----------------------------------------------------------------------------------


def on_mesh(mesh, body):
    """A program of body(order, x, idx, w), which uses all of these and returns arrays."""
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    return jax.jit(mapped, keep_unused=True)


def forward(ep, order, x, idx, w):
    recv, recv_w, plan, order = ep.dispatch(order, x, idx, w)
    out, order = ep.combine(order, recv, plan, recv_w)
    return order, out


def backward(ep, order, x, idx, w, count=1):
    """Gradients of `count` steps, one after the other. That of the order is the last order."""

    def loss(order, x, w):
        for _ in range(count):
            order, x = forward(ep, order, x, idx, w)
        return jnp.sum(x)

    value, (order, *grads) = jax.value_and_grad(loss, (0, 1, 2))(order, x, w)
    return order, value[None], *grads


def programs_of(ep, mesh, count):
    """For each column a program with so many calls of it, after one dispatch."""
    operations = ep._operations

    def prepare(order, x, idx, w, received):
        operands = _vary_alike(operations.axes, idx, operations._place())
        return operations._bind(calls.prepare, order, *operands, outputs=operations._plan_types())

    def dispatch(order, x, idx, w, received):
        recv, recv_w, plan, _ = received
        outputs = [(array.shape, array.dtype.name) for array in (recv, recv_w)]
        return operations._bind(calls.dispatch, order, plan.bytes, x, w, outputs=outputs)

    def combine(order, x, idx, w, received):
        recv, recv_w, plan, _ = received
        return ep.combine(order, recv, plan, recv_w)[::-1]

    def step(order, x, idx, w, received):
        return forward(ep, order, x, idx, w)

    def repeat(operation):
        def body(order, x, idx, w):
            received = ep.dispatch(order, x, idx, w)
            order = received[-1]
            for _ in range(count):
                order, *others = operation(order, x, idx, w, received)
            return order, *others

        return on_mesh(mesh, body)

    both = on_mesh(mesh, lambda *arguments: backward(ep, *arguments, count=count))
    return [*map(repeat, (prepare, dispatch, combine, step)), both]


def time_program(program, arguments, count, waits=False):
    """Time of a program. It waits for each run, or for the last alone."""
    order, *others = arguments

    def run(count):
        nonlocal order
        for _ in range(count):
            order, *_ = results = program(order, *others)
            if waits:
                jax.block_until_ready(results)
        jax.block_until_ready(results)

    return fastest(run, count)


def time_calls(few, many, arguments):
    """Time of one call in a program."""
    times = [time_program(program, arguments, 100, waits=True) for program in (few, many)]
    return (times[1] - times[0]) / (MANY - FEW)


def print_program_times(ep, mesh, arguments):
    pairs = zip(programs_of(ep, mesh, FEW), programs_of(ep, mesh, MANY))
    print_row("a call in a program", (time_calls(*pair, arguments) for pair in pairs))
    step = on_mesh(mesh, lambda *arguments: forward(ep, *arguments))
    both = on_mesh(mesh, lambda *arguments: backward(ep, *arguments))
    empty = on_mesh(mesh, lambda order, x, idx, w: (order + 1, x + 1))
    empty_both = on_mesh(mesh, lambda order, x, idx, w: (order + 1, x[0, :1], x + 1, w + 1))
    rows = {"a program of one step": (step, both), "a program without libep": (empty, empty_both)}
    for name, programs in rows.items():
        times = (time_program(program, arguments, 1000) for program in programs)
        print_row(name, ("", "", "", *times))


def make_arguments(ep, mesh):
    """order, tokens, experts and weights, where programs expect them."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    idx = generator.integers(0, EXPERTS, (TOKENS, TOP_K)).astype(np.int32)
    w = generator.random((TOKENS, TOP_K)).astype(np.float32)
    place = NamedSharding(mesh, P("ep"))
    return [jax.device_put(array, place) for array in (ep.order(), x, idx, w)]


def make_arrays(ep, mesh, order, x, idx, w):
    """Arrays for the C functions: a step's, and memory for gradients."""

    def body(order, x, idx, w):
        recv, recv_w, plan, order = ep.dispatch(order, x, idx, w)
        out, order = ep.combine(order, recv, plan, recv_w)
        numbers = {name: getattr(plan, name) for name in ("bytes", *PLAN_NUMBERS)}
        return dict(numbers, recv=recv, recv_w=recv_w, out=out)

    made = on_mesh(mesh, body)(order, x, idx, w)
    made.update(x=x, idx=idx, w=w)
    made.update({f"grad_{name}": made[name] + 1 for name in ("x", "w", "recv", "recv_w")})
    return jax.block_until_ready(made)


def main():
    mesh = Mesh(np.array(jax.devices()[:1]), ("ep",))
    ep = libep.jax.bootstrap(
        mesh, "ep", num_experts=EXPERTS, max_tokens=TOKENS, hidden=HIDDEN, top_k=TOP_K
    )
    arguments = make_arguments(ep, mesh)
    print(f"# libep {libep.version()}, jax {jax.__version__}, {DEVICE}, 1 rank, {TOKENS} tokens")
    print_row("# us", COLUMNS)
    print_all_c_times(ep, make_arrays(ep, mesh, *arguments))
    print_program_times(ep, mesh, arguments)
    ep.check()
    ep.close()


if __name__ == "__main__":
    main()
