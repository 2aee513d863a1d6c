/* SPDX-License-Identifier: Apache-2.0 */
/* The assignment of GPUs to ranks, and whether the CUDA backend can serve them. Both follow from
 * the ranks' reports, so the tests use reports of synthetic machines. */
#include "bootstrap/gpus.h"
#include "runtime/layout.h"
#include "tests/cases/run.h"
#include "tests/harness/text.h"

#define MOST 8
#define NEEDS 60000 /* bytes of shared memory */

/* The ranks of a synthetic machine, and the decision for them. */
typedef struct Machine {
    int32_t size, nodes[MOST], devices[MOST];
    int pretended; /* whether the nodes are */
    EpGpuReport reports[MOST];
} Machine;

static const TextField rank_fields[] = {
    TEXT_FIELD(EpGpuReport, count, ""),  TEXT_FIELD(EpGpuReport, current, ""),
    TEXT_FIELD(EpGpuReport, wanted, ""), TEXT_FIELD(EpGpuReport, process, ""),
    TEXT_FIELD(EpGpuReport, reason, ""), TEXT_FIELD(EpGpuReport, may_share, ""),
    TEXT_FIELD(EpGpuReport, apart, ""),  TEXT_FIELD(EpGpuReport, nccl_host, ""),
    TEXT_FIELD(EpGpuReport, masks, "")};
static const TextField gpu_fields[] = {
    TEXT_FIELD(EpGpu, uuid, ""),    TEXT_FIELD(EpGpu, name, ""),
    TEXT_FIELD(EpGpu, num_sms, ""), TEXT_FIELD(EpGpu, capability, ""),
    TEXT_FIELD(EpGpu, fabric, ""),  TEXT_FIELD(EpGpu, shared_bytes, ""),
    TEXT_FIELD(EpGpu, clique, ""),  TEXT_FIELD(EpGpu, reaches, ""),
    TEXT_FIELD(EpGpu, code, ""),    TEXT_FIELD(EpGpu, masked_code, "")};

static EpGpu make_gpu(int number) {
    EpGpu gpu = {.capability = 90,
                 .code = 90,
                 .masked_code = 90,
                 .num_sms = 132,
                 .shared_bytes = 232448,
                 .reaches = ~0u};
    snprintf((char *)gpu.uuid, sizeof(gpu.uuid), "%d", number);
    snprintf(gpu.bus, sizeof(gpu.bus), "0000:%02x:00.0", number);
    snprintf(gpu.name, sizeof(gpu.name), "H200");
    return gpu;
}

static void set_nodes(Machine *m, const char *digits) {
    for (int r = 0; r < m->size; r++)
        m->nodes[r] = digits[r] - '0';
}

/* Do what a word says: "rank.field=value" or "rank.gpu.field=value", '*' being all of them. */
static void change_machine(Machine *m, const char *word) {
    char rank = '*', gpu = 0, name[32] = "", value[32] = "";
    m->pretended |= !strncmp(word, "pretended=", 10);
    if (strchr("np", word[0])) return set_nodes(m, strchr(word, '=') + 1);
    if (sscanf(word, "%c.%c.%31[^=]=%31s", &rank, &gpu, name, value) < 4)
        gpu = 0, (void)sscanf(word, "%c.%31[^=]=%31s", &rank, name, value);
    for (int r = 0; r < m->size; r++) {
        EpGpuReport *report = &m->reports[r];
        if (rank != '*' && r != rank - '0') continue;
        if (!gpu) text_set(report, rank_fields, LENGTH(rank_fields), name, value);
        for (int d = 0; gpu && d < report->count; d++)
            if (gpu == '*' || d == gpu - '0')
                text_set(&report->gpu[d], gpu_fields, LENGTH(gpu_fields), name, value);
    }
}

/* Make ranks that see the same GPUs and have not chosen: "ranks gpus", and words of changes. */
static void make_machine(Machine *m, const char *text) {
    char words[256], *rest = words;
    snprintf(words, sizeof(words), "%s", text);
    *m = (Machine){.size = atoi(strtok_r(words, " ", &rest))};
    int gpus = atoi(strtok_r(NULL, " ", &rest));
    for (int r = 0; r < m->size; r++) {
        m->reports[r] = (EpGpuReport){.count = gpus, .wanted = EP_DEFAULT, .process = 100 + r};
        for (int d = 0; d < gpus; d++)
            m->reports[r].gpu[d] = make_gpu(d);
    }
    for (char *word; (word = strtok_r(NULL, " ", &rest));)
        change_machine(m, word);
}

