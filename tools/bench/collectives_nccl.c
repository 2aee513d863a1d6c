/* SPDX-License-Identifier: Apache-2.0 */

/** The all-gather and the reduce-scatter on GPUs, of NCCL. Calls may be captured. */

#if EP_WITH_CUDA

#include "tools/bench/collectives.h"
#include "tools/bench/device.h"
#include "tools/bench/nccl.h"
#include "tools/common/util.h"

typedef struct Library {
    Nccl nccl;
    __typeof__(&ncclGroupStart) group_start;
    __typeof__(&ncclGroupEnd) group_end;
    __typeof__(&ncclAllGather) all_gather;
    __typeof__(&ncclReduceScatter) reduce_scatter;
    ncclDataType_t type;
} Library;

static bool find_functions(Library *n) {
    void *library = n->nccl.library;
    return library_find(library, "ncclGroupStart", &n->group_start) &&
           library_find(library, "ncclGroupEnd", &n->group_end) &&
           library_find(library, "ncclAllGather", &n->all_gather) &&
           library_find(library, "ncclReduceScatter", &n->reduce_scatter);
}

/* Device memory for a buffer of the host, and a copy of what is in it. */
static bool mirror(const Case *c, const char *host, size_t bytes, char **out) {
    return cuda_ok(cudaMalloc((void **)out, bytes + 1), "cudaMalloc for --baseline") &&
           cuda_ok(cudaMemcpyAsync(*out, host, bytes, cudaMemcpyHostToDevice, c->stream),
                   "cudaMemcpyAsync");
}

static bool mirror_all(Collectives *l) {
    Case *c = l->c;
    const size_t most = (size_t)l->most, all = most * (size_t)c->world->size;
    bool ok = mirror(c, l->host.sums, all * c->row_bytes, &l->work.sums) &&
              mirror(c, l->host.out, most * c->row_bytes, &l->work.out);
    for (int i = 0; ok && i < NUM_GATHERED; i++)
        ok = mirror(c, l->host.send[i], most * l->bytes[i], &l->work.send[i]) &&
             mirror(c, l->host.recv[i], all * l->bytes[i], &l->work.recv[i]);
    return ok && device_finish(c);
}

bool collectives_open_nccl(Collectives *l) {
    const int64_t type = l->c->options->type;
    World *world = l->c->world;
    Library *n = pool_alloc(&l->pool, 1, sizeof(Library), "baseline");
    l->library = n;
    if (!world_all(world, n && mirror_all(l)) || !nccl_open(world, &n->nccl)) return false;
    n->type = type == EP_TYPE_FP32   ? ncclFloat32
              : type == EP_TYPE_BF16 ? ncclBfloat16
                                     : ncclFloat16;
    return world_all(world, find_functions(n));
}

void collectives_close_nccl(Collectives *l) {
    Library *n = l->library;
    nccl_close(&n->nccl);
    cudaFree(l->work.sums);
    cudaFree(l->work.out);
    for (int i = 0; i < NUM_GATHERED; i++) {
        cudaFree(l->work.send[i]);
        cudaFree(l->work.recv[i]);
    }
}

/* One group, as engines issue it. */
static bool gather(const Collectives *l, const Library *n) {
    bool ok = nccl_ok(&n->nccl, n->group_start(), "ncclGroupStart");
    for (int i = 0; ok && i < NUM_GATHERED; i++)
        ok = !l->bytes[i] ||
             nccl_ok(&n->nccl,
                     n->all_gather(l->work.send[i], l->work.recv[i], (size_t)l->most * l->bytes[i],
                                   ncclUint8, n->nccl.comm, l->c->stream),
                     "ncclAllGather");
    return nccl_ok(&n->nccl, n->group_end(), "ncclGroupEnd") && ok;
}

bool collectives_run_nccl(Collectives *l, Collective which) {
    const Library *n = l->library;
    if (which == ALL_GATHER) return gather(l, n);
    return nccl_ok(&n->nccl,
                   n->reduce_scatter(l->work.sums, l->work.out,
                                     (size_t)(l->most * l->c->options->hidden), n->type, ncclSum,
                                     n->nccl.comm, l->c->stream),
                   "ncclReduceScatter");
}

static bool fetch(const Case *c, char *host, const char *device, size_t bytes) {
    return cuda_ok(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, c->stream),
                   "cudaMemcpyAsync");
}

bool collectives_fetch(Collectives *l) {
    Case *c = l->c;
    const size_t most = (size_t)l->most, all = most * (size_t)c->world->size;
    bool ok = fetch(c, l->host.out, l->work.out, most * c->row_bytes);
    for (int i = 0; ok && i < NUM_GATHERED; i++)
        ok = fetch(c, l->host.recv[i], l->work.recv[i], all * l->bytes[i]);
    return device_finish(c) && ok;
}

#endif
