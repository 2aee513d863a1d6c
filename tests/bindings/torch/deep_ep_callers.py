# SPDX-License-Identifier: Apache-2.0
"""The calls that programs make on deep_ep, with their argument lists, as data.

Read from the programs' sources at the commits named. Each value is an expression over the names of
test_deep_ep_callers.py (x, idx, weights, ...) and over the results of the calls before.
"""

from __future__ import annotations

from typing import NamedTuple


class Call(NamedTuple):
    """One call of a method of Buffer; of Buffer itself, if `name` is "Buffer"."""

    name: str
    args: tuple[str, ...]
    keywords: dict[str, str]
    results: str = ""
    """Names for the results, as on the left of an assignment."""


class Caller(NamedTuple):
    """A program and its calls, in the order in which it makes them."""

    program: str
    source: str
    commit: str
    calls: tuple[Call, ...]


def call(results: str, name: str, *args: str, **keywords: str) -> Call:
    return Call(name, args, keywords, results)


LAYOUT = "per_rank, per_rdma_rank, per_expert, is_in, event"
DISPATCHED = "recv, recv_idx, recv_weights, counts, handle, event"

VLLM_HT = Caller(
    "vLLM, high throughput",
    "vllm/distributed/device_communicators/all2all.py and "
    "vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_ht.py",
    "00143004 and 055e47c2",
    (
        call(
            "buffer",
            "Buffer",
            group="group",
            num_nvl_bytes="1 << 30",
            num_rdma_bytes="0",
            low_latency_mode="False",
            num_qps_per_rank="1",
            explicitly_destroy="True",
        ),
        call("previous", "capture"),
        call(
            LAYOUT,
            "get_dispatch_layout",
            topk_idx="idx",
            num_experts="experts",
            previous_event="previous",
            async_finish="False",
            allocate_on_comm_stream="False",
        ),
        call("config", "get_dispatch_config", "size"),
        call(
            "(recv, scales), recv_idx, recv_weights, counts, handle, event",
            "dispatch",
            x="(fp8, fp8_scales)",
            handle="None",
            num_tokens_per_rank="per_rank",
            num_tokens_per_rdma_rank="per_rdma_rank",
            is_token_in_rank="is_in",
            num_tokens_per_expert="per_expert",
            topk_idx="idx",
            topk_weights="weights",
            expert_alignment="1",
            config="config",
            previous_event="previous",
            async_finish="True",
            allocate_on_comm_stream="False",
        ),
        call("", "wait", "event"),
        call("config", "get_combine_config", "size"),
        call(
            "out, none, event",
            "combine",
            x="recv.bfloat16()",
            handle="handle",
            topk_weights="None",
            config="config",
            previous_event="None",
            async_finish="True",
            allocate_on_comm_stream="False",
        ),
        call("", "wait", "event"),
        call("", "destroy"),
    ),
)

VLLM_LL = Caller(
    "vLLM, low latency",
    "vllm/distributed/device_communicators/all2all.py and "
    "vllm/model_executor/layers/fused_moe/prepare_finalize/deepep_ll.py",
    "00143004 and 055e47c2",
    (
        call(
            "hint",
            "get_low_latency_rdma_size_hint",
            num_max_dispatch_tokens_per_rank="most",
            hidden="hidden",
            num_ranks="size",
            num_experts="experts",
        ),
        call(
            "buffer",
            "Buffer",
            group="group",
            num_nvl_bytes="1 << 30",
            num_rdma_bytes="hint",
            low_latency_mode="True",
            num_qps_per_rank="experts // size",
            allow_nvlink_for_low_latency_mode="True",
            allow_mnnvl="False",
            explicitly_destroy="True",
            enable_shrink="False",
        ),
        call(
            "(recv, scales), counts, handle, _, hook",
            "low_latency_dispatch",
            "x",
            "idx",
            "most",
            "experts",
            use_fp8="True",
            round_scale="True",
            use_ue8m0="True",
            async_finish="False",
            return_recv_hook="True",
        ),
        call("", "run", "hook"),
        call(
            "out, _, hook",
            "low_latency_combine",
            "dequantise(recv, scales)",
            "idx",
            "weights",
            "handle",
            async_finish="False",
            zero_copy="False",
            return_recv_hook="True",
            out="output",
        ),
        call("", "run", "hook"),
        call("", "destroy"),
    ),
)

