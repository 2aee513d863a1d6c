/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "bindings/jax/handlers.h"

/* ---- errors -------------------------------------------------------------------------------- */

/* XLA adds the name of the code to the message; the status says more. */
static XLA_FFI_Error *make_error(const JaxCall *call, EpStatus status) {
    const char *name = ep_status_string(status);
    char message[1024];
    snprintf(message, sizeof(message), "%s (%.*s)", ep_last_error(), (int)strcspn(name, ":"), name);
    XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message,
                                      XLA_FFI_Error_Code_INTERNAL};
    return call->api->XLA_FFI_Error_Create(&args);
}

static XLA_FFI_Error *refuse(const JaxCall *call, EpStatus status, const char *why) {
    char sentence[512];
    if (call->rank)
        snprintf(sentence, sizeof(sentence), "rank %d: %s: %s", call->rank->number, call->name,
                 why);
    else
        snprintf(sentence, sizeof(sentence), "%s: %s", call->name, why);
    return make_error(call, ep_set_last_error(status, sentence));
}

/* ---- what XLA gives ------------------------------------------------------------------------- */

/* XLA asks for which interface a handler was built. The type of the extensions has another name
 * from jaxlib 0.11 on. */
int jax_answer_metadata(const XLA_FFI_CallFrame *frame) {
    for (__typeof__(&*frame->extension_start) e = frame->extension_start; e; e = e->next) {
        if (e->type != XLA_FFI_Extension_Metadata) continue;
        XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)e)->metadata;
        metadata->api_version.major_version = XLA_FFI_API_MAJOR;
        metadata->api_version.minor_version = XLA_FFI_API_MINOR;
        metadata->traits = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
        return 1;
    }
    return 0;
}

static int read_attribute(const XLA_FFI_Attrs *attrs, const char *name, int64_t *out) {
    for (int64_t i = 0; i < attrs->size; i++) {
        const XLA_FFI_ByteSpan *found = attrs->names[i];
        if (found->len != strlen(name) || memcmp(found->ptr, name, found->len) != 0) continue;
        const XLA_FFI_Scalar *scalar = attrs->attrs[i];
        if (attrs->types[i] != XLA_FFI_AttrType_SCALAR || scalar->dtype != XLA_FFI_DataType_S64)
            return 0;
        memcpy(out, scalar->value, sizeof(*out));
        return 1;
    }
    return 0;
}

int64_t jax_attribute(const JaxCall *call, const char *name) {
    int64_t value = 0;
    return read_attribute(&call->attrs, name, &value) ? value : 0;
}

static XLA_FFI_Error *read_device(const XLA_FFI_CallFrame *frame, int32_t *ordinal) {
    XLA_FFI_DeviceOrdinal_Get_Args args = {XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, NULL,
                                           frame->ctx, 0};
    XLA_FFI_Error *error = frame->api->XLA_FFI_DeviceOrdinal_Get(&args);
    *ordinal = args.device_ordinal;
    return error;
}

static XLA_FFI_Error *read_stream(const XLA_FFI_CallFrame *frame, EpStream *stream) {
    XLA_FFI_Stream_Get_Args args = {XLA_FFI_Stream_Get_Args_STRUCT_SIZE, NULL, frame->ctx, NULL};
    XLA_FFI_Error *error = frame->api->XLA_FFI_Stream_Get(&args);
    *stream = args.stream;
    return error;
}

/* 0 for a type that libep does not have. Its calls refuse that with EP_ERR_TYPE. */
static EpType type_of(XLA_FFI_DataType type) {
    switch (type) {
    case XLA_FFI_DataType_BF16:
        return EP_TYPE_BF16;
    case XLA_FFI_DataType_F16:
        return EP_TYPE_FP16;
    case XLA_FFI_DataType_F32:
        return EP_TYPE_FP32;
    case XLA_FFI_DataType_F8E4M3FN:
        return EP_TYPE_FP8_E4M3;
    case XLA_FFI_DataType_F8E5M2:
        return EP_TYPE_FP8_E5M2;
    case XLA_FFI_DataType_U8:
        return EP_TYPE_UINT8;
    case XLA_FFI_DataType_S32:
        return EP_TYPE_INT32;
    case XLA_FFI_DataType_S64:
        return EP_TYPE_INT64;
    default:
        return (EpType)0;
    }
}

/* All but the first buffer, which is the order. Returns how many. libep refuses a number of
 * dimensions that it does not have, with EP_ERR_NDIM. */
static int64_t read_buffers(int64_t size, void *const *buffers, EpTensor *out) {
    int64_t count = size - 1 < JAX_BUFFERS ? size - 1 : JAX_BUFFERS;
    for (int64_t i = 0; i < count; i++) {
        const XLA_FFI_Buffer *buffer = buffers[i + 1];
        out[i] = ep_tensor_3d(buffer->data, type_of(buffer->dtype), 1, 1, 1);
        out[i].ndim = (int32_t)buffer->rank;
        for (int64_t d = 0; d < buffer->rank && d < EP_MAX_DIMS; d++)
            out[i].shape[d] = buffer->dims[d];
    }
    return count;
}

const EpTensor *jax_operand(const JaxCall *call, int64_t index) {
    return index < call->num_operands ? &call->operands[index] : NULL;
}

EpExtras jax_extras(JaxCall *call, unsigned counts) {
    const JaxRank *rank = call->rank;
    EpExtras extras = EP_EXTRAS_INIT;
    EpTensor *t = call->counters;
    if (!rank->counters) return extras;
    t[0] = ep_tensor_1d(rank->counters, EP_TYPE_INT64, rank->num_local);
    for (int i = 0; i < 4; i++)
        t[1 + i] = ep_tensor_1d(rank->counters + rank->num_local + i * rank->num_ranks,
                                EP_TYPE_INT64, rank->num_ranks);
    if (counts & JAX_EXPERTS) extras.expert_tokens = &t[0];
    if (counts & JAX_ROWS) extras.peer_rows = &t[1], extras.peer_bytes = &t[2];
    if (counts & JAX_WAITS) extras.peer_wait_ns = &t[3], extras.peer_longest_wait_ns = &t[4];
    return extras;
}

