/* SPDX-License-Identifier: Apache-2.0 */
/* Windows of a lent communicator that the caller has made: rows are stored in them as the oracle
 * says, a sender that does not know a window fails the group, and wrong arguments are refused. */
#include "tests/gpu/communicator.h"
#include "tests/gpu/device_step.h"
#include "tests/gpu/failing.h"

enum { PAGE = 4096 };

/* Failed groups log a warning. NCCL tells where a window begins from 2.29 on; the emulated one
 * takes its version from the environment. */
static void set_up_old(void) {
    be_quiet();
    gpu_reserve((size_t)320 << 20);
}

static void set_up(void) {
    set_up_old();
    setenv("EMULATED_NCCL", "22900", 1);
}

TestSuite(gpu_adopt, .init = set_up);
TestSuite(gpu_adopt_old, .init = set_up_old);
TestSuite(gpu_adopt_graphs, .init = set_up_old);

static Case adopt_case(int ranks, int i) {
    Case c = {.ranks = ranks, .experts = 4 * ranks + 3, .top_k = 5, .hidden = 264};
    c.max_tokens = 293, c.masked_percent = 5, c.weighted = i % 2, c.alignment = 8;
    c.capacity = i == 3 ? 700 : 2500, c.rows_per_expert = 320, c.overflow = EP_OVERFLOW_DROP;
    c.layout = (EpLayout)(1 + i % 3), c.counted = 1, c.seed = (uint64_t)i + 50;
    return case_complete(c);
}

/* One rank's communicator, group and windows. */
typedef struct Lender {
    NcclRank rank;
    EpGroup *group;
    NcclWindow window[2];
    size_t bytes;    /* of a device step */
    char *memory[2]; /* this rank's part of each window */
} Lender;

static size_t most_bytes(int ranks) {
    size_t most = 0;
    for (int i = 0; i < 4; i++) {
        Case c = adopt_case(ranks, i);
        if (device_step_bytes(&c) > most) most = device_step_bytes(&c);
    }
    return most;
}

static int locates(const Lender *l) {
    return nccl_locates(&l->rank.nccl);
}

/* Where NCCL tells where a window begins, ranks adopt different parts of it. */
static void lender_open_group(Lender *l, const EpBootstrap *bootstrap, int lends, double seconds) {
    int size = bootstrap->size;
    *l = (Lender){.bytes = most_bytes(size)};
    nccl_maps(&l->rank.nccl, size);
    nccl_rank_open(&l->rank, bootstrap, 1);
    Case c = adopt_case(size, 1);
    EpGroupConfig config = case_group_config(&c);
    config.timeout_seconds = seconds;
    if (lends) ep_group_config_set_nccl(&config, l->rank.comm);
    l->group = open_group_with(bootstrap, &config);
    size_t skipped = locates(l) ? (size_t)(1 + bootstrap->rank) * 128 : 0;
    for (int i = 0; i < 2; i++) {
        size_t bytes = (l->bytes + (size_t)(1 + size) * 128 + PAGE - 1) / PAGE * PAGE;
        l->window[i] = nccl_window_open(&l->rank, bytes);
        l->memory[i] = l->window[i].memory + skipped;
    }
}

static void lender_open(Lender *l, const EpBootstrap *bootstrap) {
    lender_open_group(l, bootstrap, 1, 60);
}

static void lender_close(Lender *l) {
    ep_group_destroy(l->group);
    for (int i = 0; i < 2; i++)
        nccl_window_close(&l->rank, &l->window[i]);
    CHECK_CUDA(cudaStreamDestroy(l->rank.stream));
    CHECK(l->rank.nccl.destroy(l->rank.comm) == ncclSuccess, "ncclCommDestroy");
}

/* No rank goes on before all are here. */
static void meet(const Lender *l) {
    nccl_rank_meet(&l->rank);
}

static EpStatus adopt(const Lender *l, int which, int32_t id) {
    return ep_window_adopt(l->group, l->window[which].window, id, l->memory[which], l->bytes);
}

/* ---- rows ---------------------------------------------------------------------------------- */

/* Run a whole step in `memory`, NULL: in plain memory, and compare every byte with the oracle. */
static void check_step(const Lender *l, const EpBootstrap *bootstrap, int i, void *memory) {
    Case c = adopt_case(bootstrap->size, i);
    device_step_run(l->group, &c, bootstrap->rank, memory);
}

