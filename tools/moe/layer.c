/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moe/layer.h"

#include <stdlib.h>

#include "tools/common/data.h"
#include "tools/common/gpu.h"
#include "tools/common/time.h"
#include "tools/common/util.h"
#include "tools/moe/phases.h"

/* ---- tensors ------------------------------------------------------------------------------- */

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
    if (layer->below) {
        layer->tensors[T_TOKENS] = layer->below->tensors[T_OUT];
        layer->tensors[T_GRAD_TOKENS] = layer->below->tensors[T_GRAD_OUT];
    } else if (!make(layer, T_TOKENS, type, t, o->hidden) ||
               (!o->forward && !make(layer, T_GRAD_TOKENS, type, t, o->hidden))) {
        return false;
    }
    if (!make(layer, T_OUT, type, t, o->hidden) ||
        !make(layer, T_PROBS, EP_TYPE_FP32, t, o->experts) ||
        !make(layer, T_INDEX, EP_TYPE_INT32, t, o->top_k) ||
        !make(layer, T_TOPK, EP_TYPE_FP32, t, o->top_k))
        return false;
    if (o->forward) return true;
    return make(layer, T_GRAD_OUT, type, t, o->hidden) &&

           make(layer, T_GRAD_LOGITS, type, t, o->experts) &&
           make(layer, T_GRAD_TOPK, EP_TYPE_FP32, t, o->top_k);
}

static bool make_slot_tensors(Layer *layer) {
    const MoeOptions *o = layer->options;
    const EpType type = (EpType)o->type;
    const int64_t rows = layer->rows;
    layer->tensors[T_RECEIVED] = ep_tensor_2d(NULL, type, rows, o->hidden);
    layer->tensors[T_A] = ep_tensor_2d(NULL, type, rows, o->ffn);
    const bool has_rows = layer->dispatches_e4m3 || make(layer, T_RECEIVED, type, rows, o->hidden);
    const bool has_a = (o->forward && layer->fuses) || make(layer, T_A, type, rows, o->ffn);
    if (!has_rows || !has_a || !make(layer, T_SLOT_WEIGHTS, EP_TYPE_FP32, rows, 0) ||
        !make(layer, T_Z, type, rows, 2 * o->ffn) || !make(layer, T_Y, type, rows, o->hidden))
        return false;
    if (o->forward) return true;
    return make(layer, T_GRAD_Y, type, rows, o->hidden) &&
           make(layer, T_GRAD_A, type, rows, o->ffn) &&
           make(layer, T_GRAD_Z, type, rows, 2 * o->ffn) &&
           make(layer, T_GRAD_RECEIVED, type, rows, o->hidden) &&
           make(layer, T_GRAD_SLOTS, EP_TYPE_FP32, rows, 0);
}

/* Scales go by column: products read those of neighbouring rows together. */
static bool make_scaled(Layer *layer, Scaled *out, int64_t rows, int64_t columns) {
    out->codes = ep_tensor_2d(NULL, EP_TYPE_FP8_E4M3, rows, columns);
    out->scales = ep_tensor_2d(NULL, EP_TYPE_FP32, quant_scales(EP_QUANT_FP8, columns), rows);
    out->by_column = true;
    return tensor_alloc(layer, &out->codes, "rows in e4m3") &&
           tensor_alloc(layer, &out->scales, "scales of rows");
}

static bool make_scaled_tensors(Layer *layer) {
    static const TensorId ids[] = {T_RECEIVED, T_A, T_GRAD_Y, T_GRAD_Z};
    const bool sums_rows = layer->options->wgrad == MOE_WGRAD_FP8;
    const size_t count = layer->options->forward ? 2 : sizeof(ids) / sizeof(*ids);
    bool ok = true;
    for (size_t i = 0; ok && layer->multiplies_e4m3 && i < count; i++) {
        const bool dispatched = layer->dispatches_e4m3 && ids[i] == T_RECEIVED;
        const int64_t rows = dispatched ? layer->rows : layer->received;
        const int64_t columns = layer->tensors[ids[i]].shape[1];
        ok = make_scaled(layer, &layer->scaled[ids[i]], rows, columns) &&
             (!sums_rows || make_scaled(layer, &layer->transposed[ids[i]], columns, rows));
    }
    return ok;
}

