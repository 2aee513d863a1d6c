# SPDX-License-Identifier: Apache-2.0
"""What the tests share: devices, worlds, and a dense layer to compare with."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "../common")]

import base  # noqa: E402
from base import DEVICE, SECONDS, make_nodes  # noqa: E402

DEVICES, FLAGS = 8, ""
os.environ["JAX_PLATFORMS"] = DEVICE
if DEVICE == "cpu":
    # Most of the time goes to compiling, half of which LLVM needs for quick programs.
    fast = "--xla_backend_optimization_level=0"
    # XLA ends a process whose devices do not meet in time, as on a busy machine.
    patient = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    FLAGS = f"{fast} {patient} --xla_cpu_collective_timeout_seconds=600"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES} {FLAGS}"
else:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import libep.jax  # noqa: E402

# GPUs would multiply float32 with fewer bits: then a router may choose other experts than the
# dense one.
jax.config.update("jax_default_matmul_precision", "highest")

seed, nodes = base.seed, make_nodes("one_node", "two_nodes")
EXPERTS, TOKENS, HIDDEN, INNER, TOP_K = 8, 12, 16, 32, 3


def make_mesh(*sizes, names=("ep",)):
    """A mesh of the first devices. Skips the test if there are too few."""
    devices = np.array(jax.devices()[: int(np.prod(sizes))])
    if devices.size < np.prod(sizes):
        pytest.skip(f"needs {np.prod(sizes)} devices")
    return Mesh(devices.reshape(sizes), names)


@pytest.fixture
def bootstrap():
    """libep.jax.bootstrap with the sizes above; what it returns is closed after the test."""
    made = []

    def make(mesh, axis="ep", **fields):
        given = dict(num_experts=EXPERTS, max_tokens=TOKENS, hidden=HIDDEN, top_k=TOP_K)
        given["timeout_seconds"] = SECONDS
        made.append(libep.jax.bootstrap(mesh, axis, **{**given, **fields}))
        return made[-1]

    yield make
    for ep in made:
        ep.close()


def parameters(seed, layers=None, dtype=jnp.float32, is_whole=False):
    """A router and experts; is_whole: a shared expert and a first matrix, too. With `layers` so
    many of each layer's, stacked."""
    generator = np.random.default_rng(seed)
    lead = () if layers is None else (layers,)

    def make(*shape, scale):
        return jnp.asarray(generator.standard_normal(shape) * scale, dtype)

    wide, narrow = HIDDEN**-0.5, INNER**-0.5
    made = {
        "router": make(*lead, HIDDEN, EXPERTS, scale=1.0),
        "up": make(*lead, EXPERTS, HIDDEN, INNER, scale=wide),
        "down": make(*lead, EXPERTS, INNER, HIDDEN, scale=narrow),
    }
    if is_whole:
        made["first"] = make(HIDDEN, HIDDEN, scale=wide)
        made["shared_up"] = make(*lead, HIDDEN, INNER, scale=wide)
        made["shared_down"] = make(*lead, INNER, HIDDEN, scale=narrow)
    return made


def specs(layers=None):
    """How shard_map splits parameters: experts along "ep"."""
    lead = () if layers is None else (None,)
    return {"router": P(), "up": P(*lead, "ep"), "down": P(*lead, "ep")}


def tokens(seed, devices, dtype=jnp.float32):
    generator = np.random.default_rng(seed + 1000)
    return jnp.asarray(generator.standard_normal((devices * TOKENS, HIDDEN)), dtype)


def indices(devices):
    """Every token goes to the first experts."""
    return jnp.tile(jnp.arange(TOP_K, dtype=jnp.int32), (devices * TOKENS, 1))


def scores(x, router):
    return x.astype(jnp.float32) @ router.astype(jnp.float32)


def route(logits):
    """The weights and experts of tokens."""
    return jax.lax.top_k(jax.nn.softmax(logits), TOP_K)


def mlp(rows, sizes, weights):
    hidden = jax.nn.gelu(jax.lax.ragged_dot(rows, weights["up"], sizes))
    return jax.lax.ragged_dot(hidden, weights["down"], sizes)


def moe(ep, params, x, placement=None):
    """A Mixture-of-Experts layer with a residual connection, inside shard_map or outside."""
    weights, idx = route(scores(x, params["router"]))
    rows, row_weights, plan = ep.dispatch(x, idx, weights, placement=placement)
    experts = {name: params[name] for name in ("up", "down")}
    return x + ep.combine(ep.experts(mlp, rows, plan, experts, P(ep.axes)), plan, row_weights)


def dense(params, x):
    """The same layer on one device: every expert sees every token."""
    weights, idx = route(scores(x, params["router"]))
    gates = jnp.zeros((x.shape[0], EXPERTS), jnp.float32)
    gates = gates.at[jnp.arange(x.shape[0])[:, None], idx].add(weights)
    hidden = jax.nn.gelu(jnp.einsum("th,ehi->tei", x, params["up"]))
    rows = jnp.einsum("tei,eih->teh", hidden, params["down"])
    y = jnp.einsum("teh,te->th", rows.astype(jnp.float32), gates)
    return x + y.astype(x.dtype)


def on_mesh(mesh, body, in_specs=P("ep"), **options):
    """body on each device of a mesh."""
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P("ep"), **options)


def layer_on(mesh, body, layers=None, **options):
    """body(params, x) on each device of a mesh."""
    return on_mesh(mesh, body, (specs(layers), P("ep")), **options)


def value_and_grads(apply):
    """A loss whose gradient differs in every element, with the results, and the gradients."""

    def loss(params, x):
        y = apply(params, x).astype(jnp.float32)
        factors = jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return jnp.sum(y * factors), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def assert_close(got, expected, tolerance):
    """Compare two trees of arrays, relative to the largest element of each array."""
    for path, wanted in jax.tree_util.tree_leaves_with_path(expected):
        have = got
        for key in path:
            have = have[key.key if hasattr(key, "key") else key.idx]
        have, wanted = np.asarray(have, np.float64), np.asarray(wanted, np.float64)
        np.testing.assert_allclose(
            have, wanted, rtol=0, atol=tolerance * np.abs(wanted).max(), err_msg=str(path)
        )
