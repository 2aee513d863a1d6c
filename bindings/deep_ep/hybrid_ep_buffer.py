# SPDX-License-Identifier: Apache-2.0
"""HybridEPBuffer: the interface of DeepEP's hybrid-ep branch to dispatch and combine, on libep.

Routings are maps with a byte for each expert, and dispatch delivers rows in the order of the
experts. So a framework has nothing to permute. Megatron's flex dispatcher and torchtitan use it.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

from .._abi import Status
from .._bootstrap import Bootstrap
from .._library import EpError, OfProcess, check, library
from .._tensor import read, written
from ..torch import Plan, _fast
from ..torch._fast import hybrid_combine, hybrid_dispatch
from ..torch._group import current_stream
from . import _elastic_checks as _checks
from ._buffer import Buffer, _meet
from ._checks import _number, _refuse, _tensor, settle
from ._elastic_groups import SCALE_BLOCK, ElasticGroup, ElasticGroups, Form, Key
from ._groups import _backend
from ._handles import _Fields
from ._keywords import ignore, mention, refuse
from ._layout import experts_per_rank
from ._streams import keep

if TYPE_CHECKING:
    from typing import Callable

    from torch.distributed import ProcessGroup

    _Sent = tuple[Tensor, Optional[Tensor], Optional[Tensor], Tensor, "Handle"]

__all__ = ["HybridEPBuffer", "indices_to_map"]

_MOST_TOP_K = 32  # EP_MAX_TOP_K
_NAMELESS = tuple(  # types that C has no name for: rows of bytes
    getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)
)
_SENT = "dispatch_with_permute", ("hidden", "scaling_factor")
_DEFAULTS = {"non_blocking": False}  # of what C reads; others are None


def indices_to_map(
    topk_idx: Tensor, topk_weights: Optional[Tensor], num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Optional[Tensor]]:
    """The routing map [T, E] bool of topk_idx [T, K], and its probabilities [T, E] float32.

    Negative indices are no expert. The probabilities are None without topk_weights.
    """
    device, shape = topk_idx.device, (num_of_tokens, num_of_experts)
    table, probs = topk_idx.new_empty(shape, dtype=torch.bool), None
    if topk_weights is not None:
        topk_weights = topk_weights.detach().float().contiguous()
        probs = topk_weights.new_empty(shape)
    check(
        library.ep_write_routing_map(
            _backend(device),
            read(topk_idx.contiguous(), "topk_idx"),
            read(topk_weights, "topk_weights"),
            current_stream(-1 if device.index is None else device.index),
            written(table.view(torch.uint8), "map"),
            written(probs, "probs"),
        )
    )
    return table, probs


def _missing(handle: Handle) -> None:
    """An element that DeepEP's kernels have, and libep's have not."""


class _Step:
    """A configuration of steps: handles of libep, and what C knows of them."""

    def __init__(self, group: ElasticGroup, form: Form, width: int, bound: int) -> None:
        self.group = group
        self.form = form
        self.width = width
        self.bound = bound
        self.send = group.layer(form)
        is_exact = form.max_recv_rows == 0
        self.facts = _fast.StepFacts(
            object=id(self),
            send=self.send.facts_at,
            numbers=group.numbers.address if is_exact else None,
            width=width,
            row_bytes=group.key.row_bytes,
            bound=bound,
            alignment=form.alignment,
            rows=form.max_recv_rows,
            send_sms=form.num_sms,
        )
        self.address = ctypes.addressof(self.facts)

    def sum_by(self, num_sms: int) -> None:
        """Let combine use so many multiprocessors."""
        layer = self.group.layer(self.form._replace(num_sms=num_sms))
        self.facts.sum, self.facts.sum_sms = layer.facts_at, num_sms


class _State(NamedTuple):
    """What a handle knows."""

    owner: HybridEPBuffer
    step: _Step
    plan: Tensor
    numbers: Union[bytes, Tensor]
    topk_idx: Tensor
    num_tokens: int
    num_rows: int
    stream: int

    @classmethod
    def read(cls, items: tuple[Any, ...]) -> _State:
        """items: as hybrid.c makes them."""
        owner, step, sent, memory, numbers, _, topk_idx = items[:7]
        facts = _fast.SentFacts.from_buffer_copy(sent)
        layer, tokens = step.send, facts.num_tokens
        if topk_idx is None:
            ids = memory[facts.ids_at :][: 4 * tokens * layer.top_k]
            topk_idx = ids.view(torch.int32).view(tokens, layer.top_k)
        plan, stream = memory[: layer.plan_bytes], facts.stream or 0
        return cls(owner, step, plan, numbers, topk_idx, tokens, facts.num_rows, stream)

    @property
    def do_expand(self) -> bool:
        """Rows lie in the order of the experts."""
        return True

    @property
    def group(self) -> ElasticGroup:
        return self.step.group

    @property
    def num_experts(self) -> int:
        return self.group.key.experts_per_rank * self.group.group.size


class Handle(_Fields):
    """What dispatch_with_permute returns for the calls behind it: a tuple of eleven, as DeepEP's.

    Element 3   num_dispatched_tokens_tensor [1] int32: rows of the experts, padding included
    7           tokens_per_expert [L] int32: rows of each, without padding and lost rows
    8           num_of_tokens_per_rank: T
    10          overflow_flag [1] int32: not 0 where rows did not fit into num_permuted_tokens
    others      None
    """

    @property
    def state(self) -> _State:
        return _State.read(tuple(tuple.__iter__(self)))

    @functools.cached_property
    def plan(self) -> Plan:
        state = self.state
        numbers, local = state.numbers, state.step.group.key.experts_per_rank
        if isinstance(numbers, bytes):
            on_host = torch.frombuffer(bytearray(numbers), dtype=torch.int32)
            numbers = on_host.to(state.plan.device)
        return Plan(state.plan, numbers, state.num_tokens, local)

    _readers = (
        *[_missing] * 3,
        lambda handle: handle.plan.totals[:1],
        *[_missing] * 3,
        lambda handle: handle.plan.expert_counts,
        lambda handle: handle.plan.num_tokens,
        _missing,
        lambda handle: handle.plan.totals[2:3],
    )


class _Config(SimpleNamespace):
    """Sizes of a buffer. Its largest number of tokens stands where C reads it."""

    __slots__ = ("_facts",)
    _facts: _fast.BufferFacts

    @property
    def max_num_of_tokens_per_rank(self) -> int:
        bound: int = self._facts.bound
        return bound

    @max_num_of_tokens_per_rank.setter
    def max_num_of_tokens_per_rank(self, most: int) -> None:
        self._facts.bound = most


class HybridEPBuffer(OfProcess, _fast.WithFacts):
    """Dispatch and combine for the ranks of a process group. See docs/deep_ep.md.

    group                       a torch.distributed ProcessGroup of any backend, or a
                                libep.Bootstrap
    max_num_of_tokens_per_rank  for which memory is allocated: the largest of all ranks counts. A step
                                with more tokens makes it grow, and then all ranks must have more, as
                                DeepEP asks for
    num_sms_dispatch_api, num_sms_combine_api
                                multiprocessors of an operation; None: Buffer.num_sms
    other arguments             not used: kernels are compiled, and memory is allocated by the first
                                call of each configuration

    Not collective. Calls are in the same order on every rank.
    """

    def __init__(
        self,
        group: Union[ProcessGroup, Bootstrap],
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: Optional[int] = None,
        num_sms_combine_api: Optional[int] = None,
        num_sms_preprocessing_api: Optional[int] = None,
        num_blocks_permute: Optional[int] = None,
        num_blocks_unpermute: Optional[int] = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: Optional[int] = None,
        use_mnnvl: Optional[bool] = None,
        **unknown: Any,
    ) -> None:
        ignore("HybridEPBuffer", unknown)
        for name, value in dict(
            hidden_dim=hidden_dim,
            max_num_of_tokens_per_rank=max_num_of_tokens_per_rank,
            num_local_experts=num_local_experts,
        ).items():
            _number("HybridEPBuffer", name, value, name != "max_num_of_tokens_per_rank")
        bootstrap = group if isinstance(group, Bootstrap) else _meet(group)
        self.group = group
        self.rank = self.local_rank = bootstrap.rank
        self.group_size = self.num_of_hybrid_ep_ranks_per_nvlink_domain = bootstrap.size
        self.node_rank, self.num_of_nodes = 0, 1
        facts = self._facts = _fast.BufferFacts(
            bound=max_num_of_tokens_per_rank,
            send_sms=num_sms_dispatch_api or 0,
            sum_sms=num_sms_combine_api or 0,
        )
        _fast.tell(self, facts)
        sizes = _Config(hidden_dim=hidden_dim, num_of_experts_per_rank=num_local_experts)
        sizes._facts = facts
        self.configurer = SimpleNamespace(buffer_config=sizes)
        self._groups = ElasticGroups(bootstrap)
        self._steps: list[_Step] = []
        """Those of the present number of tokens, the newest first."""

    def destroy(self) -> None:
        """Close the libep groups. Collective. Twice does nothing.

        Without it they are closed at the end of the process.
        """
        self._groups.close()

    def empty_jit_cache(self) -> None:
        """Does nothing: libep's kernels are compiled."""

    def update_template_config(
        self, hidden_dim: Optional[int] = None, num_of_tokens_per_rank: int = 0, **unused: Any
    ) -> SimpleNamespace:
        """Let later calls have at least so many tokens. Equal on all ranks. Returns the numbers."""
        config: SimpleNamespace = self.configurer.buffer_config
        most = max(config.max_num_of_tokens_per_rank, num_of_tokens_per_rank or 0)
        config.max_num_of_tokens_per_rank = most
        config.hidden_dim = hidden_dim or config.hidden_dim
        return config

    def dispatch(self, *_: Any, **__: Any) -> None:
        """EpError UNSUPPORTED: see dispatch_with_permute."""
        refuse(
            "dispatch: expected dispatch_with_permute, got dispatch: libep delivers rows of a "
            "HybridEPBuffer in the order of the experts alone"
        )

    combine = dispatch

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Optional[Tensor] = None,
        topk_weights: Optional[Tensor] = None,
        num_of_experts_per_rank: Optional[int] = None,
        num_of_experts: Optional[int] = None,
        use_fp8: Optional[bool] = None,
        routing_map: Optional[Tensor] = None,
        probs: Optional[Tensor] = None,
        scaling_factor: Optional[Tensor] = None,
        num_permuted_tokens: Union[int, Tensor, None] = None,
        pad_multiple: Optional[int] = None,
        handle: Optional[Handle] = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: Optional[int] = None,
        use_host_meta: Optional[bool] = None,
        **unknown: Any,
    ) -> _Sent:
        """Send each token to its experts. Collective.

        hidden               [T, H] of any type
        routing_map          [T, E] bool: the experts of each token, at most 32
        probs                [T, E] float32: their weights, or None
        topk_idx, topk_weights, num_of_experts
                             [T, K] and E, in place of the two
        scaling_factor       [T, S] float32 or int32: scales of fp8 rows
        num_permuted_tokens  with non_blocking: rows of the outputs. Rows that do not fit are lost.
        pad_multiple         each expert's rows are filled up to a multiple of it with zeros: a
                             power of two
        handle               of a dispatch before: send by its routing
        non_blocking         whether the host does not wait for the sizes

        Returns

        hidden               [rows, H], ordered by (expert, source rank, token)
        probs                [rows] float32: the weight of each row; 0 where it pads; None without
                             probs
        scaling_factor       [rows, S], or None
        tokens_per_expert    [L] rows of each expert, padding included; int64 on the host, with
                             non_blocking int32 on the device
        handle               for the calls behind it; the one given, if any

        EpError if the routing is refused or a rank does not arrive.
        """
        if unknown:
            ignore("dispatch_with_permute", unknown)
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        if num_dispatched_tokens is not None:
            mention("dispatch_with_permute", "num_dispatched_tokens", "DeepEP deprecates it")
        self._groups.require_open("dispatch_with_permute")
        tokens, scales = _checks.tokens(
            hidden if scaling_factor is None else (hidden, scaling_factor), "tokens", *_SENT
        )
        if handle is not None:
            handle = self._check_handle("dispatch_with_permute", handle)
            sent: _Sent = self._send(handle, tokens, scales, topk_weights, probs)
            return sent
        if non_blocking:
            _number("dispatch_with_permute", "num_permuted_tokens", num_permuted_tokens, 1)
        routing = self._read_routing(
            tokens, topk_idx, topk_weights, num_of_experts, routing_map, probs
        )
        fixed = int(num_permuted_tokens or 0) if non_blocking else 0
        sent = self._route(tokens, scales, routing, pad_multiple or 1, fixed)
        return sent

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Optional[Tensor] = None,
        handle: Optional[Handle] = None,
        pad_multiple: Optional[int] = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: Optional[int] = None,
        **unknown: Any,
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Return rows to the ranks of their tokens and sum them, unweighted. Collective.

        hidden  [rows, H] bfloat16, float16 or float32, shaped like the rows of the dispatch
        probs   [rows] of any float type, to return as well, such as gradients; None: none

        Returns the sums [T, H], and [T, E] float32 with each row's probability at its expert, or
        None.
        """
        if unknown:
            ignore("combine_with_unpermute", unknown)
        call = "combine_with_unpermute"
        state = self._check_handle(call, handle).state
        self._groups.require_open(call)
        weights = None if probs is None else probs.reshape(-1)
        _checks.combine(state, hidden, weights, (), call, ("hidden", "probs"))
        num_sms = self._facts.sum_sms or Buffer.num_sms
        state.step.sum_by(num_sms)
        for each in (state.plan, state.topk_idx):
            keep(each, state.stream)
        weights = None if weights is None else weights.float()
        words = dict(hidden=_plain(hidden), probs=_flat(weights), handle=handle)
        out, back = _again(state.step, hybrid_combine, (self, True, num_sms), _SUM_WORDS, words)
        return out, back

    # ---- calls that are not like the one before --------------------------------------------------

    def _read_routing(
        self,
        tokens: Tensor,
        topk_idx: Optional[Tensor],
        topk_weights: Optional[Tensor],
        num_of_experts: Optional[int],
        routing_map: Optional[Tensor],
        probs: Optional[Tensor],
    ) -> _Routing:
        """The routing as C takes it."""
        call, count, device = "dispatch_with_permute", len(tokens), tokens.device
        if routing_map is None:
            if num_of_experts is None:
                refuse(f"{call}: num_of_experts: expected a number with topk_idx, got None")
            _checks.routing(topk_idx, count, device)
            assert topk_idx is not None
            _checks.weights(topk_weights, topk_idx, device)
            weights = None if topk_weights is None else topk_weights.float()
            return _Routing(None, None, _plain(topk_idx), _flat(weights), num_of_experts)
        _tensor(call, "routing_map", routing_map, (count, "experts"), (torch.bool,), device)
        experts = routing_map.shape[1]
        if probs is not None:
            _tensor(call, "probs", probs, (count, experts), (torch.float32,), device)
        return _Routing(_plain(routing_map), _flat(probs), None, None, experts)

    def _route(
        self,
        tokens: Tensor,
        scales: Optional[Tensor],
        routing: _Routing,
        alignment: int,
        fixed: int,
    ) -> Any:
        """Find or make what steps of these sizes need, and dispatch.

        fixed  rows of the outputs; 0: the host waits for their number
        """
        call, num_experts = "dispatch_with_permute", routing.num_of_experts
        local = experts_per_rank(call, num_experts, self._groups.bootstrap.size)
        config = self.update_template_config(num_of_tokens_per_rank=len(tokens))
        _number(call, "pad_multiple", alignment, 1)
        if alignment & (alignment - 1):
            _refuse(Status.ALIGNMENT, call, "pad_multiple", "a power of two", alignment)
        width, bound = tokens.shape[1], config.max_num_of_tokens_per_rank
        # At least 2 bytes: a combine of bf16 rows follows a dispatch of fp8 rows.
        row_bytes = width * max(2, tokens.element_size())
        scale_bytes = 4 * -(-width // SCALE_BLOCK)
        idx = routing.topk_idx
        top_k = min(num_experts, _MOST_TOP_K) if idx is None else idx.shape[1]
        key = Key(local, top_k, row_bytes, scale_bytes, tokens.device)
        group = self._groups.find(key, bound, are_agreed=False)
        sms = self._facts.send_sms or Buffer.num_sms
        form = Form(True, alignment, fixed, sms, alignment > 1, can_lose=True)
        step = self._find_step(group, form, width, bound)
        first = (self, False, sms, step.address, bound)
        words = dict(
            routing._asdict(),
            hidden=_plain(tokens),
            scaling_factor=_flat(scales),
            pad_multiple=alignment,
            num_permuted_tokens=fixed,
            non_blocking=fixed > 0,
        )
        made = _again(step, hybrid_dispatch, first, _SEND_WORDS, words)
        return made if made[0].dtype == tokens.dtype else (made[0].view(tokens.dtype), *made[1:])

    def _find_step(self, group: ElasticGroup, form: Form, width: int, bound: int) -> _Step:
        """The step of these sizes, the first one that C looks at from now on."""
        same = [each for each in self._steps if each.bound == bound]
        for found in same:
            if (found.group, found.form, found.width) == (group, form, width):
                break
        else:
            found = _Step(group, form, width, bound)
        self._steps = [found, *(each for each in same if each is not found)]
        for each, after in zip(self._steps, [*self._steps[1:], None]):
            each.facts.next = None if after is None else after.address
        self._facts.steps = found.address
        return found

    def _send(
        self,
        handle: Handle,
        tokens: Tensor,
        scales: Optional[Tensor],
        topk_weights: Optional[Tensor],
        probs: Optional[Tensor],
    ) -> Any:
        """Dispatch by a handle."""
        state = handle.state
        _checks.rows_of(state, tokens, scales)
        weights = _weigh(state, topk_weights, probs)
        for each in (state.plan, state.topk_idx):
            keep(each, state.stream)
        words = dict(
            hidden=_plain(tokens),
            scaling_factor=_flat(scales),
            topk_weights=_flat(None if weights is None else weights.float()),
            handle=handle,
        )
        first = (self, True, 0, 0, 0)
        made = _again(state.step, hybrid_dispatch, first, _SEND_WORDS, words)
        return made if made[0].dtype == tokens.dtype else (made[0].view(tokens.dtype), *made[1:])

    def _check_handle(self, call: str, handle: object) -> Handle:
        if not isinstance(handle, Handle):
            expected, kind = "one that dispatch_with_permute returned", type(handle).__qualname__
            _refuse(Status.TYPE, call, "handle", expected, kind)
        used: Handle = handle
        if used.state.owner is not self:
            _refuse(Status.FOREIGN, call, "handle", "one of this HybridEPBuffer", "one of another")
        return used


class _Routing(NamedTuple):
    """A routing as C takes it: by a map, or by ids."""

    routing_map: Optional[Tensor]
    probs: Optional[Tensor]
    topk_idx: Optional[Tensor]
    topk_weights: Optional[Tensor]
    num_of_experts: int


def _again(
    step: _Step,
    function: Callable[..., Any],
    first: tuple[Any, ...],
    names: tuple[str, ...],
    given: dict[str, Any],
) -> Any:
    """Make a call with checked arguments: `first`, and keywords, `names` in the order of C's."""
    core = step.group.group
    core.require()
    made = function(*first, *(given.get(name, _DEFAULTS.get(name)) for name in names))
    if made is None:
        core.run(function)  # which says so if another thread is in a call
        raise EpError(Status.ADDRESS, "expected tensors with memory of their own, got others")
    if type(made) is not tuple:
        settle(made)
    return made


