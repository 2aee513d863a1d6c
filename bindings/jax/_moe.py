# SPDX-License-Identifier: Apache-2.0
"""A Mixture-of-Experts layer as a function: router, dispatch, experts, combine, shared expert."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import _layer
from .._abi import Quant, Status
from .._layer import Routing, refuse
from ._calls import KEEP
from ._products import grouped_dot, has_kernels, rows_of_block
from ._regions import is_array, kind_of

if TYPE_CHECKING:
    from typing import Any, Optional

    from . import Ep

_EXPERTS = ("gate_up", "down", "gate_up_bias", "down_bias")
_NAMES = ("router", *_EXPERTS, "expert_bias", "shared_gate_up", "shared_down")


def moe_parameters(
    key: jax.Array,
    ep: Ep,
    hidden: int,
    inner: int,
    *,
    shared: int = 0,
    biases: bool = False,
    expert_bias: bool = False,
    dtype: Any = jnp.float32,
) -> dict[str, jax.Array]:
    """Make parameters of libep.jax.moe, all experts: normal numbers over the square root of the
    elements that a product sums; biases zero.

    hidden, inner  H and F
    shared         S, of a shared expert; 0: none
    biases         whether the experts' matrices have biases
    expert_bias    whether the router has a bias for the choice, float32
    """
    experts = ep.num_experts
    shapes = {
        "router": (hidden, experts),
        "gate_up": (experts, hidden, 2 * inner),
        "down": (experts, inner, hidden),
    }
    if shared:
        shapes.update(shared_gate_up=(hidden, 2 * shared), shared_down=(shared, hidden))
    keys = jax.random.split(key, len(shapes))
    made = {
        name: jax.random.normal(each, shape, dtype) * shape[-2] ** -0.5
        for each, (name, shape) in zip(keys, shapes.items())
    }
    made = {name: value.astype(dtype) for name, value in made.items()}
    if biases:
        made["gate_up_bias"] = jnp.zeros((experts, 2 * inner), dtype)
        made["down_bias"] = jnp.zeros((experts, hidden), dtype)
    if expert_bias:
        made["expert_bias"] = jnp.zeros(experts, jnp.float32)
    return made


def _choose(
    routing: Routing, is_biased: bool, scores: jax.Array, choice: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The experts of a device's tokens, [T, K], and their weights, by their scores."""
    count, groups = scores.shape[0], routing.num_groups
    if routing.top_groups < groups:
        by_group = choice.reshape(count, groups, -1)
        best = min(2, by_group.shape[-1]) if is_biased else 1
        rank = jax.lax.top_k(by_group, best)[0].sum(-1)
        chosen = jax.nn.one_hot(jax.lax.top_k(rank, routing.top_groups)[1], groups, dtype=bool)
        kept = chosen.any(1)[..., None]
        choice = jnp.where(kept, by_group, -jnp.inf).reshape(count, -1)
    # Backward computes the weights again: of these experts, whatever rounding makes of the scores.
    idx = KEEP.bind(jax.lax.top_k(choice, routing.top_k)[1])
    weights = jnp.take_along_axis(scores, idx, -1)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + _layer.LEAST_SUM)
    return idx, weights * routing.scale