static void check_locating(const Lender *l) {
    void *found = NULL;
    size_t bytes = 0;
    CHECK_REFUSED(ep_window_locate(l->group, NULL, &found, &bytes), EP_ERR_NULL, "window");
    CHECK_REFUSED(ep_window_locate(l->group, l->window[0].window, NULL, &bytes), EP_ERR_NULL,
                  "memory");
    for (int i = 0; i < 2; i++) {
        EpStatus status = ep_window_locate(l->group, l->window[i].window, &found, &bytes);
        if (!locates(l)) {
            CHECK_REFUSED(status, EP_ERR_UNSUPPORTED, "window", "NCCL 2.29");
            CHECK(!found && !bytes, "%p, %zu", found, bytes);
        } else if (CHECK_OK(status)) {
            CHECK(found == l->window[i].memory, "%p instead of %p", found,
                  (void *)l->window[i].memory);
            CHECK(bytes >= l->window[i].bytes, "%zu of %zu bytes", bytes, l->window[i].bytes);
            found = NULL;
            CHECK_OK(ep_window_locate(l->group, l->window[i].window, &found, NULL));
            CHECK(found == l->window[i].memory, "%p without the size", found);
        }
    }
}

/* Two windows, adopted in another order and with other ids in use on each rank; on odd ranks rows
 * may lie elsewhere. Then the ids change their windows. */
static void rows_in_windows(const EpBootstrap *bootstrap) {
    Lender l;
    void *shared = NULL;
    int rank = bootstrap->rank;
    lender_open(&l, bootstrap);
    REQUIRE_OK(ep_mem_alloc(l.group, l.bytes, &shared));
    check_locating(&l);
    for (int i = 0; i < 2; i++)
        CHECK_OK(adopt(&l, rank % 2 ? 1 - i : i, rank % 2 ? 63 - 63 * i : 63 * i));
    meet(&l);
    for (int i = 0; i < 4; i++) {
        check_step(&l, bootstrap, i, l.memory[i % 2]);
        check_step(&l, bootstrap, i, rank % 2 ? NULL : l.memory[1]);
        check_step(&l, bootstrap, i, rank % 2 ? shared : l.memory[0]);
    }
    meet(&l);
    CHECK_OK(ep_window_release(l.group, l.memory[0]));
    CHECK_OK(ep_window_release(l.group, l.memory[1]));
    check_step(&l, bootstrap, 1, l.memory[1]); /* no window any more, and still memory */
    CHECK_OK(adopt(&l, 1, 0));
    CHECK_OK(ep_mem_free(l.group, shared));
    check_step(&l, bootstrap, 2, l.memory[1]);
    lender_close(&l);
}

RankTests(gpu_adopt, rows, rows_in_windows(bootstrap));
RankTest(gpu_adopt_old, rows_2, 2, rows_in_windows(bootstrap));

/* Take all other ids by name, each for a part of the window: then there is none without a name. */
static void take_all_others(const Lender *l) {
    char *memory = l->memory[0];
    for (int i = 1; i < EP_MAX_ADOPTED_WINDOWS; i++)
        if (ep_window_adopt(l->group, l->window[0].window, i, memory + i * 16, 16) != EP_OK)
            CHECK_OK(ep_window_adopt(l->group, l->window[0].window, 0, memory + i * 16, 16));
    CHECK_REFUSED(adopt(l, 0, EP_WINDOW_PAIRED), EP_ERR_RANGE, "ep_window_adopt: id", "at most 64");
}

/* Windows without ids: ranks adopt them in different orders, and receive at different offsets. */
static void rows_in_paired_windows(const EpBootstrap *bootstrap) {
    Lender l;
    int rank = bootstrap->rank;
    lender_open(&l, bootstrap);
    if (rank == 1) CHECK_OK(adopt(&l, 1, EP_WINDOW_PAIRED));
    CHECK_OK(adopt(&l, 0, EP_WINDOW_PAIRED));
    if (rank != 1) CHECK_OK(adopt(&l, 1, EP_WINDOW_PAIRED));
    meet(&l);
    for (int i = 0; i < 4; i++)
        check_step(&l, bootstrap, i, l.memory[i % 2]);
    check_step(&l, bootstrap, 1, NULL); /* in no window on any rank */
    meet(&l);
    CHECK_OK(ep_window_release(l.group, l.memory[0]));
    check_step(&l, bootstrap, 2, l.memory[1]);
    if (locates(&l)) take_all_others(&l);
    meet(&l);
    lender_close(&l);
}

