# SPDX-License-Identifier: Apache-2.0
"""A small model outside shard_map, sharded over a mesh, and the same model on one device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from conftest import EXPERTS, HIDDEN, INNER, TOKENS, TOP_K, make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from libep.jax._weights import dequantise, quantise


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and how the experts' weights are sharded over it."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    up: P
    down: P
    fp8: bool = False

    @property
    def mesh(self):
        return make_mesh(*self.sizes, names=self.names)

    @property
    def devices(self):
        return int(np.prod(self.sizes))

    @property
    def experts(self):
        return {"up": self.up, "down": self.down}

    def specs(self, layers=None):
        lead = () if layers is None else (None,)
        dense = tuple(name for name in ("fsdp", "expert") if name in self.names)
        return {
            "first": P(dense, None),
            "router": P(),
            "shared_up": P(*lead, dense, None),
            "shared_down": P(*lead, dense, None),
            **{name: P(*lead, *spec) for name, spec in self.experts.items()},
        }

    def place(self, params, x, layers=None):
        """Parameters and tokens on the devices."""
        tokens = NamedSharding(self.mesh, P(self.names, None))
        specs = self.specs(layers)
        placed = {
            k: jax.device_put(v, NamedSharding(self.mesh, specs[k])) for k, v in params.items()
        }
        return placed, jax.device_put(x, tokens)


LAYOUTS = {
    "expert": Layout(("expert",), (4,), P("expert"), P("expert")),
    "fsdp-expert": Layout(
        ("fsdp", "expert"), (2, 2), P("expert", "fsdp", None), P("expert", None, "fsdp")
    ),
    "data-fsdp-expert": Layout(
        ("data", "fsdp", "expert"), (2, 2, 2), P("expert", "fsdp", None), P("expert", "fsdp")
    ),
    "compound": Layout(
        ("data", "fsdp", "expert"), (2, 2, 2), P(("expert", "fsdp")), P(("expert", "fsdp"))
    ),
    "fp8": Layout(
        ("data", "fsdp", "expert"), (2, 2, 2), P("expert", "fsdp"), P(("expert", "fsdp")), True
    ),
}


def parameters(seed, layers=None, dtype=jnp.float32):
    generator = np.random.default_rng(seed)
    lead = () if layers is None else (layers,)

    def make(*shape, scale):
        return jnp.asarray(generator.standard_normal(shape) * scale, dtype)

    return {
        "first": make(HIDDEN, HIDDEN, scale=HIDDEN**-0.5),
        "router": make(*lead, HIDDEN, EXPERTS, scale=1.0),
        "shared_up": make(*lead, HIDDEN, INNER, scale=HIDDEN**-0.5),
        "shared_down": make(*lead, INNER, HIDDEN, scale=INNER**-0.5),
        "up": make(*lead, EXPERTS, HIDDEN, INNER, scale=HIDDEN**-0.5),
        "down": make(*lead, EXPERTS, INNER, HIDDEN, scale=INNER**-0.5),
    }


def tokens(seed, layout, dtype=jnp.float32):
    generator = np.random.default_rng(seed + 1000)
    return jnp.asarray(generator.standard_normal((layout.devices * TOKENS, HIDDEN)), dtype)


def scores(x, router):
    return x.astype(jnp.float32) @ router.astype(jnp.float32)


def route(logits):
    return jax.lax.top_k(jax.nn.softmax(logits), TOP_K)


def mlp(rows, sizes, weights):
    hidden = jax.nn.gelu(jax.lax.ragged_dot(rows, weights["up"], sizes))
    return jax.lax.ragged_dot(hidden, weights["down"], sizes)


def layer(ep, layout, params, x):
    """A layer with a shared expert and a residual connection, outside shard_map."""

    def whole(weight):
        return jax.lax.with_sharding_constraint(weight, NamedSharding(layout.mesh, P()))

    weights, idx = ep.per_device(route, scores(x, params["router"]))
    rows, row_weights, plan = ep.dispatch(x, idx, weights)
    experts = {name: params[name] for name in layout.experts}
    rows = ep.experts(mlp, rows, plan, experts, layout.experts, quantise=layout.fp8)
    y = ep.combine(rows, plan, row_weights)
    shared = jax.nn.gelu(x @ whole(params["shared_up"])) @ whole(params["shared_down"])
    return x + y + shared


def model(ep, layout, params, x):
    """A matrix and one layer."""
    whole = jax.lax.with_sharding_constraint(params["first"], NamedSharding(layout.mesh, P()))
    return layer(ep, layout, params, x @ whole)


def stack(ep, layout, params, x):
    """A matrix and all layers of stacked parameters, under scan and checkpoint."""
    whole = jax.lax.with_sharding_constraint(params["first"], NamedSharding(layout.mesh, P()))
    repeated = jax.checkpoint(lambda x, params: layer(ep, layout, params, x), prevent_cse=False)
    layers = {name: value for name, value in params.items() if name != "first"}
    return jax.lax.scan(lambda x, p: (repeated(x, p), None), x @ whole, layers)[0]


def rounded_to_fp8(weight):
    """The weight after quantising; the gradient is that of the weight itself."""
    rounded = dequantise(*quantise(weight), weight.dtype)
    return weight + jax.lax.stop_gradient(rounded - weight)


def dense_layer(layout, params, x):
    """layer on one device: every expert sees every token."""
    up, down = params["up"], params["down"]
    if layout.fp8:
        up, down = rounded_to_fp8(up), rounded_to_fp8(down)
    weights, idx = route(scores(x, params["router"]))
    gates = jnp.zeros((x.shape[0], EXPERTS), jnp.float32)
    gates = gates.at[jnp.arange(x.shape[0])[:, None], idx].add(weights)
    hidden = jax.nn.gelu(jnp.einsum("th,ehi->tei", x, up))
    rows = jnp.einsum("tei,eih->teh", hidden, down)
    y = jnp.einsum("teh,te->th", rows.astype(jnp.float32), gates)
    shared = jax.nn.gelu(x @ params["shared_up"]) @ params["shared_down"]
    return x + y.astype(x.dtype) + shared


def dense_model(layout, params, x):
    return dense_layer(layout, params, x @ params["first"])


def dense_stack(layout, params, x):
    layers = {name: value for name, value in params.items() if name != "first"}
    body = lambda x, params: (dense_layer(layout, params, x), None)  # noqa: E731
    return jax.lax.scan(body, x @ params["first"], layers)[0]
