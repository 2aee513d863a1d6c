# SPDX-License-Identifier: Apache-2.0
"""Calls of libep.jax, and a layer beside ragged_all_to_all: see overhead.py.

What a call takes in a compiled program is the difference between a program with many calls and one
with few, over the number of calls. XLA runs programs one after the other. On GPUs the time of a
program is that of the host or of the GPU, whichever takes longer, and XLA may put calls into
command buffers. XLA_FLAGS=--xla_gpu_enable_command_buffer= keeps it from that.

The layer runs on all devices of this process, if there are several. The time is that of a step, of
steps enqueued back to back. Results that are compared are the output and all gradients, with
experts and without; the difference is relative to an array's largest element. On CPUs
(XLA_FLAGS=--xla_force_host_platform_device_count=N) the layer is small, to try the script: XLA has
no ragged_all_to_all there, so the plain one gathers all rows.

The experts multiply in a loop over the experts. XLA may make jax.lax.ragged_dot a product of all
rows and all experts, and the more so its gradient: then an operand of the layer has 60 GB.
"""

from __future__ import annotations

import ctypes
import functools
import os

from overhead import ALIGNMENT, CALL, DEVICE, ENTRIES, LAYER, ROWS, fastest, print_row

os.environ["JAX_PLATFORMS"] = DEVICE
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import libep.jax  # noqa: E402
from libep._handle import PlanTensors  # noqa: E402
from libep._library import check, library  # noqa: E402
from libep.jax._operations import _vary_alike  # noqa: E402

TOKENS, HIDDEN, _, TOP_K, EXPERTS = CALL
FEW, MANY = 10, 110  # calls in a program
PLAN_NUMBERS = ("expert_counts", "expert_padded", "expert_offsets", "totals")
COLUMNS = ("prepare", "dispatch", "combine", "step", "with backward")


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

        return fastest(run, 2000, synchronize)

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
    """A program of body(x, idx, w), which uses all of these and returns arrays, tokens first."""
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    return jax.jit(mapped, keep_unused=True)


def forward(ep, x, idx, w):
    recv, recv_w, plan = ep.dispatch(x, idx, w)
    return ep.combine(recv, plan, recv_w)


def backward(ep, x, idx, w, count=1):
    """Gradients of `count` steps, one after the other."""

    def loss(x, w):
        for _ in range(count):
            x = forward(ep, x, idx, w)
        return jnp.sum(x)

    value, grads = jax.value_and_grad(loss, (0, 1))(x, w)
    return *grads, value[None]


def programs_of(ep, mesh, count):
    """For each column a program with so many calls of it, after one dispatch."""
    operations = ep._operations

    def prepare(x, idx, w, received):
        operands = _vary_alike(operations.axes, idx, operations._place())
        return operations._bind("prepare", *operands, outputs=operations._plan_types())

    def dispatch(x, idx, w, received):
        recv, recv_w, plan = received
        outputs = [(array.shape, array.dtype.name) for array in (recv, recv_w)]
        return operations._bind("dispatch", plan.bytes, x, w, outputs=outputs)

    def combine(x, idx, w, received):
        recv, recv_w, plan = received
        return [ep.combine(recv, plan, recv_w)]

    def step(x, idx, w, received):
        return [forward(ep, x, idx, w)]

    def repeat(operation):
        def body(x, idx, w):
            received = ep.dispatch(x, idx, w)
            for _ in range(count):
                results = operation(x, idx, w, received)
            return x + 1, *results

        return on_mesh(mesh, body)

    both = on_mesh(mesh, lambda *arguments: backward(ep, *arguments, count=count))
    return [*map(repeat, (prepare, dispatch, combine, step)), both]


def time_program(program, arguments, count, waits=False):
    """Time of a program. It waits for each run, or for the last alone."""
    x, *others = arguments

    def run(count):
        tokens = x
        for _ in range(count):
            tokens, *_ = results = program(tokens, *others)
            if waits:
                jax.block_until_ready(results)
        jax.block_until_ready(results)

    return fastest(run, count, synchronize)


def time_calls(few, many, arguments):
    """Time of one call in a program."""
    times = [time_program(program, arguments, 100, waits=True) for program in (few, many)]
    return (times[1] - times[0]) / (MANY - FEW)


