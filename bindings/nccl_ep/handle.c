/* SPDX-License-Identifier: Apache-2.0 */
/* Handles: a plan, and the EpHandle that reads it. */
#include <stdlib.h>
#include <string.h>

#include "bindings/nccl_ep/adapter.h"

#define HANDLE_MAGIC 0x4e455048u
#define PLAN_ALIGNMENT 64

int nep_check_handle(const char *call, ncclEpHandle_t handle) {
    if (!handle || handle->magic != HANDLE_MAGIC)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "handle: expected a live handle, got %s",
                        handle ? "another pointer" : "NULL");
    if (handle->group) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_USAGE, "handle: expected a live group, got a destroyed one");
}

/* ---- configuration ------------------------------------------------------------------------- */

static int check_layout(const char *call, const struct ncclEpGroup *group, int layout) {
    int low_latency = nep_is_low_latency(group);
    if (layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ||
        layout == (low_latency ? NCCL_EP_LAYOUT_RANK_MAJOR : NCCL_EP_LAYOUT_FLAT))
        return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_ARGUMENT, "layout: expected %s, got %d",
                    low_latency ? "1 (expert-major) or 2 (rank-major) in low-latency mode"
                                : "1 (expert-major) or 3 (flat) in high-throughput mode",
                    layout);
}

/* Rows that no token fills: where tensors have a fixed size, a caller may tell them by their expert
 * ids, and with DROP by their zeros. */
static int32_t tail_of(const struct ncclEpGroup *group, EpLayout layout) {
    int is_fixed = nep_is_low_latency(group) || group->config.max_recv_tokens_per_rank;
    if (layout == EP_LAYOUT_FLAT || layout == EP_LAYOUT_RANK_MAJOR)
        return is_fixed ? EP_TAIL_IDS : EP_TAIL_KEEP;
    int drops = group->config.overflow_policy == NCCL_EP_OVERFLOW_DROP;
    return drops && !nep_is_low_latency(group) ? EP_TAIL_ZERO : EP_TAIL_KEEP;
}

static EpHandleConfig describe(const struct ncclEpGroup *group, int layout, size_t alignment,
                               int num_topk) {
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    int low_latency = nep_is_low_latency(group);
    config.layout = layout == NCCL_EP_LAYOUT_FLAT         ? EP_LAYOUT_FLAT
                    : layout == NCCL_EP_LAYOUT_RANK_MAJOR ? EP_LAYOUT_RANK_MAJOR
                    : low_latency                         ? EP_LAYOUT_BATCHED
                                                          : EP_LAYOUT_EXPERT_MAJOR;
    if (config.layout == EP_LAYOUT_BATCHED)
        config.rows_per_expert = (int64_t)group->size * group->config.max_dispatch_tokens_per_rank;
    if (config.layout == EP_LAYOUT_EXPERT_MAJOR)
        config.alignment = (int32_t)(alignment > 1 ? alignment : 1);
    if (num_topk > 0) config.top_k = num_topk;
    config.zero_tail = tail_of(group, config.layout);
    if (config.layout == EP_LAYOUT_RANK_MAJOR) config.row_weights = EP_WEIGHTS_ALL;
    config.plans = EP_PLANS_NAMED;
    return config;
}

/* Check what a handle is made from, and read its alignment. */
static int read_config(const char *call, const struct ncclEpGroup *group, int layout,
                       const ncclEpHandleConfig_t *config, int num_topk, size_t *alignment) {
    ncclEpHandleConfig_t read;
    NEP_TRY(NEP_READ(call, config, 1, NCCL_EP_HANDLE_CONFIG_V1, &read));
    NEP_TRY(check_layout(call, group, layout));
    if (num_topk <= 0 && nep_is_low_latency(group))
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "num_topk: expected at least 1 in low-latency mode, got %d", num_topk);
    if (group->config.num_topk && num_topk > (int)group->config.num_topk)
        return nep_fail(call, NCCL_INVALID_USAGE,
                        "num_topk: expected at most %u (the group's num_topk), got %d",
                        group->config.num_topk, num_topk);
    if (read.dispatch_output_per_expert_alignment > INT32_MAX)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "config.dispatch_output_per_expert_alignment: expected at most %d, got %zu",
                        INT32_MAX, read.dispatch_output_per_expert_alignment);
    *alignment = read.dispatch_output_per_expert_alignment;
    return NCCL_SUCCESS;
}

int ncclEpHandleMemSize(ncclEpGroup_t group, int layout, const ncclEpHandleConfig_t *config,
                        size_t *bytes, int num_topk) {
    const char *call = "ncclEpHandleMemSize";
    size_t alignment = 0;
    NEP_TRY(nep_check_group(call, group));
    NEP_TRY(read_config(call, group, layout, config, num_topk, &alignment));
    EpHandleConfig c = describe(group, layout, alignment, num_topk);
    if (!bytes)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "size_out: expected a pointer, got NULL");
    return nep_result(call, ep_handle_memory(group->ep, &c, bytes));
}

