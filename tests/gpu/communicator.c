/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/communicator.h"

#include <dlfcn.h>

static bool find(void *library, const char *name, void *function) {
    void *symbol = library ? dlsym(library, name) : NULL;
    memcpy(function, &symbol, sizeof(symbol));
    return symbol != NULL;
}

static bool load(Nccl *nccl) {
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    return find(library, "ncclGetVersion", &nccl->get_version) &&
           find(library, "ncclGetUniqueId", &nccl->get_unique_id) &&
           find(library, "ncclCommInitRankConfig", &nccl->init_rank) &&
           find(library, "ncclCommGetAsyncError", &nccl->async_error) &&
           find(library, "ncclAllReduce", &nccl->all_reduce) &&
           find(library, "ncclMemAlloc", &nccl->mem_alloc) &&
           find(library, "ncclMemFree", &nccl->mem_free) &&
           find(library, "ncclCommWindowRegister", &nccl->window_register) &&
           find(library, "ncclCommWindowDeregister", &nccl->window_deregister) &&
           find(library, "ncclCommAbort", &nccl->abort) &&
           find(library, "ncclCommDestroy", &nccl->destroy);
}

/* Processes that share a GPU are hosts of their own: tests/harness/ranked.c. */
void nccl_serves(Nccl *nccl, int ranks) {
    if (gpu_shares(ranks) && !getenv("NCCL_HOSTID"))
        check_left_out("NCCL wants a GPU for each rank");
    if (!load(nccl)) check_left_out("there is no libnccl.so.2");
}

void nccl_maps(Nccl *nccl, int ranks) {
    if (gpu_shares(ranks)) check_left_out("NCCL maps no windows of other hosts");
    nccl_serves(nccl, ranks);
}

bool nccl_locates(const Nccl *nccl) {
    int version = 0;
    nccl->get_version(&version);
    return version >= 22900;
}

/* Wait until a nonblocking communicator has completed a call. Returns false if it failed. */
static bool is_done(const Nccl *nccl, ncclComm_t comm, ncclResult_t result) {
    while (result == ncclInProgress)
        if (nccl->async_error(comm, &result) != ncclSuccess) return false;
    return result == ncclSuccess;
}

void nccl_rank_open(NcclRank *r, const EpBootstrap *harness, int blocking) {
    *r = (NcclRank){.harness = harness};
    nccl_serves(&r->nccl, harness->size);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocking;
    ncclUniqueId mine = {{0}}, *all = calloc((size_t)harness->size, sizeof(*all));
    if (harness->rank == 0) CHECK(r->nccl.get_unique_id(&mine) == ncclSuccess, "no id");
    REQUIRE_OK(harness->allgather(harness->context, &mine, all, sizeof(mine), 60));
    ncclResult_t result =
        r->nccl.init_rank(&r->comm, harness->size, all[0], harness->rank, &config);
    REQUIRE(r->comm && result == (blocking ? ncclSuccess : ncclInProgress), "%d", (int)result);
    free(all);
    r->stream = new_stream();
}

void nccl_rank_meet(const NcclRank *r) {
    CHECK_OK(r->harness->barrier(r->harness->context, 60));
}

void nccl_rank_check(const NcclRank *r) {
    int32_t number = 1 + r->harness->rank, sum = 0, *device = NULL;
    int expected = r->harness->size * (r->harness->size + 1) / 2;
    REQUIRE_CUDA(cudaMalloc((void **)&device, sizeof(*device)));
    CHECK_CUDA(cudaMemcpyAsync(device, &number, sizeof(number), cudaMemcpyDefault, r->stream));
    CHECK_CUDA(cudaStreamSynchronize(r->stream));
    /* NCCL's kernels wait for all ranks. While one does, other threads of a process may not be able
     * to allocate. */
    nccl_rank_meet(r);
    ncclResult_t result =
        r->nccl.all_reduce(device, device, 1, ncclInt32, ncclSum, r->comm, r->stream);
    CHECK(is_done(&r->nccl, r->comm, result), "ncclAllReduce");
    CHECK_CUDA(cudaStreamSynchronize(r->stream));
    CHECK_CUDA(cudaMemcpy(&sum, device, sizeof(sum), cudaMemcpyDefault));
    CHECK(sum == expected, "%d instead of %d", sum, expected);
    CHECK_CUDA(cudaFree(device));
}

void nccl_rank_close(NcclRank *r) {
    nccl_rank_check(r);
    CHECK_CUDA(cudaStreamDestroy(r->stream));
    CHECK(r->nccl.destroy(r->comm) == ncclSuccess, "ncclCommDestroy");
}

void nccl_rank_abort(NcclRank *r) {
    nccl_rank_meet(r);
    ncclResult_t result = r->nccl.abort(r->comm);
    CHECK(result == ncclSuccess || result == ncclInProgress, "ncclCommAbort: %d", (int)result);
    CHECK_CUDA(cudaStreamDestroy(r->stream));
}

/* Wait until the communicator has finished a call that returned `result`, which does not tell. */
static bool is_settled(const Nccl *nccl, ncclComm_t comm, ncclResult_t result) {
    bool started = result == ncclSuccess || result == ncclInProgress;
    return started && nccl->async_error(comm, &result) == ncclSuccess &&
           is_done(nccl, comm, result);
}

NcclWindow nccl_window_open(const NcclRank *r, size_t bytes) {
    NcclWindow w = {.bytes = bytes};
    void *memory = NULL;
    CHECK(r->nccl.mem_alloc(&memory, bytes) == ncclSuccess, "ncclMemAlloc");
    w.memory = memory;
    ncclResult_t result = r->nccl.window_register(r->comm, memory, bytes, &w.window, 0);
    CHECK(is_settled(&r->nccl, r->comm, result) && w.window, "ncclCommWindowRegister: %d",
          (int)result);
    return w;
}

void nccl_window_close(const NcclRank *r, NcclWindow *window) {
    CHECK(is_settled(&r->nccl, r->comm, r->nccl.window_deregister(r->comm, window->window)),
          "ncclCommWindowDeregister");
    CHECK(r->nccl.mem_free(window->memory) == ncclSuccess, "ncclMemFree");
    *window = (NcclWindow){.memory = NULL};
}
