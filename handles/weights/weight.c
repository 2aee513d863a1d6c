/* SPDX-License-Identifier: Apache-2.0 */
/* A weight's life: its configuration, which all ranks compare, and the groups that it needs. */
#include "handles/weights/weight.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/args.h"
#include "runtime/quant.h"

/* ---- configuration ------------------------------------------------------------------------- */

static EpStatus check_type(const EpCall *call, const char *field, EpType type) {
    if (ep_type_is_summable(type)) return EP_OK;
    return ep_refuse(call, EP_ERR_TYPE, field, "expected bf16, fp16 or fp32, got %s",
                     ep_type_name(type));
}

static EpStatus read_config(const EpCall *call, const EpMesh *mesh, const EpWeightConfig *given,
                            EpWeight *weight) {
    EpWeightConfig *config = &weight->config;
    *config = (EpWeightConfig)EP_WEIGHT_CONFIG_INIT;
    EP_TRY(
        ep_read_struct(call, "config", given, EP_FIRST_SIZE(EpWeightConfig, reduced_type), config));
    if (!config->name)
        return ep_refuse(call, EP_ERR_NULL, "config.name", "expected a text, got NULL");
    snprintf(weight->name, sizeof(weight->name), "%s", config->name);
    config->name = weight->name;
    if (config->kind != EP_TENSOR_WEIGHT && config->kind != EP_TENSOR_EXPERT_WEIGHT)
        return ep_refuse(call, EP_ERR_RANGE, "config.kind",
                         "expected EP_TENSOR_WEIGHT or EP_TENSOR_EXPERT_WEIGHT, got %d",
                         (int)config->kind);
    EP_TRY(check_type(call, "config.type", config->type));
    EP_TRY(check_type(call, "config.grad_type", config->grad_type));
    if (config->reduced_type != config->grad_type && config->reduced_type != EP_TYPE_FP32)
        return ep_refuse(call, EP_ERR_TYPE, "config.reduced_type",
                         "expected fp32 or the type of grad_type, %s, got %s",
                         ep_type_name(config->grad_type), ep_type_name(config->reduced_type));
    EP_TRY(ep_sharding(mesh, &config->spec, config->kind, weight->name, config->shape,
                       &weight->sharding));
    if (weight->sharding.ndim > EP_MAX_DIMS)
        return ep_refuse(call, EP_ERR_NDIM, weight->name, "expected at most %d dimensions, got %d",
                         EP_MAX_DIMS, weight->sharding.ndim);
    if (ep_size_of(1, config->shape, weight->sharding.ndim) <= EP_WEIGHT_MOST_ELEMENTS)
        return EP_OK;
    return ep_refuse(call, EP_ERR_RANGE, "config.shape",
                     "expected at most 2^48 elements, a size of 0 counted as 1, got more");
}

static void describe_shards(EpWeight *weight) {
    const EpSharding *s = &weight->sharding;
    weight->shards = (EpShards){.part = {1, 1, 1}, .count = {1, 1, 1}};
    for (int32_t d = 0; d < s->ndim; d++) {
        int at = 3 - s->ndim + d;
        weight->shards.part[at] = s->stored[d];
        weight->shards.count[at] = ep_axes_ranks(&weight->comm->mesh, &s->gathered[d]);
    }
}

/* ---- what a rank adds ---------------------------------------------------------------------- */

/* The axes along which gradients are added, in the mesh's order: so ranks ascend. */
static EpAxes reducing_axes(const EpWeight *weight) {
    EpAxes axes = {.num = 0};
    for (int32_t axis = 0; axis < weight->comm->mesh.num_axes; axis++)
        if (ep_axes_have(&weight->sharding.scattered, axis) ||
            ep_axes_have(&weight->sharding.summed, axis))
            ep_axes_add(&axes, axis);
    return axes;
}

/* Of so many bytes, a GPU adds whole shards in less time than two exchanges take. */
#ifndef EP_WHOLE_SUM_BYTES
#define EP_WHOLE_SUM_BYTES (16 << 20)
#endif

/* Whether ranks that keep the same shard divide the sum: with R ranks in it and D of these, a rank
 * receives (R - 1) / D gradients and (D - 1) / D fp32 sums of its shard, in place of R - 1
 * gradients. The sums are the same. */
