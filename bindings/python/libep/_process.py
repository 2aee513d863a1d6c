# SPDX-License-Identifier: Apache-2.0
"""What becomes of open groups when Ctrl-C is pressed, when the process forks, and when it ends.

Ctrl-C. Python runs its handler of SIGINT on the main thread, between two of its own instructions.
So a main thread that waits inside libep would not notice. A thread of this module reads the bytes
that Python's C-level handler writes (signal.set_wakeup_fd), and aborts the group if the main thread
is in a call that began before the signal and goes on a moment later. The kernel tells the time of
the signal, since this thread may get the interpreter only after the main thread has handled it. The
call returns, and Python raises KeyboardInterrupt.

Fork. The child shares memory and sockets with its parent, and must not speak for the parent's rank.
So the child forgets the groups: calls on them raise EpError.

End of the process. Destroying a group meets the peers, which write to this rank's memory until they
have finished. A program that just ends with open groups gets that, too, within EXIT_SECONDS.
"""

from __future__ import annotations

import atexit
import os
import signal
import struct
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket as Socket
    from typing import Optional

    from ._group import Shared as Group

GRACE_SECONDS = 0.25
"""How long a call may go on after Ctrl-C: one that does not wait for a peer ends by itself."""

EXIT_SECONDS = 5.0
"""How long the end of the process waits for the peers of the groups that are still open."""

# A strong reference: a group lives until it is closed. The garbage collector cannot do that, since
# all ranks close a group together. In the order in which they were created, which is one on all
# ranks: at the end of the process each waits for the peers of one group after another.
open_groups: dict[Group, None] = {}

interrupts: list[Callable[[float], object]] = []
"""What else is called after Ctrl-C, on the thread of this module, with the time of the signal."""

_NOT_CLOSED = "the process ends, and its group was not closed"
INTERRUPTED = "interrupted (Ctrl-C)"
_EXIT = 255  # a byte beside the numbers of signals
_SO_TIMESTAMPNS = 35  # of Linux; the module socket does not have it
_starting = threading.Lock()
_watcher: Optional[tuple[Socket, Socket]] = None  # its sockets, to read from and to write to


def add(group: Group) -> None:
    """Watch over a new group."""
    open_groups[group] = None
    listen()


# ---- the thread -------------------------------------------------------------------------------


def listen() -> None:
    """Hear of Ctrl-C, if called by the main thread."""
    global _watcher
    with _starting:
        if _watcher is None:
            _watcher = _open_sockets()
            threading.Thread(target=_watch, args=_watcher[:1], name="libep", daemon=True).start()
    if threading.current_thread() is threading.main_thread():
        _listen(_watcher[1].fileno())


def _open_sockets() -> tuple[Socket, Socket]:
    import socket  # takes longer than the whole package

    reading, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        reading.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        pass  # a stand-in for Linux, as QEMU: then the time of reading must do
    reading.setblocking(True)  # whatever the program's default is
    writing.setblocking(False)
    return reading, writing


def _listen(writing: int) -> None:
    """Let Python's C-level handler write to the socket, unless someone else listens already."""
    try:
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before not in (-1, writing):
            signal.set_wakeup_fd(before)
    except (OSError, ValueError):
        pass  # the other listener has gone, or this interpreter gets no signals


def _watch(reading: Socket) -> None:
    while True:
        data, stamps, _, _ = reading.recvmsg(1, 64)
        if data[0] == _EXIT:
            time.sleep(EXIT_SECONDS)
            _abort(_NOT_CLOSED, list(open_groups))
        elif data[0] == signal.SIGINT:
            _interrupt(_time_in(stamps) if stamps else time.time())


def _time_in(stamps: list[tuple[int, int, bytes]]) -> float:
    seconds, nanoseconds = struct.unpack("@ll", stamps[0][2])
    return float(seconds) + float(nanoseconds) * 1e-9


def _interrupt(sent: float) -> None:
    # A program with a handler of its own has other plans than KeyboardInterrupt.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        time.sleep(GRACE_SECONDS)
        main = threading.main_thread().ident
        groups = [g for g in list(open_groups) if g.caller == main and g.began < sent]
        _abort(INTERRUPTED, groups)
        for interrupt in interrupts:
            interrupt(sent)


def _abort(sentence: str, groups: list[Group]) -> None:
    for group in groups:
        group.abort(sentence)


# ---- fork -------------------------------------------------------------------------------------


def _forget() -> None:
    """In the child of a fork: give up the groups without a word to the peers."""
    global _starting, _watcher
    _starting = threading.Lock()
    if _watcher is not None:
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, _watcher[1].fileno()):
            signal.set_wakeup_fd(before)
        for end in _watcher:
            end.close()
        _watcher = None
    for group in open_groups:
        group.lose("was created before this process was forked: create groups in the child")
    open_groups.clear()


os.register_at_fork(after_in_child=_forget)


# ---- end of the process -----------------------------------------------------------------------


def _leave() -> None:
    if not open_groups:
        return
    error = getattr(sys, "last_value", None)  # set if the program ends by an exception
    groups = list(open_groups)
    if error is not None:
        _abort(f"the program ended with {type(error).__name__}: {error}", groups)
    # Ranks that are threads have nobody left to meet. A rank in a call cannot go to meet its peers.
    _abort(_NOT_CLOSED, [g for g in groups if g.caller or (g.is_thread and g.size > 1)])
    if _watcher is not None:
        _watcher[1].send(bytes([_EXIT]))
    for group in groups:
        group.leave()


atexit.register(_leave)
