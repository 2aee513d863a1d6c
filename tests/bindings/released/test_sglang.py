# SPDX-License-Identifier: Apache-2.0
"""SGLang's dispatchers over libep.deep_ep, and libep.sglang's own, against a dense reference.

Real files of the release: the two dispatchers and their base, the wrapper for two batches, the
choice of row types, the environment, and the registry of hooks. Every other module of SGLang is
stood in for, and so is its Triton kernel that quantises rows.
"""

import functools
import os
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import NamedTuple, Optional
from unittest import mock

import dense
import pytest
import torch
import torch.distributed as dist
from base import refused
from dense import DEVICE, factor
from stand_ins import stand_in
from wheels import RELEASES, unpack

PROGRAMS = {"sglang": "test_sglang.py"}
EXPERTS, TOP_K, HIDDEN, BLOCK = 12, 3, 512, 128
MOE, BATCHES = "sglang.srt.layers.moe", "sglang.srt.batch_overlap.two_batch_overlap"
REAL = {"sglang._version", "sglang.version", "sglang.srt.environ", BATCHES}
REAL |= {"sglang.srt.plugins.hook_registry", f"{MOE}.utils"}
REAL |= {f"{MOE}.token_dispatcher.{name}" for name in ("base", "deepep", "deepep_v2")}


def quantise(x, block, column_major_scales=False, scale_tma_aligned=False, scale_ue8m0=False):
    """SGLang's kernel for rows of e4m3, with PyTorch."""
    blocks = x.float().unflatten(1, (-1, block))
    scales = blocks.abs().amax(2).clamp(min=1e-10) / 448
    if scale_ue8m0:
        scales = scales.log2().ceil().exp2()
    q = (blocks / scales[..., None]).flatten(1).to(torch.float8_e4m3fn)
    if scale_ue8m0:
        scales = (scales.log2().int() + 127).to(torch.uint8).view(torch.int32)
    return q, scales.T.contiguous().T if column_major_scales else scales


@functools.cache
def load():
    """The modules of the release, and the state that SGLang's server sets."""
    stand_in(unpack("sglang"), real=REAL)
    import libep.deep_ep

    libep.deep_ep.install()
    moe = SimpleNamespace(tbo_enabled=True, deepep_config="", a2a_backend=None)
    output = SimpleNamespace(deepep_dispatcher_output_dtype="auto", deepep_v2_mode="direct")
    flags, resources = SimpleNamespace(moe=moe), SimpleNamespace(buffers={})
    no = lambda *_: False  # noqa: E731
    utils, context = import_module("sglang.srt.utils"), import_module("sglang.srt.runtime_context")
    utils.is_npu = utils.is_hip = utils.is_blackwell = no
    utils.is_flashinfer_available = utils.get_bool_env_var = no
    utils.get_cuda_version = lambda: (12, 8)
    attention = import_module("sglang.srt.layers.dp_attention")
    attention.get_is_extend_in_batch = lambda: flags.is_extend
    context.get_flags, context.get_resources = lambda: flags, lambda: resources
    context.get_exec = lambda: SimpleNamespace(moe=output)
    kernels = import_module("sglang.kernels.ops.quantization.fp8_kernel")
    kernels.sglang_per_token_group_quant_fp8 = quantise
    utils = import_module(f"{MOE}.utils")
    moe.a2a_backend = utils.MoeA2ABackend.DEEPEP
    package = import_module(f"{MOE}.token_dispatcher")
    deepep = import_module(f"{MOE}.token_dispatcher.deepep")
    package.DeepEPDispatcher = deepep.DeepEPDispatcher
    package.BaseDispatcher = deepep.BaseDispatcher
    return SimpleNamespace(
        deepep=deepep, before=deepep.DeepEPDispatcher, flags=flags, utils=utils,
        v2=import_module(f"{MOE}.token_dispatcher.deepep_v2"), tbo=import_module(BATCHES),
        gemm=import_module("sglang.srt.layers.deep_gemm_wrapper"), group=dist.group.WORLD,
        rank=dist.get_rank(), size=dist.get_world_size(), local=EXPERTS // dist.get_world_size(),
    )  # fmt: skip


class Case(NamedTuple):
    """Steps of a batch that extends requests, or decodes; rows in fp8, or with packed scales."""

    is_extend: bool
    dtype: str = "bf16"
    is_packed: bool = False
    has_gemm: bool = True
    expand: Optional[bool] = None


