# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's own registry and split layer over libep.flashinfer, against a dense reference."""

import functools
import os
import sys
import types
from typing import NamedTuple, Optional
from unittest import mock

import dense
import pytest
import torch
import torch.distributed as dist
from base import refused
from dense import DEVICE
from wheels import RELEASES, unpack

PROGRAMS = {"flashinfer-python": "test_flashinfer.py"}
EXPERTS, TOP_K, HIDDEN = 12, 3, 128
Names = types.SimpleNamespace


class Case(NamedTuple):
    """A step; `bound` is its max_tokens_per_rank."""

    most: int
    bound: Optional[int] = None
    latency_tokens: int = 256
    dtype: str = "bfloat16"
    form: str = ""
    none: int = -1
    has_weights: bool = True
    is_split: bool = False
    low_precision: bool = False


CASES = {
    "decode": Case(16),
    "decode_bound": Case(300, 7),
    "decode_float16": Case(9, dtype="float16", none=EXPERTS),
    "decode_fp8": Case(8, form="DeepSeekFp8"),
    "decode_no_weights": Case(8, 6, has_weights=False),
    "decode_low_precision": Case(16, low_precision=True),
    "decode_layer": Case(16, is_split=True),
    "prefill": Case(300),
    "prefill_bound": Case(300, 260),
    "prefill_small": Case(20, 11, latency_tokens=0, dtype="float32"),
    "prefill_fp8": Case(40, 33, latency_tokens=8, form="DeepSeekFp8", none=-7),
    "prefill_mxfp8": Case(40, latency_tokens=0, form="MXFP8", has_weights=False),
    "prefill_low_precision": Case(40, latency_tokens=0, low_precision=True),
    "prefill_layer": Case(300, is_split=True),
}


@functools.cache
def load():
    """flashinfer.moe_ep of the release, without the parts of flashinfer that are compiled."""
    if DEVICE == "cpu":
        os.environ["LIBEP_BACKEND"] = "host"
    for name in "flashinfer", "flashinfer.fused_moe", "flashinfer.fused_moe.api":
        sys.modules[name] = types.ModuleType(name)
    parent = sys.modules["flashinfer"]
    parent.__path__ = [str(unpack("flashinfer-python") / "flashinfer")]
    parent.__version__ = RELEASES["flashinfer-python"]
    sys.modules["flashinfer.fused_moe.api"].QuantFormat = Names
    import flashinfer.moe_ep

    import libep.flashinfer

    return flashinfer.moe_ep, libep.flashinfer, dist.get_rank(), dist.get_world_size()


def bootstrap(size, rank, **fields):
    """A BootstrapConfig, for this rank's GPU where there is one."""
    ordinal = torch.cuda.current_device() if DEVICE == "cuda" else None
    return load()[0].BootstrapConfig(size, rank, device=ordinal, **fields)


def inputs(rank, case):
    """Tokens, ids and weights of a rank. Rank 1 has no tokens in some cases."""
    tokens = 0 if rank == 1 and case.most == 16 else (case.bound or case.most) - rank
    return dense.inputs(rank, tokens, HIDDEN, EXPERTS, TOP_K)


def check_sums(got, x, idx, weights, case):
    expected = dense.layer(x, idx, weights if case.has_weights else torch.ones_like(weights))
    worst = (got.float() - expected).abs().max().item() if len(x) else 0
    assert worst <= (1 if case.low_precision else 0), worst


def experts(rows, ids, weights, first, count):
    """The rows' sums over local experts. Other rows and other ranks' weights are not used."""
    is_local = (ids >= first) & (ids < first + count)
    factors = dense.factor(ids, EXPERTS) * (1 if weights is None else weights)
    factors = torch.where(is_local, factors, 0).sum(-1, True)
    return torch.where(is_local.any(-1, True), rows.float() * factors, torch.nan)


