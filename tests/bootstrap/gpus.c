/* SPDX-License-Identifier: Apache-2.0 */
/* The assignment of GPUs to ranks, and whether the CUDA backend can serve them. Both follow from
 * the ranks' reports, so the tests use reports of synthetic machines. */
#include "bootstrap/gpus.h"
#include "runtime/layout.h"
#include "tests/cases/run.h"

#define MOST 8
#define NEEDS 60000 /* bytes of shared memory */

/* The ranks of a synthetic machine, and the decision for them. */
typedef struct Machine {
    int32_t size, nodes[MOST], devices[MOST];
    int pretended; /* whether the nodes are */
    EpGpuReport reports[MOST];
    char reason[256];
} Machine;

static EpGpu make_gpu(int number) {
    EpGpu gpu = {.capability = 90, .num_sms = 132, .shared_bytes = 232448, .reaches = ~0u};
    gpu.uuid[3] = (unsigned char)(number + 1);
    snprintf(gpu.bus, sizeof(gpu.bus), "0000:%02x:00.0", number);
    snprintf(gpu.name, sizeof(gpu.name), "NVIDIA H200");
    return gpu;
}

/* Returns ranks on one node that all see the same GPUs, and of which none has chosen. */
static Machine make_machine(int32_t ranks, int32_t gpus) {
    Machine m = {.size = ranks};
    for (int r = 0; r < ranks; r++) {
        m.reports[r] = (EpGpuReport){.count = gpus, .wanted = EP_DEFAULT, .process = 100 + r};
        for (int d = 0; d < gpus; d++)
            m.reports[r].gpu[d] = make_gpu(d);
        if (!gpus) snprintf(m.reports[r].reason, sizeof(m.reports[r].reason), "expected a GPU");
    }
    return m;
}

static int decide(Machine *m) {
    m->reason[0] = 0;
    ep_gpus_assign(m->reports, m->size, m->devices);
    ep_gpus_domains(m->reports, m->size, m->devices, m->pretended, m->nodes);
    return ep_gpus_agree(m->reports, m->size, m->nodes, m->devices, NEEDS, m->reason,
                         sizeof(m->reason));
}

static void check_served(Machine *m, const int *devices) {
    CHECK(decide(m), "not served: %s", m->reason);
    for (int r = 0; r < m->size; r++)
        CHECK(m->devices[r] == devices[r], "rank %d has device %d, not %d", r, m->devices[r],
              devices[r]);
}

static void check_domains(const Machine *m, const int *domains) {
    for (int r = 0; r < m->size; r++)
        CHECK(m->nodes[r] == domains[r], "rank %d is in domain %d, not %d", r, m->nodes[r],
              domains[r]);
}

static void check_said(Machine *m, const char *const *parts) {
    CHECK(!decide(m), "served");
    for (; *parts; parts++)
        CHECK(strstr(m->reason, *parts), "no '%s' in: %s", *parts, m->reason);
}

#define SERVED(m, ...) check_served(&(m), (const int[]){__VA_ARGS__})
#define SAID(m, ...) check_said(&(m), (const char *const[]){__VA_ARGS__, NULL})

#define CHECK_DOMAINS(m, ...) check_domains(&(m), (const int[]){__VA_ARGS__})

/* ---- assignment ---- */

SoloTest(bootstrap_gpus, dealt_out_where_nobody_chose) {
    Machine four = make_machine(4, 4), three = make_machine(3, 8), one = make_machine(1, 4);
    SERVED(four, 0, 1, 2, 3);
    SERVED(three, 0, 1, 2);
    SERVED(one, 0);
}

/* A framework may have made a device current: every such choice is kept, even device 0. */
SoloTest(bootstrap_gpus, current_devices_are_kept) {
    Machine m = make_machine(4, 4);
    for (int r = 0; r < 4; r++)
        m.reports[r].current = 3 - r;
    SERVED(m, 3, 2, 1, 0);
}

SoloTest(bootstrap_gpus, given_devices_are_taken) {
    Machine m = make_machine(2, 4);
    m.reports[0].wanted = 2, m.reports[1].wanted = 1;
    m.reports[0].current = 1;
    SERVED(m, 2, 1);
}

/* CUDA_VISIBLE_DEVICES may show each rank one GPU, or each pair of ranks two. */
SoloTest(bootstrap_gpus, ranks_that_see_different_gpus) {
    Machine m = make_machine(4, 1);
    for (int r = 0; r < 4; r++)
        m.reports[r].gpu[0] = make_gpu(r);
    SERVED(m, 0, 0, 0, 0);
    m = make_machine(4, 2);
    for (int r = 2; r < 4; r++)
        m.reports[r].gpu[0] = make_gpu(2), m.reports[r].gpu[1] = make_gpu(3);
    SERVED(m, 0, 1, 0, 1);
}