def print_program_times(ep, mesh, arguments):
    pairs = zip(programs_of(ep, mesh, FEW), programs_of(ep, mesh, MANY))
    print_row("a call in a program", (time_calls(*pair, arguments) for pair in pairs))
    step, both = (lambda *a: (forward(ep, *a),)), functools.partial(backward, ep)
    empty = lambda x, idx, w: (x + 1,)  # noqa: E731
    empty_both = lambda x, idx, w: (x + 1, w + 1, x[0, :1])  # noqa: E731
    rows = {
        "a program of one step": [on_mesh(mesh, body) for body in (step, both)],
        "a program without libep": [on_mesh(mesh, body) for body in (empty, empty_both)],
    }
    for name, programs in rows.items():
        times = (time_program(program, arguments, 1000) for program in programs)
        print_row(name, ("", "", "", *times))


def make_arguments(ep, mesh):
    """Tokens, experts and weights, where programs expect them."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    idx = generator.integers(0, EXPERTS, (TOKENS, TOP_K)).astype(np.int32)
    w = generator.random((TOKENS, TOP_K)).astype(np.float32)
    place = NamedSharding(mesh, P("ep"))
    return [jax.device_put(array, place) for array in (x, idx, w)]


def make_arrays(ep, mesh, x, idx, w):
    """Arrays for the C functions: a step's, and memory for gradients."""

    def body(x, idx, w):
        recv, recv_w, plan = ep.dispatch(x, idx, w)
        out = ep.combine(recv, plan, recv_w)
        numbers = {name: getattr(plan, name) for name in ("bytes", *PLAN_NUMBERS)}
        return dict(numbers, recv=recv, recv_w=recv_w, out=out)

    made = on_mesh(mesh, body)(x, idx, w)
    made.update(x=x, idx=idx, w=w)
    made.update({f"grad_{name}": made[name] + 1 for name in ("x", "w", "recv", "recv_w")})
    return jax.block_until_ready(made)


# ---- a layer -----------------------------------------------------------------------------------


def masked_rows(most, rows, start, size):
    """Rows from `start`, `most` of them, zero behind `size`."""
    part = jax.lax.dynamic_slice_in_dim(rows, start, most)
    return jnp.where(jnp.arange(most)[:, None] < size, part, 0)


def products(most, rows, weights, sizes, transpose=False):
    """Each expert's rows by its weights, expert after expert."""

    def multiply(out, expert):
        weight, start, size = expert
        part = masked_rows(most, rows, start, size) @ (weight.T if transpose else weight)
        # The next expert overwrites the rows behind `size`.
        return jax.lax.dynamic_update_slice_in_dim(out, part, start, 0), None

    zeros = jnp.zeros((len(rows), weights.shape[1 if transpose else 2]), rows.dtype)
    zeros = jax.lax.pcast(zeros, "ep", to="varying")
    return jax.lax.scan(multiply, zeros, (weights, jnp.cumsum(sizes) - sizes, sizes))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def loop_dot(most, rows, weights, sizes):
    """What jax.lax.ragged_dot computes. No expert has more than `most` rows."""
    return products(most, rows, weights, sizes)


def loop_dot_backward(most, kept, grad):
    rows, weights, sizes = kept

    def weight_gradient(_, place):
        return None, masked_rows(most, rows, *place).T @ masked_rows(most, grad, *place)

    grad_rows = products(most, grad, weights, sizes, transpose=True)
    grad_weights = jax.lax.scan(weight_gradient, None, (jnp.cumsum(sizes) - sizes, sizes))[1]
    return grad_rows, grad_weights, None


loop_dot.defvjp(lambda most, *operands: (loop_dot(most, *operands), operands), loop_dot_backward)


def mlp_of(most):
    """Experts of no more than `most` rows each."""
    dot = functools.partial(loop_dot, most)
    return lambda rows, sizes, up, down: dot(jax.nn.gelu(dot(rows, up, sizes)), down, sizes)


def no_experts(rows, sizes):
    return rows


def libep_layer(ep, experts, idx, x, w, *weights):
    rows, row_w, plan = ep.dispatch(x, idx, w)
    rows = experts(rows, plan.expert_padded, *weights)
    return ep.combine(rows, plan, row_w)


# ---- a layer without libep