static int divides_sums(const EpWeight *weight, const EpAxes *reducing) {
    const EpMesh *mesh = &weight->comm->mesh;
    const EpSharding *s = &weight->sharding;
    int64_t others = ep_axes_ranks(mesh, reducing) - 1;
    int64_t unit = (int64_t)ep_type_bytes(weight->config.grad_type);
    int is_small = weight->comm->config.backend == EP_BACKEND_CUDA &&
                   ep_size_of(unit, s->stored, s->ndim) <= EP_WHOLE_SUM_BYTES / ep_max(1, others);
    return ep_axes_ranks(mesh, &s->summed) > 1 && others * unit > 4 && !is_small;
}

/* Find the shard and the piece of each rank that adds. All memory of a weight is allocated here,
 * before the ranks meet: a rank without it would leave the others waiting. */
static EpStatus number_shards(const EpCall *call, EpWeight *weight) {
    const EpMesh *mesh = &weight->comm->mesh;
    const EpSharding *s = &weight->sharding;
    EpAxes reducing = reducing_axes(weight);
    int32_t coordinates[EP_MESH_MAX_AXES], size = ep_axes_ranks(mesh, &reducing);
    int divided = divides_sums(weight, &reducing);
    int32_t *ranks = malloc(sizeof(*ranks) * (size_t)size);
    weight->reduced = malloc(sizeof(*weight->reduced) * (size_t)size);
    EpStatus status = EP_OK;
    if (!ranks || !weight->reduced)
        status = ep_refuse(call, EP_ERR_NO_MEMORY, weight->name, "out of memory");
    if (status == EP_OK)
        status = ep_mesh_group(mesh, &reducing, weight->comm->world.rank, NULL, NULL, ranks);
    for (int32_t r = 0; r < size && status == EP_OK; r++) {
        ep_mesh_locate(mesh, ranks[r], coordinates);
        weight->reduced[r].shard = ep_axes_place(mesh, &s->scattered, coordinates);
        weight->reduced[r].piece = divided ? ep_axes_place(mesh, &s->summed, coordinates) : 0;
    }
    free(ranks);
    return status;
}

/* ---- agreement ----------------------------------------------------------------------------- */

enum { KIND, SHAPE, TYPES = SHAPE + EP_MAX_DIMS, FIELDS = TYPES + 3 };

/* What each rank tells all others. */
typedef struct WeightHello {
    EpRankStatus status;
    char name[EP_WEIGHT_NAME_BYTES];
    int64_t field[FIELDS];
    int32_t ndim;
    EpAxes dims[EP_MAX_DIMS];
} WeightHello;

_Static_assert(sizeof(WeightHello) <= EP_MESH_RENDEZVOUS_BYTES, "the mesh has memory for it");

static WeightHello describe(const EpWeight *weight, EpStatus status) {
    WeightHello hello;
    memset(&hello, 0, sizeof(hello));
    hello.status = ep_rank_status(status);
    if (status != EP_OK) return hello;
    const EpWeightConfig *config = &weight->config;
    memcpy(hello.name, weight->name, sizeof(hello.name));
    hello.field[KIND] = config->kind;
    hello.ndim = config->spec.ndim;
    for (int32_t d = 0; d < config->spec.ndim; d++) {
        hello.field[SHAPE + d] = config->shape[d];
        for (int32_t i = 0; i < config->spec.dims[d].num; i++)
            ep_axes_add(&hello.dims[d], config->spec.dims[d].axis[i]);
    }
    hello.field[TYPES] = config->type;
    hello.field[TYPES + 1] = config->grad_type;
    hello.field[TYPES + 2] = config->reduced_type;
    return hello;
}

static EpStatus compare_fields(const EpCall *call, const WeightHello *first,
                               const WeightHello *other, int32_t rank) {
    static const struct {
        const char *text;
        EpNames names;
    } fields[FIELDS] = {{"config.kind", EP_NAMES_TENSOR_KIND}, {"config.shape[0]", EP_NUMBERS},
                        {"config.shape[1]", EP_NUMBERS},       {"config.shape[2]", EP_NUMBERS},
                        {"config.type", EP_NAMES_TYPE},        {"config.grad_type", EP_NAMES_TYPE},
                        {"config.reduced_type", EP_NAMES_TYPE}};
    char mine[EP_NAME_BYTES], theirs[EP_NAME_BYTES];
    for (int i = 0; i < FIELDS; i++)
        if (other->field[i] != first->field[i])
            return ep_refuse(call, EP_ERR_MISMATCH, fields[i].text,
                             "expected one value on all ranks, got %s on rank 0 and %s on rank %d",
                             ep_name(fields[i].names, first->field[i], mine),
                             ep_name(fields[i].names, other->field[i], theirs), rank);
    return EP_OK;
}

