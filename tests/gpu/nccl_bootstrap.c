/* SPDX-License-Identifier: Apache-2.0 */
/* Bootstraps and groups from nothing but the caller's communicator. */
#include "tests/gpu/communicator.h"
#include "tests/gpu/failing.h"

TestSuite(gpu_nccl_bootstrap, .init = be_quiet);

/* One rank's communicator and bootstrap. */
typedef struct Framework {
    NcclRank rank;
    EpBootstrap bootstrap;
} Framework;

static void framework_open(Framework *f, const EpBootstrap *harness, int blocking) {
    f->bootstrap = (EpBootstrap)EP_BOOTSTRAP_INIT;
    nccl_rank_open(&f->rank, harness, blocking);
    REQUIRE_OK(ep_bootstrap_nccl(f->rank.comm, &f->bootstrap));
}

static void framework_close(Framework *f) {
    ep_bootstrap_destroy(&f->bootstrap);
    nccl_rank_close(&f->rank);
}

/* End a communicator whose ranks are out of step. */
static void framework_abort(Framework *f) {
    nccl_rank_abort(&f->rank);
    ep_bootstrap_destroy(&f->bootstrap);
    CHECK_CUDA(cudaDeviceSynchronize());
    nccl_rank_meet(&f->rank);
}

/* ---- gathers ------------------------------------------------------------------------------- */

static unsigned char byte_of(int rank, size_t i) {
    return (unsigned char)(i * 7 + i / 251 + (size_t)rank * 31);
}

static void check_gather(const EpBootstrap *b, size_t bytes) {
    size_t all = bytes * (size_t)b->size, wrong = 0;
    unsigned char *in = calloc(bytes + 1, 1), *out = malloc(all + 1);
    for (size_t i = 0; i < bytes; i++)
        in[i] = byte_of(b->rank, i);
    out[all] = 0xa5;
    CHECK_OK(b->allgather(b->context, in, out, bytes, 60));
    for (size_t i = 0; i < all; i++)
        wrong += out[i] != byte_of((int)(i / bytes), i % bytes);
    CHECK(wrong == 0 && out[all] == 0xa5, "%zu bytes of %zu are wrong", wrong, all);
    free(in), free(out);
}

/* The sizes around a round's 4,088 bytes, and several rounds. */
static void gather_sizes(const EpBootstrap *harness, int blocking) {
    static const size_t sizes[] = {1, 0, 3, 4087, 4088, 4089, 8176, 8177, 100001};
    Framework f;
    framework_open(&f, harness, blocking);
    const EpBootstrap *b = &f.bootstrap;
    CHECK(b->rank == harness->rank && b->size == harness->size, "rank %d of %d", b->rank, b->size);
    CHECK(!b->share && !b->share_free && !b->isend && b->destroy, "callbacks");
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++)
        check_gather(b, sizes[i]);
    for (int i = 0; i < 3; i++)
        CHECK_OK(b->barrier(b->context, 60));
    framework_close(&f);
}

RankTest(gpu_nccl_bootstrap, gathers_1, 1, gather_sizes(bootstrap, 1));
RankTest(gpu_nccl_bootstrap, gathers_2, 2, gather_sizes(bootstrap, 0));
RankTest(gpu_nccl_bootstrap, gathers_4, 4, gather_sizes(bootstrap, 1));

/* Ranks in different calls all get an error, and the next call works. */
ThreadTest(gpu_nccl_bootstrap, different_calls, 2) {
    Framework f;
    char in[64] = "", out[128];
    framework_open(&f, bootstrap, 0);
    const EpBootstrap *b = &f.bootstrap;
    size_t bytes = b->rank == 0 ? 40 : 64;
    CHECK_REFUSED(b->allgather(b->context, in, out, bytes, 60), EP_ERR_ORDER, "same call",
                  "a gather of 40 bytes", "a gather of 64 bytes");
    CHECK_REFUSED(b->rank == 0 ? b->barrier(b->context, 60)
                               : b->allgather(b->context, in, out, bytes, 60),
                  EP_ERR_ORDER, "a barrier", "a gather of 64 bytes");
    check_gather(b, 5000);
    framework_close(&f);
}

/* Calls from a thread whose current device is another one leave that device current. */
ThreadTest(gpu_nccl_bootstrap, current_device, 2) {
    Framework f;
    int own = -1, other = -1, current = -1;
    framework_open(&f, bootstrap, 1);
    EpBootstrap second = EP_BOOTSTRAP_INIT;
    CHECK_CUDA(cudaGetDevice(&own));
    other = (own + 1) % gpu_count();
    CHECK_CUDA(cudaSetDevice(other));
    CHECK_CUDA(cudaFree(NULL)); /* a device that was never used is not restored */
    CHECK_OK(ep_bootstrap_nccl(f.rank.comm, &second));
    check_gather(&second, 100);
    ep_bootstrap_destroy(&second);
    CHECK_CUDA(cudaGetDevice(&current));
    CHECK(current == other, "device %d instead of %d", current, other);
    CHECK_CUDA(cudaSetDevice(own));
    framework_close(&f);
}

/* ---- groups -------------------------------------------------------------------------------- */

static Case group_case(int ranks) {
    Case c = {.ranks = ranks, .experts = 5 * ranks, .top_k = 3, .hidden = 200, .max_tokens = 131};
    c.weighted = 1, c.capacity = 1700;
    return case_complete(c);
}

/* Ranks are threads here, so they meet on the host after each call that allocates or frees memory:
 * the one that has gone ahead would wait on its GPU, and CUDA would wait for that GPU. */
static EpGroup *create(const Framework *f, const EpBootstrap *bootstrap, const Case *c,
                       int borrows) {
    EpGroupConfig config = case_group_config(c);
    if (borrows) ep_group_config_set_nccl(&config, f->rank.comm);
    EpGroup *group = open_group_with(bootstrap, &config);
    nccl_rank_meet(&f->rank);
    return group;
}

