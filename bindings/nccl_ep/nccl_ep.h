/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BINDINGS_NCCL_EP_NCCL_EP_H
#define BINDINGS_NCCL_EP_NCCL_EP_H

/**
 * The C interface of NCCL EP 0.2.0, as libnccl_ep.so.0 exports it: names, numbers and the layout of
 * structs. Two libraries have that version: one with NCCL_EP_API_VERSION 2 and one with 3, which
 * has more fields and numbers. This is the interface of both. docs/drop_in.md says what each call
 * does here.
 *
 * Programs are compiled against NCCL EP's own header; this one serves the library and its tests. It
 * needs no other header: NCCL's and CUDA's handles are pointers to the structs that their headers
 * name, and enums of theirs are int.
 *
 * A struct begins with its size and a magic number. Structs grow at the end, so a caller may pass a
 * smaller or a larger one. The ..._V1 sizes are the smallest.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NCCL_EP_MAGIC 0xC00FFFEEu
#define NCCL_EP_TENSOR_MAGIC 0xCAFECAFEu

/** major * 10000 + minor * 100 + patch. Callers look at the major number. The patch level tells
 *  this library from NVIDIA's, whose last one is 0.2.0. */
#define NCCL_EP_VERSION 290

/** An ncclResult_t. */
enum NcclResult {
    NCCL_SUCCESS = 0,
    NCCL_SYSTEM_ERROR = 2,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_INVALID_USAGE = 5,
    NCCL_REMOTE_ERROR = 6
};

/** An ncclDataType_t. */
enum NcclType {
    NCCL_INT8 = 0,
    NCCL_UINT8 = 1,
    NCCL_INT32 = 2,
    NCCL_INT64 = 4,
    NCCL_FLOAT16 = 6,
    NCCL_FLOAT32 = 7,
    NCCL_BFLOAT16 = 9,
    NCCL_FLOAT8_E4M3 = 10,
    NCCL_FLOAT8_E5M2 = 11,
    NCCL_FLOAT4X2 = 12 /**< a byte with two numbers of four bits */
};

enum NcclEpAlgorithm { NCCL_EP_ALGO_LOW_LATENCY = 0, NCCL_EP_ALGO_HIGH_THROUGHPUT = 1 };
enum NcclEpOverflow { NCCL_EP_OVERFLOW_AUTO, NCCL_EP_OVERFLOW_TRAP, NCCL_EP_OVERFLOW_DROP };
enum NcclEpLayout {
    NCCL_EP_LAYOUT_UNSET,
    NCCL_EP_LAYOUT_EXPERT_MAJOR,
    NCCL_EP_LAYOUT_RANK_MAJOR,
    NCCL_EP_LAYOUT_FLAT
};
enum NcclEpPass { NCCL_EP_FWD_PASS, NCCL_EP_BWD_PASS };
enum NcclEpZeroCopy { NCCL_EP_ZERO_COPY_AUTO, NCCL_EP_ZERO_COPY_OFF, NCCL_EP_ZERO_COPY_ON };
enum NcclEpExpertIds { NCCL_EP_EXPERT_ID_AUTO, NCCL_EP_EXPERT_ID_LOCAL, NCCL_EP_EXPERT_ID_GLOBAL };
enum NcclEpDispatchQuant {
    NCCL_EP_DISP_QUANT_NONE,
    NCCL_EP_DISP_QUANT_FWD,       /**< the caller's scales travel with the rows */
    NCCL_EP_DISP_QUANT_DS_FP8E3M4 /**< dispatch makes E4M3 and a scale for 128 elements */
};
enum NcclEpCombineQuant {
    NCCL_EP_COMB_QUANT_NONE,
    NCCL_EP_COMB_QUANT_NVFP4,
    NCCL_EP_COMB_QUANT_MXFP8 /**< version 3: sums travel in fp8 */
};

struct ncclComm;
struct ncclWindow_vidmem;

typedef struct ncclEpGroup *ncclEpGroup_t;
typedef struct ncclEpHandle *ncclEpHandle_t;

typedef struct ncclEpTensor {
    unsigned size, magic;
    unsigned ndim;
    int datatype;
    void *data; /**< or NULL: win_offset bytes behind the start of win_hdl */
    struct ncclWindow_vidmem *win_hdl;
    uint64_t win_offset;
    size_t *sizes; /**< [ndim] */
} ncclEpTensor_t;

typedef struct {
    unsigned size, magic;
} ncclEpTensorAllocConfig_t;

/** Return a cudaError_t. */
typedef int (*ncclEpAllocFn_t)(void **memory, size_t bytes, void *context);
typedef int (*ncclEpFreeFn_t)(void *memory, void *context);

typedef struct {
    ncclEpAllocFn_t alloc_fn;
    ncclEpFreeFn_t free_fn;
    void *context;
} ncclEpAllocConfig_t;

/* Numbers are 0 for "automatic" where they may be. */
typedef struct {
    unsigned size, magic, version;
    int algorithm;
    unsigned num_experts;
    unsigned max_dispatch_tokens_per_rank;
    unsigned max_recv_tokens_per_rank; /**< 0: tensors fit the number that arrives */
    unsigned max_token_bytes;
    unsigned long rdma_buffer_size;
    unsigned num_qp_per_rank, num_channels;
    unsigned max_num_sms;
    ncclEpAllocConfig_t alloc;
    unsigned enable_mask;
    uint64_t timeout_ns;
    /* version 2 */
    int zero_copy;
    int overflow_policy;
    unsigned num_topk;
    unsigned char padding_v2[4];
    /* version 3 */
    unsigned dispatch_num_sms, combine_num_sms; /**< 0: max_num_sms */
} ncclEpGroupConfig_t;

