/* SPDX-License-Identifier: Apache-2.0 */
/* Groups over the caller's communicator, which still works after they are destroyed. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "ep/ep_nccl.h"
#include "tests/cases/run.h"
#include "tests/gpu/device_step.h"
#include "tests/gpu/devices.h"

/* NCCL as a framework brings it: loaded at run time. Without it the test is skipped. */
typedef struct Nccl {
    ncclResult_t (*get_unique_id)(ncclUniqueId *id);
    ncclResult_t (*init_rank)(ncclComm_t *comm, int size, ncclUniqueId id, int rank,
                              ncclConfig_t *config);
    ncclResult_t (*async_error)(ncclComm_t comm, ncclResult_t *result);
    ncclResult_t (*all_reduce)(const void *from, void *to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
    ncclResult_t (*destroy)(ncclComm_t comm);
} Nccl;

static bool find(void *library, const char *name, void *function) {
    void *symbol = library ? dlsym(library, name) : NULL;
    memcpy(function, &symbol, sizeof(symbol));
    return symbol != NULL;
}

static bool load(Nccl *nccl) {
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    return find(library, "ncclGetUniqueId", &nccl->get_unique_id) &&
           find(library, "ncclCommInitRankConfig", &nccl->init_rank) &&
           find(library, "ncclCommGetAsyncError", &nccl->async_error) &&
           find(library, "ncclAllReduce", &nccl->all_reduce) &&
           find(library, "ncclCommDestroy", &nccl->destroy);
}

/* Wait until a nonblocking communicator has completed a call. Returns false if it failed. */
static bool is_done(const Nccl *nccl, ncclComm_t comm, ncclResult_t result) {
    while (result == ncclInProgress)
        if (nccl->async_error(comm, &result) != ncclSuccess) return false;
    return result == ncclSuccess;
}

/* Create a communicator. A nonblocking one may still be initializing when this returns. */
static ncclComm_t new_communicator(const Nccl *nccl, const EpBootstrap *bootstrap, int blocking) {
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

static void check_step(EpGroup *group, const Case *c, int rank, cudaStream_t stream) {
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

/* Sum 1 + rank over all ranks with the caller's communicator. */
static void check_still_works(const Nccl *nccl, ncclComm_t comm, const EpBootstrap *bootstrap,
                              cudaStream_t stream) {
    int32_t number = 1 + bootstrap->rank, sum = 0, *device = NULL;
    int expected = bootstrap->size * (bootstrap->size + 1) / 2;
    REQUIRE_CUDA(cudaMalloc((void **)&device, sizeof(*device)));
    CHECK_CUDA(cudaMemcpyAsync(device, &number, sizeof(number), cudaMemcpyDefault, stream));
    ncclResult_t result = nccl->all_reduce(device, device, 1, ncclInt32, ncclSum, comm, stream);
    CHECK(is_done(nccl, comm, result), "ncclAllReduce");
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_CUDA(cudaMemcpy(&sum, device, sizeof(sum), cudaMemcpyDefault));
    CHECK(sum == expected, "%d instead of %d", sum, expected);
    CHECK_CUDA(cudaFree(device));
}

static void borrow(const Nccl *nccl, ncclComm_t comm, const EpBootstrap *bootstrap) {
    Case c = case_complete((Case){.ranks = bootstrap->size,
                                  .experts = 5 * bootstrap->size,
                                  .top_k = 3,
                                  .hidden = 200,
                                  .max_tokens = 131,
                                  .weighted = 1,
                                  .capacity = 1700});
    cudaStream_t stream = new_stream();
    EpGroup *groups[2] = {NULL};
    EpGroupConfig config = case_group_config(&c);
    ep_group_config_set_nccl(&config, comm);
    for (int i = 0; i < 2; i++)
        REQUIRE_OK(ep_group_create(bootstrap, &config, &groups[i]));
    for (int i = 0; i < 4; i++)
        check_step(groups[i % 2], &c, bootstrap->rank, stream);
    for (int i = 0; i < 2; i++)
        ep_group_destroy(groups[i]);
    check_still_works(nccl, comm, bootstrap, stream);
    CHECK_CUDA(cudaStreamDestroy(stream));
}

static void borrowed(const EpBootstrap *bootstrap, int blocking) {
    Nccl nccl;
    const char *lacks = gpu_shares(bootstrap->size) ? "NCCL wants a GPU for each rank"
                        : load(&nccl)               ? NULL
                                                    : "there is no libnccl.so.2";
    if (lacks) {
        check_left_out(lacks);
        return;
    }
    ncclComm_t comm = new_communicator(&nccl, bootstrap, blocking);
    REQUIRE(comm, "no communicator");
    borrow(&nccl, comm, bootstrap);
    CHECK(nccl.destroy(comm) == ncclSuccess, "ncclCommDestroy");
}

ThreadTest(gpu_nccl, borrowed_2, 2) {
    borrowed(bootstrap, 1);
}
ThreadTest(gpu_nccl, borrowed_4, 4) {
    borrowed(bootstrap, 1);
}
ThreadTest(gpu_nccl, borrowed_without_blocking_2, 2) {
    borrowed(bootstrap, 0);
}