def check_received(received, case, rank, size):
    """Row (s, i) is the i-th token of rank s with an expert here, with its ids and weights."""
    n, each = received.tokens_per_rank, EXPERTS // size
    ids = received.topk_ids.view(size, n, TOP_K)
    for source in range(size):
        x, idx, weights = inputs(source, case)
        is_here = idx.div(each, rounding_mode="floor") == rank
        chosen = is_here.any(1)
        count = int(chosen.sum())
        expected = torch.full_like(ids[source], case.none)
        expected[:count] = torch.where(is_here, idx, case.none)[chosen]
        assert ids.dtype == torch.int32 and torch.equal(ids[source], expected)
        rows = received.hidden_states.view(size, n, -1)[source, :count]
        assert torch.equal(rows.float(), x[chosen].float())
        if case.has_weights:
            got = received.topk_weights.view(size, n, TOP_K)[source, :count]
            assert torch.equal(got, weights[chosen])
        if case.form:
            scales = received.hidden_states_scale.view(size, n, -1)[source, :count]
            assert torch.equal(scales.float(), x[chosen, : scales.shape[1]].float() + 3)


def run_communication(case):
    moe_ep, ours, rank, size = load()
    dtype, each = getattr(torch, case.dtype), EXPERTS // size
    form = Names(name=case.form) if case.form else None
    params = moe_ep.MoEEpCommParams(
        EXPERTS, TOP_K, case.most, HIDDEN, dtype, dispatch_format=form, invalid_expert_id=case.none
    )
    config = ours.LibepConfig(
        latency_tokens=case.latency_tokens, use_low_precision_combine=case.low_precision
    )
    comm = moe_ep.create_communication(bootstrap(size, rank), params, config)
    x, idx, weights = inputs(rank, case)
    given, scales = x.to(dtype), None
    if case.form:
        given = x.to(torch.float8_e4m3fn)
        width, kind = (1, torch.float32) if case.form == "DeepSeekFp8" else (4, torch.uint8)
        scales = (x[:, :width] + 3).to(kind)
    options = dict(hidden_states_scale=scales, max_tokens_per_rank=case.bound)
    for step in range(3):
        routing = idx.int() if step else idx, weights if case.has_weights else None
        received = comm.dispatch(given, *routing, **options)
        assert received.tokens_per_rank == (case.bound or case.most)
        check_received(received, case, rank, size)
        of_rows = received.hidden_states, received.topk_ids, received.topk_weights
        buffer, out = experts(*of_rows, rank * each, each).to(dtype), None
        if step == 1:  # in place, and as three dimensions
            buffer = comm.get_combine_input_buffer(dtype).copy_(buffer).view(size, -1, HIDDEN)
        elif step == 2:
            out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
        got = comm.combine(buffer, output=out)
        assert got.dtype == dtype and (out is None or got is out)
        check_sums(got, x, idx, weights, case)
    assert comm.is_workload_feasible(case.most) and not comm.is_workload_feasible(case.most + 1)
    del received, buffer, of_rows
    comm.destroy()
    comm.destroy()
    with refused("RuntimeError destroyed"):
        comm.dispatch(given, idx)


def run_layer(case):
    """The release's own layer, with a kernel of this test; on GPUs in a graph, too."""
    moe_ep, ours, rank, size = load()
    from flashinfer.moe_ep.core.kernel.base import SplitKernelBackend
    from flashinfer.moe_ep.core.kernel.registry import register_split_kernel

    each = EXPERTS // size

    @register_split_kernel("of_a_test")
    class Kernel(SplitKernelBackend):
        kernel_name = requires_weights = classmethod(lambda _: False)

        def compute(self, ctx):
            ids = torch.where(ctx.recv_topk_idx >= 0, ctx.recv_topk_idx + rank * each, -1)
            rows = ctx.expert_tensors.view(len(ids), -1)
            return experts(rows, ids, ctx.recv_topk_weights, rank * each, each).bfloat16()

    params = moe_ep.FleetParams(EXPERTS, case.most, HIDDEN, layout=moe_ep.EpLayout.RANK_MAJOR)
    pack = moe_ep.dummy_moe_weights(num_local_experts=each, hidden=HIDDEN)
    for comm in "libep", ours.LibepConfig(timeout_seconds=10):
        backend = moe_ep.SplitConfig(comm, Names(kernel_name="of_a_test"))
        layer = moe_ep.MoEEpLayer(bootstrap(size, rank), params, pack, backend=backend)
        x, idx, weights = inputs(rank, case)
        tensors = moe_ep.MoEEpTensors(x.clone(), idx, weights)
        for _ in range(2):
            check_sums(layer(tensors), x, idx, weights, case)
        if DEVICE == "cuda":
            state, graph = layer.create_graph_state(tensors), torch.cuda.CUDAGraph()
            layer(tensors, graph_state=state)
            with torch.cuda.graph(graph):
                out = layer(tensors, graph_state=state)
            for by in -1, 2:
                tensors.hidden_states.copy_(x * by)
                tensors.topk_ids.copy_(tensors.topk_ids.roll(1, 0))
                graph.replay()
                check_sums(out, x * by, tensors.topk_ids, tensors.topk_weights, case)
        layer.destroy()


