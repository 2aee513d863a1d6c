/* SPDX-License-Identifier: Apache-2.0 */
/* ep_group_mask on GPUs: waits for this rank's kernels, launches the rendezvous, and waits. */
#include "handles/masks/cuda/mask.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "handles/cuda/handle.h"
#include "handles/placement/cuda/place.h"
#include "runtime/args.h"

EpStatus ep_cuda_open_masks(EpGroup *group) {
    EpCuda *cuda = ep_cuda(group);
    uint32_t words[EP_ALIVE_WORDS + 1] = {0};
    int64_t deadline_us = (int64_t)(group->timeout * 1e6);
    _Static_assert(offsetof(EpCudaState, late_us) ==
                       offsetof(EpCudaState, alive) + EP_ALIVE_WORDS * sizeof(uint32_t),
                   "written together");
    for (int32_t r = 0; r < cuda->device.size; r++)
        words[r / 32] |= 1u << r % 32;
    if (group->config.on_late == EP_LATE_MASK)
        words[EP_ALIVE_WORDS] = (uint32_t)ep_max(1, ep_min(group->config.late_us, deadline_us));
    if (!group->config.masks) return EP_OK;
    EP_TRY(ep_cuda_put(group, cuda->device.state->alive, words, sizeof(words)));
    for (int32_t r = 0; r < cuda->device.size; r++)
        cuda->incarnation[r] = EP_FIRST_INCARNATION;
    EP_TRY(ep_cuda_put(group, cuda->device.state->incarnation, cuda->incarnation,
                       sizeof(cuda->incarnation)));
    return ep_cuda_check(group, "cudaHostAlloc",
                         cudaHostAlloc((void **)&cuda->masked, sizeof(*cuda->masked), 0));
}

void ep_cuda_close_masks(EpGroup *group) {
    (void)cudaFreeHost(ep_cuda(group)->masked);
}

/* ---- failures ------------------------------------------------------------------------------ */

static EpStatus report_differs(const EpGroup *group, const EpMask *alive, const EpMaskResult *r,
                               EpFinding *finding) {
    int32_t rank = 0;
    while (rank + 1 < group->size &&
           ep_mask_has(alive, rank) == (int)(r->theirs[rank / 32] >> rank % 32 & 1))
        rank++;
    int here = ep_mask_has(alive, rank);
    finding->expected = here ? rank : -1, finding->seen = here ? -1 : rank;
    return ep_fail(EP_ERR_ORDER,
                   "rank %d: ep_group_mask: expected one set on all ranks, got rank %d as %s on "
                   "rank %d and as %s on rank %d",
                   group->rank, rank, here ? "alive" : "masked", group->rank,
                   here ? "masked" : "alive", r->rank);
}

static EpStatus report(const EpGroup *group, const EpMask *alive, const EpMaskResult *r,
                       EpFinding *finding) {
    finding->expected = finding->seen = -1;
    if (r->end == EP_MASK_DIFFERS) return report_differs(group, alive, r, finding);
    if (r->end == EP_MASK_ABORTED)
        return ep_fail(EP_ERR_ABORTED, "rank %d: ep_group_mask: the group was aborted",
                       group->rank);
    if (r->end == EP_MASK_GONE)
        return ep_fail(EP_ERR_TIMEOUT,
                       "rank %d: ep_group_mask: rank %d is in `alive`, but has ended or was "
                       "aborted",
                       group->rank, r->rank);
    return ep_fail(EP_ERR_TIMEOUT, "rank %d: ep_group_mask: rank %d did not call it within %g s",
                   group->rank, r->rank, group->timeout);
}

/* The group is suspended, or has failed. Returns the call's own status. */
static EpStatus fail(EpGroup *group, const EpMask *alive, const EpMaskResult *result) {
    EpFinding finding = EP_FINDING_INIT;
    EpStatus status = report(group, alive, result, &finding);
    char sentence[EP_SENTENCE_BYTES];
    snprintf(sentence, sizeof(sentence), "%s", ep_last_error());
    finding.status = status == EP_ERR_ABORTED ? status : EP_ERR_TIMEOUT;
    finding.rank = group->rank, finding.peer = result->rank, finding.count = 1;
    strcpy(finding.phase, "ep_group_mask");
    if (status == EP_ERR_ABORTED)
        (void)ep_group_fail(group, &finding);
    else
        (void)ep_group_suspend(group, &finding);
    return ep_fail(status, "%s", sentence);
}

/* ---- the call ------------------------------------------------------------------------------ */

/* Some rank lacks operations that this rank has sent: nobody receives them. */
static void drop_pending(EpGroup *group) {
    for (int captured = 0; captured < 2; captured++)
        for (int32_t i = 0; i < group->latency_sets; i++) {
            const EpHandle *handle = group->turns[captured].pending[i];
            if (handle) ep_flight_end((EpHandle *)(uintptr_t)handle);
        }
}

