# SPDX-License-Identifier: Apache-2.0
"""Streams of libep.deep_ep: their order, with streams that only record it; and on GPUs."""

import contextlib
import random
import weakref

import pytest
import torch
from base import refused
from conftest import DEVICE, assert_equal, make_buffer, quarters, run_threads
from test_deep_ep_normal import send

import libep
from libep.deep_ep import EventHandle, EventOverlap, _streams
from libep.deep_ep._streams import Lane, Used

# ---- order, on any machine ----------------------------------------------------------------------


class Stream:
    """A stream, or an event, that knows which operations come before it."""

    current, made = None, 0

    def __init__(self, device=None, priority=0, before=()):
        self.before, self.cuda_stream = set(before), id(self)

    def record_event(self):
        Stream.made += 1
        return Stream(before=self.before)


class Memory:
    """A tensor that knows which streams keep its memory."""

    def __init__(self):
        self.streams = set()
        self.record_stream = self.streams.add


@pytest.fixture
def streams(monkeypatch):
    made = {}

    def make(*given, **options):
        stream = Stream(*given, **options)
        return made.setdefault(id(stream), stream)

    @contextlib.contextmanager
    def use(stream):
        outer, Stream.current = Stream.current, made.setdefault(id(stream), stream)
        yield
        Stream.current = outer

    Stream.current = make()
    fakes = dict(
        Stream=make, stream=use, current_stream=lambda device=None: Stream.current,
        is_initialized=lambda: True,
    )  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    fakes = dict(
        current_stream=lambda ordinal: id(Stream.current), _known={}, current_device=lambda: 0,
        _is_capturing=lambda: False, _set_stream=lambda stream: setattr(Stream, "current", stream),
        _record_event=lambda ordinal, stream: made[stream].record_event(),
        _wait_event=lambda stream, event: made[stream].before.update(event.before),
    )  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(_streams, name, fake)
    return use


GPU = torch.device("cuda", 0)


def done(result=None):
    return Used(result, (), ())


def test_inputs_live_until_their_stream_waits(streams):
    """Where none waits for the event, the allocator learns of the stream that reads them."""
    lane, owner = Lane(), Stream.current

    def run():
        given = Memory()
        _, event = lane.run(GPU, None, True, lambda: Used(None, (given,), ()))
        return event, weakref.ref(given), given.streams

    event, given, asked = run()
    with streams(Stream()):
        event.current_stream_wait()
    assert given() is not None
    event.current_stream_wait()
    assert given() is None and not asked
    event, given, asked = run()
    del event
    assert given() is None and asked == {lane.stream()} and Stream.current is owner


