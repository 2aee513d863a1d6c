/* SPDX-License-Identifier: Apache-2.0 */
/* Many random steps of one group. T, routing, layout, handle and stream change from step to step,
 * several steps are under way at once, and every byte of each is compared with the oracle. Then
 * steps of both modes, whole and in phases, interleaved operation by operation, with random delays
 * of each rank. Then more live handles in latency mode than a group has windows for its callers,
 * and handles that are created and destroyed between steps. LIBEP_TEST_SEED=N sets the seed,
 * LIBEP_TEST_STEPS=M takes M steps, or M rounds with one step of each handle. */
#include "tests/gpu/device_step.h"
#include "tests/harness/random.h"

enum {
    HANDLES = 6,                /* of throughput mode: two of each layout */
    DEVICE_STEPS = 4 * HANDLES, /* steps that can be under way */
    RELOAD_INTERVAL = 125,      /* steps after which all steps get new worlds */
    BOTH_HANDLES = 9,           /* of both modes */
    ROUNDS = 60,
    KINDS = 8, /* of handles of latency mode: each layout, whole and in phases */
    LIVE_HANDLES = EP_MAX_WINDOWS + 10,
    ROUNDS_OF_KINDS = 25,
    LIFETIMES = EP_MAX_WINDOWS + 8,
    DELAY_BYTES = 2 << 20
};

GpuSuite(gpu_steps, 512);

/** A group, and steps of its handles on two streams. */
typedef struct Run {
    EpGroup *group;
    cudaStream_t stream[2];
    DeviceStep gpu[DEVICE_STEPS];
    unsigned left[DEVICE_STEPS]; /* operations not yet issued in this round */
    int count;
    uint64_t seed;
    Random random, own; /* draws the same on every rank; this rank's delays */
    char *from, *to;    /* copied to delay a stream */
} Run;

/* Open `count` steps of so many handles. */
static void run_open(Run *run, const EpBootstrap *bootstrap, Case (*choose)(int ranks, int handle),
                     int handles, int count) {
    EpHandle *handle[BOTH_HANDLES];
    memset(run, 0, sizeof(*run));
    run->seed = environment_number("LIBEP_TEST_SEED", 1), run->count = count;
    run->random = random_stream(run->seed, 7, 7);
    run->own = random_stream(run->seed, 2, (uint64_t)bootstrap->rank);
    Case widest = choose(bootstrap->size, 1);
    run->group = open_group(bootstrap, &widest);
    run->to = gpu_allocate(128, DELAY_BYTES);
    REQUIRE(run->group && run->to, "no group, or no memory");
    REQUIRE_CUDA(cudaMalloc((void **)&run->from, DELAY_BYTES));
    for (int i = 0; i < 2; i++)
        run->stream[i] = new_stream();
    for (int i = 0; i < count; i++) {
        Case c = choose(bootstrap->size, i % handles);
        if (i < handles) handle[i] = open_handle(run->group, &c);
        device_step_open(&run->gpu[i], run->group, handle[i % handles], &c, bootstrap->rank,
                         run->stream[i % 2], NULL);
    }
}

static void run_close(Run *run, int steps) {
    CHECK_OK(ep_group_status(run->group, NULL));
    if (run->gpu[0].step.rank == 0)
        printf("gpu_steps: %d ranks, %d steps, seed %llu\n", run->gpu[0].c.ranks, steps,
               (unsigned long long)run->seed);
    ep_group_destroy(run->group);
    for (int i = 0; i < run->count; i++)
        device_step_close(&run->gpu[i]);
    for (int i = 0; i < 2; i++)
        CHECK_CUDA(cudaStreamDestroy(run->stream[i]));
    CHECK_CUDA(cudaFree(run->from));
    gpu_release(run->to);
}

static void draw_worlds(Run *run) {
    static const Spread spreads[] = {SPREAD_RANDOM, SPREAD_RANDOM, SPREAD_RANDOM, SPREAD_FULL,
                                     SPREAD_ALONE,  SPREAD_HOLE,   SPREAD_NONE};
    for (int i = 0; i < run->count; i++) {
        Case c = run->gpu[i].c;
        c.seed = random_next(&run->random);
        c.spread = spreads[random_below(&run->random, 7)];
        c.routing = (Routing)random_below(&run->random, 2);
        device_step_draw(&run->gpu[i], &c);
    }
}

static void check(Run *run, int i, int step) {
    check_note("seed %llu, step %d: %s", (unsigned long long)run->seed, step,
               case_describe(&run->gpu[i].drawn->c));
    device_step_check(&run->gpu[i]);
}

