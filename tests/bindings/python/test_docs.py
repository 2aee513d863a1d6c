# SPDX-License-Identifier: Apache-2.0
"""The first program of docs/python.md, as it stands there."""

import re

from programs import printed, programs


def test_first_program():
    # Lines of two threads may run into each other.
    pattern = r"rank \d: \d rows came, token 0 is \d+ now"
    lines = re.findall(pattern, printed("-c", programs("docs/python.md")[0]))
    assert sorted(lines) == [
        f"rank {r}: 2 rows came, token 0 is {10 * (r + 1)} now" for r in (0, 1)
    ]
