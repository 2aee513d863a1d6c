/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "tools/common/data.h"
#include "tools/common/util.h"
#include "tools/moe/layer.h"

/* ---- contents of a shard ------------------------------------------------------------------- */

/* The shard as a part of the whole weight. Matrices have a first dimension of 1. */
static bool part_of_shard(const Layer *layer, WeightId id, Part *out) {
    const EpWeightConfig *config = &layer->mesh.weights[id];
    const int pad = 3 - config->spec.ndim;
    int64_t shape[3] = {1, 1, 1}, begin[3] = {0}, local[3] = {1, 1, 1};
    if (!bench_ok(ep_spec_shard(&layer->mesh.mesh, &config->spec, config->name, config->shape,
                                layer->world->rank, begin + pad, local + pad),
                  "ep_spec_shard"))
        return false;
    memcpy(shape + pad, config->shape, (size_t)config->spec.ndim * sizeof(int64_t));
    *out = (Part){(begin[0] * shape[1] + begin[1]) * shape[2] + begin[2],
                  {shape[1] * shape[2], shape[2]},
                  {local[0], local[1], local[2]}};
    return true;
}

static bool fill_shard(Layer *layer, WeightId id) {
    const Contents contents = moe_contents(layer->options, id);
    MoeDevice *d = &layer->device;
    Part part;
    return part_of_shard(layer, id, &part) &&
           d->fill(d, &contents, &part, &layer->weights[id].shard);
}

/* ---- tensors ------------------------------------------------------------------------------- */

static EpTensor tensor_of(EpType type, int ndim, const int64_t *shape) {
    EpTensor t = ep_tensor_3d(NULL, type, 1, 1, 1);
    t.ndim = ndim;
    for (int d = 0; d < ndim; d++)
        t.shape[d] = shape[d];
    return t;
}

static EpTensor workspace_of(int64_t bytes) {
    return ep_tensor_1d(NULL, EP_TYPE_UINT8, bytes);
}

/* Elements that share a scale, in the form's own orientation. */
static void describe_blocks(Gathered *g) {
    const bool tiles = g->form.blocks == EP_BLOCKS_TILES;
    const int block = quant_format(g->form.quant)->block;
    g->block_columns = block, g->block_rows = tiles ? block : 1;
}

static bool describe_gathered(const Layer *layer, WeightId id, Gathered *g) {
    const Weight *w = &layer->weights[id];
    g->sizes = (EpWeightSizes)EP_WEIGHT_SIZES_INIT;
    if (!bench_ok(ep_weight_sizes(w->weight, &g->form, &g->sizes), "ep_weight_sizes")) return false;
    g->full = tensor_of(g->sizes.type, g->sizes.ndim, g->sizes.shape);
    g->scales = tensor_of(g->sizes.scale_type, g->sizes.ndim, g->sizes.scale_shape);
    g->workspace = workspace_of(g->sizes.gather_workspace);
    g->values = g->full;
    if (!quant_format(g->form.quant)->bits) return true;
    describe_blocks(g);
    g->values.type = EP_TYPE_FP32;
    return true;
}

/* Memory of its own, or that of the second layer below. */
static bool place(Layer *layer, EpTensor *t, const EpTensor *lent, const char *what) {
    if (lent) t->data = lent->data;
    if (lent) return true;
    layer->buffer_bytes += tensor_bytes(t);
    return tensor_alloc(layer, t, what);
}

#define LENT(member) (lent ? &lent->member : NULL)

static bool create_gathered(Layer *layer, const Weight *w, const Gathered *lent, Gathered *g) {
    if (w->whole) g->values = w->shard;
    if (w->whole) return true;
    if (!place(layer, &g->full, LENT(full), "a gathered weight") ||
        !place(layer, &g->workspace, LENT(workspace), "a workspace"))
        return false;
    if (!quant_format(g->form.quant)->bits) g->values = g->full;
    if (!quant_format(g->form.quant)->bits) return true;
    return place(layer, &g->scales, LENT(scales), "scales") &&
           (layer->multiplies_e4m3 ||
            place(layer, &g->values, LENT(values), "a dequantised weight"));
}

