# SPDX-License-Identifier: Apache-2.0
"""What programs import from deep_ep.utils and from deep_ep_cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._config import Config
from .._streams import EventHandle, EventOverlap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

topk_idx_t = torch.int64

__all__ = ["Config", "EventHandle", "EventOverlap", "check_nvlink_connections", "topk_idx_t"]


def check_nvlink_connections(group: ProcessGroup) -> None:
    """Do nothing: libep finds out whether GPUs reach each other where a group is created."""
