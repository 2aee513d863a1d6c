/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/weights/cuda/slices.h"

#include <stdlib.h>

#include "bootstrap/network/cuda/network.h"
#include "handles/weights/cuda/quantise.h"
#include "runtime/layout.h"

#define SHORT_BLOCKS 8    /* in place of one */
#define PACKING_BLOCKS 2  /* on a multiprocessor: more keep NCCL from starting */
#define ARRANGE_BLOCKS 32 /* copy as fast as the wire brings; more slow NCCL down */

/** Captured and plain calls have their own: a stream under capture takes no other work. */
typedef struct EpCudaSlices {
    struct {
        cudaStream_t wire;
        cudaEvent_t ready, moved;
    } side[2];
} EpCudaSlices;

/* ---- opening ------------------------------------------------------------------------------- */

EpStatus ep_cuda_slices_open(EpGroup *group) {
    if (group->purpose != EP_FOR_WEIGHTS || group->size == 1) return EP_OK;
    EpCudaSlices *s = calloc(1, sizeof(*s));
    ep_cuda(group)->slices = s;
    if (!s)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: out of memory", group->rank);
    EP_TRY(ep_cuda_check(group, "loading kernels",
                         ep_cuda_open_weight_kernels(ep_cuda(group)->shared_bytes)));
    EP_TRY(
        ep_cuda_check(group, "loading kernels", ep_cuda_open_push(ep_cuda(group)->shared_bytes)));
    for (int i = 0; i < 2; i++) {
        EP_TRY(ep_cuda_open_stream(group, 1, &s->side[i].wire));
        EP_TRY(ep_cuda_open_event(group, &s->side[i].ready));
        EP_TRY(ep_cuda_open_event(group, &s->side[i].moved));
    }
    return EP_OK;
}

/** The calls that let NCCL connect the ranks: one of each kind, but on one node, where few
 * reductions need messages, none of these, whose buffers are large. */
typedef struct Connecting {
    EpNcclCall call;
    const EpNccl *nccl;
    ncclComm_t comm;
    EpStamp *own, *all; /* zeros, which stay so */
    int32_t rank, size, sends;
    cudaStream_t wire;
} Connecting;

static ncclResult_t connect(EpNcclCall *call) {
    const Connecting *c = (const Connecting *)call;
    (void)c->nccl->ncclGroupStart();
    (void)c->nccl->ncclAllGather(c->own, c->all, sizeof(*c->own), ncclUint8, c->comm, c->wire);
    (void)c->nccl->ncclAllReduce(c->own, c->own, 1, ncclUint32, ncclMax, c->comm, c->wire);
    for (int32_t i = 1; i < c->size && c->sends; i++) {
        int32_t to = (c->rank + i) % c->size, from = (c->rank - i + c->size) % c->size;
        (void)c->nccl->ncclSend(c->own, sizeof(*c->own), ncclUint8, to, c->comm, c->wire);
        (void)c->nccl->ncclRecv(c->all + from, sizeof(*c->own), ncclUint8, from, c->comm, c->wire);
    }
    return c->nccl->ncclGroupEnd();
}

EpStatus ep_cuda_slices_connect(EpGroup *group) {
    EpCuda *cuda = ep_cuda(group);
    EpMarkArgs args = {.marks = {.num_peers = group->size}};
    if (!cuda->slices || !cuda->network) return EP_OK;
    Connecting *c = calloc(1, sizeof(*c));
    if (!c)
        return ep_fail(EP_ERR_NO_MEMORY, "rank %d: ep_group_create: out of memory", group->rank);
    ep_cuda_watch_describe(group, &args);
    *c = (Connecting){.call = {.make = connect, .device = cuda->ordinal},
                      .nccl = cuda->nccl,
                      .comm = cuda->network,
                      .own = args.marks.own,
                      .all = args.marks.own + 1,
                      .rank = group->rank,
                      .size = group->size,
                      .sends = group->nodes.sizes.nodes > 1,
                      .wire = cuda->slices->side[0].wire};
    return ep_cuda_network_connect(group, &c->call, c->wire);
}

void ep_cuda_slices_close(EpGroup *group) {
    EpCudaSlices *s = ep_cuda(group)->slices;
    for (int i = 0; s && i < 2; i++) {
        if (s->side[i].wire) (void)cudaStreamDestroy(s->side[i].wire);
        if (s->side[i].ready) (void)cudaEventDestroy(s->side[i].ready);
        if (s->side[i].moved) (void)cudaEventDestroy(s->side[i].moved);
    }
    free(s);
    ep_cuda(group)->slices = NULL;
}

/* ---- running ------------------------------------------------------------------------------- */

int ep_weight_slices(const EpSliceStages *stages, int64_t rows, int64_t bytes) {
    return (int)ep_max(1, ep_min(stages->most, ep_min(rows, bytes / EP_SLICE_BYTES)));
}

static int is_sliced(const EpWeightWork *w) {
    return w->wire != w->stream.stream;
}

/* Half of the multiprocessors and one are left to ep_prepare, and so two to dispatch. Without bulk
 * copies, which came with early launches, there are no stages. */