SGLANG_NORMAL = Caller(
    "SGLang, normal",
    "python/sglang/srt/layers/moe/token_dispatcher/deepep.py",
    "003a81bf",
    (
        call("config", "get_dispatch_config", "size"),
        call(
            "buffer",
            "Buffer",
            "group",
            "config.get_nvl_buffer_size_hint(2 * hidden, size)",
            "config.get_rdma_buffer_size_hint(2 * hidden, size)",
            low_latency_mode="True",
            num_qps_per_rank="max(num_sms, experts // size)",
            allow_mnnvl="True",
        ),
        call("previous", "capture"),
        call(
            LAYOUT,
            "get_dispatch_layout",
            "idx",
            "experts",
            previous_event="previous",
            async_finish="True",
            allocate_on_comm_stream="True",
        ),
        call(
            DISPATCHED,
            "dispatch",
            "x",
            topk_idx="idx",
            topk_weights="weights",
            num_tokens_per_rank="per_rank",
            num_tokens_per_rdma_rank="per_rdma_rank",
            is_token_in_rank="is_in",
            num_tokens_per_expert="per_expert",
            previous_event="event",
            async_finish="True",
            allocate_on_comm_stream="True",
            expert_alignment="128",
            config="None",
        ),
        call("", "wait", "event"),
        call("previous", "capture"),
        call(
            "out, _, event",
            "combine",
            "recv",
            "handle",
            async_finish="True",
            previous_event="previous",
            allocate_on_comm_stream="True",
            config="None",
        ),
        call("", "wait", "event"),
        call("", "clean_low_latency_buffer", "most", "hidden", "experts"),
    ),
)

SGLANG_LL = Caller(
    "SGLang, low latency",
    "python/sglang/srt/layers/moe/token_dispatcher/deepep.py",
    "003a81bf",
    (
        call("hint", "get_low_latency_rdma_size_hint", "most", "hidden", "size", "experts"),
        call(
            "buffer",
            "Buffer",
            "group",
            "0",
            "hint",
            low_latency_mode="True",
            num_qps_per_rank="experts // size",
            allow_mnnvl="True",
        ),
        call(
            "(recv, scales), counts, handle, event, hook",
            "low_latency_dispatch",
            "x",
            "idx",
            "most",
            "experts",
            use_fp8="True",
            async_finish="True",
            return_recv_hook="False",
            round_scale="False",
            use_ue8m0="False",
        ),
        call("", "wait", "event"),
        call(
            "out, event, hook",
            "low_latency_combine",
            x="dequantise(recv, scales)",
            topk_idx="idx",
            topk_weights="weights",
            handle="handle",
            async_finish="True",
            return_recv_hook="False",
            overlap="False",
            src_signals="None",
            src_signal_expect_value="0",
        ),
        call("", "wait", "event"),
    ),
)

MEGATRON = Caller(
    "Megatron-LM",
    "megatron/core/transformer/moe/fused_a2a.py",
    "02ad939b",
    (
        call("", "set_num_sms", "24"),
        call("buffer", "Buffer", "group", "0", "0"),
        call(
            LAYOUT,
            "get_dispatch_layout",
            "idx",
            "experts",
            previous_event="EventOverlap(EventHandle())",
            async_finish="True",
            allocate_on_comm_stream="True",
        ),
        call(
            DISPATCHED,
            "dispatch",
            "x",
            topk_idx="idx",
            topk_weights="weights",
            num_tokens_per_rank="per_rank",
            num_tokens_per_rdma_rank="per_rdma_rank",
            is_token_in_rank="is_in",
            num_tokens_per_expert="per_expert",
            previous_event="event",
            async_finish="True",
            allocate_on_comm_stream="True",
        ),
        call("", "wait", "event"),
        call(
            "out, _, event",
            "combine",
            "recv",
            handle="handle",
            async_finish="True",
            previous_event="EventOverlap(EventHandle())",
            allocate_on_comm_stream="True",
        ),
        call("", "wait", "event"),
        call(
            "grad, _, _, _, _, event",
            "dispatch",
            "out",
            handle="handle",
            previous_event="EventOverlap(EventHandle())",
            async_finish="True",
            allocate_on_comm_stream="True",
        ),
        call("", "wait", "event"),
        call(
            "grad_x, grad_weights, event",
            "combine",
            "grad",
            "handle",
            topk_weights="recv_weights.float()",
            previous_event="EventOverlap(EventHandle())",
            async_finish="True",
            allocate_on_comm_stream="True",
        ),
        call("", "wait", "event"),
        call("", "set_num_sms", "20"),
    ),
)

TORCHTITAN = Caller(
    "torchtitan",
    "torchtitan/distributed/deepep/deepep.py",
    "06c9b44c",
    (
        call("buffer", "Buffer", "group", "0", "0"),
        call(LAYOUT, "get_dispatch_layout", topk_idx="idx", num_experts="experts"),
        call(
            DISPATCHED,
            "dispatch",
            x="x",
            topk_idx="idx",
            topk_weights="weights",
            num_tokens_per_rank="per_rank",
            num_tokens_per_rdma_rank="per_rdma_rank",
            is_token_in_rank="is_in",
            num_tokens_per_expert="per_expert",
            previous_event="EventOverlap(EventHandle())",
            async_finish="True",
            allocate_on_comm_stream="True",
        ),
        call("", "wait", "event"),
        call(
            "out, _, event",
            "combine",
            x="recv",
            handle="handle",
            previous_event="EventOverlap(EventHandle())",
            async_finish="True",
            allocate_on_comm_stream="True",
        ),
        call("", "wait", "event"),
        call(
            "grad, _, _, _, _, event",
            "dispatch",
            x="out",
            topk_idx="None",
            topk_weights="None",
            num_tokens_per_rank="None",
            num_tokens_per_rdma_rank="None",
            is_token_in_rank="None",
            num_tokens_per_expert="None",
            handle="handle",
            previous_event="EventOverlap(EventHandle())",
            async_finish="True",
            allocate_on_comm_stream="True",
        ),
        call("", "wait", "event"),
        call(
            "grad_x, grad_weights, event",
            "combine",
            x="grad",
            handle="handle",
            topk_weights="None",
            previous_event="EventOverlap(EventHandle())",
            async_finish="True",
            allocate_on_comm_stream="True",
        ),
        call("", "wait", "event"),
    ),
)