/* ---- the plan's memory ---------------------------------------------------------------------- */

/* Memory that the library owns comes from the caller's allocator, or else from libep's handle. */
static int make_plan(const char *call, ncclEpHandle_t handle, const EpHandleConfig *config) {
    ncclEpGroup_t group = handle->group;
    const ncclEpAllocConfig_t *alloc = &group->config.alloc;
    size_t bytes;
    if (!alloc->alloc_fn) {
        EpHandleConfig owned = *config;
        owned.plans = EP_PLANS_OWNED;
        NEP_TRY(nep_result(call, ep_handle_create(group->ep, &owned, &handle->owner)));
        return nep_result(call, ep_handle_plan(handle->owner, &handle->plan));
    }
    NEP_TRY(nep_result(call, ep_handle_memory(group->ep, config, &bytes)));
    int error = alloc->alloc_fn(&handle->allocated, bytes, alloc->context);
    if (error || !handle->allocated)
        return nep_fail(call, NCCL_SYSTEM_ERROR,
                        "config.alloc.alloc_fn: expected %zu bytes, got error %d", bytes, error);
    handle->plan = ep_tensor_1d(handle->allocated, EP_TYPE_UINT8, (int64_t)bytes);
    return NCCL_SUCCESS;
}

static int take_plan(const char *call, ncclEpHandle_t handle, const ncclEpTensor_t *memory,
                     const EpHandleConfig *config) {
    const EpTensor *plan;
    size_t bytes;
    NEP_TRY(nep_tensor(call, handle->group, "handle_mem", memory, NEP_PLAIN, &handle->plan, &plan));
    NEP_TRY(nep_result(call, ep_handle_memory(handle->group->ep, config, &bytes)));
    if (plan->ndim != 1 || plan->type != EP_TYPE_UINT8 || plan->shape[0] < (int64_t)bytes)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "handle_mem: expected at least %zu elements of UINT8 in one dimension "
                        "(ncclEpHandleMemSize), got %lld of ncclDataType_t %d in %d",
                        bytes, (long long)plan->shape[0], memory->datatype, plan->ndim);
    if (!plan->data || (uintptr_t)plan->data % PLAN_ALIGNMENT)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "handle_mem: expected memory on a multiple of %d, got %p", PLAN_ALIGNMENT,
                        plan->data);
    return NCCL_SUCCESS;
}

/* ---- the reader ----------------------------------------------------------------------------- */

/* Replace the EpHandle that reads the plan. */
static int open_reader(const char *call, ncclEpHandle_t handle, NepReader reader) {
    EpHandleConfig config =
        describe(handle->group, handle->layout, handle->alignment, handle->num_topk);
    EpHandle *made;
    config.quant = reader.quant, config.sum_quant = reader.sum_quant;
    config.expert_ids = reader.ids, config.num_sms = reader.num_sms;
    NEP_TRY(nep_result(call, ep_handle_create(handle->group->ep, &config, &made)));
    ep_handle_destroy(handle->ep);
    handle->ep = made, handle->reader = reader;
    return NCCL_SUCCESS;
}

int nep_check_open(const char *call, const struct ncclEpHandle *handle) {
    if (handle->ep) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_USAGE,
                    "handle: expected ncclEpUpdateHandle first, since ncclEpInitHandle was not "
                    "given num_topk, got none");
}

int nep_select(const char *call, ncclEpHandle_t handle, NepReader reader) {
    const NepReader *now = &handle->reader;
    int is_same = now->quant == reader.quant && now->sum_quant == reader.sum_quant &&
                  now->ids == reader.ids && now->num_sms == reader.num_sms;
    return is_same ? NCCL_SUCCESS : open_reader(call, handle, reader);
}

/* ---- life ---------------------------------------------------------------------------------- */

/* Leave the handle as if num_topk were not known. */
static void close_handle(ncclEpHandle_t handle) {
    const ncclEpAllocConfig_t *alloc = &handle->group->config.alloc;
    ep_handle_destroy(handle->ep);
    ep_handle_destroy(handle->owner);
    if (handle->allocated && alloc->free_fn) alloc->free_fn(handle->allocated, alloc->context);
    handle->ep = handle->owner = NULL, handle->allocated = NULL, handle->num_topk = 0;
}