def emulated_all_to_all(rows, out, input_offsets, send_sizes, output_offsets, sizes, *, axis_name):
    """jax.lax.ragged_all_to_all, which XLA does not have on CPUs."""
    sources = jax.lax.all_gather(rows, axis_name)
    offsets = jnp.stack([input_offsets, output_offsets], 1)
    offsets = jax.lax.all_to_all(offsets, axis_name, 0, 0, tiled=True)
    for source, (first, place), size in zip(sources, offsets, sizes):
        number = jnp.arange(len(out)) - place
        is_sent = (0 <= number) & (number < size)
        out = jnp.where(is_sent[:, None], source[jnp.where(is_sent, first + number, 0)], out)
    return out


all_to_all = emulated_all_to_all if DEVICE == "cpu" else jax.lax.ragged_all_to_all


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def exchange(lengths, rows, there, back):
    """Rows to other devices: `lengths` are those of the operand and the result."""
    out = jax.lax.pcast(jnp.zeros((lengths[1], rows.shape[1]), rows.dtype), "ep", to="varying")
    return all_to_all(rows, out, *there, axis_name="ep")


exchange.defvjp(
    lambda lengths, rows, there, back: (exchange(lengths, rows, there, back), (there, back)),
    lambda lengths, kept, grad: (exchange(lengths[::-1], grad, *kept[::-1]), None, None),
)


def exchange_places(counts):
    """Offsets and sizes of an exchange, and of the one back. counts: [from, to] rows."""
    me = jax.lax.axis_index("ep")
    at_source = jnp.cumsum(counts, 1) - counts
    at_target = jnp.cumsum(counts, 0) - counts
    there = at_source[me], counts[me], at_target[me], counts[:, me]
    back = at_target[:, me], counts[:, me], at_source[:, me], counts[me]
    return there, back


def inverse(permutation):
    """The permutation that undoes another."""
    places = jnp.arange(len(permutation), dtype=permutation.dtype)
    return jnp.zeros_like(permutation).at[permutation].set(places, unique_indices=True)


@jax.custom_vjp
def permute(rows, permutation, back):
    """`back` is the inverse, so that the gradient is a gather, too."""
    return rows[permutation]


permute.defvjp(
    lambda rows, permutation, back: (rows[permutation], (permutation, back)),
    lambda kept, grad: (grad[kept[1]], None, None),
)