#define NCCL_EP_GROUP_CONFIG_V1 96
#define NCCL_EP_GROUP_CONFIG_V2 112

typedef struct {
    unsigned size, magic;
    ncclEpTensor_t *expert_counters;
    ncclEpTensor_t *src_rank_counters;
    ncclEpTensor_t *expert_offsets;
    ncclEpTensor_t *recv_total_counter;
    int recv_topk_idx_kind; /**< version 2 */
    unsigned char padding_v2[4];
} ncclEpLayoutInfo_t;

#define NCCL_EP_LAYOUT_INFO_V1 40

typedef struct {
    unsigned size, magic;
    ncclEpTensor_t *tokens, *topk_weights, *scales;
} ncclEpDispatchInputs_t;

#define NCCL_EP_DISPATCH_INPUTS_V1 32

typedef struct {
    unsigned size, magic;
    ncclEpTensor_t *tokens, *topk_weights, *scales, *topk_idx;
} ncclEpDispatchOutputs_t;

#define NCCL_EP_DISPATCH_OUTPUTS_V1 40

typedef struct {
    unsigned size, magic;
    ncclEpTensor_t *tokens, *topk_weights;
    ncclEpTensor_t *scales; /**< version 2 */
} ncclEpCombineInputs_t;

#define NCCL_EP_COMBINE_INPUTS_V1 24

typedef struct {
    unsigned size, magic;
    ncclEpTensor_t *tokens, *topk_weights;
} ncclEpCombineOutputs_t;

#define NCCL_EP_COMBINE_OUTPUTS_V1 24

typedef struct {
    unsigned size, magic;
    size_t dispatch_output_per_expert_alignment; /**< 0 or 1: none */
} ncclEpHandleConfig_t;

#define NCCL_EP_HANDLE_CONFIG_V1 16

typedef struct {
    unsigned size, magic;
    unsigned send_only, round_scales;
    int pass_direction;
    int quant_recipe; /**< version 2 */
} ncclEpDispatchConfig_t;

#define NCCL_EP_DISPATCH_CONFIG_V1 20

typedef struct {
    unsigned size, magic;
    unsigned send_only;
    int pass_direction;
    int quant_recipe; /**< version 2 */
} ncclEpCombineConfig_t;

#define NCCL_EP_COMBINE_CONFIG_V1 16

typedef struct ncclEpCompleteConfig {
    unsigned size, magic;
} ncclEpCompleteConfig_t;

/* All functions return an ncclResult_t. A stream is a cudaStream_t. */

int ncclEpGetVersion(int *version);

int ncclEpTensorAlloc(ncclEpTensor_t **tensor, unsigned ndim, int datatype, const size_t *sizes,
                      const ncclEpTensorAllocConfig_t *config);
int ncclEpTensorDestroy(ncclEpTensor_t *tensor);

int ncclEpCreateGroup(ncclEpGroup_t *group, struct ncclComm *comm,
                      const ncclEpGroupConfig_t *config);
int ncclEpGroupDestroy(ncclEpGroup_t group);

int ncclEpHandleMemSize(ncclEpGroup_t group, int layout, const ncclEpHandleConfig_t *config,
                        size_t *bytes, int num_topk);
int ncclEpInitHandle(ncclEpHandle_t *handle, ncclEpGroup_t group, int layout,
                     const ncclEpHandleConfig_t *config, int num_topk,
                     const ncclEpTensor_t *handle_mem);
int ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t *topk_idx,
                       const ncclEpLayoutInfo_t *layout_info, void *stream);
int ncclEpCreateHandle(ncclEpHandle_t *handle, ncclEpGroup_t group, int layout,
                       const ncclEpTensor_t *topk_idx, const ncclEpLayoutInfo_t *layout_info,
                       const ncclEpHandleConfig_t *config, void *stream);
int ncclEpHandleDestroy(ncclEpHandle_t handle);

int ncclEpDispatch(ncclEpHandle_t handle, const ncclEpDispatchInputs_t *inputs,
                   const ncclEpDispatchOutputs_t *outputs, const ncclEpLayoutInfo_t *layout_info,
                   const ncclEpDispatchConfig_t *config, void *stream);
int ncclEpCombine(ncclEpHandle_t handle, const ncclEpCombineInputs_t *inputs,
                  const ncclEpCombineOutputs_t *outputs, const ncclEpCombineConfig_t *config,
                  void *stream);
int ncclEpComplete(ncclEpHandle_t handle, const ncclEpCompleteConfig_t *config, void *stream);

int ncclEpMaskQuery(ncclEpGroup_t group, int *mask_status, void *stream);
int ncclEpMaskUpdate(ncclEpGroup_t group, const int *mask, void *stream);
int ncclEpMaskClean(ncclEpGroup_t group, void *stream);
int ncclEpGetAsyncError(ncclEpGroup_t group, int *error);
int ncclEpErrorClear(ncclEpGroup_t group);

#ifdef __cplusplus
}
#endif

#endif