static int open_parts(const char *call, ncclEpHandle_t handle, const ncclEpTensor_t *memory) {
    const struct ncclEpGroup *group = handle->group;
    EpHandleConfig config = describe(group, handle->layout, handle->alignment, handle->num_topk);
    NepReader reader = {EP_QUANT_NONE, EP_QUANT_NONE, EP_IDS_LOCAL,
                        nep_num_sms(group, group->config.dispatch_num_sms)};
    NEP_TRY(open_reader(call, handle, reader));
    return memory ? take_plan(call, handle, memory, &config) : make_plan(call, handle, &config);
}

static int open_handle(const char *call, ncclEpHandle_t handle, int num_topk,
                       const ncclEpTensor_t *memory) {
    handle->num_topk = num_topk;
    int result = open_parts(call, handle, memory);
    if (result != NCCL_SUCCESS) close_handle(handle);
    return result;
}

/* Make a handle that belongs to no group's list. */
static int new_handle(const char *call, ncclEpGroup_t group, int layout, size_t alignment,
                      ncclEpHandle_t *out) {
    *out = calloc(1, sizeof(**out));
    if (!*out) return nep_fail(call, NCCL_SYSTEM_ERROR, "out of memory");
    **out = (struct ncclEpHandle){
        .magic = HANDLE_MAGIC, .group = group, .layout = layout, .alignment = alignment};
    return NCCL_SUCCESS;
}

static void link_handle(ncclEpHandle_t handle) {
    handle->next = handle->group->handles;
    if (handle->next) handle->next->previous = handle;
    handle->group->handles = handle;
}

void nep_orphan(ncclEpHandle_t handle) {
    ncclEpGroup_t group = handle->group;
    close_handle(handle);
    if (handle->previous)
        handle->previous->next = handle->next;
    else if (group->handles == handle)
        group->handles = handle->next;
    if (handle->next) handle->next->previous = handle->previous;
    handle->group = NULL;
}

/* Give the caller a handle that was made, or free it. */
static int deliver(ncclEpHandle_t handle, int result, ncclEpHandle_t *out) {
    if (result != NCCL_SUCCESS) {
        close_handle(handle);
        free(handle);
        return result;
    }
    link_handle(handle);
    *out = handle;
    return NCCL_SUCCESS;
}

/* Without num_topk the plan's size is not known, so ncclEpUpdateHandle opens the handle. Memory of
 * the caller's may hold a plan already: then num_topk must be given. */
int ncclEpInitHandle(ncclEpHandle_t *out, ncclEpGroup_t group, int layout,
                     const ncclEpHandleConfig_t *config, int num_topk,
                     const ncclEpTensor_t *handle_mem) {
    const char *call = "ncclEpInitHandle";
    size_t alignment = 0;
    NEP_TRY(nep_check_group(call, group));
    if (!out) return nep_fail(call, NCCL_INVALID_ARGUMENT, "handle: expected a pointer, got NULL");
    NEP_TRY(read_config(call, group, layout, config, num_topk, &alignment));
    if (handle_mem && num_topk <= 0)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "num_topk: expected at least 1 with handle_mem, got %d", num_topk);
    ncclEpHandle_t handle;
    NEP_TRY(new_handle(call, group, layout, alignment, &handle));
    int result = num_topk > 0 ? open_handle(call, handle, num_topk, handle_mem) : NCCL_SUCCESS;
    return deliver(handle, result, out);
}

int ncclEpHandleDestroy(ncclEpHandle_t handle) {
    if (!handle) return NCCL_SUCCESS;
    if (handle->magic != HANDLE_MAGIC)
        return nep_fail("ncclEpHandleDestroy", NCCL_INVALID_ARGUMENT,
                        "handle: expected a live handle, got another pointer");
    if (handle->group) nep_orphan(handle);
    handle->magic = 0;
    free(handle);
    return NCCL_SUCCESS;
}

/* ---- routing ------------------------------------------------------------------------------- */

static int read_routing(const char *call, ncclEpGroup_t group, const ncclEpTensor_t *topk_idx,
                        EpTensor *idx) {
    const EpTensor *given;
    NEP_TRY(nep_tensor(call, group, "topk_idx", topk_idx, NEP_PLAIN, idx, &given));
    if (!given)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "topk_idx: expected a tensor, got NULL");
    if (idx->ndim != 2 || (idx->type != EP_TYPE_INT32 && idx->type != EP_TYPE_INT64))
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "topk_idx: expected INT32 or INT64 in 2 dimensions, got ncclDataType_t %d "
                        "in %d",
                        topk_idx->datatype, idx->ndim);
    if (idx->shape[0] <= group->config.max_dispatch_tokens_per_rank) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_ARGUMENT,
                    "topk_idx: expected at most max_dispatch_tokens_per_rank = %u tokens, got %lld",
                    group->config.max_dispatch_tokens_per_rank, (long long)idx->shape[0]);
}

