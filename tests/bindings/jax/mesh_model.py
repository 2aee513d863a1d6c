# SPDX-License-Identifier: Apache-2.0
"""A small model outside shard_map, sharded over a mesh, and the same model on one device."""

import dataclasses
import functools

import jax
import numpy as np
from conftest import dense, make_mesh, mlp, parameters, route, scores
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
        splits = {name: NamedSharding(self.mesh, specs[name]) for name in params}
        return jax.device_put(params, splits), jax.device_put(x, tokens)


AXES, CUBE = ("data", "fsdp", "expert"), (2, 2, 2)
BOTH = P(("expert", "fsdp"))
LAYOUTS = {
    "expert": Layout(("expert",), (4,), P("expert"), P("expert")),
    "fsdp-expert": Layout(AXES[1:], (2, 2), P("expert", "fsdp", None), P("expert", None, "fsdp")),
    "data-fsdp-expert": Layout(AXES, CUBE, P("expert", "fsdp", None), P("expert", "fsdp")),
    "compound": Layout(AXES, CUBE, BOTH, BOTH),
    "fp8": Layout(AXES, CUBE, P("expert", "fsdp"), BOTH, True),
}

whole_parameters = functools.partial(parameters, is_whole=True)


def layer(ep, layout, params, x):
    """A layer with a shared expert and a residual connection, outside shard_map."""

    shared = {name: whole(layout, params[name]) for name in ("shared_up", "shared_down")}
    y = routed(ep, params, x, layout.experts, quantise=layout.fp8)
    return x + y + shared_expert(shared, x)


def routed(ep, params, x, specs, function=mlp, **options):
    """The experts that tokens are routed to, outside shard_map, or inside of one."""
    weights, idx = ep.per_device(route, scores(x, params["router"]))
    rows, row_weights, plan = ep.dispatch(x, idx, weights)
    experts = {name: params[name] for name in ("up", "down")}
    rows = ep.experts(function, rows, plan, experts, specs, **options)
    return ep.combine(rows, plan, row_weights)


def whole(layout, weight):
    return jax.lax.with_sharding_constraint(weight, NamedSharding(layout.mesh, P()))


def model(ep, layout, params, x):
    """A matrix and one layer."""
    return layer(ep, layout, params, x @ whole(layout, params["first"]))


def stack(ep, layout, params, x):
    """A matrix and all layers of stacked parameters, under scan and checkpoint."""
    repeated = jax.checkpoint(lambda x, params: layer(ep, layout, params, x), prevent_cse=False)
    layers, x = {**params}, x @ whole(layout, params["first"])
    del layers["first"]
    return jax.lax.scan(lambda x, p: (repeated(x, p), None), x, layers)[0]


def rounded_to_fp8(weight):
    """The weight after quantising; the gradient is that of the weight itself."""
    rounded = dequantise(*quantise(weight), weight.dtype)
    return weight + jax.lax.stop_gradient(rounded - weight)


def shared_expert(params, x):
    return jax.nn.gelu(x @ params["shared_up"]) @ params["shared_down"]


def dense_layer(layout, params, x):
    """layer on one device."""
    experts = {name: params[name] for name in layout.experts}
    if layout.fp8:
        experts = {name: rounded_to_fp8(weight) for name, weight in experts.items()}
    return dense({**params, **experts}, x) + shared_expert(params, x)


def dense_model(layout, params, x):
    return dense_layer(layout, params, x @ params["first"])


def dense_stack(layout, params, x):
    layers = {name: value for name, value in params.items() if name != "first"}
    body = lambda x, params: (dense_layer(layout, params, x), None)  # noqa: E731
    return jax.lax.scan(body, x @ params["first"], layers)[0]
