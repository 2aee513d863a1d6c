# SPDX-License-Identifier: Apache-2.0
"""Events, and the stream on which a Buffer's operations run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._abi import Status
from .._library import EpError
from ..torch import _fast
from ..torch._group import current_stream

if TYPE_CHECKING:
    from typing import Any, Callable, Optional

    from torch import Tensor

_known: dict[tuple[int, int], torch.cuda.Stream] = {}

# Without what torch.cuda does around them. A PyTorch without CUDA does not have them.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)
_is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", lambda: False
)


def find_stream(device: torch.device) -> int:
    """The current stream of a device, a cudaStream_t as an int; 0 on CPUs."""
    return 0 if device.type == "cpu" else current_stream(device.index)


def find_current(ordinal: int) -> torch.cuda.Stream:
    """The current stream of a GPU. Its object is kept, since making one takes several calls."""
    key = ordinal, current_stream(ordinal)
    found = _known.get(key)
    if found is None:
        found = _known[key] = torch.cuda.current_stream(ordinal)
    return found


def _record_event(ordinal: int, stream: int) -> object:
    """An event at this point of a stream, which goes back to its pool when it is dropped."""
    event = _fast.record(_fast.events, ordinal, stream)
    if type(event) is int:
        raise EpError(Status.SYSTEM, f"record of an event: CUDA returned error {event}")
    return event


def _wait_event(stream: int, event: object) -> None:
    """Let a stream wait for an event."""
    error = _fast.wait(_fast.events, stream, event)
    if error is not None:
        raise EpError(Status.SYSTEM, f"wait for an event: CUDA returned error {error}")


class _Loan(NamedTuple):
    """Tensors of a stream that an operation on another stream reads."""

    tensors: tuple[Optional[Tensor], ...]
    owner: int
    user: torch.cuda.Stream


class EventHandle:
    """A point in the work of the current CUDA stream. On CPUs, where calls have finished: nothing."""

    __slots__ = ("__weakref__", "_end", "_loan")

    def __init__(self, end: Optional[_End] = None, loan: Optional[_Loan] = None) -> None:
        """end: one that is recorded already, in place of a point of the current stream.

        loan  of the operation that ends there. Its tensors live until their own stream waits for
              the event. So their memory is reused in that stream's order, as after any operation.
        """
        self._loan, self._end = loan, end
        if end is None and torch.cuda.is_initialized():
            ordinal = current_device()
            stream = current_stream(ordinal)
            self._end = _End(stream, _record_event(ordinal, stream))

    def current_stream_wait(self) -> None:
        """Let the current stream wait for the point."""
        if self._end is not None:
            self.let_wait(current_stream(current_device()))

    def let_wait(self, stream: int) -> None:
        """Let a stream wait for the point, a cudaStream_t as an int. Its own stream need not."""
        if self._end is not None:
            if self._end.stream != stream:
                _wait_event(stream, self._end.event)
            if self._loan is not None and self._loan.owner == stream:
                self._loan = None

    def __del__(self) -> None:
        if self._loan is not None:  # no wait has ended it
            _record(self._loan.tensors, self._loan.user)


class EventOverlap:
    """The end of an operation. `with event:` waits for it on the current stream at the block's end.

    event          an EventHandle, or None
    extra_tensors  tensors that live until the EventOverlap goes
    """

    # Those of an event without point, which a call makes without __init__.
    event: Optional[EventHandle] = None
    extra_tensors: Optional[tuple[Optional[Tensor], ...]] = None
    hook_after_wait: Optional[Callable[[], object]] = None
    _releases = False

    def __init__(
        self,
        event: Optional[EventHandle] = None,
        extra_tensors: Optional[tuple[Optional[Tensor], ...]] = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Let the current stream wait for the operation. EpError without an event.

        release_handle  drop the event then
        """
        if self.event is None:
            raise EpError(
                Status.ORDER,
                "current_stream_wait: expected an event, got none: the call was made without "
                "async_finish, and the current stream waits already",
            )
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], object]) -> None:
        """Call a function once, after the next wait. EpError if one is registered already."""
        if self.hook_after_wait is not None:
            raise EpError(
                Status.ORDER,
                "register_hook_after_wait: expected one hook until the next wait, got a second one",
            )
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """For `with event(release_handle=True):`, which drops the event at the block's end."""
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        releases, self._releases = self._releases, False
        if self.event is not None:
            self.current_stream_wait(releases)


class _End(NamedTuple):
    """Where an operation ended."""

    stream: int
    """A cudaStream_t. One with events lives as long as they do."""

    event: object
    """None while all operations have run on one stream."""