def run(name):
    (run_layer if CASES[name].is_split else run_communication)(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_steps(ranks, name):
    ranks.play("run", name=name)


# ---- what is refused ----------------------------------------------------------------------------

TENSOR = torch.zeros(4, TOP_K)
REFUSED_DISPATCHES = {
    "ValueError max_tokens_per_rank: expected 1 .. 8, got 9": dict(max_tokens_per_rank=9),
    "ValueError max_tokens_per_rank: expected 1 .. 8, got 0": dict(max_tokens_per_rank=0),
    "ValueError hidden_states: expected up to 3 rows": dict(max_tokens_per_rank=3),
    "ValueError topk_ids: expected shape .4, 3.": dict(topk_ids=torch.zeros(4, 2).long()),
    "TYPE topk_idx: expected int32 or int64": dict(topk_ids=TENSOR),
    "TypeError hidden_states: expected a torch.Tensor": dict(hidden_states=[0]),
    "TypeError topk_ids: expected a torch.Tensor": dict(topk_ids=None),
    "SHAPE topk_weights: expected": dict(topk_weights=torch.zeros(4, 2)),
    "UNSUPPORTED eplb_local_stats: expected None": dict(eplb_local_stats=TENSOR),
    "ROW_BYTES scales: expected None": dict(hidden_states_scale=TENSOR),
    "ROW_BYTES tokens: expected rows of": dict(hidden_states=torch.zeros(4, 2 * HIDDEN)),
    "TypeError tokens: expected .* on ": dict(hidden_states="elsewhere"),
}
REFUSED_COMBINES = {
    "ValueError expert_output: expected shape .8, 128.": dict(expert_output=torch.zeros(4, HIDDEN)),
    "ValueError output: expected torch.bfloat16": dict(output=torch.zeros(4, HIDDEN)),
    "TYPE ep_combine.*: out: expected bf16, fp16 or fp32": dict(
        expert_output=torch.zeros(8, HIDDEN).int()
    ),
    "RANGE receive memory: expected a tensor within": dict(dtype=torch.float64),
}


def moved(change):
    """The arguments on the device; a text stands for a tensor elsewhere."""
    elsewhere = torch.ones(4, HIDDEN, device="cpu" if DEVICE == "cuda" else "meta")
    return {
        name: elsewhere if isinstance(value, str) else getattr(value, "to", lambda _: value)(DEVICE)
        for name, value in change.items()
    }


def run_refusals(latency_tokens):
    """By a communication of one rank."""
    moe_ep, ours, *_ = load()
    import libep

    (alone,) = libep.Bootstrap.local(1)
    params = moe_ep.MoEEpCommParams(EXPERTS, TOP_K, 8, HIDDEN)
    config = ours.LibepConfig(latency_tokens=latency_tokens)
    comm = moe_ep.create_communication(bootstrap(1, 0, process_group=alone), params, config)
    x = torch.ones(4, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    good = dict(hidden_states=x, topk_ids=torch.arange(4 * TOP_K, device=DEVICE).view(4, TOP_K))
    for call, given in (comm.combine, TENSOR), (comm.get_combine_input_buffer, torch.bfloat16):
        with refused("RuntimeError expected a dispatch before, got none"):
            call(given)
    for words, change in REFUSED_DISPATCHES.items():
        with refused(words):
            comm.dispatch(**{**good, **moved(change)})
    received = comm.dispatch(**good)  # after all refusals
    with refused("RuntimeError expected a combine"):
        comm.dispatch(**good)
    for words, change in REFUSED_COMBINES.items():
        with refused(words):
            if "dtype" in change:
                comm.get_combine_input_buffer(**change)
            comm.combine(**{"expert_output": received.hidden_states, **moved(change)})
    assert torch.equal(comm.combine(received.hidden_states), x)
    del received
    comm.destroy()


def run_meetings():
    """Bootstraps that are refused, by all ranks where one cannot run libep; and a store."""
    moe_ep, ours, rank, size = load()
    params, create = moe_ep.MoEEpCommParams(EXPERTS, TOP_K, 8, HIDDEN), moe_ep.create_communication
    with refused("ValueError BootstrapConfig: expected rank 0 of 1|expected rank . of [23], as"):
        create(moe_ep.BootstrapConfig(size + 1, rank), params, "libep")
    with refused("ValueError latency_tokens: expected 0 .. 256, got 257"):
        ours.LibepConfig(latency_tokens=257)
    for broken in ((1,), (0, 1, 2)) if DEVICE == "cpu" else ():
        with mock.patch.dict(os.environ, {"LIBEP_BACKEND": "auto"} if rank in broken else {}):
            assert ("libep" in moe_ep.available_communication_backends()) != (rank in broken)
            with refused(f"RuntimeError run it: rank {broken[0]}: expected a GPU that PyTorch"):
                create(moe_ep.BootstrapConfig(size, rank), params, "libep")
    store = dist.group.WORLD.get_group_store()
    config = ours.LibepConfig(latency_tokens=0)
    comm = create(bootstrap(size, rank, tcp_store=store), params, config)
    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    with refused("ORDER "):  # ranks give other bounds
        comm.dispatch(x, torch.zeros(2, TOP_K, device=DEVICE).int(), max_tokens_per_rank=4 + rank)
        torch.cuda.synchronize() if DEVICE == "cuda" else None
        comm.combine(x.new_ones(size * (4 + rank), HIDDEN))
    comm.destroy()


class Base:
    __abstractmethods__ = {"combine", "dispatch", "is_platform_supported"}

    def combine(self, expert_output, output=None): ...

    def dispatch(self, hidden_states, topk_ids): ...


OTHERS = {  # names in flashinfer.moe_ep of other releases
    "whose moe_ep cannot be imported": None,
    "whose moe_ep has no MoEEpCommunication": {},
    "whose backends have other methods: flush": dict(
        MoEEpCommunication=Names(__abstractmethods__={"flush"})
    ),
    "whose dispatch takes other arguments: self hidden_states topk_ids$": dict(
        MoEEpCommunication=Base
    ),
}


def run_releases():
    load()
    from libep.flashinfer._release import find

    for words, names in OTHERS.items():
        moe_ep = names if names is None else Names(
            MoEEpDispatchResult=0, register_communication=0, **names
        )  # fmt: skip
        modules = {"flashinfer": Names(__version__="0.6"), "flashinfer.moe_ep": moe_ep}
        with mock.patch.dict(sys.modules, modules):
            with refused(f"ImportError expected flashinfer 0.7.2.post1, got 0.6, {words}"):
                find()
    with mock.patch.dict(sys.modules, {"flashinfer": None}):
        with refused("ImportError expected flashinfer 0.7.2.post1, got none"):
            find()


def test_refusals(ranks):
    for latency_tokens in 0, 256:
        ranks.play("run_refusals", latency_tokens=latency_tokens)
    ranks.play("run_releases")
    ranks.play("run_meetings")
