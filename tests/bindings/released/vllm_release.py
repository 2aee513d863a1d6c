# SPDX-License-Identifier: Apache-2.0
"""vLLM's release without an installation: its classes that dispatch and combine, ready to be made.

prepare() comes first. What stands in: the configuration, the platform, process groups, and kernels
where there is no GPU (quantising, the sum over top-k, expert ids of deepep_v2).
"""

from __future__ import annotations

import importlib.util
import threading
from importlib import import_module
from types import SimpleNamespace

import torch
import torch.distributed as dist
from stand_ins import stand_in

HOLLOW = """
    vllm vllm._aiter_ops vllm._custom_ops vllm.config vllm.config.load vllm.config.vllm
    vllm.distributed vllm.distributed.device_communicators.pynccl
    vllm.distributed.parallel_state vllm.distributed.utils vllm.model_executor
    vllm.model_executor.layers vllm.model_executor.layers.fused_moe
    vllm.model_executor.layers.quantization vllm.model_executor.models
    vllm.model_executor.models.utils vllm.multimodal vllm.platforms vllm.v1.core.sched.output
    vllm.v1.executor"""
ABSENT = """cbor2 cloudpickle psutil transformers pydantic regex msgspec zmq PIL huggingface_hub
    prometheus_client yaml requests fastapi einops aiohttp openai urllib3 cachetools"""
COMMUNICATORS = "vllm.distributed.device_communicators"
MOE = "vllm.model_executor.layers.fused_moe"

BLOCK, LARGEST = 128, 448.0  # of fp8 with scales


class Platform:
    """A GPU to the files of vLLM, also where there is none."""

    dispatch_key = "CUDA" if torch.cuda.is_available() else "CPU"
    device_type = dispatch_key.lower()
    is_cuda = is_cuda_alike = staticmethod(lambda: True)
    fp8_dtype = staticmethod(lambda: torch.float8_e4m3fn)
    get_device_capability = staticmethod(lambda *_: None)
    device_count = staticmethod(lambda: 8)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: False


class WholeConfig:
    """VllmConfig, as far as its check of micro-batches goes."""

    def __init__(self, parallel_config):
        self.parallel_config = parallel_config
        self.__post_init__()

    def __post_init__(self):
        if self.parallel_config.use_ubatching:
            served = "deepep_low_latency", "deepep_high_throughput", "nixl_ep"
            assert self.parallel_config.all2all_backend in served


def prepare(folder, is_eager=False):
    """Make the release's modules importable. Returns its configuration, to be changed.

    folder    with the release's files
    is_eager  enforce_eager of the model
    """
    stand_in(folder, HOLLOW.split(), ABSENT.split())
    import vllm
    import vllm.config
    import vllm.platforms

    import_module("vllm.config.vllm").VllmConfig = WholeConfig
    vllm.__version__ = import_module("vllm._version").__version__
    vllm.platforms.current_platform = Platform()
    vllm.platforms.vllm_version_matches_substr = lambda _: False  # so it may use Triton
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            all2all_backend="", enable_expert_parallel=True, enable_fault_tolerance=False
        ),
        model_config=SimpleNamespace(enforce_eager=is_eager),
        use_cumem_cudagraph_pool=False,
    )
    vllm.config.get_current_vllm_config = lambda: config
    vllm.config.get_current_vllm_config_or_none = lambda: config
    if importlib.util.find_spec("pydantic_core") is None:
        # The configuration's classes are not there. So nothing offers them other names.
        import_module("libep.vllm._patches")._offer_names = lambda *_: None
    _form_groups()
    _replace_kernels()
    return config


def _form_groups():
    import vllm.distributed
    import vllm.distributed.parallel_state as state

    size, rank = dist.get_world_size(), dist.get_rank()
    tensor = SimpleNamespace(world_size=1, rank_in_group=0)
    data = SimpleNamespace(world_size=size, rank_in_group=rank)
    state.in_the_same_node_as = lambda group, source_rank: [True] * size
    for module in (vllm.distributed, state):
        module.get_dp_group = lambda: data
        module.get_tp_group = module.get_pcp_group = lambda: tensor


def _replace_kernels():
    import vllm._custom_ops as ops

    def moe_sum(rows, out):
        out.copy_(rows.float().sum(1))

    ops.moe_sum = moe_sum
    utils = import_module(f"{MOE}.utils")
    utils.per_token_group_quant_fp8 = quantise
    utils.mxfp8_e4m3_quantize = quantise_mx
    # deepep_v2 asks for an NCCL and a network that libep does not need.
    import_module("vllm.utils.import_utils")._get_runtime_nccl_version = lambda: 23004
    managers = import_module(f"{COMMUNICATORS}.all2all")
    managers.DeepEPV2All2AllManager._check_gin_support = lambda *_: None
    if not torch.cuda.is_available():
        _replace_streams()
    if not import_module("vllm.triton_utils").HAS_TRITON:
        # A kernel of Triton.
        import_module(f"{MOE}.prepare_finalize.deepep_v2")._globalize_recv_topk_idx = globalise


