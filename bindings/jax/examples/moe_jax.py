# SPDX-License-Identifier: Apache-2.0
"""Train a small Mixture-of-Experts model with libep.jax on CPU devices.

    python moe_jax.py [DEVICES]

Tokens and experts are split over the devices, four layers run under lax.scan, and each layer is
rematerialised (jax.checkpoint) in backward. The model learns to reproduce a random function.
"""

import functools
import os
import sys

DEVICES = int(sys.argv[1]) if len(sys.argv) > 1 else 4
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import libep.jax  # noqa: E402

LAYERS, EXPERTS, TOP_K, TOKENS, HIDDEN, INNER = 4, 8, 2, 64, 32, 64
STEPS, RATE = 60, 0.02

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ep",))
SPECS = {"router": P(), "up": P(None, "ep"), "down": P(None, "ep")}


def make_parameters(key):
    keys = jax.random.split(key, 3)
    return {
        "router": jax.random.normal(keys[0], (LAYERS, HIDDEN, EXPERTS)) * HIDDEN**-0.5,
        "up": jax.random.normal(keys[1], (LAYERS, EXPERTS, HIDDEN, INNER)) * HIDDEN**-0.5,
        "down": jax.random.normal(keys[2], (LAYERS, EXPERTS, INNER, HIDDEN)) * INNER**-0.5,
    }


def moe_layer(ep, params, x):
    """One layer. What crosses devices are the rows of dispatch and combine."""
    weights, idx = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), TOP_K)
    rows, row_weights, plan = ep.dispatch(x, idx, weights)
    rows = jax.nn.gelu(jax.lax.ragged_dot(rows, params["up"], plan.expert_padded))
    rows = jax.lax.ragged_dot(rows, params["down"], plan.expert_padded)
    y = ep.combine(rows, plan, row_weights)
    return x + y


def forward(ep, params, x):
    """All layers, on each device's own tokens."""
    layer = jax.checkpoint(functools.partial(moe_layer, ep), prevent_cse=False)
    return jax.lax.scan(lambda x, layer_params: (layer(layer_params, x), None), x, params)[0]


def make_step(ep):
    model = jax.shard_map(
        functools.partial(forward, ep), mesh=mesh, in_specs=(SPECS, P("ep")), out_specs=P("ep")
    )

    def loss(params, x, target):
        return jnp.mean((model(params, x) - target) ** 2)

    @jax.jit
    def step(params, x, target):
        value, grads = jax.value_and_grad(loss)(params, x, target)
        return value, jax.tree.map(lambda p, g: p - RATE * np.sqrt(HIDDEN) * g, params, grads)

    return step


def main():
    key = jax.random.key(0)
    params = make_parameters(key)
    x = jax.random.normal(jax.random.fold_in(key, 1), (DEVICES * TOKENS, HIDDEN))
    target = jnp.sin(2 * x)
    with libep.jax.bootstrap(
        mesh, "ep", num_experts=EXPERTS, max_tokens=TOKENS, hidden=HIDDEN, top_k=TOP_K
    ) as ep:
        step = make_step(ep)
        for number in range(STEPS):
            value, params = step(params, x, target)
            if number % 20 == 0 or number == STEPS - 1:
                print(f"step {number:3}: loss {value:.4f}")
        ep.check()


main()
