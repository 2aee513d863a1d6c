/* SPDX-License-Identifier: Apache-2.0 */
/* ep_weight_move. Ranks of a node push rows through the rings of their windows (push_rows.cu).
 * Between nodes each row is a message of NCCL's. */
#include <string.h>

#include "handles/cuda/handle.h"
#include "handles/nodes/cuda/relay.h"
#include "handles/operation.h"
#include "handles/weights/cuda/push.h"
#include "handles/weights/cuda/slices.h"
#include "handles/weights/cuda/weight.h"
#include "runtime/cuda/digest.h"
#include "runtime/layout.h"

_Static_assert(EP_MOVE_ROWS <= EP_PUSH_ROWS, "a batch fits into a launch");

/* Of a row in a slice: so numbers of words, and of a batch's chunks, fit into 32 bits. */
#define MOST_CHUNKS (1 << 20)
#define MOST_BYTES (1 << 30)
#define LEAST_DEPTH 16 /* of a ring */

/** A move under way. */
typedef struct Work {
    const EpMove *move;
    EpWeightWork w; /* on one node */
    EpRelayRun run; /* on several */
    cudaStream_t stream;
    EpCudaGroup group; /* the node's ranks, with the operation's digest */
    int32_t chunk;     /* bytes of a record */
} Work;

static int has_nodes(const EpGroup *group) {
    return group->nodes.sizes.nodes > 1;
}

/* ---- within the node ----------------------------------------------------------------------- */

/* Take the rows of the node's ranks, and order these by their number of rows, most first. */
static void take_rows(const EpGroup *group, const EpMoveRows *rows, EpPushedRows *out) {
    int32_t size = ep_nodes_size(&group->nodes, group->nodes.node), own = group->nodes.rank;
    out->peers = 0, out->begin[0] = 0;
    for (int32_t i = 0; i < size; i++) {
        int32_t r = ep_nodes_member(&group->nodes, group->nodes.node, i);
        int32_t count = rows->begin[r + 1] - rows->begin[r];
        memcpy(out->row + out->begin[i], rows->row + rows->begin[r],
               (size_t)count * sizeof(*out->row));
        out->begin[i + 1] = (uint16_t)(out->begin[i] + count);
    }
    for (int32_t i = 1; i < size; i++) { /* ranks do not all begin with rank 0 */
        int32_t peer = (own + i) % size, at = out->peers;
        int32_t count = out->begin[peer + 1] - out->begin[peer];
        if (!count) continue;
        for (; at > 0; at--) {
            int32_t before = out->order[at - 1];
            if (out->begin[before + 1] - out->begin[before] >= count) break;
            out->order[at] = (uint8_t)before;
        }
        out->order[at] = (uint8_t)peer, out->peers++;
    }
}

static EpStatus push(Work *work, const EpMoveSlice *slice, const EpMoveBatch *batch) {
    const EpGroup *group = work->move->group;
    int64_t places = (int64_t)(uintptr_t)slice->from | (int64_t)(uintptr_t)slice->to;
    int32_t word = ep_push_word_of(places | slice->from_step | slice->to_step | slice->bytes);
    EpPushMoveArgs args = {.group = work->group,
                           .word = word,
                           .words = (int32_t)(slice->bytes / word),
                           .chunk = work->chunk / word,
                           .receivers = EP_PUSH_RECEIVERS(ep_weight_push_blocks(&work->w)),
                           .from_step = slice->from_step / word,
                           .to_step = slice->to_step / word,
                           .from = slice->from,
                           .to = slice->to};
    args.chunks = (args.words + args.chunk - 1) / args.chunk;
    take_rows(group, &batch->sent, &args.sent);
    take_rows(group, &batch->got, &args.got);
    EpCudaLauncher launch =
        ep_cuda_variant(group, ep_cuda_launch_push_rows, ep_cuda_launch_push_rows_masked);
    return ep_cuda_check(group, "moving experts",
                         launch(&args, ep_weight_push_blocks(&work->w), work->stream));
}

/* ---- between nodes ------------------------------------------------------------------------- */

static int is_far(const EpGroup *group, int32_t rank) {
    return group->nodes.of[rank] != group->nodes.node;
}

