# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes that share only a key-value store: here files in a folder."""

import atexit
import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))

COMMON = """
import os, signal, sys, threading, time
import libep
from libep import EpError, Status
rank, size = {rank}, {size}
def say(*words):
    print(*words, flush=True)
def tell(*calls):
    try:
        for call in calls:
            call()
    except EpError as error:
        say(error.status.name, error)
"""
PREAMBLE = COMMON + """
sys.path.insert(0, {here!r})
import numpy as np
from libep import Bootstrap, Group, Handle
from processes import Store
store = Store({folder!r})
def bootstrap(**options):
    return Bootstrap.from_store(rank, size, store.set, store.get, **options)
def group(boot=None, **fields):
    given = dict(num_experts=4, max_tokens=4, max_top_k=1, max_row_bytes=16,
                 backend=libep.Backend.HOST, timeout_seconds=60)
    return Group(boot or bootstrap(), **dict(given, **fields))
idx = np.array([[0], [1], [2], [3]], np.int32)
"""


class Store:
    """set and blocking get, as frameworks have it."""

    def __init__(self, folder):
        self.folder = folder

    def path(self, key):
        return os.path.join(self.folder, key.replace("/", "."))

    def set(self, key, value):
        with open(self.path(key) + ".new", "wb") as file:
            file.write(value)
        os.rename(self.path(key) + ".new", self.path(key))

    def get(self, key, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                with open(self.path(key), "rb") as file:
                    return file.read()
            except FileNotFoundError:
                time.sleep(0.002)
        return None

    def delete(self, key):
        os.unlink(self.path(key))


# Let Ctrl-C reach a rank, also where the tests run in the background of a shell, which ignores it:
# Python leaves an ignored signal alone. A preexec_fn would run Python in a fork of many threads.
RESTORE_CTRL_C = "env", "--default-signal=INT"
PRELOADED: list[str] = []  # modules that take seconds to import: ranks are forks of a process with them


@functools.cache
def forks():
    """The arguments of Python that make a program a fork (forks.py)."""
    program = os.path.join(HERE, "forks.py")
    path = os.path.join(tempfile.mkdtemp(prefix="libep-forks-"), "socket")
    command = [sys.executable, program, "serve", path, *PRELOADED]
    alone = dict(os.environ, OMP_NUM_THREADS="1")  # there are more ranks than cores
    server = subprocess.Popen(command, stdin=subprocess.PIPE, env=alone)
    atexit.register(shutil.rmtree, os.path.dirname(path))
    atexit.register(server.communicate)  # its stdin ends
    while not os.path.exists(path):
        assert server.poll() is None, "forks.py has ended"
        time.sleep(0.01)
    return "-SE", program, path


def spawn(*arguments, inside=(), is_fork=None, stderr=subprocess.PIPE, **environment):
    """Start Python, `inside` of another program. Its stdin and stdout are pipes."""
    is_fork = bool(PRELOADED) if is_fork is None else is_fork
    return subprocess.Popen(
        [*RESTORE_CTRL_C, *inside, sys.executable, *(forks() if is_fork else ()), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, **environment},
    )


def finish(process, seconds=300):
    """Wait for a rank. Return (exit status, stdout, stderr). A rank that hangs is killed."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"a rank did not end within {seconds} s: {out}\n{err}") from None
    return process.returncode, out, err


def finish_all(started, seconds=300):
    """Wait for all ranks and return their results."""
    try:
        return [finish(process, seconds) for process in started]
    finally:
        for process in started:
            process.kill()


def good(result):
    """What a rank printed that ended well. On stderr there may be warnings of libep and PyTorch."""
    status, out, err = result
    assert status == 0, err
    allowed = re.compile(r"$|libep: warn: |(\[rank\d\]:)?\[?W\d|\[Gloo\]")
    assert [line for line in err.splitlines() if not allowed.match(line)] == [], err
    return out


def outcome(result):
    """What a rank printed that ended well; of another one its status and the last line of stderr."""
    status, _, err = result
    return f"{status}: {err.splitlines()[-1]}" if status else good(result)


def check(results, expected):
    """Compare the outcomes of ranks with patterns."""
    for result, pattern in zip(results, expected):
        assert re.fullmatch(pattern, outcome(result), re.S), (pattern, result)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


# ---- ranks that meet in a folder -----------------------------------------------------------------


def start(folder, rank, size, source, inside=()):
    """Start a rank, `inside` of another program: `source` runs after PREAMBLE."""
    text = PREAMBLE.format(here=HERE, rank=rank, size=size, folder=str(folder))
    return spawn("-c", text + source, inside=inside)


def run(folder, *sources):
    """Run one rank for each source and return their results, each (status, stdout, stderr)."""
    return finish_all([start(folder, r, len(sources), s) for r, s in enumerate(sources)])
