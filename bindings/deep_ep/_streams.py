# SPDX-License-Identifier: Apache-2.0
"""Events, and the stream on which a Buffer's operations run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .._abi import Status
from .._library import EpError
from ..torch._group import current_stream

if TYPE_CHECKING:
    from typing import Any, Callable, Optional

    from torch import Tensor


class EventHandle:
    """A point in the work of the current CUDA stream. On CPUs, where calls have finished: nothing."""

    def __init__(self, event: Optional[torch.cuda.Event] = None) -> None:
        """event: one that is recorded already, in place of a point of the current stream."""
        self._event = event
        if event is None and torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self) -> None:
        """Let the current stream wait for the point."""
        if self._event is not None:
            self.let_wait(torch.cuda.current_stream())

    def let_wait(self, stream: torch.cuda.Stream) -> None:
        """Let a stream wait for the point."""
        if self._event is not None:
            stream.wait_event(self._event)


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
        self.hook_after_wait: Optional[Callable[[], object]] = None
        self._releases = False

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

    stream: torch.cuda.Stream
    event: Optional[torch.cuda.Event]
    """None while all operations have run on one stream."""


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
        self._only: Optional[int] = None  # the stream of all operations, while there is one alone

    def stream(self, device: Optional[torch.device] = None) -> torch.cuda.Stream:
        """The stream of operations with async_finish."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._only = None
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
        if not async_finish and (previous_event is None or previous_event.event is None):
            if self._only is not None and self._only == current_stream(device.index):
                result, _ = body()
                return result, EventOverlap()
        current = torch.cuda.current_stream(device)
        is_beside = async_finish and not torch.cuda.is_current_stream_capturing()
        stream = self.stream(device) if is_beside else current
        if previous_event is not None and previous_event.event is not None:
            previous_event.event.let_wait(stream)
        elif is_beside:
            stream.wait_stream(current)
        if not is_beside:
            result, tensors = self._run_here(stream, body)
        else:
            with torch.cuda.stream(stream):
                result, tensors = self._run_here(stream, body)
        if self._stream is not None:
            # The allocator would reuse memory in the order of the stream that it came from.
            _record(tensors, current)
            if is_beside:
                _record(tensors, stream)
        if not async_finish:
            return result, EventOverlap()
        end = self._end.event if is_beside and self._end is not None else None
        return result, EventOverlap(EventHandle(end))

    def run_on(self, stream: torch.cuda.Stream, body: Callable[[], Any]) -> Any:
        """Run body() on a stream, after the operation before."""
        if stream == torch.cuda.current_stream(stream.device):
            return self._run_here(stream, body)
        with torch.cuda.stream(stream):
            return self._run_here(stream, body)

    def _run_here(self, stream: torch.cuda.Stream, body: Callable[[], Any]) -> Any:
        """run_on of the current stream."""
        if torch.cuda.is_current_stream_capturing():
            return body()
        is_only = self._stream is None and (self._end is None or self._only is not None)
        if self._end is not None and self._end.stream != stream:
            stream.wait_event(self._end.event or self._end.stream.record_event())
            is_only = False
        result = body()
        self._only = stream.cuda_stream if is_only else None
        self._end = _End(stream, None if is_only else stream.record_event())
        return result


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
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
