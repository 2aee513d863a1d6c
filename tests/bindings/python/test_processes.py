# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: bootstraps from Python, Ctrl-C, forks, and how processes end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import processes
from processes import good, run

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


# ---- bootstraps --------------------------------------------------------------------------------


def test_store(tmp_path, nodes):
    assert [good(r) for r in run(tmp_path, STEP, STEP, STEP)] == [
        "rows 6\n",
        "rows 3\n",
        "rows 3\n",
    ]


def test_store_forgets_old_keys(tmp_path):
    source = """
boot = bootstrap(delete=store.delete, prefix="mine")
for _ in range(5):
    group(boot).close()
"""
    for result in run(tmp_path, source, source):
        good(result)
    names = os.listdir(tmp_path)
    assert len(names) <= 4 and all(name.startswith("mine.") for name in names), names


def test_several_groups_and_memory(tmp_path):
    source = """
boot = bootstrap()
with group(boot) as g, group(boot, num_experts=2) as h:
    memory = g.mem_alloc(5000)
    assert memory % 128 == 0
    h.close()
    g.mem_free(memory)
    try:
        g.mem_free(memory)
    except EpError as error:
        say(error.status.name)
    page = -(-np.zeros(3 * 4096, np.uint8).ctypes.data // 4096) * 4096
    g.window_register(page, 4096)
    g.window_deregister(page)
"""
    assert [good(r) for r in run(tmp_path, source, source)] == ["FOREIGN\n", "FOREIGN\n"]


def test_callables_that_fail(tmp_path):
    source = """
def allgather(data, timeout):
    raise ConnectionError("the store is gone")
for gather in allgather, lambda data, timeout: data:
    boot = Bootstrap.from_callables(0, 2, gather, lambda timeout: None)
    try:
        group(boot)
    except EpError as error:
        say(error.status.name, "|", error, "|", repr(error.__cause__))
"""
    raises, nonsense = good(processes.finish(processes.start(tmp_path, 0, 1, source))).splitlines()
    assert raises.startswith("BOOTSTRAP | ")
    assert "ConnectionError: the store is gone" in raises
    assert raises.endswith("| ConnectionError('the store is gone')")
    assert "BOOTSTRAP" in nonsense and "expected" in nonsense and "bytes of all ranks" in nonsense


def test_missing_rank(tmp_path):
    source = """
tell(lambda: group(timeout_seconds=0.5))
"""
    out = good(processes.finish(processes.start(tmp_path, 0, 2, source)))
    assert out.startswith("TIMEOUT") and "rank 1 did not arrive within 0.5 s" in out


def test_killed_rank(tmp_path, nodes):
    """Over TCP, between nodes, the others learn of it at once; on a node at the deadline."""
    killed = """
g = group(timeout_seconds=3)
Handle(g).prepare(idx)
os.kill(os.getpid(), signal.SIGKILL)
"""
    source = """
g = group(timeout_seconds=3)
layer = Handle(g)
layer.prepare(idx)
begin = time.monotonic()
tell(lambda: layer.prepare(idx))
g.close()
say(time.monotonic() - begin)
"""
    first, (status, _, _), third = run(tmp_path, source, killed, source)
    assert status == -signal.SIGKILL
    for result in first, third:
        sentence, seconds = good(result).splitlines()
        assert "rank 1" in sentence and float(seconds) < (
            2.5 if nodes == "a_node_each" else 10
        )
        assert sentence.startswith(("PEER", "TIMEOUT"))


def test_stopped_rank(tmp_path, nodes):
    stopped = """
g = group(timeout_seconds=1)
Handle(g).prepare(idx)
os.kill(os.getpid(), signal.SIGSTOP)
"""
    source = """
g = group(timeout_seconds=1)
layer = Handle(g)
layer.prepare(idx)
tell(lambda: layer.prepare(idx))
g.close()
"""
    ranks = [processes.start(tmp_path, r, 3, s) for r, s in enumerate((source, stopped, source))]
    try:
        for rank in ranks[0], ranks[2]:
            sentence = good(processes.finish(rank))
            assert "rank 1" in sentence and sentence.startswith(("PEER", "TIMEOUT"))
    finally:
        ranks[1].kill()
        ranks[1].communicate()


# ---- errors that peers hear of -------------------------------------------------------------------


def test_exception_in_with_block_reaches_the_peer(tmp_path):
    failing = """
with group() as g:
    raise ValueError("no more tokens")
"""
    waiting = """
with group() as g:
    tell(lambda: Handle(g).prepare(idx))
"""
    (status, _, err), peer = run(tmp_path, failing, waiting)
    assert status == 1 and "ValueError: no more tokens" in err
    out = good(peer)
    assert out.startswith("PEER") and "ValueError: no more tokens" in out


def interrupt(tmp_path, source, peer):
    """Start two ranks, and send SIGINT to rank 0 after it says "waiting"."""
    first, second = (processes.start(tmp_path, r, 2, s) for r, s in enumerate((source, peer)))
    assert first.stdout.readline() == "waiting\n"
    time.sleep(0.5)
    first.send_signal(signal.SIGINT)
    return first, second


WHEN_RELEASED = """
while store.get("released", 1) is None:
    pass
"""


def release(tmp_path):
    processes.Store(tmp_path).set("released", b"")