/* Blocks of a row, and operands of e4m3, lie along the dimension that the product sums over:
 * [E, out, in] forward. Tiles have the same bytes in both orientations: one gather serves both. */
static void choose_forms(const Layer *layer, WeightId id, Weight *w) {
    const MoeOptions *o = layer->options;
    const bool quantised = quant_format(o->quant)->bits;
    w->forward.form = (EpWeightForm)EP_WEIGHT_FORM_INIT;
    if (id == WEIGHT_ROUTER) return;
    w->two_forms = quantised && (o->blocks == EP_BLOCKS_ROWS || layer->multiplies_e4m3);
    w->turns = layer->multiplies_e4m3 && o->blocks == EP_BLOCKS_TILES && !o->forward;
    w->twice = !o->forward && ((w->two_forms && !w->turns) || o->regather);
    w->keeps = !w->twice;
    if (!quantised) return;
    w->forward.form.quant = (EpQuant)o->quant;
    w->forward.form.blocks = (EpBlocks)o->blocks;
    w->backward.form = w->forward.form;
    w->forward.form.transposed = w->two_forms;
    w->two_forms = w->two_forms && !o->forward;
}

static bool describe_weight(Layer *layer, WeightId id) {
    Weight *w = &layer->weights[id];
    const EpWeightConfig *config = &layer->mesh.weights[id];
    EpSharding *s = &w->sharding;
    *s = (EpSharding)EP_SHARDING_INIT;
    if (!bench_ok(ep_weight_create(layer->comm, config, &w->weight), "ep_weight_create") ||
        !bench_ok(ep_weight_sharding(w->weight, s), "ep_weight_sharding"))
        return false;
    choose_forms(layer, id, w);
    w->whole = s->scattered.num == 0 && !quant_format(w->forward.form.quant)->bits;
    w->twice = w->twice && !w->whole;
    w->shard = tensor_of(config->type, s->ndim, s->stored);
    w->grad = tensor_of(config->grad_type, s->ndim, s->used);
    w->grad_shard = tensor_of(config->reduced_type, s->ndim, s->stored);
    if (!describe_gathered(layer, id, &w->forward)) return false;
    if (w->two_forms && !describe_gathered(layer, id, &w->backward)) return false;
    if (w->turns) w->forward.workspace = workspace_of(0);
    w->reduce_workspace = workspace_of(w->forward.sizes.reduce_workspace);
    return true;
}

/* Weights in one form are gathered into one place, for both directions. */
static bool create_forms(Layer *layer, Weight *w, const Weight *lent) {
    const bool keeps_forward = w->keeps && !w->turns, keeps_backward = w->keeps && w->turns;
    if (!create_gathered(layer, w, keeps_forward ? NULL : LENT(forward), &w->forward)) return false;
    if (w->two_forms)
        return create_gathered(layer, w, keeps_backward ? NULL : LENT(backward), &w->backward);
    w->backward = w->forward;
    return true;
}

static bool create_weight(Layer *layer, WeightId id) {
    Weight *w = &layer->weights[id];
    const Layer *second = layer->below ? layer->below->below : NULL;
    const Weight *lent = second ? &second->weights[id] : NULL;
    const bool has_gradients =
        layer->options->forward ||
        (tensor_alloc(layer, &w->grad_shard, "a shard's gradient") &&
         place(layer, &w->grad, LENT(grad), "a weight's gradient") &&
         place(layer, &w->reduce_workspace, LENT(reduce_workspace), "a workspace"));
    return has_gradients && tensor_alloc(layer, &w->shard, "a weight's shard") &&
           create_forms(layer, w, lent) && fill_shard(layer, id);
}

static bool create_comm(Layer *layer) {
    EpMeshCommConfig config = EP_MESH_COMM_CONFIG_INIT;
    config.backend = layer->device.backend;
    if (layer->lender) layer->comm = layer->lender->comm;
    return layer->lender || bench_ok(ep_mesh_comm_create(&layer->world->boot, &layer->mesh.mesh,
                                                         &config, &layer->comm),
                                     "ep_mesh_comm_create");
}

