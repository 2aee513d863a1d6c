# SPDX-License-Identifier: Apache-2.0
"""libep in SGLang: its dispatcher in the place of DeepEP's.

    SGLANG_PLUGINS=libep python -m sglang.launch_server --moe-a2a-backend deepep ...

or, in a program, libep.sglang.install() before SGLang makes a model. docs/sglang.md of the source
tree is the manual.
"""

from ._install import RELEASES, install, plugin

__all__ = ["RELEASES", "install", "plugin"]
