/* SPDX-License-Identifier: Apache-2.0 */
/* Scatter on GPUs, in throughput mode: divides the work, describes it to the kernel, launches it.
 */
#include "dispatch/cuda/scatter.h"

#include "dispatch/cuda/backend.h"
#include "handles/cuda/handle.h"
#include "runtime/cuda/blocks.h"
#include "runtime/quant.h"

/* ---- work partition ------------------------------------------------------------------------ */

#define WHOLE_ROW_STAGES 9 /* a row of 8 experts and its products */

/* How finely blocks divide rows. Receiving blocks claim as many tokens as sending ones. */
static EpGranularity granularity(const EpTuning *tuning, const EpScatterArgs *a, EpFineness large) {
    return ep_granularity(tuning, a->group.blocks, a->t.row_bytes, large);
}

/* Count a token's loads and stores where rows are copied. Of rows in windows the first slot is
 * stored by the sender. */
static EpTraffic copied_traffic(const EpTuning *tuning, const EpScatterArgs *a, EpSpread s) {
    double loaded = (double)a->t.source_row_bytes / (double)a->t.row_bytes;
    double arrived_in_place = a->zero_copy ? s.ranks : 0, copied = s.other - arrived_in_place;
    EpTraffic t = {.tuning = tuning,
                   .sent = loaded + s.own + s.ranks,
                   .received = s.ranks + copied,
                   .least_send = tuning->copies_sent.least,
                   .most_send = tuning->copies_sent.most,
                   .ranks = s.ranks,
                   .scheduled = s.ranks,
                   .scheduled_by_receivers = 1,
                   .ordered = 1};
    ep_copy_times(a->group.blocks, granularity(tuning, a, tuning->copies).active, a->top_k,
                  a->t.row_bytes, s.own + s.ranks, copied, &t);
    return t;
}

/* Likewise where they are multiplied. Receiving blocks multiply the rank's own rows, too, so
 * without other ranks nothing is sent. */
static EpTraffic multiplied_traffic(const EpTuning *tuning, const EpScatterArgs *a, EpSpread s) {
    double multiplied = a->t.takes_dots ? 2 * a->top_k : a->top_k;
    EpTraffic t = {.tuning = tuning,
                   .sent = s.ranks > 0 ? 1 + s.ranks : 0,
                   .received = 2 + s.ranks + multiplied,
                   .least_send = tuning->factors_sent.least,
                   .most_send = tuning->factors_sent.most,
                   .ranks = s.ranks,
                   .scheduled = s.ranks + s.stays,
                   .scheduled_by_receivers = 1};
    ep_multiply_times(a->group.blocks, granularity(tuning, a, tuning->factors).active, a->top_k,
                      a->t.row_bytes, &t);
    return t;
}

/* Returns how many tokens the scheduler warps of a block claim at a time, if they keep up. Where
 * rows are multiplied, one of few experts takes a block less time, so it counts as a smaller one.
 */
static int32_t chunk_of(const EpTuning *tuning, const EpScatterArgs *a) {
    if (!a->multiplied) return granularity(tuning, a, tuning->copies).chunk;
    int64_t row_bytes = ep_max(16, a->t.row_bytes * (1 + a->top_k) / WHOLE_ROW_STAGES);
    return ep_granularity(tuning, a->group.blocks, row_bytes, tuning->factors).chunk;
}

static EpDivision divide(const EpTuning *tuning, const EpScatterArgs *a) {
    EpSpread s = ep_spread(&a->group, a->top_k);
    EpTraffic traffic =
        a->multiplied ? multiplied_traffic(tuning, a, s) : copied_traffic(tuning, a, s);
    return ep_divide(a->group.blocks, a->top_k, a->t.row_bytes, chunk_of(tuning, a), traffic);
}

/* Returns what items of receiving blocks need. If rows are multiplied, an item also has a stage for
 * each slot, loaded together: two rows with the usual number of slots should fit. */
static EpWorkNeeds receive_needs(const EpScatterArgs *a, int32_t active) {
    int64_t stages = 1 + a->top_k;
    double usual = 1 + ep_spread(&a->group, a->top_k).row;
    if (!a->multiplied) return (EpWorkNeeds){a->top_k, 1, 1, active};
    return (EpWorkNeeds){stages, stages, (int64_t)(2 * usual + .5), active};
}

int ep_partition_scatter(const EpTuning *tuning, EpScatterArgs *args, int32_t shared_bytes,
                         int64_t unit) {
    EpDivision division = divide(tuning, args);
    EpGranularity send =
        granularity(tuning, args, args->multiplied ? tuning->factors : tuning->copies);
    EpFineness receive = {1, args->multiplied ? tuning->factors_received : tuning->copies_received};
    EpWorkNeeds sends = {args->top_k, 1, 1, send.active};
    int64_t room = shared_bytes - EP_SCATTER_STATIC_BYTES;
    args->receivers = division.receivers, args->schedulers = division.schedulers;
    args->chunk = division.claim;
    return ep_shape_pipeline(tuning, room, args->t.source_row_bytes, unit, sends, &args->send) &&
           ep_shape_pipeline(tuning, room, args->t.row_bytes, 16,
                             receive_needs(args, granularity(tuning, args, receive).active),
                             &args->receive);
}