def _route(
    ep: Ep, routing: Routing, parameters: dict[str, jax.Array], x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logits = jnp.matmul(x, parameters["router"], preferred_element_type=jnp.float32)
    scores = jax.nn.sigmoid(logits) if routing.scores == "sigmoid" else jax.nn.softmax(logits)
    choice, bias = jax.lax.stop_gradient(scores), parameters.get("expert_bias")
    if bias is not None:
        choice = choice + jax.lax.stop_gradient(bias)
    choose = functools.partial(_choose, routing, bias is not None)
    idx, weights = ep.per_device(choose, scores, choice)
    return idx, weights


def _swiglu(both: jax.Array) -> jax.Array:
    gate, up = jnp.split(both, 2, -1)
    return jax.nn.silu(gate) * up


def _product(ep: Ep, rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """[rows, in] by [L, in, out]; zero behind the last slab."""
    if not has_kernels(ep.device, ep.alignment, rows, weights):
        return jax.lax.ragged_dot(rows, weights, sizes)
    out = grouped_dot(rows, weights, sizes, rows_of_block(ep.alignment))
    return jnp.where((jnp.arange(len(rows)) < sizes.sum())[:, None], out, 0)


def _experts(
    ep: Ep, is_early: bool, received: Any, sizes: jax.Array, weights: dict[str, jax.Array]
) -> jax.Array:
    """What a device's experts return for the rows that came, [rows, H]."""
    rows, factors = received
    local, hidden, inner = ep.num_local_experts, rows.shape[1], weights["down"].shape[1]
    expected = {
        "gate_up": (local, hidden, 2 * inner),
        "down": (local, inner, hidden),
        "gate_up_bias": (local, 2 * inner),
        "down_bias": (local, hidden),
    }
    _layer.check_shapes({name: (weights[name].shape, expected[name]) for name in weights})
    early = factors[:, None] if is_early else None

    def add(rows: jax.Array, name: str, factors: Any = None) -> jax.Array:
        """rows plus their experts' bias. Its gradient is summed in float32."""
        if name not in weights:
            return rows
        place = jnp.arange(len(rows))
        number = jnp.searchsorted(jnp.cumsum(sizes), place, side="right")
        bias = weights[name].astype(jnp.float32).at[number].get(mode="fill", fill_value=0)
        return (rows + (bias if factors is None else bias * factors)).astype(rows.dtype)

    both = add(_product(ep, rows, weights["gate_up"], sizes), "gate_up_bias")
    rows = _swiglu(both)
    if early is not None:
        rows = (rows * early).astype(both.dtype)
    return add(_product(ep, rows, weights["down"], sizes), "down_bias", early)


def moe(
    ep: Ep,
    parameters: dict[str, jax.Array],
    x: jax.Array,
    *,
    scores: str = "softmax",
    num_groups: int = 1,
    top_groups: int = 1,
    normalise: bool = False,
    scale: float = 1.0,
    is_early: bool = False,
    specs: Optional[dict[str, PartitionSpec]] = None,
    quantise: Any = False,
    placement: Optional[jax.Array] = None,
) -> jax.Array:
    """A layer of experts: the sum of the weighted outputs of each token's experts, plus the shared
    expert's. Inside shard_map over the group's axes or outside, as the operations of Ep.

    parameters  router [H, E], the experts' gate_up [E, H, 2F] (SwiGLU's gate before its up) and
                down [E, F, H]. Perhaps gate_up_bias [E, 2F] with down_bias [E, H], expert_bias [E]
                float32, and shared_gate_up [H, 2S] with shared_down [S, H]. moe_parameters makes
                such. Inside shard_map those of the experts are a device's shards
    x           [T, H] or [B, S, H] of the parameters' type
    scores      "softmax" or "sigmoid" of the router's products, in float32
    num_groups, top_groups, normalise, scale
                as in DeepSeek-V3: a token's experts are of its top_groups best groups; their weights
                are their scores, over their sum if `normalise`, times `scale`. The expert bias
                affects the choice alone, and has no gradient
    is_early    weights multiply the experts' rows, before the last matrix; else combine applies
                them to what the experts return
    specs       how the experts' parameters are sharded, by name, as Ep.experts takes them; a name
                that is missing, and None: along the group's axes alone
    quantise    how shards are quantised before they are gathered: see Ep.experts
    placement   [P] int32, with bootstrap's num_physical = P: see Ep.dispatch. The experts' parameters
                are then those of the places, [P, ...]

    Returns y of x's shape. jax.checkpoint keeps the plan and the experts' numbers under any policy,
    and rows under policies that save by the name "libep_dispatch". EpError for what is refused.
    """
    routing = _layer.check_routing(
        Routing(ep.num_experts, ep.top_k, scores, num_groups, top_groups, normalise, scale)
    )
    _check(ep, parameters, x)
    tokens = x.reshape(-1, x.shape[-1])
    idx, weights = _route(ep, routing, parameters, tokens)
    rows, row_weights, plan = ep.dispatch(tokens, idx, weights, placement=placement)
    along = PartitionSpec(ep.axes)
    local = {name: parameters[name] for name in _EXPERTS if name in parameters}
    split = {name: (specs or {}).get(name, along) for name in local}
    function = functools.partial(_experts, ep, is_early)
    rows = ep.experts(function, (rows, row_weights), plan, local, split, quantise=quantise)
    shared = None
    if "shared_down" in parameters:
        shared = _swiglu(tokens @ parameters["shared_gate_up"]) @ parameters["shared_down"]
    y = ep.combine(rows, plan, None if is_early else row_weights, bias=shared)
    return y.reshape(x.shape)


def _check(ep: Ep, parameters: dict[str, jax.Array], x: jax.Array) -> None:
    """EpError where parameters or tokens are not those of a layer. _experts sees whole matrices."""
    for name, value in dict(parameters, x=x).items():
        if name not in (*_NAMES, "x"):
            refuse(Status.RANGE, "parameters", f"names of {', '.join(_NAMES)}", repr(name))
        if not is_array(value):
            refuse(Status.TYPE, name, "an array", kind_of(value))
    for name in _NAMES[:3]:
        if name not in parameters:
            refuse(Status.SHAPE, "parameters", f"{', '.join(_NAMES[:3])}", f"no {name}")
    _layer.check_biases({name: name in parameters for name in _EXPERTS[2:]})
    if ep._operations.quant != Quant.NONE:
        refuse(
            Status.UNSUPPORTED,
            "quant of the Ep",
            "NONE, since the products are of the parameters' type",
            Quant(ep._operations.quant).name,
        )
    if x.ndim not in (2, 3):
        refuse(Status.SHAPE, "x", "[T, H] or [B, S, H]", list(x.shape))
    shapes = {name: value.shape for name, value in parameters.items()}
    hidden, inner = x.shape[-1], shapes.get("shared_down", (0,))[0]
    expected = {
        "router": (hidden, ep.num_experts),
        "expert_bias": (ep.num_experts,),
        "shared_gate_up": (hidden, 2 * inner),
        "shared_down": (inner, hidden),
    }
    _layer.check_shapes({name: (shapes.get(name), shape) for name, shape in expected.items()})
