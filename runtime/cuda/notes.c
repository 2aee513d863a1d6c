/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/cuda/notes.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "runtime/cuda/cuda.h"
#include "runtime/log.h"
#include "runtime/wait.h"

#define SECONDS_TO_COPY 0.1 /* on a busy machine; else some microseconds */

_Static_assert(EP_ABORT_BYTES == 8 * EP_ABORT_WORDS, "host and kernels agree on the sentence");

EpStatus ep_cuda_notes_open(const EpGroup *group, EpCudaNotes *notes) {
    EP_TRY(ep_cuda_open_stream(group, 0, &notes->stream));
    EP_TRY(ep_cuda_check(group, "cudaHostAlloc",
                         cudaHostAlloc((void **)&notes->out, 2 * sizeof(*notes->out), 0)));
    memset(notes->out, 0, 2 * sizeof(*notes->out));
    notes->in = notes->out + 1;
    return EP_OK;
}

void ep_cuda_notes_close(EpCudaNotes *notes) {
    if (notes->stream) (void)cudaStreamDestroy(notes->stream);
    (void)cudaFreeHost(notes->out);
    *notes = (EpCudaNotes){.stream = NULL};
}

/* Other threads may be capturing: their captures forbid calls that could depend on them, which
 * copies on this stream do not. Returns what the second call takes. */
static enum cudaStreamCaptureMode allow_calls(void) {
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

static void restore_calls(enum cudaStreamCaptureMode mode) {
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

static cudaError_t copy(const EpCudaNotes *notes, void *to, const void *from, size_t bytes) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, notes->stream);
}

/* Wait until copies are done. Returns 0 if they fail or take long. */
static int await_copies(const EpCudaNotes *notes) {
    EpWait wait;
    cudaError_t error;
    ep_wait_begin(&wait, SECONDS_TO_COPY, 0);
    while ((error = cudaStreamQuery(notes->stream)) == cudaErrorNotReady && ep_wait_pause(&wait))
        ;
    if (error != cudaSuccess) (void)cudaGetLastError();
    return error == cudaSuccess;
}

/* ---- aborting ------------------------------------------------------------------------------ */

static int64_t ballot_of(const EpCudaGroup *g, int32_t voter) {
    return ep_ballots_at(&g->layout, g->size) + voter * (int64_t)sizeof(EpCudaBallot);
}

static cudaError_t tell_sentence(const EpCuda *cuda, const EpCudaNotes *notes) {
    const EpCudaGroup *g = &cuda->device;
    cudaError_t error = cudaSuccess;
    int64_t why = g->layout.aborted + (1 + g->rank) * (int64_t)EP_ABORT_BYTES;
    for (int r = 0; r < g->size && error == cudaSuccess; r++)
        if (ep_mask_has(&cuda->reached, r))
            error = copy(notes, g->window[r] + why, notes->out->why, EP_ABORT_BYTES);
    return error;
}

/* Store all sentences before any word: so a rank that learns of the abort from a peer, which has
 * seen its word, has the sentence too. This rank's own kernels are told last: they send their peers
 * the word that this rank has given up. */
static cudaError_t tell_all(const EpGroup *group, const EpCudaNotes *notes) {
    const EpCuda *cuda = ep_cuda(group);
    const EpCudaGroup *g = &cuda->device;
    cudaError_t error = tell_sentence(cuda, notes);
    int64_t at = group->config.masks
                     ? ballot_of(g, g->rank) + (int64_t)offsetof(EpCudaBallot, aborted)
                     : g->layout.aborted;
    for (int i = 1; i <= g->size && error == cudaSuccess; i++) {
        int to = (g->rank + i) % g->size;
        if (ep_mask_has(&cuda->reached, to))
            error = copy(notes, g->window[to] + at, &notes->out->word, sizeof(uint64_t));
    }
    return error;
}

/* Peers that look must find the word before this rank goes on: it may be in its next group while
 * they destroy this one. */
static void tell_and_wait(const EpGroup *group, const EpCudaNotes *notes) {
    enum cudaStreamCaptureMode mode = allow_calls();
    cudaError_t error = tell_all(group, notes);
    if (error == cudaSuccess) (void)await_copies(notes);
    restore_calls(mode);
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();
    EP_WARN("ep_group_abort: kernels that wait end at their deadline: %s",
            cudaGetErrorString(error));
}

int ep_cuda_abort(EpGroup *group, const char *sentence, int leaving) {
    const EpCuda *cuda = ep_cuda(group);
    EpCudaNote *out = cuda->notes.out;
    int32_t rank = cuda->device.rank;
    if (__atomic_load_n(&cuda->device.failure->fault, __ATOMIC_ACQUIRE)) return 0;
    if (leaving) return 1; /* this rank's kernels have ended, and peers may free their windows */
    out->word = group->config.masks ? cuda->incarnation[rank] : 1 + (uint64_t)rank;
    memcpy(out->why, sentence, EP_ABORT_BYTES);
    tell_and_wait(group, &cuda->notes);
    return 1;
}

void ep_cuda_repeat_abort(EpGroup *group) {
    if (ep_abort_requested(&group->abort)) tell_and_wait(group, &ep_cuda(group)->notes);
}

/* ---- refused calls ------------------------------------------------------------------------- */

/* What is told here serves a sentence alone: if it fails, peers say less. */
void ep_cuda_tell_refusal(EpGroup *group, const char *text) {
    EpCudaNotes *notes = &ep_cuda(group)->notes;
    enum cudaStreamCaptureMode mode = allow_calls();
    memcpy(notes->out->why, text, EP_ABORT_BYTES);
    if (tell_sentence(ep_cuda(group), notes) != cudaSuccess) (void)cudaGetLastError();
    (void)await_copies(notes); /* `out` is free again */
    restore_calls(mode);
}

