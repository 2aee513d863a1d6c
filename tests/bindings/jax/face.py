# SPDX-License-Identifier: Apache-2.0
"""The face of libep.jax for the common suite: a program over one device for each rank."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from conftest import SECONDS, make_mesh
from jax.sharding import PartitionSpec as P

import libep.jax

NAME = "jax"
LAYOUTS = ("expert_major",)
DTYPES = ("float32", "float16", "bfloat16")
SIZES = (1, 2, 3)
HAS_EXACT_SIZES = HAS_UNEVEN_EXPERTS = HAS_PLANS = False
PADS_ALWAYS = True
COUNTS_BACKWARD = HAS_CHECKPOINTS = True
NUMBERS = ("expert_counts", "expert_padded", "expert_offsets", "totals")


def padded(arrays, rows, fill):
    """The ranks' arrays with so many rows each, one behind the other."""
    full = np.full((len(arrays), rows, *arrays[0].shape[1:]), fill, arrays[0].dtype)
    for to, array in zip(full, arrays):
        to[: len(array)] = array
    return full.reshape(-1, *full.shape[2:])


def program(ep, case):
    """A step with its gradients, on each device."""

    def body(placement, x, w, idx, counts, scale, grad_out, *biases):
        sends = case.weights != "none"

        def layer(x, w, *biases):
            given = x, idx, w if sends else None, counts
            rows, row_w, plan = ep.dispatch(*given, placement=placement)
            if not sends:
                return ep.combine(rows, plan, bias=biases), (rows, row_w, plan)
            done = rows * scale[:, None].astype(rows.dtype)
            if case.weights == "experts":
                return ep.combine(done * row_w[:, None], plan), (rows, row_w, plan)
            return ep.combine(done, plan, row_w), (rows, row_w, plan)

        run = jax.checkpoint(layer) if case.checkpoint else layer
        out, pullback, (rows, row_w, plan) = jax.vjp(run, x, w, *biases, has_aux=True)
        numbers = {name: getattr(plan, name) for name in NUMBERS}
        grad_x, grad_w, *grads = pullback(grad_out)
        results = dict(recv=rows, out=out, grad_x=grad_x, **numbers)
        results.update({f"grad_bias{i}": grad for i, grad in enumerate(grads)})
        return dict(results, recv_w=row_w, grad_w=grad_w) if sends else results

    return body


def step(world, case, expected):
    """A step of all ranks. Returns for each rank what the suite compares."""
    mesh, most = make_mesh(world.size), world.max_tokens
    fields = dict(num_experts=world.experts, max_tokens=most, hidden=world.hidden)
    fields.update(top_k=world.top_k, timeout_seconds=SECONDS, dtype=case.dtype)
    fields.update(alignment=case.alignment, max_recv_rows=case.capacity, counters=case.is_counted)
    if case.choice:
        fields.update(choice=case.choice, num_physical=len(world.map))
    with libep.jax.bootstrap(mesh, "ep", masks=case.masks, **fields) as ep:
        scale = padded([e.scale for e in expected], case.capacity, np.nan)
        # What is behind a rank's tokens is an error, if it is read.
        x, w, grad = (padded(a, most, np.nan) for a in (world.x, world.weights, world.grad_out))
        idx = padded([a.astype(np.int32) for a in world.idx], most, world.experts + 1)
        counts, dtype = np.array(world.tokens, np.int32), case.dtype
        biases = [padded(bias, most, np.nan) for bias in world.biases[: case.biases]]
        x, grad, *biases = (jnp.asarray(rows, dtype) for rows in (x, grad, *biases))
        given = x, w, idx, counts, scale, grad, *biases
        specs = P(), *[P("ep")] * len(given)
        body = jax.shard_map(program(ep, case), mesh=mesh, in_specs=specs, out_specs=P("ep"))
        body = jax.jit(body)
        for left in reversed(range(case.steps if case.is_counted or case.choice else 1)):
            masked = {(rank - left) % world.size for rank in world.masked}  # others at first
            if case.masks:
                ep.mask([rank not in masked for rank in range(world.size)])
            placement = np.roll(world.map, left) if case.choice else None
            got = jax.block_until_ready(body(placement, *given))
        assert body._cache_size() == 1
        counters = list(ep.counters().values()) if case.is_counted else [()] * world.size
        dtypes = {got[name].dtype.name for name in ("out", "grad_x")}
        ep.check()
    halves = jnp.bfloat16, jnp.float16
    got = {k: np.asarray(a, np.float32 if a.dtype in halves else a.dtype) for k, a in got.items()}
    found = [of_rank(world, rank, got, dtypes) for rank in range(world.size)]
    return [dict(each, counters=added) for each, added in zip(found, counters)]


def of_rank(world, rank, got, dtypes):
    found = {name: np.split(array, world.size)[rank] for name, array in got.items()}
    for name in ("out", "grad_x", "grad_w", "grad_bias0", "grad_bias1"):
        if name in found:
            found[name], rest = np.split(found[name], [world.tokens[rank]])
            assert "bias" in name or not rest.any(), name
    return {"recv_w": None, "grad_w": None, **found, "dtypes": dtypes}


@contextlib.contextmanager
def dispatcher():
    """Dispatches on two devices, which have the same tokens. Refused while JAX traces."""
    mesh = make_mesh(2)
    fields = dict(num_experts=6, max_tokens=8, hidden=16, top_k=2, timeout_seconds=SECONDS)
    with libep.jax.bootstrap(mesh, "ep", **fields) as ep:

        def call(**arguments):
            def body():
                given = [jnp.asarray(a) if isinstance(a, (np.ndarray, np.generic)) else a
                         for a in arguments.values()]  # fmt: skip
                rows, row_w, plan = ep.dispatch(*given)
                return ep.combine(rows, plan, row_w)

            program = jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P("ep"))
            return np.asarray(jax.jit(program)())[: len(arguments["tokens"])]

        yield call
