/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prints the layout of NCCL EP's structs and its numbers, from libep's header as far as API version
 * -DAPI goes, or, with -DTHEIRS, from NVIDIA's. tests/bindings/nccl_ep/compare compares the two.
 */
#include <stddef.h>
#include <stdio.h>

#ifdef THEIRS
#include "nccl_ep.h"
#else
#include "bindings/nccl_ep/nccl_ep.h"
#define NCCL_EP_API_VERSION API
#endif

#define SIZE(type) printf(#type " %zu\n", sizeof(type))
#define FIELD(type, field) \
    printf(#type "." #field " %zu +%zu\n", offsetof(type, field), sizeof(((type *)0)->field))
#define NUMBER(name) printf(#name " %lld\n", (long long)(name))

static void print_structs(void) {
    SIZE(ncclEpTensor_t);
    FIELD(ncclEpTensor_t, size);
    FIELD(ncclEpTensor_t, magic);
    FIELD(ncclEpTensor_t, ndim);
    FIELD(ncclEpTensor_t, datatype);
    FIELD(ncclEpTensor_t, data);
    FIELD(ncclEpTensor_t, win_hdl);
    FIELD(ncclEpTensor_t, win_offset);
    FIELD(ncclEpTensor_t, sizes);
    SIZE(ncclEpTensorAllocConfig_t);
    SIZE(ncclEpAllocConfig_t);
    FIELD(ncclEpAllocConfig_t, alloc_fn);
    FIELD(ncclEpAllocConfig_t, free_fn);
    FIELD(ncclEpAllocConfig_t, context);
    SIZE(ncclEpLayoutInfo_t);
    FIELD(ncclEpLayoutInfo_t, expert_counters);
    FIELD(ncclEpLayoutInfo_t, src_rank_counters);
    FIELD(ncclEpLayoutInfo_t, expert_offsets);
    FIELD(ncclEpLayoutInfo_t, recv_total_counter);
    FIELD(ncclEpLayoutInfo_t, recv_topk_idx_kind);
    FIELD(ncclEpLayoutInfo_t, padding_v2);
}

/* Version 2 of the struct is the first part of ours. */
static void print_group_config_size(void) {
#if NCCL_EP_API_VERSION >= 3
    SIZE(ncclEpGroupConfig_t);
    FIELD(ncclEpGroupConfig_t, dispatch_num_sms);
    FIELD(ncclEpGroupConfig_t, combine_num_sms);
#elif defined(THEIRS)
    SIZE(ncclEpGroupConfig_t);
#else
    printf("ncclEpGroupConfig_t %d\n", NCCL_EP_GROUP_CONFIG_V2);
#endif
}

static void print_group_config(void) {
    print_group_config_size();
    FIELD(ncclEpGroupConfig_t, version);
    FIELD(ncclEpGroupConfig_t, algorithm);
    FIELD(ncclEpGroupConfig_t, num_experts);
    FIELD(ncclEpGroupConfig_t, max_dispatch_tokens_per_rank);
    FIELD(ncclEpGroupConfig_t, max_recv_tokens_per_rank);
    FIELD(ncclEpGroupConfig_t, max_token_bytes);
    FIELD(ncclEpGroupConfig_t, rdma_buffer_size);
    FIELD(ncclEpGroupConfig_t, num_qp_per_rank);
    FIELD(ncclEpGroupConfig_t, num_channels);
    FIELD(ncclEpGroupConfig_t, max_num_sms);
    FIELD(ncclEpGroupConfig_t, alloc);
    FIELD(ncclEpGroupConfig_t, enable_mask);
    FIELD(ncclEpGroupConfig_t, timeout_ns);
    FIELD(ncclEpGroupConfig_t, zero_copy);
    FIELD(ncclEpGroupConfig_t, overflow_policy);
    FIELD(ncclEpGroupConfig_t, num_topk);
    FIELD(ncclEpGroupConfig_t, padding_v2);
}

static void print_arguments(void) {
    SIZE(ncclEpDispatchInputs_t);
    FIELD(ncclEpDispatchInputs_t, tokens);
    FIELD(ncclEpDispatchInputs_t, topk_weights);
    FIELD(ncclEpDispatchInputs_t, scales);
    SIZE(ncclEpDispatchOutputs_t);
    FIELD(ncclEpDispatchOutputs_t, tokens);
    FIELD(ncclEpDispatchOutputs_t, topk_weights);
    FIELD(ncclEpDispatchOutputs_t, scales);
    FIELD(ncclEpDispatchOutputs_t, topk_idx);
    SIZE(ncclEpCombineInputs_t);
    FIELD(ncclEpCombineInputs_t, tokens);
    FIELD(ncclEpCombineInputs_t, topk_weights);
    FIELD(ncclEpCombineInputs_t, scales);
    SIZE(ncclEpCombineOutputs_t);
    FIELD(ncclEpCombineOutputs_t, tokens);
    FIELD(ncclEpCombineOutputs_t, topk_weights);
    SIZE(ncclEpHandleConfig_t);
    FIELD(ncclEpHandleConfig_t, dispatch_output_per_expert_alignment);
    SIZE(ncclEpDispatchConfig_t);
    FIELD(ncclEpDispatchConfig_t, send_only);
    FIELD(ncclEpDispatchConfig_t, round_scales);
    FIELD(ncclEpDispatchConfig_t, pass_direction);
    FIELD(ncclEpDispatchConfig_t, quant_recipe);
    SIZE(ncclEpCombineConfig_t);
    FIELD(ncclEpCombineConfig_t, send_only);
    FIELD(ncclEpCombineConfig_t, pass_direction);
    FIELD(ncclEpCombineConfig_t, quant_recipe);
    SIZE(ncclEpCompleteConfig_t);
}

#ifndef THEIRS
#define NCCL_EP_GROUP_CONFIG_V1_SIZE NCCL_EP_GROUP_CONFIG_V1
#define NCCL_EP_LAYOUT_INFO_V1_SIZE NCCL_EP_LAYOUT_INFO_V1
#define NCCL_EP_DISPATCH_INPUTS_V1_SIZE NCCL_EP_DISPATCH_INPUTS_V1
#define NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE NCCL_EP_DISPATCH_OUTPUTS_V1
#define NCCL_EP_COMBINE_INPUTS_V1_SIZE NCCL_EP_COMBINE_INPUTS_V1
#define NCCL_EP_COMBINE_OUTPUTS_V1_SIZE NCCL_EP_COMBINE_OUTPUTS_V1
#define NCCL_EP_HANDLE_CONFIG_V1_SIZE NCCL_EP_HANDLE_CONFIG_V1
#define NCCL_EP_DISPATCH_CONFIG_V1_SIZE NCCL_EP_DISPATCH_CONFIG_V1
#define NCCL_EP_COMBINE_CONFIG_V1_SIZE NCCL_EP_COMBINE_CONFIG_V1
#endif

static void print_numbers(void) {
    NUMBER(NCCL_EP_API_VERSION);
    NUMBER(NCCL_EP_MAGIC);
    NUMBER(NCCL_EP_TENSOR_MAGIC);
    NUMBER(NCCL_EP_GROUP_CONFIG_V1_SIZE);
    NUMBER(NCCL_EP_LAYOUT_INFO_V1_SIZE);
    NUMBER(NCCL_EP_DISPATCH_INPUTS_V1_SIZE);
    NUMBER(NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE);
    NUMBER(NCCL_EP_COMBINE_INPUTS_V1_SIZE);
    NUMBER(NCCL_EP_COMBINE_OUTPUTS_V1_SIZE);
    NUMBER(NCCL_EP_HANDLE_CONFIG_V1_SIZE);
    NUMBER(NCCL_EP_DISPATCH_CONFIG_V1_SIZE);
    NUMBER(NCCL_EP_COMBINE_CONFIG_V1_SIZE);
    NUMBER(NCCL_EP_ALGO_LOW_LATENCY);
    NUMBER(NCCL_EP_ALGO_HIGH_THROUGHPUT);
    NUMBER(NCCL_EP_OVERFLOW_AUTO);
    NUMBER(NCCL_EP_OVERFLOW_TRAP);
    NUMBER(NCCL_EP_OVERFLOW_DROP);
    NUMBER(NCCL_EP_LAYOUT_UNSET);
    NUMBER(NCCL_EP_LAYOUT_EXPERT_MAJOR);
    NUMBER(NCCL_EP_LAYOUT_RANK_MAJOR);
    NUMBER(NCCL_EP_LAYOUT_FLAT);
    NUMBER(NCCL_EP_FWD_PASS);
    NUMBER(NCCL_EP_BWD_PASS);
    NUMBER(NCCL_EP_ZERO_COPY_AUTO);
    NUMBER(NCCL_EP_ZERO_COPY_OFF);
    NUMBER(NCCL_EP_ZERO_COPY_ON);
    NUMBER(NCCL_EP_EXPERT_ID_AUTO);
    NUMBER(NCCL_EP_EXPERT_ID_LOCAL);
    NUMBER(NCCL_EP_EXPERT_ID_GLOBAL);
    NUMBER(NCCL_EP_DISP_QUANT_NONE);
    NUMBER(NCCL_EP_DISP_QUANT_FWD);
    NUMBER(NCCL_EP_DISP_QUANT_DS_FP8E3M4);
    NUMBER(NCCL_EP_COMB_QUANT_NONE);
    NUMBER(NCCL_EP_COMB_QUANT_NVFP4);
#if NCCL_EP_API_VERSION >= 3
    NUMBER(NCCL_EP_COMB_QUANT_MXFP8);
#endif
}

int main(void) {
    print_structs();
    print_group_config();
    print_arguments();
    print_numbers();
    return 0;
}
