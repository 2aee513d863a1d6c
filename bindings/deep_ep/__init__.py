# SPDX-License-Identifier: Apache-2.0
"""libep behind DeepEP's interface: programs that import deep_ep run on libep.

    import libep.deep_ep
    libep.deep_ep.install()          # from now on "import deep_ep" finds this module

or python -m libep.deep_ep script.py. docs/deep_ep.md of the source tree is the manual.
"""

import torch

from .._version import __version__ as _libep_version
from ._buffer import Buffer
from ._config import Config
from ._elastic import ElasticBuffer, EPHandle
from ._install import folder, install
from ._streams import EventHandle, EventOverlap
from .hybrid_ep_buffer import HybridEPBuffer
from .utils.envs import get_logical_domain_size, get_physical_domain_size

__version__ = f"1.2.1+libep.{_libep_version}"
"""The version of DeepEP whose interface this is, and that of libep."""

topk_idx_t = torch.int64
"""The type of topk_idx that DeepEP takes. Here int32 works as well."""

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "folder",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "install",
    "topk_idx_t",
]
