/* SPDX-License-Identifier: Apache-2.0 */
/* Bootstraps and groups from nothing but the caller's communicator. */
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/communicator.h"
#include "tests/gpu/devices.h"
#include "tests/gpu/failing.h"

/* Bootstraps that fail log a warning. */
static void silence_log(void) {
    setenv("LIBEP_LOG_FILE", "/dev/null", 1);
}

TestSuite(gpu_nccl_bootstrap, .init = silence_log);

/* One rank's communicator and bootstrap. `harness` is another bootstrap of the same ranks. */
typedef struct Framework {
    Nccl nccl;
    const EpBootstrap *harness;
    ncclComm_t comm;
    EpBootstrap bootstrap;
} Framework;

static bool framework_open(Framework *f, const EpBootstrap *harness, int blocking) {
    *f = (Framework){.harness = harness, .bootstrap = EP_BOOTSTRAP_INIT};
    if (!nccl_serves(&f->nccl, harness->size)) return false;
    f->comm = nccl_communicator(&f->nccl, harness, blocking);
    if (!CHECK(f->comm, "no communicator")) return false;
    return CHECK_OK(ep_bootstrap_nccl(f->comm, &f->bootstrap));
}

static void meet(const Framework *f) {
    CHECK_OK(f->harness->barrier(f->harness->context, 60));
}

static void framework_close(Framework *f) {
    cudaStream_t stream = new_stream();
    ep_bootstrap_destroy(&f->bootstrap);
    nccl_check_works(&f->nccl, f->comm, f->harness, stream);
    CHECK_CUDA(cudaStreamDestroy(stream));
    CHECK(f->nccl.destroy(f->comm) == ncclSuccess, "ncclCommDestroy");
}

/* End a communicator whose ranks are out of step. */
static void framework_abort(Framework *f) {
    meet(f);
    ncclResult_t result = f->nccl.abort(f->comm);
    CHECK(result == ncclSuccess || result == ncclInProgress, "ncclCommAbort: %d", (int)result);
    ep_bootstrap_destroy(&f->bootstrap);
    CHECK_CUDA(cudaDeviceSynchronize());
    meet(f);
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
    if (!framework_open(&f, harness, blocking)) return;
    const EpBootstrap *b = &f.bootstrap;
    CHECK(b->rank == harness->rank && b->size == harness->size, "rank %d of %d", b->rank, b->size);
    CHECK(!b->share && !b->share_free && !b->isend && b->destroy, "callbacks");
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++)
        check_gather(b, sizes[i]);
    for (int i = 0; i < 3; i++)
        CHECK_OK(b->barrier(b->context, 60));
    framework_close(&f);
}

ThreadTest(gpu_nccl_bootstrap, gathers_1, 1) {
    gather_sizes(bootstrap, 1);
}
ThreadTest(gpu_nccl_bootstrap, gathers_2, 2) {
    gather_sizes(bootstrap, 0);
}
ThreadTest(gpu_nccl_bootstrap, gathers_4, 4) {
    gather_sizes(bootstrap, 1);
}

/* Ranks in different calls all get an error, and the next call works. */
ThreadTest(gpu_nccl_bootstrap, different_calls, 2) {
    Framework f;
    char in[64] = "", out[128];
    if (!framework_open(&f, bootstrap, 0)) return;
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
    if (!framework_open(&f, bootstrap, 1)) return;
    EpBootstrap second = EP_BOOTSTRAP_INIT;
    CHECK_CUDA(cudaGetDevice(&own));
    other = (own + 1) % gpu_count();
    CHECK_CUDA(cudaSetDevice(other));
    CHECK_CUDA(cudaFree(NULL)); /* a device that was never used is not restored */
    CHECK_OK(ep_bootstrap_nccl(f.comm, &second));
    check_gather(&second, 100);
    ep_bootstrap_destroy(&second);
    CHECK_CUDA(cudaGetDevice(&current));
    CHECK(current == other, "device %d instead of %d", current, other);
    CHECK_CUDA(cudaSetDevice(own));
    framework_close(&f);
}

/* ---- groups -------------------------------------------------------------------------------- */

static Case group_case(int ranks) {
    return case_complete((Case){.ranks = ranks,
                                .experts = 5 * ranks,
                                .top_k = 3,
                                .hidden = 200,
                                .max_tokens = 131,
                                .weighted = 1,
                                .capacity = 1700});
}

/* Ranks are threads here, so they meet on the host after each call that allocates or frees memory:
 * the one that has gone ahead would wait on its GPU, and CUDA would wait for that GPU. */