RankTests(gpu_adopt, paired_rows, rows_in_paired_windows(bootstrap));

/* Rank 0's operation runs, and waits for rank 1, while rank 0 adopts a window and another
 * stream is under capture. The operation's own window is not disturbed, and the next step uses
 * the new one.
 */
static void while_operations_run(const EpBootstrap *bootstrap) {
    Lender l;
    DeviceStep gpu;
    cudaStream_t captured = new_stream();
    lender_open(&l, bootstrap);
    Case c = adopt_case(bootstrap->size, 1);
    CHECK_OK(adopt(&l, 0, 7));
    device_step_open(&gpu, l.group, open_handle(l.group, &c), &c, bootstrap->rank, l.rank.stream,
                     l.memory[0]);
    device_step_draw(&gpu, &c);
    meet(&l);
    CHECK_CUDA(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
    if (bootstrap->rank == 0) device_step_issue(&gpu, STEP_ALL);
    if (bootstrap->rank != 0) usleep(100000);
    if (bootstrap->rank != 0) device_step_issue(&gpu, STEP_ALL);
    CHECK_OK(adopt(&l, 1, 8));
    graph_discard(captured);
    meet(&l); /* waiting would end another rank's capture */
    device_step_check(&gpu);
    meet(&l);
    for (int i = 0; i < 4; i++)
        check_step(&l, bootstrap, i, l.memory[1]);
    device_step_close(&gpu);
    CHECK_CUDA(cudaStreamDestroy(captured));
    lender_close(&l);
}

RankTests24(gpu_adopt, while_operations_run, while_operations_run(bootstrap));

/* ---- a sender without the window ------------------------------------------------------------- */

/* Check that no receive row that rank 0 fills was written. */
static void check_nothing_from_rank_0(const DeviceStep *gpu) {
    device_step_fetch(gpu);
    Image got = device_step_image(gpu, gpu->got, OUT_TOKENS);
    Image before = device_step_image(gpu, gpu->poison, OUT_TOKENS);
    const RankWorld *me = device_step_rank(gpu);
    size_t bytes = case_row_bytes(&gpu->c);
    int rows = 0;
    for (int64_t row = 0; row < me->buffer_rows; row++) {
        size_t at = (size_t)row * bytes;
        if (me->row[row].kind != ROW_FILLED || me->row[row].source != 0) continue;
        CHECK(memcmp(got.data + at, before.data + at, bytes) == 0, "row %lld was written",
              (long long)row);
        rows++;
    }
    CHECK(rows > 20, "%d rows of rank 0", rows);
}

/* Why rank 0 cannot store rows into the others' window: it never adopted it, or has released it; or
 * the window is paired, and its own rows lie elsewhere. */
typedef enum Unknown { UNKNOWN, RELEASED, PAIRED } Unknown;

/* Rank 0 cannot store rows into the window of id 9, or the paired one. Every rank ends
 * long before the deadline, and rank 0 has stored no rows on the others. */
static void unknown_to_rank_0(const EpBootstrap *bootstrap, Unknown how) {
    Lender l;
    DeviceStep gpu;
    EpFinding found = EP_FINDING_INIT;
    int rank = bootstrap->rank;
    lender_open_group(&l, bootstrap, 1, 2 * FAILING_LIMIT);
    Case c = adopt_case(bootstrap->size, 1);
    int id = how == PAIRED ? EP_WINDOW_PAIRED : 9;
    if (rank || how != UNKNOWN) CHECK_OK(adopt(&l, 1, id));
    if (!rank && how == RELEASED) CHECK_OK(ep_window_release(l.group, l.memory[1]));
    device_step_open(&gpu, l.group, open_handle(l.group, &c), &c, rank, l.rank.stream,
                     rank ? l.memory[1] : NULL);
    device_step_draw(&gpu, &c);
    device_step_issue(&gpu, STEP_PREPARE);
    device_step_check(&gpu);
    size_t ring_bytes = 0;
    char *before = failing_copy_records(l.group, &ring_bytes);
    meet(&l);
    double begin = seconds_now();
    CHECK_OK(device_step_try(&gpu, STEP_DISPATCH));
    CHECK_CUDA(cudaStreamSynchronize(l.rank.stream));
    failing_check_soon(begin);
    meet(&l);
    char *after = failing_copy_records(l.group, &ring_bytes);
    /* Of two ranks this one's ring is rank 0's alone. */
    if (rank && bootstrap->size == 2) CHECK(!memcmp(before, after, ring_bytes), "rows in the ring");
    free(before), free(after);
    if (rank) {
        /* A third rank may have learnt of it first, and have given up in its turn. */
        CHECK_REFUSED(ep_group_status(l.group, &found), EP_ERR_PEER, "dispatch", "given up",
                      "rank 0");
        CHECK(found.peer == 0, "peer %d", found.peer);
        check_nothing_from_rank_0(&gpu);
    } else {
        CHECK_REFUSED(ep_group_status(l.group, &found), EP_ERR_ORDER, "rank 0: dispatch",
                      how == PAIRED ? "EP_WINDOW_PAIRED" : "ep_window_adopt with id 9",
                      how == PAIRED ? "has them, got other"
                                    : "the adopted window 9, in which rank");
        CHECK(found.rank == 0 && found.peer > 0 && found.expected == id && found.seen == -1,
              "rank %d, peer %d, expected %lld", found.rank, found.peer, (long long)found.expected);
    }
    CHECK_REFUSED(adopt(&l, 0, 1), rank ? EP_ERR_PEER : EP_ERR_ORDER, "rank 0");
    meet(&l);
    device_step_close(&gpu);
    lender_close(&l);
    failing_check_next(bootstrap, EP_MODE_THROUGHPUT);
}

RankTests24(gpu_adopt, unknown, unknown_to_rank_0(bootstrap, UNKNOWN));
RankTest(gpu_adopt, released_2, 2, unknown_to_rank_0(bootstrap, RELEASED));
RankTest(gpu_adopt, received_elsewhere_2, 2, unknown_to_rank_0(bootstrap, PAIRED));

/* ---- wrong arguments ------------------------------------------------------------------------- */

/* Memory of another window. Where windows lie side by side, here and where NCCL has mapped
 * them, it is what an offset in the first one leads to, on all ranks. */
static void refuse_other_window(const Lender *l) {
    char *memory = l->window[1].memory;
    EpStatus status = ep_window_adopt(l->group, l->window[0].window, 0, memory, 64);
#ifdef TESTS_EMULATED
    CHECK_REFUSED(status, EP_ERR_ADDRESS, "memory");
#else
    if (status == EP_OK)
        CHECK_OK(ep_window_release(l->group, memory));
    else
        CHECK_REFUSED(status, EP_ERR_ADDRESS, "memory");
#endif
}

/** An adoption that is refused. */
typedef struct WrongAdoption {
    void *window;
    int32_t id;
    char *memory;
    size_t bytes;
    EpStatus status;
    const char *parts[2];
} WrongAdoption;

static void refuse_each(const Lender *l, const WrongAdoption *wrong, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const WrongAdoption *w = &wrong[i];
        check_note("adoption %zu", i);
        CHECK_REFUSED(ep_window_adopt(l->group, w->window, w->id, w->memory, w->bytes), w->status,
                      w->parts[0], w->parts[1]);
    }
}