/* ---- throughput mode ----------------------------------------------------------------------- */

/* The second handle of each layout has so little capacity that some steps drop rows. The sums of
 * two handles travel quantised. */
static Case throughput_case(int ranks, int handle) {
    int tight = handle >= 3;
    Case c = {.ranks = ranks, .sets = 4, .experts = 3 * ranks + 1, .top_k = 3, .hidden = 64};
    c.max_tokens = 64, c.weighted = handle % 2, c.scale_bytes = 8 * (handle % 2);
    c.alignment = tight ? 1 : 4, c.capacity = tight ? 90 : 400, c.rows_per_expert = tight ? 30 : 96;
    c.overflow = EP_OVERFLOW_DROP, c.layout = (EpLayout)(1 + handle % 3), c.masked_percent = 10;
    c.sum_quant = handle % 5 ? EP_QUANT_NONE : EP_QUANT_FP8, c.counted = 1;
    return case_complete(c);
}

/* Draw the operations of a step: ep_prepare and some others. */
static unsigned draw_ops(Random *random) {
    static const unsigned ops[] = {STEP_ALL,
                                   STEP_ALL,
                                   STEP_FORWARD,
                                   STEP_PREPARE | STEP_DISPATCH,
                                   STEP_PREPARE | STEP_BACKWARD,
                                   STEP_PREPARE | STEP_DISPATCH | STEP_COMBINE_BACKWARD,
                                   STEP_PREPARE};
    return ops[random_below(random, 7)];
}

/* Enqueue up to six steps, then check them. Returns their number. */
static int run_batch(Run *run, int step) {
    int chosen[6], count = 1 + (int)random_below(&run->random, 6);
    for (int i = 0; i < count; i++) {
        /* All are distinct, since a device step holds the outputs of one step. */
        int first = (int)random_below(&run->random, DEVICE_STEPS / 6);
        chosen[i] = first * 6 + (int)((uint64_t)(step + i) % 6);
        DeviceStep *gpu = &run->gpu[chosen[i]];
        gpu->stream = run->stream[random_below(&run->random, 2)];
        device_step_poison(gpu);
        device_step_issue(gpu, draw_ops(&run->random));
    }
    for (int i = 0; i < count; i++)
        check(run, chosen[i], step + i);
    return count;
}

static void run_random_steps(const EpBootstrap *bootstrap, int standard) {
    static _Thread_local Run run;
    int steps = (int)environment_number("LIBEP_TEST_STEPS", (uint64_t)standard), reload = 0;
    run_open(&run, bootstrap, throughput_case, HANDLES, DEVICE_STEPS);
    for (int step = 0; step < steps && !check_failure()[0];) {
        if (step >= reload) draw_worlds(&run), reload = step + RELOAD_INTERVAL;
        step += run_batch(&run, step);
    }
    run_close(&run, steps);
}

/* Processes that share GPUs take milliseconds for each operation. */
#define MANY_STEPS(bootstrap) (gpu_shares((bootstrap)->size) ? 1000 : 10000)

RankTest(gpu_steps, random_1, 1, run_random_steps(bootstrap, 2000));
RankTests24(gpu_steps, random, run_random_steps(bootstrap, MANY_STEPS(bootstrap)));

/* ---- both modes ------------------------------------------------------------------------------ */

/* Handles 0 to 2 and 8: latency mode, each layout. 3 and 4: latency mode with quantised rows. 5
 * to 7: throughput mode, each layout that it has. The combines of 2 and 3 get topk_weights. The
 * sums of 1 and 5 travel quantised. A round has at most 12 send phases. */
static Case either_case(int ranks, int handle) {
    int throughput = handle >= 5 && handle < 8, quantised = handle == 3 || handle == 4;
    Case c = {.ranks = ranks, .sets = EP_MAX_LATENCY_SETS, .experts = 2 * ranks + 1, .top_k = 3};
    c.hidden = 64, c.max_tokens = 14, c.counted = 1, c.weighted = handle % 2 || handle == 8;
    c.global_ids = handle % 2, c.weights_at_combine = handle == 2 || handle == 3;
    c.masked_percent = 8, c.alignment = 4, c.capacity = handle == 5 ? 30 : 100;
    c.rows_per_expert = 24, c.overflow = EP_OVERFLOW_DROP;
    c.layout = handle == 8 ? EP_LAYOUT_RANK_MAJOR : (EpLayout)(1 + handle % 3);
    c.mode = throughput ? EP_MODE_THROUGHPUT : EP_MODE_LATENCY;
    if (handle % 4 == 1) c.sum_quant = EP_QUANT_FP8;
    if (quantised) c.quant = handle == 3 ? EP_QUANT_FP8 : EP_QUANT_MXFP8;
    return case_complete(c);
}

