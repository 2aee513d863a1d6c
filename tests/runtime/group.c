/* SPDX-License-Identifier: Apache-2.0 */
/* Creating groups: wrong configurations, ranks that disagree, queries of a live group. */
#include <stddef.h>

#include "tests/cases/calls.h"
#include "tests/cases/refusals.h"
#include "tests/cases/run.h"
#include "tests/harness/ranked.h"

/* ---- wrong configurations ---- */

static const TextField config_fields[] = {
    TEXT_FIELD(EpGroupConfig, struct_size, NULL),
    TEXT_FIELD(EpGroupConfig, num_experts, NULL),
    TEXT_FIELD(EpGroupConfig, max_tokens, NULL),
    TEXT_FIELD(EpGroupConfig, max_top_k, NULL),
    TEXT_FIELD(EpGroupConfig, max_row_bytes, NULL),
    TEXT_FIELD(EpGroupConfig, max_scale_bytes, NULL),
    TEXT_FIELD(EpGroupConfig, alignment, NULL),
    TEXT_FIELD(EpGroupConfig, max_recv_rows, NULL),
    TEXT_FIELD(EpGroupConfig, overflow, TEXT_OVERFLOWS),
    TEXT_FIELD(EpGroupConfig, backend, "|auto|host|cuda"),
    TEXT_FIELD(EpGroupConfig, timeout_seconds, NULL),
    TEXT_FIELD(EpGroupConfig, device, NULL),
    TEXT_FIELD(EpGroupConfig, mode, TEXT_MODES),
    TEXT_FIELD(EpGroupConfig, num_sms, NULL),
    TEXT_FIELD(EpGroupConfig, duplicates, "|keep|merge"),
    TEXT_FIELD(EpGroupConfig, sums, "|rank|entry"),
    TEXT_FIELD(EpGroupConfig, node_rows, NULL),
    TEXT_FIELD(EpGroupConfig, num_physical, NULL),
    TEXT_FIELD(EpGroupConfig, choice, NULL),
    TEXT_FIELD(EpGroupConfig, masks, NULL),
    TEXT_FIELD(EpGroupConfig, on_late, NULL),
    TEXT_FIELD(EpGroupConfig, late_us, NULL),
    TEXT_FIELD(EpGroupConfig, max_ranks, NULL),
    TEXT_FIELD(EpGroupConfig, place, NULL),
};

typedef struct Configured {
    const EpBootstrap *bootstrap;
    EpGroupConfig config;
    EpGroup *group;
    EpGroupMemory memory;
} Configured;

static EpStatus call_with_config(void *context, const char *call) {
    Configured *c = context;
    return strcmp(call, "ep_group_create") ? ep_group_memory(&c->config, 2, &c->memory)
                                           : ep_group_create(c->bootstrap, &c->config, &c->group);
}

ThreadTest(runtime_group, wrong_configurations, 1) {
    static const char *const names[] = {"ep_group_create", "ep_group_memory", NULL};
    static const Member members[] = {MEMBER("", config_fields, Configured, config)};
    static const Subject subject = {members, 1, sizeof(Configured), call_with_config,
                                    .calls = names};
    Configured c = {bootstrap, group_config(1), NULL, EP_GROUP_MEMORY_INIT};
    check_refusals("group_config", &subject, &c);
    ep_group_destroy(open_group_with(bootstrap, &c.config));
}

/* Structs may have grown more than once: every size between the first version's and today's is that
 * of some version. */
ThreadTest(runtime_group, structs_of_all_versions, 1) {
    EpGroupConfig config = group_config(1);
    config.struct_size = offsetof(EpGroupConfig, mode);
    config.mode = (EpMode)-77;
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    int64_t rows = 0;
    CHECK_OK(ep_group_memory(&config, 1, &memory));
    CHECK(memory.feasible, "%s", memory.reason);
    CHECK_OK(ep_max_recv_rows(&config, 1, 0, EP_LAYOUT_FLAT, 0, &rows));
    EpGroup *group = open_group_with(bootstrap, &config);
    for (size_t size = offsetof(EpGroupInfo, device); size <= sizeof(EpGroupInfo); size++) {
        union {
            EpGroupInfo info;
            unsigned char byte[sizeof(EpGroupInfo)];
        } out;
        memset(&out, 0x77, sizeof(out));
        out.info.struct_size = size;
        CHECK_OK(ep_group_query(group, &out.info));
        CHECK(out.info.struct_size == size && out.info.size == 1, "size %zu: not filled in", size);
        for (size_t i = size; i < sizeof(out); i++)
            CHECK(out.byte[i] == 0x77, "size %zu: byte %zu was written", size, i);
    }
    EpGroupInfo info = group_info(group);
    CHECK(info.mode == EP_MODE_THROUGHPUT, "mode %d", (int)info.mode);
    ep_group_destroy(group);
}