/* Say which device each rank gets, and what is unusual: the domains, ranks of a process that has
 * others of its machine, or that ranks share. */
static void describe(const Machine *m, char *text, size_t bytes) {
    int n = 0, domains = 0, threads = 0;
    for (int r = 0; r < m->size; r++)
        n += snprintf(text + n, bytes - (size_t)n, "%d", m->devices[r]), domains |= m->nodes[r];
    if (domains) n += snprintf(text + n, bytes - (size_t)n, " domains ");
    for (int r = 0; domains && r < m->size; r++)
        n += snprintf(text + n, bytes - (size_t)n, "%d", m->nodes[r]);
    for (int r = 0; r < m->size; r++)
        if (!ep_gpus_alone(m->reports, m->size, r))
            n += snprintf(text + n, bytes - (size_t)n, "%s%d", threads++ ? "" : " threads ", r);
    if (!ep_gpus_shared(m->reports, m->size, m->devices)) return;
    snprintf(text + n, bytes - (size_t)n, " shared%s",
             ep_gpus_nccl(m->reports, m->size, m->devices) ? ", NCCL" : "");
}

/* What is decided for a machine, or parts of the reason why it is not served. */
typedef struct MachineRow {
    const char *machine, *served, *said[5];
} MachineRow;

#define TWO_NODES "pretended=0011 *.may_share=1 0.nccl_host=a 1.nccl_host=b 2.nccl_host=c "
#define FABRIC(nodes) "4 1 " nodes "=0123 1.0.uuid=1 2.0.uuid=2 3.0.uuid=3 *.0.fabric=a "

