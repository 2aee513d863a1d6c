# SPDX-License-Identifier: Apache-2.0
"""What ep_info tells: version, backend and why, settings."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from . import _abi
from ._group import Group
from ._library import FOLDER, PATH, EpError, check, library, version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Setting(NamedTuple):
    """A setting: an environment variable, read when a group is created."""

    type: str
    default: str
    value: str
    doc: str


def settings() -> dict[str, Setting]:
    """All settings by name. EpError SETTING if the environment has an unknown or malformed one."""
    found: dict[str, Setting] = {}

    def visit(setting: Any, _: object) -> None:
        s = setting.contents
        found[s.name.decode()] = Setting(
            s.type.decode(), s.default_value.decode(), s.value.decode(), s.doc.decode()
        )

    check(library.ep_settings(_abi.VISIT(visit), None))
    return found


def nccl_ep_home() -> str:
    """The folder to set NCCL_EP_HOME to, so that others load libep instead of NCCL EP."""
    return os.path.join(FOLDER, "nccl_ep")


def info(num_ranks: int = 1) -> dict[str, Any]:
    """Facts about this installation, as ep_info prints them.

    version, library (its path), nccl_ep_home, backend (the one that AUTO takes here for a group of
    `num_ranks` ranks, as far as one rank can tell), reason (why), settings (by name).
    """
    memory = Group.memory(
        num_ranks, num_experts=num_ranks, max_tokens=1, max_top_k=1, max_row_bytes=16
    )
    return {
        "version": version(),
        "library": PATH,
        "nccl_ep_home": nccl_ep_home(),
        "backend": memory.backend,
        "reason": memory.reason,
        "settings": settings(),
    }


def main() -> int:
    """Print info() as text: python -m libep. Returns the exit status."""
    from argparse import ArgumentParser  # import libep does not need it

    ArgumentParser(
        prog="python -m libep", description="Print the version, the backend and why, and settings."
    ).parse_args()
    try:
        _show(info())
    except EpError as error:
        print(f"libep: {error}", file=sys.stderr)
        return 1
    return 0


def _show(facts: dict[str, Any]) -> None:
    print(f"libep {facts['version']}\nlibrary: {facts['library']}")
    backend, reason = facts["backend"].name.lower(), facts["reason"]
    print("backend:", reason if reason.startswith(backend) else f"{backend}: {reason}")
    print("settings (* changed)")
    for name, setting in facts["settings"].items():
        mark = "*" if setting.value != setting.default else " "
        print(
            f"{mark} {name:17} {setting.value or '-':16} default {setting.default or '-':12} "
            f"{setting.type}\n  {'':17} {setting.doc}"
        )
