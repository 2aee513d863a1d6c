# SPDX-License-Identifier: Apache-2.0
"""The releases that the other tests take."""

from __future__ import annotations

import pytest
from conftest import need
from wheels import RELEASES, unpack


@pytest.mark.parametrize("name", RELEASES)
def test_release(name):
    """Its package is there, whose name begins the release's."""
    need(name)
    assert any(name.startswith(path.name) for path in unpack(name).iterdir())