CASES = {
    "extend": Case(True),
    "extend_fp8": Case(True, "fp8"),
    "extend_fp8_packed": Case(True, "fp8", True),
    "extend_without_gemm": Case(True, "fp8", has_gemm=False),
    "decode": Case(False),
    "decode_fp8": Case(False, "fp8"),
    "decode_fp8_packed": Case(False, "fp8", True),
}
V2_CASES = {
    "extend": Case(True),
    "extend_fp8": Case(True, "fp8"),
    "extend_flat": Case(True, expand=False),
    "extend_flat_fp8": Case(True, "fp8", expand=False),
    "decode": Case(False),
    "decode_fp8": Case(False, "fp8"),
}


def inputs(step, rank):
    """Tokens and routing. Rank 1 has no tokens in step 2."""
    tokens = 0 if (step, rank) == (2, 1) else 11 + 2 * rank
    x, ids, weights = dense.inputs(10 * step + rank, tokens, HIDDEN, EXPERTS, TOP_K)
    return x, SimpleNamespace(topk_ids=ids.int() if step else ids, topk_weights=weights)


def check(out, x, topk):
    expected = dense.layer(x, topk.topk_ids, topk.topk_weights)
    assert out.dtype == torch.bfloat16 and torch.equal(out.float(), expected)