static EpStatus compare_specs(const EpCall *call, const EpMesh *mesh, const WeightHello *first,
                              const WeightHello *other, int32_t rank) {
    char argument[48], mine[EP_AXES_TEXT_BYTES], theirs[EP_AXES_TEXT_BYTES];
    if (other->ndim != first->ndim)
        return ep_refuse(call, EP_ERR_MISMATCH, "config.spec",
                         "expected one number of dimensions on all ranks, got %d on rank 0 and %d "
                         "on rank %d",
                         first->ndim, other->ndim, rank);
    for (int32_t d = 0; d < first->ndim; d++) {
        snprintf(argument, sizeof(argument), "config.spec, dimension %d", d);
        if (memcmp(&other->dims[d], &first->dims[d], sizeof(*first->dims)) == 0) continue;
        EP_TRY(ep_axes_check(call, mesh, argument, &other->dims[d]));
        EP_TRY(ep_axes_check(call, mesh, argument, &first->dims[d]));
        return ep_refuse(call, EP_ERR_MISMATCH, argument,
                         "expected the same axes on all ranks, got %s on rank 0 and %s on rank %d",
                         ep_axes_text(mesh, &first->dims[d], mine),
                         ep_axes_text(mesh, &other->dims[d], theirs), rank);
    }
    return EP_OK;
}

static EpStatus compare(const EpCall *call, const EpMesh *mesh, const WeightHello *all,
                        int32_t size) {
    for (int32_t r = 1; r < size; r++) {
        if (strncmp(all[r].name, all[0].name, EP_WEIGHT_NAME_BYTES) != 0)
            return ep_refuse(call, EP_ERR_MISMATCH, "config.name",
                             "expected one name on all ranks, got %.63s on rank 0 and %.63s on "
                             "rank %d",
                             all[0].name, all[r].name, r);
        EP_TRY(compare_specs(call, mesh, &all[0], &all[r], r));
        EP_TRY(compare_fields(call, &all[0], &all[r], r));
    }
    return EP_OK;
}

/* ---- groups -------------------------------------------------------------------------------- */

static EpStatus find_groups(const EpCall *call, EpWeight *weight) {
    EpMeshComm *comm = weight->comm;
    const EpSharding *s = &weight->sharding;
    EpAxes reducing = reducing_axes(weight);
    EP_TRY(ep_mesh_comm_group(comm, call, &s->scattered, &weight->gathers));
    EP_TRY(ep_mesh_comm_group(comm, call, &reducing, &weight->reduces));
    if (divides_sums(weight, &reducing))
        EP_TRY(ep_mesh_comm_group(comm, call, &s->summed, &weight->replicates));
    EP_TRY(ep_mesh_comm_group(comm, call, &s->amax, &weight->maximises[0]));
    return ep_mesh_comm_group(comm, call, &s->amax_per_expert, &weight->maximises[1]);
}

/* All ranks agree: of the groups along the same axes, one may fail alone. */
static EpStatus open_groups(const EpCall *call, const EpWeight *weight) {
    const EpBackendOps *backend = weight->gathers->backend;
    EpRankStatus mine;
    if (!backend->open_weight) return EP_OK;
    mine = ep_rank_status(backend->open_weight(weight));
    return ep_mesh_comm_gather(weight->comm, call, &mine, sizeof(mine));
}

/* Pieces begin on multiples of 16 bytes, whatever the type. */
int64_t ep_weight_piece_stride(const EpWeight *weight) {
    int64_t pieces = weight->replicates ? weight->replicates->size : 1;
    return ep_round_up((ep_shard_elements(&weight->shards) + pieces - 1) / pieces, 64);
}

int64_t ep_weight_piece_length(const EpWeight *weight, int32_t piece) {
    int64_t stride = ep_weight_piece_stride(weight);
    int64_t left = ep_shard_elements(&weight->shards) - piece * stride;
    return ep_max(0, ep_min(stride, left));
}

/* ---- life ---------------------------------------------------------------------------------- */

static EpStatus check_own(const EpCall *call, const EpWeightConfig *config, EpWeight *const *out,
                          EpWeight *weight) {
    if (!weight) return ep_refuse(call, EP_ERR_NO_MEMORY, "out", "out of memory");
    if (!out) return ep_refuse(call, EP_ERR_NULL, "out", "expected a pointer, got NULL");
    EP_TRY(read_config(call, &weight->comm->mesh, config, weight));
    return number_shards(call, weight);
}