/* ---- description --------------------------------------------------------------------------- */

/* Choose zero-copy receive: rows that are only copied are stored straight into their slots, if
 * these lie in a window of the group. Each rank sends the others its address there. A rank without
 * slots sends none: senders wait for the number of slots behind an address, which is not 0. */
static void choose_receive(const EpGroup *group, EpScatterArgs *args) {
    const EpScatterTensors *t = &args->t;
    int64_t offset;
    int window =
        ep_cuda_window_find(ep_cuda(group), t->out_rows, t->out_capacity * t->row_bytes, &offset);
    args->zero_copy = !args->multiplied && window >= 0 && t->num_slots > 0 && args->group.size > 1;
    args->paired = window >= 0 && ep_cuda(group)->windows[window].paired ? window : -1;
    uint64_t name = args->paired >= 0 ? EP_PAIRED : (uint64_t)(window + 1);
    if (args->zero_copy) args->where = name << 40 | (uint64_t)(offset / 16);
}

/* Returns the bytes of a quantised token's scales in the workspace, where compute warps store them
 * and metadata warps load them. */
static int64_t made_scale_bytes(EpQuantFormat format, int64_t elements) {
    int64_t unit = (int64_t)ep_type_bytes(ep_quant_scale_type(format));
    return ep_round_up(ep_quant_scales(format, elements) * unit, 16);
}

/* A step's scales in the format with the most, for the narrowest type, which has the most elements
 * per row. */
int64_t ep_cuda_workspace_bytes(const EpGroupConfig *config) {
    int64_t elements = config->max_row_bytes / 2, most = 0;
#define TAKE_MOST(name, ...) \
    most = ep_max(most, made_scale_bytes(ep_quant_format(EP_QUANT_##name), elements));
    EP_QUANT_MAP(TAKE_MOST)
#undef TAKE_MOST
    return config->max_tokens * most;
}

/* Rows are quantised in shared memory, in whole blocks of elements. Returns the number of bytes
 * that divides every fragment of a row. */
static int64_t describe_quantising(const EpHandle *handle, EpScatterArgs *args) {
    EpScatterTensors *t = &args->t;
    int64_t size = (int64_t)ep_type_bytes(t->source_type);
    if (!t->format.bits) return 16;
    args->made_scales = ep_cuda(handle->group)->workspace;
    args->source.scale_stride = made_scale_bytes(t->format, t->row_elements);
    while (8 * size >> args->send.shrink > t->format.bits)
        args->send.shrink++;
    t->scales = args->made_scales;
    return size * ep_max(t->format.block, ep_quant_unit(t->format));
}

EpStatus ep_cuda_scatter(EpHandle *handle, const EpScatter *s) {
    if (ep_handle_is_latency(handle)) return ep_cuda_latency_scatter(handle, s);
    const EpGroup *group = handle->group;
    const EpCuda *cuda = ep_cuda(group);
    const EpScatterTensors *t = &s->t;
    int64_t weights = t->carries_weights ? s->top_k : 0;
    EpScatterArgs args = {
        .group = ep_cuda_launch_group(handle),
        .plan = ep_cuda_plan(handle, s->plan, s->top_k, s->num_rows, t->num_slots, t->block_rows),
        .shape = handle->shape,
        .t = *t,
        .record = ep_record(t->row_bytes, weights, t->scale_bytes),
        .top_k = (int32_t)s->top_k,
        .multiplied = t->weighs || t->takes_dots ? (int32_t)t->type : 0,
        .owners = group->nodes.sizes.ranks,
        .source = {t->source_row_bytes, s->top_k * (int64_t)sizeof(float), t->scale_bytes},
        .stats = s->stats,
        .blocks = {.counter = cuda->block_counters, .clears = 1}};
    int64_t unit = describe_quantising(handle, &args);
    choose_receive(group, &args);
    const int64_t agreed[] = {s->top_k,       t->row_bytes,          t->type,
                              t->scale_bytes, ep_scatter_fact(s, 1), t->block_rows};
    args.group.digest = ep_cuda_digest(handle, s->op, agreed, 6);
    if (handle->shape.nodes.nodes > 1) return ep_cuda_scatter_nodes(handle, s, &args, unit);
    if (!ep_partition_scatter(&cuda->tuned.constants, &args, cuda->shared_bytes, unit))
        return ep_cuda_refuse_rows(group, t->row_bytes);
    EpCudaLauncher launch =
        ep_cuda_variant(group, ep_cuda_launch_scatter, ep_cuda_launch_scatter_masked);
    return ep_cuda_launch(handle, &(EpCudaLaunch){.launch = launch,
                                                  .args = &args,
                                                  .blocks = args.group.blocks,
                                                  .stream = s->stream});
}