static EpGroup *create(const Framework *f, const EpBootstrap *bootstrap, const Case *c,
                       int borrows) {
    EpGroup *group = NULL;
    EpGroupConfig config = case_group_config(c);
    if (borrows) ep_group_config_set_nccl(&config, f->comm);
    CHECK_OK(ep_group_create(bootstrap, &config, &group));
    meet(f);
    return group;
}

static void destroy(const Framework *f, EpGroup *group) {
    ep_group_destroy(group);
    meet(f);
}

/* Two groups of one bootstrap, one of which borrows the communicator and one of which has its own,
 * and a third of a second bootstrap over the same communicator. */
static void groups(const EpBootstrap *harness, int blocking) {
    Framework f;
    if (!framework_open(&f, harness, blocking)) return;
    Case c = group_case(harness->size);
    EpBootstrap second = EP_BOOTSTRAP_INIT;
    cudaStream_t stream = new_stream();
    REQUIRE_OK(ep_bootstrap_nccl(f.comm, &second));
    EpGroup *made[] = {create(&f, &f.bootstrap, &c, 1), create(&f, &f.bootstrap, &c, 0),
                       create(&f, &second, &c, 1)};
    for (int i = 0; i < 3; i++)
        REQUIRE(made[i], "group %d", i);
    for (int i = 0; i < 6; i++)
        nccl_check_step(made[i % 3], &c, harness->rank, stream);
    destroy(&f, made[1]);
    destroy(&f, made[0]);
    nccl_check_step(made[2], &c, harness->rank, stream);
    destroy(&f, made[2]);
    ep_bootstrap_destroy(&second);
    CHECK_CUDA(cudaStreamDestroy(stream));
    framework_close(&f);
}

ThreadTest(gpu_nccl_bootstrap, groups_2, 2) {
    groups(bootstrap, 0);
}
ThreadTest(gpu_nccl_bootstrap, groups_3, 3) {
    groups(bootstrap, 0);
}
ThreadTest(gpu_nccl_bootstrap, groups_4, 4) {
    groups(bootstrap, 1);
}

/* Handles in latency mode and windows gather while the group works. */
ThreadTest(gpu_nccl_bootstrap, latency_and_windows, 2) {
    Framework f;
    GPU_NEEDS_LATENCY();
    if (!framework_open(&f, bootstrap, 0)) return;
    Case c = group_case(bootstrap->size);
    c.mode = EP_MODE_LATENCY;
    void *memory = NULL;
    cudaStream_t stream = new_stream();
    EpGroup *group = create(&f, &f.bootstrap, &c, 1);
    REQUIRE(group, "no group");
    DeviceStep gpu;
    World *world = world_new(&c);
    CHECK_OK(ep_mem_alloc(group, 1 << 16, &memory));
    device_step_open(&gpu, group, device_step_handle(group, &c), &c, bootstrap->rank, stream, NULL);
    device_step_load(&gpu, world);
    device_step_issue(&gpu, STEP_FORWARD);
    device_step_check(&gpu);
    CHECK_OK(ep_mem_free(group, memory));
    meet(&f);
    destroy(&f, group);
    device_step_close(&gpu);
    world_free(world);
    CHECK_CUDA(cudaStreamDestroy(stream));
    framework_close(&f);
}

/* ---- a rank that stays away ---------------------------------------------------------------- */

/* What NCCL can tell: with two ranks it is the other one. */
static const char *missing_words(const EpBootstrap *b) {
    return b->size == 2 ? "rank 1 did not arrive within 2 s" : "at least one did not arrive";
}

/* The others fail at the deadline, and from then on at once. */
static void absent(const EpBootstrap *harness, int blocking) {
    Framework f;
    if (!framework_open(&f, harness, blocking)) return;
    const EpBootstrap *b = &f.bootstrap;
    EpBootstrap second = EP_BOOTSTRAP_INIT;
    EpGroup *group = NULL;
    Case c = group_case(harness->size);
    EpGroupConfig config = case_group_config(&c);
    config.timeout_seconds = 2;
    ep_group_config_set_nccl(&config, f.comm);
    REQUIRE_OK(ep_bootstrap_nccl(f.comm, &second));
    check_gather(b, 10); /* connects the ranks, for which a blocking communicator has no deadline */
    if (b->rank < b->size - 1) {
        double begin = failing_now();
        CHECK_REFUSED(ep_group_create(b, &config, &group), EP_ERR_TIMEOUT, "ncclAllGather",
                      missing_words(b));
        CHECK(failing_now() - begin > 1.8, "after %.2f s", failing_now() - begin);
        CHECK_REFUSED(b->barrier(b->context, 60), EP_ERR_TIMEOUT, missing_words(b));
        CHECK_REFUSED(second.barrier(second.context, 60), EP_ERR_TIMEOUT, missing_words(b));
        CHECK(failing_now() - begin < FAILING_LIMIT, "after %.2f s", failing_now() - begin);
        CHECK(!group, "a group");
    }
    framework_abort(&f);
    ep_bootstrap_destroy(&second);
}

