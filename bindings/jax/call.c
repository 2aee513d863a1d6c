/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "bindings/jax/handlers.h"

/* FP32 counts exactly to here; then the order begins again at 1. */
#define MAX_ORDER (1 << 23)

/* ---- errors -------------------------------------------------------------------------------- */

/* XLA adds the name of the code to the message; the status says more. */
static XLA_FFI_Error *make_error(const XLA_FFI_CallFrame *frame, EpStatus status) {
    const char *name = ep_status_string(status);
    char message[1024];
    snprintf(message, sizeof(message), "%s (%.*s)", ep_last_error(), (int)strcspn(name, ":"), name);
    XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message,
                                      XLA_FFI_Error_Code_INTERNAL};
    return frame->api->XLA_FFI_Error_Create(&args);
}

static XLA_FFI_Error *refuse(const JaxCall *call, EpStatus status, const char *why) {
    char sentence[512];
    if (call->rank)
        snprintf(sentence, sizeof(sentence), "rank %d: %s: %s", call->rank->number, call->name,
                 why);
    else
        snprintf(sentence, sizeof(sentence), "%s: %s", call->name, why);
    return make_error(call->frame, ep_set_last_error(status, sentence));
}

/* ---- what XLA gives ------------------------------------------------------------------------- */

/* XLA asks each handler once which interface it was built for. The type of the extensions has
 * another name from jaxlib 0.11 on. */
static int answer_metadata(const XLA_FFI_CallFrame *frame) {
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

static int read_key(const XLA_FFI_Attrs *attrs, int64_t *key) {
    for (int64_t i = 0; i < attrs->size; i++) {
        if (attrs->names[i]->len != 3 || memcmp(attrs->names[i]->ptr, "key", 3) != 0) continue;
        const XLA_FFI_Scalar *scalar = attrs->attrs[i];
        if (attrs->types[i] != XLA_FFI_AttrType_SCALAR || scalar->dtype != XLA_FFI_DataType_S64)
            return 0;
        memcpy(key, scalar->value, sizeof(*key));
        return 1;
    }
    return 0;
}

static XLA_FFI_Error *read_device(const XLA_FFI_CallFrame *frame, int32_t *ordinal, int64_t *run) {
    XLA_FFI_DeviceOrdinal_Get_Args device = {XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, NULL,
                                             frame->ctx, 0};
    XLA_FFI_RunId_Get_Args id = {XLA_FFI_RunId_Get_Args_STRUCT_SIZE, NULL, frame->ctx, 0};
    XLA_FFI_Error *error = frame->api->XLA_FFI_DeviceOrdinal_Get(&device);
    if (!error) error = frame->api->XLA_FFI_RunId_Get(&id);
    *ordinal = device.device_ordinal, *run = id.run_id;
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

/* libep refuses a number of dimensions that it does not have, with EP_ERR_NDIM. */
static void read_buffers(int64_t size, void *const *buffers, EpTensor *out) {
    for (int64_t i = 0; i < size && i < JAX_BUFFERS; i++) {
        const XLA_FFI_Buffer *buffer = buffers[i];
        out[i] = ep_tensor_3d(buffer->data, type_of(buffer->dtype), 1, 1, 1);
        out[i].ndim = (int32_t)buffer->rank;
        for (int64_t d = 0; d < buffer->rank && d < EP_MAX_DIMS; d++)
            out[i].shape[d] = buffer->dims[d];
    }
}

const EpTensor *jax_operand(const JaxCall *call, int64_t index) {
    return index < call->frame->args.size ? &call->operands[index] : NULL;
}

const EpTensor *jax_result(const JaxCall *call, int64_t index) {
    return index < call->frame->rets.size ? &call->results[index] : NULL;
}

/* ---- order --------------------------------------------------------------------------------- */

static int64_t order_of(const JaxRank *rank) {
    return rank->calls == 0 ? 0 : (rank->calls - 1) % MAX_ORDER + 1;
}

/* A GPU's numbers are not read: its calls run in the order of the program's schedule, which is the
 * same on all devices. */
static int is_in_order(const JaxCall *call, int num_orders) {
    const JaxRank *rank = call->rank;
    int is_new_run = call->run != rank->run, is_given = 0;
    if (!rank->on_host) return 1;
    for (int i = 0; i < num_orders; i++) {
        float order = *(const float *)call->operands[i].data;
        if (order == (float)order_of(rank) && rank->calls > 0) return 1;
        is_given |= order != 0;
    }
    return is_new_run && !is_given;
}

static void advance(JaxCall *call) {
    JaxRank *rank = call->rank;
    rank->calls++;
    rank->run = call->run;
    if (rank->on_host) *(float *)call->results[0].data = (float)order_of(rank);
}

/* ---- a call -------------------------------------------------------------------------------- */

static XLA_FFI_Error *find_rank(JaxCall *call) {
    int64_t key;
    int32_t ordinal;
    char why[160];
    if (!read_key(&call->frame->attrs, &key))
        return refuse(call, EP_ERR_NULL, "expected the attribute key, a 64-bit integer, got none");
    XLA_FFI_Error *error = read_device(call->frame, &ordinal, &call->run);
    if (error) return error;
    call->rank = jax_rank_find(key, ordinal);
    if (call->rank) return NULL;
    snprintf(why, sizeof(why),
             "expected a device of group %lld, got device %d: was the group made for another mesh?",
             (long long)key, ordinal);
    return refuse(call, EP_ERR_FOREIGN, why);
}

static XLA_FFI_Error *check_call(JaxCall *call, int num_orders) {
    const JaxRank *rank = call->rank;
    if (rank->is_closed) return refuse(call, EP_ERR_DESTROYED, "the group is closed");
    if (!rank->on_host) return read_stream(call->frame, &call->stream);
    if (is_in_order(call, num_orders)) return NULL;
    const char *why = "expected the order that the last call on this device returned, got another: "
                      "pass each call's order to the next call";
    ep_group_abort(rank->group, why);
    return refuse(call, EP_ERR_ORDER, why);
}

int jax_begin(JaxCall *call, XLA_FFI_CallFrame *frame, const char *name, int num_orders,
              XLA_FFI_Error **result) {
    *result = NULL;
    if (answer_metadata(frame)) return 0;
    memset(call, 0, sizeof(*call));
    call->frame = frame, call->name = name;
    if ((*result = find_rank(call)) != NULL) return 0;
    read_buffers(frame->args.size, frame->args.args, call->operands);
    read_buffers(frame->rets.size, frame->rets.rets, call->results);
    pthread_mutex_lock(&call->rank->mutex);
    if ((*result = check_call(call, num_orders)) == NULL) {
        call->handle = call->rank->handle;
        return 1;
    }
    pthread_mutex_unlock(&call->rank->mutex);
    return 0;
}

XLA_FFI_Error *jax_end(JaxCall *call, EpStatus status) {
    XLA_FFI_Error *error = NULL;
    if (status == EP_OK) {
        advance(call);
    } else {
        error = make_error(call->frame, status);
        ep_group_abort(call->rank->group, ep_last_error());
    }
    pthread_mutex_unlock(&call->rank->mutex);
    return error;
}