class Used(NamedTuple):
    """What the body of an operation returns: its result, and the tensors that it used."""

    result: Any
    inputs: tuple[Optional[Tensor], ...]
    outputs: tuple[Optional[Tensor], ...]


class Lane:
    """Runs a Buffer's operations: one after the other, on the current stream or beside it.

    Operations with async_finish run on a stream of the Lane, all others on the current stream. Each
    begins after the one before, wherever that ran, since libep's operations have an order. While a
    CUDA graph is captured all of them run on the current stream.

    Events cost more than all else of a call. So there are none until operations have run on two
    streams: until then their order is that of the stream.
    """

    def __init__(self) -> None:
        self._stream: Optional[torch.cuda.Stream] = None
        self._end: Optional[_End] = None
        self.only: Optional[int] = None
        """The stream of all operations, while there is one alone."""

    def stream(self, device: Optional[torch.device] = None) -> torch.cuda.Stream:
        """The stream of operations with async_finish."""
        if self._stream is None:
            made = torch.cuda.Stream(device, priority=-1)
            ordinal = torch.cuda.current_device() if device is None else device.index
            self._stream = _known.setdefault((ordinal, made.cuda_stream), made)
            self.only = None
        return self._stream

    def run(
        self,
        device: torch.device,
        previous_event: Optional[EventOverlap],
        async_finish: bool,
        body: Callable[[], Used],
    ) -> tuple[Any, EventOverlap]:
        """Run body(). Returns its result, and the event after it: one without EventHandle unless
        async_finish."""
        if device.type == "cpu":
            return body().result, EventOverlap(EventHandle() if async_finish else None)
        ordinal = device.index
        before = None if previous_event is None else previous_event.event
        current = current_stream(ordinal)
        if not async_finish and before is None and self.only == current:
            return body().result, EventOverlap()
        if _is_capturing():
            if before is not None:
                before.let_wait(current)
            return body().result, EventOverlap(EventHandle() if async_finish else None)
        if async_finish:
            return self._run_beside(device, current, before, body)
        if before is not None:
            before.let_wait(current)
        return self._run_here(ordinal, current, body).result, EventOverlap()

    def _run_beside(
        self,
        device: torch.device,
        current: int,
        before: Optional[EventHandle],
        body: Callable[[], Used],
    ) -> tuple[Any, EventOverlap]:
        """run() of an operation with async_finish. `before`: what it waits for; None: `current`."""
        ordinal, outer = device.index, find_current(device.index)
        stream = self._stream or self.stream(device)
        address = stream.cuda_stream
        if before is not None:
            before.let_wait(address)
        elif current != address:
            _wait_event(address, _record_event(ordinal, current))
        before_device = current_device()
        _set_stream(stream)
        try:
            used = self._run_here(ordinal, address, body)
        finally:
            _set_stream(outer)
            if before_device != ordinal:
                torch.cuda.set_device(before_device)
        # The allocator would reuse memory in the order of the stream that it came from.
        if outer is not stream:
            _record(used.outputs, outer)
        loan = _Loan(used.inputs, current, stream)
        return used.result, EventOverlap(EventHandle(self._end, loan))

    def run_on(self, stream: torch.cuda.Stream, body: Callable[[], Any]) -> Any:
        """Run body() on a stream, after the operation before."""
        ordinal = stream.device_index
        if stream is not find_current(ordinal):
            with torch.cuda.stream(stream):
                return self.run_on(stream, body)
        if _is_capturing():
            return body()
        return self._run_here(ordinal, stream.cuda_stream, body)

    def _run_here(self, ordinal: int, stream: int, body: Callable[[], Any]) -> Any:
        """run_on of the current stream, which is not captured."""
        end = self._end
        is_only = self._stream is None and (end is None or self.only is not None)
        if end is not None and end.stream != stream:
            _wait_event(stream, end.event or _record_event(ordinal, end.stream))
            is_only = False
        result = body()
        self.only = stream if is_only else None
        self._end = _End(stream, None if is_only else _record_event(ordinal, stream))
        return result


def _set_stream(stream: torch.cuda.Stream) -> None:
    """As torch.cuda.set_stream, which takes several times as long."""
    torch._C._cuda_setStream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def _record(tensors: tuple[Optional[Tensor], ...], stream: torch.cuda.Stream) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)


def keep(tensor: Tensor, made_on: Optional[int] = None) -> None:
    """Keep a tensor's memory until the current stream has used it.

    For tensors within handles, which a caller may drop as soon as a call on any stream returns.

    made_on  the stream whose order the memory's reuse follows; None: not known
    """
    if tensor.is_cuda and current_stream(tensor.get_device()) != made_on:
        tensor.record_stream(find_current(tensor.get_device()))
