/* SPDX-License-Identifier: Apache-2.0 */
/* The caller's structs, and tensors with their windows. */
#include <stdlib.h>
#include <string.h>

#include "bindings/nccl_ep/adapter.h"

/* Of tensors from ncclEpTensorAlloc, whose sizes follow the struct. */
#define ALLOCATED_MAGIC 0x45505445u

typedef struct AllocatedTensor {
    ncclEpTensor_t tensor;
    size_t sizes[];
} AllocatedTensor;

int nep_read(const char *call, const char *name, const void *given, int optional, size_t least,
             void *out, size_t bytes) {
    unsigned head[2] = {0, 0}; /* size and magic */
    memset(out, 0, bytes);
    if (!given && optional) return NCCL_SUCCESS;
    if (!given)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "%s: expected a struct, got NULL", name);
    memcpy(head, given, sizeof(head));
    if (head[1] != NCCL_EP_MAGIC)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "%s: expected a struct initialized with its NCCL_EP_..._INIT, got magic "
                        "0x%08x",
                        name, head[1]);
    if (head[0] < least)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "%s: expected at least %zu bytes, got %u",
                        name, least, head[0]);
    memcpy(out, given, head[0] < bytes ? head[0] : bytes);
    return NCCL_SUCCESS;
}

/* ---- windows ------------------------------------------------------------------------------- */

/* Returns the place of a window, or NULL. */
static NepWindow *find_window(ncclEpGroup_t group, const struct ncclWindow_vidmem *window) {
    for (int i = 0; i < group->num_windows; i++)
        if (group->windows[i].window == window) return &group->windows[i];
    return NULL;
}

/* Returns the place for a window that is met for the first time, or NULL: there is none left. */
static NepWindow *take_place(ncclEpGroup_t group) {
    NepWindow *free_place = find_window(group, NULL);
    if (free_place) return free_place;
    if (group->num_windows == EP_MAX_ADOPTED_WINDOWS) return NULL;
    return &group->windows[group->num_windows++];
}

static void forget(ncclEpGroup_t group, NepWindow *w) {
    if (w->bytes) ep_window_release(group->ep, w->memory);
    *w = (NepWindow){NULL, NULL, NULL, 0};
}

/* Forget windows whose memory a new one has taken over: the caller has ended them. */
static void forget_overlapping(ncclEpGroup_t group, const char *memory, size_t bytes) {
    for (int i = 0; i < group->num_windows; i++) {
        NepWindow *w = &group->windows[i];
        if (w->bytes && w->memory < memory + bytes && memory < w->memory + w->bytes)
            forget(group, w);
    }
}

/* Let peers write into a window, up to the end of its allocation or, where the window ends before
 * that, up to `used` bytes. Returns the bytes. If libep cannot let them, that is no error: rows are
 * staged, as in other memory. */
static size_t adopt(const struct ncclEpGroup *group, const NepWindow *w, size_t used) {
    const int id = EP_WINDOW_PAIRED;
    void *memory;
    size_t left;
    if (ep_window_locate(group->ep, w->window, &memory, &left) != EP_OK) return 0;
    if (ep_window_adopt(group->ep, w->window, id, w->memory, left) == EP_OK) return left;
    return ep_window_adopt(group->ep, w->window, id, w->memory, used) == EP_OK ? used : 0;
}

/* Let peers write into a window from its first use on. Without peer_pointer a new window could not
 * be told from an old one, so rows are staged. */
static void use_window(ncclEpGroup_t group, struct ncclWindow_vidmem *window, char *memory,
                       size_t used) {
    void *peer = NULL;
    int next = (group->rank + 1) % group->size;
    if (group->size == 1 || !group->peer_pointer) return;
    if (group->peer_pointer(window, 0, next, &peer) != NCCL_SUCCESS) return;
    NepWindow *w = find_window(group, window);
    if (w && w->memory == memory && w->peer == peer) return;
    if (w) forget(group, w);
    forget_overlapping(group, memory, used);
    w = take_place(group);
    if (!w) return;
    *w = (NepWindow){window, memory, peer, 0};
    w->bytes = adopt(group, w, used);
}

/* Set the address of a tensor in a window. Such a tensor may also come with its address. One of no
 * rows is in the window, too: this rank's rows go to the peers' parts. */
