# SPDX-License-Identifier: Apache-2.0
"""What the tests share: ranks as threads, and seeds."""

from __future__ import annotations

import os
import random
import sys
import threading

import libep
import pytest

sys.path.insert(0, os.path.dirname(__file__))

SECONDS = 20  # deadline of waits


def config(world, **fields):
    """The configuration of a group for a World."""
    given = dict(
        num_experts=world.experts,
        max_tokens=world.max_tokens,
        max_top_k=world.top_k,
        max_row_bytes=world.hidden * 4,
        backend=libep.Backend.HOST,
        timeout_seconds=SECONDS,
    )
    given.update(fields)
    return given


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


# LIBEP_TOPOLOGY: one node, two, and one for each rank of the groups here.
NODES = {"one_node": "", "two_nodes": "2", "a_node_each": "8"}


@pytest.fixture(params=NODES)
def nodes(request, monkeypatch):
    """Pretended nodes. Sums of multiples of 1/4 do not depend on them."""
    monkeypatch.setenv("LIBEP_TOPOLOGY", NODES[request.param])
    monkeypatch.setenv("LIBEP_INTERFACE", "lo")
    return request.param


@pytest.fixture
def seed():
    """A random seed; LIBEP_TEST_SEED=N repeats a run. pytest shows it if the test fails."""
    given = os.environ.get("LIBEP_TEST_SEED")
    chosen = int(given) if given else random.SystemRandom().randrange(1 << 30)
    print(f"LIBEP_TEST_SEED={chosen}")
    return chosen
