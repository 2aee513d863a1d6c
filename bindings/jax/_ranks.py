# SPDX-License-Identifier: Apache-2.0
"""The ranks of a mesh: one group for each line of devices along the axis, one rank per device."""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _abi, _process
from .._abi import Backend, Plans, Status, Tail
from .._bootstrap import Bootstrap
from .._group import Group
from .._handle import Handle
from .._info import settings
from .._library import EpError, last_error
from . import _calls
from ._regions import lines, remember_devices

if TYPE_CHECKING:
    from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

CLOSE_SECONDS = 1.0
"""How long closing waits for a call that is waiting for other ranks."""

_POLL_SECONDS = 0.001
_WATCH_SECONDS = 0.5  # how long a call waits for others before this module looks for the reason

_keys = itertools.count(1)
_open: dict[int, Ranks] = {}


class _Rank(NamedTuple):
    group: Group
    handle: Handle
    device: Any
    ordinal: int  # XLA's number of the device


class Counters(NamedTuple):
    """What all operations of a device have done since bootstrap, derivatives included: int64.

    docs/semantics.md of the source tree has the exact words.
    """

    expert_tokens: np.ndarray[Any, Any]
    """[L] rows received for each local expert, without lost ones."""

    peer_rows: np.ndarray[Any, Any]
    """[R] rows sent to each device of the group; its own place: rows that stay."""

    peer_bytes: np.ndarray[Any, Any]
    """[R] their bytes."""

    peer_wait_ns: np.ndarray[Any, Any]
    """[R] nanoseconds waited for each device."""

    peer_longest_wait_ns: np.ndarray[Any, Any]
    """[R] the longest wait of one operation."""


class _Counting:
    """The counters of a rank, in an array that stays as long as programs may add to it: for ever.

    Pairs of int32, since JAX has int64 only on request. JAX knows nothing of the additions.
    """

    def __init__(self, key: int, rank: _Rank) -> None:
        local, size = rank.group.query().num_local_experts, rank.group.size
        self.device = rank.device
        self._ends = np.cumsum([local, *(4 * (size,))])
        zeros = np.zeros((self._ends[-1], 2), np.int32)
        self._array = jax.block_until_ready(jax.device_put(zeros, rank.device, may_alias=False))
        pointer = self._array.unsafe_buffer_pointer()
        _calls.library.ep_jax_rank_count(key, rank.ordinal, pointer, local)
        _kept.append(self._array)

    def read(self) -> Counters:
        now = np.array(jnp.copy(self._array)).view(np.int64)[:, 0]
        return Counters(*np.split(now, self._ends[:-1]))


_kept: list[Any] = []