static void destroy(const Framework *f, EpGroup *group) {
    ep_group_destroy(group);
    nccl_rank_meet(&f->rank);
}

/* Two groups of one bootstrap, one of which borrows the communicator and one of which has its own,
 * and a third of a second bootstrap over the same communicator. */
static void groups(const EpBootstrap *harness, int blocking) {
    Framework f;
    framework_open(&f, harness, blocking);
    Case c = group_case(harness->size);
    EpBootstrap second = EP_BOOTSTRAP_INIT;
    REQUIRE_OK(ep_bootstrap_nccl(f.rank.comm, &second));
    EpGroup *made[] = {create(&f, &f.bootstrap, &c, 1), create(&f, &f.bootstrap, &c, 0),
                       create(&f, &second, &c, 1)};
    for (int i = 0; i < 6; i++)
        device_step_run(made[i % 3], &c, harness->rank, NULL);
    destroy(&f, made[1]);
    destroy(&f, made[0]);
    device_step_run(made[2], &c, harness->rank, NULL);
    destroy(&f, made[2]);
    ep_bootstrap_destroy(&second);
    framework_close(&f);
}

RankTest(gpu_nccl_bootstrap, groups_2, 2, groups(bootstrap, 0));
RankTest(gpu_nccl_bootstrap, groups_3, 3, groups(bootstrap, 0));
RankTest(gpu_nccl_bootstrap, groups_4, 4, groups(bootstrap, 1));

/* Handles in latency mode and windows gather while the group works. */
static void latency_and_windows(const EpBootstrap *bootstrap) {
    Framework f;
    void *memory = NULL;
    framework_open(&f, bootstrap, 0);
    Case c = group_case(bootstrap->size);
    c.mode = EP_MODE_LATENCY;
    EpGroup *group = create(&f, &f.bootstrap, &c, 1);
    CHECK_OK(ep_mem_alloc(group, 1 << 16, &memory));
    device_step_run(group, &c, bootstrap->rank, NULL);
    CHECK_OK(ep_mem_free(group, memory));
    nccl_rank_meet(&f.rank);
    destroy(&f, group);
    framework_close(&f);
}

LatencyTest(gpu_nccl_bootstrap, latency_and_windows, 2, latency_and_windows(bootstrap));

/* ---- a rank that stays away ------------------------------------------------------------------ */

/* What NCCL can tell: with two ranks it is the other one. */
static const char *missing_words(const EpBootstrap *b) {
    return b->size == 2 ? "rank 1 did not arrive within 2 s" : "at least one did not arrive";
}

/* The others fail at the deadline, and from then on at once. */
static void absent(const EpBootstrap *harness, int blocking) {
    Framework f;
    framework_open(&f, harness, blocking);
    const EpBootstrap *b = &f.bootstrap;
    EpBootstrap second = EP_BOOTSTRAP_INIT;
    EpGroup *group = NULL;
    Case c = group_case(harness->size);
    EpGroupConfig config = case_group_config(&c);
    config.timeout_seconds = 2;
    ep_group_config_set_nccl(&config, f.rank.comm);
    REQUIRE_OK(ep_bootstrap_nccl(f.rank.comm, &second));
    check_gather(b, 10); /* connects the ranks, for which a blocking communicator has no deadline */
    if (b->rank < b->size - 1) {
        double begin = seconds_now();
        CHECK_TIMEOUT(ep_group_create(b, &config, &group), 2, "ncclAllGather", missing_words(b));
        CHECK_REFUSED(b->barrier(b->context, 60), EP_ERR_TIMEOUT, missing_words(b));
        CHECK_REFUSED(second.barrier(second.context, 60), EP_ERR_TIMEOUT, missing_words(b));
        failing_check_soon(begin);
        CHECK(!group, "a group");
    }
    framework_abort(&f);
    ep_bootstrap_destroy(&second);
}

RankTest(gpu_nccl_bootstrap, absent_rank_2, 2, absent(bootstrap, 1));
RankTest(gpu_nccl_bootstrap, absent_rank_3, 3, absent(bootstrap, 0));

/* Ranks whose deadlines are about the same: the later ones may hear that the first has given
   up. */
static void check_departed(EpStatus status, const EpBootstrap *b) {
    if (status == EP_ERR_PEER && b->size > 2)
        CHECK_REFUSED(status, EP_ERR_PEER, "has given up");
    else
        CHECK_REFUSED(status, EP_ERR_TIMEOUT, missing_words(b));
}

/* A rank departs while a group with a handle lives: the others' calls end at their deadlines,
 * though their gathers stay on the device until the communicator is aborted. */
static void departed(const EpBootstrap *harness, int destroys_at_once) {
    Framework f;
    FailingGroup failing;
    void *memory = NULL;
    framework_open(&f, harness, 0);
    Case c = failing_case(harness->size, EP_MODE_THROUGHPUT);
    failing_open(&failing, &f.bootstrap, &c, 2);
    if (harness->rank != failing.absent) {
        double begin = seconds_now();
        if (!destroys_at_once) check_departed(ep_mem_alloc(failing.group, 4096, &memory), harness);
        ep_group_destroy(failing.group);
        failing_check_soon(begin);
    }
    nccl_rank_meet(&f.rank);
    if (harness->rank == failing.absent) ep_group_destroy(failing.group);
    failing.group = NULL;
    framework_abort(&f);
    failing_close(&failing);
}

RankTest(gpu_nccl_bootstrap, departs_before_destroy, 2, departed(bootstrap, 1));
RankTest(gpu_nccl_bootstrap, departs_before_mem_alloc, 3, departed(bootstrap, 0));
