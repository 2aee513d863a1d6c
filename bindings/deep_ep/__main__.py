# SPDX-License-Identifier: Apache-2.0
"""Run a program that imports deep_ep on libep.

python -m libep.deep_ep script.py ARGUMENTS...
python -m libep.deep_ep -m module ARGUMENTS...
python -m libep.deep_ep --path       # the folder for PYTHONPATH, for everything else
"""

from __future__ import annotations

import os
import runpy
import sys

from . import folder, install


def main(arguments: list[str]) -> None:
    """Run the program that the arguments name, as __main__."""
    if arguments == ["--path"]:
        print(folder())
        return
    is_module = arguments[:1] == ["-m"]
    program = arguments[is_module:]
    if not program or program[0].startswith("-"):
        sys.exit(__doc__)
    # Processes that the program starts find deep_ep, too.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [folder(), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    install()
    sys.argv = program
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


main(sys.argv[1:])
