/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/communicator.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/devices.h"

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
bool nccl_serves(Nccl *nccl, int ranks) {
    int lacks_gpus = gpu_shares(ranks) && !getenv("NCCL_HOSTID");
    const char *lacks = lacks_gpus   ? "NCCL wants a GPU for each rank"
                        : load(nccl) ? NULL
                                     : "there is no libnccl.so.2";
    if (lacks) check_left_out(lacks);
    return !lacks;
}

bool nccl_maps(Nccl *nccl, int ranks) {
    if (!gpu_shares(ranks)) return nccl_serves(nccl, ranks);
    check_left_out("NCCL maps no windows of other hosts");
    return false;
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

ncclComm_t nccl_communicator(const Nccl *nccl, const EpBootstrap *bootstrap, int blocking) {
    ncclComm_t comm = NULL;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = blocking;
    ncclUniqueId mine = {{0}}, *all = calloc((size_t)bootstrap->size, sizeof(*all));
    if (bootstrap->rank == 0) CHECK(nccl->get_unique_id(&mine) == ncclSuccess, "no id");
    if (CHECK_OK(bootstrap->allgather(bootstrap->context, &mine, all, sizeof(mine), 60))) {
        ncclResult_t result =
            nccl->init_rank(&comm, bootstrap->size, all[0], bootstrap->rank, &config);
        CHECK(result == (blocking ? ncclSuccess : ncclInProgress), "got %d", (int)result);
    }
    free(all);
    return comm;
}

/* Wait until the communicator has finished a call that returned `result`, which does not tell. */
static bool is_settled(const Nccl *nccl, ncclComm_t comm, ncclResult_t result) {
    bool started = result == ncclSuccess || result == ncclInProgress;
    return started && nccl->async_error(comm, &result) == ncclSuccess &&
           is_done(nccl, comm, result);
}

NcclWindow nccl_window_open(const Nccl *nccl, ncclComm_t comm, size_t bytes) {
    NcclWindow w = {.bytes = bytes};
    void *memory = NULL;
    CHECK(nccl->mem_alloc(&memory, bytes) == ncclSuccess, "ncclMemAlloc");
    w.memory = memory;
    ncclResult_t result = nccl->window_register(comm, memory, bytes, &w.window, 0);
    CHECK(is_settled(nccl, comm, result) && w.window, "ncclCommWindowRegister: %d", (int)result);
    return w;
}

void nccl_window_close(const Nccl *nccl, ncclComm_t comm, NcclWindow *window) {
    CHECK(is_settled(nccl, comm, nccl->window_deregister(comm, window->window)),
          "ncclCommWindowDeregister");
    CHECK(nccl->mem_free(window->memory) == ncclSuccess, "ncclMemFree");
    *window = (NcclWindow){.memory = NULL};
}

void nccl_check_step(EpGroup *group, const Case *c, int rank, cudaStream_t stream) {
    DeviceStep gpu;
    World *world = world_new(c);
    device_step_open(&gpu, group, device_step_handle(group, c), c, rank, stream, NULL);
    device_step_load(&gpu, world);
    device_step_issue(&gpu, STEP_ALL);
    device_step_check(&gpu);
    CHECK_OK(ep_group_status(group, NULL));
    device_step_close(&gpu);
    world_free(world);
}

void nccl_check_works(const Nccl *nccl, ncclComm_t comm, const EpBootstrap *bootstrap,
                      cudaStream_t stream) {
    int32_t number = 1 + bootstrap->rank, sum = 0, *device = NULL;
    int expected = bootstrap->size * (bootstrap->size + 1) / 2;
    REQUIRE_CUDA(cudaMalloc((void **)&device, sizeof(*device)));
    CHECK_CUDA(cudaMemcpyAsync(device, &number, sizeof(number), cudaMemcpyDefault, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    /* NCCL's kernels wait for all ranks. While one does, other threads of a process may not be able
     * to allocate. */
    CHECK_OK(bootstrap->barrier(bootstrap->context, 60));
    ncclResult_t result = nccl->all_reduce(device, device, 1, ncclInt32, ncclSum, comm, stream);
    CHECK(is_done(nccl, comm, result), "ncclAllReduce");
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_CUDA(cudaMemcpy(&sum, device, sizeof(sum), cudaMemcpyDefault));
    CHECK(sum == expected, "%d instead of %d", sum, expected);
    CHECK_CUDA(cudaFree(device));
}