def dequantise(rows, scales):
    if scales is None:
        assert rows.dtype == torch.bfloat16
        return rows.float()
    assert rows.dtype == torch.float8_e4m3fn
    if scales.dtype == torch.int32:
        exponents = scales.flatten().view(torch.uint8).view(*rows.shape[:-1], -1)
        scales = exponents.int().sub(127).exp2()
    assert scales.shape == (*rows.shape[:-1], HIDDEN // BLOCK)
    return (rows.float().unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2)


# ---- what is refused ----------------------------------------------------------------------------


def run_refusals():
    release = load()
    import libep
    import libep.sglang

    (alone,) = libep.Bootstrap.local(1)
    deepep, state, gemm = release.deepep, release.flags, release.gemm

    def create(**change):
        given = dict(group=alone, router_topk=TOP_K, num_experts=EXPERTS, hidden_size=HIDDEN)
        return libep.sglang._dispatcher.Dispatcher(**{**given, **change})

    def plugins(names):
        return mock.patch.dict(os.environ, {"SGLANG_PLUGINS": names})

    with plugins(""):
        libep.sglang.plugin()
    assert deepep.DeepEPDispatcher is release.before
    for version, words in ("0.5.99", "got 0.5.99, whose"), (None, "got none that can be imported"):
        module = version and SimpleNamespace(__version__=version)
        with mock.patch.dict(sys.modules, {"sglang.version": module}), plugins("x, libep"):
            for call in libep.sglang.install, libep.sglang.plugin:
                with refused(f"ImportError expected sglang {RELEASES['sglang']}, {words}"):
                    call()
    with plugins("x, libep"):
        libep.sglang.plugin()
    assert deepep.DeepEPDispatcher is release.before
    import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    assert deepep.DeepEPDispatcher is libep.sglang._dispatcher.Dispatcher
    deepep.DeepEPBuffer.clean_buffer()  # nothing, where SGLang would need a buffer

    gemm.ENABLE_JIT_DEEPGEMM = gemm.DEEPGEMM_SCALE_UE8M0 = True
    x, topk = inputs(0, 0)
    for state.is_extend in True, False:
        made = create()
        for name in "dispatch_b", "combine_b":
            with refused(f"ORDER {name}: expected a call of dispatch_a first"):
                getattr(made, name)()
        with refused("ORDER combine_a: expected a call of dispatch_a first"):
            made.combine_a(None)
        made.dispatch_a(x, topk)
        with refused("ORDER dispatch_a: expected a call of dispatch_b first"):
            made.dispatch(x, topk)
    ids = torch.zeros(129, TOP_K, dtype=torch.int64, device=DEVICE)
    many = x.new_zeros(129, HIDDEN), SimpleNamespace(topk_ids=ids, topk_weights=ids.float())
    narrow = x[:, :256].contiguous(), topk
    for words, state.is_extend, call in [
        ("TypeError num_experts and hidden_size", True, lambda: create(hidden_size=None)),
        ("UNSUPPORTED expected rows of bf16 or fp8 .*, got nvfp4", True,
         lambda: create().set_quant_config({"input_global_scale": x})),
        ("EpError expected at most|expected .* 128", False, lambda: create().dispatch(*many)),
        ("SHAPE multiple of 512, for 4 scales in an int32, got 256", True,
         lambda: create(hidden_size=256).dispatch(*narrow)),
        ("EpError expected", True, lambda: create().dispatch(x.double(), topk)),
    ]:  # fmt: skip
        with refused(words):
            call()


def test_refusals(ranks):
    """The first test of the ranks: nothing is replaced yet."""
    ranks.play("run_refusals")


# ---- deepep -------------------------------------------------------------------------------------


def compute(output, case, release):
    """The experts' part of a step: a combine input for a dispatch output."""
    first = release.rank * release.local
    x = dequantise(output.hidden_states, output.hidden_states_scale)
    is_quantised = case.dtype == "fp8" and (case.has_gemm or not case.is_extend)
    assert (output.hidden_states_scale is not None) == is_quantised
    ids, weights = output.topk_ids, output.topk_weights
    if case.is_extend:
        assert output.format.is_deepep_normal()
        assert ids.dtype == torch.int64 and weights.dtype == torch.float32
        unit = 128 if case.has_gemm else 1
        counts = [(ids == e).sum().item() for e in range(len(output.num_recv_tokens_per_expert))]
        assert output.num_recv_tokens_per_expert == [-(-n // unit) * unit for n in counts]
        factors = torch.where(ids >= 0, weights * factor(ids + first), 0).sum(1, keepdim=True)
        return release.deepep.DeepEPNormalCombineInput((x * factors).bfloat16(), ids, weights)
    assert output.format.is_deepep_ll() and output.expected_m > 0
    local = torch.arange(len(output.masked_m), device=x.device)
    rows = x * factor(local + first)[:, None, None]
    unused = torch.arange(x.shape[1], device=x.device) >= output.masked_m[:, None]
    rows = rows.masked_fill(unused[..., None], torch.nan)
    return release.deepep.DeepEPLLCombineInput(rows.bfloat16(), ids, weights)


def make(release, whose, case):
    """A MaybeTboDeepEPDispatcher around SGLang's DeepEPDispatcher, or around libep's."""
    if whose == "libep":
        import libep.sglang

        libep.sglang.install()
        libep.sglang.install()
        from libep.sglang._dispatcher import Dispatcher

        assert release.tbo.DeepEPDispatcher is Dispatcher is release.deepep.DeepEPDispatcher
    kind = release.before if whose == "sglang" else release.tbo.DeepEPDispatcher
    gemm = release.gemm
    gemm.ENABLE_JIT_DEEPGEMM = case.has_gemm
    gemm.DEEPGEMM_BLACKWELL = gemm.DEEPGEMM_SCALE_UE8M0 = case.is_packed
    sizes = dict(num_experts=EXPERTS, num_local_experts=release.local, hidden_size=HIDDEN)
    options = dict(permute_fusion=True, async_finish=True, return_recv_hook=True)
    options.update(params_dtype=torch.bfloat16, deepep_mode=release.utils.DeepEPMode.AUTO)
    with mock.patch.object(release.tbo, "DeepEPDispatcher", kind):
        made = release.tbo.MaybeTboDeepEPDispatcher(
            group=release.group, router_topk=TOP_K, **sizes, **options
        )
    made.set_quant_config({"dispatcher_output_dtype": case.dtype})
    return made


def run_step(dispatcher, step, case, release):
    x, topk = inputs(step, release.rank)
    output = dispatcher.dispatch(hidden_states=x, topk_output=topk)
    check(dispatcher.combine(combine_input=compute(output, case, release)), x, topk)


def run_two(dispatcher, case, release):
    """Two batches: each half of a step of one runs between those of the other."""
    batches = [inputs(step, release.rank) for step in (3, 4)]
    names = "hidden_states", "topk_output"

    def both(name, given):
        for batch, arguments in enumerate(given):
            getattr(dispatcher, f"{name}_a")(**arguments, tbo_subbatch_index=batch)
        return [getattr(dispatcher, f"{name}_b")(tbo_subbatch_index=batch) for batch in (0, 1)]

    outputs = both("dispatch", [dict(zip(names, batch)) for batch in batches])
    inner = [dict(combine_input=compute(output, case, release)) for output in outputs]
    for out, batch in zip(both("combine", inner), batches):
        check(out, *batch)


def run_beside(dispatcher, case, release):
    """Combine on another stream, as single-batch overlap has it. GPUs alone have streams."""
    x, topk = inputs(5, release.rank)
    signal = torch.full((EXPERTS * 64,), 9, dtype=torch.int32, device=x.device)
    by_blocks = dict(block_m=64, threshold=9)
    words = dict(signal=signal, threshold=9, num_sms=8)
    for overlap, more, meta in [(False, {}, {}), (True, {}, {}), (True, words, by_blocks)]:
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        output = dispatcher.dispatch(hidden_states=x, topk_output=topk)
        given = compute(output, case, release)
        event.record()
        args = SimpleNamespace(overlap=overlap, stream=stream, wait_event=event, **more)
        dispatcher.set_overlap_args(args, meta)
        check(dispatcher.combine(combine_input=given), x, topk)
        dispatcher.clear_overlap_args()


def run(name, whose):
    release, case = load(), CASES[name]
    release.flags.is_extend = case.is_extend
    known = mock.MagicMock(return_value=SimpleNamespace(multi_processor_count=132))
    real = torch.cuda.get_device_properties
    # On CPUs SGLang, too, asks for the number of multiprocessors.
    with mock.patch("torch.cuda.get_device_properties", known if DEVICE == "cpu" else real):
        # Once without another batch, where all runs on one stream.
        for release.flags.moe.tbo_enabled in False, True:
            dispatcher, called = make(release, whose, case), []
            dispatcher.register_deepep_dispatch_hook(called.append)
            for step in range(3):
                run_step(dispatcher, step, case, release)
            assert len(called) == 3
        run_two(dispatcher, case, release)
        if DEVICE == "cuda" and whose == "libep" and not case.is_extend:
            run_beside(dispatcher, case, release)


@pytest.mark.parametrize("whose", ("sglang", "libep"))
@pytest.mark.parametrize("name", CASES)
def test_deepep(ranks, name, whose):
    if whose == "sglang" and not CASES[name].has_gemm:
        pytest.skip("SGLang's own refuses to combine without DeepGEMM")
    ranks.play("run", name=name, whose=whose)


# ---- deepep_v2 ----------------------------------------------------------------------------------


def compute_v2(output, case, first):
    x, weights = dequantise(output.hidden_states, output.hidden_states_scale), output.topk_weights
    assert output.is_expanded == (case.expand is None)
    if not output.is_expanded:
        ids = output.topk_ids
        factors = torch.where(ids >= 0, weights * factor(ids + first), 0).sum(1)
        return (x * factors[:, None]).bfloat16()
    rows, start = torch.full_like(x, torch.nan), 0
    for expert, end in enumerate(output.psum_num_recv_tokens_per_expert.tolist()):
        by = factor(torch.tensor(first + expert)).item()
        rows[start:end] = x[start:end] * by * weights[start:end, None]
        start = -(-end // output.expert_alignment) * output.expert_alignment
    return rows.bfloat16()


def run_v2(name):
    release, case = load(), V2_CASES[name]
    release.flags.is_extend = case.is_extend
    release.gemm.DEEPGEMM_NEED_TMA_ALIGNED_SCALES = release.gemm.DEEPGEMM_SCALE_UE8M0 = False
    expand = {"SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND": "1" if case.expand is None else "0"}
    sizes = dict(num_experts=EXPERTS, num_local_experts=release.local, hidden_size=HIDDEN)
    sizes.update(router_topk=TOP_K, params_dtype=torch.bfloat16)
    with mock.patch.dict(os.environ, expand):
        dispatcher = release.v2.DeepEPv2Dispatcher(
            group=release.group, use_fp8_dispatch=case.dtype == "fp8", **sizes
        )
    for step in range(3):
        x, topk = inputs(step, release.rank)
        output = dispatcher.dispatch(x, topk)
        assert output.format.is_deepep_v2() and output.use_masked_gemm != case.is_extend
        rows = compute_v2(output, case, release.rank * release.local)
        check(dispatcher.combine(release.v2.DeepEPv2CombineInput(rows, None)), x, topk)


@pytest.mark.parametrize("name", V2_CASES)
def test_deepep_v2(ranks, name):
    ranks.play("run_v2", name=name)
