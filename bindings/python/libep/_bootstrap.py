# SPDX-License-Identifier: Apache-2.0
"""Bootstraps: how the ranks of a group meet."""

from __future__ import annotations

import ctypes
import time
from ctypes import byref

from . import _abi, _process
from ._abi import Status
from ._library import EpError, OfProcess, check, last_error, library

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional

_LOOK_SECONDS = 0.1  # how often a wait for the store looks for an abort


def poll_abort() -> None:
    """For callables of a bootstrap that wait: return while the wait may go on, else raise EpError.

    A callable lets the exception pass. Is cheap, and does nothing outside of callables.
    """
    check(library.ep_poll_abort())


def setting_value(name: str) -> str:
    """The value in use of a setting, also where the environment has others that are malformed."""
    found: dict[bytes, bytes] = {}

    def visit(setting: Any, _: object) -> None:
        found[setting.contents.name] = setting.contents.value

    library.ep_settings(_abi.VISIT(visit), None)
    return found[name.encode()].decode()


class Bootstrap(OfProcess):
    """What a group needs to be set up: this rank, the number of ranks, an allgather, a barrier.

    Made by one of the four functions below, or by Mesh.bootstrap. Several groups may use one. All
    ranks create them in the same order. Close the groups before the bootstrap.
    """

    rank: int
    size: int
    is_thread: bool
    """Whether the ranks are threads of this process (local)."""

    def __init__(
        self,
        struct: _abi.EpBootstrap,
        is_thread: bool = False,
        world: Optional[Bootstrap] = None,
    ) -> None:
        """world: of a mesh, from which this bootstrap was made; whose callables it calls"""
        self.struct = struct
        self._world, self._parts = world, 0
        if world is not None:
            world._parts += 1
        self.rank, self.size = struct.rank, struct.size
        self.is_thread = is_thread
        self._raised: Optional[BaseException] = None
        self._is_open = True

    @staticmethod
    def local(size: int) -> list[Bootstrap]:
        """Make the bootstraps of `size` ranks that are threads of this process, one for each."""
        if not 1 <= size <= _abi.MAX_RANKS:
            raise EpError(Status.RANGE, f"size: expected 1 .. {_abi.MAX_RANKS}, got {size}")
        structs = (_abi.EpBootstrap * size)(_abi.initialized(_abi.EpBootstrap))
        check(library.ep_bootstrap_local(size, structs))
        return [Bootstrap(struct, is_thread=True) for struct in structs]

    @staticmethod
    def from_nccl(comm: int) -> Bootstrap:
        """Make a bootstrap from an NCCL communicator: ncclComm_t as an int. See ep_nccl.h.

        The communicator stays the caller's and must outlive the bootstrap. Give it to the group as
        well (nccl_comm=comm), so that the group uses its device.
        """
        struct = _abi.initialized(_abi.EpBootstrap)
        check(library.ep_bootstrap_nccl(comm, byref(struct)))
        return Bootstrap(struct)

    @staticmethod
    def from_callables(
        rank: int,
        size: int,
        allgather: Callable[[bytes, float], bytes],
        barrier: Callable[[float], object],
    ) -> Bootstrap:
        """Make a bootstrap from two functions, which libep calls on the thread that called it.

        allgather  allgather(data, timeout_seconds): give this rank's bytes, return those of all
                   ranks in rank order, as one bytes object. All ranks give equally many bytes.
        barrier    barrier(timeout_seconds): return after every rank has called it

        A function that cannot go on raises; the caller of libep gets the exception's text as an
        EpError. TimeoutError becomes Status.TIMEOUT. A function that waits for long calls
        poll_abort() now and then.
        """
        struct = _abi.initialized(_abi.EpBootstrap)
        struct.rank, struct.size = rank, size
        made = Bootstrap(struct)

        def call_allgather(_: int, data: int, out: int, count: int, timeout: float) -> int:
            def gather() -> None:
                result = allgather(ctypes.string_at(data, count), timeout)
                if len(result) != size * count:
                    raise ValueError(
                        f"expected {size * count} bytes of all ranks from the "
                        f"bootstrap's allgather, got {len(result)}"
                    )
                ctypes.memmove(out, bytes(result), len(result))

            return made._guard(gather)

        def call_barrier(_: int, timeout: float) -> int:
            return made._guard(lambda: barrier(timeout))

        struct.allgather = _abi.ALLGATHER(call_allgather)
        struct.barrier = _abi.BARRIER(call_barrier)
        return made

    @staticmethod
    def from_store(
        rank: int,
        size: int,
        set: Callable[[str, bytes], object],
        get: Callable[[str, float], Optional[bytes]],
        delete: Optional[Callable[[str], object]] = None,
        prefix: str = "libep",
    ) -> Bootstrap:
        """Make a bootstrap from a key-value store that all ranks share.

        set     set(key, value): store bytes under a string; no key is set twice
        get     get(key, timeout_seconds): wait up to the timeout, a fraction of a second, for the
                key; return its value, or None (or raise TimeoutError) if it is not there yet
        delete  delete(key): forget a key that nobody will ask for, or None to keep all keys
        prefix  of all keys; another one for each bootstrap on the same store
        """
        store = _Store(rank, size, set, get, delete, prefix)
        return Bootstrap.from_callables(rank, size, store.allgather, store.barrier)

    def allgather(self, data: bytes, timeout_seconds: Optional[float] = None) -> list[bytes]:
        """Give this rank's bytes, equally many on all ranks, and return those of all ranks.

        Collective, in the same order as the groups that the bootstrap makes. The default deadline
        is LIBEP_TIMEOUT. EpError if it passes, or if the bootstrap fails.
        """
        self.require_open()
        if timeout_seconds is None:
            timeout_seconds = float(setting_value("LIBEP_TIMEOUT"))
        count = len(data)
        out = ctypes.create_string_buffer(self.size * count)
        struct = self.struct
        self.check(struct.allgather(struct.context, data, out, count, timeout_seconds))
        return [out.raw[rank * count : (rank + 1) * count] for rank in range(self.size)]

    def _guard(self, call: Callable[[], object]) -> int:
        """Run a callable. An exception becomes a status, and the text a sentence of libep."""
        try:
            call()
            return Status.OK
        except EpError as error:
            status, sentence = error.status, str(error)
        except TimeoutError as error:
            status, sentence = Status.TIMEOUT, str(error) or "the bootstrap's callable timed out"
        except BaseException as error:  # KeyboardInterrupt too: it must not get lost in C
            self._raised = error
            status, sentence = Status.BOOTSTRAP, f"{type(error).__name__}: {error}"
        return int(library.ep_set_last_error(status, sentence.encode()))

    def check(self, status: int) -> None:
        """Raise the error of a call that used the callables, and what they raised as its cause."""
        origin = self._world or self
        raised, origin._raised = origin._raised, None
        if raised is not None and not isinstance(raised, Exception):
            raise raised
        if status:
            raise last_error(status) from raised

    def require_open(self) -> None:
        """Raise EpError if the bootstrap is closed."""
        if not self._is_open:
            raise EpError(Status.DESTROYED, f"rank {self.rank}: the bootstrap is closed")

    def close(self) -> None:
        """Free what the bootstrap owns. A second call does nothing. EpError: a group is open."""
        groups = sum(group.bootstrap is self for group in list(_process.open_groups))
        for count, what in (groups, "groups"), (self._parts, "bootstraps of a mesh"):
            if count:
                raise EpError(
                    Status.ORDER,
                    f"rank {self.rank}: expected the bootstrap's {what} to be closed first, got "
                    f"{count} that are open",
                )
        if self._is_open:
            self._is_open = False
            library.ep_bootstrap_destroy(byref(self.struct))
            if self._world is not None:
                self._world._parts -= 1

    def __enter__(self) -> Bootstrap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Store:
    """An allgather and a barrier over a key-value store. Each gather has keys of its own."""

    def __init__(
        self,
        rank: int,
        size: int,
        set: Callable[[str, bytes], object],
        get: Callable[[str, float], Optional[bytes]],
        delete: Optional[Callable[[str], object]],
        prefix: str,
    ) -> None:
        self.rank, self.size, self.prefix = rank, size, prefix
        self.set, self.get, self.delete = set, get, delete
        self.turn = 0

    def key(self, turn: int, rank: int) -> str:
        return f"{self.prefix}/{turn}/{rank}"

    def wait(self, turn: int, rank: int, end: float, timeout: float) -> bytes:
        while True:
            poll_abort()
            seconds = min(_LOOK_SECONDS, end - time.monotonic())
            if seconds <= 0:
                raise TimeoutError(
                    f"rank {self.rank}: bootstrap: rank {rank} did not arrive within {timeout:g} s"
                )
            try:
                value = self.get(self.key(turn, rank), seconds)
            except TimeoutError:
                value = None
            if value is not None:
                return value

    def allgather(self, data: bytes, timeout: float) -> bytes:
        end = time.monotonic() + timeout
        turn, self.turn = self.turn, self.turn + 1
        self.set(self.key(turn, self.rank), data)
        values = [
            data if r == self.rank else self.wait(turn, r, end, timeout) for r in range(self.size)
        ]
        # Every rank is in this gather, so every rank has read the keys of the one before.
        if self.delete is not None and turn > 0:
            self.delete(self.key(turn - 1, self.rank))
        return b"".join(values)

    def barrier(self, timeout: float) -> None:
        self.allgather(b"\0", timeout)