static void destroy_owned(void *weight) {
    ep_weight_destroy(weight);
}

EpStatus ep_weight_create(EpMeshComm *comm, const EpWeightConfig *config, EpWeight **out) {
    EpCall call = {"ep_weight_create", -1};
    EP_TRY(ep_object_check(&call, "comm", comm, EP_OBJECT_MESH_COMM));
    call.rank = comm->world.rank;
    EpWeight *weight = ep_object_create(EP_OBJECT_WEIGHT, sizeof(*weight));
    if (weight) weight->comm = comm, weight->sharding = (EpSharding)EP_SHARDING_INIT;
    WeightHello mine = describe(weight, check_own(&call, config, out, weight));
    EpStatus status = ep_mesh_comm_gather(comm, &call, &mine, sizeof(mine));
    if (status == EP_OK) status = compare(&call, &comm->mesh, comm->gathered, comm->world.size);
    if (status == EP_OK) status = find_groups(&call, weight);
    if (status == EP_OK) describe_shards(weight);
    if (status == EP_OK) status = open_groups(&call, weight);
    if (status != EP_OK) {
        if (weight) free(weight->reduced);
        free(weight);
        return status;
    }
    weight->number = ++comm->created;
    ep_owned_add(&comm->weights, &weight->owned, weight, destroy_owned);
    *out = weight;
    return EP_OK;
}

void ep_weight_destroy(EpWeight *weight) {
    EpCall call = {"ep_weight_destroy", -1};
    if (!weight || ep_object_check(&call, "weight", weight, EP_OBJECT_WEIGHT) != EP_OK) return;
    ep_owned_remove(&weight->owned);
    free(weight->reduced);
    weight->reduced = NULL;
    ep_object_retire(&weight->object);
}

EpStatus ep_weight_sharding(const EpWeight *weight, EpSharding *out) {
    EpCall call = {"ep_weight_sharding", -1};
    EP_TRY(ep_object_check(&call, "weight", weight, EP_OBJECT_WEIGHT));
    call.rank = weight->comm->world.rank;
    EP_TRY(ep_check_grown_struct(&call, "out", out, EP_FIRST_SIZE(EpSharding, amax_per_expert),
                                 sizeof(*out)));
    ep_write_struct(out, &weight->sharding);
    return EP_OK;
}

/* ---- forms --------------------------------------------------------------------------------- */

static EpStatus check_flag(const EpCall *call, const char *field, int32_t value) {
    if (value == 0 || value == 1) return EP_OK;
    return ep_refuse(call, EP_ERR_RANGE, field, "expected 0 or 1, got %d", value);
}

static EpStatus check_plain(const EpCall *call, const EpWeightForm *form) {
    if (form->transposed)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "form.transposed",
                         "expected 0 where nothing is quantised, got 1");
    return EP_OK;
}

static EpStatus check_quantised(const EpCall *call, const EpWeight *weight,
                                const EpWeightForm *form) {
    if (form->by_rank)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "form.by_rank",
                         "expected 0 where weights are quantised, got 1");
    EP_TRY(ep_arg_form(call, form->blocks, ep_quant_format(form->quant)));
    if ((form->transposed || form->blocks == EP_BLOCKS_TILES) && weight->sharding.ndim < 2)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "form",
                         "expected a weight of 2 or 3 dimensions for tiles and transposing, got %d",
                         weight->sharding.ndim);
    return EP_OK;
}

static EpStatus read_form(const EpCall *call, const EpWeight *weight, const EpWeightForm *given,
                          EpWeightForm *form) {
    *form = (EpWeightForm)EP_WEIGHT_FORM_INIT;
    if (given)
        EP_TRY(ep_read_struct(call, "form", given, EP_FIRST_SIZE(EpWeightForm, by_rank), form));
    EP_TRY(ep_arg_quant(call, "form.quant", form->quant));
    if (form->blocks != EP_BLOCKS_ROWS && form->blocks != EP_BLOCKS_TILES)
        return ep_refuse(call, EP_ERR_RANGE, "form.blocks", "expected an EpBlocks, got %d",
                         (int)form->blocks);
    EP_TRY(check_flag(call, "form.transposed", form->transposed));
    EP_TRY(check_flag(call, "form.by_rank", form->by_rank));
    return ep_quant_format(form->quant).bits ? check_quantised(call, weight, form)
                                             : check_plain(call, form);
}

