/* SPDX-License-Identifier: Apache-2.0 */
/* Gather on GPUs, in throughput mode: divides the work, describes it to the kernel, launches it. */
#include "combine/cuda/gather.h"

#include "combine/cuda/backend.h"
#include "combine/cuda/gather.h"
#include "handles/cuda/handle.h"
#include "runtime/cuda/blocks.h"

static int is_quantised(const EpGatherTensors *t) {
    return t->format.bits != 0;
}

static int64_t element_bytes(const EpGatherTensors *t) {
    return (int64_t)ep_type_bytes(t->type);
}

/* Returns the bytes of a partial sum on its way. */
static int64_t travelling_bytes(const EpGatherTensors *t) {
    return is_quantised(t) ? ep_packed_bytes(t->row_bytes / element_bytes(t)) : t->row_bytes;
}

/* Rows that travel as they are: a sender has an item for each rank, and a row for each entry. */
static void set_entry_traffic(EpGatherArgs *args, EpSpread s, EpTraffic *t) {
    t->sent = 2 * s.other, t->received = s.own + s.other + args->t.num_biases + 1;
    if (args->rounds) t->received = 2 * (s.own + s.other);
    ep_entry_times(s, args->t.row_bytes, t);
}

int ep_partition_gather(const EpTuning *tuning, EpGatherArgs *args, int32_t shared_bytes) {
    int32_t blocks = args->group.blocks;
    EpSpread s = ep_spread(&args->group, args->top_k);
    double sum = (double)travelling_bytes(&args->t) / (double)args->t.row_bytes;
    EpTraffic traffic = {.tuning = tuning,
                         .sent = s.other + sum * s.ranks,
                         .received = s.own + sum * s.ranks + args->t.num_biases + 1,
                         .least_send = tuning->sums_sent.least,
                         .most_send = tuning->sums_sent.most,
                         .ranks = s.ranks,
                         .scheduled = s.ranks,
                         .ordered = 1};
    EpGranularity granularity =
        ep_granularity(tuning, blocks, travelling_bytes(&args->t), tuning->sums);
    if (args->t.by_entry)
        set_entry_traffic(args, s, &traffic);
    else
        ep_sum_times(blocks, s, args->t.row_bytes, travelling_bytes(&args->t),
                     args->t.carries_values, &traffic);
    int32_t chunk = (int32_t)ep_max((int64_t)tuning->least_chunk, granularity.chunk);
    EpDivision division = ep_divide(blocks, args->top_k, args->t.row_bytes, chunk, traffic);
    int32_t loads = args->top_k + args->t.num_biases;
    EpWorkNeeds needs = {loads, loads, 1, granularity.active};
    args->chunk = division.claim;
    args->receivers = division.receivers, args->schedulers = division.schedulers;
    int64_t unit = is_quantised(&args->t) ? EP_PACKED_ELEMENTS * element_bytes(&args->t) : 16;
    int fits = ep_shape_pipeline(tuning, shared_bytes - EP_GATHER_STATIC_BYTES, args->t.row_bytes,
                                 unit, needs, &args->pipeline);
    if (is_quantised(&args->t))
        args->packed_stride =
            (int32_t)ep_packed_bytes(args->pipeline.stage_bytes / element_bytes(&args->t));
    return fits;
}

/* Let rows travel as they are, in records of all of a token's entries. */
static void take_entries(EpGatherArgs *args) {
    EpWindowLayout *layout = &args->group.layout;
    args->record = ep_entries_record(args->t.row_bytes, args->top_k, args->t.carries_values);
    layout->depth = layout->entries_depth, layout->record_bytes = layout->entries_bytes;
    args->t.weighs = 0;
}

EpStatus ep_cuda_gather(EpHandle *handle, const EpGather *g) {
    if (ep_handle_is_latency(handle)) return ep_cuda_latency_gather(handle, g);
    const EpGroup *group = handle->group;
    const EpCuda *cuda = ep_cuda(group);
    const EpGatherTensors *t = &g->t;
    EpGatherArgs args = {
        .group = ep_cuda_launch_group(handle),
        .plan = ep_cuda_plan(handle, g->plan, g->top_k, g->num_rows, t->num_slots, t->block_rows),
        .shape = handle->shape,
        .t = *t,
        .record = ep_record(travelling_bytes(t), t->carries_values ? g->top_k : 0, 0),
        .owners = group->nodes.sizes.ranks,
        .carries_weights = ep_carries_weights(t),
        .target = {t->row_bytes, g->top_k * (int64_t)sizeof(float)},
        .top_k = (int32_t)g->top_k,
        .stats = g->stats};
    if (t->by_entry) take_entries(&args);
    int64_t kinds = t->carries_values + 2 * args.carries_weights + 4 * t->weighs_entries;
    const int64_t agreed[] = {g->top_k, t->row_bytes,    t->type,
                              kinds,    t->format.quant, t->block_rows};
    args.group.digest = ep_cuda_digest(handle, g->op, agreed, 6);
    if (handle->shape.nodes.nodes > 1) return ep_cuda_gather_nodes(handle, g, &args);
    if (!ep_partition_gather(&cuda->tuned.constants, &args, cuda->shared_bytes))
        return ep_cuda_refuse_rows(group, t->row_bytes);
    EpCudaLauncher launch =
        ep_cuda_variant(group, ep_cuda_launch_gather, ep_cuda_launch_gather_masked);
    return ep_cuda_launch(handle, &(EpCudaLaunch){.launch = launch,
                                                  .args = &args,
                                                  .blocks = args.group.blocks,
                                                  .stream = g->stream});
}
