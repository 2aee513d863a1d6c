# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: bootstraps from Python, Ctrl-C, forks, and how processes end."""

import os
import signal
import subprocess
import time

import processes
import pytest
from processes import check, finish, finish_all, good, run, spawn, start

STEP = """
with group() as g:
    layer = Handle(g)
    layer.prepare(idx)
    x = np.full((4, 4), rank + 1, np.float32)
    recv, out = np.zeros((layer.info().recv_rows, 4), np.float32), np.zeros_like(x)
    layer.dispatch(x, recv_tokens=recv)
    layer.combine(recv, out=out)
    assert (out == x).all()
    say("rows", layer.info().recv_rows)
"""


def test_store(tmp_path, nodes):
    check(run(tmp_path, STEP, STEP, STEP), ["rows 6\n", "rows 3\n", "rows 3\n"])


def test_store_forgets_old_keys(tmp_path):
    source = """
boot = bootstrap(delete=store.delete, prefix="mine")
for _ in range(5):
    group(boot).close()
"""
    check(run(tmp_path, source, source), ["", ""])
    names = os.listdir(tmp_path)
    assert len(names) <= 4 and all(name.startswith("mine.") for name in names), names


# ---- programs, and patterns of what ranks say ----------------------------------------------------

MEMORY = """
boot = bootstrap()
with group(boot) as g, group(boot, num_experts=2) as h:
    memory = g.mem_alloc(5000)
    assert memory % 128 == 0
    h.close()
    g.mem_free(memory)
    tell(lambda: g.mem_free(memory))
    page = -(-np.zeros(3 * 4096, np.uint8).ctypes.data // 4096) * 4096
    g.window_register(page, 4096)
    g.window_deregister(page)
"""
CALLABLES = """
def allgather(data, timeout):
    raise ConnectionError("the store is gone")
for gather in allgather, lambda data, timeout: data:
    boot = Bootstrap.from_callables(0, 2, gather, lambda timeout: None)
    try:
        group(boot)
    except EpError as error:
        say(error.status.name, "|", error, "|", repr(error.__cause__))
"""
MISSING = "tell(lambda: group(timeout_seconds=0.5)) if rank == 0 else None"
PREPARE = """
with group() as g:
    tell(lambda: Handle(g).prepare(idx))
"""
FORK = """
g = group()
layer = Handle(g)
sys.stdout.flush()
child = os.fork()
if child == 0:
    for call in (lambda: layer.prepare(idx), g.query, lambda: Handle(g), g.status):
        tell(lambda: call())
    g.abort("nobody hears this")
    layer.close()
    g.close()
    os.kill(os.getpid(), 0)
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
layer.prepare(idx)
say("the parent goes on", g.status().status.name)
g.close()
"""
FORKED = "(DESTROYED rank {}: the group was created before this process was forked[^\n]*\n){{4}}"
CHILD = """
g = group()
child = os.fork()
if child == 0:
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        os._exit(0)
Handle(g).prepare(idx)
os.waitpid(child, 0)
time.sleep(0.5)
Handle(g).prepare(idx)
g.close()
"""
TWICE = """
with group() as g:
    time.sleep(1)
    Handle(g).prepare(idx)
    Handle(g).prepare(idx)
"""
# A daemon thread is inside a call when the interpreter ends.
THREAD = """
g = group()
def wait():
    try:
        Handle(g).prepare(idx)
    except EpError:
        pass
threading.Thread(target=wait, daemon=True).start()
time.sleep(0.3)
say("done")
"""
LATE = """
with group() as g:
    layer = Handle(g)
    time.sleep(1)
    tell(lambda: layer.prepare(idx), lambda: layer.prepare(idx))
"""
RAISE = 'raise ValueError("a fault of the program")'
FAULT = "ValueError: a fault of the program"
ENDED = "PEER .*the process ends, and its group was not closed.*"
PROGRAMS = dict(
    memory=([MEMORY, MEMORY], ["FOREIGN .*", "FOREIGN .*"]),
    callables=([CALLABLES], [
        r"BOOTSTRAP \| [^\n]*ConnectionError: the store is gone.*\| "
        r"ConnectionError\('the store is gone'\)\nBOOTSTRAP.*expected.*bytes of all ranks.*"]),
    missing=([MISSING, ""], ["TIMEOUT .*rank 1 did not arrive within 0.5 s.*", ""]),
    block=([f"with group() as g: {RAISE}", PREPARE], [f"1: {FAULT}", f"PEER .*{FAULT}.*"]),
    fork=([FORK, FORK], [FORKED.format(r) + "the parent goes on OK\n" for r in (0, 1)]),
    child=([CHILD, TWICE], ["", ""]),
    thread=([THREAD, LATE], ["done\n", ENDED]),
    exit=([f"g = group()\n{RAISE}", PREPARE], [f"1: {FAULT}", f"PEER .*{FAULT}.*"]),
)  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(tmp_path, name):
    """child: its Ctrl-C is not its parent's. exit: without a `with` block."""
    sources, expected = PROGRAMS[name]
    check(run(tmp_path, *sources), expected)


# ---- containers ----------------------------------------------------------------------------------