static void swap(int64_t *a, int64_t *b) {
    int64_t value = *a;
    *a = *b;
    *b = value;
}

static EpShards shards_in_form(const EpWeight *weight, const EpWeightForm *form) {
    EpShards s = weight->shards;
    if (form->by_rank)
        s = (EpShards){.part = {1, 1, ep_shard_elements(&s)},
                       .count = {ep_shards_number(&s), 1, 1}};
    if (form->transposed) {
        swap(&s.part[1], &s.part[2]);
        swap(&s.count[1], &s.count[2]);
        s.transposed = 1;
    }
    return s;
}

static void describe_blocks(EpWeightView *view) {
    int64_t length = view->format.block;
    view->block[0] = 1;
    view->block[1] = view->form.blocks == EP_BLOCKS_TILES ? length : 1;
    view->block[2] = length;
    for (int d = 1; d < 3; d++)
        if (view->shards.count[d] > 1 && view->shards.part[d] % view->block[d]) view->straddles = 1;
}

int64_t ep_view_blocks(const EpWeightView *view, int dim) {
    return (ep_shards_whole(&view->shards, dim) + view->block[dim] - 1) / view->block[dim];
}

/* Where a block lies in several shards, each rank gathers the amaxes that all have found. A shard
 * that begins within a block touches one more of them. */
int64_t ep_view_touched(const EpWeightView *view, int dim) {
    const EpShards *s = &view->shards;
    int64_t blocks = (s->part[dim] + view->block[dim] - 1) / view->block[dim];
    return blocks + (s->count[dim] > 1 && s->part[dim] % view->block[dim] != 0);
}

int64_t ep_view_amax_bytes(const EpWeightView *view) {
    if (!view->straddles) return 0;
    int64_t blocks = ep_view_blocks(view, 0) * ep_view_blocks(view, 1) * ep_view_blocks(view, 2);
    int64_t touched = view->shards.part[0] * ep_view_touched(view, 1) * ep_view_touched(view, 2);
    return 4 * ep_round_up(blocks + ep_shards_number(&view->shards) * touched, 16);
}

static void describe_sizes(const EpWeight *weight, EpWeightView *view) {
    const EpSharding *s = &weight->sharding;
    EpWeightSizes *sizes = &view->sizes;
    int quantised = view->format.bits != 0;
    *sizes = (EpWeightSizes)EP_WEIGHT_SIZES_INIT;
    sizes->ndim = s->ndim;
    sizes->type = quantised ? view->format.type : weight->config.type;
    if (quantised) sizes->scale_type = ep_quant_scale_type(view->format);
    for (int32_t d = 0; d < s->ndim; d++) {
        int at = 3 - s->ndim + d;
        sizes->shape[d] = view->form.by_rank ? s->stored[d] : ep_shards_whole(&view->codes, at);
        if (quantised) sizes->scale_shape[d] = ep_view_blocks(view, at);
    }
    if (view->form.by_rank) sizes->shape[0] *= ep_shards_number(&weight->shards);
}

EpStatus ep_weight_view(const EpCall *call, const EpWeight *weight, const EpWeightForm *given,
                        EpWeightView *out) {
    *out = (EpWeightView){.straddles = 0};
    EP_TRY(read_form(call, weight, given, &out->form));
    out->format = ep_quant_format(out->form.quant);
    out->shards = out->codes = shards_in_form(weight, &out->form);
    if (out->format.bits) {
        out->codes.part[2] = ep_quant_width(out->format, out->shards.part[2]);
        describe_blocks(out);
    }
    describe_sizes(weight, out);
    weight->gathers->backend->measure_weight(weight, out);
    return EP_OK;
}

EpStatus ep_weight_sizes(const EpWeight *weight, const EpWeightForm *form, EpWeightSizes *out) {
    EpCall call = {"ep_weight_sizes", -1};
    EpWeightView view;
    EP_TRY(ep_object_check(&call, "weight", weight, EP_OBJECT_WEIGHT));
    call.rank = weight->comm->world.rank;
    EP_TRY(ep_weight_view(&call, weight, form, &view));
    EP_TRY(ep_check_grown_struct(&call, "out", out, EP_FIRST_SIZE(EpWeightSizes, reduce_workspace),
                                 sizeof(*out)));
    ep_write_struct(out, &view.sizes);
    return EP_OK;
}