static void add_messages(const EpExchange *x, const EpGroup *group, const EpMoveSlice *s,
                         const EpMoveBatch *batch) {
    const EpMoveRows *sent = &batch->sent, *got = &batch->got;
    for (int32_t r = 0; r < group->size; r++) {
        if (!is_far(group, r)) continue;
        for (int32_t i = sent->begin[r]; i < sent->begin[r + 1]; i++)
            ep_exchange_send(x, r, s->from + sent->row[i] * s->from_step, (size_t)s->bytes);
        for (int32_t i = got->begin[r]; i < got->begin[r + 1]; i++)
            ep_exchange_receive(x, r, s->to + got->row[i] * s->to_step, (size_t)s->bytes);
    }
}

/* All ranks take part in each exchange: in it they also compare what they are in. */
static EpStatus exchange_far(Work *work, const EpMoveSlice *slice, const EpMoveBatch *batch) {
    EpExchange x;
    EP_TRY(ep_relay_begin_messages(&work->run, &x));
    if (slice->bytes) add_messages(&x, work->move->group, slice, batch);
    return ep_relay_end_messages(&work->run, &x);
}

/* ---- the operation ------------------------------------------------------------------------- */

static EpStatus exchange(void *context, const EpMoveSlice *slice, const EpMoveBatch *batch) {
    Work *work = context;
    const EpGroup *group = work->move->group;
    if (ep_nodes_size(&group->nodes, group->nodes.node) > 1) EP_TRY(push(work, slice, batch));
    return has_nodes(group) ? exchange_far(work, slice, batch) : EP_OK;
}

static EpStatus copy(void *context, void *to, const void *from, int64_t bytes) {
    const Work *work = context;
    if (!bytes) return EP_OK;
    return ep_cuda_check(
        work->move->group, "cudaMemcpyAsync",
        cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDeviceToDevice, work->stream));
}

static EpStatus begin_on_nodes(Work *work, uint32_t digest) {
    EpGroup *group = work->move->group;
    EpRelayCall call = {.stream = work->move->stream, .digest = digest};
    work->w.group = group, work->w.cuda = ep_cuda(group);
    EP_TRY(ep_relay_begin_group(group, &call, &work->run));
    work->stream = work->run.stream.stream;
    return EP_OK;
}

/* Ranks are out of step with one whose move has failed. */
static EpStatus end_on_nodes(Work *work, EpStatus status) {
    EpGroup *group = work->move->group;
    if (status == EP_OK) status = ep_relay_end_last(&work->run);
    if (status == EP_OK || group->failed != EP_OK) return status;
    EpFinding finding = EP_FINDING_INIT;
    finding.status = status, finding.rank = group->rank, finding.count = 1;
    strcpy(finding.phase, ep_op_weight_move.name);
    return ep_group_fail(group, &finding);
}

/* Make fewer and larger records of the rings: their words carry the epoch, so each operation may
 * divide the same memory in its own way. */
static void enlarge_records(EpWindowLayout *layout) {
    while (2 * layout->record_bytes <= EP_PUSH_BYTES && layout->depth > LEAST_DEPTH)
        layout->record_bytes *= 2, layout->depth /= 2;
}

/* As throughput mode does. */
static EpStatus refuse_cuts(EpGroup *group) {
    if (group->config.on_late != EP_LATE_MASK) return EP_OK;
    ep_cuda_poll(group);
    EP_TRY(ep_group_usable(group));
    return ep_refuse_cuts(group);
}

EpStatus ep_cuda_weight_move(const EpMove *move) {
    EpGroup *group = move->group;
    EP_TRY(refuse_cuts(group));
    Work work = {.move = move, .group = ep_cuda(group)->device};
    EpMover mover = {&work, INT64_MAX, exchange, copy};
    uint32_t digest = ep_digest_of(&ep_op_weight_move, 0, move->fact, EP_OP_FACTS);
    enlarge_records(&work.group.layout);
    work.chunk = (int32_t)ep_min(EP_PUSH_BYTES, work.group.layout.record_bytes / 16 * 16);
    mover.most_bytes = ep_min(MOST_BYTES, (int64_t)work.chunk * MOST_CHUNKS);
    work.group.digest = digest;
    if (has_nodes(group)) {
        EP_TRY(begin_on_nodes(&work, digest));
        return end_on_nodes(&work, ep_move_run(move, &mover));
    }
    EP_TRY(ep_weight_enter_alone(group, digest, move->stream, &work.w));
    work.stream = work.w.stream.stream;
    return ep_weight_end(&work.w, ep_move_run(move, &mover));
}
