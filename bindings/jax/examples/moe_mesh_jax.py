# SPDX-License-Identifier: Apache-2.0
"""Train a Mixture-of-Experts model on a mesh with libep.jax, without shard_map, on CPU devices.

    python moe_mesh_jax.py [MESH] [--fp8]          MESH: data=2,fsdp=2,expert=2

Tokens are split over all axes, experts over "expert". Experts and dense weights are stored in
shards over "fsdp", too, and gathered for use: experts over "fsdp" alone, as fp8 with --fp8.
"""

import functools
import math
import os
import sys

FP8 = "--fp8" in sys.argv
MESH = next((word for word in sys.argv[1:] if "=" in word), "data=2,fsdp=2,expert=2")
AXES = {name: int(size) for name, size in (part.split("=") for part in MESH.split(","))}
DEVICES = math.prod(AXES.values())
FLAGS = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import libep.jax  # noqa: E402

LAYERS, EXPERTS, TOP_K, TOKENS, HIDDEN, INNER = 3, 8, 2, 64, 32, 64
STEPS, RATE = 21, 0.3

mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(*AXES.values()), tuple(AXES))
FSDP = "fsdp" if "fsdp" in AXES else None
DENSE = tuple(name for name in ("fsdp", "expert") if name in AXES)

# How a layer's parameters are stored. The first dimension of experts is split by "expert".
EXPERT_SPECS = {"up": P("expert", FSDP, None), "down": P("expert", FSDP, None)}
SPECS = {
    "router": P(),
    "shared_up": P(DENSE, None),
    "shared_down": P(DENSE, None),
    **EXPERT_SPECS,
}


def make_parameters(key):
    shapes = {
        "router": (HIDDEN, EXPERTS),
        "shared_up": (HIDDEN, INNER),
        "shared_down": (INNER, HIDDEN),
        "up": (EXPERTS, HIDDEN, INNER),
        "down": (EXPERTS, INNER, HIDDEN),
    }
    return {
        name: jax.device_put(
            jax.random.normal(jax.random.fold_in(key, i), (LAYERS, *shape)) * shape[-2] ** -0.5,
            NamedSharding(mesh, P(None, *SPECS[name])),
        )
        for i, (name, shape) in enumerate(shapes.items())
    }


def route(scores):
    return jax.lax.top_k(jax.nn.softmax(scores), TOP_K)


def mlp(rows, group_sizes, weights):
    """The experts of one device, on the rows that it received."""
    rows = jax.nn.gelu(jax.lax.ragged_dot(rows, weights["up"], group_sizes))
    return jax.lax.ragged_dot(rows, weights["down"], group_sizes)


def whole(weight):
    """A dense weight for use, gathered by XLA."""
    return jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, P()))


def moe_layer(ep, params, x):
    weights, idx = ep.per_device(route, x @ params["router"])
    rows, row_weights, plan = ep.dispatch(x, idx, weights)
    experts = {name: params[name] for name in EXPERT_SPECS}
    rows = ep.experts(mlp, rows, plan, experts, EXPERT_SPECS, quantise=FP8)
    y = ep.combine(rows, plan, row_weights)
    shared = jax.nn.gelu(x @ whole(params["shared_up"])) @ whole(params["shared_down"])
    return x + y + shared


def forward(ep, params, x):
    layer = jax.checkpoint(functools.partial(moe_layer, ep), prevent_cse=False)
    return jax.lax.scan(lambda x, layer_params: (layer(layer_params, x), None), x, params)[0]


def make_step(ep):
    def loss(params, x, target):
        return jnp.mean((forward(ep, params, x) - target) ** 2)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params, x, target):
        value, grads = jax.value_and_grad(loss)(params, x, target)
        return value, jax.tree.map(lambda p, g: p - RATE * g, params, grads)

    return step


def main():
    key = jax.random.key(0)
    params = make_parameters(key)
    x = jax.random.normal(jax.random.fold_in(key, 100), (DEVICES * TOKENS, HIDDEN))
    x = jax.device_put(x, NamedSharding(mesh, P(tuple(AXES), None)))
    target = jnp.sin(2 * x)
    with libep.jax.bootstrap(
        mesh, "expert", num_experts=EXPERTS, max_tokens=TOKENS, hidden=HIDDEN, top_k=TOP_K
    ) as ep:
        step = make_step(ep)
        for number in range(STEPS):
            value, params = step(params, x, target)
            if number % 5 == 0:
                print(f"step {number:3}: loss {value:.4f}")
        ep.check()


main()