def _plain(tensor: Tensor) -> Tensor:
    """The tensor, or a copy or view, such that C takes it."""
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.uint8) if tensor.dtype in _NAMELESS else tensor


def _flat(tensor: Optional[Tensor]) -> Optional[Tensor]:
    return None if tensor is None else _plain(tensor)


def _weigh(
    state: _State, topk_weights: Optional[Tensor], probs: Optional[Tensor]
) -> Optional[Tensor]:
    """The weights of a routing's entries, [T, K], for a dispatch by its handle."""
    idx = state.topk_idx
    if probs is not None:
        shape = len(idx), state.num_experts
        _tensor("dispatch_with_permute", "probs", probs, shape, (torch.float32,), idx.device)
        given: Tensor = probs.detach().gather(1, idx.long().clamp(0))
        return given.masked_fill(idx < 0, 0)
    _checks.weights(topk_weights, idx, idx.device)
    return topk_weights


def _words_of(method: Callable[..., Any]) -> tuple[str, ...]:
    """The keywords of a method that have names, in the order in which C has them."""
    known = inspect.signature(method).parameters.values()
    return tuple(each.name for each in known if each.kind is each.KEYWORD_ONLY)


_SEND_WORDS = _words_of(HybridEPBuffer.dispatch_with_permute)
_SUM_WORDS = _words_of(HybridEPBuffer.combine_with_unpermute)
_fast.make_hybrid_methods(HybridEPBuffer, Handle, Buffer, settle)
