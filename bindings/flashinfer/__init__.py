# SPDX-License-Identifier: Apache-2.0
"""libep as a communication backend of FlashInfer's expert-parallel MoE.

    import libep.flashinfer          # registers the backend "libep" with flashinfer.moe_ep

    comm = flashinfer.moe_ep.create_communication(bootstrap, params, "libep")
    layer = flashinfer.moe_ep.MoEEpLayer(bootstrap, fleet, weights, backend=SplitConfig("libep"))

docs/flashinfer.md of the source tree is the manual.
"""

from ._communication import LibepCommunication
from ._config import LibepConfig
from ._release import RELEASE

__all__ = ["RELEASE", "LibepCommunication", "LibepConfig"]
