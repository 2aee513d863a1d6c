# SPDX-License-Identifier: Apache-2.0
"""Keywords that this module does not know, and what it cannot do."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .._abi import Status
from .._library import EpError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, NoReturn

logger = logging.getLogger("libep.deep_ep")

# Without these a call would do something else than the caller asked for.
_REFUSED = {
    "use_nvfp4": "here libep dispatches bf16 or fp8 rows, and nvfp4 in low_latency_dispatch",
    "x_global_scale": "it belongs to use_nvfp4 of low_latency_dispatch",
    "sf_scale_for_nvfp4": "the global scale of low_latency_dispatch is x_global_scale",
}
_seen: set[tuple[str, str]] = set()


def refuse(sentence: str) -> NoReturn:
    """Raise EpError UNSUPPORTED."""
    raise EpError(Status.UNSUPPORTED, sentence)


def ignore(call: str, unknown: Mapping[str, Any]) -> None:
    """Log each keyword that `call` does not know, once. EpError for those that it must not ignore."""
    for name, value in unknown.items():
        if value is None or value is False:
            continue
        if name in _REFUSED:
            refuse(f"{call}: expected no {name}, got one: {_REFUSED[name]}")
        mention(call, name, "libep has no such argument")


def mention(call: str, name: str, why: str) -> None:
    """Log once that `call` ignores the argument `name`."""
    if (call, name) not in _seen:
        _seen.add((call, name))
        logger.warning("%s: %s is ignored: %s", call, name, why)