DEEP_EP_NORMAL = Caller(
    "DeepEP's test of normal mode",
    "tests/test_intranode.py",
    "031a5c49",
    (
        call(
            "buffer",
            "Buffer",
            "group",
            "int(1e9)",
            "0",
            low_latency_mode="False",
            num_qps_per_rank="1",
        ),
        call(LAYOUT, "get_dispatch_layout", "idx", "experts"),
        call("previous", "capture"),
        call(
            DISPATCHED,
            "dispatch",
            x="x",
            num_tokens_per_rank="per_rank",
            is_token_in_rank="is_in",
            num_tokens_per_expert="per_expert",
            config="Config(24, 8, 256)",
            async_finish="True",
            topk_idx="idx",
            topk_weights="weights",
            previous_event="previous",
        ),
        call("", "wait", "event"),
        call(
            "again, _, _, _, _, event",
            "dispatch",
            x="x",
            handle="handle",
            config="Config(24, 8, 256)",
            async_finish="False",
        ),
        call(
            "out, out_weights, event",
            "combine",
            x="recv",
            handle="handle",
            config="Config(24, 8, 256)",
            async_finish="False",
            topk_weights="recv_weights",
        ),
        call(
            DISPATCHED,
            "dispatch",
            x="x",
            num_tokens_per_rank="per_rank",
            is_token_in_rank="is_in",
            num_tokens_per_expert="per_expert",
            config="Config(24, 8, 256)",
            async_finish="False",
        ),
        call("out, none, event", "combine", x="recv", handle="handle"),
    ),
)

DEEP_EP_LL = Caller(
    "DeepEP's test of low latency",
    "tests/test_low_latency.py",
    "058d696b",
    (
        call("hint", "get_low_latency_rdma_size_hint", "most", "hidden", "size", "experts"),
        call(
            "buffer",
            "Buffer",
            "group",
            num_rdma_bytes="hint",
            low_latency_mode="True",
            num_qps_per_rank="experts // size",
            allow_nvlink_for_low_latency_mode="True",
        ),
        call(
            "(recv, scales), counts, handle, event, hook",
            "low_latency_dispatch",
            "x",
            "idx",
            "most",
            "experts",
            use_fp8="True",
            round_scale="False",
            use_ue8m0="False",
            cumulative_local_expert_recv_stats="stats",
            async_finish="True",
            return_recv_hook="False",
        ),
        call("", "wait", "event"),
        call("rows", "get_next_low_latency_combine_buffer", "handle"),
        call(
            "out, event, hook",
            "low_latency_combine",
            "dequantise(recv, scales)",
            "idx",
            "weights",
            "handle",
            use_logfmt="False",
            async_finish="False",
            zero_copy="False",
            return_recv_hook="True",
            out="output",
        ),
        call("", "run", "hook"),
        call("", "destroy"),
    ),
)

CALLERS = (
    VLLM_HT,
    VLLM_LL,
    SGLANG_NORMAL,
    SGLANG_LL,
    MEGATRON,
    TORCHTITAN,
    DEEP_EP_NORMAL,
    DEEP_EP_LL,
)

# What programs import, and from where.
IMPORTS = {
    "vLLM": ("import deep_ep", "deep_ep.Buffer, deep_ep.Config, deep_ep.EventOverlap"),
    "SGLang": ("from deep_ep import Buffer, Config", "Buffer.num_sms"),
    "Megatron-LM": (
        "from deep_ep import Buffer\nfrom deep_ep.utils import EventHandle, EventOverlap",
        "Buffer, EventOverlap(EventHandle())",
    ),
    "torchtitan": (
        "from deep_ep import Buffer\nfrom deep_ep.utils import EventHandle, EventOverlap",
        "EventOverlap(EventHandle())",
    ),
    "DeepEP's tests": ("import deep_ep", "deep_ep.Config(24, 8, 256), deep_ep.topk_idx_t"),
    "others": (
        "from deep_ep.buffer import Buffer, EventOverlap\nfrom deep_ep_cpp import EventHandle",
        "EventOverlap(EventHandle())",
    ),
}