EpPushGrid ep_weight_push_grid(const EpWeightWork *w) {
    const int64_t sms = w->group->settings.weight_sms, blocks = w->cuda->device.blocks;
    const int64_t most = sms == EP_COUNT_AUTO ? EP_PUSH_BLOCKS : ep_min(sms, EP_PUSH_BLOCKS);
    const int64_t room = w->cuda->shared_bytes - EP_STATIC_SHARED_BYTES;
    EpPushGrid grid = {(int32_t)ep_max(2, ep_min(most, blocks - blocks / 2 - 1)), EP_PUSH_WARPS, 0};
    if (!w->cuda->device.early) return grid;
    grid.warps = (int32_t)ep_min(EP_PUSH_WARPS, room / EP_PUSH_BYTES);
    grid.shared_bytes = grid.warps * EP_PUSH_BYTES;
    return grid;
}

int ep_weight_blocks(const EpWeightWork *w) {
    return w->cuda->device.blocks * EP_QUANT_BLOCKS_PER_SM * (is_sliced(w) ? SHORT_BLOCKS : 1);
}

EpGrid ep_weight_packing_grid(const EpWeightWork *w) {
    if (!is_sliced(w)) return (EpGrid){ep_weight_blocks(w), 0};
    return (EpGrid){w->cuda->device.blocks * PACKING_BLOCKS, 0};
}

static EpGrid grid_beside(const EpWeightWork *w, int most) {
    if (!is_sliced(w)) return (EpGrid){ep_weight_blocks(w), 0};
    const int ctas = ep_cuda_weight_ctas(w->group);
    int left = w->cuda->device.most_blocks - ctas; /* NCCL's are not of the share */
    if (w->group->settings.weight_sms != EP_COUNT_AUTO) left = (int)ep_min(left, ctas);
    int blocks = (int)ep_min(ep_min(most, w->cuda->device.blocks), left);
    return (EpGrid){(int)ep_max(1, blocks), w->cuda->shared_bytes / 2 + 1024};
}

EpGrid ep_weight_arrange_grid(const EpWeightWork *w) {
    return grid_beside(w, ARRANGE_BLOCKS);
}

EpGrid ep_weight_sum_grid(const EpWeightWork *w) {
    return grid_beside(w, w->cuda->device.blocks);
}

/* Returns where a slice begins. Short slices are a quarter of the others, if there are rows enough.
 */
static int64_t slice_begin(const EpSliceStages *stages, int64_t rows, int slices, int number) {
    int64_t begins = stages->short_ends && stages->before ? 3 : 0;
    int64_t ends = stages->short_ends && stages->after ? 3 : 0;
    int64_t quarters = 4 * (int64_t)slices - begins - ends;
    if (rows < quarters) return rows * number / slices;
    if (number == 0) return 0;
    return number == slices ? rows : rows * (4 * number - begins) / quarters;
}

static EpSlice slice_of(const EpSliceStages *stages, int64_t rows, int slices, int number) {
    int64_t first = slice_begin(stages, rows, slices, number);
    return (EpSlice){first, slice_begin(stages, rows, slices, number + 1) - first};
}

static EpStatus run(const EpWeightWork *w, const void *operation, EpSlice slice,
                    EpStatus (*stage)(const EpWeightWork *, const void *, EpSlice)) {
    return stage ? stage(w, operation, slice) : EP_OK;
}

/* An event may be recorded anew once the wait for it has been enqueued. */
static EpStatus run_beside(const EpWeightWork *w, const EpSliceStages *stages,
                           const void *operation, int64_t rows, int slices) {
    cudaStream_t kernels = w->stream.stream;
    cudaEvent_t ready = w->cuda->slices->side[w->stream.captures].ready;
    cudaEvent_t moved = w->cuda->slices->side[w->stream.captures].moved;
    EP_TRY(run(w, operation, slice_of(stages, rows, slices, 0), stages->before));
    EP_TRY(ep_cuda_record(w->group, ready, kernels));
    for (int i = 0; i < slices; i++) {
        EP_TRY(ep_cuda_await(w->group, w->wire, ready));
        EP_TRY(run(w, operation, slice_of(stages, rows, slices, i), stages->move));
        EP_TRY(ep_cuda_record(w->group, moved, w->wire));
        if (i + 1 < slices) {
            EP_TRY(run(w, operation, slice_of(stages, rows, slices, i + 1), stages->before));
            EP_TRY(ep_cuda_record(w->group, ready, kernels));
        }
        EP_TRY(ep_cuda_await(w->group, kernels, moved));
        EP_TRY(run(w, operation, slice_of(stages, rows, slices, i), stages->after));
    }
    return EP_OK;
}

EpStatus ep_weight_run_slices(EpWeightWork *w, const EpSliceStages *stages, const void *operation,
                              int64_t rows, int slices) {
    if (slices > 1) {
        w->wire = w->cuda->slices->side[w->stream.captures].wire;
        EpStatus status = run_beside(w, stages, operation, rows, slices);
        w->wire = w->stream.stream;
        return status;
    }
    EpSlice all = {0, rows};
    EP_TRY(run(w, operation, all, stages->before));
    EP_TRY(run(w, operation, all, stages->move));
    return run(w, operation, all, stages->after);
}
