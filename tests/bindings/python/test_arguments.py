# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments and closed objects: an exception with a sentence, and no damage."""

from __future__ import annotations

import gc
import pickle
import threading

import libep
import numpy as np
import pytest
from conftest import run_threads
from libep import Bootstrap, EpError, Group, Handle, Status, Tensor, Type

FIELDS = dict(
    num_experts=4,
    max_tokens=4,
    max_top_k=2,
    max_row_bytes=32,
    backend=libep.Backend.HOST,
    timeout_seconds=20,
)
IDX = np.array([[0, 1], [2, 3]], np.int32)
X = np.ones((2, 8), np.float32)
W = np.ones((2, 2), np.float32)


@pytest.fixture
def group():
    with Bootstrap.local(1)[0] as bootstrap, Group(bootstrap, **FIELDS) as made:
        yield made


@pytest.fixture
def handle(group):
    with Handle(group) as made:
        made.prepare(IDX)
        yield made


def dispatch(handle, **changed):
    given = dict(
        tokens=X,
        topk_weights=W,
        recv_tokens=np.zeros((4, 8), np.float32),
        recv_topk_weights=np.zeros(4, np.float32),
    )
    handle.dispatch(**dict(given, **changed))


# ---- what the core sees itself -----------------------------------------------------------------


class Fake:
    def __init__(self, **interface):
        self.__array_interface__ = interface


@pytest.mark.parametrize(
    "tokens, sentence",
    [
        (
            np.ones((8, 2), np.float32).T,
            r"C-contiguous tensor, got strides \(4, 8\) for shape \(2, 8\)",
        ),
        (np.ones((2, 16), np.float32)[:, ::2], "C-contiguous"),
        (np.ones((2, 8), np.float32)[::-1], "C-contiguous"),
        (np.broadcast_to(np.float32(1), (2, 8)), "C-contiguous"),
        (np.ones((2, 8)), "elements of one of the types BF16, .*, got float64"),
        (np.ones((2, 8), bool), "got bool"),
        (np.ones((2, 8), np.complex64), "got complex64"),
        (np.ones((2, 8), ">f4"), "got float32"),
        (np.float32(1), "1 to 3 dimensions, got 0"),
        (np.ones((1, 1, 2, 8), np.float32), "1 to 3 dimensions, got 4"),
        ([[1.0] * 8] * 2, "expected a tensor, got builtins.list"),
        ("tokens", "expected a tensor, got builtins.str"),
        (7, "expected a tensor, got builtins.int"),
    ],
)
def test_no_tensor(handle, tokens, sentence):
    with pytest.raises(TypeError, match="^tokens: .*" + sentence):
        dispatch(handle, tokens=tokens)
    dispatch(handle)


def test_output_in_read_only_memory(handle):
    recv = np.zeros((4, 8), np.float32)
    recv.flags.writeable = False
    with pytest.raises(TypeError, match="^recv_tokens: expected memory that may be written"):
        dispatch(handle, recv_tokens=recv)
    dispatch(handle, tokens=np.frombuffer(X.tobytes(), np.float32).reshape(2, 8))


@pytest.mark.parametrize(
    "fields, error, sentence",
    [
        (dict(num_expert=4), TypeError, "expected fields of EpGroupConfig .*, got num_expert$"),
        (dict(num_experts=1 << 32), OverflowError, "num_experts: 4294967296 does not fit"),
        (dict(num_experts="4"), TypeError, "num_experts: expected a number, got '4'"),
        (dict(backend="gpu"), ValueError, "backend: expected one of auto, host, cuda, got 'gpu'"),
        (dict(num_experts=4.5), TypeError, "num_experts: expected a number, got 4.5"),
        (dict(struct_size=8), TypeError, "got struct_size"),
    ],
)
def test_wrong_fields_of_a_group(fields, error, sentence):
    with Bootstrap.local(1)[0] as bootstrap:
        with pytest.raises(error, match=sentence):
            Group(bootstrap, **dict(FIELDS, **fields))


def test_missing_field_of_a_group():
    with Bootstrap.local(1)[0] as bootstrap:
        with pytest.raises(TypeError, match="max_row_bytes is missing"):
            Group(bootstrap, num_experts=1, max_tokens=1, max_top_k=1)


# ---- what the library refuses ------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed, status",
    [
        (dict(tokens=np.ones((3, 8), np.float32)), Status.SHAPE),
        (dict(tokens=np.ones(16, np.float32)), Status.NDIM),
        (dict(tokens=np.ones((2, 3), np.float32)), Status.ROW_BYTES),
        (dict(topk_weights=np.ones((2, 2), np.float16)), Status.TYPE),
        (dict(recv_tokens=np.zeros((3, 8), np.float32)), Status.BUFFER_SIZE),
        (dict(recv_tokens=np.zeros((4, 8), np.int32)), Status.TYPE),
        (dict(recv_topk_weights=None), Status.NULL),
        (dict(tokens=Tensor(X.ctypes.data + 4, Type.FP32, (2, 8))), Status.ADDRESS),
        (dict(prepare=libep.Prepare(IDX)), Status.UNSUPPORTED),
    ],
)
def test_refused_call(handle, changed, status):
    with pytest.raises(EpError, match="^rank 0: ep_dispatch: ") as caught:
        dispatch(handle, **changed)
    assert caught.value.status is status
    dispatch(handle)