class Ranks:
    """The ranks of this process. Programs name them by `key`."""

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axes: tuple[str, ...],
        layer: Mapping[str, Any],
        fields: Mapping[str, Any],
        counts: bool,
    ) -> None:
        self.key = next(_keys)
        self.has_masks = bool(fields.get("masks", 0))
        self._masked: set[Any] = set()  # devices
        processes = sorted({device.process_index for device in mesh.devices.flat})
        self._processes: list[Bootstrap] = []  # one, whose ranks are processes, to meet in mask
        self.bootstraps: list[Bootstrap] = []
        self.ranks: list[_Rank] = []
        makers = []
        for number, devices in enumerate(lines(mesh, axes)):
            for bootstrap in _bootstraps(f"libep/jax/{self.key}/{number}", devices):
                device = devices[bootstrap.rank]
                self.bootstraps.append(bootstrap)
                makers.append(functools.partial(_make_rank, bootstrap, device, layer, fields))
        if not makers:
            raise EpError(Status.RANGE, "bootstrap: mesh: expected a device of this process")
        # They stay: Python starts no threads when the process ends, and closing needs one per rank.
        self._threads = ThreadPoolExecutor(len(makers), "libep-jax")
        if self.has_masks and len(processes) > 1:
            place, prefix = processes.index(jax.process_index()), f"libep/jax/{self.key}/processes"
            self._processes.append(_store_bootstrap(prefix, place, len(processes)))
        try:
            self.ranks = self._run(makers)
        except BaseException:
            self._close_groups()
            raise
        self.plan_bytes: int = self.ranks[0].handle.plan_bytes
        self.on_host = self.ranks[0].group.query().backend is Backend.HOST
        for rank in self.ranks:
            _add(self.key, rank, self.has_masks)
        self._counters = [_Counting(self.key, rank) for rank in self.ranks if counts]
        self._mesh = mesh
        self._line_of = {device: line for line in lines(mesh, axes) for device in line}
        self._devices = set(mesh.local_devices)
        timeout = fields.get("timeout_seconds") or settings()["LIBEP_TIMEOUT"].value
        self._wait_seconds = float(timeout)
        remember_devices(self.key, mesh, axes)
        _open[self.key] = self
        _process.listen()  # the groups were created by other threads
        if self.on_host and len(self.ranks) > 1:
            _watch_programs()

    def check(self) -> None:
        """Raise what ep_group_status reports on the ranks of this process."""
        found = [(rank, error) for rank in self.ranks if (error := _rank_error(self.key, rank))]
        if found:
            # All in one: a rank reports a finding once, and the next check is about later steps.
            sentences = [f"{self._name(rank.device)}: {error}" for rank, error in found]
            raise EpError(found[0][1].status, "; ".join(sentences))

    def mask(self, alive: np.ndarray[Any, Any]) -> None:
        """Let the devices take part whose element of an array of the mesh's shape is set."""
        if not self.has_masks:
            raise EpError(
                Status.UNSUPPORTED, "mask: expected bootstrap's masks=1, got an Ep without masks"
            )
        self.wait()
        self._meet()
        of_device = dict(zip(self._mesh.devices.flat, alive.flat))
        masked = {device for device, is_alive in of_device.items() if not is_alive}
        calls: dict[bool, list[Callable[[], Any]]] = {False: [], True: []}
        for rank in self.ranks:
            words = _words(of_device[device] for device in self._line_of[rank.device])
            call = functools.partial(_mask_rank, self.key, rank, words)
            calls[rank.device in masked].append(call)
        self._run(calls[False])  # may fail; then no device is masked
        self._run(calls[True])
        self._masked = masked

    def counters(self) -> dict[Any, Counters]:
        """What the operations of each device of this process have counted."""
        self.wait()
        if not self._counters:
            raise EpError(
                Status.UNSUPPORTED,
                "counters: expected bootstrap's counters=True, got an Ep that does not count",
            )
        return {counting.device: counting.read() for counting in self._counters}

    def _name(self, device: Any) -> str:
        """How sentences call a device: its place in the mesh says to which group it belongs."""
        place = np.argwhere(self._mesh.devices == device)[0]
        at = ", ".join(f"{axis}={i}" for axis, i in zip(self._mesh.axis_names, place))
        return f"group {self.key}, device {device.id} ({at})"

    def release(self) -> None:
        """Let programs use the groups no more."""
        self._run([functools.partial(_close_rank, self.key, rank) for rank in self.ranks])

    def wait(self) -> None:
        """Wait for the arrays that programs are computing on the groups' devices.

        No longer than a rank waits for its peers. It asks, since a wait of JAX has no deadline.
        """
        if self.key not in _open:
            return
        deadline = time.monotonic() + self._wait_seconds
        for array in jax.live_arrays(next(iter(self._devices)).platform):
            while _is_computed(array, self._devices) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Destroy the groups. A second call does nothing."""
        if _open.pop(self.key, None) is not None:
            self.release()
            self._close_groups()

    def interrupt(self, sent: float) -> None:
        """Abort a group where a call has been waiting since before a signal.

        JAX would go on waiting for its program, and Python cannot raise KeyboardInterrupt meanwhile.
        """
        for rank in self.ranks:
            if _calls.library.ep_jax_rank_waits(self.key, rank.ordinal, sent):
                rank.group.abort(_process.INTERRUPTED)

    def abort_failed(self) -> None:
        """Abort the groups if a program has failed on one device, and another waits in a call.

        The failed device makes no more calls, and JAX tells the program's caller nothing before all
        devices have ended. All groups: those that wait for nobody would soon wait in a collective
        of XLA.
        """
        if self.has_masks:
            return  # those that wait are suspended at their deadline, and go on after a mask
        before = time.time() - _WATCH_SECONDS
        waits = _calls.library.ep_jax_rank_waits
        waiting = {rank.device for rank in self.ranks if waits(self.key, rank.ordinal, before)}
        if not waiting:
            return
        failed = _failed_beside(waiting)
        for device in [rank.device for rank in self.ranks if rank.device in failed][:1]:
            for rank in self.ranks:
                rank.group.abort(f"a program failed on {self._name(device)}: {failed[device]}")

    def abort_masked(self) -> None:
        """Abort the groups of masked devices, which would wait for the others when they close."""
        for rank in self.ranks:
            if rank.device in self._masked:
                rank.group.abort("the device is masked")

    def _meet(self) -> None:
        """Wait until the processes have come here, in which the mesh has devices.

        A device fails if the others mask it while it is in a call. They know when that call has
        ended for them, not for it. Another process may be missing, so there is a deadline.
        """
        try:
            for bootstrap in self._processes:
                # Another process may first wait for a call that runs into its deadline.
                bootstrap.allgather(b"masks", 2 * self._wait_seconds)
        except EpError as error:
            if error.status is not Status.TIMEOUT:
                raise

    def _close_groups(self) -> None:
        self._run([rank.group.close for rank in self.ranks if rank.device not in self._masked])
        self.abort_masked()
        for rank in self.ranks:
            rank.group.close()
        self._threads.shutdown(wait=False)
        for bootstrap in self.bootstraps + self._processes:
            bootstrap.close()

    def _run(self, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run functions side by side, return what they return, and raise the first error.

        The error of a rank whose peer has failed comes last.
        """
        futures = [self._threads.submit(body) for body in bodies]
        errors = [error for future in futures if (error := future.exception())]
        errors.sort(key=lambda error: isinstance(error, EpError) and error.status is Status.PEER)
        if errors:
            raise errors[0]
        return [future.result() for future in futures]