static int resolve(const char *call, ncclEpGroup_t group, const ncclEpTensor_t *given, NepUse use,
                   EpTensor *out) {
    void *memory = NULL;
    size_t bytes = ep_type_bytes(out->type);
    for (int i = 0; i < out->ndim; i++)
        bytes *= (size_t)out->shape[i];
    /* Memory of a window that has ended may come back without a window. */
    if (!given->win_hdl && use == NEP_ROWS) forget_overlapping(group, out->data, bytes);
    if (!given->win_hdl || (out->data && use == NEP_PLAIN)) return NCCL_SUCCESS;
    EpStatus status = ep_window_locate(group->ep, given->win_hdl, &memory, NULL);
    if (status != EP_OK) return out->data ? NCCL_SUCCESS : nep_result(call, status);
    if (!out->data) out->data = (char *)memory + given->win_offset;
    if (use == NEP_ROWS) use_window(group, given->win_hdl, memory, given->win_offset + bytes);
    return NCCL_SUCCESS;
}

/* ---- tensors ------------------------------------------------------------------------------- */

/* Returns 0 for a type that libep does not know. */
static int type_of(int datatype) {
    static const struct {
        int nccl;
        EpType ep;
    } types[] = {{NCCL_INT8, EP_TYPE_UINT8},           {NCCL_UINT8, EP_TYPE_UINT8},
                 {NCCL_INT32, EP_TYPE_INT32},          {NCCL_INT64, EP_TYPE_INT64},
                 {NCCL_FLOAT16, EP_TYPE_FP16},         {NCCL_FLOAT32, EP_TYPE_FP32},
                 {NCCL_BFLOAT16, EP_TYPE_BF16},        {NCCL_FLOAT8_E4M3, EP_TYPE_FP8_E4M3},
                 {NCCL_FLOAT8_E5M2, EP_TYPE_FP8_E5M2}, {NCCL_FLOAT4X2, EP_TYPE_UINT8}};
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
        if (types[i].nccl == datatype) return types[i].ep;
    return 0;
}

static int check_tensor(const char *call, const char *name, const ncclEpTensor_t *t) {
    if (t->magic != NCCL_EP_TENSOR_MAGIC && t->magic != ALLOCATED_MAGIC)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "%s: expected a tensor initialized with NCCL_EP_TENSOR_INIT, got magic "
                        "0x%08x",
                        name, t->magic);
    if (t->size < sizeof(*t))
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "%s: expected at least %zu bytes, got %u",
                        name, sizeof(*t), t->size);
    if (t->ndim < 1 || t->ndim > EP_MAX_DIMS)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "%s: expected 1 .. %d dimensions, got %u",
                        name, EP_MAX_DIMS, t->ndim);
    if (!t->sizes)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "%s: expected sizes, got NULL", name);
    if (!type_of(t->datatype))
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "%s: expected 8-bit, INT32, INT64, FLOAT16, FLOAT32 or BFLOAT16 elements, "
                        "got ncclDataType_t %d",
                        name, t->datatype);
    for (unsigned i = 0; i < t->ndim; i++)
        if (t->sizes[i] > INT32_MAX)
            return nep_fail(call, NCCL_INVALID_ARGUMENT,
                            "%s: expected at most %d elements in dimension %u, got %zu", name,
                            INT32_MAX, i, t->sizes[i]);
    return NCCL_SUCCESS;
}

int nep_tensor(const char *call, ncclEpGroup_t group, const char *name, const ncclEpTensor_t *given,
               NepUse use, EpTensor *out, const EpTensor **at) {
    *at = NULL;
    if (!given) return NCCL_SUCCESS;
    NEP_TRY(check_tensor(call, name, given));
    *out = ep_tensor_1d(given->data, (EpType)type_of(given->datatype), 1);
    out->ndim = (int32_t)given->ndim;
    for (unsigned i = 0; i < given->ndim; i++)
        out->shape[i] = (int64_t)given->sizes[i];
    *at = out;
    return resolve(call, group, given, use, out);
}

/* ---- a plan's numbers ---------------------------------------------------------------------- */

/* Describe a vector of which `count` numbers are written, and which may be longer. */
static int add_vector(const char *call, ncclEpGroup_t group, const char *name,
                      const ncclEpTensor_t *given, int64_t count, NepNumbers *n,
                      const EpTensor **at) {
    EpTensor *out = &n->tensor[n->count];
    if (!given) return NCCL_SUCCESS;
    NEP_TRY(nep_tensor(call, group, name, given, NEP_PLAIN, out, at));
    if (out->ndim != 1 || out->shape[0] < count)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "%s: expected one dimension of at least %lld numbers, got %d, the first of "
                        "%lld",
                        name, (long long)count, out->ndim, (long long)out->shape[0]);
    if (out->type != EP_TYPE_INT32 && out->type != EP_TYPE_INT64)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "%s: expected INT32 or INT64, got ncclDataType_t %d", name,
                        given->datatype);
    if (count && !out->data)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "%s: expected memory, got NULL", name);
    out->shape[0] = count;
    n->count++;
    return NCCL_SUCCESS;
}

