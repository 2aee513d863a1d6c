# SPDX-License-Identifier: Apache-2.0
"""Events, and the stream on which a Buffer's operations run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._abi import Status
from .._library import EpError

if TYPE_CHECKING:
    from typing import Any, Callable, Optional

    from torch import Tensor


class EventHandle:
    """A point in the work of the current CUDA stream. On CPUs, where calls have finished: nothing."""

    def __init__(self) -> None:
        self._event: Optional[torch.cuda.Event] = None
        if torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Let the current stream wait for the point."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """The end of an operation. `with event:` waits for it on the current stream at the block's end.

    event          an EventHandle, or None
    extra_tensors  tensors that live until the EventOverlap goes
    """

    def __init__(
        self,
        event: Optional[EventHandle] = None,
        extra_tensors: Optional[tuple[Optional[Tensor], ...]] = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Let the current stream wait for the operation. EpError without an event."""
        if self.event is None:
            raise EpError(
                Status.ORDER,
                "current_stream_wait: expected an event, got none: the call was made without "
                "async_finish, and the current stream waits already",
            )
        self.event.current_stream_wait()

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


class _End(NamedTuple):
    """Where an operation ended."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event


class Lane:
    """Runs a Buffer's operations: one after the other, on the current stream or beside it.

    Operations with async_finish run on a stream of the Lane, all others on the current stream. Each
    begins after the one before, wherever that ran, since libep's operations have an order. While a
    CUDA graph is captured all of them run on the current stream.
    """

    def __init__(self) -> None:
        self._stream: Optional[torch.cuda.Stream] = None
        self._end: Optional[_End] = None

    def stream(self, device: Optional[torch.device] = None) -> torch.cuda.Stream:
        """The stream of operations with async_finish."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device, priority=-1)
        return self._stream

    def run(
        self,
        device: torch.device,
        previous_event: Optional[EventOverlap],
        async_finish: bool,
        body: Callable[[], tuple[Any, tuple[Optional[Tensor], ...]]],
    ) -> tuple[Any, EventOverlap]:
        """Run body(), which returns its result and the tensors that it used, outputs included.

        Returns the result, and the event after it: one without EventHandle unless async_finish.
        """
        if device.type == "cpu":
            result, _ = body()
            return result, EventOverlap(EventHandle() if async_finish else None)
        current = torch.cuda.current_stream(device)
        is_beside = async_finish and not torch.cuda.is_current_stream_capturing()
        stream = self.stream(device) if is_beside else current
        if previous_event is not None and previous_event.event is not None:
            with torch.cuda.stream(stream):
                previous_event.event.current_stream_wait()
        elif is_beside:
            stream.wait_stream(current)
        result, tensors = self.run_on(stream, body)
        if self._stream is not None:
            # The allocator would reuse memory in the order of the stream that it came from.
            _record(tensors, current)
            _record(tensors, self._stream)
        if not async_finish:
            return result, EventOverlap()
        with torch.cuda.stream(stream):
            return result, EventOverlap(EventHandle())

    def run_on(self, stream: torch.cuda.Stream, body: Callable[[], Any]) -> Any:
        """Run body() on a stream, after the operation before."""
        with torch.cuda.stream(stream):
            if torch.cuda.is_current_stream_capturing():
                return body()
            if self._end is not None and self._end.stream != stream:
                stream.wait_event(self._end.event)
            result = body()
            event = torch.cuda.Event()
            event.record(stream)
            self._end = _End(stream, event)
        return result


def _record(tensors: tuple[Optional[Tensor], ...], stream: torch.cuda.Stream) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)


def keep(tensor: Tensor) -> None:
    """Keep a tensor's memory until the current stream has used it.

    For tensors within handles, which a caller may drop as soon as a call on any stream returns.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
