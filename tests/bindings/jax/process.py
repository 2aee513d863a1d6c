# SPDX-License-Identifier: Apache-2.0
"""One of several processes, each with some of the devices. test_processes.py starts them.

python process.py ADDRESS PROCESSES NUMBER DEVICES
"""

import os
import re
import sys
import time

address, processes, number, devices = sys.argv[1], *map(int, sys.argv[2:])
flags = os.environ["XLA_FLAGS"]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices} {flags}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import libep.jax  # noqa: E402

TOKENS, HIDDEN, EXPERTS, TOP_K = 8, 16, 8, 2

jax.distributed.initialize(address, processes, number)
size = jax.device_count()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))


def place(array, mesh=mesh, spec=P("ep")):
    return jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, spec), lambda index: array[index]
    )


def compare(got, expected):
    for shard in got.addressable_shards:
        np.testing.assert_allclose(shard.data, expected[shard.index], rtol=1e-5)


generator = np.random.default_rng(0)
x = generator.standard_normal((size * TOKENS, HIDDEN)).astype(np.float32)
idx = np.argsort(generator.random((size * TOKENS, EXPERTS)))[:, :TOP_K].astype(np.int32)

SIZES = dict(num_experts=EXPERTS, max_tokens=TOKENS, hidden=HIDDEN, top_k=TOP_K,
             timeout_seconds=120)  # fmt: skip

# Each expert has two copies, one of them on the next device.
maps = [np.concatenate([held, np.roll(held, -EXPERTS // size)]) for held in
        (np.arange(EXPERTS, dtype=np.int32), np.arange(EXPERTS, dtype=np.int32)[::-1])]  # fmt: skip
PLACED = dict(SIZES, num_physical=2 * EXPERTS, masks=1)

with libep.jax.bootstrap(mesh, "ep", **PLACED) as ep:

    def body(x, idx, placement):
        """Each expert multiplies by its number plus one; two layers in a row."""

        def layer(x):
            rows, _, plan = ep.dispatch(x, idx, placement=placement)
            first = jax.lax.axis_index("ep") * ep.num_local_experts
            expert = jnp.searchsorted(
                plan.expert_offsets[1:], jnp.arange(ep.max_recv_rows), side="right"
            )
            return ep.combine(rows * (1.0 + placement[first + expert])[:, None], plan)

        return layer(layer(x))

    specs = P("ep"), P("ep"), P()
    program = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("ep"))
    factor = (1.0 + idx).sum(1, keepdims=True) ** 2

    # Programs in flight: nobody waits between them, and they need nothing of each other.
    forward, backward = jax.jit(program), jax.jit(jax.grad(lambda *a: jnp.sum(program(*a) ** 2)))
    programs = [(forward, factor * x), (backward, 2 * factor**2 * x)]
    started = [(run(place(x), place(idx), placement), wanted)
               for placement in 2 * maps for run, wanted in programs]  # fmt: skip
    for got, expected in started:
        compare(got, expected)
    living = np.arange(size) < size - 1
    ep.mask(living)  # the last device's experts have copies elsewhere
    compare(forward(place(x), place(idx), maps[0]), np.repeat(living, TOKENS)[:, None] * factor * x)
    ep.mask(np.ones(size))
    compare(forward(place(x), place(idx), maps[1]), factor * x)
    assert forward._cache_size() == 1
    ep.check()

# Outside shard_map, with groups that have devices of both processes. Shards of the experts lie on
# devices of one process.
line, mesh = mesh, jax.sharding.Mesh(mesh.devices.reshape(processes, devices), ("expert", "fsdp"))
TOKEN_AXES = ("fsdp", "expert")
factors = np.arange(1, EXPERTS * HIDDEN + 1, dtype=np.float32).reshape(EXPERTS, HIDDEN)
if devices > 1:
    with libep.jax.bootstrap(mesh, "expert", token_axes=TOKEN_AXES, **SIZES) as ep:
        assert ep.num_ranks == processes

        def scale(rows, sizes, factors):
            """Each expert multiplies a row by its factors."""
            expert = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))
            return rows * factors[expert]

        @jax.jit
        def loss(factors, x, idx):
            rows, _, plan = ep.dispatch(x, idx)
            rows = ep.experts(scale, rows, plan, factors, P("expert", "fsdp"))
            return jnp.sum(ep.combine(rows, plan) ** 2)

        specs = P("expert", "fsdp"), P(TOKEN_AXES), P(TOKEN_AXES)
        given = [place(array, mesh, spec) for array, spec in zip((factors, x, idx), specs)]
        got = jax.jit(jax.grad(loss))(*given)
        expected = np.zeros_like(factors)
        np.add.at(expected, idx, (2 * factors[idx].sum(1) * x * x)[:, None])
        assert got.sharding.is_equivalent_to(given[0].sharding, 2)
        compare(got, expected)
        ep.check()

# Processes that call other programs: an error on each, and nobody waits for the deadline.
with libep.jax.bootstrap(line, "ep", **SIZES) as ep:

    def on_line(body):
        return jax.jit(jax.shard_map(body, mesh=line, in_specs=P("ep"), out_specs=P("ep")))

    given = place(x, line), place(idx, line)
    rows, _, plan = on_line(ep.dispatch)(*given)
    jax.block_until_ready(rows)
    begin = time.monotonic()
    try:
        again = on_line(ep.dispatch)(*given) if number == 0 else on_line(ep.combine)(rows, plan)
        jax.block_until_ready(again)
    except jax.errors.JaxRuntimeError as error:
        assert re.search("EP_ERR_ORDER|EP_ERR_PEER|EP_ERR_ABORTED", str(error)), error
        assert time.monotonic() - begin < SIZES["timeout_seconds"] / 2
    else:
        raise AssertionError("processes ran different programs, and none of them failed")
print(f"process {number}: {len(jax.local_devices())} of {size} devices")
jax.distributed.shutdown()