/* Ranks share GPUs only if all of them allow it and each has a process of its own. */
SoloTest(bootstrap_gpus, shared_where_ranks_outnumber_them) {
    Machine m = make_machine(5, 2);
    for (int r = 0; r < 5; r++)
        m.reports[r].may_share = 1;
    SERVED(m, 0, 1, 0, 1, 0);
    CHECK(ep_gpus_shared(m.reports, 5, m.devices), "not shared");
    m.reports[4].wanted = 1;
    SERVED(m, 0, 0, 0, 0, 1);
    m.reports[4].wanted = EP_DEFAULT, m.reports[2].may_share = 0;
    SAID(m, "a GPU for each rank", "ranks 0 and 2", "LIBEP_SHARE_GPUS=yes");
    m.reports[2].may_share = 1, m.reports[3].process = m.reports[0].process;
    SAID(m, "a process for each rank", "ranks 0 and 3");
    m.size = 2, m.reports[1].process = m.reports[0].process;
    SERVED(m, 0, 1);
    CHECK(!ep_gpus_shared(m.reports, 2, m.devices), "shared");
}

/* ---- refusals ---- */

SoloTest(bootstrap_gpus, fewer_gpus_than_ranks) {
    Machine m = make_machine(4, 1);
    SAID(m, "a GPU for each rank", "ranks 0 and 1", "NVIDIA H200", "0000:00:00.0", "1 and 1 GPUs");
    m = make_machine(4, 3);
    SAID(m, "a GPU for each rank", "ranks 0 and 3", "3 and 3 GPUs");
}

SoloTest(bootstrap_gpus, two_ranks_that_chose_the_same) {
    Machine m = make_machine(3, 4);
    m.reports[0].current = 2, m.reports[1].current = 1, m.reports[2].current = 2;
    SAID(m, "a GPU for each rank", "ranks 0 and 2", "0000:02:00.0");
    m.reports[2].wanted = 3;
    SERVED(m, 2, 1, 3);
    m.reports[2].wanted = 1;
    SAID(m, "ranks 1 and 2", "0000:01:00.0");
}

SoloTest(bootstrap_gpus, a_rank_without) {
    Machine m = make_machine(3, 4);
    m.reports[1].count = 0;
    snprintf(m.reports[1].reason, sizeof(m.reports[1].reason), "expected a CUDA driver, got none");
    SAID(m, "rank 1: expected a CUDA driver, got none");
    m = make_machine(1, 0);
    SAID(m, "expected a GPU");
    CHECK(!strstr(m.reason, "rank"), "one rank alone needs no number: %s", m.reason);
}

SoloTest(bootstrap_gpus, no_such_device) {
    Machine m = make_machine(2, 4);
    m.reports[1].wanted = 4;
    SAID(m, "rank 1", "a device of 0 .. 3", "got 4");
}

SoloTest(bootstrap_gpus, too_old) {
    Machine m = make_machine(2, 2);
    m.reports[0].gpu[1].capability = m.reports[1].gpu[1].capability = 80;
    snprintf(m.reports[1].gpu[1].name, sizeof(m.reports[1].gpu[1].name), "NVIDIA A100");
    SAID(m, "rank 1", "capability 9.0", "got 8.0", "device 1", "NVIDIA A100", "0000:01:00.0");
}

SoloTest(bootstrap_gpus, rows_too_large_for_shared_memory) {
    Machine m = make_machine(2, 2);
    for (int r = 0; r < 2; r++)
        for (int d = 0; d < 2; d++)
            m.reports[r].gpu[d].shared_bytes = NEEDS - 1;
    SAID(m, "rank 0", "60000 bytes of shared memory", "got 59999 bytes");
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.max_row_bytes = 14336, config.max_top_k = 8, config.max_scale_bytes = 224;
    int64_t needs = ep_cuda_least_shared(&config, 2);
    CHECK(needs == EP_STATIC_SHARED_BYTES + 9 * (1024 + 1024), "%lld bytes", (long long)needs);
}

