/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/weights/cuda/nccl.h"

#include <string.h>

#include "bootstrap/network/cuda/network.h"
#include "runtime/cuda/digest.h"

static EpStatus check_comm(const EpWeightWork *w) {
    if (w->group->size == 1 || ep_cuda_group_comm(w->cuda)) return EP_OK;
    return ep_fail(EP_ERR_UNSUPPORTED,
                   "rank %d: sharded weights: expected a GPU for each rank, since NCCL moves them, "
                   "got ranks that share one (they may where NCCL_HOSTID of every rank differs)",
                   w->group->rank);
}

/* The number of a weight takes the place of a handle's id. */
static uint32_t digest_of(const EpWeightFacts *f) {
    const int64_t values[] = {f->number, f->form, f->bytes};
    return ep_digest_of(f->op, (f->number - 1) % EP_MAX_HANDLE_ID + 1, values, 3);
}

static EpStatus launched(const EpWeightWork *w, int error) {
    return ep_cuda_check(w->group, "kernel launch", error);
}

static EpStatus compare(const EpWeightWork *w) {
    if (w->group->nodes.sizes.nodes == 1)
        return launched(w, ep_cuda_launch_meet(&w->mark, w->stream.stream));
    EpStamp *own = w->mark.marks.own, *all = own + 1;
    EP_TRY(launched(w, ep_cuda_launch_begin(&w->mark, w->stream.stream)));
    EP_TRY(ep_cuda_network_enter(w->group, &w->stream));
    EP_TRY(ep_cuda_network_settle(w->group, "ncclAllGather",
                                  w->cuda->nccl->ncclAllGather(own, all, sizeof(*own), ncclUint8,
                                                               w->comm, w->stream.stream)));
    return launched(w, ep_cuda_launch_compare(&w->mark, w->stream.stream));
}

static void describe(EpGroup *group, EpStream stream, EpWeightWork *w) {
    EpCuda *cuda = ep_cuda(group);
    *w = (EpWeightWork){.group = group, .cuda = cuda, .comm = cuda->network};
    w->stream.stream = w->wire = stream;
}

EpStatus ep_weight_enter_alone(EpGroup *group, uint32_t digest, EpStream stream, EpWeightWork *w) {
    describe(group, stream, w);
    if (group->size == 1) return EP_OK;
    EP_TRY(ep_cuda_stream(group, stream, &w->stream));
    w->mark = (EpMarkArgs){.group = w->cuda->device, .marks = {.num_peers = group->size}};
    w->mark.group.digest = digest, w->pushes = 1;
    return ep_cuda_order_enter(group, &w->cuda->order, &w->stream);
}

EpStatus ep_weight_enter(EpGroup *group, const EpWeightFacts *facts, EpStream stream,
                         EpWeightWork *w) {
    describe(group, stream, w);
    EP_TRY(check_comm(w));
    return ep_weight_enter_alone(group, digest_of(facts), stream, w);
}

EpStatus ep_weight_begin(EpGroup *group, const EpWeightFacts *facts, EpStream stream,
                         EpWeightWork *w) {
    EP_TRY(ep_weight_enter(group, facts, stream, w));
    if (group->size == 1) return EP_OK;
    w->pushes = 0;
    ep_cuda_watch_describe(group, &w->mark);
    EpStatus status = compare(w);
    return status == EP_OK ? EP_OK : ep_weight_end(w, status);
}

/* The calls in between return what is wrong with their arguments, and ncclGroupEnd returns the
 * same, so only its result counts. */
EpStatus ep_weight_group_start(const EpWeightWork *w) {
    EP_TRY(ep_cuda_network_enter(w->group, &w->stream));
    (void)w->cuda->nccl->ncclGroupStart();
    return EP_OK;
}

EpStatus ep_weight_group_end(const EpWeightWork *w, const char *what) {
    return ep_cuda_network_settle(w->group, what, w->cuda->nccl->ncclGroupEnd());
}

EpStatus ep_weight_end(EpWeightWork *w, EpStatus status) {
    if (w->group->size == 1) return status;
    w->mark.marks.last = 1;
    if (status == EP_OK) {
        int error = w->pushes ? 0 : ep_cuda_launch_move(&w->mark, w->stream.stream);
        status = ep_cuda_order_leave(w->group, &w->cuda->order, &w->stream, error);
    }
    if (status == EP_OK || w->group->failed != EP_OK) return status;
    EpFinding finding = EP_FINDING_INIT;
    finding.status = status, finding.rank = w->group->rank, finding.count = 1;
    strncpy(finding.phase, ep_op_name(EP_DIGEST_OP(w->mark.group.digest)),
            sizeof(finding.phase) - 1);
    return ep_group_fail(w->group, &finding);
}
