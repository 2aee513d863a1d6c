# SPDX-License-Identifier: Apache-2.0
"""Python programs as forks of one process, which has imported what all of them need.

forks.py serve SOCKET MODULE...     the process that forks, until its stdin ends
forks.py SOCKET ARGUMENT...         a program, with arguments as Python has them: -c, -m, or a file

A program is a process of its own, whose standard streams, signals and exit status are those of the
process that asks for it. It ends as any Python does, with its threads and objects.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys


def ask(path, arguments):
    """Have the program run. Ends as it does."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
        socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(request)
        answers = server.makefile()
        child = int(answers.readline())
        for name in signal.SIGINT, signal.SIGTERM:
            signal.signal(name, lambda number, _: os.kill(child, number))
        status = os.waitstatus_to_exitcode(int(answers.readline()))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def report(asking):
    """Tell those whose programs have ended."""
    while asking:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            break
        with asking.pop(pid) as connection, contextlib.suppress(BrokenPipeError):
            connection.send(b"%d\n" % status)  # unless who asked was killed


def serve(path):
    """Fork for each who asks. Returns in the program, with its arguments."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    server, asking = socket.socket(socket.AF_UNIX), {}  # by the program's process
    server.bind(f"{path}.new")
    server.listen(100)
    os.rename(f"{path}.new", path)
    while True:
        ready, *_ = select.select([0, woken, server, *asking.values()], [], [])
        if 0 in ready:
            os._exit(0)
        if woken in ready:
            os.read(woken, 1000)
            report(asking)
        for pid, connection in asking.items():
            if connection in ready:  # who asked was killed
                os.kill(pid, signal.SIGKILL)
        if server in ready:
            connection, _ = server.accept()
            size, streams, *_ = socket.recv_fds(connection, 4, 3)
            request = connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
            pid = os.fork()
            if pid == 0:
                return begin(streams, *json.loads(request))
            for stream in streams:
                os.close(stream)
            connection.send(b"%d\n" % pid)
            asking[pid] = connection


def begin(streams, arguments, environment, folder):
    """Become a program, as if Python had just started."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, max(streams) + 1)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return arguments


if __name__ == "__main__" and sys.argv[1] != "serve":
    ask(sys.argv[1], sys.argv[2:])
elif __name__ == "__main__":
    import runpy

    for name in sys.argv[3:]:
        __import__(name)
    sys.argv = serve(sys.argv[2])
    if sys.argv[0] == "-c":
        exec(sys.argv.pop(1))
    elif sys.argv[0] == "-m":
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
