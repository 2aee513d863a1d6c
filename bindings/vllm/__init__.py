# SPDX-License-Identifier: Apache-2.0
"""libep in vLLM: the all2all backends "libep" and "libep_batched".

vLLM finds this module by itself, as a plugin (entry point vllm.general_plugins):

    vllm serve MODEL --enable-expert-parallel --data-parallel-size 8 --all2all-backend libep

docs/vllm.md of the source tree is the manual.
"""

from ._plugin import BACKENDS, RELEASES, register

__all__ = ["BACKENDS", "RELEASES", "register"]
