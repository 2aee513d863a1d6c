/* SPDX-License-Identifier: Apache-2.0 */
#if EP_WITH_CUDA

#include "tools/bench/nccl.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

bool nccl_ok(const Nccl *nccl, ncclResult_t result, const char *call) {
    return result == ncclSuccess || bench_fail("%s: %s", call, nccl->error_string(result));
}

/* memcpy, since ISO C has no cast from void * to a function pointer. */
bool library_find(void *library, const char *name, void *function) {
    void *address = dlsym(library, name);
    memcpy(function, &address, sizeof(address));
    return address || bench_fail("the library that was loaded has no %s", name);
}

static bool load(Nccl *nccl) {
    nccl->library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    if (!nccl->library) return bench_fail("expected NCCL, got: %s", dlerror());
    return library_find(nccl->library, "ncclGetErrorString", &nccl->error_string) &&
           library_find(nccl->library, "ncclGetUniqueId", &nccl->unique_id) &&
           library_find(nccl->library, "ncclCommInitRankConfig", &nccl->init) &&
           library_find(nccl->library, "ncclCommDestroy", &nccl->destroy);
}

/* NVLink multicast is off unless the environment turns it on: not every machine has it. */
bool nccl_open(World *world, Nccl *nccl) {
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    memset(&id, 0, sizeof(id));
    setenv("NCCL_NVLS_ENABLE", "0", 0);
    bool ok = load(nccl);
    if (ok && world->rank == 0) ok = nccl_ok(nccl, nccl->unique_id(&id), "ncclGetUniqueId");
    if (!world_all(world, ok) || !world_broadcast(world, &id, sizeof(id))) return false;
    ok = nccl_ok(nccl, nccl->init(&nccl->comm, world->size, id, world->rank, &config),
                 "ncclCommInitRankConfig");
    return world_all(world, ok);
}

/* libnccl stays loaded, since its threads and exit handlers remain. */
void nccl_close(Nccl *nccl) {
    if (nccl->comm) nccl->destroy(nccl->comm);
}

#endif