/* The shared expert's weights are the same on all ranks. */
static bool make_shared_weight(Layer *layer, TensorId id, InputId input, int64_t rows,
                               int64_t columns) {
    EpTensor *t = &layer->tensors[id];
    const Contents contents = moe_contents(layer->options, input);
    const Part all = {0, {0, columns}, {1, rows, columns}};
    *t = ep_tensor_3d(NULL, (EpType)layer->options->type, 1, rows, columns);
    return tensor_alloc(layer, t, "the shared expert") &&
           layer->device.fill(&layer->device, &contents, &all, t);
}

static bool make_shared(Layer *layer) {
    const MoeOptions *o = layer->options;
    const EpType type = (EpType)o->type;
    const int64_t t = layer->tokens, s = o->shared;
    return s == 0 ||
           (make_shared_weight(layer, T_SHARED_W1, INPUT_SHARED_W1, o->hidden, 2 * s) &&
            make_shared_weight(layer, T_SHARED_W2, INPUT_SHARED_W2, s, o->hidden) &&
            make(layer, T_SHARED_Z, type, t, 2 * s) && make(layer, T_SHARED_A, type, t, s) &&
            make(layer, T_SHARED_Y, type, t, o->hidden));
}

static bool fill_tokens(Layer *layer, TensorId tensor, InputId input) {
    const Contents contents = moe_contents(layer->options, input);
    const EpTensor *t = &layer->tensors[tensor];
    const Part all = {moe_token_at(layer->world->rank, 0) * layer->options->hidden,
                      {0, 0},
                      {1, 1, tensor_elements(t)}};
    return layer->device.fill(&layer->device, &contents, &all, t);
}

/* ---- the EP group -------------------------------------------------------------------------- */

/* Unless the product for the gradient of w1 takes rows that are not quantised. From e4m3 rows it
 * takes them transposed, by way of a 16-bit type. */
static bool dispatches_e4m3(const MoeOptions *o) {
    return moe_multiplies_e4m3(o) &&
           (o->forward || (o->wgrad == MOE_WGRAD_FP8 && o->type != EP_TYPE_FP32));
}

static EpGroupConfig group_config(const MoeOptions *o, EpBackend backend) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.num_experts = (int32_t)o->experts;
    config.max_tokens = o->tokens > 0 ? (int32_t)o->tokens : 1;
    config.max_top_k = (int32_t)o->top_k;
    config.max_row_bytes = o->hidden * (int64_t)ep_type_bytes((EpType)o->type);
    config.alignment = (int32_t)o->alignment;
    if (dispatches_e4m3(o)) config.max_scale_bytes = 4 * quant_scales(EP_QUANT_FP8, o->hidden);
    config.backend = backend;
    return config;
}

/* A kernel that moves weights starts beside one that moves tokens if that leaves it so many
 * multiprocessors, unless --weight-sms says how many it takes. */
#define WEIGHT_SMS 64

static EpHandleConfig handle_config(const Layer *layer) {
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    const int sms = layer->device.multiprocessors;
    const int ctas = layer->options->weight_sms ? (int)layer->options->weight_sms : WEIGHT_SMS;
    const int rest = sms - (sms / 2 < ctas ? sms / 2 : ctas);
    if (layer->overlaps) config.num_sms = rest > 2 ? rest : 2;
    if (layer->dispatches_e4m3) {
        config.quant = (EpQuant)layer->options->quant;
        config.scale_order = EP_SCALES_BY_COLUMN;
    }
    return config;
}

static bool create_handle(Layer *layer) {
    const Layer *lender = layer->lender;
    layer->ep = lender->ep, layer->group = lender->group;
    layer->group_config = lender->group_config, layer->handle_config = handle_config(layer);
    layer->num_local = lender->num_local;
    bool ok = bench_ok(ep_handle_create(layer->group, &layer->handle_config, &layer->handle),
                       "ep_handle_create");
    return world_all(layer->world, ok);
}

static bool create_group(Layer *layer) {
    World *world = layer->world;
    if (layer->lender) return create_handle(layer);
    EpGroupConfig config = group_config(layer->options, layer->device.backend);
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    layer->group_config = config, layer->handle_config = handle_config(layer);
    layer->ep = (EpBootstrap)EP_BOOTSTRAP_INIT;
    bool ok = bench_ok(
        ep_bootstrap_mesh(&world->boot, &layer->mesh.mesh, &layer->mesh.expert, &layer->ep),
        "ep_bootstrap_mesh");
    if (!world_all(world, ok)) return false;
    ok = bench_ok(ep_group_create(&layer->ep, &config, &layer->group), "ep_group_create") &&
         bench_ok(ep_group_query(layer->group, &info), "ep_group_query") &&
         bench_ok(ep_handle_create(layer->group, &layer->handle_config, &layer->handle),
                  "ep_handle_create");
    layer->num_local = info.num_local_experts;
    return world_all(world, ok);
}

