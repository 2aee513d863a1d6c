# SPDX-License-Identifier: Apache-2.0
"""A Mixture-of-Experts layer as a module: router, dispatch, experts, combine, shared expert."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Union

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_compiling

from .. import _layer
from .._abi import AxisRole, Overflow, Quant, Status
from .._config import name_members
from .._layer import Routing, refuse
from ._autograd import combine, dispatch, prepare
from ._experts import GROUPED_ALIGNMENT, add_bias, grouped_mm, has_grouped, swiglu
from ._fp8 import (
    ALIGNMENT,
    Form,
    Values,
    dispatch_quantised,
    multiply,
    quantise_slabs,
    quantise_weight,
    require_product,
)
from ._group import Group
from ._handle import Handle
from ._quant import row_scales
from ._weights import Weight

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Optional

    from torch import Tensor

    from .._weight import MeshComm
    from ._handle import Plan


def route(
    logits: Tensor, routing: Routing, expert_bias: Optional[Tensor] = None
) -> tuple[Tensor, Tensor]:
    """The experts of each token, [T, K] int64, and their weights, [T, K] float32.

    logits       [T, E] float32, the router's products
    expert_bias  [E] float32, which affects the choice alone: no gradient
    """
    scores = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(-1)
    choice = scores.detach()
    if expert_bias is not None:
        choice = choice + expert_bias
    if routing.top_groups < routing.num_groups:
        groups = choice.unflatten(-1, (routing.num_groups, -1))
        best = 1 if expert_bias is None else min(2, groups.shape[-1])
        rank = groups.topk(best, -1)[0].sum(-1)
        kept = torch.zeros_like(rank, dtype=torch.bool)
        kept = kept.scatter(-1, rank.topk(routing.top_groups, -1)[1], True)
        choice = groups.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    idx = choice.topk(routing.top_k, -1)[1]
    weights = scores.gather(-1, idx)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + _layer.LEAST_SUM)
    return idx, weights * routing.scale


class MoE(nn.Module):
    """A layer of experts: y = sum of the weighted outputs of each token's experts, plus the shared
    expert's. Collective: all ranks of the group call it together, forward and backward.

    group            libep.torch.Group; this rank has its L = group.num_local_experts experts
    hidden           H, elements of a token
    inner            F, elements between the two matrices of an expert (SwiGLU)
    top_k            K, experts per token; None: the group's top_k
    scores           "softmax" or "sigmoid" of the router's products, in float32
    num_groups,      DeepSeek-V3's groups of experts: those of a token are of its top_groups best
    top_groups
    expert_bias      True: a buffer [E] float32, added to the scores for the choice alone
    normalise        the weights of a token are divided by their sum
    scale            then multiplied by this
    biases           the experts' three matrices have biases
    shared           S, elements between the matrices of a shared expert; 0: none
    is_early         weights multiply the experts' rows, before the last matrix; else combine applies
                     them to what the experts return
    capacity_factor  receive rows: this many times those of an even routing. None: the group's
                     max_recv_rows, which is exact sizes by default
    overflow         what becomes of rows past the capacity; None: the group's policy
    quant            how rows travel, and how rows and weights are multiplied: libep.Quant. The group
                     has max_scale_bytes for the scales of a row. NONE: in the layer's type
    dequantise       rows and weights are dequantised before products, where the device cannot
                     multiply e4m3; without it such a layer is refused
    comm             libep.MeshComm of all ranks: the experts' parameters are this rank's shards over
                     the mesh's fsdp axes, along the dimension that products sum over. They are
                     gathered for use, as e4m3 if the layer quantises. None: they are resident
    dtype, device    of the parameters, and of tokens; float32 or bfloat16, whose rows the group takes.
                     None: the group's device
    handle           more of the handle's configuration (libep.HandleFields): num_sms, sum_quant, ...

    Parameters of this rank, SwiGLU's gate before its up: gate_up [L, H, 2F], down [L, F, H],
    gate_up_bias [L, 2F], down_bias [L, H]; LOCAL names them. Replicated, so that the caller adds
    their gradients over the ranks: router [E, H], shared_gate_up [H, 2S], shared_down [S, H].

    EpError for arguments that are refused.
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Optional[Tensor]
    down_bias: Optional[Tensor]
    shared_gate_up: Tensor
    shared_down: Optional[Tensor]
    expert_bias: Optional[Tensor]

    LOCAL = ("gate_up", "down", "gate_up_bias", "down_bias")
    """Parameters of this rank's experts. The others are replicated."""

    def __init__(
        self,
        group: Group,
        hidden: int,
        inner: int,
        top_k: Optional[int] = None,
        *,
        scores: str = "softmax",
        num_groups: int = 1,
        top_groups: int = 1,
        expert_bias: bool = False,
        normalise: bool = False,
        scale: float = 1.0,
        biases: bool = False,
        shared: int = 0,
        is_early: bool = False,
        capacity_factor: Optional[float] = None,
        overflow: Optional[Overflow] = None,
        quant: Union[Quant, str] = Quant.NONE,
        dequantise: bool = False,
        comm: Optional[MeshComm] = None,
        dtype: torch.dtype = torch.float32,
        device: Optional[torch.device] = None,
        **handle: Any,
    ) -> None:
        super().__init__()
        if not isinstance(group, Group):
            raise TypeError(f"group: expected a libep.torch.Group, got {type(group).__name__}")
        experts, local = group.fields["num_experts"], group.num_local_experts
        top_k = group.fields["max_top_k"] if top_k is None else top_k
        self.routing = _layer.check_routing(
            Routing(experts, top_k, scores, num_groups, top_groups, normalise, scale)
        )
        self.hidden, self.inner, self.shared, self.is_early = hidden, inner, shared, is_early
        if overflow is not None:
            handle["overflow"] = overflow
        self.form = _make_form(group, hidden, inner, dtype, quant, dequantise)
        if self.form is not None:
            handle["quant"] = self.form.quant
        most = group.fields["max_row_bytes"]
        if hidden * dtype.itemsize > most:
            rows = f"rows of at most {most} bytes, as those of the group"
            refuse(Status.ROW_BYTES, "dtype", rows, f"{hidden} of {dtype}, {hidden * dtype.itemsize}")
        self.handle = _make_handle(group, top_k, capacity_factor, dtype, handle)
        made: dict[str, Any] = {
            "dtype": dtype,
            "device": group.device if device is None else device,
        }
        shapes: dict[str, Optional[tuple[int, ...]]] = {
            "router": (experts, hidden),
            "gate_up": (local, hidden, 2 * inner),
            "down": (local, inner, hidden),
            "gate_up_bias": (local, 2 * inner) if biases else None,
            "down_bias": (local, hidden) if biases else None,
            "shared_gate_up": (hidden, 2 * shared) if shared else None,
            "shared_down": (shared, hidden) if shared else None,
        }
        self.weights: dict[str, Weight] = {}
        """Of parameters that are shards."""
        for name, shape in shapes.items():
            if comm is not None and shape is not None and name in self.LOCAL:
                self.weights[name] = _make_weight(comm, name, (experts, *shape[1:]), dtype)
                shape = self.weights[name].sharding.stored
            value = None if shape is None else nn.Parameter(torch.empty(shape, **made))
            self.register_parameter(name, value)
        bias = torch.zeros(experts, device=made["device"]) if expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal numbers, over the square root of the elements that a product sums; biases zero."""
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                summed = self.hidden if name == "router" else parameter.shape[-2]
                nn.init.normal_(parameter, std=summed**-0.5)

    def extra_repr(self) -> str:
        routing = ", ".join(f"{name}={value!r}" for name, value in self.routing._asdict().items())
        return f"hidden={self.hidden}, inner={self.inner}, shared={self.shared}, {routing}"

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] or [B, S, H] -> the same. T, or B S, may be another number on each rank."""
        self._check(x)
        tokens = x.reshape(-1, self.hidden)
        idx, weights = self.route(tokens)
        with self._beside(tokens):
            shared = None if self.shared_down is None else self._share(tokens)
        received: Any
        if self.form is None:
            received = dispatch(self.handle, tokens, idx, weights)
            plan, row_weights = received.plan, received.topk_weights
            rows = self._experts(received.tokens, row_weights, plan)
        else:
            plan = prepare(self.handle, idx)
            received, row_weights = dispatch_quantised(self.handle, plan, tokens, weights)
            rows = self._experts(received, row_weights, plan)
        side = self._side()
        if shared is not None and side is not None:
            here = torch.cuda.current_stream(tokens.device)
            here.wait_stream(side)
            shared.record_stream(here)
        late = None if self.is_early else row_weights
        return combine(self.handle, plan, rows, late, bias=shared).view(x.shape)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of tokens [T, H], [T, K], and their weights, [T, K] float32."""
        logits = F.linear(tokens.float(), self.router.float())
        return route(logits, self.routing, self.expert_bias)

    def _experts(self, rows: Union[Tensor, Values], weights: Tensor, plan: Plan) -> Tensor:
        """What the experts return for the rows that came, [rows, H]."""
        both = self._multiply(rows, "gate_up", plan)
        if self.gate_up_bias is not None:
            both = add_bias(both, self._whole("gate_up_bias"), plan)
        middle, factors = swiglu(both), None
        if self.is_early:
            factors = weights
            middle = (middle * factors[:, None]).to(both.dtype)
        out = self._multiply(middle, "down", plan)
        if self.down_bias is not None:
            out = add_bias(out, self._whole("down_bias"), plan, factors)
        return out

    def _multiply(self, rows: Union[Tensor, Values], name: str, plan: Plan) -> Tensor:
        """Rows by a matrix of each expert, quantised if the layer quantises."""
        if self.form is None:
            return grouped_mm(rows, self._whole(name), plan)  # type: ignore[arg-type]
        if not isinstance(rows, Values):
            rows = quantise_slabs(self.form, rows, plan)
        weight = quantise_weight(self.form, getattr(self, name), self.weights.get(name))
        return multiply(self.form, rows, weight, plan)

    def _whole(self, name: str) -> Tensor:
        """A parameter of the experts as this rank uses it."""
        parameter: Tensor = getattr(self, name)
        return self.weights[name].whole(parameter) if name in self.weights else parameter

    def _share(self, tokens: Tensor) -> Tensor:
        assert self.shared_down is not None
        return swiglu(tokens @ self.shared_gate_up) @ self.shared_down

    # ---- the shared expert's stream -------------------------------------------------------------

    def _side(self) -> Optional[torch.cuda.Stream]:
        """The stream on which the shared expert is computed while rows travel. None: this one."""
        if self.shared_down is None or self.handle.ordinal < 0 or is_compiling():
            return None
        return _side_stream(self.handle.ordinal)

    @contextlib.contextmanager
    def _beside(self, tokens: Tensor) -> Iterator[None]:
        side = self._side()
        if side is None:
            yield
            return
        side.wait_stream(torch.cuda.current_stream(tokens.device))
        with torch.cuda.stream(side):
            yield
        tokens.record_stream(side)

    # ---- checks ---------------------------------------------------------------------------------

    def _check(self, x: Tensor) -> None:
        """EpError where parameters or tokens are not those of a layer of these sizes."""
        if x.ndim not in (2, 3) or x.shape[-1] != self.hidden:
            refuse(Status.SHAPE, "x", f"[T, {self.hidden}] or [B, S, {self.hidden}]", list(x.shape))
        local, hidden, inner = self.handle.group.num_local_experts, self.hidden, self.inner
        given = {name: getattr(self, name) for name in (*self.LOCAL, "expert_bias")}
        names = "gate_up_bias", "down_bias"
        _layer.check_biases({name: given[name] is not None for name in names})
        expected = {
            "gate_up": (local, hidden, 2 * inner),
            "down": (local, inner, hidden),
            "gate_up_bias": (local, 2 * inner),
            "down_bias": (local, hidden),
            "expert_bias": (self.routing.num_experts,),
        }
        expected.update({name: each.sharding.stored for name, each in self.weights.items()})
        _layer.check_shapes(
            {n: (None if given[n] is None else given[n].shape, expected[n]) for n in expected}
        )


def _make_handle(
    group: Group,
    top_k: int,
    capacity_factor: Optional[float],
    dtype: torch.dtype,
    fields: dict[str, Any],
) -> Handle:
    """A handle whose slabs PyTorch's grouped product can multiply, with the capacity of a factor."""
    name_members(fields)
    of_group = group.fields.get("alignment", 1)
    alignment = fields.get("alignment", of_group)
    least = ALIGNMENT if "quant" in fields else GROUPED_ALIGNMENT
    if has_grouped(group.device, dtype):
        fields["alignment"] = alignment = max(alignment, least)
    most = -(-group.fields["num_experts"] // group.size)
    rows = group.fields.get("max_recv_rows", 0)
    if rows and capacity_factor is None:  # room for the additional padding
        fields.setdefault("max_recv_rows", rows + most * max(0, alignment - of_group))
    if capacity_factor is not None:
        policy = fields.get("overflow", group.fields.get("overflow", Overflow.ERROR))
        tokens = group.fields["max_tokens"]
        fields["max_recv_rows"] = _layer.count_capacity(
            capacity_factor, policy, tokens, top_k, most, alignment
        )
    return Handle(group, top_k=top_k, **fields)


def _make_form(
    group: Group,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    given: Union[Quant, str],
    is_dequantised: bool,
) -> Optional[Form]:
    """How a layer quantises; None: not. EpError for what the device cannot multiply."""
    fields: Any = {"quant": given}
    name_members(fields)
    quant = Quant(fields["quant"])
    if quant == Quant.NONE:
        return None
    _layer.check_blocks(quant, {"hidden": hidden, "inner": inner})
    count, kind = row_scales(quant, hidden)
    has, needs = group.fields.get("max_scale_bytes", 0), -(-count * kind.itemsize // 4) * 4
    if has < needs:
        refuse(Status.RANGE, "max_scale_bytes of the group", f"at least {needs}", has)
    require_product(group.device, dtype, quant, is_dequantised)
    return Form(group, quant, is_dequantised)


def _make_weight(comm: MeshComm, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
    """Experts along the mesh's expert axes, the next dimension along its fsdp axes."""
    axes = comm.mesh.role_axes
    spec = (axes(AxisRole.EXPERT), axes(AxisRole.FSDP), *[None] * (len(shape) - 2))
    return Weight(comm, name, spec, shape, dtype)


_sides: dict[int, torch.cuda.Stream] = {}


def _side_stream(ordinal: int) -> torch.cuda.Stream:
    """One stream of each GPU, for what runs beside operations."""
    if ordinal not in _sides:
        _sides[ordinal] = torch.cuda.Stream(ordinal)
    return _sides[ordinal]
