# SPDX-License-Identifier: Apache-2.0
"""The libep groups behind vLLM's layers, and what their handles are configured for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._abi import DEFAULT, LATENCY_TOKENS, Backend, ExpertIds, Layout, Mode, Quant, Status, Tail
from .._library import EpError
from ..torch import Handle, create_group

if TYPE_CHECKING:
    from typing import NoReturn, Optional

    from .._bootstrap import Bootstrap
    from ..torch import Group


class Key(NamedTuple):
    """What layers with groups in common have in common."""

    num_experts: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    max_tokens: int
    device: str
    """"cuda" or "cpu"."""


class Form(NamedTuple):
    """The configuration of a handle."""

    is_exact: bool
    """Whether the host reads the number of rows. Else rows lie in a block for each rank."""

    is_small: bool
    """Whether it is a step of at most LATENCY_TOKENS tokens of each rank."""

    quant: Quant
    num_sms: int


class Groups:
    """A group for prefill, and one for decoding, whose buffers are small. Collective to make."""

    def __init__(self, bootstrap: Bootstrap, key: Key) -> None:
        self.key = key
        self.rank = bootstrap.rank
        self.size = bootstrap.size
        self.stream: Optional[torch.cuda.Stream] = None
        """Where sums run beside what the current stream does; None on CPUs."""
        if key.device == "cuda":
            self.stream = torch.cuda.Stream(priority=-1)
        self._handles: dict[Form, Handle] = {}
        small = min(LATENCY_TOKENS, key.max_tokens)
        self._small = self._make(bootstrap, small, Mode.AUTO)
        self._large = self._small
        if small < key.max_tokens:
            self._large = self._make(bootstrap, key.max_tokens, Mode.THROUGHPUT)

    def _make(self, bootstrap: Bootstrap, max_tokens: int, mode: Mode) -> Group:
        key = self.key
        is_cpu = key.device == "cpu"
        return create_group(
            bootstrap,
            num_experts=key.num_experts,
            max_tokens=max_tokens,
            hidden=key.hidden,
            dtype=key.dtype,
            top_k=key.top_k,
            mode=mode,
            backend=Backend.HOST if is_cpu else Backend.CUDA,
            device=DEFAULT if is_cpu else torch.cuda.current_device(),
        )

    def handle(self, form: Form) -> Handle:
        """The handle of steps of this form."""
        found = self._handles.get(form)
        if found is None:
            found = self._handles[form] = Handle(
                self._small if form.is_small else self._large,
                layout=Layout.FLAT if form.is_exact else Layout.RANK_MAJOR,
                mode=Mode.THROUGHPUT if form.is_exact else Mode.AUTO,
                max_recv_rows=0,
                quant=form.quant,
                num_sms=form.num_sms,
                expert_ids=ExpertIds.GLOBAL,
                zero_tail=Tail.IDS,
            )
        return found

    def give_up(self, status: Status, sentence: str) -> NoReturn:
        """Abort the groups, since the other ranks wait for this one, which cannot go on."""
        sentence = f"rank {self.rank}: {sentence}"
        for group in {self._small, self._large}:
            group.abort(sentence)
        raise EpError(status, sentence)

    def close(self) -> None:
        """Close the groups. Collective. Twice does nothing."""
        self._handles.clear()
        self._small.close()
        self._large.close()
