/* SPDX-License-Identifier: Apache-2.0 */
/* Groups over the caller's communicator, which still works after they are destroyed. */
#include "tests/cases/run.h"
#include "tests/gpu/communicator.h"

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
        nccl_check_step(groups[i % 2], &c, bootstrap->rank, stream);
    for (int i = 0; i < 2; i++)
        ep_group_destroy(groups[i]);
    nccl_check_works(nccl, comm, bootstrap, stream);
    CHECK_CUDA(cudaStreamDestroy(stream));
}

static void borrowed(const EpBootstrap *bootstrap, int blocking) {
    Nccl nccl;
    if (!nccl_serves(&nccl, bootstrap->size)) return;
    ncclComm_t comm = nccl_communicator(&nccl, bootstrap, blocking);
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
