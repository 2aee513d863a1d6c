# SPDX-License-Identifier: Apache-2.0
"""What programs import from deep_ep.buffers."""

from . import _buffer as legacy
from . import _elastic as elastic

__all__ = ["elastic", "legacy"]