/* With exact sizing a GPU's dispatch would wait for the host in each step. So there the handle gets
 * a capacity: what the rank that receives most needs. */
static bool set_capacity(Layer *layer) {
    const int64_t alignment = layer->options->alignment;
    int64_t rows = layer->rows;
    if (layer->device.backend == EP_BACKEND_HOST) return true;
    if (!world_max(layer->world, &rows, 1)) return false;
    rows = rows > 0 ? (rows + alignment - 1) / alignment * alignment : alignment;
    layer->rows = layer->handle_config.max_recv_rows = rows;
    ep_handle_destroy(layer->handle);
    layer->handle = NULL;
    bool ok = bench_ok(ep_handle_create(layer->group, &layer->handle_config, &layer->handle),
                       "ep_handle_create");
    return world_all(layer->world, ok) &&
           world_all(layer->world, moe_phase_run(layer, MOE_PREPARE));
}

static bool place_slabs(Layer *layer) {
    const int32_t num = layer->num_local;
    const size_t bytes = (size_t)num * sizeof(int32_t);
    MoeDevice *d = &layer->device;
    layer->experts = (Groups){num, layer->first, layer->count, NULL};
    if (!layer->multiplies_e4m3) return true;
    layer->places = ep_tensor_2d(NULL, EP_TYPE_INT32, 2, num);
    bool ok = tensor_alloc(layer, &layer->places, "slabs") &&
              d->upload(d, layer->places.data, layer->first, bytes) &&
              d->upload(d, (int32_t *)layer->places.data + num, layer->count, bytes);
    layer->experts.places = layer->places.data;
    return ok;
}

/* The router's choice is the same in each step, so the rows that one prepare finds are enough. */
static bool find_rows(Layer *layer) {
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    const size_t local = (size_t)layer->num_local;
    layer->first = bench_alloc(local, sizeof(int32_t), "slabs");
    layer->count = bench_alloc(local, sizeof(int32_t), "slabs");
    if (!world_all(layer->world, layer->first && layer->count)) return false;
    bool ok = moe_phase_run(layer, MOE_ROUTER) && moe_phase_run(layer, MOE_PREPARE) &&
              layer->device.finish(&layer->device) &&
              bench_ok(ep_handle_info(layer->handle, &info), "ep_handle_info");
    if (!world_all(layer->world, ok)) return false;
    layer->rows = layer->received = info.recv_rows;
    for (int32_t i = 0; i < layer->num_local; i++) {
        layer->first[i] = info.expert_offsets[i];
        layer->count[i] = info.expert_counts[i];
        layer->slots += info.expert_counts[i];
    }
    return world_all(layer->world, place_slabs(layer)) && set_capacity(layer);
}

/* ---- the layer ----------------------------------------------------------------------------- */

/* The library says why GPUs cannot serve, if they cannot. */
static bool create_cuda(Layer *layer) {
    EpGroupConfig config = group_config(layer->options, EP_BACKEND_CUDA);
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    if (!gpu_built()) return moe_cuda_create(&layer->device, (Grouping)layer->options->grouping);
    if (ep_group_memory(&config, layer->mesh.ep_size, &memory) != EP_OK)
        return bench_refuse("--backend cuda: %s", ep_last_error());
    if (!memory.feasible) return bench_refuse("--backend cuda: %s", memory.reason);
    return moe_cuda_create(&layer->device, (Grouping)layer->options->grouping);
}

static bool share_device(Layer *layer) {
    layer->device = layer->lender->device;
    layer->device.gemm_calls = 0;
    return true;
}

/* In a stack weights travel beside products, too. Blocks that stay until all tiles are done would
 * else begin when the kernels that move weights have ended. */
static bool leave_room(Layer *layer) {
    const int sms = layer->device.multiprocessors, ctas = (int)layer->options->weight_sms;
    if (layer->lender || layer->options->layers < 2 || !layer->overlaps || !ctas || ctas >= sms)
        return true;
    return layer->device.limit(&layer->device, sms - ctas);
}

