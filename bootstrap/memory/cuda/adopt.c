/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Windows that the lent communicator already has, adopted by this rank alone while operations may
 * be running and a stream may be under capture. So nothing here allocates, waits for more than the
 * two kernels that it launches, or uses the default stream; and the calling thread's captures are
 * told not to mind.
 *
 * The table of addresses (EpCudaGroup.peers) may be read meanwhile. A sending kernel uses the row
 * of a window only where a receiver's arrival names it. Until this rank has adopted the id, such a
 * kernel finds NULL and fails the group (note_receiver); so no kernel that goes well uses the row
 * before it is complete, whatever graph or stream it comes from. It may have looked before: what it
 * found then, if not NULL, is what it finds later. One that does read it now
 * finds NULL or the address, since each is stored at once. A kernel launched after this call finds
 * the address: the row is in the GPU's memory when the call returns, and caches of a multiprocessor
 * do not outlive a kernel. The row is cleared again once no operation of any rank uses the window,
 * which is the caller's promise.
 */
#include "bootstrap/memory/cuda/cuda_memory.h"
#include "bootstrap/memory/cuda/probe.h"
#include "runtime/wait.h"

int64_t ep_cuda_adopting_bytes(const EpGroupConfig *config, int32_t num_ranks) {
    return config->nccl_comm ? (int64_t)sizeof(char *) * num_ranks : 0;
}

EpStatus ep_cuda_adopting_open(EpGroup *group) {
    EpCuda *cuda = ep_cuda(group);
    size_t bytes = (size_t)ep_cuda_adopting_bytes(&group->config, group->nodes.sizes.ranks);
    if (!bytes) return EP_OK;
    EP_TRY(ep_cuda_check(group, "loading kernels", ep_window_open_kernels()));
    EP_TRY(ep_cuda_check(group, "cudaHostAlloc", cudaHostAlloc((void **)&cuda->found, bytes, 0)));
    return ep_cuda_check(group, "cudaStreamCreate",
                         cudaStreamCreateWithFlags(&cuda->adopting, cudaStreamNonBlocking));
}

void ep_cuda_adopting_close(EpGroup *group) {
    EpCuda *cuda = ep_cuda(group);
    if (cuda->adopting) (void)cudaStreamDestroy(cuda->adopting);
    (void)cudaFreeHost(cuda->found);
}

/* Wait for a kernel, launched with result `launched`. */
static EpStatus finish(const EpGroup *group, const EpCall *call, int launched) {
    cudaError_t error;
    EpWait wait;
    EP_TRY(ep_cuda_check(group, call->name, launched));
    ep_wait_begin(&wait, group->timeout, 0);
    while ((error = cudaStreamQuery(ep_cuda(group)->adopting)) == cudaErrorNotReady) {
        (void)cudaGetLastError(); /* else the caller's next launch may report it */
        if (!ep_wait_pause(&wait))
            return ep_fail(EP_ERR_TIMEOUT,
                           "rank %d: %s: expected a free multiprocessor within %g s, got none",
                           group->rank, call->name, group->timeout);
    }
    return ep_cuda_check(group, call->name, error);
}

/* Store a window's addresses into its row of the table; NULL: clear the row. */
static EpStatus write_row(const EpGroup *group, const EpCall *call, int32_t number,
                          char *const *peers) {
    const EpCuda *cuda = ep_cuda(group);
    char *const *row = cuda->device.peers + (size_t)number * EP_CUDA_MAX_RANKS;
    return finish(group, call,
                  ep_window_publish((void *)(uintptr_t)row, peers, group->size, cuda->adopting));
}

/* ---- checks -------------------------------------------------------------------------------- */

static EpStatus check_nodes(const EpGroup *group, const EpCall *call) {
    if (group->nodes.sizes.nodes == 1) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "group",
                     "expected one on one node, since a window of the borrowed communicator "
                     "spans all of them, got %d nodes",
                     group->nodes.sizes.nodes);
}

static EpStatus check_lent(const EpGroup *group, const EpCall *call) {
    const EpCuda *cuda = ep_cuda(group);
    if (cuda->adopting && (cuda->nccl || group->size == 1)) return EP_OK;
    return ep_refuse(
        call, EP_ERR_UNSUPPORTED, "group",
        "expected one that borrows an NCCL communicator (EpGroupConfig.nccl_comm), got "
        "one that does not");
}

static EpStatus check_pointers(const EpGroup *group, const EpCall *call, const EpWindow *window) {
    if (!window->adopted)
        return ep_refuse(call, EP_ERR_NULL, "window", "expected an ncclWindow_t, got NULL");
    EP_TRY(ep_cuda_check_pointer(group, call, "window", window->adopted));
    return ep_cuda_check_pointer(group, call, "memory", window->memory);
}

/* Find where a window begins. NCCL before 2.29 does not tell: *begin stays as it is. */
static EpStatus find_begin(const EpGroup *group, const EpCall *call, void *window, void **begin) {
    char reason[192];
    const EpNccl *nccl = ep_nccl_load(reason, sizeof(reason)); /* one rank has not loaded it yet */
    if (!nccl) return ep_refuse(call, EP_ERR_UNSUPPORTED, "window", "%s", reason);
    ncclResult_t result = ncclSuccess;
    if (nccl->ncclWinGetUserPtr)
        result = nccl->ncclWinGetUserPtr((ncclComm_t)group->config.nccl_comm, window, begin);
    if (result == ncclSuccess) return EP_OK;
    return ep_refuse(call, EP_ERR_FOREIGN, "window",
                     "expected a window of the borrowed communicator, got %p: %s", window,
                     nccl->ncclGetErrorString(result));
}