/* ep_prepare has tables of experts in shared memory. */
SoloTest(bootstrap_gpus, experts_too_many_for_shared_memory) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.max_row_bytes = 14336, config.max_top_k = 8, config.num_experts = 256;
    int64_t few = ep_cuda_least_shared(&config, 8), h200 = make_gpu(0).shared_bytes;
    CHECK(few == EP_STATIC_SHARED_BYTES + 9 * (1024 + 1024), "%lld bytes", (long long)few);
    config.num_experts = 5000;
    CHECK(ep_cuda_least_shared(&config, 72) <= h200, "5000 experts do not fit");
    config.num_experts = 5720;
    CHECK(ep_cuda_least_shared(&config, 8) > h200, "5720 experts fit");
    config.num_experts = EP_MAX_EXPERTS;
    CHECK(ep_cuda_least_shared(&config, 72) > INT64_C(600) << 20, "it overflowed");
}

SoloTest(bootstrap_gpus, several_kinds) {
    Machine m = make_machine(3, 3);
    for (int r = 0; r < 3; r++)
        snprintf(m.reports[r].gpu[2].name, sizeof(m.reports[r].gpu[2].name), "NVIDIA H100 PCIe");
    SAID(m, "one kind", "NVIDIA H200", "rank 0", "NVIDIA H100 PCIe", "rank 2");
    m = make_machine(2, 2);
    for (int r = 0; r < 2; r++)
        m.reports[r].gpu[1].num_sms = 114;
    SAID(m, "one kind", "132 multiprocessors", "114");
}

SoloTest(bootstrap_gpus, out_of_reach) {
    Machine m = make_machine(4, 4);
    m.reports[3].gpu[3].reaches = ~(1u << 1);
    SERVED(m, 0, 1, 2, 3);
    CHECK_DOMAINS(m, 0, 0, 0, 1);
    /* If a process does not see its peers' GPUs, opening the window finds out whether they are
     * reachable. */
    m = make_machine(2, 1);
    m.reports[1].gpu[0] = make_gpu(1);
    m.reports[0].gpu[0].reaches = m.reports[1].gpu[0].reaches = 0;
    SERVED(m, 0, 0);
}

SoloTest(bootstrap_gpus, several_nodes) {
    Machine m = make_machine(4, 2);
    for (int r = 2; r < 4; r++) {
        m.nodes[r] = 1;
        for (int d = 0; d < 2; d++)
            m.reports[r].gpu[d] = make_gpu(4 + d);
    }
    SERVED(m, 0, 1, 0, 1);
}

/* Ranks of pretended nodes see the same GPUs, and divide them. */
SoloTest(bootstrap_gpus, pretended_nodes) {
    Machine m = make_machine(4, 4);
    m.nodes[1] = m.nodes[3] = 1;
    SERVED(m, 0, 1, 2, 3);
    m = make_machine(2, 1);
    m.nodes[1] = 1;
    m.reports[0].may_share = m.reports[1].may_share = 1;
    SAID(m, "a GPU for each rank of a group on several nodes", "ranks 0 and 1", "NVIDIA H200");
}

/* NCCL takes ranks whose NCCL_HOSTID differs for different hosts, so it connects those that share.
 */
SoloTest(bootstrap_gpus, shared_by_pretended_nodes) {
    Machine m = make_machine(4, 1);
    m.pretended = 1;
    for (int r = 0; r < 4; r++) {
        m.reports[r].may_share = 1, m.nodes[r] = r / 2;
        m.reports[r].nccl_host[0] = (char)('0' + r);
    }
    SERVED(m, 0, 0, 0, 0);
    CHECK_DOMAINS(m, 0, 0, 1, 1);
    CHECK(ep_gpus_nccl(m.reports, 4, m.devices), "not connected");
    m.reports[2].may_share = 0;
    SAID(m, "a GPU for each rank", "ranks 0 and 2", "LIBEP_SHARE_GPUS=yes");
    m.reports[2].may_share = 1, m.reports[3].nccl_host[0] = '1';
    SAID(m, "ranks 1 and 3", "NCCL_HOSTID of every rank");
    CHECK(!ep_gpus_nccl(m.reports, 4, m.devices), "connected");
    m.reports[3].nccl_host[0] = 0;
    SAID(m, "ranks 0 and 3", "NCCL_HOSTID of every rank");
    for (int r = 0; r < 4; r++)
        m.nodes[r] = 0;
    SERVED(m, 0, 0, 0, 0);
    CHECK(!ep_gpus_nccl(m.reports, 4, m.devices), "connected");
}

