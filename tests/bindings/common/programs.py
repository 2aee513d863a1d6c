# SPDX-License-Identifier: Apache-2.0
"""The programs of documents, as they stand there."""

import os
import re
import subprocess
import sys
import textwrap

from base import TREE


def programs(page):
    """The blocks of Python of a document."""
    with open(os.path.join(TREE, page)) as document:
        found = re.findall(r"^ *```python\n(.*?)^ *```", document.read(), re.S | re.M)
    return [textwrap.dedent(program) for program in found]


def printed(*arguments):
    """What a run of Python prints that ends well, without a word on stderr."""
    options = dict(capture_output=True, text=True, timeout=300)
    done = subprocess.run([sys.executable, *arguments], **options)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout
