# SPDX-License-Identifier: Apache-2.0
"""SGLang's dispatchers over libep.deep_ep, and libep.sglang's own, against a dense reference.

Real files of the release: the two dispatchers and their base, the wrapper for two batches, the
choice of row types, the environment, and the registry of hooks. Every other module of SGLang is
stood in for, and so is its Triton kernel that quantises rows.
"""

import importlib
import os
import sys
import types
from typing import NamedTuple, Optional
from unittest import mock

import pytest
import torch
from conftest import need  # first: it adds the folder of base
from base import DEVICE, refused
from stand_ins import stand_in
from wheels import RELEASES, unpack

need("sglang")

PROGRAM = "test_sglang.py"  # of the ranks

EXPERTS, TOP_K, HIDDEN, BLOCK = 12, 3, 512, 128
MOE = "sglang.srt.layers.moe"
REAL = {
    "sglang._version",
    "sglang.version",
    "sglang.srt.environ",
    "sglang.srt.batch_overlap.two_batch_overlap",
    "sglang.srt.plugins.hook_registry",
    f"{MOE}.utils",
    f"{MOE}.token_dispatcher.base",
    f"{MOE}.token_dispatcher.deepep",
    f"{MOE}.token_dispatcher.deepep_v2",
}


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


def load():
    """The modules of the release. State that SGLang's server sets is `state`."""
    if "sglang" not in sys.modules:
        stand_in(unpack("sglang"), real=REAL)
        import libep.deep_ep

        libep.deep_ep.install()
        moe = types.SimpleNamespace(tbo_enabled=True, deepep_config="", a2a_backend=None)
        execution = types.SimpleNamespace(
            moe=types.SimpleNamespace(
                deepep_dispatcher_output_dtype="auto", deepep_v2_mode="direct"
            )
        )
        flags, buffers = types.SimpleNamespace(moe=moe), types.SimpleNamespace(buffers={})
        no = {name: lambda *_: False for name in ("is_npu", "is_hip", "is_blackwell")}
        given = {
            "sglang.srt.utils": dict(
                no,
                is_flashinfer_available=no["is_npu"],
                get_bool_env_var=no["is_npu"],
                get_cuda_version=lambda: (12, 8),
            ),
            "sglang.srt.layers.dp_attention": dict(get_is_extend_in_batch=lambda: flags.is_extend),
            "sglang.srt.runtime_context": dict(
                get_flags=lambda: flags, get_exec=lambda: execution, get_resources=lambda: buffers
            ),
            "sglang.kernels.ops.quantization.fp8_kernel": dict(
                sglang_per_token_group_quant_fp8=quantise
            ),
        }
        for name, attributes in given.items():
            vars(importlib.import_module(name)).update(attributes)
        utils = importlib.import_module(f"{MOE}.utils")
        moe.a2a_backend = utils.MoeA2ABackend.DEEPEP
        package = importlib.import_module(f"{MOE}.token_dispatcher")
        deepep = importlib.import_module(f"{MOE}.token_dispatcher.deepep")
        package.DeepEPDispatcher, package.BaseDispatcher = (
            deepep.DeepEPDispatcher,
            deepep.BaseDispatcher,
        )
    release = types.SimpleNamespace(
        deepep=importlib.import_module(f"{MOE}.token_dispatcher.deepep"),
        v2=importlib.import_module(f"{MOE}.token_dispatcher.deepep_v2"),
        tbo=importlib.import_module("sglang.srt.batch_overlap.two_batch_overlap"),
        utils=importlib.import_module(f"{MOE}.utils"),
        gemm=importlib.import_module("sglang.srt.layers.deep_gemm_wrapper"),
        context=importlib.import_module("sglang.srt.runtime_context"),
        version=importlib.import_module("sglang.version"),
    )
    if not hasattr(release.deepep, "before"):
        release.deepep.before = release.deepep.DeepEPDispatcher
    return release


def world():
    import torch.distributed as dist

    return dist.group.WORLD, dist.get_rank(), dist.get_world_size()


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


def inputs(step, rank, device):
    """Tokens and routing whose sums are exact in bfloat16. Rank 1 has no tokens in step 2."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = 0 if (step, rank) == (2, 1) else 11 + 2 * rank
    x = torch.randint(-2, 3, (tokens, HIDDEN), generator=generator).to(torch.bfloat16)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOP_K].contiguous()
    ids[::3, 1] = -1
    weights = torch.randint(1, 3, (tokens, TOP_K), generator=generator) / 2
    topk = types.SimpleNamespace(
        topk_ids=ids.to(device, torch.int32 if step else torch.int64),
        topk_weights=weights.to(device),
    )
    return x.to(device), topk


def factor(experts):
    """What the experts multiply by; 0 for none."""
    return torch.where(experts >= 0, experts % 2 + 1, 0)


def check(out, x, topk):
    dense = x.float() * (factor(topk.topk_ids) * topk.topk_weights).sum(1, keepdim=True)
    assert out.dtype == torch.bfloat16 and torch.equal(out.float(), dense)


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


def rounded(x):
    return x.to(torch.bfloat16)


# ---- what is refused ----------------------------------------------------------------------------


def run_refusals(device):
    release = load()
    import libep
    import libep.sglang

    group, rank, size = world()
    (alone,) = libep.Bootstrap.local(1)
    modes = release.utils.DeepEPMode

    def create(**change):
        given = dict(group=alone, router_topk=TOP_K, num_experts=EXPERTS, hidden_size=HIDDEN)
        return libep.sglang._dispatcher.Dispatcher(**{**given, **change})

    with mock.patch.dict(os.environ, {"SGLANG_PLUGINS": ""}):
        libep.sglang.plugin()
    assert release.deepep.DeepEPDispatcher is release.deepep.before
    for version, words in ("0.5.99", "got 0.5.99, whose"), (None, "got none that can be imported"):
        module = version and types.SimpleNamespace(__version__=version)
        with mock.patch.dict(sys.modules, {"sglang.version": module}):
            for call in libep.sglang.install, libep.sglang.plugin:
                with mock.patch.dict(os.environ, {"SGLANG_PLUGINS": "x, libep"}):
                    with refused(f"ImportError expected sglang {RELEASES['sglang']}, {words}"):
                        call()
    with mock.patch.dict(os.environ, {"SGLANG_PLUGINS": "x, libep"}):
        libep.sglang.plugin()
    assert release.deepep.DeepEPDispatcher is release.deepep.before
    importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    assert release.deepep.DeepEPDispatcher is libep.sglang._dispatcher.Dispatcher
    release.deepep.DeepEPBuffer.clean_buffer()  # nothing, where SGLang would need a buffer

    release.gemm.ENABLE_JIT_DEEPGEMM = release.gemm.DEEPGEMM_SCALE_UE8M0 = True
    x, topk = inputs(0, 0, device)
    state = release.context.get_flags()
    with refused("TypeError num_experts and hidden_size"):
        create(hidden_size=None)
    with refused("UNSUPPORTED expected rows of bf16 or fp8 .*, got nvfp4"):
        create().set_quant_config({"input_global_scale": x})
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
    state.is_extend = False
    with refused("EpError expected at most|expected .* 128"):
        create().dispatch(x.new_zeros(129, HIDDEN), types.SimpleNamespace(
            topk_ids=torch.zeros(129, TOP_K, dtype=torch.int64, device=device),
            topk_weights=torch.zeros(129, TOP_K, device=device)))  # fmt: skip
    state.is_extend = True
    with refused("SHAPE multiple of 512, for 4 scales in an int32, got 256"):
        create(hidden_size=256).dispatch(x[:, :256].contiguous(), topk)
    with refused("EpError expected"):
        create().dispatch(x.double(), topk)


def test_refusals(ranks):
    """The first test of the ranks: nothing is replaced yet."""
    ranks.play("run_refusals", device=DEVICE)


# ---- deepep -------------------------------------------------------------------------------------


def compute(output, first, case, release):
    """The experts' part of a step: a combine input for a dispatch output."""
    deepep = release.deepep
    x = dequantise(output.hidden_states, output.hidden_states_scale)
    is_quantised = case.dtype == "fp8" and (case.has_gemm or not case.is_extend)
    assert (output.hidden_states_scale is not None) == is_quantised
    if case.is_extend:
        assert output.format.is_deepep_normal()
        ids, weights = output.topk_ids, output.topk_weights
        assert ids.dtype == torch.int64 and weights.dtype == torch.float32
        unit = 128 if case.has_gemm else 1
        counts = [(ids == e).sum().item() for e in range(len(output.num_recv_tokens_per_expert))]
        assert output.num_recv_tokens_per_expert == [-(-n // unit) * unit for n in counts]
        factors = torch.where(ids >= 0, weights * factor(ids + first), 0).sum(1, keepdim=True)
        return deepep.DeepEPNormalCombineInput(rounded(x * factors), ids, weights)
    assert output.format.is_deepep_ll() and output.expected_m > 0
    local = torch.arange(len(output.masked_m), device=x.device)
    rows = x * factor(local + first)[:, None, None]
    unused = torch.arange(x.shape[1], device=x.device) >= output.masked_m[:, None]
    rows = rows.masked_fill(unused[..., None], torch.nan)
    return deepep.DeepEPLLCombineInput(rounded(rows), output.topk_ids, output.topk_weights)


def make(release, whose, case, group, size):
    """A MaybeTboDeepEPDispatcher around SGLang's DeepEPDispatcher, or around libep's."""
    if whose == "libep":
        import libep.sglang

        libep.sglang.install()
        libep.sglang.install()
        from libep.sglang._dispatcher import Dispatcher

        assert release.tbo.DeepEPDispatcher is Dispatcher is release.deepep.DeepEPDispatcher
    kind = release.deepep.before if whose == "sglang" else release.tbo.DeepEPDispatcher
    gemm = release.gemm
    gemm.ENABLE_JIT_DEEPGEMM = case.has_gemm
    gemm.DEEPGEMM_BLACKWELL = gemm.DEEPGEMM_SCALE_UE8M0 = case.is_packed
    with mock.patch.object(release.tbo, "DeepEPDispatcher", kind):
        made = release.tbo.MaybeTboDeepEPDispatcher(
            group=group,
            router_topk=TOP_K,
            permute_fusion=True,
            num_experts=EXPERTS,
            num_local_experts=EXPERTS // size,
            hidden_size=HIDDEN,
            params_dtype=torch.bfloat16,
            deepep_mode=release.utils.DeepEPMode.AUTO,
            async_finish=True,
            return_recv_hook=True,
        )
    made.set_quant_config({"dispatcher_output_dtype": case.dtype})
    return made


def run_step(dispatcher, step, first, case, release, rank, device):
    x, topk = inputs(step, rank, device)
    output = dispatcher.dispatch(hidden_states=x, topk_output=topk)
    out = dispatcher.combine(combine_input=compute(output, first, case, release))
    check(out, x, topk)


def run_two(dispatcher, first, case, release, rank, device):
    """Two batches: each half of a step of one runs between those of the other."""
    batches = [inputs(step, rank, device) for step in (3, 4)]
    for call, finish in ("dispatch_a", "dispatch_b"), ("combine_a", "combine_b"):
        results = []
        for batch in 0, 1:
            given = (
                dict(zip(("hidden_states", "topk_output"), batches[batch]))
                if call == "dispatch_a"
                else dict(combine_input=inner[batch])
            )
            getattr(dispatcher, call)(**given, tbo_subbatch_index=batch)
        for batch in 0, 1:
            results.append(getattr(dispatcher, finish)(tbo_subbatch_index=batch))
        if call == "dispatch_a":
            inner = [compute(output, first, case, release) for output in results]
    for out, batch in zip(results, batches):
        check(out, *batch)


def run_beside(dispatcher, first, case, release, rank, device):
    """Combine on another stream, as single-batch overlap has it. GPUs alone have streams."""
    x, topk = inputs(5, rank, device)
    for overlap in False, True:
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        output = dispatcher.dispatch(hidden_states=x, topk_output=topk)
        given = compute(output, first, case, release)
        event.record()
        args = types.SimpleNamespace(overlap=overlap, stream=stream, wait_event=event)
        dispatcher.set_overlap_args(args, {})
        check(dispatcher.combine(combine_input=given), x, topk)
        dispatcher.clear_overlap_args()


def run(name, whose, device):
    release, case = load(), CASES[name]
    group, rank, size = world()
    first = rank * EXPERTS // size
    release.context.get_flags().is_extend = case.is_extend
    with multiprocessors(device):
        # Once without another batch, where all runs on one stream.
        release.context.get_flags().moe.tbo_enabled = False
        dispatcher = make(release, whose, case, group, size)
        run_step(dispatcher, 0, first, case, release, rank, device)
        release.context.get_flags().moe.tbo_enabled = True
        dispatcher = make(release, whose, case, group, size)
        called = []
        dispatcher.register_deepep_dispatch_hook(called.append)
        for step in range(3):
            run_step(dispatcher, step, first, case, release, rank, device)
        assert len(called) == 3
        run_two(dispatcher, first, case, release, rank, device)
        if device == "cuda" and whose == "libep" and not case.is_extend:
            run_beside(dispatcher, first, case, release, rank, device)


def multiprocessors(device):
    """On CPUs: the number of multiprocessors, which SGLang asks for."""
    known = mock.MagicMock(return_value=types.SimpleNamespace(multi_processor_count=132))
    real = torch.cuda.get_device_properties
    return mock.patch("torch.cuda.get_device_properties", known if device == "cpu" else real)


@pytest.mark.parametrize("whose", ("sglang", "libep"))
@pytest.mark.parametrize("name", CASES)
def test_deepep(ranks, name, whose):
    if whose == "sglang" and not CASES[name].has_gemm:
        pytest.skip("SGLang's own refuses to combine without DeepGEMM")
    ranks.play("run", name=name, whose=whose, device=DEVICE)


# ---- deepep_v2 ----------------------------------------------------------------------------------


def compute_v2(output, first, case, local):
    x = dequantise(output.hidden_states, output.hidden_states_scale)
    assert output.is_expanded == (case.expand is None)
    if not output.is_expanded:
        ids = output.topk_ids
        factors = torch.where(ids >= 0, output.topk_weights * factor(ids + first), 0).sum(1)
        return rounded(x * factors[:, None])
    rows = torch.full_like(x, torch.nan)
    start = 0
    for expert, end in enumerate(output.psum_num_recv_tokens_per_expert.tolist()):
        used = slice(start, end)
        rows[used] = x[used] * factor(torch.tensor(first + expert)).to(x.device)
        rows[used] *= output.topk_weights[used, None]
        start = -(-end // output.expert_alignment) * output.expert_alignment
    return rounded(rows)


def run_v2(name, device):
    release, case = load(), V2_CASES[name]
    group, rank, size = world()
    local = EXPERTS // size
    release.context.get_flags().is_extend = case.is_extend
    release.gemm.DEEPGEMM_NEED_TMA_ALIGNED_SCALES = release.gemm.DEEPGEMM_SCALE_UE8M0 = False
    expand = "" if case.expand is None else str(int(case.expand))
    with mock.patch.dict(os.environ, {"SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND": expand or "1"}):
        dispatcher = release.v2.DeepEPv2Dispatcher(
            group=group,
            router_topk=TOP_K,
            num_experts=EXPERTS,
            num_local_experts=local,
            hidden_size=HIDDEN,
            params_dtype=torch.bfloat16,
            use_fp8_dispatch=case.dtype == "fp8",
        )
    for step in range(3):
        x, topk = inputs(step, rank, device)
        output = dispatcher.dispatch(x, topk)
        assert output.format.is_deepep_v2() and output.use_masked_gemm != case.is_extend
        rows = compute_v2(output, rank * local, case, local)
        check(dispatcher.combine(release.v2.DeepEPv2CombineInput(rows, None)), x, topk)


@pytest.mark.parametrize("name", V2_CASES)
def test_deepep_v2(ranks, name):
    ranks.play("run_v2", name=name, device=DEVICE)