/* A fabric joins the GPUs of machines, clique by clique; pretended nodes stay apart. */
SoloTest(bootstrap_gpus, one_fabric) {
    Machine m = make_machine(4, 1);
    for (int r = 0; r < 4; r++) {
        m.nodes[r] = r;
        m.reports[r].gpu[0] = make_gpu(r);
        m.reports[r].gpu[0].fabric[3] = r == 1 ? 8 : 7;
    }
    SERVED(m, 0, 0, 0, 0);
    CHECK_DOMAINS(m, 0, 1, 0, 0);
    for (int r = 0; r < 4; r++)
        m.nodes[r] = r, m.reports[r].gpu[0].fabric[3] = 7, m.reports[r].gpu[0].clique = r / 2;
    SERVED(m, 0, 0, 0, 0);
    CHECK_DOMAINS(m, 0, 0, 1, 1);
    for (int r = 0; r < 4; r++)
        m.nodes[r] = r;
    m.pretended = 1;
    SERVED(m, 0, 0, 0, 0);
    CHECK_DOMAINS(m, 0, 1, 2, 3);
}

SoloTest(bootstrap_gpus, nodes_of_other_kinds) {
    Machine m = make_machine(2, 1);
    m.nodes[1] = 1;
    m.reports[1].gpu[0] = make_gpu(4);
    m.reports[1].gpu[0].num_sms = 78;
    SAID(m, "GPUs of one kind", "rank 1");
}

SoloTest(bootstrap_gpus, too_many_ranks_on_a_node) {
    static EpGpuReport reports[73];
    int32_t nodes[73] = {0}, devices[73];
    char reason[192] = "";
    for (int r = 0; r < 73; r++)
        reports[r] = (EpGpuReport){.count = 1, .wanted = 0, .gpu = {make_gpu(r)}};
    ep_gpus_assign(reports, 73, devices);
    CHECK(!ep_gpus_agree(reports, 73, nodes, devices, NEEDS, reason, sizeof(reason)), "served");
    CHECK(strstr(reason, "at most 72 ranks on a node"), "%s", reason);
}

/* ---- choice of a backend ---- */

static void check_decision(EpBackend wish, int usable, EpBackend expected, const char *said) {
    char reason[256] = "";
    EpBackend got = ep_backend_decide(wish, usable, "because", reason, sizeof(reason));
    check_note("wish %d, usable %d", (int)wish, usable);
    CHECK(got == expected, "got %d, expected %d", (int)got, (int)expected);
    CHECK(strstr(reason, said), "no '%s' in: %s", said, reason);
}

SoloTest(bootstrap_gpus, what_a_wish_becomes) {
    check_decision(EP_BACKEND_HOST, 0, EP_BACKEND_HOST, "asked for");
    check_decision(EP_BACKEND_HOST, 1, EP_BACKEND_HOST, "asked for");
    check_decision(EP_BACKEND_CUDA, 1, EP_BACKEND_CUDA, "asked for");
    check_decision(EP_BACKEND_CUDA, 0, EP_BACKEND_AUTO, "because");
    check_decision(EP_BACKEND_AUTO, 0, EP_BACKEND_HOST, "because");
    check_decision(EP_BACKEND_AUTO, 1, EP_BACKEND_CUDA, "every rank");
}

/* If the CUDA backend is requested by name, every rank refuses it with the same words. */
ThreadTest(bootstrap_gpus, refused_on_every_rank, 2) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.num_experts = 4, config.max_tokens = 4, config.max_top_k = 2, config.max_row_bytes = 64;
    config.backend = EP_BACKEND_CUDA;
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    CHECK_OK(ep_group_memory(&config, 2, &memory));
    if (memory.feasible) return; /* this machine has GPUs */
    const char *but = strstr(memory.reason, "but ");
    REQUIRE(but, "no reason in: %s", memory.reason);
    EpGroup *group = NULL;
    CHECK_REFUSED(ep_group_create(bootstrap, &config, &group), EP_ERR_UNSUPPORTED, "config.backend",
                  "rank 0: ", but + strlen("but "));
    CHECK(group == NULL, "a group was made");
    config.backend = EP_BACKEND_AUTO;
    REQUIRE_OK(ep_group_create(bootstrap, &config, &group));
    EpGroupInfo info = group_info(group);
    CHECK(info.backend == EP_BACKEND_HOST && info.device == -1 && !info.gpu[0], "%d, %d, %s",
          (int)info.backend, info.device, info.gpu);
    CHECK(strstr(info.reason, but + strlen("but ")), "%s", info.reason);
    ep_group_destroy(group);
}

/* If only some ranks brought a communicator, ranks would wait for each other in different calls. */
ThreadTest(bootstrap_gpus, communicator_on_one_rank_alone, 2) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.num_experts = 4, config.max_tokens = 4, config.max_top_k = 2, config.max_row_bytes = 64;
    if (bootstrap->rank == 1) config.nccl_comm = &config;
    CHECK_NO_GROUP(bootstrap, &config, EP_ERR_MISMATCH, "config.nccl_comm", "0 on rank 0",
                   "1 on rank 1");
}
