# SPDX-License-Identifier: Apache-2.0
"""One of several processes, each with some of the devices. test_processes.py starts them.

python process.py ADDRESS PROCESSES NUMBER DEVICES
"""

import os
import sys

address, processes, number, devices = sys.argv[1], *map(int, sys.argv[2:])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
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


generator = np.random.default_rng(0)
x = generator.standard_normal((size * TOKENS, HIDDEN)).astype(np.float32)
idx = np.argsort(generator.random((size * TOKENS, EXPERTS)))[:, :TOP_K].astype(np.int32)

SIZES = dict(num_experts=EXPERTS, max_tokens=TOKENS, hidden=HIDDEN, top_k=TOP_K, timeout_seconds=30)

with libep.jax.bootstrap(mesh, "ep", **SIZES) as ep:

    def body(x, idx):
        """Each expert multiplies by its number plus one; two layers in a row."""

        def layer(x, order):
            rows, _, plan, order = ep.dispatch(order, x, idx)
            first = jax.lax.axis_index("ep") * ep.num_local_experts
            expert = jnp.searchsorted(
                plan.expert_offsets[1:], jnp.arange(ep.max_recv_rows), side="right"
            )
            return ep.combine(order, rows * (1.0 + first + expert)[:, None], plan)

        y, order = layer(x, ep.order())
        return layer(y, order)[0]

    program = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    factor = (1.0 + idx).sum(1, keepdims=True) ** 2

    y = jax.jit(program)(place(x), place(idx))
    grad = jax.jit(jax.grad(lambda x, idx: jnp.sum(program(x, idx) ** 2)))(place(x), place(idx))
    for got, expected in [(y, factor * x), (grad, 2 * factor**2 * x)]:
        for shard in got.addressable_shards:
            np.testing.assert_allclose(shard.data, expected[shard.index], rtol=1e-5)
    ep.check()

# Outside shard_map, with groups that have devices of both processes. Shards of the experts lie on
# devices of one process.
mesh = jax.sharding.Mesh(mesh.devices.reshape(processes, devices), ("expert", "fsdp"))
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
            rows, _, plan, order = ep.dispatch(ep.order(), x, idx)
            rows = ep.experts(scale, rows, plan, factors, P("expert", "fsdp"))
            return jnp.sum(ep.combine(order, rows, plan)[0] ** 2)

        split = P(TOKEN_AXES)
        given = (
            place(factors, mesh, P("expert", "fsdp")),
            place(x, mesh, split),
            place(idx, mesh, split),
        )
        got = jax.jit(jax.grad(loss))(*given)
        expected = np.zeros_like(factors)
        np.add.at(expected, idx, (2 * factors[idx].sum(1) * x * x)[:, None])
        assert got.sharding.is_equivalent_to(given[0].sharding, 2)
        for shard in got.addressable_shards:
            np.testing.assert_allclose(shard.data, expected[shard.index], rtol=1e-5)
        ep.check()
print(f"process {number}: {len(jax.local_devices())} of {size} devices")
jax.distributed.shutdown()
