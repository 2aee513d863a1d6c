# SPDX-License-Identifier: Apache-2.0
"""The installed FlashInfer, if its interface for communication backends is the one known here."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

RELEASE = "0.7.2.post1"
"""The release of flashinfer-python that this package is made for."""

_ABSTRACT = {"combine", "dispatch", "is_platform_supported"}
_PARAMETERS = {
    "combine": "self expert_output output",
    "dispatch": "self hidden_states topk_ids topk_weights hidden_states_scale max_tokens_per_rank "
    "eplb_local_stats",
    "get_combine_input_buffer": "self dtype",
}
_RESULT = {
    "hidden_states",
    "topk_ids",
    "topk_weights",
    "tokens_per_rank",
    "hidden_states_scale",
    "eplb_gathered_stats",
}


def find() -> Any:
    """The module flashinfer.moe_ep.

    ImportError where it is missing or has another interface. Another release with the same
    interface is taken.
    """
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        raise _refusal(f"none that can be imported ({error})") from error
    release = getattr(flashinfer, "__version__", "one without version")
    try:
        moe_ep = importlib.import_module("flashinfer.moe_ep")
    except ImportError as error:
        raise _refusal(f"{release}, whose moe_ep cannot be imported ({error})") from error
    difference = _compare(moe_ep)
    if difference:
        raise _refusal(f"{release}, {difference}")
    return moe_ep


def _refusal(got: str) -> ImportError:
    return ImportError(f"libep.flashinfer: expected flashinfer {RELEASE}, got {got}")


def _compare(moe_ep: Any) -> str:
    """What is different from RELEASE, or ""."""
    for name in ("MoEEpCommunication", "MoEEpDispatchResult", "register_communication"):
        if not hasattr(moe_ep, name):
            return f"whose moe_ep has no {name}"
    base = moe_ep.MoEEpCommunication
    if base.__abstractmethods__ != _ABSTRACT:
        return f"whose backends have other methods: {', '.join(sorted(base.__abstractmethods__))}"
    for name, expected in _PARAMETERS.items():
        got = " ".join(inspect.signature(getattr(base, name)).parameters)
        if got != expected:
            return f"whose {name} takes other arguments: {got}"
    if {field.name for field in dataclasses.fields(moe_ep.MoEEpDispatchResult)} != _RESULT:
        return "whose dispatch has another result"
    return ""
