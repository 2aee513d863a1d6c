# SPDX-License-Identifier: Apache-2.0
"""How "import deep_ep" comes to find libep.deep_ep."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

_PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "path")


def folder() -> str:
    """The folder that holds a package deep_ep, for PYTHONPATH."""
    return _PATH


def install() -> None:
    """Let "import deep_ep" find libep.deep_ep, in this process. Twice does nothing.

    Call it before anything imports deep_ep. RuntimeError if another deep_ep is there already.
    """
    # "deep_ep" and "deep_ep.buffer" are what DeepEP's own modules are called.
    modules: dict[str, ModuleType] = {
        "deep_ep": importlib.import_module("libep.deep_ep"),
        "deep_ep.buffer": importlib.import_module("libep.deep_ep._buffer"),
        "deep_ep.utils": importlib.import_module("libep.deep_ep.utils"),
        "deep_ep_cpp": importlib.import_module("libep.deep_ep.utils"),
    }
    present = sys.modules.get("deep_ep")
    if present is not None and not _is_ours(present):
        raise RuntimeError(
            "install: expected deep_ep not to be imported yet, got the one at "
            f"{getattr(present, '__file__', None)}: call install() first"
        )
    sys.modules.update(modules)


def _is_ours(module: ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    return path is not None and os.path.abspath(path).startswith(os.path.dirname(_PATH) + os.sep)