#define REFUSE_EACH(l, list) refuse_each(l, list, sizeof(list) / sizeof(*(list)))

static void wrong_arguments(const EpBootstrap *bootstrap) {
    Lender l;
    lender_open(&l, bootstrap);
    void *window = l.window[0].window, *plain = NULL;
    char *begin = l.window[0].memory, *other = l.window[1].memory, host[32] = "";
    size_t bytes = l.window[0].bytes;
    REQUIRE_CUDA(cudaMalloc(&plain, PAGE));
    const WrongAdoption wrong[] = {
        {NULL, 0, begin, bytes, EP_ERR_NULL, {"ep_window_adopt: window", "NULL"}},
        {host, 0, begin, bytes, EP_ERR_ADDRESS, {"window"}},
        {window, 64, begin, bytes, EP_ERR_RANGE, {"id"}},
        {window, 0, begin + 8, 64, EP_ERR_ADDRESS, {"memory", "multiple of 16"}},
        {window, 0, begin, 0, EP_ERR_RANGE, {"bytes"}},
        {window, 0, plain, PAGE, EP_ERR_ADDRESS, {"memory"}},
        {window, 0, begin, (size_t)1 << 40, EP_ERR_ADDRESS, {"not in it"}},
        {window, 0, begin, SIZE_MAX, EP_ERR_RANGE, {"bytes"}}};
    REFUSE_EACH(&l, wrong);
    refuse_other_window(&l);
    const WrongAdoption located[] = {
        {plain, 0, begin, bytes, EP_ERR_FOREIGN, {"window", "borrowed communicator"}}};
    const WrongAdoption unlocated[] = {
        {window, 0, begin + 64, 64, EP_ERR_ADDRESS, {"memory", "from its start on"}}};
    refuse_each(&l, locates(&l) ? located : unlocated, 1);
    size_t skipped = locates(&l) ? 64 : 0;
    CHECK_OK(ep_window_adopt(l.group, window, 0, begin + skipped, bytes - skipped));
    const WrongAdoption again[] = {
        {window, 1, begin, bytes, EP_ERR_RANGE, {"overlaps"}},
        {l.window[1].window, 0, other, bytes, EP_ERR_RANGE, {"id", "not in use"}}};
    REFUSE_EACH(&l, again);
    CHECK_REFUSED(ep_window_release(l.group, plain), EP_ERR_FOREIGN, "ep_window_release", "memory");
    /* Nothing has changed: the id that was refused is free. */
    CHECK_OK(ep_window_adopt(l.group, l.window[1].window, 1, other, bytes));
    meet(&l);
    check_step(&l, bootstrap, 1, other);
    CHECK_CUDA(cudaFree(plain));
    lender_close(&l);
}