static const MachineRow rows[] = {
    {"4 4", "0123", {0}},
    {"3 8", "012", {0}},
    {"1 4", "0", {0}},
    /* A framework may have made a device current: every such choice is kept, even device 0. */
    {"4 4 0.current=3 1.current=2 2.current=1", "3210", {0}},
    {"2 4 0.wanted=2 1.wanted=1 0.current=1", "21", {0}},
    /* CUDA_VISIBLE_DEVICES may show each rank one GPU, or each pair of ranks two. */
    {"4 1 1.0.uuid=1 2.0.uuid=2 3.0.uuid=3", "0000", {0}},
    {"4 2 2.0.uuid=2 2.1.uuid=3 3.0.uuid=2 3.1.uuid=3", "0101", {0}},
    {"2 2 1.0.uuid=1 1.1.uuid=0", "00", {0}},
    {"4 4 *.0.uuid=2 *.2.uuid=0", "0123", {0}},
    {"3 3 1.0.uuid=1 1.1.uuid=2 1.2.uuid=0 2.0.uuid=2 2.1.uuid=0 2.2.uuid=1", "000", {0}},
    {"3 3 1.0.uuid=1 1.1.uuid=0", NULL, {"a GPU for each rank", "ranks 1 and 2", "3 and 3 GPUs"}},
    /* Ranks share GPUs only if all of them allow it and each has a process of its own. */
    {"5 2 *.may_share=1", "01010 shared", {0}},
    {"5 2 *.may_share=1 4.wanted=1", "00001 shared", {0}},
    {"5 2 *.may_share=1 2.may_share=0",
     NULL,
     {"a GPU for each rank", "ranks 0 and 2", "LIBEP_SHARE_GPUS=yes"}},
    {"5 2 *.may_share=1 3.process=100", NULL, {"a process for each rank", "ranks 0 and 3"}},
    {"2 2 *.may_share=1 1.process=100", "01 threads 01", {0}},
    /* On different machines processes may have the same number. */
    {"4 4 2.process=100", "0123 threads 02", {0}},
    {"3 1 1.0.uuid=1 2.0.uuid=2 *.process=7", "000", {0}},
    {"4 1", NULL, {"a GPU for each rank", "ranks 0 and 1", "H200", "00:00.0", "1 and 1 GPUs"}},
    {"4 3", NULL, {"a GPU for each rank", "ranks 0 and 3", "3 and 3 GPUs"}},
    {"3 4 0.current=2 1.current=1 2.current=2",
     NULL,
     {"a GPU for each rank", "ranks 0 and 2", "0000:02:00.0"}},
    {"3 4 0.current=2 1.current=1 2.wanted=3", "213", {0}},
    {"3 4 0.current=2 1.current=1 2.wanted=1", NULL, {"ranks 1 and 2", "0000:01:00.0"}},
    {"3 4 1.count=0 1.reason=no_driver", NULL, {"rank 1: no_driver"}},
    {"1 0 0.reason=no_driver", NULL, {"no_driver"}},
    {"2 4 1.wanted=4", NULL, {"rank 1", "a device of 0 .. 3", "got 4"}},
    {"2 2 *.*.capability=80 *.*.name=A100", "01", {0}},
    {"2 2 *.1.capability=75 1.1.name=T4",
     NULL,
     {"rank 1: expected", "capability 8.0", "got 7.5", "device 1, T4", "0000:01:00.0"}},
    {"2 2 *.1.code=0 1.1.name=A100",
     NULL,
     {"rank 1: expected a build", "capability 9.0", "device 1, A100", "0000:01:00.0"}},
    /* Releases have kernels for masks for some GPUs. */
    {"2 2 *.*.masked_code=0", "01", {0}},
    {"2 2 *.masks=1", "01", {0}},
    {"2 2 *.masks=1 *.*.masked_code=0 *.*.capability=80 *.*.name=A100",
     NULL,
     {"rank 0: expected", "capability 9.x", "config.masks", "got 8.0", "device 0, A100, 0000:00"}},
    {"2 2 *.*.shared_bytes=59999", NULL, {"rank 0", "60000 bytes of shared", "got 59999 bytes"}},
    {"3 3 *.2.name=PCIe", NULL, {"one kind", "H200", "rank 0", "PCIe", "rank 2"}},
    {"2 2 *.1.num_sms=114", NULL, {"one kind", "132 multiprocessors", "114"}},
    {"2 1 nodes=01 1.0.uuid=4 1.0.num_sms=78", NULL, {"GPUs of one kind", "rank 1"}},
    {"4 4 3.3.reaches=-3", "0123 domains 0001", {0}},
    /* Where peer access is forbidden each GPU is a domain, seen or not. */
    {"4 4 *.apart=1", "0123 domains 0123", {0}},
    {"4 4 1.apart=1", "0123 domains 0100", {0}},
    {"2 1 1.0.uuid=1 1.apart=1", "00 domains 01", {0}},
    {"4 2 *.apart=1 *.may_share=1", NULL, {"ranks 0 and 2", "NCCL_HOSTID of every rank"}},
    /* If a process does not see its peers' GPUs, opening the window finds out. */
    {"2 1 1.0.uuid=1 *.0.reaches=0", "00", {0}},
    {"4 2 nodes=0011 2.0.uuid=4 2.1.uuid=5 3.0.uuid=4 3.1.uuid=5", "0101 domains 0011", {0}},
    /* Ranks of pretended nodes see the same GPUs, and divide them. */
    {"4 4 pretended=0101", "0123 domains 0101", {0}},
    {"2 1 nodes=01 *.may_share=1",
     NULL,
     {"a GPU for each rank of a group on several nodes", "ranks 0 and 1", "H200"}},
    /* NCCL takes ranks whose NCCL_HOSTID differs for different hosts, so it connects those that
     * share. */
    {"4 1 " TWO_NODES "3.nccl_host=d", "0000 domains 0011 shared, NCCL", {0}},
    {"4 1 " TWO_NODES "3.nccl_host=d 2.may_share=0",
     NULL,
     {"a GPU for each rank", "ranks 0 and 2", "LIBEP_SHARE_GPUS=yes"}},
    {"4 1 " TWO_NODES "3.nccl_host=b", NULL, {"ranks 1 and 3", "NCCL_HOSTID of every rank"}},
    {"4 1 " TWO_NODES, NULL, {"ranks 0 and 3", "NCCL_HOSTID of every rank"}},
    {"4 1 *.may_share=1 0.nccl_host=a 1.nccl_host=b 2.nccl_host=c", "0000 shared", {0}},
    /* A fabric joins the GPUs of machines, clique by clique; pretended nodes stay apart. */
    {FABRIC("nodes") "1.0.fabric=b", "0000 domains 0100", {0}},
    {FABRIC("nodes") "2.0.clique=1 3.0.clique=1", "0000 domains 0011", {0}},
    {FABRIC("pretended"), "0000 domains 0123", {0}},
};

