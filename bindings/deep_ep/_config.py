# SPDX-License-Identifier: Apache-2.0
"""Config: what DeepEP's kernels are tuned with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """How a dispatch or combine is tuned. libep uses num_sms alone; it has no chunks to choose."""

    num_sms: int = 20
    """Multiprocessors that the operation may use, even."""

    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """The bytes that a Buffer must be given: 0, since libep allocates its own memory."""
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """As get_nvl_buffer_size_hint."""
        return 0
