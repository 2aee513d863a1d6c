/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moe/layer.h"

#include <stdlib.h>

#include "tools/common/data.h"
#include "tools/common/util.h"
#include "tools/moe/fault.h"
#include "tools/moe/phases.h"

/* ---- tensors ------------------------------------------------------------------------------- */

int64_t tensor_elements(const EpTensor *tensor) {
    int64_t count = 1;
    for (int d = 0; d < tensor->ndim; d++)
        count *= tensor->shape[d];
    return count;
}

int64_t tensor_bytes(const EpTensor *tensor) {
    return tensor_elements(tensor) * (int64_t)ep_type_bytes(tensor->type);
}

bool tensor_alloc(Layer *layer, EpTensor *tensor, const char *what) {
    tensor->data = layer->device.alloc(&layer->device, (size_t)tensor_bytes(tensor), what);
    return tensor->data != NULL;
}

static bool make(Layer *layer, TensorId id, EpType type, int64_t rows, int64_t columns) {
    layer->tensors[id] =
        columns ? ep_tensor_2d(NULL, type, rows, columns) : ep_tensor_1d(NULL, type, rows);
    return tensor_alloc(layer, &layer->tensors[id], "the layer's tensors");
}

static bool make_token_tensors(Layer *layer) {
    const MoeOptions *o = layer->options;
    const EpType type = (EpType)o->type;
    const int64_t t = layer->tokens;
    return make(layer, T_TOKENS, type, t, o->hidden) &&
           make(layer, T_GRAD_OUT, type, t, o->hidden) && make(layer, T_OUT, type, t, o->hidden) &&
           make(layer, T_GRAD_TOKENS, type, t, o->hidden) &&
           make(layer, T_ROUTED, EP_TYPE_FP32, t, o->hidden) &&
           make(layer, T_PROBS, EP_TYPE_FP32, t, o->experts) &&
           make(layer, T_GRAD_LOGITS, EP_TYPE_FP32, t, o->experts) &&
           make(layer, T_INDEX, EP_TYPE_INT32, t, o->top_k) &&
           make(layer, T_TOPK, EP_TYPE_FP32, t, o->top_k) &&
           make(layer, T_GRAD_TOPK, EP_TYPE_FP32, t, o->top_k);
}

static bool make_slot_tensors(Layer *layer) {
    const MoeOptions *o = layer->options;
    const EpType type = (EpType)o->type;
    const int64_t rows = layer->rows;
    return make(layer, T_RECEIVED, type, rows, o->hidden) &&
           make(layer, T_SLOT_WEIGHTS, EP_TYPE_FP32, rows, 0) &&
           make(layer, T_Z, type, rows, 2 * o->ffn) && make(layer, T_A, type, rows, o->ffn) &&
           make(layer, T_Y, type, rows, o->hidden) &&
           make(layer, T_GRAD_Y, type, rows, o->hidden) &&
           make(layer, T_GRAD_A, type, rows, o->ffn) &&
           make(layer, T_GRAD_Z, type, rows, 2 * o->ffn) &&
           make(layer, T_GRAD_RECEIVED, type, rows, o->hidden) &&
           make(layer, T_GRAD_SLOTS, EP_TYPE_FP32, rows, 0);
}

static bool fill_tokens(Layer *layer, TensorId tensor, InputId input) {
    const int64_t hidden = layer->options->hidden;
    const EpTensor *t = &layer->tensors[tensor];
    float *row = bench_alloc((size_t)hidden, sizeof(float), "a row");
    for (int64_t i = 0; row && i < layer->tokens; i++) {
        moe_input(layer->options, input, moe_token_at(layer->world->rank, i) * hidden, hidden, row);
        data_from_float(t->type, row,
                        (char *)t->data + (size_t)(i * hidden) * ep_type_bytes(t->type), hidden);
    }
    free(row);
    return row != NULL;
}

/* ---- the EP group -------------------------------------------------------------------------- */

static EpGroupConfig group_config(const MoeOptions *o) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.num_experts = (int32_t)o->experts;
    config.max_tokens = o->tokens > 0 ? (int32_t)o->tokens : 1;
    config.max_top_k = (int32_t)o->top_k;
    config.max_row_bytes = o->hidden * (int64_t)ep_type_bytes((EpType)o->type);
    config.alignment = (int32_t)o->alignment;
    config.backend = EP_BACKEND_HOST;
    return config;
}