def test_an_error_leaves_the_stream(streams):
    lane, current = Lane(), Stream.current
    with pytest.raises(ZeroDivisionError):
        lane.run(GPU, None, True, lambda: 1 // 0)
    assert Stream.current is current is not lane.stream()


def test_order(seed, streams):
    """Each operation comes after the one before, after the work that it depends on, and its event
    after it, on whatever streams they run."""
    choose = random.Random(seed)
    lane = Lane()
    others = [Stream(), Stream()]
    events = []
    for operation in range(200):
        with streams(choose.choice(others)):
            current = Stream.current
            work = f"work {operation}"
            current.before.add(work)
            previous = EventOverlap(EventHandle()) if choose.random() < 0.5 else None
            is_beside = choose.random() < 0.5
            given, made = Memory(), Memory()

            def body(operation=operation, work=work, given=given, made=made):
                assert work in Stream.current.before
                assert set(range(operation)) <= Stream.current.before
                Stream.current.before.add(operation)
                return Used(operation, (given, None), (made,))

            result, event = lane.run(GPU, previous, is_beside, body)
            assert result == operation and (event.event is not None) == is_beside
            if is_beside:
                assert made.streams == {current} and not given.streams
                assert operation not in current.before
                events.append((operation, event))
            else:
                assert operation in current.before
            assert Stream.current is current
        for operation, event in events if choose.random() < 0.2 else ():
            with streams(Stream()):
                event.current_stream_wait()
                assert operation in Stream.current.before


def test_one_stream_needs_no_events(streams):
    """Until another stream is used, which waits for what came before."""
    lane, first = Lane(), Stream.current
    Stream.made = 0

    def run(operation):
        body = lambda: done(Stream.current.before.add(operation))  # noqa: E731
        return lane.run(GPU, None, False, body)

    for operation in range(3):
        _, event = run(operation)
        assert event.event is None
    assert Stream.made == 0 and first.before == {0, 1, 2}
    with streams(Stream()):
        run(3)
        assert Stream.current.before == {0, 1, 2, 3}
    run(4)
    assert first.before == {0, 1, 2, 3, 4} and Stream.made > 0


def test_captures(streams, monkeypatch):
    """A capture uses one stream. The next operation comes after the last that was not captured."""
    lane, seen = Lane(), []
    lane.run(GPU, None, False, lambda: done(Stream.current.before.add("first")))
    with streams(Stream()), monkeypatch.context() as patch:
        patch.setattr(_streams, "_is_capturing", lambda: True)
        for is_beside in False, True:
            _, event = lane.run(GPU, None, is_beside, lambda: done(seen.append(Stream.current)))
        assert seen == [Stream.current] * 2 and event.event is not None
    with streams(Stream()):
        lane.run(GPU, None, False, done)
        assert "first" in Stream.current.before


# ---- on GPUs ------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs LIBEP_TEST_DEVICE=cuda")
T, H, EXPERTS, K = 50, 512, 4, 2


def make_inputs(seed):
    return quarters(seed, T, H, EXPERTS, K, "cuda")


@needs_gpu
@pytest.mark.parametrize("size", [1, 2])
def test_beside_long_work(seed, size):
    """Operations beside the current stream, which waits for their events alone."""

    def body(bootstrap):
        x, idx, weights = make_inputs(seed + bootstrap.rank)
        owners = idx.div(EXPERTS // size, rounding_mode="floor")[..., None]
        ranks = (owners == torch.arange(size).cuda()).any(1).sum(1, keepdim=True)
        with make_buffer(bootstrap) as buffer:
            for _ in range(5):
                torch.cuda._sleep(10_000_000)
                late = x.clone()
                given = late, idx, weights, EXPERTS
                rx, _, _, _, handle, event = send(buffer, *given, async_finish=True)
                event.current_stream_wait()
                out, _, event = buffer.combine(rx, handle, async_finish=True)
                del rx, handle, late, given
                event.current_stream_wait()
                assert_equal(out, x * ranks)

    run_threads(size, body)


@needs_gpu
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_split", [False, True])
def test_captured_low_latency(seed, size, is_split):
    """A graph replays a step with other rows and another routing."""

    def body(bootstrap):
        data, other = (make_inputs(seed + bootstrap.rank + more) for more in (0, 7))
        options, stream = dict(return_recv_hook=is_split), torch.cuda.Stream()

        def step():
            x, *routing = data
            given = x, routing[0], T, EXPERTS
            rx, _, handle, _, hook = buffer.low_latency_dispatch(*given, use_fp8=False, **options)
            hook and hook()
            out, _, hook = buffer.low_latency_combine(rx, *routing, handle, **options)
            hook and hook()
            return out

        def expected():
            return data[0] * data[2].sum(1, keepdim=True)

        with make_buffer(bootstrap, low_latency_mode=True) as buffer, torch.cuda.stream(stream):
            assert_equal(step(), expected())
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                out = step()
            for replacement in (data, other):
                for tensor, values in zip(data, replacement):
                    tensor.copy_(values)
                graph.replay()
                assert_equal(out, expected())
            torch.cuda.synchronize()

    run_threads(size, body)


@needs_gpu
def test_exact_sizes_cannot_be_captured(seed):
    """The host would read the number of rows. The refused dispatch took no part."""
    (bootstrap,) = libep.Bootstrap.local(1)
    given = *make_inputs(seed), EXPERTS
    with make_buffer(bootstrap) as buffer:
        send(buffer, *given)
        torch.cuda.synchronize()
        with refused("UNSUPPORTED num_worst_tokens while a CUDA graph"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                send(buffer, *given)
        send(buffer, *given)
    bootstrap.close()
