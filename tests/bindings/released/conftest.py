# SPDX-License-Identifier: Apache-2.0
"""What tests of released programs share: the release's files, and ranks that stay."""

from __future__ import annotations

import os
import sys
from urllib.error import URLError

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "../common")]

from ranks import Ranks  # noqa: E402
from wheels import RELEASES, unpack  # noqa: E402


def need(name):
    """Skip a test, or a module that calls it, if a release is neither here nor to be downloaded."""
    try:
        unpack(name)
    except URLError as error:
        reason = f"{name} {RELEASES[name]} cannot be downloaded: {error.reason}"
        pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module", params=(2, 3))
def ranks(request):
    """Two and three ranks that know the functions of PROGRAM, a file beside the test module."""
    with Ranks(request.param, request.path.with_name(request.module.PROGRAM)) as made:
        yield made
