# SPDX-License-Identifier: Apache-2.0
"""The face of libep itself for the common suite: its calls on NumPy arrays, through ctypes."""

import contextlib
import functools

import libep
import numpy as np
from base import SECONDS, run_threads
from libep import Extras, Group, Handle, Plans, PlanTensors, Prepare
from reference import pad

NAME = "ctypes"
LAYOUTS = ("expert_major", "flat", "batched", "rank_major")
DTYPES = ("float32", "float16")
SIZES = (1, 2, 3, 4)
HAS_EXACT_SIZES = HAS_UNEVEN_EXPERTS = HAS_PLANS = True
PADS_ALWAYS = False
BATCHED_ROWS, COUNTS_BACKWARD = 48, False
COUNTERS = "expert_tokens peer_rows peer_bytes peer_wait_ns peer_longest_wait_ns".split()
HAS_CHECKPOINTS = HAS_IDS_OF_TAILS = False


def config(world, **fields):
    """The configuration of a group for a World."""
    given = dict(
        num_experts=world.experts,
        max_tokens=world.max_tokens,
        max_top_k=world.top_k,
        max_row_bytes=world.hidden * 4,
        backend=libep.Backend.HOST,
        timeout_seconds=SECONDS,
    )
    return {**given, **fields}


def rows(*shape, dtype=np.float32):
    """Memory for an output, of which no byte is right before the call."""
    return np.full(shape, np.nan, dtype)


class Step:
    """A step of a rank, in calls that may lie apart. `expected` is the reference's Received."""

    biases, counters = (), {}

    def extras(self, names, biases=()):
        """Some of COUNTERS, if the step is counted, and biases."""
        found = {name: self.counters[name] for name in names if name in self.counters}
        return dict(extras=Extras(*biases, **found))

    def __init__(self, case, world, rank, handle, expected):
        self.world, self.rank, self.handle, self.plan = world, rank, handle, {}
        self.scale, self.is_per_token = expected.scale, expected.is_per_token
        self.x, self.w, self.grad = (
            pad(case, world, each[rank], np.nan)
            for each in (world.x, world.weights, world.grad_out)
        )
        self.topk_idx = pad(case, world, world.idx[rank], 1)
        self.num_tokens = np.array([world.tokens[rank]], np.int32) if case.is_padded else None

    def routing(self):
        """What prepare takes. The handle keeps it: nothing else refers to these arrays."""
        count = self.num_tokens
        return self.topk_idx.copy(), None if count is None else count.copy()

    def outputs(self, case, lead):
        scale = self.scale
        if case.layout in ("expert_major", "flat"):  # the rows behind belong to nobody
            tail = np.full((lead - len(scale), *scale.shape[1:]), np.nan, np.float32)
            self.scale = np.concatenate([scale, tail])
        lead = self.scale.shape[: 1 + (case.layout in ("batched", "rank_major"))]
        self.x = self.x.astype(case.dtype)
        self.recv = rows(*lead, self.world.hidden, dtype=case.dtype)
        self.recv_w = None if case.weights in ("none", "home") else rows(*self.scale.shape)
        self.idx = np.full(self.scale.shape, -7, np.int64) if self.is_per_token else None
        self.out = rows(*self.x.shape, dtype=case.dtype)
        biases = self.world.biases[: case.biases]
        self.biases = [bias[self.rank].astype(case.dtype) for bias in biases]

    def received(self):
        return dict(
            recv_tokens=self.recv, recv_topk_weights=self.recv_w, recv_topk_idx=self.idx
        )

    def given(self):
        return self.x, None if self.recv_w is None else self.w

    def experts(self, weights):
        """What the experts return, and the slots' weights."""
        if self.is_per_token:
            factors = (self.recv_w * self.scale).sum(-1)
            return (self.recv, factors) if weights == "combine" else (
                self.recv * factors[..., None], None)  # fmt: skip
        scale = 1 if weights == "none" else self.scale[..., None]
        if weights == "experts":
            return self.recv * scale * self.recv_w[..., None], None
        return (self.recv * scale).astype(self.recv.dtype), self.recv_w

    def combine(self, weights, call=None):
        home = dict(topk_weights=self.w) if weights == "home" else {}
        done, slot_w = self.experts(weights)
        call = call or (
            lambda *a, **o: self.handle.combine(
                *a, out=self.out, **self.extras(COUNTERS[1:], self.biases), **o
            )
        )
        call(done, slot_w, **home, **self.plan)
        return done, slot_w

    def backward(self, weights, done, slot_w):
        """The gradients of tokens and weights."""
        grad, grad_slot = rows(*self.recv.shape), None if slot_w is None else rows(*slot_w.shape)
        self.handle.combine_backward(
            self.grad, slot_w, None if slot_w is None else done,
            grad_expert_out=grad, grad_slot_weights=grad_slot, **self.plan,
        )  # fmt: skip
        recv, grad_w = self.recv, None
        if self.is_per_token:
            factors = (self.recv_w * self.scale).sum(-1)
            if weights == "experts":
                grad_slot, grad = (grad * recv).sum(-1), grad * factors[..., None]
            grad_w = grad_slot[..., None] * self.scale
        elif weights == "experts":
            grad_w = (grad * recv).sum(-1) * self.scale
            grad = grad * (self.scale * self.recv_w)[..., None]
        elif weights == "combine":
            grad_w, grad = grad_slot, grad * self.scale[..., None]
        grad_x, grad_topk = rows(*self.x.shape), None if grad_w is None else rows(*self.w.shape)
        self.handle.dispatch_backward(
            grad, grad_w, grad_tokens=grad_x, grad_topk_weights=grad_topk, **self.plan
        )
        return grad_x, grad_topk