/* Find this rank's offset in the window; where NCCL does not tell, it is 0. */
static EpStatus find_offset(const EpGroup *group, const EpCall *call, const EpWindow *window,
                            int64_t *out) {
    void *begin = window->memory;
    EP_TRY(find_begin(group, call, window->adopted, &begin));
    *out = (int64_t)((intptr_t)window->memory - (intptr_t)begin);
    if (*out >= 0) return EP_OK;
    return ep_refuse(call, EP_ERR_ADDRESS, "memory",
                     "expected memory of the window, which begins at %p, got %p", begin,
                     window->memory);
}

/* Returns whether two mappings are of the same memory. It may have been allocated in pieces. */
static int is_same(const char *a, const char *b, int64_t bytes) {
    for (int64_t at = 0; at < bytes;) {
        EpCudaBacking left = ep_cuda_backing(a + at), right = ep_cuda_backing(b + at);
        if (!left.handle || left.handle != right.handle || left.at != right.at) return 0;
        at += ep_min(left.left, right.left);
    }
    return 1;
}

/* Check that this rank's part of the window is the caller's memory, and that the peers' parts are
 * mapped: a window may serve networks alone. */
static EpStatus check_parts(const EpGroup *group, const EpCall *call, const EpWindow *window,
                            int64_t offset) {
    char *const *found = ep_cuda(group)->found;
    const char *begin = (const char *)window->memory - offset;
    if (!is_same(begin, found[group->rank], offset + (int64_t)window->bytes))
        return ep_refuse(
            call, EP_ERR_ADDRESS, "memory",
            "expected %zu bytes of the window%s, got %p, which are not in it", window->bytes,
            ep_cuda(group)->nccl->ncclWinGetUserPtr ? "" : " from its start on", window->memory);
    for (int32_t r = 0; r < group->size; r++)
        if (!ep_cuda_backing(found[r]).handle)
            return ep_refuse(call, EP_ERR_UNSUPPORTED, "window",
                             "expected one that reaches all ranks over NVLink, got one that does "
                             "not reach rank %d",
                             r);
    return EP_OK;
}

/* ---- adopting and releasing ---------------------------------------------------------------- */

static EpStatus adopt(EpGroup *group, const EpCall *call, const EpWindow *window) {
    EpCuda *cuda = ep_cuda(group);
    int64_t offset = 0;
    EP_TRY(check_pointers(group, call, window));
    if (group->size > 1) {
        EP_TRY(find_offset(group, call, window, &offset));
        EP_TRY(finish(group, call,
                      ep_window_find(window->adopted, group->size, cuda->found, cuda->adopting)));
        EP_TRY(check_parts(group, call, window, offset));
        EP_TRY(write_row(group, call, window->number, cuda->found));
    }
    cuda->windows[window->number] = (EpCudaWindow){.memory = window->memory,
                                                   .bytes = (int64_t)window->bytes,
                                                   .offset = offset,
                                                   .paired = window->paired,
                                                   .kind = EP_WINDOW_ADOPTED};
    if (cuda->num_windows <= window->number) cuda->num_windows = window->number + 1;
    return EP_OK;
}

/* From here on this rank receives nothing there; then senders forget the window. */
static EpStatus release(EpGroup *group, const EpCall *call, const EpWindow *window) {
    EpCuda *cuda = ep_cuda(group);
    cuda->windows[window->number] = (EpCudaWindow){.memory = NULL};
    while (cuda->num_windows > 0 && !cuda->windows[cuda->num_windows - 1].memory)
        cuda->num_windows--;
    return group->size > 1 ? write_row(group, call, window->number, NULL) : EP_OK;
}

/* Without this, calls that no capture may contain would end another stream's capture. */
static EpStatus beside_captures(EpGroup *group, const EpCall *call, const EpWindow *window,
                                EpStatus (*change)(EpGroup *, const EpCall *, const EpWindow *)) {
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    EP_TRY(ep_cuda_check(group, call->name, cudaThreadExchangeStreamCaptureMode(&mode)));
    EpStatus status = change(group, call, window);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return status;
}

EpStatus ep_cuda_adopt_window(EpGroup *group, const EpCall *call, const EpWindow *window) {
    EP_TRY(check_nodes(group, call));
    EP_TRY(check_lent(group, call));
    return beside_captures(group, call, window, adopt);
}

EpStatus ep_cuda_release_window(EpGroup *group, const EpCall *call, const EpWindow *window) {
    return beside_captures(group, call, window, release);
}

EpStatus ep_cuda_locate_window(EpGroup *group, const EpCall *call, void *window, void **memory,
                               size_t *bytes) {
    void *begin = NULL;
    EP_TRY(check_lent(group, call));
    EP_TRY(ep_cuda_check_pointer(group, call, "window", window));
    EP_TRY(find_begin(group, call, window, &begin));
    if (!begin)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "window",
                         "expected NCCL 2.29 or newer, which tells where a window begins, got an "
                         "older one");
    int64_t left = bytes ? ep_cuda_backing(begin).left : 1;
    if (!left)
        return ep_refuse(call, EP_ERR_ADDRESS, "window",
                         "expected memory from ncclMemAlloc or cuMemMap, got other memory at %p",
                         begin);
    *memory = begin;
    if (bytes) *bytes = (size_t)left;
    return EP_OK;
}