def test_refused_configurations(group):
    for fields, status in [
        (dict(alignment=3), Status.ALIGNMENT),
        (dict(top_k=3), Status.TOP_K),
        (dict(mode=libep.Mode.LATENCY), Status.UNSUPPORTED),
    ]:
        with pytest.raises(EpError) as caught:
            Handle(group, **fields)
        assert caught.value.status is status
    with pytest.raises(EpError) as caught:
        Group.memory(0, **FIELDS)
    assert caught.value.status is Status.RANGE
    with pytest.raises(EpError) as caught:
        libep.expert_range(8, 2, 2)
    assert caught.value.status is Status.RANGE
    with pytest.raises(EpError) as caught:
        Bootstrap.local(0)
    assert caught.value.status is Status.RANGE


def mismatch_rank(bootstrap):
    with pytest.raises(EpError) as caught:
        Group(bootstrap, **dict(FIELDS, max_tokens=4 + bootstrap.rank))
    return caught.value


def test_ranks_that_differ():
    for error in run_threads(2, mismatch_rank):
        assert error.status is Status.MISMATCH and "max_tokens" in str(error)


def test_routing_error_is_a_finding(group):
    with Handle(group) as handle:
        handle.prepare(np.array([[0, 9], [7, 1]], np.int32))
        finding = group.status()
        assert finding.status is Status.ROUTING
        assert (finding.token, finding.k, finding.expected, finding.seen, finding.count) == (
            0,
            1,
            4,
            9,
            2,
        )
        assert finding.phase == "prepare" and "9" in finding.sentence
        assert group.status().status is Status.OK


def test_errors_can_be_pickled(handle):
    with pytest.raises(EpError) as caught:
        dispatch(handle, recv_topk_weights=None)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.status) == (str(caught.value), Status.NULL)


# ---- closed objects ----------------------------------------------------------------------------


def test_closed_handle(group):
    handle = Handle(group)
    handle.close()
    handle.close()
    for call in (lambda: handle.prepare(IDX), handle.info, handle.plan, lambda: dispatch(handle)):
        with pytest.raises(EpError, match="rank 0: the handle is closed") as caught:
            call()
        assert caught.value.status is Status.DESTROYED


def test_closed_group():
    bootstrap = Bootstrap.local(1)[0]
    group = Group(bootstrap, **FIELDS)
    handle = Handle(group)
    with pytest.raises(EpError, match="groups to be closed first, got 1 that are open"):
        bootstrap.close()
    group.close()
    group.close()
    group.abort("too late, which is no error")
    for call in (
        lambda: handle.prepare(IDX),
        handle.info,
        lambda: Handle(group),
        group.query,
        group.status,
        lambda: group.mem_alloc(8),
        lambda: group.window_release(0),
    ):
        with pytest.raises(EpError, match="rank 0: the group is closed") as caught:
            call()
        assert caught.value.status is Status.DESTROYED
    handle.close()
    bootstrap.close()
    bootstrap.close()
    with pytest.raises(EpError, match="rank 0: the bootstrap is closed"):
        Group(bootstrap, **FIELDS)


def test_dropped_handles_are_freed_later(group):
    before = group.query().library_bytes
    for _ in range(50):
        Handle(group).prepare(IDX)
    gc.collect()
    one = Handle(group)
    assert group.query().library_bytes - before == one.plan_bytes
    one.close()
    assert group.query().library_bytes == before


def test_aborted_group():
    with Bootstrap.local(1)[0] as bootstrap, Group(bootstrap, **FIELDS) as group:
        handle = Handle(group)
        group.abort("ünlucky")
        with pytest.raises(EpError, match="ünlucky") as caught:
            handle.prepare(IDX)
        assert caught.value.status is Status.ABORTED
        assert group.status().status is Status.ABORTED


# ---- one thread at a time ----------------------------------------------------------------------


def busy_rank(bootstrap, release):
    with Group(bootstrap, **FIELDS) as group:
        handle = Handle(group)
        if bootstrap.rank == 1:
            release.wait(20)
            handle.prepare(IDX)
            return
        waiting = threading.Thread(target=handle.prepare, args=(IDX,))
        waiting.start()
        while not group.caller:
            pass
        with pytest.raises(RuntimeError, match="one thread at a time"):
            group.query()
        with pytest.raises(RuntimeError, match="one thread at a time"):
            group.close()
        release.set()
        waiting.join()


def test_second_thread_is_refused():
    run_threads(2, busy_rank, threading.Event())


def watchdog_rank(bootstrap):
    with Group(bootstrap, **FIELDS) as group:
        if bootstrap.rank == 1:
            threading.Event().wait(0.5)
            return
        timer = threading.Timer(0.2, group.abort, ["no step for 0.2 seconds"])
        timer.start()
        with pytest.raises(EpError, match="no step for 0.2 seconds") as caught:
            Handle(group).prepare(IDX)
        assert caught.value.status is Status.ABORTED


def test_watchdog_aborts_a_wait():
    run_threads(2, watchdog_rank)


def test_names_of_members():
    """Fields take members of enums by name, in any case."""
    for name in "latency", "LATENCY", "Latency":
        with Bootstrap.local(1)[0] as bootstrap:
            with Group(bootstrap, **{**FIELDS, "backend": "host", "mode": name}) as group:
                facts = group.query()
                assert facts.mode is libep.Mode.LATENCY and facts.backend is libep.Backend.HOST
                with Handle(group, layout="rank_major") as handle:
                    assert handle.mode is libep.Mode.LATENCY