static unsigned draw_ops_of(Random *random, EpMode mode) {
    static const unsigned latency[] = {STEP_FORWARD,
                                       STEP_PHASES,
                                       STEP_PHASES,
                                       STEP_PREPARE | STEP_DISPATCH,
                                       STEP_PREPARE | STEP_DISPATCH_SEND | STEP_DISPATCH_WAIT,
                                       STEP_PREPARE | STEP_DISPATCH | STEP_COMBINE_SEND |
                                           STEP_COMBINE_WAIT};
    int drawn = (int)random_below(random, 6);
    if (mode == EP_MODE_LATENCY) return latency[drawn];
    return drawn % 2 ? STEP_ALL : STEP_FORWARD;
}

/* Delay this rank: on the host before a call, or on the stream before its kernel. */
static void delay(Run *run, cudaStream_t stream) {
    if (random_percent(&run->own, 10)) usleep((useconds_t)random_below(&run->own, 700));
    if (!random_percent(&run->own, 10)) return;
    for (int i = (int)random_below(&run->own, 4); i >= 0; i--)
        CHECK_CUDA(cudaMemcpyAsync(run->to, run->from, DELAY_BYTES, cudaMemcpyDefault, stream));
}

/* Issue the next operation of a handle, searching from a random one. Returns 0 if none is left. */
static int issue_one(Run *run) {
    int first = (int)random_below(&run->random, BOTH_HANDLES);
    for (int i = 0; i < BOTH_HANDLES; i++) {
        int at = (first + i) % BOTH_HANDLES;
        unsigned op = run->left[at] & -run->left[at];
        if (!op) continue;
        run->left[at] -= op;
        delay(run, run->gpu[at].stream);
        device_step_issue(&run->gpu[at], op);
        return 1;
    }
    return 0;
}

static void run_rounds(const EpBootstrap *bootstrap) {
    static _Thread_local Run run;
    int rounds = (int)environment_number("LIBEP_TEST_STEPS", ROUNDS);
    run_open(&run, bootstrap, either_case, BOTH_HANDLES, BOTH_HANDLES);
    for (int round = 0; round < rounds && !check_failure()[0]; round++) {
        draw_worlds(&run);
        for (int i = 0; i < BOTH_HANDLES; i++)
            run.left[i] = draw_ops_of(&run.random, run.gpu[i].c.mode);
        while (issue_one(&run)) {
        }
        for (int i = 0; i < BOTH_HANDLES; i++)
            check(&run, i, round);
    }
    run_close(&run, rounds);
}

LatencyTests(gpu_steps, both_modes, run_rounds(bootstrap));

/* ---- many handles of latency mode ---------------------------------------------------------- */

/* Kinds 0 to 3: each layout, whole operations. Kinds 4 to 7: the same in phases. */
static Case kind_case(int ranks, int kind) {
    Case c = {.ranks = ranks, .experts = 2 * ranks + 1, .top_k = 3, .hidden = 56, .max_tokens = 11};
    c.counted = 1, c.weighted = 1, c.scale_bytes = 8, c.masked_percent = 10, c.capacity = 60;
    c.rows_per_expert = 20, c.overflow = EP_OVERFLOW_DROP, c.layout = (EpLayout)(1 + kind % 4);
    c.mode = EP_MODE_LATENCY, c.phases = kind / 4;
    return case_complete(c);
}

static int64_t library_bytes(EpGroup *group) {
    EpGroupInfo info = group_info(group);
    return info.library_bytes;
}

/* The first step lies in memory that peers can reach. */
static void open_kinds(Run *run, const EpBootstrap *bootstrap) {
    void *reachable = NULL;
    run_open(run, bootstrap, kind_case, KINDS, KINDS);
    DeviceStep *first = &run->gpu[0];
    Case c = first->c;
    REQUIRE_OK(ep_mem_alloc(run->group, device_step_bytes(&c), &reachable));
    for (int i = 0; i < KINDS; i++)
        ep_handle_destroy(run->gpu[i].step.handle);
    device_step_close(first);
    device_step_open(first, run->group, NULL, &c, bootstrap->rank, run->stream[0], reachable);
}

/* Load a new world for a handle of this kind. */
static void load(Run *run, int kind, EpHandle *handle) {
    Case c = run->gpu[kind].c;
    c.seed = random_next(&run->random);
    run->gpu[kind].step.handle = handle;
    device_step_draw(&run->gpu[kind], &c);
}

