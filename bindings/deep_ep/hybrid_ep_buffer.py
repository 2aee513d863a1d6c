# SPDX-License-Identifier: Apache-2.0
"""HybridEPBuffer: the interface of DeepEP's hybrid-ep branch to dispatch and combine, on libep.

Routings are maps with a byte for each expert, and dispatch delivers rows in the order of the
experts. So a framework has nothing to permute. Megatron's flex dispatcher and torchtitan use it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._abi import Status
from .._bootstrap import Bootstrap
from .._library import OfProcess, last_error, library
from .._tensor import read, written
from ..torch._group import current_stream
from . import _elastic_checks as _checks
from . import _elastic_steps as _steps
from ._buffer import Buffer, _meet
from ._checks import _number, _refuse, _tensor
from ._elastic_groups import SCALE_BLOCK, ElasticGroups, Form, Key
from ._elastic_handle import EPHandle, Sizes
from ._groups import _backend
from ._handles import _Fields
from ._keywords import ignore, mention, refuse
from ._layout import experts_per_rank

if TYPE_CHECKING:
    from typing import Any, Optional, Union

    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["HybridEPBuffer", "indices_to_map"]

_MOST_TOP_K = 32  # EP_MAX_TOP_K
_SENT = "dispatch_with_permute", ("hidden", "scaling_factor")


def indices_to_map(
    topk_idx: Tensor, topk_weights: Optional[Tensor], num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Optional[Tensor]]:
    """The routing map [T, E] bool of topk_idx [T, K], and its probabilities [T, E] float32.

    Negative indices are no expert. The probabilities are None without topk_weights.
    """
    return _write_map(topk_idx, topk_weights, (num_of_tokens, num_of_experts), with_map=True)


class _Routing(NamedTuple):
    """What a handle was made by."""

    steps: EPHandle
    padded: Tensor
    """[L] rows of each expert, padding included; on the host if the host has read them."""


def _missing(handle: Handle) -> None:
    """An element that DeepEP's kernels have, and libep's have not."""


class Handle(_Fields):
    """What dispatch_with_permute returns for the calls behind it: a tuple of eleven, as DeepEP's.

    Element 3   num_dispatched_tokens_tensor [1] int32: rows of the experts, padding included
    7           tokens_per_expert [L] int32: rows of each, without padding and lost rows
    8           num_of_tokens_per_rank: T
    10          overflow_flag [1] int32: not 0 where rows did not fit into num_permuted_tokens
    others      None
    """

    def __init__(self, routing: _Routing) -> None:
        self.routing = routing

    _readers = (
        *[_missing] * 3,
        lambda handle: handle.routing.steps.plan.totals[:1],
        *[_missing] * 3,
        lambda handle: handle.routing.steps.plan.expert_counts,
        lambda handle: handle.routing.steps.plan.num_tokens,
        _missing,
        lambda handle: handle.routing.steps.plan.totals[2:3],
    )


class HybridEPBuffer(OfProcess):
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
        self.configurer = SimpleNamespace(
            buffer_config=SimpleNamespace(
                hidden_dim=hidden_dim,
                max_num_of_tokens_per_rank=max_num_of_tokens_per_rank,
                num_of_experts_per_rank=num_local_experts,
            )
        )
        self._sms = num_sms_dispatch_api or 0, num_sms_combine_api or 0
        self._groups = ElasticGroups(bootstrap)

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
    ) -> tuple[Tensor, Optional[Tensor], Optional[Tensor], Tensor, Handle]:
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
        ignore("dispatch_with_permute", unknown)
        if use_host_meta is not None:
            non_blocking = not use_host_meta
        if num_dispatched_tokens is not None:
            mention("dispatch_with_permute", "num_dispatched_tokens", "DeepEP deprecates it")
        self._groups.require_open("dispatch_with_permute")
        tokens, scales = _checks.tokens(
            hidden if scaling_factor is None else (hidden, scaling_factor), "tokens", *_SENT
        )
        if non_blocking and handle is None:
            _number("dispatch_with_permute", "num_permuted_tokens", num_permuted_tokens, 1)
        if handle is None:
            route = self._read_map(tokens, topk_idx, topk_weights, num_of_experts, routing_map, probs)
            experts, topk_idx, weights = route
            given = _steps.Given(tokens, scales, weights)
            fixed = num_permuted_tokens if non_blocking else None
            handle, received = self._route(given, topk_idx, experts, pad_multiple or 1, fixed)
        else:
            steps = self._check_handle("dispatch_with_permute", handle).routing.steps
            _checks.rows_of(steps, tokens, scales)
            weights = _weigh(steps, topk_weights, probs)
            received = _steps.send(steps, steps.form, _steps.Given(tokens, scales, weights), None)
        return (
            received.tokens,
            received.topk_weights,
            received.scales,
            handle.routing.padded,
            handle,
        )

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
        ignore("combine_with_unpermute", unknown)
        steps = self._check_handle("combine_with_unpermute", handle).routing.steps
        self._groups.require_open("combine_with_unpermute")
        weights = None if probs is None else probs.reshape(-1)
        _checks.combine(steps, hidden, weights, (), "combine_with_unpermute", ("hidden", "probs"))
        form = steps.form._replace(num_sms=self._sms[1] or Buffer.num_sms)
        out, back = _steps.combine(steps, form, hidden, weights, ())
        if back is None:
            return out, None
        shape = steps.plan.num_tokens, steps.num_experts
        return out, _write_map(steps.topk_idx, back, shape, with_map=False)[1]

    # ---- routings --------------------------------------------------------------------------------

    def _read_map(
        self,
        tokens: Tensor,
        topk_idx: Optional[Tensor],
        topk_weights: Optional[Tensor],
        num_of_experts: Optional[int],
        routing_map: Optional[Tensor],
        probs: Optional[Tensor],
    ) -> tuple[int, Tensor, Optional[Tensor]]:
        """The number of experts, and the routing as dispatch takes it."""
        call, count, device = "dispatch_with_permute", len(tokens), tokens.device
        if routing_map is None:
            if num_of_experts is None:
                refuse(f"{call}: num_of_experts: expected a number with topk_idx, got None")
            _checks.routing(topk_idx, count, device)
            assert topk_idx is not None
            _checks.weights(topk_weights, topk_idx, device)
            return num_of_experts, topk_idx, topk_weights
        _tensor(call, "routing_map", routing_map, (count, "experts"), (torch.bool,), device)
        experts = routing_map.shape[1]
        if probs is not None:
            _tensor(call, "probs", probs, (count, experts), (torch.float32,), device)
        columns = min(experts, _MOST_TOP_K)
        found = tokens.new_empty((count, columns), dtype=torch.int32)
        weights = None if probs is None else probs.new_empty((count, columns))
        _run(
            library.ep_read_routing_map,
            device,
            read(routing_map.contiguous().view(torch.uint8), "map"),
            read(None if probs is None else probs.detach().contiguous(), "probs"),
            current_stream(-1 if device.index is None else device.index),
            written(found, "topk_idx"),
            written(weights, "topk_weights"),
        )
        return experts, found, weights

    def _route(
        self,
        given: _steps.Given,
        topk_idx: Tensor,
        num_experts: int,
        alignment: int,
        fixed: Union[int, Tensor, None],
    ) -> tuple[Handle, _steps.Received]:
        """Make a plan, and send by it.

        fixed  rows of the outputs; None: the host waits for their number
        """
        call, tokens = "dispatch_with_permute", given.tokens
        local = experts_per_rank(call, num_experts, self._groups.bootstrap.size)
        config = self.update_template_config(num_of_tokens_per_rank=len(tokens))
        _number(call, "pad_multiple", alignment, 1)
        if alignment & (alignment - 1):
            _refuse(Status.ALIGNMENT, call, "pad_multiple", "a power of two", alignment)
        width, bound = tokens.shape[1], config.max_num_of_tokens_per_rank
        # At least 2 bytes: a combine of bf16 rows follows a dispatch of fp8 rows.
        row_bytes = width * max(2, tokens.element_size())
        scale_bytes = 4 * -(-width // SCALE_BLOCK)
        key = Key(local, topk_idx.shape[1], row_bytes, scale_bytes, tokens.device)
        group = self._groups.find(key, bound, are_agreed=False)
        rows, sms = int(fixed or 0), self._sms[0] or Buffer.num_sms
        form = Form(True, alignment, rows, sms, alignment > 1, can_lose=True)
        topk_idx = topk_idx.contiguous()
        fast = None
        if fixed is None:
            fast = _steps.route_and_send(group, form, topk_idx, given, alignment)
        if fast is not None:
            plan, sizes, received = fast
        else:
            plan, sizes = _steps.route(
                group, form, topk_idx, Sizes(rows, None, rows, []), alignment
            )
        steps = EPHandle(self, group, form, plan, sizes, topk_idx, bound, alignment)
        if fast is None:
            received = _steps.send(steps, form, given, None)
        if fixed is None:
            _steps.report(group)
            padded = torch.tensor(sizes.counts, dtype=torch.int64)
        else:
            steps.is_captured = tokens.is_cuda and torch.cuda.is_current_stream_capturing()
            padded = plan.expert_padded
        return Handle(_Routing(steps, padded)), received

    def _check_handle(self, call: str, handle: Any) -> Handle:
        if not isinstance(handle, Handle):
            expected, kind = "one that dispatch_with_permute returned", type(handle).__qualname__
            _refuse(Status.TYPE, call, "handle", expected, kind)
        if handle.routing.steps.owner is not self:
            _refuse(Status.FOREIGN, call, "handle", "one of this HybridEPBuffer", "one of another")
        return handle


def _weigh(
    steps: EPHandle, topk_weights: Optional[Tensor], probs: Optional[Tensor]
) -> Optional[Tensor]:
    """The weights of a routing's entries, [T, K], for a dispatch by its handle."""
    idx = steps.topk_idx
    if probs is not None:
        shape = len(idx), steps.num_experts
        _tensor("dispatch_with_permute", "probs", probs, shape, (torch.float32,), idx.device)
        given: Tensor = probs.detach().gather(1, idx.long().clamp(0))
        return given.masked_fill(idx < 0, 0)
    _checks.weights(topk_weights, idx, idx.device)
    return topk_weights


def _run(function: Any, device: torch.device, *given: Any) -> None:
    """Call a function of C that needs no group."""
    status = function(_backend(device), *given)
    if status:
        raise last_error(status)


def _write_map(
    topk_idx: Tensor, topk_weights: Optional[Tensor], shape: tuple[int, int], with_map: bool
) -> tuple[Any, Optional[Tensor]]:
    device = topk_idx.device
    table = topk_idx.new_empty(shape, dtype=torch.uint8) if with_map else None
    probs = None
    if topk_weights is not None:
        topk_weights = topk_weights.detach().float().contiguous()
        probs = topk_weights.new_empty(shape)
    _run(
        library.ep_write_routing_map,
        device,
        read(topk_idx.contiguous(), "topk_idx"),
        read(topk_weights, "topk_weights"),
        current_stream(-1 if device.index is None else device.index),
        written(table, "map"),
        written(probs, "probs"),
    )
    return None if table is None else table.view(torch.bool), probs
