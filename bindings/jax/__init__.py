# SPDX-License-Identifier: Apache-2.0
"""libep in JAX: dispatch and combine as differentiable functions, inside shard_map or outside.

    ep = libep.jax.bootstrap(mesh, "expert", num_experts=64, max_tokens=512, hidden=1024, top_k=4)

    def layer(x, experts):
        weights, idx = router(x)
        rows, row_weights, plan = ep.dispatch(x, idx, weights)
        rows = ep.experts(mlp, rows, plan, experts, P("expert", "fsdp", None))
        return ep.combine(rows, plan, row_weights)

Works under jit, grad, scan and checkpoint. docs/jax.md of the source tree is the manual.

Order. All ranks of a group make the same calls in the same order. XLA runs independent calls in any
order, so the calls of a program, of all groups, form a chain: they run in the order in which they
were traced, on every device, forward and backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from .. import _layer
from .._abi import (
    MAX_ROW_BYTES,
    MAX_TOP_K,
    Blocks,
    Duplicates,
    Mode,
    Overflow,
    Quant,
    Rows,
    ScaleOrder,
    Status,
)
from .._config import GroupFields, HandleFields, name_members
from .._config import max_recv_rows as worst_case_rows
from .._library import EpError, OfProcess
from . import _gradients, _program  # noqa: F401 (derivatives, and the order of calls)
from . import _weights as sharded
from ._moe import moe, moe_parameters
from ._operations import ROW_TYPES, Operations, Plan, take_biases
from ._ranks import Counters, Ranks
from ._regions import Regions, product

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn, Optional, Union

    from .._mesh import Spec
    from ._operations import Received

    _: Spec = PartitionSpec()  # mypy checks here that libep.Mesh takes one

__all__ = ["Counters", "Ep", "Plan", "bootstrap", "jit", "moe", "moe_parameters"]

# Fields of a group that bootstrap sets, and what they follow from.
_OWN_FIELDS = {
    "backend": "mesh",
    "device": "mesh",
    "max_top_k": "top_k",
    "max_row_bytes": "hidden and dtype",
}
_PLAN_ALIGNMENT = 256  # a plan in an array of plans is aligned like a buffer of XLA


def bootstrap(
    mesh: jax.sharding.Mesh,
    axis: Union[str, tuple[str, ...]],
    *,
    num_experts: int,
    max_tokens: int,
    hidden: int,
    top_k: int,
    token_axes: Optional[tuple[str, ...]] = None,
    max_recv_rows: Optional[int] = None,
    capacity_factor: Optional[float] = None,
    dtype: Any = jnp.float32,
    counters: bool = False,
    quant: Union[Quant, str] = Quant.NONE,
    scale_order: Union[ScaleOrder, str] = ScaleOrder.BY_ROW,
    grad_quant: Union[Quant, str] = Quant.NONE,
    **fields: Any,
) -> Ep:
    """Create the groups of a mesh: the devices along `axis` share the experts. Collective.

    axis           the name of a mesh axis, or several names, outermost first. Devices that differ
                   in another axis belong to different groups.
    num_experts    experts of a group, a multiple of its devices; device r owns the r-th block.
                   With num_physical among the fields, device r owns the r-th block of so many
                   places, and dispatch takes a placement, which says what expert is where
    max_tokens     most tokens of a device in one call
    hidden, dtype  the largest row, and its type
    top_k          experts per token, in every call
    token_axes     the axes that split the tokens in calls outside shard_map, outermost first: those
                   of `axis`, and others along which devices have other tokens. None: all axes
    max_recv_rows  rows of the receive buffer; None: so many that no row is ever lost, also where
                   tokens name an expert more than once, unless duplicates="merge"
    capacity_factor
                   in place of max_recv_rows: this many times the rows of an even routing
    counters       whether operations count what they do: see Ep.counters
    quant          how dispatch quantises rows, a libep.Quant or its name, such as "nvfp4"
    scale_order    the order of their scales, a libep.ScaleOrder or its name
    grad_quant     how gradients of an unweighted combine are quantised on their way, any but NVFP4;
                   they are turned back where they arrive
    fields         more of the group's configuration (libep.GroupFields): alignment, overflow,
                   timeout_seconds, num_physical and choice, masks (on CPUs), ...

    With several processes (jax.distributed) each of them calls this, in the same order relative to
    other calls of bootstrap. EpError if the configuration is refused.
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        _refuse(Status.TYPE, "mesh", "a jax.sharding.Mesh", type(mesh).__name__)
    axes = _check_axes(mesh, "axis", axis)
    tokens = _check_axes(mesh, "token_axes", mesh.axis_names if token_axes is None else token_axes)
    numbers = dict(num_experts=num_experts, max_tokens=max_tokens, hidden=hidden, top_k=top_k)
    if max_recv_rows is not None:
        numbers["max_recv_rows"] = max_recv_rows
    if "num_physical" in fields:
        numbers["num_physical"] = fields["num_physical"]
    _check_numbers(numbers)
    _check_fields(fields)
    row = _row_type(hidden, dtype)
    if not 1 <= top_k <= MAX_TOP_K:
        _refuse(Status.TOP_K, "top_k", f"1 .. {MAX_TOP_K}", top_k)
    if max_recv_rows == 0:
        _refuse(Status.UNSUPPORTED, "max_recv_rows", "a number of rows", "0 for exact sizes")
    if not set(axes) <= set(tokens):
        _refuse(Status.RANGE, "token_axes", f"{axes} among them", tokens)
    size = product(mesh, axes)
    places = fields.get("num_physical", num_experts)
    if places % size:
        field = "num_physical" if "num_physical" in fields else "num_experts"
        _refuse(Status.RANGE, field, f"a multiple of the {size} devices along {axis!r}", places)
    if fields.get("masks") and mesh.devices.flat[0].platform != "cpu":
        _refuse(Status.UNSUPPORTED, "masks", "0 on GPUs", fields["masks"])
    config = dict(
        fields,
        num_experts=num_experts,
        max_tokens=max_tokens,
        max_top_k=top_k,
        max_row_bytes=hidden * row.itemsize,
    )
    if capacity_factor is not None:
        if max_recv_rows is not None:
            expected = "none, with max_recv_rows"
            _refuse(Status.UNSUPPORTED, "capacity_factor", expected, capacity_factor)
        policy, alignment = fields.get("overflow", Overflow.ERROR), fields.get("alignment", 1)
        local = places // size
        max_recv_rows = _layer.count_capacity(
            capacity_factor, policy, max_tokens, top_k, local, alignment
        )
    elif max_recv_rows is None:
        merges = fields.get("duplicates") == Duplicates.MERGE
        flags = Rows(0) if merges else Rows.DUPLICATES
        max_recv_rows = worst_case_rows(size, 0, flags=flags, **config)
    config["max_recv_rows"] = max_recv_rows
    layer = dict(quant=quant, scale_order=scale_order, grad_quant=grad_quant)
    _check_members(layer)
    if layer["grad_quant"] != Quant.NONE and layer["scale_order"] == ScaleOrder.SWIZZLED:
        _refuse(Status.UNSUPPORTED, "scale_order", "BY_ROW or BY_COLUMN with a grad_quant", "SWIZZLED")
    ranks = Ranks(mesh, axes, dict(layer, top_k=top_k), config, counters)
    return Ep(ranks, Regions(mesh, axes, tokens), config, layer, f"{hidden} of {row.name}")


