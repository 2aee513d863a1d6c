# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls in each of its processes: it adds the backends, for releases that are known."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from ._patches import BACKENDS, patch

if TYPE_CHECKING:
    from typing import Any

__all__ = ["BACKENDS", "RELEASES", "register"]

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_COMMUNICATORS = "vllm.distributed.device_communicators"

RELEASES = {
    "0.33.0": {
        "config": "vllm.config.parallel.ParallelConfig",
        "whole_config": "vllm.config.vllm.VllmConfig",
        "backend_type": "vllm.config.parallel.All2AllBackend",
        "moe_config": f"{_FUSED_MOE}.config.FusedMoEParallelConfig",
        "make": f"{_FUSED_MOE}.all2all_utils.maybe_make_prepare_finalize",
        "round_hidden": f"{_FUSED_MOE}.all2all_utils.maybe_roundup_layer_hidden_size",
        "find_manager": f"{_FUSED_MOE}.all2all_utils.get_ep_all2all_manager",
        "communicator": f"{_COMMUNICATORS}.cuda_communicator.CudaCommunicator",
        "base": f"{_COMMUNICATORS}.base_device_communicator.DeviceCommunicatorBase",
    }
}
"""The releases of vLLM that are served, and what is replaced or used in each."""


def register() -> bool:
    """Add the backends to vLLM. Twice does nothing more.

    Returns whether they are there. In a release that is not one of RELEASES, or lacks what is
    replaced, vLLM stays as it is, and its log has a sentence that says so.
    """
    version = importlib.import_module("vllm").__version__
    names = RELEASES.get(version.partition("+")[0])
    if names is None:
        return _leave(f"expected vLLM {' or '.join(RELEASES)}, got {version}")
    found: dict[str, Any] = {}
    for what, name in names.items():
        module, _, attribute = name.rpartition(".")
        found[what] = getattr(importlib.import_module(module), attribute, None)
        if found[what] is None:
            return _leave(f"expected {name}, which vLLM {version} has, got one without it")
    patch(found, names)
    return True


def _leave(sentence: str) -> bool:
    logging.getLogger("vllm.libep").warning(
        "libep.vllm: %s: the all2all backends %s are not there", sentence, " and ".join(BACKENDS)
    )
    return False