class _Stream:
    """A stream where there is none: operations are done when they return."""

    def wait_event(self, event):
        pass


class _Event:
    def record(self, stream):
        pass


def make_streams():
    """Two streams, for computing and for communication."""
    kind = torch.cuda.Stream if torch.cuda.is_available() else _Stream
    return kind(), kind()


def _replace_streams():
    """Let the micro-batches' threads switch between streams that are none."""
    ubatching = import_module("vllm.v1.worker.ubatching")
    current = threading.local()
    torch.cuda.set_stream = lambda stream: setattr(current, "stream", stream)
    torch.Event = _Event
    ubatching.current_stream = lambda: getattr(current, "stream", None)
    high_throughput = import_module(f"{MOE}.prepare_finalize.deepep_ht")
    high_throughput._dbo_record_stream = lambda *_: None


def quantise(x, block, column_major_scales=False):
    """fp8 with a scale for each block of a row."""
    assert not column_major_scales
    parts = x.float().unflatten(1, (-1, block))
    scales = parts.abs().amax(2, keepdim=True).clamp(min=1e-10) / LARGEST
    return (parts / scales).flatten(1).to(torch.float8_e4m3fn), scales[..., 0]


def quantise_mx(x, is_sf_swizzled_layout=False, alignment=0):
    """fp8 with a power of two, as its exponent, for each 32 elements."""
    assert not is_sf_swizzled_layout and not alignment
    parts = x.float().unflatten(1, (-1, 32))
    powers = (parts.abs().amax(2, keepdim=True).clamp(min=2.0**-100) / LARGEST).log2().ceil()
    return (parts / 2**powers).flatten(1).to(torch.float8_e4m3fn), (powers[..., 0] + 127).byte()


def globalise(ids, ends, first, num_experts):
    """Local expert ids become global ones; rows that did not come, and other ids, become -1."""
    came = torch.arange(len(ids), device=ids.device) < ends[-1]
    ids.copy_(torch.where((ids >= 0) & came[:, None], ids + first, -1))
    return ids


def make_communicator(kind, device):
    """What the process group of the experts' ranks communicates with, and chooses a manager."""
    return kind(
        cpu_group=dist.group.WORLD,
        device=torch.device(device),
        device_group=dist.group.WORLD,
        unique_name="ep:0",
        use_all2all=True,
    )


def make_layer(config, backend, *, experts, top_k, hidden, most, quant=None):
    """A manager and a prepare-and-finalize object for a backend.

    quant  None, "fp8" or "mxfp8"
    """
    configs = import_module(f"{MOE}.config")
    utils = import_module(f"{MOE}.all2all_utils")
    size, rank = dist.get_world_size(), dist.get_rank()
    config.parallel_config.all2all_backend = backend
    parallel = configs.FusedMoEParallelConfig(
        tp_size=1,
        pcp_size=1,
        dp_size=size,
        ep_size=size,
        tp_rank=0,
        pcp_rank=0,
        dp_rank=rank,
        ep_rank=rank,
        sp_size=1,
        use_ep=True,
        all2all_backend=backend,
        enable_eplb=False,
    )
    moe = configs.FusedMoEConfig(
        num_experts=experts,
        experts_per_token=top_k,
        hidden_dim=hidden,
        intermediate_size=hidden,
        num_local_experts=experts // size,
        num_logical_experts=experts,
        activation=import_module(f"{MOE}.activation").MoEActivation.SILU,
        device="cuda" if torch.cuda.is_available() else "cpu",
        routing_method=configs.RoutingMethodType.Default,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        max_num_tokens=most,
    )
    given = {None: {}, "mxfp8": dict(quant_dtype="mxfp8", is_scale_swizzled=False)}
    given["fp8"] = dict(quant_dtype=torch.float8_e4m3fn, block_shape=[BLOCK, BLOCK])
    quant_config = configs.FusedMoEQuantConfig.make(**given[quant])
    made = make_communicator(
        import_module(f"{COMMUNICATORS}.cuda_communicator").CudaCommunicator, moe.device
    )
    manager = made.all2all_manager
    return SimpleNamespace(
        communicator=made,
        quant_config=quant_config,
        manager=manager,
        prepare_finalize=utils.maybe_make_prepare_finalize(
            moe, quant_config, all2all_manager=manager
        ),
        experts_per_rank=moe.num_local_experts,
    )
