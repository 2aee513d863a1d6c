# SPDX-License-Identifier: Apache-2.0
"""A Mixture-of-Experts layer as a module: router, dispatch, experts, combine, shared expert."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_compiling

from .. import _layer
from .._abi import Overflow, Status
from .._config import name_members
from .._layer import Routing, refuse
from ._autograd import combine, dispatch
from ._experts import GROUPED_ALIGNMENT, add_bias, grouped_mm, has_grouped, swiglu
from ._group import Group
from ._handle import Handle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Optional

    from torch import Tensor

    from ._autograd import Received


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
    dtype, device    of the parameters, and of tokens; float32 or bfloat16. None: the group's device
    handle           more of the handle's configuration (libep.HandleFields): num_sms, sum_quant, ...

    Parameters of this rank, SwiGLU's gate before its up: gate_up [L, H, 2F], down [L, F, H],
    gate_up_bias [L, 2F], down_bias [L, H]; LOCAL names them. Replicated, so that the caller adds
    their gradients over the ranks: router [E, H], shared_gate_up [H, 2S], shared_down [S, H].

    EpError for arguments that are refused.
    """

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
        self.handle = _make_handle(group, top_k, capacity_factor, dtype, handle)
        made: dict[str, Any] = {"dtype": dtype, "device": group.device if device is None else device}
        shapes = {
            "router": (experts, hidden),
            "gate_up": (local, hidden, 2 * inner),
            "down": (local, inner, hidden),
            "gate_up_bias": (local, 2 * inner) if biases else None,
            "down_bias": (local, hidden) if biases else None,
            "shared_gate_up": (hidden, 2 * shared) if shared else None,
            "shared_down": (shared, hidden) if shared else None,
        }
        for name, shape in shapes.items():
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
        received = dispatch(self.handle, tokens, idx, weights)
        rows = self._experts(received)
        if shared is not None and self._side() is not None:
            here = torch.cuda.current_stream(tokens.device)
            here.wait_stream(self._side())
            shared.record_stream(here)
        late = None if self.is_early else received.topk_weights
        return combine(self.handle, received.plan, rows, late, bias=shared).view(x.shape)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of tokens [T, H], [T, K], and their weights, [T, K] float32."""
        logits = F.linear(tokens.float(), self.router.float())
        return route(logits, self.routing, self.expert_bias)

    def _experts(self, received: Received) -> Tensor:
        """What the experts return for the rows that came, [rows, H]."""
        plan, factors = received.plan, None
        both = grouped_mm(received.tokens, self.gate_up, plan)
        if self.gate_up_bias is not None:
            both = add_bias(both, self.gate_up_bias, plan)
        rows = swiglu(both)
        if self.is_early:
            factors = received.topk_weights
            rows = (rows * factors[:, None]).to(both.dtype)
        rows = grouped_mm(rows, self.down, plan)
        return rows if self.down_bias is None else add_bias(rows, self.down_bias, plan, factors)

    def _share(self, tokens: Tensor) -> Tensor:
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
    if has_grouped(group.device, dtype):
        fields["alignment"] = alignment = max(alignment, GROUPED_ALIGNMENT)
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


_sides: dict[int, torch.cuda.Stream] = {}


def _side_stream(ordinal: int) -> torch.cuda.Stream:
    """One stream of each GPU, for what runs beside operations."""
    if ordinal not in _sides:
        _sides[ordinal] = torch.cuda.Stream(ordinal)
    return _sides[ordinal]
