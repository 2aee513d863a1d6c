# SPDX-License-Identifier: Apache-2.0
"""vLLM's release without an installation: its classes that dispatch and combine, ready to be made.
For vllm_step.py and the tests of released programs.

prepare() comes first. What stands in: the configuration, the platform, process groups, and kernels
where there is no GPU (quantising, the sum over top-k, expert ids of deepep_v2).
"""

import importlib.util
import threading
from importlib import import_module
from types import SimpleNamespace

import torch
import torch.distributed as dist
from stand_ins import stand_in
from wheels import unpack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

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

    dispatch_key, device_type = DEVICE.upper(), DEVICE
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


def prepare():
    """Make the release's modules importable. Returns its configuration, to be changed."""
    stand_in(unpack("vllm"), HOLLOW.split(), ABSENT.split())
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
        model_config=SimpleNamespace(enforce_eager=False),
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

    ops.moe_sum = lambda rows, out: out.copy_(rows.float().sum(1))
    utils = import_module(f"{MOE}.utils")
    utils.per_token_group_quant_fp8, utils.mxfp8_e4m3_quantize = quantise, quantise_mx
    # deepep_v2 asks for an NCCL and a network that libep does not need.
    import_module("vllm.utils.import_utils")._get_runtime_nccl_version = lambda: 23004
    managers = import_module(f"{COMMUNICATORS}.all2all")
    managers.DeepEPV2All2AllManager._check_gin_support = lambda *_: None
    if DEVICE == "cpu":
        _replace_streams()
    if not import_module("vllm.triton_utils").HAS_TRITON:
        # A kernel of Triton.
        import_module(f"{MOE}.prepare_finalize.deepep_v2")._globalize_recv_topk_idx = globalise


class _Nothing:
    """A stream or an event where there is none: operations are done when they return."""

    record = wait_event = lambda self, _: None


def make_streams():
    """Two streams, for computing and for communication."""
    kind = torch.cuda.Stream if DEVICE == "cuda" else _Nothing
    return kind(), kind()


def _replace_streams():
    """Let the micro-batches' threads switch between streams that are none."""
    ubatching = import_module("vllm.v1.worker.ubatching")
    current = threading.local()
    torch.cuda.set_stream = lambda stream: setattr(current, "stream", stream)
    torch.Event = _Nothing
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
    world, device = dist.group.WORLD, torch.device(device)
    return kind(world, device=device, device_group=world, unique_name="ep:0", use_all2all=True)


QUANTS = {
    None: {},
    "mxfp8": dict(quant_dtype="mxfp8", is_scale_swizzled=False),
    "fp8": dict(quant_dtype=torch.float8_e4m3fn, block_shape=[BLOCK, BLOCK]),
}


def make_layer(config, backend, *, experts, top_k, hidden, most, quant=None):
    """A manager and a prepare-and-finalize object for a backend. quant: of QUANTS."""
    configs = import_module(f"{MOE}.config")
    size, rank = dist.get_world_size(), dist.get_rank()
    config.parallel_config.all2all_backend = backend
    sizes = {f"{name}_size": 1 for name in ("tp", "pcp", "sp")}
    ranks = dict(tp_rank=0, pcp_rank=0, dp_rank=rank, ep_rank=rank, dp_size=size, ep_size=size)
    parallel = configs.FusedMoEParallelConfig(
        use_ep=True, all2all_backend=backend, enable_eplb=False, **sizes, **ranks
    )
    counts = dict(num_experts=experts, num_local_experts=experts // size)
    counts.update(num_logical_experts=experts, experts_per_token=top_k, max_num_tokens=most)
    moe = configs.FusedMoEConfig(
        hidden_dim=hidden,
        intermediate_size=hidden,
        activation=import_module(f"{MOE}.activation").MoEActivation.SILU,
        device=DEVICE,
        routing_method=configs.RoutingMethodType.Default,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        **counts,
    )
    made = make_communicator(
        import_module(f"{COMMUNICATORS}.cuda_communicator").CudaCommunicator, DEVICE
    )
    given = configs.FusedMoEQuantConfig.make(**QUANTS[quant])
    return SimpleNamespace(
        communicator=made,
        quant_config=given,
        manager=made.all2all_manager,
        prepare_finalize=import_module(f"{MOE}.all2all_utils").maybe_make_prepare_finalize(
            moe, given, all2all_manager=made.all2all_manager
        ),
        experts_per_rank=moe.num_local_experts,
    )
