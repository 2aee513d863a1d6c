# SPDX-License-Identifier: Apache-2.0
"""The programs of documents, as they stand there."""

import os
import re
import textwrap

from base import TREE
from processes import finish, spawn


def programs(page):
    """The blocks of Python of a document."""
    with open(os.path.join(TREE, page)) as document:
        found = re.findall(r"^ *```python\n(.*?)^ *```", document.read(), re.S | re.M)
    return [textwrap.dedent(program) for program in found]


def printed(*arguments):
    """What a run of Python prints that ends well, without a word on stderr."""
    status, out, err = finish(spawn(*arguments), 300)
    assert (status, err) == (0, ""), err
    return out