/* A newer program's struct is refused: what its new fields ask for would be ignored. */
SoloTest(runtime_group, structs_of_a_later_version) {
    char today[64], got[64];
    struct {
        EpGroupConfig config;
        int64_t more;
    } newer = {.config = group_config(1), .more = 1};
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    newer.config.struct_size = sizeof(newer);
    snprintf(today, sizeof(today), "%zu .. %zu", offsetof(EpGroupConfig, device),
             sizeof(EpGroupConfig));
    snprintf(got, sizeof(got), "got %zu", sizeof(newer));
    CHECK_REFUSED(ep_group_memory(&newer.config, 1, &memory), EP_ERR_STRUCT_SIZE, "config", today,
                  got, "newer");
    newer.config.struct_size = offsetof(EpGroupConfig, device) - 1;
    CHECK_REFUSED(ep_group_memory(&newer.config, 1, &memory), EP_ERR_STRUCT_SIZE, "config", today);
    CHECK(!memory.feasible, "outputs were written");
}

ThreadTest(runtime_group, missing_arguments, 1) {
    EpGroupConfig config = group_config(1);
    EpGroup *group = NULL;
    CHECK_REFUSED(ep_group_create(NULL, &config, &group), EP_ERR_NULL, "bootstrap");
    CHECK_REFUSED(ep_group_create(bootstrap, NULL, &group), EP_ERR_NULL, "config");
    CHECK_REFUSED(ep_group_create(bootstrap, &config, NULL), EP_ERR_NULL, "out");
    CHECK(group == NULL, "a group was made");
    CHECK_REFUSED(ep_group_query(NULL, NULL), EP_ERR_NULL, "group");
    CHECK_REFUSED(ep_group_status(NULL, NULL), EP_ERR_NULL, "group");
    CHECK_OK(ep_group_create(bootstrap, &config, &group));
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    EpFinding finding = EP_FINDING_INIT;
    CHECK_REFUSED(ep_group_query(group, NULL), EP_ERR_NULL, "out");
    info.struct_size = finding.struct_size = 1;
    CHECK_REFUSED(ep_group_query(group, &info), EP_ERR_STRUCT_SIZE, "out", "got 1");
    CHECK_REFUSED(ep_group_status(group, &finding), EP_ERR_STRUCT_SIZE, "out", "got 1");
    CHECK(info.size == 0, "outputs were written");
    ep_group_destroy(group);
}

/* ---- ranks that disagree ---- */

/* A field, its values on ranks 0 and 2, and what a sentence calls them. */
static const char *const differences[][5] = {
    {"num_experts", "12", "13", "12", "13"},
    {"max_tokens", "64", "65", "64", "65"},
    {"max_top_k", "3", "7", "3", "7"},
    {"max_row_bytes", "1024", "2048", "1024", "2048"},
    {"max_scale_bytes", "0", "16", "0", "16"},
    {"alignment", "16", "128", "16", "128"},
    {"max_recv_rows", "0", "999", "0", "999"},
    {"overflow", "error", "drop", "EP_OVERFLOW_ERROR", "EP_OVERFLOW_DROP"},
    {"backend", "auto", "host", "EP_BACKEND_AUTO", "EP_BACKEND_HOST"},
    {"mode", "auto", "latency", "EP_MODE_AUTO", "EP_MODE_LATENCY"},
    {"duplicates", "keep", "merge", "EP_DUPLICATES_KEEP", "EP_DUPLICATES_MERGE"},
    {"sums", "rank", "entry", "EP_SUMS_BY_RANK", "EP_SUMS_BY_ENTRY"},
    {"node_rows", "0", "5", "got 9", "5 on rank 2"},
    {"num_physical", "-1", "5", "got -1", "5 on rank 2"},
    {"choice", "1", "2", "got EP_CHOICE_NEAR", "EP_CHOICE_SPREAD on rank 2"},
    {"late_us", "0", "7", "got 0", "7 on rank 2"},
};

