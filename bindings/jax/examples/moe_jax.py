# SPDX-License-Identifier: Apache-2.0
"""A small Mixture-of-Experts model that trains on CPU devices: python moe_jax.py [DEVICES]"""

import functools
import os
import sys

DEVICES = int(sys.argv[1]) if len(sys.argv) > 1 else 4
FLAGS = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from libep.jax import bootstrap, moe, moe_parameters  # noqa: E402

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K, LAYERS, STEPS, RATE = 64, 32, 64, 8, 2, 2, 60, 0.1
mesh = jax.make_mesh((DEVICES,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
sizes = dict(num_experts=EXPERTS, max_tokens=TOKENS, hidden=HIDDEN, top_k=TOP_K)
with bootstrap(mesh, "ep", **sizes) as ep:
    *keys, key = jax.random.split(jax.random.key(0), LAYERS + 1)
    params = [moe_parameters(key, ep, HIDDEN, INNER, shared=INNER) for key in keys]
    x = jax.random.normal(key, (DEVICES * TOKENS, HIDDEN))
    keep = jax.checkpoint_policies.save_only_these_names("libep_dispatch")
    layer = jax.checkpoint(functools.partial(moe, ep), policy=keep)

    @jax.jit
    def step(params):
        def loss(params):
            y = functools.reduce(lambda y, of_layer: y + layer(of_layer, y), params, x)
            return jnp.mean((y - jnp.sin(2 * x)) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - RATE * g, params, grads)

    for number in range(STEPS):
        value, params = step(params)
        if number % 20 in (0, 19):
            print(f"step {number:3}: loss {value:.4f}")
    ep.check()