SoloTest(bootstrap_gpus, machines) {
    for (const MachineRow *row = rows; row < rows + LENGTH(rows); row++) {
        Machine m;
        char reason[256] = "", decision[64];
        make_machine(&m, row->machine);
        ep_gpus_assign(m.reports, m.size, m.devices);
        ep_gpus_domains(m.reports, m.size, m.devices, m.pretended, m.nodes);
        int served =
            ep_gpus_agree(m.reports, m.size, m.nodes, m.devices, NEEDS, reason, sizeof(reason));
        describe(&m, decision, sizeof(decision));
        check_note("%s: %s", row->machine, reason);
        CHECK(served == !!row->served, "served: %d", served);
        if (served) CHECK(!strcmp(decision, row->served), "%s", decision);
        for (int i = 0; i < LENGTH(row->said) && row->said[i]; i++)
            CHECK(strstr(reason, row->said[i]), "no '%s'", row->said[i]);
        CHECK(m.size > 1 || !strstr(reason, "rank"), "one rank alone needs no number");
    }
}

/* Ranks of a group that processes may join choose before they meet, by their place. */
SoloTest(bootstrap_gpus, of_places) {
    static const struct {
        const char *machine;
        int32_t place, device;
        const char *said;
    } places[] = {{"1 4", 0, 0, ""},
                  {"1 4", 3, 3, ""},
                  {"1 4", 6, 2, ""},
                  {"1 1", 3, 0, ""},
                  {"1 4 0.current=2", 3, 2, ""},
                  {"1 4 0.wanted=0", 3, 0, ""},
                  {"1 4 0.wanted=4", 0, -1, "expected a device of 0 .. 3, got 4"},
                  {"1 0 0.reason=no_driver", 1, -1, "no_driver"}};
    for (int i = 0; i < LENGTH(places); i++) {
        Machine m;
        char reason[256] = "";
        make_machine(&m, places[i].machine);
        int32_t device = ep_gpus_choose(m.reports, places[i].place, NEEDS, reason, sizeof(reason));
        CHECK(device == places[i].device && strstr(reason, places[i].said), "%s: device %d, %s",
              places[i].machine, device, reason);
    }
}

SoloTest(bootstrap_gpus, shared_memory_that_rows_need) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.max_row_bytes = 14336, config.max_top_k = 8, config.max_scale_bytes = 224;
    int64_t needs = ep_cuda_least_shared(&config, 2, 0);
    CHECK(needs == EP_STATIC_SHARED_BYTES + 9 * (1024 + 1024), "%lld bytes", (long long)needs);
}

/* Two warps of the kernels that move weights have a stage each: one sends, and one receives. A
 * group with a placement may move experts. */
SoloTest(bootstrap_gpus, shared_memory_that_weights_need) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.max_row_bytes = 512, config.max_top_k = 1, config.num_experts = 1;
    int64_t least = EP_STATIC_SHARED_BYTES + 2 * EP_PUSH_BYTES;
    int64_t tokens = ep_cuda_least_shared(&config, 2, 0), most = ep_max(tokens, least);
    int64_t weights = ep_cuda_least_shared(&config, 2, 1);
    config.num_physical = 1;
    int64_t placed = ep_cuda_least_shared(&config, 2, 0);
    CHECK(tokens < 20 << 10 && weights == most && placed == most, "%lld, %lld and %lld bytes",
          (long long)tokens, (long long)weights, (long long)placed);
}

/* ep_prepare has tables of experts in shared memory. */
SoloTest(bootstrap_gpus, experts_too_many_for_shared_memory) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.max_row_bytes = 14336, config.max_top_k = 8, config.num_experts = 256;
    int64_t few = ep_cuda_least_shared(&config, 8, 0), h200 = make_gpu(0).shared_bytes;
    CHECK(few == EP_STATIC_SHARED_BYTES + 9 * (1024 + 1024), "%lld bytes", (long long)few);
    config.num_experts = 5000;
    CHECK(ep_cuda_least_shared(&config, 72, 0) <= h200, "5000 experts do not fit");
    config.num_experts = 5720;
    CHECK(ep_cuda_least_shared(&config, 8, 0) > h200, "5720 experts fit");
    config.num_experts = EP_MAX_EXPERTS;
    CHECK(ep_cuda_least_shared(&config, 72, 0) > INT64_C(600) << 20, "it overflowed");
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
    EpGroupConfig config = group_config(2);
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
    EpGroupConfig config = group_config(2);
    config.backend = EP_BACKEND_AUTO;
    if (bootstrap->rank == 1) config.nccl_comm = &config;
    CHECK_NO_GROUP(bootstrap, &config, EP_ERR_MISMATCH, "config.nccl_comm", "0 on rank 0",
                   "1 on rank 1");
}