static int64_t gathered_bytes(const Layer *layer, const Gathered *g) {
    const bool quantised = quant_format(g->form.quant)->bits;
    const bool values = quantised && !layer->multiplies_e4m3;
    return tensor_bytes(&g->full) + tensor_bytes(&g->workspace) +
           (quantised ? tensor_bytes(&g->scales) : 0) + (values ? tensor_bytes(&g->values) : 0);
}

int64_t weights_buffers(const Layer *layer, int64_t layers) {
    const int64_t shared = layers < 2 ? layers : 2;
    int64_t bytes = 0;
    for (int i = 0; i < NUM_WEIGHTS; i++) {
        const Weight *w = &layer->weights[i];
        bytes += shared * (tensor_bytes(&w->grad) + tensor_bytes(&w->reduce_workspace));
        if (w->whole) continue;
        bytes += (w->keeps && !w->turns ? layers : shared) * gathered_bytes(layer, &w->forward);
        if (w->two_forms)
            bytes += (w->keeps && w->turns ? layers : shared) * gathered_bytes(layer, &w->backward);
    }
    return bytes;
}

/* Of a stack: the lowest layer asks for all. */
static bool fits(Layer *layer) {
    const int64_t layers = layer->options->layers;
    const int64_t copies =
        layer->options->run.check ? 2 : 1; /* gradients, and those of layers apart */
    int64_t bytes = weights_buffers(layer, layers), room = layer->device.room(&layer->device);
    if (layers < 2 || layer->below) return true;
    for (int i = 0; i < NUM_WEIGHTS; i++)
        bytes += layers * (tensor_bytes(&layer->weights[i].shard) +
                           tensor_bytes(&layer->weights[i].grad_shard) * copies);
    return bytes <= room ||
           bench_refuse("--layers: expected room for %lld bytes, of the shards of %lld layers and "
                        "of %s, got %lld",
                        (long long)bytes, (long long)layers,
                        layer->weights[WEIGHT_W1].keeps ? "their weights (--regather 1: of two)"
                                                        : "the weights of two",
                        (long long)room);
}

bool weights_create(Layer *layer) {
    if (!world_all(layer->world, create_comm(layer))) return false;
    for (int i = 0; i < NUM_WEIGHTS; i++)
        if (!world_all(layer->world, describe_weight(layer, (WeightId)i))) return false;
    bool ok = fits(layer);
    for (int i = 0; ok && i < NUM_WEIGHTS; i++)
        ok = create_weight(layer, (WeightId)i);
    return world_all(layer->world, ok);
}

/* Bytes of all ones are NaN in every type of weights and scales. */
static bool spoil(Layer *layer, const EpTensor *t) {
    MoeDevice *d = &layer->device;
    return !t->data || d->set(d, t->data, 0xff, (size_t)tensor_bytes(t));
}

static bool spoil_gathered(Layer *layer, const Gathered *g) {
    return spoil(layer, &g->full) && spoil(layer, &g->scales);
}

bool weights_spoil(Layer *layer) {
    bool ok = true;
    if (layer->options->forward) return true; /* no step gathers them */
    for (int i = 0; ok && i < NUM_WEIGHTS; i++) {
        const Weight *w = &layer->weights[i];
        ok = spoil_gathered(layer, &w->forward) && spoil_gathered(layer, &w->backward) &&
             spoil(layer, &w->grad_shard);
    }
    return ok;
}

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

int64_t weights_workspace(const Layer *layer) {
    int64_t most = 0;
    for (int i = 0; i < NUM_WEIGHTS; i++) {
        const Weight *w = &layer->weights[i];
        most = larger(most, w->whole || w->turns ? 0 : w->forward.sizes.gather_workspace);
        most = larger(most, w->whole ? 0 : w->backward.sizes.gather_workspace);
        if (!layer->options->forward) most = larger(most, w->forward.sizes.reduce_workspace);
    }
    return most;
}

int moe_scattered_ranks(const Layer *layer, WeightId id) {
    int32_t scattered = 1;
    ep_mesh_group(&layer->mesh.mesh, &layer->weights[id].sharding.scattered, layer->world->rank,
                  &scattered, NULL, NULL);
    return scattered;
}