def test_ctrl_c_in_a_wait(tmp_path):
    source = """
with group() as g:
    layer = Handle(g)
    say("waiting")
    try:
        layer.prepare(idx)
    except KeyboardInterrupt:
        say("interrupted", time.monotonic())
        raise
"""
    # Rank 0 has sent its part of the first prepare, so this one may succeed.
    peer = f"""
g = group(){WHEN_RELEASED}
layer = Handle(g)
tell(lambda: layer.prepare(idx), lambda: layer.prepare(idx))
g.close()
"""
    first, second = interrupt(tmp_path, source, peer)
    sent = time.monotonic()
    status, out, err = processes.finish(first)
    release(tmp_path)
    assert status == -signal.SIGINT and "KeyboardInterrupt" in err
    assert out.startswith("interrupted ")
    print("seconds from the signal to the exception:", float(out.split()[1]) - sent)
    heard = good(processes.finish(second))
    assert heard.startswith("PEER") and "interrupted (Ctrl-C)" in heard


def test_ctrl_c_while_a_group_is_created(tmp_path):
    source = """
say("waiting")
try:
    group()
except KeyboardInterrupt:
    say("interrupted")
"""
    process = processes.start(tmp_path, 0, 2, source)
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    assert good(processes.finish(process)) == "interrupted\n"


def test_handler_of_the_program_is_left_alone(tmp_path):
    source = """
signal.signal(signal.SIGINT, lambda number, frame: say("handled"))
with group() as g:
    say("waiting")
    Handle(g).prepare(idx)
    say("prepared")
"""
    peer = f"""
g = group(){WHEN_RELEASED}
Handle(g).prepare(idx)
g.close()
"""
    first, second = interrupt(tmp_path, source, peer)
    time.sleep(1)
    release(tmp_path)
    assert good(processes.finish(first)) == "handled\nprepared\n"
    good(processes.finish(second))


# The program takes the interrupt and goes on: the call that it makes next is not aborted.
def test_ctrl_c_outside_of_calls(tmp_path):
    source = """
with group() as g:
    layer = Handle(g)
    layer.prepare(idx)
    say("waiting")
    try:
        while True:
            pass
    except KeyboardInterrupt:
        layer.prepare(idx)
    say("went on")
"""
    peer = f"""
g = group()
layer = Handle(g)
layer.prepare(idx){WHEN_RELEASED}
layer.prepare(idx)
g.close()
"""
    first, second = interrupt(tmp_path, source, peer)
    time.sleep(1)
    release(tmp_path)
    assert good(processes.finish(first)) == "went on\n"
    good(processes.finish(second))


# ---- fork ----------------------------------------------------------------------------------------


def test_fork_after_create(tmp_path):
    source = """
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
    sentence = "DESTROYED rank {}: the group was created before this process was forked"
    for rank, result in enumerate(run(tmp_path, source, source)):
        lines = good(result).splitlines()
        assert len(lines) == 5
        assert all(line.startswith(sentence.format(rank)) for line in lines[:4])
        assert lines[4] == "the parent goes on OK"


def test_ctrl_c_of_a_child_is_not_the_parents(tmp_path):
    source = """
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
    peer = """
with group() as g:
    time.sleep(1)
    Handle(g).prepare(idx)
    Handle(g).prepare(idx)
"""
    for result in run(tmp_path, source, peer):
        good(result)


# ---- how processes end -------------------------------------------------------------------------


def test_exit_with_everything_alive(tmp_path):
    source = """
import libep._process
libep._process.EXIT_SECONDS = 40
groups = [group(bootstrap(prefix=str(i))) for i in range(8)]  # all ranks close them in one order
layers = [Handle(groups[0]) for _ in range(3)]
layers[0].prepare(idx)
del layers[1]
say("done")
"""
    begin = time.monotonic()
    results = run(tmp_path, source, source)
    assert time.monotonic() - begin < 30
    assert [good(r) for r in results] == ["done\n", "done\n"]
    assert [err for _, _, err in results] == ["", ""]  # no rank has given up on the other


def test_exit_without_the_peer(tmp_path):
    source = """
import libep._process
libep._process.EXIT_SECONDS = 0.5
g = group()
say("done")
"""
    peer = f"""
g = group(){WHEN_RELEASED}
tell(lambda: Handle(g).prepare(idx))
"""
    first, second = (processes.start(tmp_path, r, 2, s) for r, s in enumerate((source, peer)))
    result = processes.finish(first)
    assert good(result) == "done\n" and result[2] == ""
    release(tmp_path)
    out = good(processes.finish(second))
    assert out.startswith("PEER") and "the process ends, and its group was not closed" in out


def test_exit_by_an_exception(tmp_path):
    source = """
g = group()
raise ValueError("a fault of the program")
"""
    peer = """
g = group()
tell(lambda: Handle(g).prepare(idx))
"""
    (status, _, err), second = run(tmp_path, source, peer)
    assert status == 1 and err.endswith("ValueError: a fault of the program\n")
    out = good(second)
    assert out.startswith("PEER") and "ValueError: a fault of the program" in out


def test_exit_with_rank_threads_alive():
    source = """
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
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=30
    )
    assert good((done.returncode, done.stdout, done.stderr)) == "3\n"
    assert done.stderr == ""


# A daemon thread is inside a call when the interpreter ends.
def test_exit_while_a_thread_waits(tmp_path):
    source = """
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
    peer = """
with group() as g:
    layer = Handle(g)
    time.sleep(1)
    tell(lambda: layer.prepare(idx), lambda: layer.prepare(idx))
"""
    first, second = run(tmp_path, source, peer)
    assert good(first) == "done\n"
    out = good(second)
    assert out.startswith("PEER") and "the process ends, and its group was not closed" in out
