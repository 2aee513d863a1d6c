/* SPDX-License-Identifier: Apache-2.0 */
#if EP_WITH_CUDA

#include "bench_nccl.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "bench_error.h"

bool nccl_ok(const Nccl *nccl, ncclResult_t result, const char *call) {
    return result == ncclSuccess || bench_fail("%s: %s", call, nccl->error_string(result));
}

/* The address of a function, which ISO C does not let one cast to. */
static bool find(const Nccl *nccl, const char *name, void *function) {
    void *address = dlsym(nccl->library, name);
    memcpy(function, &address, sizeof(address));
    return address || bench_fail("--baseline: libnccl.so.2 has no %s", name);
}

static bool nccl_load(Nccl *nccl) {
    nccl->library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!nccl->library) return bench_fail("--baseline: expected NCCL, got: %s", dlerror());
    return find(nccl, "ncclGetErrorString", &nccl->error_string) &&
           find(nccl, "ncclGetUniqueId", &nccl->unique_id) &&
           find(nccl, "ncclCommInitRank", &nccl->init) &&
           find(nccl, "ncclCommDestroy", &nccl->destroy) &&
           find(nccl, "ncclGroupStart", &nccl->group_start) &&
           find(nccl, "ncclGroupEnd", &nccl->group_end) && find(nccl, "ncclSend", &nccl->send) &&
           find(nccl, "ncclRecv", &nccl->recv);
}

/* Sends and receives have no use for multicast, so none is set up. */
bool nccl_open(World *world, Nccl *nccl) {
    ncclUniqueId id;
    memset(&id, 0, sizeof(id));
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    bool ok = nccl_load(nccl);
    if (ok && world->rank == 0) ok = nccl_ok(nccl, nccl->unique_id(&id), "ncclGetUniqueId");
    if (!world_all(world, ok) || !world_broadcast(world, &id, sizeof(id))) return false;
    ok = nccl_ok(nccl, nccl->init(&nccl->comm, world->size, id, world->rank), "ncclCommInitRank");
    return world_all(world, ok);
}

/* The library stays loaded: it leaves threads and exit handlers behind. */
void nccl_close(Nccl *nccl) {
    if (nccl->comm) nccl->destroy(nccl->comm);
}

#endif
