/* SPDX-License-Identifier: Apache-2.0 */
/* Mapping windows by CUDA IPC, as where ranks share GPUs: the parts of a node's ranks, in their
 * order, and what a peer says of its part. Ranks are threads here: CUDA maps no memory to the
 * process that has allocated it, but the emulated one does. */
#include "bootstrap/bootstrap.h"
#include "bootstrap/memory/cuda/cuda_memory.h"
#include "tests/gpu/device_step.h"
#include "tests/harness/ranked.h"

enum { PART_BYTES = 4096, PARTS = 4 };

/* A group, whose windows nobody needs, and a part in the middle of an allocation. */
typedef struct Mapping {
    EpGroup *group;
    char *allocation;
    EpCudaWindow window;
    char *peers[EP_CUDA_MAX_RANKS];
} Mapping;

static const EpCall call = {"ep_window_register", 0};

static void open_mapping(const EpBootstrap *bootstrap, const char *nodes, Mapping *m) {
    Case c = case_complete((Case){.ranks = bootstrap->size});
    *m = (Mapping){.group = NULL};
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", nodes);
    m->group = open_group(bootstrap, &c);
    REQUIRE_CUDA(cudaMalloc((void **)&m->allocation, PARTS * PART_BYTES));
    m->window.memory = m->allocation + bootstrap->rank % PARTS * PART_BYTES;
    m->window.bytes = PART_BYTES;
}

static void close_mapping(Mapping *m) {
    CHECK(ep_cuda_ipc_unmap(m->group, &m->window) && !m->window.mapped, "not unmapped");
    CHECK_CUDA(cudaFree(m->allocation));
    ep_group_destroy(m->group);
}

/* Check both ends of a part, which its rank has filled with its number. */
static void check_part(const char *part, int rank) {
    char first = 0, last = 0;
    CHECK_CUDA(cudaMemcpy(&first, part, 1, cudaMemcpyDefault));
    CHECK_CUDA(cudaMemcpy(&last, part + PART_BYTES - 1, 1, cudaMemcpyDefault));
    CHECK(first == 1 + rank && last == 1 + rank, "%d .. %d in the part of rank %d", first, last,
          rank);
}

static void map_node(const EpBootstrap *bootstrap, const char *nodes) {
    Mapping m;
    open_mapping(bootstrap, nodes, &m);
    CHECK_CUDA(cudaMemset(m.window.memory, 1 + bootstrap->rank, PART_BYTES));
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_OK(ep_cuda_ipc_map(m.group, &call, &m.window, m.peers));
    const EpNodes *n = &m.group->nodes;
    for (int i = 0; i < n->sizes.ranks; i++)
        check_part(m.peers[i], ep_nodes_member(n, n->node, i));
    CHECK(!m.peers[n->sizes.ranks], "more parts than ranks of the node");
    bootstrap->barrier(bootstrap->context, 60); /* all have read the parts */
    close_mapping(&m);
}

/* Rank 0's bootstrap says something else of rank 1's part. */
typedef struct Liar {
    EpBootstrap whole;
    int64_t offset, bytes;
} Liar;

static EpStatus lie(void *context, const void *in, void *out, size_t bytes, double timeout) {
    const Liar *liar = context;
    EP_TRY(liar->whole.allgather(liar->whole.context, in, out, bytes, timeout));
    char *part = (char *)out + bytes + sizeof(cudaIpcMemHandle_t);
    memcpy(part, &liar->offset, sizeof(liar->offset));
    memcpy(part + sizeof(liar->offset), &liar->bytes, sizeof(liar->bytes));
    return EP_OK;
}

static void map_wrong_part(const EpBootstrap *bootstrap, int64_t offset, int64_t bytes) {
    Mapping m;
    open_mapping(bootstrap, "", &m);
    Liar liar = {m.group->bootstrap, offset, bytes};
    if (bootstrap->rank == 0)
        m.group->bootstrap.context = &liar, m.group->bootstrap.allgather = lie;
    EpStatus status = ep_cuda_ipc_map(m.group, &call, &m.window, m.peers);
    m.group->bootstrap = liar.whole;
    if (bootstrap->rank == 0) {
        CHECK_REFUSED(status, EP_ERR_BOOTSTRAP, "bootstrap.allgather", "4096 bytes of rank 1",
                      "within its allocation");
        CHECK(!m.window.mapped[1] && !m.peers[1], "rank 1 is mapped");
    } else {
        CHECK_OK(status);
    }
    close_mapping(&m);
}

RankTest(gpu_ipc, one_node_3, 3, map_node(bootstrap, ""));
RankTest(gpu_ipc, two_nodes_4, 4, map_node(bootstrap, "0,1,0,1"));
RankTest(gpu_ipc, uneven_nodes_3, 3, map_node(bootstrap, "0,1,1"));
RankTest(gpu_ipc, before_the_allocation_2, 2, map_wrong_part(bootstrap, -1, PARTS *PART_BYTES));
RankTest(gpu_ipc, behind_the_allocation_2, 2,
        map_wrong_part(bootstrap, PARTS *PART_BYTES - PART_BYTES + 1, PARTS *PART_BYTES));
RankTest(gpu_ipc, in_too_small_an_allocation_2, 2, map_wrong_part(bootstrap, 0, PART_BYTES - 1));
RankTest(gpu_ipc, far_from_the_allocation_2, 2, map_wrong_part(bootstrap, INT64_MAX, INT64_MIN));