@jax.custom_vjp
def spread(x, permutation, back):
    """A row for each entry, permuted."""
    return x[permutation // LAYER.top_k]


spread.defvjp(
    lambda x, permutation, back: (spread(x, permutation, back), back),
    lambda back, grad: (grad[back].reshape(-1, LAYER.top_k, grad.shape[1]).sum(1), None, None),
)


def by_local_expert(counts):
    """The permutation that sorts received rows by expert. counts: [device, expert] rows."""
    numbers = jnp.tile(jnp.arange(LAYER.experts), len(counts))
    numbers = jnp.append(numbers, LAYER.experts)  # the rows behind
    counts = jnp.append(counts.flatten(), ROWS - counts.sum())
    return jnp.argsort(jnp.repeat(numbers, counts, total_repeat_length=ROWS))


def plain_layer(experts, idx, x, w, *weights):
    """A layer without libep: sort, count, exchange, sort again."""
    devices = jax.lax.axis_size("ep")
    by_expert = jnp.argsort(idx.flatten())
    from_expert = inverse(by_expert)
    sent = jnp.bincount(idx.flatten(), length=devices * LAYER.experts)
    counts = jax.lax.all_gather(sent, "ep").reshape(devices, devices, LAYER.experts)
    there, back = exchange_places(counts.sum(2))
    rows = spread(x, by_expert, from_expert)
    rows = exchange((ENTRIES, ROWS), rows, there, back)
    received = counts[:, jax.lax.axis_index("ep")]
    by_local = by_local_expert(received)
    from_local = inverse(by_local)
    rows = permute(rows, by_local, from_local)
    rows = experts(rows, received.sum(0), *weights)
    rows = permute(rows, from_local, by_local)
    rows = exchange((ROWS, ENTRIES), rows, back, there)
    rows = permute(rows, from_expert, by_expert).reshape(*w.shape, -1)
    return (rows.astype(w.dtype) * w[:, :, None]).sum(1).astype(x.dtype)


# ---- times of both


def layer_programs(mesh, layer, experts):
    """A layer forward, and with the gradients of tokens and weights.

    Both take the gradient of the result, then idx, x, w and the experts' weights.
    """
    layer = functools.partial(layer, experts)

    def forward(grad, idx, *arguments):
        return layer(idx, *arguments)

    def both(grad, idx, *arguments):
        out, pullback = jax.vjp(functools.partial(layer, idx), *arguments)
        return out, *pullback(grad)

    return on_mesh(mesh, forward), on_mesh(mesh, both)


def layer_arguments(mesh):
    """What layer_programs take, on all devices, and the most rows of an expert."""
    place = NamedSharding(mesh, P("ep"))
    experts = mesh.size * LAYER.experts
    scores = np.random.default_rng(0).random((mesh.size * LAYER.tokens, experts), np.float32)
    idx = np.argpartition(scores, LAYER.top_k)[:, : LAYER.top_k].astype(np.int32)
    most = -(-np.bincount(idx.flatten()).max() // ALIGNMENT) * ALIGNMENT

    @functools.partial(jax.jit, out_shardings=place)
    def make(key):
        keys = jax.random.split(key, 5)
        normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
        grad, x = (normal(key, (len(idx), LAYER.hidden)) for key in keys[:2])
        up = normal(keys[2], (experts, LAYER.hidden, LAYER.inner)) * 0.01
        down = normal(keys[3], (experts, LAYER.inner, LAYER.hidden)) * 0.01
        return grad, x, jax.random.uniform(keys[4], idx.shape), up, down

    grad, *others = make(jax.random.key(0))
    return [grad, jax.device_put(idx, place), *others], int(most)


@jax.jit
def difference(results, expected):
    """The largest difference, relative to the largest element of each array."""

    def compare(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.abs(a - b).max() / jnp.abs(b).max()

    return jnp.stack([compare(*pair) for pair in zip(results, expected)]).max()


def time_step(step):
    """Time of one step of several, which do not wait for each other."""

    def run(count):
        for _ in range(count):
            results = step()
        jax.block_until_ready(results)

    return fastest(run, 5, synchronize)


def print_layer_times():
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    sizes = dict(num_experts=mesh.size * LAYER.experts, max_tokens=LAYER.tokens)
    sizes.update(hidden=LAYER.hidden, top_k=LAYER.top_k, max_recv_rows=ROWS, alignment=ALIGNMENT)
    ep = libep.jax.bootstrap(mesh, "ep", dtype=jnp.bfloat16, **sizes)
    arguments, most = layer_arguments(mesh)
    with_libep = functools.partial(libep_layer, ep)
    mlp = mlp_of(most), arguments
    nothing = no_experts, arguments[:-2]
    rows = {
        "libep.jax": (with_libep, *mlp),
        "ragged_all_to_all and sorts": (plain_layer, *mlp),
        "libep.jax, without experts": (with_libep, *nothing),
        "ragged_all_to_all, without experts": (plain_layer, *nothing),
    }
    steps = {}
    for name, (layer, experts, given) in rows.items():
        programs = layer_programs(mesh, layer, experts)
        steps[name] = [functools.partial(program, *given) for program in programs]
    both = [step for _, step in steps.values()]
    differences = [difference(one(), other()) for one, other in zip(both[::2], both[1::2])]
    print(f"# a layer on {mesh.size} devices; results differ by {np.max(differences):.1e} at most")
    print_row("# us per step", ("forward", "with bwd."))
    for name, pair in steps.items():
        print_row(name, [f"{time_step(step):.0f}" for step in pair])
    ep.check()
    ep.close()


def main():
    mesh = Mesh(np.array(jax.devices()[:1]), ("ep",))
    sizes = dict(num_experts=EXPERTS, max_tokens=TOKENS, hidden=HIDDEN, top_k=TOP_K)
    ep = libep.jax.bootstrap(mesh, "ep", **sizes)
    arguments = make_arguments(ep, mesh)
    print(f"# libep {libep.version()}, jax {jax.__version__}, {DEVICE}, 1 rank, {TOKENS} tokens")
    print_row("# us", COLUMNS)
    print_all_c_times(ep, make_arrays(ep, mesh, *arguments))
    print_program_times(ep, mesh, arguments)
    ep.check()
    ep.close()
    if jax.device_count() > 1:
        print_layer_times()