static bool create_group(Layer *layer) {
    World *world = layer->world;
    EpGroupConfig config = group_config(layer->options);
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    layer->ep = (EpBootstrap)EP_BOOTSTRAP_INIT;
    bool ok = bench_ok(
        ep_bootstrap_mesh(&world->boot, &layer->mesh.mesh, &layer->mesh.expert, &layer->ep),
        "ep_bootstrap_mesh");
    if (!world_all(world, ok)) return false;
    ok = bench_ok(ep_group_create(&layer->ep, &config, &layer->group), "ep_group_create") &&
         bench_ok(ep_group_query(layer->group, &info), "ep_group_query") &&
         bench_ok(ep_handle_create(layer->group, NULL, &layer->handle), "ep_handle_create");
    layer->num_local = info.num_local_experts;
    return world_all(world, ok);
}

/* The router's choice is the same in each step, so the rows that one prepare finds are enough. */
static bool find_rows(Layer *layer) {
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    const size_t local = (size_t)layer->num_local;
    layer->first = bench_alloc(local, sizeof(int32_t), "slabs");
    layer->count = bench_alloc(local, sizeof(int32_t), "slabs");
    if (!world_all(layer->world, layer->first && layer->count)) return false;
    bool ok = moe_phase_run(layer, MOE_ROUTER) && moe_phase_run(layer, MOE_PREPARE) &&
              bench_ok(ep_handle_info(layer->handle, &info), "ep_handle_info");
    if (!world_all(layer->world, ok)) return false;
    layer->rows = info.recv_rows;
    for (int32_t i = 0; i < layer->num_local; i++) {
        layer->first[i] = info.expert_offsets[i];
        layer->count[i] = info.expert_counts[i];
        layer->slots += info.expert_counts[i];
    }
    layer->experts = (Groups){layer->num_local, layer->first, layer->count};
    return true;
}

/* ---- the layer ----------------------------------------------------------------------------- */

bool layer_create(World *world, const MoeOptions *options, const MoeMesh *mesh, Layer *out) {
    *out = (Layer){.world = world, .options = options, .mesh = *mesh};
    out->fault = moe_fault_phase();
    out->tokens = moe_tokens_of(options, world->size, world->rank);
    out->all[1] = (int32_t)out->tokens;
    out->all_tokens = (Groups){1, &out->all[0], &out->all[1]};
    if (!world_all(world, moe_host_create(&out->device, (int)options->gemm_threads)) ||
        !create_group(out) || !weights_create(out))
        return false;
    bool ok = make_token_tensors(out) && fill_tokens(out, T_TOKENS, INPUT_TOKENS) &&
              fill_tokens(out, T_GRAD_OUT, INPUT_GRAD_OUT);
    ok = world_all(world, ok) && find_rows(out);
    return world_all(world, ok && make_slot_tensors(out));
}

static void release(Layer *layer, EpTensor *tensor) {
    if (tensor->data) layer->device.release(&layer->device, tensor->data);
    tensor->data = NULL;
}

static void release_gathered(Layer *layer, Gathered *g) {
    if (g->scales.data) release(layer, &g->values);
    release(layer, &g->full);
    release(layer, &g->scales);
    release(layer, &g->workspace);
}

void layer_destroy(Layer *layer) {
    ep_mesh_comm_destroy(layer->comm);
    ep_handle_destroy(layer->handle);
    ep_group_destroy(layer->group);
    ep_bootstrap_destroy(&layer->ep);
    for (int i = 0; i < NUM_WEIGHTS; i++) {
        Weight *w = &layer->weights[i];
        release(layer, &w->shard);
        release(layer, &w->grad);
        release(layer, &w->grad_shard);
        release(layer, &w->reduce_workspace);
        release_gathered(layer, &w->forward);
        release_gathered(layer, &w->backward);
    }
    for (int i = 0; i < NUM_TENSORS; i++)
        release(layer, &layer->tensors[i]);
    free(layer->first);
    free(layer->count);
    if (layer->device.destroy) layer->device.destroy(&layer->device);
}