/* Collective, since ranks of a node divide its GPUs. */
static bool create_device(Layer *layer) {
    const MoeOptions *o = layer->options;
    const bool cuda = o->backend == EP_BACKEND_CUDA;
    if (cuda && !layer->lender && !gpu_select(layer->world)) return false;
    bool ok = layer->lender ? share_device(layer)
              : cuda        ? create_cuda(layer)
                            : moe_host_create(&layer->device, (int)o->gemm_threads);
    layer->weights_stream = layer->device.stream;
    layer->multiplies_e4m3 = moe_multiplies_e4m3(o);
    layer->dispatches_e4m3 = dispatches_e4m3(o);
    /* The gradient of a slot's weight sums over the whole row. */
    layer->fuses = layer->multiplies_e4m3 && o->type != EP_TYPE_FP32 && o->ffn % 128 == 0 &&
                   (o->forward || o->weights_at == WEIGHTS_LATE);
    if (ok && layer->multiplies_e4m3 && !layer->device.multiplies_e4m3)
        ok =
            bench_refuse("--quant: expected a GPU of compute capability 9.0, which multiplies e4m3 "
                         "with scales of blocks, got %s",
                         layer->device.gemm);
    /* Where every rank is in one EP group, nothing of w1 and w2 travels. */
    layer->overlaps = o->overlap && layer->world->size > layer->mesh.ep_size;
    ok = ok && leave_room(layer);
    return world_all(layer->world, ok);
}

static bool create(Layer *out) {
    World *world = out->world;
    const MoeOptions *options = out->options;
    out->tokens = moe_tokens_of(options, world->size, world->rank);
    out->all[1] = (int32_t)out->tokens;
    out->all_tokens = (Groups){1, &out->all[0], &out->all[1], NULL};
    if (!create_device(out) || !create_group(out) || !weights_create(out)) return false;
    bool ok = make_token_tensors(out) && (out->below || fill_tokens(out, T_TOKENS, INPUT_TOKENS)) &&
              (options->forward || fill_tokens(out, T_GRAD_OUT, INPUT_GRAD_OUT)) &&
              make_shared(out);
    ok = world_all(world, ok) && find_rows(out);
    if (!world_all(world, ok && make_slot_tensors(out) && make_scaled_tensors(out))) return false;
    if (options->forward) return world_all(world, moe_weights_load(out));
    return out->device.backend == EP_BACKEND_HOST || moe_weights_warm_up(out);
}

bool layer_create(World *world, const MoeOptions *options, const MoeMesh *mesh, const Layer *lender,
                  const Layer *below, Layer *out) {
    const double begin = time_now_us();
    *out = (Layer){
        .world = world, .options = options, .mesh = *mesh, .lender = lender, .below = below};
    bool ok = create(out);
    out->created = (time_now_us() - begin) * 1e-6;
    return ok;
}

static void release(Layer *layer, EpTensor *tensor) {
    if (tensor->data) layer->device.release(&layer->device, tensor->data);
    tensor->data = NULL;
}

static void release_scaled(Layer *layer, Scaled *s) {
    release(layer, &s->codes);
    release(layer, &s->scales);
}

static void release_gathered(Layer *layer, Gathered *g) {
    if (g->scales.data) release(layer, &g->values);
    release(layer, &g->full);
    release(layer, &g->scales);
    release(layer, &g->workspace);
}

static void release_weight(Layer *layer, Weight *w) {
    release(layer, &w->shard);
    release(layer, &w->grad_shard);
    const bool shares = layer->below && layer->below->below; /* with the second one below */
    if (!shares || (w->keeps && !w->turns)) release_gathered(layer, &w->forward);
    if (w->two_forms && (!shares || (w->keeps && w->turns))) release_gathered(layer, &w->backward);
    if (shares) return;
    release(layer, &w->grad);
    release(layer, &w->reduce_workspace);
}

/* The weights end with their communicator. */
static void release_shared(Layer *layer) {
    ep_group_destroy(layer->group);
    ep_bootstrap_destroy(&layer->ep);
    if (layer->device.destroy) layer->device.destroy(&layer->device);
}

void layer_destroy(Layer *layer) {
    if (!layer->lender) ep_mesh_comm_destroy(layer->comm);
    if (layer->below) layer->tensors[T_TOKENS].data = layer->tensors[T_GRAD_TOKENS].data = NULL;
    ep_handle_destroy(layer->handle);
    for (int i = 0; i < NUM_WEIGHTS; i++)
        release_weight(layer, &layer->weights[i]);
    for (int i = 0; i < NUM_TENSORS; i++) {
        release(layer, &layer->tensors[i]);
        release_scaled(layer, &layer->scaled[i]);
        release_scaled(layer, &layer->transposed[i]);
    }
    release(layer, &layer->places);
    free(layer->first);
    free(layer->count);
    if (!layer->lender) release_shared(layer);
}
