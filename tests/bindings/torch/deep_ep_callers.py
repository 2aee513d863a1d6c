# SPDX-License-Identifier: Apache-2.0
"""The calls that programs make on deep_ep, with their argument lists.

Read from the programs' sources at the commits named. Names are those of test_deep_ep_callers.py.
"""

from typing import NamedTuple


class Caller(NamedTuple):
    """A program, and its calls in the order in which it makes them."""

    program: str
    source: str
    commit: str
    calls: str


LAYOUT = "per_rank, per_rdma_rank, per_expert, is_in, event"
DISPATCHED = "recv, recv_idx, recv_weights, counts, handle, event"
COUNTS = """num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_rdma_rank,
    is_token_in_rank=is_in, num_tokens_per_expert=per_expert"""
BESIDE = "async_finish=True, allocate_on_comm_stream=True"
AFTER_NOW = f"previous_event=EventOverlap(EventHandle()), {BESIDE}"

VLLM = "vllm/distributed/device_communicators/all2all.py and vllm/model_executor/layers/fused_moe/"
VLLM_AT = "00143004 and 055e47c2"
SGLANG = "python/sglang/srt/layers/moe/token_dispatcher/deepep.py"

CALLERS = (
    Caller("vLLM, high throughput", VLLM + "prepare_finalize/deepep_ht.py", VLLM_AT, f"""
buffer = Buffer(group=group, num_nvl_bytes=1 << 30, num_rdma_bytes=0, low_latency_mode=False,
                num_qps_per_rank=1, explicitly_destroy=True)
previous = buffer.capture()
{LAYOUT} = buffer.get_dispatch_layout(topk_idx=idx, num_experts=experts, previous_event=previous,
    async_finish=False, allocate_on_comm_stream=False)
config = buffer.get_dispatch_config(size)
(recv, scales), recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
    x=(fp8, fp8_scales), handle=None, {COUNTS}, topk_idx=idx, topk_weights=weights,
    expert_alignment=1, config=config, previous_event=previous, async_finish=True,
    allocate_on_comm_stream=False)
event.current_stream_wait()
config = buffer.get_combine_config(size)
out, none, event = buffer.combine(x=recv.bfloat16(), handle=handle, topk_weights=None,
    config=config, previous_event=None, async_finish=True, allocate_on_comm_stream=False)
event.current_stream_wait()
buffer.destroy()
"""),
    Caller("vLLM, low latency", VLLM + "prepare_finalize/deepep_ll.py", VLLM_AT, """
hint = Buffer.get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank=most, hidden=hidden,
                                             num_ranks=size, num_experts=experts)
buffer = Buffer(group=group, num_nvl_bytes=1 << 30, num_rdma_bytes=hint, low_latency_mode=True,
                num_qps_per_rank=experts // size, allow_nvlink_for_low_latency_mode=True,
                allow_mnnvl=False, explicitly_destroy=True, enable_shrink=False)
(recv, scales), counts, handle, _, hook = buffer.low_latency_dispatch(x, idx, most, experts,
    use_fp8=True, round_scale=True, use_ue8m0=True, async_finish=False, return_recv_hook=True)
hook()
out, _, hook = buffer.low_latency_combine(dequantise(recv, scales), idx, weights, handle,
    async_finish=False, zero_copy=False, return_recv_hook=True, out=output)
hook()
buffer.destroy()
"""),
    Caller("SGLang, normal", SGLANG, "003a81bf", f"""
config = Buffer.get_dispatch_config(size)
buffer = Buffer(group, config.get_nvl_buffer_size_hint(2 * hidden, size),
                config.get_rdma_buffer_size_hint(2 * hidden, size), low_latency_mode=True,
                num_qps_per_rank=max(num_sms, experts // size), allow_mnnvl=True)
previous = buffer.capture()
{LAYOUT} = buffer.get_dispatch_layout(idx, experts, previous_event=previous, {BESIDE})
{DISPATCHED} = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, {COUNTS},
    previous_event=event, {BESIDE}, expert_alignment=128, config=None)
event.current_stream_wait()
previous = buffer.capture()
out, _, event = buffer.combine(recv, handle, previous_event=previous, {BESIDE}, config=None)
event.current_stream_wait()
buffer.clean_low_latency_buffer(most, hidden, experts)
"""),
    Caller("SGLang, low latency", SGLANG, "003a81bf", """
hint = Buffer.get_low_latency_rdma_size_hint(most, hidden, size, experts)
buffer = Buffer(group, 0, hint, low_latency_mode=True, num_qps_per_rank=experts // size,
                allow_mnnvl=True)
(recv, scales), counts, handle, event, hook = buffer.low_latency_dispatch(x, idx, most, experts,
    use_fp8=True, async_finish=True, return_recv_hook=False, round_scale=False, use_ue8m0=False)
event.current_stream_wait()
out, event, hook = buffer.low_latency_combine(x=dequantise(recv, scales), topk_idx=idx,
    topk_weights=weights, handle=handle, async_finish=True, return_recv_hook=False, overlap=False,
    src_signals=None, src_signal_expect_value=0)
event.current_stream_wait()
"""),
    Caller("Megatron-LM", "megatron/core/transformer/moe/fused_a2a.py", "02ad939b", f"""
Buffer.set_num_sms(24)
buffer = Buffer(group, 0, 0)
{LAYOUT} = buffer.get_dispatch_layout(idx, experts, {AFTER_NOW})
{DISPATCHED} = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, {COUNTS},
    previous_event=event, {BESIDE})
event.current_stream_wait()
out, _, event = buffer.combine(recv, handle=handle, {AFTER_NOW})
event.current_stream_wait()
grad, _, _, _, _, event = buffer.dispatch(out, handle=handle, {AFTER_NOW})
event.current_stream_wait()
grad_x, grad_weights, event = buffer.combine(grad, handle, topk_weights=recv_weights.float(),
    {AFTER_NOW})
event.current_stream_wait()
Buffer.set_num_sms(20)
"""),
    Caller("torchtitan", "torchtitan/distributed/deepep/deepep.py", "06c9b44c", f"""
buffer = Buffer(group, 0, 0)
{LAYOUT} = buffer.get_dispatch_layout(topk_idx=idx, num_experts=experts)
{DISPATCHED} = buffer.dispatch(x=x, topk_idx=idx, topk_weights=weights, {COUNTS}, {AFTER_NOW})
event.current_stream_wait()
out, _, event = buffer.combine(x=recv, handle=handle, {AFTER_NOW})
event.current_stream_wait()
grad, _, _, _, _, event = buffer.dispatch(x=out, topk_idx=None, topk_weights=None,
    num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
    num_tokens_per_expert=None, handle=handle, {AFTER_NOW})
event.current_stream_wait()
grad_x, grad_weights, event = buffer.combine(x=grad, handle=handle, topk_weights=None, {AFTER_NOW})
event.current_stream_wait()
"""),
    Caller("DeepEP's test of normal mode", "tests/test_intranode.py", "031a5c49", f"""
buffer = Buffer(group, int(1e9), 0, low_latency_mode=False, num_qps_per_rank=1)
{LAYOUT} = buffer.get_dispatch_layout(idx, experts)
previous = buffer.capture()
{DISPATCHED} = buffer.dispatch(x=x, num_tokens_per_rank=per_rank, is_token_in_rank=is_in,
    num_tokens_per_expert=per_expert, config=Config(24, 8, 256), async_finish=True, topk_idx=idx,
    topk_weights=weights, previous_event=previous)
event.current_stream_wait()
again, _, _, _, _, event = buffer.dispatch(x=x, handle=handle, config=Config(24, 8, 256),
    async_finish=False)
out, out_weights, event = buffer.combine(x=recv, handle=handle, config=Config(24, 8, 256),
    async_finish=False, topk_weights=recv_weights)
{DISPATCHED} = buffer.dispatch(x=x, num_tokens_per_rank=per_rank, is_token_in_rank=is_in,
    num_tokens_per_expert=per_expert, config=Config(24, 8, 256), async_finish=False)
out, none, event = buffer.combine(x=recv, handle=handle)
"""),
    Caller("DeepEP's test of low latency", "tests/test_low_latency.py", "058d696b", """
hint = Buffer.get_low_latency_rdma_size_hint(most, hidden, size, experts)
buffer = Buffer(group, num_rdma_bytes=hint, low_latency_mode=True, num_qps_per_rank=experts // size,
                allow_nvlink_for_low_latency_mode=True)
(recv, scales), counts, handle, event, hook = buffer.low_latency_dispatch(x, idx, most, experts,
    use_fp8=True, round_scale=False, use_ue8m0=False, cumulative_local_expert_recv_stats=stats,
    async_finish=True, return_recv_hook=False)
event.current_stream_wait()
rows = buffer.get_next_low_latency_combine_buffer(handle)
out, event, hook = buffer.low_latency_combine(dequantise(recv, scales), idx, weights, handle,
    use_logfmt=False, async_finish=False, zero_copy=False, return_recv_hook=True, out=output)
hook()
buffer.destroy()
"""),
)  # fmt: skip

# What programs import, and what they make of it.
_UTILS = "from deep_ep import Buffer\nfrom deep_ep.utils import EventHandle, EventOverlap"
IMPORTS = {
    "vLLM": ("import deep_ep", "deep_ep.Buffer, deep_ep.Config, deep_ep.EventOverlap"),
    "SGLang": ("from deep_ep import Buffer, Config", "Buffer.num_sms"),
    "Megatron-LM": (_UTILS, "Buffer, EventOverlap(EventHandle())"),
    "torchtitan": (_UTILS, "EventOverlap(EventHandle())"),
    "DeepEP's tests": ("import deep_ep", "deep_ep.Config(24, 8, 256), deep_ep.topk_idx_t"),
    "others": (
        "from deep_ep.buffer import Buffer, EventOverlap\nfrom deep_ep_cpp import EventHandle",
        "EventOverlap(EventHandle())",
    ),
}
