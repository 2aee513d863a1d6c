# SPDX-License-Identifier: Apache-2.0
"""How SGLang comes to use libep: through its own registry of hooks."""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

_logger = logging.getLogger("libep.sglang")

RELEASES = ("0.5.23",)
"""The releases of SGLang whose classes are replaced."""

_DEEPEP = "sglang.srt.layers.moe.token_dispatcher.deepep"
_NAME = "libep"


def plugin() -> None:
    """The entry point of the group "sglang.srt.plugins": libep, if SGLANG_PLUGINS names it.

    Without SGLANG_PLUGINS SGLang runs the plugins of all installed packages. libep then does
    nothing, since nobody asked for it.
    """
    names = os.environ.get("SGLANG_PLUGINS", "").split(",")
    if _NAME in (name.strip() for name in names):
        _register()  # SGLang applies the hooks of all plugins
    else:
        _logger.info("libep is not used: SGLANG_PLUGINS=%s would choose it", _NAME)


def install() -> None:
    """Let the backends deepep and deepep_v2 run on libep, in this process. Twice does nothing.

    deepep gets libep's own dispatcher, deepep_v2 SGLang's with libep.deep_ep.ElasticBuffer.
    ImportError for another release. RuntimeError if another deep_ep is imported already.
    """
    _register().apply_hooks()


def _register() -> Any:
    """Register the hooks once. Returns SGLang's registry."""
    require_release()
    from .. import deep_ep

    deep_ep.install()
    hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    from ._dispatcher import Dispatcher

    registry, replace = hooks.HookRegistry, hooks.HookType.REPLACE
    target = f"{_DEEPEP}.DeepEPDispatcher"
    if not any(hook is Dispatcher for _, hook, _ in registry._hooks.get(target, ())):
        registry.register(target, Dispatcher, replace)
        # Captured graphs clean DeepEP's buffer between modes. libep has nothing to clean.
        registry.register(f"{_DEEPEP}.DeepEPBuffer.clean_buffer", lambda _: None, replace)
    return registry


def require_release() -> None:
    """ImportError, with both versions, unless SGLang is of one of the RELEASES."""
    expected = f"libep.sglang: expected sglang {' or '.join(RELEASES)}, got"
    try:
        release = importlib.import_module("sglang.version").__version__
    except ImportError as error:
        raise ImportError(f"{expected} none that can be imported ({error})") from error
    if release not in RELEASES:
        raise ImportError(f"{expected} {release}, whose classes may differ")