def make_plan(handle):
    """Memory for a named plan, aligned to 64."""
    memory = np.empty(handle.plan_bytes + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][: handle.plan_bytes]


def pass_plan(step, group, case, options):
    """Let another handle of the same configuration go on with the step."""
    plan = step.plan["plan"] if step.plan else step.handle.plan()
    if case.plans == "named":
        moved = make_plan(step.handle)
        moved[:] = plan
        plan[:], plan = 0xA5, moved
    step.plan, step.handle = dict(plan=plan), Handle(group, **dict(options, plans=Plans.NAMED))


def plan_outputs(world, rank, kind):
    """Memory for what prepare writes, by the names of PlanTensors."""
    local = len(world.experts_of(rank))
    sizes = dict(
        expert_counts=local, expert_padded=local, expert_offsets=local + 1, totals=3, recv_rows=1,
        source_rows=world.size, source_counts=(local, world.size),
    )  # fmt: skip
    return {name: np.full(size, -7, kind) for name, size in sizes.items()}


def play(bootstrap, world, case, expected):
    rank, everyone = bootstrap.rank, set(range(world.size))
    is_latency = case.layout in ("batched", "rank_major")
    fields = config(world, mode="latency" if is_latency else "throughput")
    if case.capacity:
        fields["max_recv_rows"] = case.capacity
    if case.layout == "expert_major":
        fields["alignment"] = case.alignment
    fields.update(masks=case.masks)
    if case.choice:
        fields.update(choice=case.choice, num_physical=len(world.map))
    options = dict(layout=case.layout)
    if case.layout == "batched":
        options["rows_per_expert"] = BATCHED_ROWS
    if case.plans == "named":
        options["plans"] = Plans.NAMED
    with Group(bootstrap, **fields) as group:
        handle, local = Handle(group, **options), len(world.experts_of(rank))
        sizes = local, *4 * [world.size]
        made = {name: np.zeros(size, np.int64) for name, size in zip(COUNTERS, sizes)}
        for left in reversed(range(case.steps)):
            if rank in world.masked:
                group.mask(everyone)  # when the others are done
                return None
            if case.masks:
                group.mask(everyone - set(world.masked))
            if case.choice:
                group.place(np.roll(world.map, left))
            numbers = plan_outputs(world, rank, np.int64 if case.alignment == 1 else np.int32)
            out = PlanTensors(**numbers)
            step = Step(case, world, rank, handle, expected[rank])
            step.counters = made if case.is_counted else {}
            step.plan = dict(plan=make_plan(handle)) if case.plans == "named" else {}
            if is_latency:
                step.outputs(case, 0)
                if case.is_split:
                    send(step, Prepare(*step.routing(), out=out))
                    waits = COUNTERS[0], *COUNTERS[3:]
                    handle.dispatch_wait(**step.received(), **step.extras(waits))
                else:
                    handle.prepare(*step.routing(), out=out)
                    np.full_like(step.topk_idx, -3)  # likely where freed memory would have been
                    handle.dispatch(*step.given(), **step.received(), **step.extras(COUNTERS))
            else:
                counted = step.extras(COUNTERS[3:])
                handle.prepare(*step.routing(), out=out, **step.plan, **counted)
                if case.plans != "named":
                    info = handle.info()
                    assert info.expert_counts == tuple(numbers["expert_counts"])
                    assert info.expert_padded == tuple(numbers["expert_padded"])
                    assert info.expert_offsets == tuple(numbers["expert_offsets"])
                    assert info.recv_rows == numbers["recv_rows"][0]
                if case.plans != "own":
                    pass_plan(step, group, case, options)
                step.outputs(case, case.capacity or numbers["recv_rows"][0])
                extras = step.extras(COUNTERS)
                step.handle.dispatch(*step.given(), **step.received(), **step.plan, **extras)
            call = functools.partial(handle.combine_send, **step.extras(COUNTERS[1:]))
            call = call if case.is_split else None
            done, slot_w = step.combine(case.weights, call)
            if case.is_split:
                handle.combine_wait(out=step.out, **step.extras(COUNTERS[3:], step.biases))
            grads = None, None
            if not is_latency and case.dtype == "float32":
                grads = step.backward(case.weights, done, slot_w)
        if case.masks:
            group.mask(everyone)
        assert group.status().status is libep.Status.OK
        return dict(recv=step.recv, recv_w=step.recv_w, recv_idx=step.idx, out=step.out,
                    grad_x=grads[0], grad_w=grads[1], counters=made.values(), **numbers)  # fmt: skip


def send(step, routing):
    """The send phase of a dispatch, whose inputs may then be overwritten."""
    x, w = (None if a is None else a.copy() for a in step.given())
    step.handle.dispatch_send(x, w, prepare=routing, **step.plan, **step.extras(COUNTERS[1:]))
    for array in (x, w):
        if array is not None:
            array[:] = np.nan


def step(world, case, expected):
    """A step of all ranks. Returns for each rank what the suite compares."""
    return run_threads(world.size, play, world, case, expected)


@contextlib.contextmanager
def dispatcher():
    """Dispatches on one rank."""
    fields = dict(num_experts=6, max_tokens=8, max_top_k=2, max_row_bytes=64)
    with libep.Bootstrap.local(1)[0] as bootstrap:
        with Group(bootstrap, backend="host", **fields) as group, Handle(group) as handle:

            def call(tokens, topk_idx, topk_weights, num_tokens):
                recv, recv_w = rows(6, 16), rows(6)
                handle.prepare(topk_idx, num_tokens)
                handle.dispatch(
                    tokens, topk_weights, recv_tokens=recv, recv_topk_weights=recv_w
                )
                out = np.empty_like(tokens)
                handle.combine(recv, recv_w, out=out)
                return out

            yield call