jit = jax.jit
"""Another name of jax.jit, which is all that programs need."""


def _refuse(status: Status, field: str, expected: str, got: object) -> NoReturn:
    raise EpError(status, f"bootstrap: {field}: expected {expected}, got {got}")


def _check_axes(
    mesh: jax.sharding.Mesh, field: str, given: Union[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """The axes as a tuple."""
    if not isinstance(given, (str, tuple, list)):
        _refuse(Status.TYPE, field, "an axis of the mesh or a tuple of them", repr(given))
    axes = (given,) if isinstance(given, str) else tuple(given)
    for name in axes:
        if name not in mesh.axis_names:
            _refuse(Status.RANGE, field, f"one of the mesh's axes {mesh.axis_names}", repr(name))
    if len(set(axes)) < max(1, len(axes)):
        _refuse(Status.RANGE, field, "one or more axes, each once", axes)
    return axes


def _check_numbers(numbers: dict[str, int]) -> None:
    for field, number in numbers.items():
        if not isinstance(number, (int, np.integer)) or isinstance(number, bool):
            _refuse(Status.TYPE, field, "an integer", repr(number))


def _check_fields(fields: dict[str, Any]) -> None:
    """Refuse what bootstrap sets itself, and what operations do not support."""
    for field in fields:
        if field in _OWN_FIELDS:
            expected = f"none, since it follows from {_OWN_FIELDS[field]}"
            _refuse(Status.UNSUPPORTED, field, expected, repr(fields[field]))
        if field in HandleFields.__annotations__ and field not in GroupFields.__annotations__:
            _refuse(Status.UNSUPPORTED, field, "none, since libep.jax sets it", repr(fields[field]))
        if field in ("max_ranks", "place"):
            expected = "none, since devices of a mesh do not join"
            _refuse(Status.UNSUPPORTED, field, expected, repr(fields[field]))
    _check_members(fields)
    mode = Mode(fields.get("mode", Mode.THROUGHPUT))
    if mode is not Mode.THROUGHPUT:
        _refuse(Status.UNSUPPORTED, "mode", "Mode.THROUGHPUT", f"Mode.{mode.name}")


def _check_members(fields: dict[str, Any]) -> None:
    """Put members of enums in the place of their names."""
    try:
        name_members(fields)
    except ValueError as error:
        raise EpError(Status.RANGE, f"bootstrap: {error}") from None


def _row_type(hidden: int, dtype: Any) -> np.dtype[Any]:
    """The type of rows. EpError if rows of it, or of this length, are not supported."""
    expected = " or ".join(ROW_TYPES)
    try:
        row: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        _refuse(Status.TYPE, "dtype", expected, repr(dtype))
    if row.name not in ROW_TYPES:
        _refuse(Status.TYPE, "dtype", expected, row.name)
    size = hidden * row.itemsize
    if size % 16 or not 16 <= size <= MAX_ROW_BYTES:
        expected = f"rows of a multiple of 16 bytes up to {MAX_ROW_BYTES}"
        _refuse(Status.ROW_BYTES, "hidden", expected, f"{hidden} of {row.name}: {size}")
    return row


class Ep(OfProcess):
    """The groups of a mesh axis, and the operations. Made by bootstrap.

    Shapes are those of one device: T tokens, K = top_k, H elements per row, L local experts, and
    `rows` = max_recv_rows. The operations are called inside shard_map over the axis, with such
    arrays, or outside of any shard_map, with arrays of all devices: those of one device after the
    other along the first dimension, sharded by P(token_axes). Outside, a Plan has such arrays, too.
    """

    _anew = "save the arrays of a model, and call bootstrap anew"

    def __init__(
        self,
        ranks: Ranks,
        regions: Regions,
        config: dict[str, Any],
        layer: dict[str, Any],
        largest: str,
    ) -> None:
        self._ranks = ranks
        self._regions = regions
        self.num_ranks = product(regions.mesh, regions.axes)
        self.num_experts: int = config["num_experts"]
        self.num_physical: int = config.get("num_physical", self.num_experts)
        """Places for experts on all devices; without bootstrap's num_physical one for each."""
        self.num_local_experts = self.num_physical // self.num_ranks
        self.max_tokens: int = config["max_tokens"]
        self.top_k: int = config["max_top_k"]
        self.max_recv_rows: int = config["max_recv_rows"]
        self.max_row_bytes: int = config["max_row_bytes"]
        self.alignment: int = config.get("alignment", 1)
        self.axes: tuple[str, ...] = regions.axes
        self.device: jax.Device = regions.mesh.devices.flat[0]
        """One of the devices, for what kind they are."""
        self.plan_bytes = -(-ranks.plan_bytes // _PLAN_ALIGNMENT) * _PLAN_ALIGNMENT
        self._operations = Operations(
            key=ranks.key,
            axes=regions.axes,
            on_host=ranks.on_host,
            num_local_experts=self.num_local_experts,
            num_places=config.get("num_physical", 0),
            max_tokens=self.max_tokens,
            top_k=self.top_k,
            max_recv_rows=self.max_recv_rows,
            max_row_bytes=self.max_row_bytes,
            largest=largest,
            plan_bytes=self.plan_bytes,
            quant=Quant(layer["quant"]),
            scale_order=ScaleOrder(layer["scale_order"]),
            grad_quant=Quant(layer["grad_quant"]),
        )

    # ---- operations ---------------------------------------------------------------------------

    def dispatch(
        self,
        tokens: jax.Array,
        topk_idx: jax.Array,
        topk_weights: Optional[jax.Array] = None,
        num_tokens: Optional[jax.Array] = None,
        *,
        global_scale: Optional[jax.Array] = None,
        placement: Optional[jax.Array] = None,
    ) -> tuple[Received, Optional[jax.Array], Plan]:
        """Send each token's row to its experts. Return (recv_tokens, recv_weights, plan).

        tokens        [T, H] float32, bfloat16 or float16
        topk_idx      [T, K] int32 or int64: the expert of each entry; negative: none
        topk_weights  [T, K] float32, or None
        num_tokens    [1] int32 or int64: only so many tokens count, from the first; None: all. The
                      others are not sent, and become zero in combine's out and in gradients
        global_scale  [1] float32, by which quant="nvfp4" multiplies: commonly 448 * 6 / (the
                      largest magnitude of all devices' tokens). Else None
        placement     [P] int32, equal on all devices, if bootstrap has num_physical = P, else None:
                      the expert that each place holds, or -1. Device r has the r-th block of P / R
                      places. What is said here of its experts holds for its places. An entry takes
                      one of its expert's copies (bootstrap's choice); without one, it has no
                      expert. libep.placement_balance makes placements
        recv_tokens   [rows, H]: the rows of the first local expert, of the second, ..., then zeros
        recv_weights  [rows] float32, the weight of each row; None without topk_weights

        Where rows are quantised (bootstrap's quant), recv_tokens is a pair: values float8_e4m3fn
        [rows, H], and scales [rows, S] float32, or uint8 for UE8M0. With "nvfp4" values are uint8
        [rows, H / 2] and scales uint8 [rows, H / 16], of which float8_e4m3fn is a view. Other
        scale_orders: [S, rows], or whole tiles.

        Differentiable in tokens and topk_weights, unless rows are quantised.
        """
        operands = (tokens, topk_idx, topk_weights, num_tokens, global_scale)
        whole = () if placement is None else (placement,)  # on each device, also outside shard_map
        specs = (PartitionSpec(),) * len(whole)
        return self._regions.run("dispatch", self._operations.dispatch, operands, whole, specs)

    def combine(
        self,
        expert_out: jax.Array,
        plan: Plan,
        recv_weights: Optional[jax.Array] = None,
        *,
        bias: Union[jax.Array, Sequence[jax.Array], None] = None,
    ) -> jax.Array:
        """Return each expert's rows to their tokens and add them up.

        expert_out    [rows, H], where recv_tokens had the experts' inputs
        plan          of the dispatch
        recv_weights  [rows] float32: each row's factor, or None for 1
        bias          [T, H] of expert_out's type, or up to two of them, such as what a shared
                      expert returns: added to the sums in float32, in order, before they are
                      rounded. Its gradient is that of out
        out           [T, H]

        Differentiable in expert_out, recv_weights and bias.
        """
        self._operations.check_plan("combine", plan)
        biases = take_biases(bias)
        operands = (expert_out, plan, recv_weights, *biases)
        return self._regions.run("combine", self._operations.combine, operands)

    def experts(
        self,
        function: Callable[[Any, jax.Array, Any], Any],
        rows: Any,
        plan: Plan,
        weights: Any,
        specs: Any,
        *,
        quantise: Union[bool, Quant, tuple[Quant, Blocks]] = False,
    ) -> Any:
        """Apply the experts to received rows, each device its own. Return what function returns.

        function  function(rows, group_sizes, weights), which runs on one device: rows [rows, H],
                  group_sizes [L] int32 for jax.lax.ragged_dot, weights [L, ...]. It returns an
                  array with a leading dimension, such as [rows, H], or a tree of such.
        rows      recv_tokens, what was computed from it, or a tree of such
        plan      of the dispatch
        weights   a tree of arrays [E, ...], or [P, ...] with bootstrap's num_physical
        specs     how the weights are sharded: a PartitionSpec for all, or a tree of them. The
                  first dimension begins with the group's axes, P("expert", "fsdp") or
                  P(("expert", "fsdp")). Other axes that split the tokens are gathered for use, and
                  the gradient is reduce-scattered over them. Axes that do not split the tokens
                  stay.
        quantise  weights of three dimensions or more are quantised to e4m3 before they are
                  gathered: by a Quant, with Blocks.ROWS along the last dimension or Blocks.TILES of
                  the last two. True: Quant.FP8 and ROWS, a float32 scale for each 128 elements. The
                  gradient is that of the weights without quantising.
        """
        self._operations.check_plan("experts", plan)
        tree: Any
        leaves, tree = jax.tree.flatten(weights)
        specs = sharded.specs_of(weights, specs)
        is_shard = self._regions.is_inside("experts")
        form = sharded.form_of(quantise)
        gathers = [
            sharded.gather_of(
                self._regions, name, weight.shape, spec, self.num_physical, is_shard, form
            )
            for name, weight, spec in zip(sharded.names_of(weights), leaves, specs)
        ]

        def body(rows: jax.Array, sizes: jax.Array, *shards: jax.Array) -> Any:
            whole = [sharded.gather(self._regions, *pair) for pair in zip(shards, gathers)]
            with sharded.explained(gathers):
                return function(rows, sizes, tree.unflatten(whole))

        operands = (rows, plan.expert_padded)
        return self._regions.run("experts", body, operands, leaves, specs)

    def amax(
        self, weight: jax.Array, spec: PartitionSpec, *, per_expert: bool = False
    ) -> jax.Array:
        """The largest magnitude of a weight [E, ...], float32; NaN wins. Without gradient.

        weight      inside shard_map a device's shard by `spec`, outside the whole weight
        per_expert  one for each expert of the array that is given, [its first dimension]
        """
        is_shard = self._regions.is_inside("amax")
        return sharded.amax(self._regions, weight, spec, per_expert, is_shard)

    def per_device(self, function: Callable[..., Any], *arrays: Any) -> Any:
        """Return function(*arrays), called on each device with its own part of the arrays.

        For what XLA does not split: it gathers all tokens for jax.lax.top_k, for instance. Each
        array, and each result, has the tokens or rows as first dimension.
        """
        return self._regions.run("per_device", function, arrays)

    # ---- the group ----------------------------------------------------------------------------

    def counters(self) -> dict[jax.Device, Counters]:
        """What the operations of each device of this process have counted since bootstrap. Local.

        Waits for the arrays that programs are computing. EpError without bootstrap's counters=True.
        """
        return self._ranks.counters()

    def mask(self, alive: Any) -> None:
        """Let only some devices take part, in the programs that are called from now on.

        alive  array of the mesh's shape: a nonzero element lets its device take part

        For bootstrap's masks=1. The experts of the other devices are no experts; of a copy of an
        expert, one on another device is taken. Calls on the other devices do nothing, and give
        zeros. Programs need not be compiled again. If a device does not come to a call, the others
        raise at their deadline, and all calls raise from then on. Ep.mask ends this, too.

        All processes call it, with the same array. Waits for running programs, for the other
        processes, no longer than twice timeout_seconds, and for the devices that take part. EpError
        if one of these does not come: then no more devices are masked than before. EpError without
        bootstrap's masks=1.
        """
        alive = np.asarray(alive)
        if alive.shape != self._regions.mesh.devices.shape:
            expected, got = self._regions.mesh.devices.shape, alive.shape
            raise EpError(
                Status.SHAPE, f"mask: alive: expected the mesh's shape {expected}, got {got}"
            )
        self._ranks.mask(alive)

    def check(self) -> None:
        """Raise EpError for what went wrong on the devices of this process since the last check.

        Indices out of range and lost rows are reported here alone. Call it where the loss is read.
        """
        self._ranks.check()

    def close(self) -> None:
        """Destroy the groups. A second call does nothing. All processes close together.

        Waits for the arrays that programs are computing on the devices of this process, no longer
        than timeout_seconds. Programs that call afterwards get an error. Arrays stay valid.
        """
        self._ranks.wait()
        self._ranks.close()

    def __enter__(self) -> Ep:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self._ranks.close()  # programs may wait for a rank that does not come
