# SPDX-License-Identifier: Apache-2.0
"""The options of the backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

MOST_LATENCY_TOKENS = 256  # EP_LATENCY_TOKENS


@dataclass
class LibepConfig:
    """Options of the backend "libep", equal on all ranks.

    Pass it to create_communication(..., backend=LibepConfig(...)), or as SplitConfig(comm=...).
    """

    backend_name: str = "libep"

    latency_tokens: int = MOST_LATENCY_TOKENS
    """Steps of at most so many tokens per rank run in latency mode, 0 .. 256. 0: none does."""

    max_scale_bytes: Optional[int] = None
    """Bytes of the scales of a token. None: those of MoEEpCommParams.dispatch_format."""

    use_low_precision_combine: bool = False
    """Let partial sums travel as fp8 e4m3."""

    num_sms: Optional[int] = None
    """Multiprocessors that operations may use. None: LIBEP_NUM_SMS."""

    timeout_seconds: Optional[float] = None
    """The deadline of every wait. None: LIBEP_TIMEOUT."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency_tokens <= MOST_LATENCY_TOKENS:
            raise ValueError(
                f"LibepConfig.latency_tokens: expected 0 .. {MOST_LATENCY_TOKENS}, got "
                f"{self.latency_tokens}"
            )
