# SPDX-License-Identifier: Apache-2.0
"""What the tests of all faces share: the device, seeds, pretended nodes, and ranks as threads."""

import builtins
import contextlib
import os
import random
import threading

import libep
import pytest

DEVICE = os.environ.pop("LIBEP_TEST_DEVICE", "cpu")  # libep warns about settings it does not know
SEED = os.environ.pop("LIBEP_TEST_SEED", None)
SECONDS = 60  # deadline of waits
TREE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../..")

# LIBEP_TOPOLOGY: one node, two, and one for each rank of the groups here.
NODES = {"one_node": "", "two_nodes": "2", "a_node_each": "8"}


def make_nodes(*names):
    """The fixture `nodes`: pretended nodes. Sums of multiples of 1/4 do not depend on them."""

    @pytest.fixture(params=names)
    def nodes(request, monkeypatch):
        if DEVICE != "cpu" and NODES[request.param]:
            pytest.skip("pretended nodes are for CPUs")
        monkeypatch.setenv("LIBEP_TOPOLOGY", NODES[request.param])
        monkeypatch.setenv("LIBEP_INTERFACE", "lo")
        return request.param

    return nodes


@pytest.fixture
def seed():
    """A random seed; LIBEP_TEST_SEED=N repeats a run. pytest shows it if the test fails."""
    chosen = int(SEED) if SEED else random.SystemRandom().randrange(1 << 30)
    print(f"LIBEP_TEST_SEED={chosen}")
    return chosen


def run_threads(size, body, *arguments):
    """Call body(bootstrap, *arguments) on `size` threads, one for each rank. Return their results.

    The first error is raised; those of ranks whose peer has failed come last.
    """
    results, errors = [None] * size, []

    def play(bootstrap):
        try:
            results[bootstrap.rank] = body(bootstrap, *arguments)
        except BaseException as error:
            errors.append(error)

    bootstraps = libep.Bootstrap.local(size)
    threads = [threading.Thread(target=play, args=(b,)) for b in bootstraps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for bootstrap in bootstraps:
        bootstrap.close()
    errors.sort(key=lambda error: getattr(error, "status", None) == libep.Status.PEER)
    if errors:
        raise errors[0]
    return results


@contextlib.contextmanager
def refused(text):
    """The block raises `text`: a Status of EpError or a built-in exception, and words to match."""
    kind, _, words = text.partition(" ")
    error = getattr(builtins, kind, libep.EpError)
    with pytest.raises(error, match=words or None) as caught:
        yield caught
    if error is libep.EpError and kind != "EpError":
        assert caught.value.status.name == kind, caught.value
