# SPDX-License-Identifier: Apache-2.0
"""Wrong fields and outputs, closed objects, one thread at a time: a sentence, and no damage."""

import gc
import pickle
import threading

import libep
import numpy as np
import pytest
from base import refused, run_threads
from libep import Bootstrap, Group, Handle, Mode, Status, Tensor, Type

SIZES = dict(num_experts=4, max_tokens=4, max_top_k=2, max_row_bytes=32)
FIELDS = dict(SIZES, backend=libep.Backend.HOST, timeout_seconds=20)
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
    given = dict(tokens=X, topk_weights=W)
    recv, recv_w = np.zeros((4, 8), np.float32), np.zeros(4, np.float32)
    handle.dispatch(**{**given, "recv_tokens": recv, "recv_topk_weights": recv_w, **changed})


def read_only(array):
    array.flags.writeable = False
    return array


# ---- calls and configurations that are refused ---------------------------------------------------


@pytest.mark.parametrize("text, changed", [
    ("TypeError ^recv_tokens: expected memory that may be written",
     dict(recv_tokens=read_only(np.zeros((4, 8), np.float32)))),
    ("BUFFER_SIZE", dict(recv_tokens=np.zeros((3, 8), np.float32))),
    ("TYPE", dict(recv_tokens=np.zeros((4, 8), np.int32))),
    ("NULL", dict(recv_topk_weights=None)),
    ("ADDRESS", dict(tokens=Tensor(X.ctypes.data + 4, Type.FP32, (2, 8)))),
    ("UNSUPPORTED", dict(prepare=libep.Prepare(IDX))),
])  # fmt: skip
def test_refused_outputs(handle, text, changed):
    with refused(text if " " in text else f"{text} ^rank 0: ep_dispatch_with: "):
        dispatch(handle, **changed)
    dispatch(handle, tokens=np.frombuffer(X.tobytes(), np.float32).reshape(2, 8))


@pytest.mark.parametrize("text, fields", [
    ("TypeError expected fields of EpGroupConfig .*, got num_expert$", dict(num_expert=4)),
    ("OverflowError num_experts: 4294967296 does not fit", dict(num_experts=1 << 32)),
    ("TypeError num_experts: expected a number, got '4'", dict(num_experts="4")),
    ("TypeError num_experts: expected a number, got 4.5", dict(num_experts=4.5)),
    ("ValueError backend: expected one of auto, host, cuda, got 'gpu'", dict(backend="gpu")),
    ("TypeError got struct_size", dict(struct_size=8)),
])  # fmt: skip
def test_wrong_fields_of_a_group(text, fields):
    with Bootstrap.local(1)[0] as bootstrap:
        with refused(text):
            Group(bootstrap, **{**FIELDS, **fields})
        with refused("TypeError max_row_bytes is missing"):
            Group(bootstrap, num_experts=1, max_tokens=1, max_top_k=1)


@pytest.mark.parametrize("text, call", [
    ("ALIGNMENT", lambda group: Handle(group, alignment=3)),
    ("TOP_K", lambda group: Handle(group, top_k=3)),
    ("UNSUPPORTED", lambda group: Handle(group, mode=Mode.LATENCY)),
    ("UNSUPPORTED config.sum_quant: expected EP_QUANT_NONE or EP_QUANT_FP8",
     lambda group: Handle(group, sum_quant=libep.Quant.MXFP8)),
    ("RANGE config.padding: expected an EpPadding, got 0", lambda group: Handle(group, padding=0)),
    ("RANGE", lambda group: Group.memory(0, **FIELDS)),
    ("RANGE", lambda group: libep.expert_range(8, 2, 2)),
    ("RANGE", lambda group: Bootstrap.local(0)),
    ("TypeError biases: expected at most 2, got 3", lambda group: libep.Extras(X, X, X)),
])  # fmt: skip
def test_refused_configurations(group, text, call):
    with refused(text):
        call(group)


def test_names_of_members():
    """Fields take members of enums by name, in any case."""
    for name in "latency", "LATENCY", "Latency":
        fields = {**FIELDS, "backend": "host", "mode": name}
        with Bootstrap.local(1)[0] as bootstrap, Group(bootstrap, **fields) as group:
            facts = group.query()
            assert facts.mode is Mode.LATENCY and facts.backend is libep.Backend.HOST
            with Handle(group, layout="rank_major") as handle:
                assert handle.mode is Mode.LATENCY


def test_ranks_that_differ():
    def body(bootstrap):
        with refused("MISMATCH max_tokens"):
            Group(bootstrap, **{**FIELDS, "max_tokens": 4 + bootstrap.rank})

    run_threads(2, body)


def test_routing_error_is_a_finding(group):
    with Handle(group) as handle:
        handle.prepare(np.array([[0, 9], [7, 1]], np.int32))
        finding = group.status()
        assert finding.status is Status.ROUTING
        numbers = finding.token, finding.k, finding.expected, finding.seen, finding.count
        assert numbers == (0, 1, 4, 9, 2)
        assert finding.phase == "prepare" and "9" in finding.sentence
        assert group.status().status is Status.OK


def test_errors_can_be_pickled(handle):
    with refused("NULL") as caught:
        dispatch(handle, recv_topk_weights=None)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.status) == (str(caught.value), Status.NULL)


# ---- closed objects ----------------------------------------------------------------------------


def test_closed():
    bootstrap = Bootstrap.local(1)[0]
    group = Group(bootstrap, **FIELDS)
    handle, other = Handle(group), Handle(group)
    of_handle = lambda: handle.prepare(IDX), handle.info, handle.plan, lambda: dispatch(handle)
    of_group = (
        lambda: other.prepare(IDX), other.info, lambda: Handle(group), group.query, group.status,
        lambda: group.mem_alloc(8), lambda: group.window_release(0),
    )  # fmt: skip
    with refused("EpError groups to be closed first, got 1 that are open"):
        bootstrap.close()
    for close, text, calls in [
        (handle.close, "DESTROYED rank 0: the handle is closed", of_handle),
        (group.close, "DESTROYED rank 0: the group is closed", of_group),
        (bootstrap.close, "EpError rank 0: the bootstrap is closed",
         [lambda: Group(bootstrap, **FIELDS)]),
    ]:  # fmt: skip
        close()
        close()
        for call in calls:
            with refused(text):
                call()
    group.abort("too late, which is no error")
    other.close()


def test_dropped_handles_are_freed_later(group):
    before = group.query().library_bytes
    for _ in range(50):
        Handle(group).prepare(IDX)
    gc.collect()
    one = Handle(group)
    assert group.query().library_bytes - before == one.plan_bytes
    one.close()
    assert group.query().library_bytes == before


def test_aborted_group(group, handle):
    group.abort("ünlucky")
    with refused("ABORTED ünlucky"):
        handle.prepare(IDX)
    assert group.status().status is Status.ABORTED


# ---- one thread at a time ----------------------------------------------------------------------


def test_second_thread_is_refused():
    release = threading.Event()

    def body(bootstrap):
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
            for call in (group.query, group.close):
                with refused("RuntimeError one thread at a time"):
                    call()
            release.set()
            waiting.join()

    run_threads(2, body)


def test_watchdog_aborts_a_wait():
    def body(bootstrap):
        with Group(bootstrap, **FIELDS) as group:
            if bootstrap.rank == 1:
                threading.Event().wait(0.5)
                return
            threading.Timer(0.2, group.abort, ["no step for 0.2 seconds"]).start()
            with refused("ABORTED no step for 0.2 seconds"):
                Handle(group).prepare(IDX)

    run_threads(2, body)
