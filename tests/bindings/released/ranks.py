# SPDX-License-Identifier: Apache-2.0
"""Processes of a process group that import a release once, and then play many cases."""

import contextlib
import importlib
import json
import os
import sys
import threading
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.join(HERE, "../../..")
FOLDERS = [HERE, f"{HERE}/../common", f"{TREE}/bindings/torch/examples", f"{TREE}/tools/frameworks"]
SECONDS = "10"  # deadline of libep's waits
PROGRAM = f"import sys; sys.path.insert(0, {HERE!r}); import ranks; ranks.main(*sys.argv[1:])"
MOST_SECONDS = 400  # of a case, until its ranks are killed


@contextlib.contextmanager
def watched(processes):
    """Kill the processes if the block takes too long."""
    timer = threading.Timer(MOST_SECONDS, lambda: [process.kill() for process in processes])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Ranks:
    """`size` ranks that have imported the module in a file, which imports a release."""

    def __init__(self, release, size, path):
        self.release, self.size = release, size
        self._path = str(path)
        self._started = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._started:
            process.kill()
            process.communicate()
        self._started = []

    def _start(self):
        from base import DEVICE
        from processes import free_port, spawn

        environment = dict(GLOO_SOCKET_IFNAME="lo", LIBEP_TIMEOUT=SECONDS)
        if DEVICE == "cuda":
            environment["LIBEP_SHARE_GPUS"] = "yes"  # there may be fewer GPUs than ranks
        end = str(self.size), str(free_port()), DEVICE, self._path
        self._started = [  # their stderr is that of pytest, which shows it
            spawn("-c", PROGRAM, str(rank), *end, stderr=None, **environment)
            for rank in range(self.size)
        ]

    def play(self, function, **arguments):
        """Call a function of the module on all ranks. Return their results, which JSON can hold.

        AssertionError with the traceback of the first rank that raised.
        """
        if not self._started:
            self._start()
        with watched(self._started):
            for process in self._started:
                process.stdin.write(json.dumps([function, arguments]) + "\n")
                process.stdin.flush()
            lines = [process.stdout.readline() for process in self._started]
        answers = [json.loads(line or '{"error": "a rank has died"}') for line in lines]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            self.__exit__()  # the others may be in the middle of a step
            raise AssertionError("\n".join(errors))
        return [answer["result"] for answer in answers]


def main(rank, size, port, device, path):
    # Answers go to the pipe alone; what a release prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:0] = FOLDERS
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(rank) % torch.cuda.device_count())
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(size))
    module = importlib.import_module(os.path.basename(path).removesuffix(".py"))
    for line in sys.stdin:
        function, arguments = json.loads(line)
        try:
            answer = {"result": getattr(module, function)(**arguments)}
        except Exception:
            answer = {"error": f"rank {rank}: {traceback.format_exc()}"}
        print(json.dumps(answer), file=answers, flush=True)