def _is_computed(array: Any, devices: set[Any]) -> bool:
    """Whether a program on one of the devices is computing an array."""
    # The manual of JAX does not have is_ready. Should it go, there is no wait.
    is_ready = getattr(array, "is_ready", lambda: True)
    try:
        return not is_ready() and not devices.isdisjoint(array.sharding.device_set)
    except RuntimeError:
        return False  # another thread has deleted it


def _failed_beside(waiting: set[Any]) -> dict[Any, str]:
    """The devices where programs have failed that go on on one of the `waiting`, and why."""
    failed = {}
    for array in jax.live_arrays("cpu"):
        try:
            if len(array.sharding.device_set) > 1 and _is_computed(array, waiting):
                failed.update(_failures(array, waiting))
        except RuntimeError:
            pass  # another thread has deleted it
    return failed


def _failures(array: Any, waiting: set[Any]) -> dict[Any, str]:
    """If an array is being computed on one of the `waiting`: where that has failed, and why."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    ended = {device for device, shard in shards.items() if shard.is_ready()}
    failed = {}
    for device in ended if waiting & (shards.keys() - ended) else ():
        try:
            shards[device].block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            failed[device] = str(error).strip().splitlines()[-1][:200]
    return failed


@functools.cache
def _watch_programs() -> None:
    """Start the thread that calls abort_failed."""

    def watch() -> None:
        while True:
            time.sleep(_WATCH_SECONDS)
            for ranks in list(_open.values()):
                ranks.abort_failed()

    threading.Thread(target=watch, name="libep-jax", daemon=True).start()


def _rank_error(key: int, rank: _Rank) -> Optional[EpError]:
    finding = _abi.initialized(_abi.EpFinding)
    status = _calls.library.ep_jax_rank_status(key, rank.ordinal, ctypes.byref(finding))
    if status == Status.OVERFLOW:
        return EpError(
            Status.OVERFLOW,
            f"rank {finding.rank}: dispatch: expected at most {finding.expected} receive rows "
            f"(max_recv_rows), needed {finding.seen}; {finding.count} were lost",
        )
    return last_error(status) if status else None


def _words(bits: Iterable[Any]) -> Any:
    """Bits as ep_group_mask takes them."""
    numbers = np.packbits([bool(bit) for bit in bits], bitorder="little")
    numbers = np.pad(numbers, (0, -len(numbers) % 4)).view("<u4")
    return (ctypes.c_uint32 * len(numbers))(*numbers)


def _mask_rank(key: int, rank: _Rank, words: Any) -> None:
    status = _calls.library.ep_jax_rank_mask(key, rank.ordinal, words)
    if status:
        raise last_error(status)


def _close_rank(key: int, rank: _Rank) -> None:
    _calls.library.ep_jax_rank_close(key, rank.ordinal, CLOSE_SECONDS)


def _bootstraps(prefix: str, devices: Sequence[Any]) -> Iterable[Bootstrap]:
    """Bootstraps for those of the devices that are this process's."""
    here = [r for r, d in enumerate(devices) if d.process_index == jax.process_index()]
    if len(here) == len(devices):
        return Bootstrap.local(len(devices))
    return [_store_bootstrap(prefix, rank, len(devices)) for rank in here]