static int refuse(const char *call, const struct ncclEpHandle *handle, const char *name,
                  const ncclEpTensor_t *given) {
    static const char *const layouts[] = {"no", "the expert-major", "the rank-major", "the flat"};
    if (!given) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_ARGUMENT,
                    "%s: expected NULL in %s layout of %s mode, where it is not written, got a "
                    "tensor",
                    name, layouts[handle->layout],
                    nep_is_low_latency(handle->group) ? "low-latency" : "high-throughput");
}

/* High-throughput counts in the expert-major layout are of whole slabs, so that they add up to the
 * rows. */
int nep_numbers(const char *call, ncclEpHandle_t handle, const ncclEpLayoutInfo_t *info,
                NepNumbers *n) {
    ncclEpGroup_t group = handle->group;
    int low_latency = nep_is_low_latency(group);
    int by_rank = handle->layout == NCCL_EP_LAYOUT_RANK_MAJOR;
    int has_slabs = !low_latency && handle->layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
    *n = (NepNumbers){.out = EP_PLAN_TENSORS_INIT};
    EpPlanTensors *out = &n->out;
    if (by_rank) NEP_TRY(refuse(call, handle, "expert_counters", info->expert_counters));
    if (!by_rank) NEP_TRY(refuse(call, handle, "src_rank_counters", info->src_rank_counters));
    if (!has_slabs) NEP_TRY(refuse(call, handle, "expert_offsets", info->expert_offsets));
    if (low_latency) NEP_TRY(refuse(call, handle, "recv_total_counter", info->recv_total_counter));
    NEP_TRY(add_vector(call, group, "expert_counters", info->expert_counters, group->num_local, n,
                       has_slabs ? &out->expert_padded : &out->expert_counts));
    NEP_TRY(add_vector(call, group, "src_rank_counters", info->src_rank_counters, group->size, n,
                       &out->source_rows));
    NEP_TRY(add_vector(call, group, "expert_offsets", info->expert_offsets, group->num_local, n,
                       &out->expert_offsets));
    return add_vector(call, group, "recv_total_counter", info->recv_total_counter, 1, n,
                      &out->needed_rows);
}

/* ---- tensors of the library ---------------------------------------------------------------- */

int ncclEpTensorAlloc(ncclEpTensor_t **tensor, unsigned ndim, int datatype, const size_t *sizes,
                      const ncclEpTensorAllocConfig_t *config) {
    const char *call = "ncclEpTensorAlloc";
    ncclEpTensorAllocConfig_t read;
    NEP_TRY(NEP_READ(call, config, 1, sizeof(read), &read));
    if (!tensor || !sizes)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "%s: expected a pointer, got NULL",
                        tensor ? "sizes" : "tensor");
    if (ndim < 1 || ndim > EP_MAX_DIMS)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "ndim: expected 1 .. %d, got %u", EP_MAX_DIMS,
                        ndim);
    AllocatedTensor *made = calloc(1, sizeof(*made) + ndim * sizeof(size_t));
    if (!made) return nep_fail(call, NCCL_SYSTEM_ERROR, "out of memory");
    memcpy(made->sizes, sizes, ndim * sizeof(size_t));
    made->tensor = (ncclEpTensor_t){.size = sizeof(made->tensor),
                                    .magic = ALLOCATED_MAGIC,
                                    .ndim = ndim,
                                    .datatype = datatype,
                                    .sizes = made->sizes};
    *tensor = &made->tensor;
    return NCCL_SUCCESS;
}

int ncclEpTensorDestroy(ncclEpTensor_t *tensor) {
    if (!tensor) return NCCL_SUCCESS;
    if (tensor->magic != ALLOCATED_MAGIC)
        return nep_fail("ncclEpTensorDestroy", NCCL_INVALID_ARGUMENT,
                        "tensor: expected one from ncclEpTensorAlloc, got magic 0x%08x",
                        tensor->magic);
    tensor->magic = 0;
    free(tensor);
    return NCCL_SUCCESS;
}