RankTest(gpu_adopt, wrong_arguments_2, 2, wrong_arguments(bootstrap));
RankTest(gpu_adopt_old, wrong_arguments_2, 2, wrong_arguments(bootstrap));

/* The group has made its own communicator. */
ThreadTest(gpu_adopt, nothing_lent, 2) {
    Lender l;
    lender_open_group(&l, bootstrap, 0, 60);
    CHECK_REFUSED(adopt(&l, 0, 0), EP_ERR_UNSUPPORTED, "ep_window_adopt", "group",
                  "EpGroupConfig.nccl_comm");
    check_step(&l, bootstrap, 1, l.memory[0]);
    lender_close(&l);
}

/* The memory of a group that borrows a communicator is what was promised. */
ThreadTest(gpu_adopt, memory_as_promised, 2) {
    Lender l;
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    lender_open(&l, bootstrap);
    Case c = adopt_case(2, 1);
    EpGroupConfig config = case_group_config(&c);
    ep_group_config_set_nccl(&config, l.rank.comm);
    CHECK_OK(adopt(&l, 0, 0));
    CHECK_OK(ep_group_memory(&config, 2, &memory));
    EpGroupInfo info = group_info(l.group);
    CHECK(info.library_bytes == memory.shared_bytes + memory.private_bytes, "%lld bytes",
          (long long)info.library_bytes);
    lender_close(&l);
}

/* ---- graphs -------------------------------------------------------------------------------- */

/* A graph of a step that was captured before its memory was adopted gives the same bytes after. */
static void captured_before(const EpBootstrap *bootstrap) {
    Lender l;
    DeviceStep gpu;
    lender_open(&l, bootstrap);
    Case c = adopt_case(bootstrap->size, 1);
    device_step_open(&gpu, l.group, open_handle(l.group, &c), &c, bootstrap->rank, NULL,
                     l.memory[0]);
    device_step_draw_step(&gpu, 1);
    cudaGraphExec_t exec = device_step_capture(&gpu, STEP_ALL);
    for (int i = 0; i < 6; i++) {
        if (i == 2) CHECK_OK(adopt(&l, 0, 3));
        if (i == 4) CHECK_OK(ep_window_release(l.group, l.memory[0]));
        device_step_draw_step(&gpu, 1);
        device_step_launch(&gpu, exec, STEP_ALL);
        device_step_check(&gpu);
    }
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    CHECK_OK(ep_group_status(l.group, NULL));
    device_step_close(&gpu);
    lender_close(&l);
}

RankTest(gpu_adopt_graphs, captured_before_2, 2, captured_before(bootstrap));
