# SPDX-License-Identifier: Apache-2.0
"""What tests of released programs share: ranks that stay, and have imported a release."""

import itertools
import sys
from urllib.error import URLError

import pytest
from ranks import FOLDERS, Ranks

sys.path[:0] = FOLDERS

import processes  # noqa: E402
from wheels import RELEASES, unpack  # noqa: E402

processes.PRELOADED = ["torch", "torch.distributed", "libep.torch", "libep.deep_ep"]


def pytest_generate_tests(metafunc):
    """Two and three ranks for each of a module's PROGRAMS, a file beside it for a release."""
    if "ranks" in metafunc.fixturenames:
        given = [*itertools.product(metafunc.module.PROGRAMS.items(), (2, 3))]
        names = [f"{release}-{size}" for (release, _), size in given]
        metafunc.parametrize("ranks", given, indirect=True, scope="module", ids=names)


@pytest.fixture(scope="module")
def ranks(request):
    """Ranks that know a program's functions. Skips if the release cannot be downloaded."""
    (release, program), size = request.param
    try:
        unpack(release)
    except URLError as error:
        pytest.skip(f"{release} {RELEASES[release]} cannot be downloaded: {error.reason}")
    with Ranks(release, size, request.path.with_name(program)) as made:
        yield made