static int check_routing(const char *call, const struct ncclEpHandle *handle, const EpTensor *idx,
                         const ncclEpLayoutInfo_t *info) {
    if (handle->num_topk && idx->shape[1] != handle->num_topk)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "topk_idx: expected %d columns (the handle's num_topk), got %lld",
                        handle->num_topk, (long long)idx->shape[1]);
    if (!info || !nep_is_low_latency(handle->group)) return NCCL_SUCCESS;
    return nep_fail(
        call, NCCL_INVALID_ARGUMENT,
        "layout_info: expected NULL in low-latency mode, where ncclEpDispatch takes it, "
        "got a struct");
}

/* With exact sizes a plan in libep's memory reports its rows to the host. (On several nodes all
 * ranks would have to have theirs there.) */
static int reports_rows(const struct ncclEpHandle *handle) {
    const struct ncclEpGroup *group = handle->group;
    return handle->owner && !nep_is_low_latency(group) && group->num_nodes == 1 &&
           !group->config.max_recv_tokens_per_rank;
}

/* Returns 0 while no plan is complete. */
static int64_t plans_made(const struct ncclEpHandle *handle, EpHandleInfo *info) {
    *info = (EpHandleInfo)EP_HANDLE_INFO_INIT;
    return ep_handle_info(handle->owner, info) == EP_OK ? info->step : 0;
}

/* A captured routing makes no plan before its graph runs. */
int64_t nep_known_rows(const struct ncclEpHandle *handle) {
    EpHandleInfo info;
    if (!reports_rows(handle) || !handle->has_routing) return -1;
    return plans_made(handle, &info) > handle->made ? info.recv_rows : -1;
}

static int prepare(const char *call, ncclEpHandle_t handle, const EpTensor *idx,
                   const EpPlanTensors *out, void *stream) {
    EpHandleInfo info;
    if (!reports_rows(handle))
        return nep_result(call, ep_prepare(handle->ep, &handle->plan, idx, NULL, stream, out));
    int64_t made = plans_made(handle, &info);
    NEP_TRY(nep_result(call, ep_prepare(handle->owner, NULL, idx, NULL, stream, out)));
    handle->made = made;
    return NCCL_SUCCESS;
}

/* Make the plan, or in low-latency mode record the routing. All checks come before the handle
 * opens. */
static int update(const char *call, ncclEpHandle_t handle, const EpTensor *idx,
                  const ncclEpLayoutInfo_t *layout_info, void *stream) {
    ncclEpLayoutInfo_t info;
    NepNumbers numbers;
    int opens = !handle->ep, result = NCCL_SUCCESS;
    NEP_TRY(NEP_READ(call, layout_info, 1, NCCL_EP_LAYOUT_INFO_V1, &info));
    NEP_TRY(check_routing(call, handle, idx, layout_info));
    NEP_TRY(nep_numbers(call, handle, &info, &numbers));
    if (opens) NEP_TRY(open_handle(call, handle, (int)idx->shape[1], NULL));
    if (!nep_is_low_latency(handle->group))
        result = prepare(call, handle, idx, &numbers.out, stream);
    if (result == NCCL_SUCCESS)
        handle->topk_idx = *idx, handle->has_routing = 1;
    else if (opens)
        close_handle(handle);
    return result;
}

int ncclEpUpdateHandle(ncclEpHandle_t handle, const ncclEpTensor_t *topk_idx,
                       const ncclEpLayoutInfo_t *layout_info, void *stream) {
    const char *call = "ncclEpUpdateHandle";
    EpTensor idx;
    NEP_TRY(nep_check_handle(call, handle));
    NEP_TRY(read_routing(call, handle->group, topk_idx, &idx));
    NEP_TRY(update(call, handle, &idx, layout_info, stream));
    return nep_report(call, handle->group, NCCL_SUCCESS);
}

/* Reports nothing that GPUs have found: a later call does. This rank would be left without a
 * handle, and the others would wait for it. */
int ncclEpCreateHandle(ncclEpHandle_t *out, ncclEpGroup_t group, int layout,
                       const ncclEpTensor_t *topk_idx, const ncclEpLayoutInfo_t *layout_info,
                       const ncclEpHandleConfig_t *config, void *stream) {
    const char *call = "ncclEpCreateHandle";
    ncclEpHandle_t handle;
    EpTensor idx;
    size_t alignment = 0;
    NEP_TRY(nep_check_group(call, group));
    if (!out) return nep_fail(call, NCCL_INVALID_ARGUMENT, "handle: expected a pointer, got NULL");
    NEP_TRY(read_routing(call, group, topk_idx, &idx));
    NEP_TRY(read_config(call, group, layout, config, (int)idx.shape[1], &alignment));
    NEP_TRY(new_handle(call, group, layout, alignment, &handle));
    return deliver(handle, update(call, handle, &idx, layout_info, stream), out);
}