void ep_cuda_settle_notes(EpGroup *group) {
    enum cudaStreamCaptureMode mode = allow_calls();
    (void)await_copies(&ep_cuda(group)->notes);
    restore_calls(mode);
}

/* ---- looking ------------------------------------------------------------------------------- */

/* Read from this rank's own window, if the stream does it soon. Returns 0 if not. */
static int read_window(const EpCudaNotes *notes, void *to, const char *from, size_t bytes) {
    if (copy(notes, to, from, bytes) == cudaSuccess) return await_copies(notes);
    (void)cudaGetLastError();
    return 0;
}

static int read_sentence(const EpCudaGroup *g, const EpCudaNotes *notes, int32_t rank,
                         char out[EP_ABORT_BYTES]) {
    const char *slot =
        g->window[g->rank] + g->layout.aborted + (1 + rank) * (int64_t)EP_ABORT_BYTES;
    out[0] = 0;
    if (!read_window(notes, notes->in->why, slot, EP_ABORT_BYTES)) return 0;
    memcpy(out, notes->in->why, EP_ABORT_BYTES);
    out[EP_ABORT_BYTES - 1] = 0;
    return 1;
}

/* Masks: a living rank that is aborted, or, for a rank that ends, that has masked it and does not
 * wait for it. */
static int32_t find_aborted_or_masker(const EpGroup *group, char why[EP_ABORT_BYTES]) {
    const EpCudaGroup *g = &ep_cuda(group)->device;
    const EpCudaNotes *notes = &ep_cuda(group)->notes;
    const char *window = g->window[g->rank] + offsetof(EpCudaBallot, masked);
    uint64_t *words = notes->in->parted; /* masked, aborted */
    for (int32_t r = 0; r < g->size; r++) {
        if (r == g->rank || !ep_mask_has(&group->alive, r)) continue;
        if (!read_window(notes, words, window + ballot_of(g, r), 2 * sizeof(*words))) return -1;
        if (words[1] == ep_cuda(group)->incarnation[r])
            return read_sentence(g, notes, r, why) ? r : -1;
        if (!words[0] || !group->ends) continue;
        snprintf(why, EP_ABORT_BYTES, "it has masked this rank");
        return r;
    }
    return -1;
}

static int32_t find_aborted(const EpGroup *group, char why[EP_ABORT_BYTES]) {
    const EpCudaGroup *g = &ep_cuda(group)->device;
    const EpCudaNotes *notes = &ep_cuda(group)->notes;
    EpCudaNote *in = notes->in;
    if (group->config.masks) return find_aborted_or_masker(group, why);
    const char *aborted = g->window[g->rank] + g->layout.aborted;
    if (!read_window(notes, &in->word, aborted, sizeof(in->word))) return -1;
    int32_t rank = (int32_t)in->word - 1;
    if (rank < 0 || rank >= g->size || rank == g->rank) return -1;
    return read_sentence(g, notes, rank, why) ? rank : -1;
}

/* Returns a rank whose kernels have given up because of this one, `self`, or -1. */
static int32_t find_gone(const EpCudaGroup *g, const EpCudaNotes *notes, int32_t self) {
    const EpArrival *arrivals = notes->in->arrivals;
    size_t bytes = 2 * (size_t)g->size * sizeof(EpArrival);
    const char *window = g->window[g->rank];
    if (!read_window(notes, notes->in->arrivals, window + g->layout.arrival, bytes)) return -1;
    for (int32_t i = 0; i < 2 * g->size; i++)
        if (i % g->size != g->rank && (uint32_t)arrivals[i].gone == 1 + (uint32_t)self)
            return i % g->size;
    return -1;
}

/* Returns the number on this node of a rank of the group, or -1. */
static int32_t find_here(const EpGroup *group, int32_t rank) {
    int32_t here = ep_cuda(group)->device.size;
    for (int32_t r = 0; r < here; r++)
        if (ep_nodes_member(&group->nodes, group->nodes.node, r) == rank) return r;
    return -1;
}

int32_t ep_cuda_find_failed(EpGroup *group, int32_t *blamed, char why[EP_ABORT_BYTES]) {
    const EpCuda *cuda = ep_cuda(group);
    const EpCudaGroup *g = &cuda->device;
    int before = ep_cuda_use(cuda->ordinal);
    enum cudaStreamCaptureMode mode = allow_calls();
    int departs = group->ends && group->abort.refusal[0];
    int32_t gone = -1, rank = find_aborted(group, why);
    if (rank < 0 && departs) why[0] = 0, gone = find_gone(g, &cuda->notes, group->rank);
    if (rank < 0) rank = gone;
    restore_calls(mode);
    ep_cuda_restore(before);
    if (rank >= 0) rank = ep_nodes_member(&group->nodes, group->nodes.node, rank);
    *blamed = gone >= 0 ? group->rank : rank;
    return rank;
}

void ep_cuda_find_refusal(const EpGroup *group, int32_t rank, char text[EP_ABORT_BYTES]) {
    const EpCuda *cuda = ep_cuda(group);
    int32_t here = find_here(group, rank);
    text[0] = 0;
    if (here < 0) return;
    int before = ep_cuda_use(cuda->ordinal);
    enum cudaStreamCaptureMode mode = allow_calls();
    (void)read_sentence(&cuda->device, &cuda->notes, here, text);
    restore_calls(mode);
    ep_cuda_restore(before);
}
