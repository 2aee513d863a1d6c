# SPDX-License-Identifier: Apache-2.0
"""The first program of docs/python.md, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys

DOCS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../docs/python.md")


def test_first_program():
    with open(DOCS) as page:
        program = re.search(r"```python\n(.*?)```", page.read(), re.S).group(1)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stderr == ""
    # Lines of two threads may run into each other.
    lines = re.findall(r"rank \d: \d rows came, token 0 is \d+ now", done.stdout)
    assert sorted(lines) == [
        "rank 0: 2 rows came, token 0 is 10 now",
        "rank 1: 2 rows came, token 0 is 20 now",
    ]
