# SPDX-License-Identifier: Apache-2.0
"""How "import deep_ep" comes to find libep.deep_ep."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

_MODULES = {  # as DeepEP calls them
    "deep_ep": "libep.deep_ep",
    "deep_ep.buffer": "libep.deep_ep._buffer",
    "deep_ep.buffers": "libep.deep_ep.buffers",
    "deep_ep.buffers.elastic": "libep.deep_ep._elastic",
    "deep_ep.buffers.legacy": "libep.deep_ep._buffer",
    "deep_ep.hybrid_ep_buffer": "libep.deep_ep.hybrid_ep_buffer",
    "deep_ep.utils": "libep.deep_ep.utils",
    "deep_ep.utils.envs": "libep.deep_ep.utils.envs",
    "deep_ep.utils.event": "libep.deep_ep._streams",
    "deep_ep.utils.gate": "libep.deep_ep.utils.gate",
    "deep_ep.utils.math": "libep.deep_ep.utils.math",
    "deep_ep.utils.refs": "libep.deep_ep.utils.refs",
    "deep_ep.utils.semantic": "libep.deep_ep.utils.semantic",
    "deep_ep.utils.testing": "libep.deep_ep.utils.testing",
    "deep_ep_cpp": "libep.deep_ep.utils",
}
_PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "path")


def folder() -> str:
    """The folder that holds a package deep_ep, for PYTHONPATH."""
    return _PATH


def install() -> None:
    """Let "import deep_ep" find libep.deep_ep, in this process and in those that multiprocessing
    spawns from it. Twice does nothing.

    Call it before anything imports deep_ep. RuntimeError if another deep_ep is there already.
    """
    modules = {name: importlib.import_module(ours) for name, ours in _MODULES.items()}
    present = sys.modules.get("deep_ep")
    if present is not None and not _is_ours(present):
        raise RuntimeError(
            "install: expected deep_ep not to be imported yet, got the one at "
            f"{getattr(present, '__file__', None)}: call install() first"
        )
    sys.modules.update(modules)
    if _PATH not in sys.path:
        sys.path.insert(1, _PATH)  # which multiprocessing gives to the processes that it spawns


def _is_ours(module: ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    return path is not None and os.path.abspath(path).startswith(os.path.dirname(_PATH) + os.sep)