static void describe(const EpGroup *group, const EpMask *alive, EpMaskArgs *args) {
    const EpCuda *cuda = ep_cuda(group);
    *args = (EpMaskArgs){.group = cuda->device,
                         .sets = cuda->latency ? group->latency_sets : 0,
                         .latency = cuda->latency ? cuda->latency->device.state : NULL,
                         .result = cuda->masked};
    for (int i = 0; i < EP_ALIVE_WORDS; i++)
        args->alive[i] = alive->word[i];
}

/* Launch a block in the group's order. */
static EpStatus launch(EpGroup *group, EpCudaLauncher kernel, const void *args,
                       const EpCudaStream *stream) {
    EpCuda *cuda = ep_cuda(group);
    EP_TRY(ep_cuda_order_enter(group, &cuda->order, stream));
    return ep_cuda_order_leave(group, &cuda->order, stream, kernel(args, 1, stream->stream));
}

static EpStatus choose_copies(EpGroup *group, const EpCudaStream *stream) {
    const EpPlaceArgs args = {.group = ep_cuda(group)->device, .copies = group->copies};
    if (!args.copies.memory.of) return EP_OK;
    return launch(group, ep_cuda_launch_choose_copies, &args, stream);
}

EpStatus ep_cuda_choose_copies(EpGroup *group) {
    EpCudaStream stream;
    EP_TRY(ep_cuda_stream(group, ep_cuda(group)->stream, &stream));
    EP_TRY(choose_copies(group, &stream));
    return ep_cuda_check(group, "cudaStreamSynchronize", cudaStreamSynchronize(stream.stream));
}

/* A dispatch that has not come to its end may have left units in the counters of ready words. */
static EpStatus clear_counters(const EpGroup *group, const EpCudaStream *stream) {
    size_t bytes = (size_t)ep_cuda_counter_bytes(group->latency_sets);
    return ep_cuda_check(group, "cudaMemsetAsync",
                         cudaMemsetAsync(ep_cuda(group)->block_counters, 0, bytes, stream->stream));
}

/* The set of ranks has changed, and this rank's table of copies cannot follow. */
static EpStatus fail_copies(EpGroup *group) {
    EpFinding finding = EP_FINDING_INIT;
    finding.status = EP_ERR_SYSTEM, finding.rank = finding.peer = group->rank, finding.count = 1;
    strcpy(finding.phase, "ep_group_mask");
    return ep_group_fail(group, &finding);
}

EpStatus ep_cuda_mask(EpGroup *group, const EpMask *alive, EpStream on) {
    EpCall call = {"ep_group_mask", group->rank};
    EpCuda *cuda = ep_cuda(group);
    EpMaskResult *result = cuda->masked;
    EpCudaStream stream;
    EpMaskArgs args;
    EP_TRY(ep_cuda_stream(group, on, &stream));
    if (stream.captures)
        return ep_refuse(&call, EP_ERR_UNSUPPORTED, "stream",
                         "expected one that is not captured, since the call waits for other ranks");
    EP_TRY(ep_cuda_finish(group));
    ep_cuda_poll(group); /* what this rank's kernels have found meanwhile */
    if (group->failed != EP_OK) return ep_group_usable(group);
    *result = (EpMaskResult){.end = 0};
    describe(group, alive, &args);
    EP_TRY(clear_counters(group, &stream));
    EP_TRY(launch(group, ep_cuda_launch_mask, &args, &stream));
    EP_TRY(ep_cuda_check(group, "cudaStreamSynchronize", cudaStreamSynchronize(stream.stream)));
    if (result->end != EP_MASK_DONE) return fail(group, alive, result);
    cuda->chosen = (EpMask){{0}};
    if (result->drops) drop_pending(group);
    ep_cuda_settle_plans(group);
    memset(cuda->device.failure, 0, sizeof(*cuda->device.failure));
    return choose_copies(group, &stream) == EP_OK ? EP_OK : fail_copies(group);
}

EpStatus ep_cuda_cut(EpGroup *group, int32_t rank, EpStream on) {
    EpCall call = {"ep_group_cut", group->rank};
    EpMask cut = {{0}};
    EpCudaStream stream;
    EpMaskArgs args;
    EP_TRY(ep_cuda_stream(group, on, &stream));
    if (stream.captures)
        return ep_refuse(&call, EP_ERR_UNSUPPORTED, "stream", "expected one that is not captured");
    ep_mask_add(&cut, rank);
    describe(group, &cut, &args);
    EP_TRY(launch(group, ep_cuda_launch_cut, &args, &stream));
    return choose_copies(group, &stream);
}

/* Operations that have cut ranks cannot make the table: others may read it beside them. */
EpStatus ep_cuda_follow_cuts(EpGroup *group, const EpCudaStream *stream) {
    EpCuda *cuda = ep_cuda(group);
    if (!memcmp(&cuda->chosen, &group->cut, sizeof(cuda->chosen)) || stream->captures) return EP_OK;
    cuda->chosen = group->cut;
    return choose_copies(group, stream);
}