const EpTensor *jax_result(const JaxCall *call, int64_t index) {
    return index < call->num_results ? &call->results[index] : NULL;
}

/* ---- a call -------------------------------------------------------------------------------- */

static XLA_FFI_Error *find_rank(JaxCall *call, const XLA_FFI_CallFrame *frame) {
    int64_t key;
    int32_t ordinal;
    char why[160];
    if (!read_attribute(&call->attrs, "key", &key))
        return refuse(call, EP_ERR_NULL, "expected the attribute key, a 64-bit integer, got none");
    XLA_FFI_Error *error = read_device(frame, &ordinal);
    if (error) return error;
    call->rank = jax_rank_find(key, ordinal);
    if (call->rank) return NULL;
    snprintf(why, sizeof(why),
             "expected a device of group %lld, got device %d: was the group made for another mesh?",
             (long long)key, ordinal);
    return refuse(call, EP_ERR_FOREIGN, why);
}

/* Copies what the operation needs: XLA uses the frame again before a future is complete. */
static XLA_FFI_Error *read_call(JaxCall *call, const XLA_FFI_CallFrame *frame) {
    call->api = frame->api, call->attrs = frame->attrs;
    XLA_FFI_Error *error = find_rank(call, frame);
    if (error) return error;
    call->num_operands = read_buffers(frame->args.size, frame->args.args, call->operands);
    call->num_results = read_buffers(frame->rets.size, frame->rets.rets, call->results);
    return call->rank->on_host ? NULL : read_stream(frame, &call->stream);
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static size_t bytes_of(const EpTensor *tensor) {
    size_t bytes = tensor->type == EP_TYPE_INT64                                   ? 8
                   : tensor->type == EP_TYPE_INT32 || tensor->type == EP_TYPE_FP32 ? 4
                   : tensor->type == EP_TYPE_BF16 || tensor->type == EP_TYPE_FP16  ? 2
                                                                                   : 1;
    for (int32_t d = 0; d < tensor->ndim; d++)
        bytes *= (size_t)tensor->shape[d];
    return bytes;
}

/* What a call of a masked rank gives. Such a rank is on the host backend. */
static EpStatus zero_results(JaxCall *call) {
    for (int64_t i = 0; i < call->num_results; i++)
        memset(call->results[i].data, 0, bytes_of(&call->results[i]));
    return EP_OK;
}

/* A failed call aborts the group: the program has failed, and its peers need not wait for the
 * deadline. In a group with masks a missing rank is no failure of the group. */
static XLA_FFI_Error *run_operation(JaxCall *call) {
    XLA_FFI_Error *error = NULL;
    JaxRank *rank = call->rank;
    pthread_mutex_lock(&rank->mutex);
    if (rank->is_closed) {
        error = refuse(call, EP_ERR_DESTROYED, "the group is closed");
    } else {
        call->handle = rank->handle;
        __atomic_store_n(&rank->began, now(), __ATOMIC_RELAXED);
        const EpStatus status = rank->is_masked ? zero_results(call) : call->operation(call);
        if (status != EP_OK) error = make_error(call, status);
        if (status != EP_OK && !(rank->has_masks && status == EP_ERR_TIMEOUT))
            ep_group_abort(rank->group, ep_last_error());
        __atomic_store_n(&rank->began, 0, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&rank->mutex);
    return error;
}

/* The bits of the thread's floating-point mode that flush subnormal numbers to zero. */
#if defined(__SSE2__)
#define FLUSHES 0x8040u /* MXCSR: FTZ, DAZ */
static uint64_t get_mode(void) {
    return _mm_getcsr();
}
static void set_mode(uint64_t mode) {
    _mm_setcsr((unsigned)mode);
}
#elif defined(__aarch64__)
#define FLUSHES (1u << 24) /* FPCR: FZ */
static uint64_t get_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static void set_mode(uint64_t mode) {
    __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}
#else
#define FLUSHES 0u
static uint64_t get_mode(void) {
    return 0;
}
static void set_mode(uint64_t mode) {
    (void)mode;
}
#endif

void jax_finish(JaxCall *call) {
    XLA_FFI_Error *error = run_operation(call);
    const XLA_FFI_Api *api = call->api;
    XLA_FFI_Future *future = call->future;
    free(call);
    /* XLA's own threads flush subnormal numbers. What it computes on this thread must not differ:
     * how much that is depends on timing. */
    const uint64_t mode = get_mode();
    set_mode(mode | FLUSHES);
    if (error) {
        XLA_FFI_Future_SetError_Args args = {XLA_FFI_Future_SetError_Args_STRUCT_SIZE, NULL, future,
                                             error};
        api->XLA_FFI_Future_SetError(&args);
    } else {
        XLA_FFI_Future_SetAvailable_Args args = {XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE, NULL,
                                                 future};
        api->XLA_FFI_Future_SetAvailable(&args);
    }
    set_mode(mode);
}

XLA_FFI_Error *jax_call(XLA_FFI_CallFrame *frame, const char *name, JaxOperation *operation) {
    if (jax_answer_metadata(frame)) return NULL;
    JaxCall call = {.name = name, .operation = operation};
    XLA_FFI_Error *error = read_call(&call, frame);
    if (error || jax_rank_defer(&call, frame)) return error;
    return run_operation(&call);
}