def _store_bootstrap(prefix: str, rank: int, size: int) -> Bootstrap:
    # JAX has no public name for the store that its processes share.
    from jax._src.distributed import global_state

    client: Any = global_state.client

    def get(key: str, seconds: float) -> bytes:
        try:
            return bytes(client.blocking_key_value_get_bytes(key, max(1, int(seconds * 1000))))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise TimeoutError from None
            raise

    return Bootstrap.from_store(
        rank, size, client.key_value_set_bytes, get, client.key_value_delete, prefix
    )


def _make_rank(
    bootstrap: Bootstrap, device: Any, layer: Mapping[str, Any], fields: Mapping[str, Any]
) -> _Rank:
    on_host = device.platform == "cpu"
    ordinal = device.id if on_host else device.local_hardware_id
    place = {"backend": Backend.HOST} if on_host else {"backend": Backend.CUDA, "device": ordinal}
    group = Group(bootstrap, **place, **fields)
    try:
        # Experts may read every row, and XLA's buffers are not cleared.
        handle = Handle(group, plans=Plans.NAMED, zero_tail=Tail.ZERO, **layer)
    except BaseException as error:
        group.abort(str(error))
        group.close()
        raise
    return _Rank(group, handle, device, ordinal)


def _add(key: int, rank: _Rank, has_masks: bool) -> None:
    on_host = rank.group.query().backend is Backend.HOST
    numbers = (rank.ordinal, rank.group.rank, rank.group.size, on_host, has_masks)
    pointers = (rank.group.require(), rank.handle._require())
    if not _calls.library.ep_jax_rank_add(key, *numbers, *pointers):
        raise MemoryError("libep.jax: no memory or thread for a rank")


def _close_local() -> None:
    """At the end of the process: close the groups that have no ranks elsewhere."""
    for ranks in list(_open.values()):
        if all(bootstrap.is_thread for bootstrap in ranks.bootstraps):
            ranks.close()


def _leave() -> None:
    """At the end of the process: keep programs out of the other groups. _process closes them."""
    for ranks in _open.values():
        for rank in ranks.ranks:
            _close_rank(ranks.key, rank)
        ranks.abort_masked()


def _interrupt(sent: float) -> None:
    for ranks in list(_open.values()):
        ranks.interrupt(sent)


_process.interrupts.append(_interrupt)
# A child has none of the threads that close groups, and maybe a mutex that one of them held.
os.register_at_fork(after_in_child=_open.clear)
# Functions of atexit come too late: concurrent.futures ends its threads by this one, earlier. Those
# registered later are called first.
threading._register_atexit(_close_local)  # type: ignore[attr-defined]
atexit.register(_leave)