ThreadTest(runtime_group, ranks_that_disagree, 3) {
    for (int i = 0; i < LENGTH(differences); i++) {
        const char *const *d = differences[i];
        EpGroupConfig config = group_config(3);
        EpGroup *group = NULL;
        check_note("%s differs", d[0]);
        text_set(&config, config_fields, LENGTH(config_fields), d[0],
                 d[bootstrap->rank == 2 ? 2 : 1]);
        CHECK_REFUSED(ep_group_create(bootstrap, &config, &group), EP_ERR_MISMATCH, d[0], d[3],
                      d[4], "rank 0", "rank 2");
        CHECK(group == NULL, "a group was made");
    }
    /* Ranks that agree can still create a group over the same bootstrap. */
    run_case(bootstrap, &(Case){.ranks = 3});
}

/* One rank's wrong configuration is an error on every rank; the other ranks' errors name that
 * rank. */
ThreadTest(runtime_group, mistake_of_one_rank, 3) {
    EpGroupConfig config = group_config(3);
    EpGroup *group = NULL;
    if (bootstrap->rank == 1) config.alignment = 12;
    EpStatus status = ep_group_create(bootstrap, &config, &group);
    CHECK(group == NULL, "a group was made");
    if (bootstrap->rank == 1) {
        CHECK(status == EP_ERR_ALIGNMENT, "%d: %s", (int)status, ep_last_error());
    } else {
        CHECK(status != EP_OK, "rank 1 had no part in this group");
        CHECK(strstr(ep_last_error(), "rank 1"), "%s", ep_last_error());
    }
    run_case(bootstrap, &(Case){.ranks = 3});
}

/* Handles are created without communication; the first prepare compares their configurations, in
 * latency mode the first dispatch. Those of rank 2 and of the others, and what sentences call them.
 */
static const struct {
    const char *usual, *other, *field, *value, *other_value;
} disagreements[] = {
    {"alignment=8", "alignment=32", "alignment", "8", "32"},
    {"", "layout=flat", "layout", "EP_LAYOUT_EXPERT_MAJOR", "EP_LAYOUT_FLAT"},
    {"layout=flat capacity=700", "layout=flat capacity=70000", "capacity", "700", "70000"},
    {"layout=batched rows_per_expert=40", "layout=batched rows_per_expert=41", "capacity", "40",
     "41"},
    {"layout=flat capacity=9 hidden=128 quant=fp8", "layout=flat capacity=9 hidden=128 quant=mxfp8",
     "quant", "has EP_QUANT_FP8", "EP_QUANT_MXFP8"},
    {"mode=latency layout=rank-major", "mode=latency layout=batched rows_per_expert=9",
     "layout differs", "has EP_LAYOUT_RANK_MAJOR", "has EP_LAYOUT_BATCHED"}};

ThreadTest(runtime_group, handles_that_disagree, 3) {
    /* A failed group logs a warning. */
    set_on_ranks(bootstrap, "LIBEP_LOG_FILE", "/dev/null");
    for (int i = 0; i < LENGTH(disagreements); i++) {
        int is_other = bootstrap->rank == 2;
        Case c = case_of("ranks=3 spread=full sets=2 %s", disagreements[i].usual), mine = c;
        if (is_other) mine = case_of("ranks=3 spread=full sets=2 %s", disagreements[i].other);
        if (c.mode == EP_MODE_LATENCY && !TESTS_HAVE_LATENCY) continue;
        check_note("%d: %s", i, disagreements[i].field);
        Step step = {.world = world_new(&mine), .rank = bootstrap->rank};
        c = case_complete(c), step.group = open_group(bootstrap, &c);
        step.handle = open_handle(step.group, &step.world->c);
        EpStatus status = call_ops(&step, STEP_PREPARE | STEP_DISPATCH);
        CHECK_REFUSED(status, EP_ERR_MISMATCH, disagreements[i].field, disagreements[i].value,
                      disagreements[i].other_value, "rank 2");
        close_step(&step);
        bootstrap->barrier(bootstrap->context, 60);
    }
}

/* ---- a live group ---- */