ThreadTest(gpu_nccl_bootstrap, absent_rank_2, 2) {
    absent(bootstrap, 1);
}
ThreadTest(gpu_nccl_bootstrap, absent_rank_3, 3) {
    absent(bootstrap, 0);
}

/* Ranks whose deadlines are about the same: the later ones may hear that the first has given up. */
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
    if (!framework_open(&f, harness, 0)) return;
    Case c = failing_case(harness->size, EP_MODE_THROUGHPUT);
    REQUIRE(failing_open(&failing, &f.bootstrap, &c, 2), "no group");
    if (harness->rank != failing.absent) {
        double begin = failing_now();
        if (!destroys_at_once) check_departed(ep_mem_alloc(failing.group, 4096, &memory), harness);
        ep_group_destroy(failing.group);
        CHECK(failing_now() - begin < FAILING_LIMIT, "after %.2f s", failing_now() - begin);
    }
    meet(&f);
    if (harness->rank == failing.absent) ep_group_destroy(failing.group);
    failing.group = NULL;
    framework_abort(&f);
    failing_close(&failing);
}

ThreadTest(gpu_nccl_bootstrap, departs_before_destroy, 2) {
    departed(bootstrap, 1);
}
ThreadTest(gpu_nccl_bootstrap, departs_before_mem_alloc, 3) {
    departed(bootstrap, 0);
}

/* A bootstrap whose rank departs after some collective calls. */
typedef struct Departing {
    EpBootstrap whole;
    int left; /* collective calls that it still takes part in */
} Departing;

static EpStatus depart(void) {
    return ep_set_last_error(EP_ERR_BOOTSTRAP, "this rank has departed");
}

static EpStatus departing_allgather(void *context, const void *in, void *out, size_t bytes,
                                    double timeout) {
    Departing *d = context;
    if (d->left-- <= 0) return depart();
    return d->whole.allgather(d->whole.context, in, out, bytes, timeout);
}

static EpStatus departing_barrier(void *context, double timeout) {
    Departing *d = context;
    if (d->left-- <= 0) return depart();
    return d->whole.barrier(d->whole.context, timeout);
}

/* Create a group while rank 1 departs after `calls` collective calls. Returns 1 if all ranks have a
 * group. */
static int create_departing(const EpBootstrap *harness, int calls, int borrows) {
    Framework f;
    int made = 0, each[8] = {0}, count = 0;
    if (!framework_open(&f, harness, 0)) return 1;
    Departing departing = {f.bootstrap, calls};
    EpBootstrap own = f.bootstrap;
    if (own.rank == 1)
        own.context = &departing, own.allgather = departing_allgather,
        own.barrier = departing_barrier;
    Case c = group_case(harness->size);
    EpGroup *group = NULL;
    EpGroupConfig config = case_group_config(&c);
    config.timeout_seconds = 0.5;
    if (borrows) ep_group_config_set_nccl(&config, f.comm);
    double begin = failing_now();
    EpStatus status = ep_group_create(&own, &config, &group);
    check_note("the last of %d calls", calls);
    CHECK(status == EP_OK || status == (own.rank == 1 ? EP_ERR_BOOTSTRAP : EP_ERR_TIMEOUT),
          "%d: %s", (int)status, ep_last_error());
    made = status == EP_OK, departing.left = 1 << 20;
    CHECK_OK(harness->allgather(harness->context, &made, each, sizeof(made), 60));
    for (int r = 0; r < harness->size; r++)
        count += each[r];
    ep_group_destroy(group);
    CHECK(failing_now() - begin < FAILING_LIMIT, "it took %.1f s", failing_now() - begin);
    framework_abort(&f);
    return count == harness->size;
}

static void create_departing_each(const EpBootstrap *harness, int borrows) {
#ifdef TESTS_EMULATED
    int calls = 0;
    while (calls < 60 && !create_departing(harness, calls, borrows))
        calls++;
    CHECK(calls > 3 && calls < 60, "all ranks have a group after %d calls", calls);
#else
    (void)harness, (void)borrows, (void)create_departing;
    check_left_out("NCCL is given a minute to set up, each time");
#endif
}

ThreadTest(gpu_nccl_bootstrap, departs_during_create, 3) {
    create_departing_each(bootstrap, 1);
}
ThreadTest(gpu_nccl_bootstrap, departs_during_create_own, 2) {
    create_departing_each(bootstrap, 0);
}