UNSHARE = "unshare --user --map-root-user --uts --mount".split()
NOT_HERE = "SYSTEM .*memory of rank {}, said to be on the same node: {}.*"
CONTAINERS = dict(
    of_one_name=("mount -t tmpfs none /dev/shm", "its object is not in /dev/shm here: containers"),
    with_little_room=("mount -t tmpfs -o nr_inodes=1 none /dev/shm", "expected the number that .* drawn"),
    with_one_room=("", None),
    of_two_names=("mount -t tmpfs none /dev/shm && hostname libep-$0", None),
)  # fmt: skip


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(tmp_path, name):
    """Each rank has processes of its own. They make a group, or each says why there is none."""
    script, why = CONTAINERS[name]
    source = STEP if why is None else "tell(group)"
    unshare = [*UNSHARE, "--pid", "--fork", "--mount-proc", "sh", "-c", script + '\nexec "$@"']
    if subprocess.run([*unshare, "0", "true"]).returncode:
        pytest.skip("this user may not make containers")
    ranks = [start(tmp_path, r, 2, source, [*unshare, str(r)]) for r in range(2)]
    rows = "rows 4\n" if why is None else ""
    check(finish_all(ranks), [rows or NOT_HERE.format(1 - r, why) for r in range(2)])


# ---- ranks that end or stop ----------------------------------------------------------------------

UNTIL = """
g = group(timeout_seconds={seconds})
layer = Handle(g)
layer.prepare(idx)
begin = time.monotonic()
if rank == 1: os.kill(os.getpid(), signal.{name})
tell(lambda: layer.prepare(idx))
g.close()
say(time.monotonic() - begin)
"""


@pytest.mark.parametrize("name, seconds", [("SIGKILL", 3), ("SIGSTOP", 2)])
def test_a_rank_that_is_gone(tmp_path, nodes, name, seconds):
    """Over TCP, between nodes, the others learn of a killed one at once; else at the deadline."""
    source = UNTIL.format(name=name, seconds=seconds)
    ranks = [start(tmp_path, r, 3, source) for r in range(3)]
    try:
        for rank in ranks[0], ranks[2]:
            sentence, spent = good(finish(rank)).splitlines()
            assert "rank 1" in sentence and sentence.startswith(("PEER", "TIMEOUT"))
            is_told = name == "SIGKILL" and nodes == "a_node_each"
            assert float(spent) < (2.5 if is_told else 10)
    finally:
        ranks[1].kill()
    ranks[1].communicate()
    assert ranks[1].returncode == -signal.SIGKILL


# ---- Ctrl-C, and how processes end ---------------------------------------------------------------


def release(tmp_path):
    """Let a source go on that has RELEASED."""
    processes.Store(tmp_path).set("released", b"")


RELEASED = """
while store.get("released", 1) is None:
    pass
"""
# Rank 0 has sent its part of the first prepare, so that may succeed.
LATER = f"""
g = group(){RELEASED}
layer = Handle(g)
tell(*[lambda: layer.prepare(idx)] * CALLS)
g.close()
"""
WAITS = """
with group() as g:
    say("waiting")
    Handle(g).prepare(idx)
"""
CREATES = """
say("waiting")
try:
    group()
except KeyboardInterrupt:
    say("interrupted")
"""
HANDLED = """
signal.signal(signal.SIGINT, lambda number, frame: say("handled"))
with group() as g:
    say("waiting")
    Handle(g).prepare(idx)
    say("went on")
"""
# The program takes the interrupt and goes on: the call that it makes next is not aborted.
OUTSIDE = """
with group() as g:
    say("waiting")
    try:
        while True:
            pass
    except KeyboardInterrupt:
        say("handled")
    Handle(g).prepare(idx)
    say("went on")
"""
ALIVE = """
import libep._process
libep._process.EXIT_SECONDS = 40
groups = [group(bootstrap(prefix=str(i))) for i in range(8)]  # all ranks close them in one order
layers = [Handle(groups[0]) for _ in range(3)]
layers[0].prepare(idx)
del layers[1]
say("done")
"""
ALONE = """
import libep._process
libep._process.EXIT_SECONDS = 0.5
g = group()
say("done")
"""
THREADS = """
import libep, threading
groups = []
def play(boot):
    groups.append(libep.Group(boot, num_experts=2, max_tokens=1, max_top_k=1, max_row_bytes=16,
                              backend=libep.Backend.HOST))
    libep.Handle(groups[-1])
threads = [threading.Thread(target=play, args=(b,)) for b in libep.Bootstrap.local(3)]
[t.start() for t in threads]
[t.join() for t in threads]
print(len(groups))
"""


@pytest.mark.parametrize("source, calls, expected", [
    (WAITS, 2, [f"{-signal.SIGINT}: KeyboardInterrupt", r"PEER .*interrupted \(Ctrl-C\).*"]),
    (CREATES, 0, ["interrupted\n"]),
    (HANDLED, 1, ["handled\nwent on\n", ""]),
    (OUTSIDE, 1, ["handled\nwent on\n", ""]),
], ids=["in a wait", "while a group is created", "handler", "outside of calls"])  # fmt: skip
def test_ctrl_c(tmp_path, source, calls, expected):
    """Of rank 0, after it says "waiting"."""
    sources = [source, f"CALLS = {calls}{LATER}"][: len(expected)]
    ranks = [start(tmp_path, r, 2, s) for r, s in enumerate(sources)]
    assert ranks[0].stdout.readline() == "waiting\n"
    time.sleep(0.5)
    ranks[0].send_signal(signal.SIGINT)
    time.sleep(1)
    release(tmp_path)
    check(map(finish, ranks), expected)


def test_exit_with_everything_alive(tmp_path):
    begin = time.monotonic()
    results = run(tmp_path, ALIVE, ALIVE)
    assert time.monotonic() - begin < 30
    assert results == [(0, "done\n", "")] * 2  # no rank has given up on the other


def test_exit_without_the_peer(tmp_path):
    first, second = (start(tmp_path, r, 2, s) for r, s in enumerate((ALONE, f"CALLS = 2{LATER}")))
    assert finish(first) == (0, "done\n", "")
    release(tmp_path)
    check([finish(second)], [ENDED])


def test_exit_with_rank_threads_alive():
    assert finish(spawn("-c", THREADS)) == (0, "3\n", "")