GroupTest(runtime_group, what_a_group_says_of_itself, 3, "experts=7") {
    static const int first[] = {0, 3, 5}, count[] = {3, 2, 2};
    EpGroupInfo info = group_info(group);
    CHECK(info.rank == bootstrap->rank && info.size == 3, "%d of %d", info.rank, info.size);
    CHECK(info.num_experts == 7, "%d", info.num_experts);
    CHECK(info.first_expert == first[info.rank], "%d", info.first_expert);
    CHECK(info.num_local_experts == count[info.rank], "%d", info.num_local_experts);
    CHECK(info.backend == TEST_BACKEND, "%d", (int)info.backend);
    const char *nodes = getenv("LIBEP_TEST_NODES");
    CHECK(nodes || (info.node == 0 && info.num_nodes == 1), "node %d of %d", info.node,
          info.num_nodes);
    CHECK(info.within[0] && (nodes || !info.between[0]), "%s, %s", info.within, info.between);
    CHECK(info.num_cpus >= 1, "%d CPUs", info.num_cpus);
    CHECK((info.device >= 0) == TESTS_ON_GPU && (info.gpu[0] != 0) == TESTS_ON_GPU && !info.bound,
          "%d: %s", info.device, info.gpu);
    CHECK(strstr(info.reason, TESTS_ON_GPU ? "cuda" : "host"), "%s", info.reason);
    CHECK(info.library_bytes > 0, "%lld bytes", (long long)info.library_bytes);
}

static void check_promise(const EpBootstrap *bootstrap, int64_t capacity) {
    Case c = case_complete(
        case_of("ranks=2 experts=20 top_k=8 max_tokens=500 hidden=512 capacity=%d", (int)capacity));
    EpGroupConfig config = case_group_config(&c);
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    CHECK_OK(ep_group_memory(&config, 2, &memory));
    CHECK(memory.feasible == 1 && memory.backend == TEST_BACKEND, "%s", memory.reason);
    EpGroup *group = open_group(bootstrap, &c);
    int64_t promised = memory.shared_bytes + memory.private_bytes;
    for (int handles = 0; handles < 4; handles++) {
        EpGroupInfo info = group_info(group);
        CHECK(info.library_bytes <= promised + handles * memory.handle_bytes,
              "%lld bytes with %d handles", (long long)info.library_bytes, handles);
        open_handle(group, &c);
    }
    size_t bytes = 0;
    CHECK_OK(ep_handle_memory(group, NULL, &bytes));
    CHECK((int64_t)bytes <= memory.handle_bytes, "%zu bytes", bytes);
    CHECK(bootstrap->rank > 0 || (int64_t)bytes == memory.handle_bytes, "%zu bytes", bytes);
    ep_group_destroy(group);
}

/* A group uses no more memory than ep_group_memory returned, its handles included. A capacity makes
 * their plans smaller. */
ThreadTest(runtime_group, memory_as_promised, 2) {
    check_promise(bootstrap, 0);
    check_promise(bootstrap, 400);
}

ThreadTest(runtime_group, a_communicator_on_the_host_backend, 1) {
    EpGroupConfig config = group_config(1);
    config.backend = EP_BACKEND_HOST;
    config.nccl_comm = &config;
    CHECK_NO_GROUP(bootstrap, &config, EP_ERR_UNSUPPORTED, "NCCL");
}

/* AUTO becomes an available backend, and the group can be created. */
ThreadTest(runtime_group, backend_auto, 2) {
    EpGroupConfig config = group_config(2);
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    config.backend = EP_BACKEND_AUTO;
    CHECK_OK(ep_group_memory(&config, 2, &memory));
    EpGroup *group = open_group_with(bootstrap, &config);
    EpGroupInfo info = group_info(group);
    CHECK(info.backend == memory.backend, "%d", (int)info.backend);
    ep_group_destroy(group);
}

/* ---- two groups ---- */

/* Each rank is in two groups over one bootstrap and interleaves their calls. */
ThreadTest(runtime_group, two_groups_of_the_same_ranks, 3) {
    Case cases[] = {case_of("ranks=3 experts=5 hidden=16 weighted=1 seed=1"),
                    case_of("ranks=3 experts=11 top_k=5 alignment=8 seed=2")};
    Step step[2];
    for (int i = 0; i < 2; i++)
        step[i] = open_step(bootstrap, &cases[i]);
    void (*const operations[])(const Step *) = {step_prepare, step_dispatch, step_combine,
                                                step_combine_backward, step_dispatch_backward};
    for (int op = 0; op < 5; op++)
        for (int i = 0; i < 2; i++)
            operations[op](&step[i]);
    for (int i = 0; i < 2; i++)
        close_step(&step[i]);
}

/* One process creates and destroys many groups, one after the other. */
ThreadTest(runtime_group, groups_come_and_go, 2) {
    int groups = TESTS_ON_GPU ? 5 : 40; /* creating communicators is slow */
    for (int i = 0; i < groups; i++)
        run_case(bootstrap, &(Case){.ranks = 2, .seed = (uint64_t)i});
}