/* Run a step of one handle of each kind, interleaved operation by operation. */
static void run_some(Run *run, EpHandle *const *handles, int round) {
    for (int i = 0; i < KINDS; i++)
        load(run, i, handles[i + KINDS * random_below(&run->random, LIVE_HANDLES / KINDS)]);
    for (unsigned op = STEP_PREPARE; op <= STEP_COMBINE_WAIT; op <<= 1)
        for (int i = 0; i < KINDS; i++)
            device_step_issue(&run->gpu[i], op & device_step_all(&run->gpu[i].c));
    for (int i = 0; i < KINDS; i++)
        check(run, i, round);
}

static void many_handles(const EpBootstrap *bootstrap) {
    static _Thread_local Run run;
    EpHandle *handles[LIVE_HANDLES];
    open_kinds(&run, bootstrap);
    for (int i = 0; i < LIVE_HANDLES; i++) {
        handles[i] = open_handle(run.group, &run.gpu[i % KINDS].c);
        REQUIRE(handles[i], "no handle %d", i);
    }
    int64_t held = library_bytes(run.group);
    for (int round = 0; round < ROUNDS_OF_KINDS && !check_failure()[0]; round++)
        run_some(&run, handles, round);
    for (int i = 0; i < LIVE_HANDLES; i++)
        ep_handle_destroy(handles[i * 5 % LIVE_HANDLES]);
    CHECK(library_bytes(run.group) == held, "%lld bytes instead of %lld",
          (long long)library_bytes(run.group), (long long)held);
    run_close(&run, ROUNDS_OF_KINDS);
}

LatencyTests(gpu_latency, many_handles, many_handles(bootstrap));

/* `lasting` stays while two others are created and destroyed: one unused, one used and in some
 * rounds with a pending dispatch. The library reuses their memory, so it does not come to hold
 * more and more. */
static void replace_handles(Run *run, EpHandle *lasting, int round, int64_t *most) {
    int kind = 1 + round % (KINDS - 1);
    EpHandle *used = open_handle(run->group, &run->gpu[kind].c);
    EpHandle *unused = open_handle(run->group, &run->gpu[(round + 2) % KINDS].c);
    load(run, kind, used);
    load(run, 0, lasting);
    device_step_issue(&run->gpu[0], STEP_PREPARE | STEP_DISPATCH);
    device_step_issue(&run->gpu[kind], device_step_all(&run->gpu[kind].c));
    device_step_issue(&run->gpu[0], STEP_COMBINE);
    check(run, kind, round);
    check(run, 0, round);
    device_step_poison(&run->gpu[kind]);
    if (round % 4 == 3) device_step_issue(&run->gpu[kind], STEP_DISPATCH_SEND);
    ep_handle_destroy(round % 2 ? used : unused);
    ep_handle_destroy(round % 2 ? unused : used);
    int64_t held = library_bytes(run->group);
    if (round < LIFETIMES / 2 && held > *most) *most = held;
    CHECK(held <= *most, "round %d: %lld bytes instead of %lld", round, (long long)held,
          (long long)*most);
}

static void come_and_go(const EpBootstrap *bootstrap) {
    static _Thread_local Run run;
    open_kinds(&run, bootstrap);
    EpHandle *lasting = open_handle(run.group, &run.gpu[0].c);
    int64_t most = 0;
    for (int round = 0; round < LIFETIMES && !check_failure()[0]; round++)
        replace_handles(&run, lasting, round, &most);
    run_close(&run, LIFETIMES);
}

LatencyTests(gpu_latency, come_and_go, come_and_go(bootstrap));

/* ---- too many entries ------------------------------------------------------------------------ */

static void too_many_entries(const EpBootstrap *bootstrap) {
    Case c = kind_case(bootstrap->size, 0);
    EpHandle *handle = NULL;
    c.max_tokens = 40000;
    EpGroup *group = open_group(bootstrap, &c);
    EpHandleConfig config = case_handle_config(&c);
    CHECK_REFUSED(ep_handle_create(group, &config, &handle), EP_ERR_UNSUPPORTED, "ep_handle_create",
                  "config", "at most", "in latency mode", "got 40000 * 3");
    CHECK(handle == NULL, "a handle was made");
    CHECK_OK(ep_group_status(group, NULL));
    ep_group_destroy(group);
}

LatencyTest(gpu_latency, too_many_entries, 2, too_many_entries(bootstrap));
