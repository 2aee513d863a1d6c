/* SPDX-License-Identifier: Apache-2.0 */
/* Processes, here threads, take places of a group that exists, leave it and come back. Every byte
 * is the oracle's, for which an empty place is a masked rank. tests/bootstrap/killed.c kills some.
 */
#include <pthread.h>

#include "tests/cases/calls.h"
#include "tests/cases/run.h"
#include "tests/harness/bootstraps.h"
#include "tests/harness/random.h"
#if TESTS_ON_GPU
#include <cuda_runtime_api.h>
#endif

TestSuite(handles_joining, .init = be_quiet);

enum { MOST_EVENTS = 8, MOST_PLACES = 8 };
#define HERE "1mnkaz"
#define NEW "nkaz"

/** A case, and what happens to its places: a letter for each. The first event creates the group. */
typedef struct Story {
    Case c;
    int events;
    char event[MOST_EVENTS][MOST_PLACES + 1]; /* '1' goes on, 'n' joins, 'm' admits, but stays
                                                 masked, 'x' is left out, '0': nobody is there;
                                                 'k' joins, and its old process says nothing:
                                                 the others miss it in an operation,
                                                 'a' likewise, and its old process has aborted
                                                 the group. All others were masked before,
                                                 'z' joins, and its old process, which was masked,
                                                 aborts the group after that */
    EpBootstrap bootstrap[MOST_EVENTS][MOST_PLACES];
} Story;

static Story story;

static int count_ranks(const char *event, const char *kinds) {
    int count = 0;
    for (const char *at = event; *at; at++)
        count += strchr(kinds, *at) != NULL;
    return count;
}

/* Returns the bootstrap of an event for a place: ranks are those that are there. */
static const EpBootstrap *bootstrap_of(int event, int place) {
    int rank = 0;
    for (int p = 0; p < place; p++)
        rank += strchr(HERE, story.event[event][p]) != NULL;
    return &story.bootstrap[event][rank];
}

static EpGroupConfig config_of(const Case *c, int place) {
    EpGroupConfig config = case_group_config(c);
    config.max_ranks = c->ranks, config.place = place;
#if TESTS_ON_GPU
    CHECK(!cudaGetDevice(&config.device), "cudaGetDevice failed");
#endif
    return config;
}

/* Mask all ranks but these kinds. */
static void mask_to(EpGroup *group, const char *event, const char *kinds) {
    uint32_t word = 0, now = 0;
    EpStatus status = EP_ERR_TIMEOUT;
    for (int p = 0; event[p]; p++)
        word |= (uint32_t)(strchr(kinds, event[p]) != NULL) << p;
    for (int i = 0; i < 20 && status == EP_ERR_TIMEOUT; i++)
        status = ep_group_mask(group, &word, NULL);
    REQUIRE_OK(status);
    REQUIRE_OK(ep_group_alive(group, &now));
    CHECK(now == word, "%#x instead of %#x", now, word);
}

static void step_with(EpGroup *group, const Case *given, const char *event, int place) {
    Case c = *given;
    for (int p = 0; event[p]; p++)
        c.masked[p] = strchr("1" NEW, event[p]) ? '0' : '1';
    World *world = world_new(&c);
    Step step = {group, open_handle(group, &world->c), world, place, NULL};
    check_note("event %s, case: %s", event, case_describe(&world->c));
    step_all(&step);
    step_all(&step);
    ep_handle_destroy(step.handle);
    world_free(world);
}

/* A newcomer is masked at first, and knows who is not. */
static void check_newcomer(EpGroup *group, const char *event) {
    uint32_t word = 0;
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    CHECK_OK(ep_group_alive(group, &word));
    for (int p = 0; event[p]; p++)
        CHECK((word >> p & 1) == (event[p] == '1'), "%#x", word);
    CHECK_OK(ep_group_query(group, &info));
    CHECK(info.size == (int32_t)strlen(event) && strchr(NEW, event[info.rank]), "rank %d",
          info.rank);
    CHECK_REFUSED(ep_group_status(group, NULL), EP_ERR_TIMEOUT, "this rank is masked");
}

/* Where late ranks are cut, the others go on without those that have aborted the group. */
static void check_cut(EpGroup *group, const char *event) {
    uint32_t word = 0;
    CHECK_OK(ep_group_alive(group, &word));
    for (int p = 0; event[p]; p++)
        CHECK(event[p] != 'a' || !(word >> p & 1), "%#x", word);
}

/* A rank that was left out, or misses one, finds out, and why. */
static void find_nobody(EpGroup *group, const char *event, int place) {
    World *world = world_new(&story.c);
    Step step = {group, open_handle(group, &world->c), world, place, NULL};
    EpStatus status = EP_OK;
    for (int i = 0; i < 4 && status == EP_OK; i++)
        status = call_op(&step, i ? STEP_DISPATCH : STEP_PREPARE);
    if (status == EP_OK && story.c.late_us >= 0) {
        check_cut(group, event);
    } else {
        CHECK(status == EP_ERR_TIMEOUT, "%d: %s", (int)status, ep_last_error());
        /* On other nodes the end of a connection may be faster than the sentence. */
        if (count_ranks(event, "a") && !count_ranks(event, "x") && !story.c.nodes[0])
            CHECK(strstr(ep_last_error(), "enough"), "%s", ep_last_error());
    }
    ep_handle_destroy(step.handle);
    world_free(world);
}

static void abort_group(EpGroup **group, const char *sentence) {
    CHECK_OK(ep_group_abort(*group, sentence));
    CHECK_REFUSED(ep_group_status(*group, NULL), EP_ERR_ABORTED, sentence);
    ep_group_destroy(*group);
    *group = NULL;
}

static void take_part(int n, int place, EpGroup **old, EpGroup **group) {
    const char *event = story.event[n];
    EpGroupConfig config = config_of(&story.c, place);
    int joins = count_ranks(event, NEW) > 0, is_new = strchr(NEW, event[place]) != NULL;
    if (is_new)
        REQUIRE_OK(ep_group_join(bootstrap_of(n, place), &config, group));
    else if (joins)
        REQUIRE_OK(ep_group_admit(*group, bootstrap_of(n, place)));
    if (is_new) check_newcomer(*group, event);
    if (event[place] == 'z') abort_group(old, "too late");
    if (event[place] != 'm' && joins) mask_to(*group, event, "1" NEW);
}

static void live(const EpBootstrap *all, __attribute__((unused)) void *arg) {
    EpGroup *group = NULL, *old[MOST_EVENTS] = {NULL};
    int place = all->rank;
    EpGroupConfig config = config_of(&story.c, place);
    for (int n = 0; n < story.events; n++) {
        char kind = story.event[n][place];
        const char *event = story.event[n];
        if (strchr("kz", kind)) old[n] = group, group = NULL;
        if (strchr("0n", kind)) ep_group_destroy(group), group = NULL;
        REQUIRE_OK(all->barrier(all->context, 60));
        if (strchr("1a", kind) && count_ranks(event, "a")) mask_to(group, event, "1a");
        REQUIRE_OK(all->barrier(all->context, 60));
        if (kind == '1' && count_ranks(event, "ka")) find_nobody(group, event, place);
        if (kind == 'a') abort_group(&group, "enough");
        REQUIRE_OK(all->barrier(all->context, 60));
        if (n > 0 && kind == '1') mask_to(group, event, "1"); /* without those that have gone */
        REQUIRE_OK(all->barrier(all->context, 60));
        if (n > 0 && strchr(HERE, kind)) take_part(n, place, &old[n], &group);
        if (kind == 'x') find_nobody(group, event, place);
        if (n == 0 && kind != '0') {
            REQUIRE_OK(ep_group_create(bootstrap_of(n, place), &config, &group));
            if (story.c.map != MAP_FIRST) CHECK_OK(place_experts(group, &story.c));
        }
        if (strchr("1" NEW, kind)) step_with(group, &story.c, event, place);
        REQUIRE_OK(all->barrier(all->context, 60));
    }
    ep_group_destroy(group);
    for (int n = 0; n < story.events; n++)
        ep_group_destroy(old[n]);
}

/* Run "case: event event ...". */
static void run_story(const char *text) {
    const char *events = strchr(text, ':') + 1;
    char words[256];
    snprintf(words, sizeof(words), "%.*s", (int)(events - text - 1), text);
    memset(&story, 0, sizeof(story));
    story.c = case_complete(case_of("masks=1 %s", words));
    if (TESTS_ON_GPU) story.c.nodes[0] = 0; /* all are on one */
    if (GPU_RANKS(story.c.ranks) < story.c.ranks) return;
    for (int taken; sscanf(events, "%8s%n", story.event[story.events], &taken) == 1;
         events += taken) {
        EpBootstrap *out = story.bootstrap[story.events];
        out[0] = (EpBootstrap)EP_BOOTSTRAP_INIT;
        CHECK_OK(ep_bootstrap_local(count_ranks(story.event[story.events++], HERE), out));
    }
    run_body_of(live, &story.c);
    for (int n = 0; n < story.events; n++)
        for (int r = 0; r < count_ranks(story.event[n], HERE); r++)
            ep_bootstrap_destroy(&story.bootstrap[n][r]);
}

#define StoryTest(name, ...)                       \
    Test(handles_joining, name, .timeout = 300) {  \
        const char *const texts[] = {__VA_ARGS__}; \
        for (size_t i = 0; i < LENGTH(texts); i++) \
            run_story(texts[i]);                   \
    }                                              \
    struct handles_joining_##name##_done

#define COPIES "experts=6 map=random physical=15 spread=full "
StoryTest(grow_and_shrink, "ranks=4 top_k=4 weighted=1 " COPIES ": 1100 11n0 111n 1111 0110",
          "ranks=4 nodes=0011 top_k=4 mode=latency weighted=1 " COPIES ": 1100 11nn 1100",
          "ranks=4 nodes=0101 by_entry=1 mode=latency phases=1 " COPIES ": 0110 n11n 1001 1nn1",
          "ranks=8 nodes=00112233 choice=spread top_k=3 " COPIES ": 00011000 00n11n00 nn1111nn");
StoryTest(replace, "ranks=3 top_k=4 spread=full counters=1 : 111 1n1 11n n11 nn1",
          "ranks=3 nodes=001 layout=flat spread=full mode=latency phases=1 : 111 1n1 11n n11",
          "ranks=4 nodes=0011 late_us=30000000 mode=latency layout=batched : 1111 11nn nn11 n11n",
          "ranks=3 nodes=012 layout=rank-major max_tokens=300 hidden=72 : 111 n11 1nn",
          "ranks=5 nodes=00112 node_rows=4 capacity=300 spread=full : 11111 n1n11 1n1nn");
/* The others learn from the deadline that a rank is gone. */
StoryTest(silent_ones, "ranks=3 top_k=4 timeout=2 spread=full weighted=1 : 111 1kk",
          "ranks=4 timeout=2 mode=latency layout=flat spread=full " COPIES ": 1111 1k1n k101");
/* Ranks that have aborted the group are replaced: the others learn of the abort at once. */
StoryTest(aborted_ones, "ranks=3 top_k=4 weighted=1 spread=full : 111 1a1 aa1 n1a",
          "ranks=3 layout=flat mode=latency phases=1 spread=full : 111 1a1 a11 1aa",
          "ranks=3 late_us=30000000 mode=latency spread=full top_k=4 : 111 1a1 1aa",
          "ranks=4 nodes=0011 top_k=4 spread=full " COPIES ": 1111 1a1n a11a 1aaa",
          "ranks=4 nodes=0101 mode=latency layout=flat spread=full : 1111 a111 1aa1");
/* A process was replaced while it was stopped: when it goes on, its abort means nobody. */
StoryTest(stopped_ones, "ranks=3 top_k=4 spread=full weighted=1 : 111 1z1 zz1 1zz",
          "ranks=3 mode=latency phases=1 layout=flat spread=full : 111 1z1 z1a",
          "ranks=3 late_us=30000000 mode=latency spread=full : 111 1zz zz1",
          "ranks=4 nodes=0011 mode=latency layout=flat " COPIES ": 1111 1z1z z11z 1zn1");
/* Ranks that were left out, and do not know it, come back as newcomers. */
StoryTest(left_out, "ranks=4 spread=full top_k=4 : 1111 1x1n 1n11 1n1x 111n",
          "ranks=4 nodes=0011 spread=full mode=latency layout=flat : 1111 n11x 1x1n");
/* Ranks that were masked come back after others have joined. */
StoryTest(masked_ones, "ranks=4 top_k=4 spread=full weighted=1 : 1111 1mn1 1111 mm1n 1101",
          "ranks=4 nodes=0011 mode=latency layout=flat " COPIES ": 1101 1mn1 1111 n1m1 1111");

/* Those that are there stay, go or are replaced, as long as one stays. */
static void draw_event(Random *random, const char *before, char *event, int ranks) {
    int stays = 0;
    for (int p = 0; p < ranks; p++) {
        int draw = (int)random_below(random, 6);
        int is_there = before[p] != '0';
        event[p] = is_there ? "110naz"[draw] : "0000nn"[draw];
        if (event[p] == '1') stays = 1;
    }
    for (int p = 0; p < ranks && !stays; p++)
        if (before[p] != '0') event[p] = '1', stays = 1;
}

SoloTest(handles_joining, random) {
    static const char *const words[] = {"mode=throughput weighted=1", "mode=latency layout=flat",
                                        "mode=latency phases=1", "layout=batched by_entry=1",
                                        "mode=latency layout=batched late_us=30000000"};
    uint64_t seed = environment_number("LIBEP_TEST_SEED", 1);
    uint64_t count = environment_number("LIBEP_TEST_CASES", TESTS_ON_GPU ? 5 : 20);
    for (uint64_t i = 0; i < count && !check_failure()[0]; i++) {
        Random random = random_stream(seed, i, 11);
        int ranks = 2 + (int)random_below(&random, 3), at;
        char text[256], before[MOST_PLACES + 1] = "1111", event[MOST_PLACES + 1] = "";
        at = snprintf(text, sizeof(text), "ranks=%d top_k=3 seed=%d %s " COPIES ": %.*s", ranks,
                      (int)i, words[i % LENGTH(words)], ranks, before);
        for (int n = 1; n < (TESTS_ON_GPU ? 6 : MOST_EVENTS); n++, strcpy(before, event)) {
            draw_event(&random, before, event, ranks);
            at += snprintf(text + at, sizeof(text) - (size_t)at, " %.*s", ranks, event);
        }
        check_note("%s", text);
        run_story(text);
    }
}

/* ---- newcomers that are refused, or die ---- */

#define SOON (TESTS_SANITIZED || TESTS_ON_GPU ? 3.0 : 1.0) /* a deadline that tests wait for */

/** How a newcomer at place 2 of a group of ranks 0 and 1 spoils its call. */
typedef struct Spoiled {
    int32_t experts;    /* it has so many more than the others */
    int32_t place;      /* which it asks for */
    int32_t max_ranks;  /* instead of 3 */
    int32_t version;    /* it adds to its own */
    int creates;        /* it calls ep_group_create */
    int shares;         /* it has the GPU of place 0 */
    int32_t gpu;        /* it has this one instead */
    int is_fenced;      /* it has LIBEP_LINES=fenced, unlike the others */
    int dies_in;        /* number of the gathering in which it dies; 0: it does not */
    int joined;         /* whether it has lived to the end */
    int32_t device;     /* of place 0 */
    EpStatus status[2]; /* of the living, of the newcomer */
    const char *words[2];
    EpBootstrap bootstrap[3], living[2];
} Spoiled;

/* Changes what a newcomer contributes to the first gathering, or dies. */
static EpStatus spoiled_gather(void *test, const Wrapped *wrapped, const void *in, void *out,
                               size_t bytes, double timeout) {
    Spoiled *spoiled = test;
    char own[4096];
    if (spoiled->dies_in && --spoiled->dies_in == 0) return EP_ERR_SYSTEM;
    if (!in || !spoiled->version) return forward_gather(wrapped, in, out, bytes, timeout);
    memcpy(own, in, bytes);
    ((int32_t *)(void *)own)[1] += spoiled->version;
    EpStatus status = forward_gather(wrapped, own, out, bytes, timeout);
    memcpy((char *)out + 2 * bytes, in, bytes);
    for (int r = 0; r < 2; r++)
        ((int32_t *)out)[(size_t)r * bytes / sizeof(int32_t) + 1] -= spoiled->version;
    return status;
}

static EpGroupConfig spoiled_config(const Case *c, int place) {
    EpGroupConfig config = config_of(c, place);
    config.timeout_seconds = SOON;
    return config;
}

/* Admit a newcomer, who is spoiled. The group is then what it was: it makes a step. */
static void admit_spoiled(const EpBootstrap *all, EpGroup *group, const Case *c, Spoiled *spoiled) {
    int place = all->rank;
    uint32_t before = 0, word = 0;
    double begin = seconds_now();
    CHECK_OK(ep_group_alive(group, &before));
    EpStatus status = ep_group_admit(group, &spoiled->bootstrap[place]);
    CHECK(seconds_now() - begin < 2 * SOON + 3, "it took %.1f s", seconds_now() - begin);
    char sentence[512];
    snprintf(sentence, sizeof(sentence), "%s", ep_last_error());
    REQUIRE_OK(all->barrier(all->context, 60));
    if (spoiled->joined) {
        CHECK(status == EP_OK, "%d: %s", (int)status, sentence);
        return;
    }
    (void)ep_set_last_error(status, sentence);
    CHECK_REFUSED(status, spoiled->status[0], spoiled->words[0]);
    CHECK_OK(ep_group_alive(group, &word));
    CHECK(word == before, "%#x instead of %#x", word, before);
    CHECK_OK(ep_group_status(group, NULL));
    word |= 4;
    CHECK_REFUSED(ep_group_mask(group, &word, NULL), EP_ERR_RANGE, "rank 2, whose place is empty");
    step_with(group, c, "110", place);
}

static void join_spoiled(const EpBootstrap *all, const Case *c, Spoiled *spoiled) {
    EpGroup *group = NULL;
    Wrapped wrapped = {.gather = spoiled_gather, .test = spoiled};
    EpBootstrap own = gathers_alone(&spoiled->bootstrap[2]);
    EpGroupConfig config = spoiled_config(c, spoiled->place);
    config.num_experts += spoiled->experts;
    if (spoiled->max_ranks) config.max_ranks = spoiled->max_ranks;
    if (spoiled->shares) config.device = spoiled->device;
    if (spoiled->gpu) config.device = spoiled->gpu;
    if (spoiled->is_fenced) setenv("LIBEP_LINES", "fenced", 1);
    wrap_bootstrap(&own, &wrapped);
    EpStatus status = spoiled->creates ? ep_group_create(&own, &config, &group)
                                       : ep_group_join(&own, &config, &group);
    spoiled->joined = spoiled->dies_in > 0;
    if (!spoiled->joined) CHECK_REFUSED(status, spoiled->status[1], spoiled->words[1]);
    REQUIRE_OK(all->barrier(all->context, 60));
    CHECK((status == EP_OK) == (group != NULL), "status %d, group %p", status, (void *)group);
    ep_group_destroy(group);
}

static void spoil(const EpBootstrap *all, void *arg) {
    Spoiled *spoiled = arg;
    Case c = case_complete(case_of("ranks=3 masks=1 top_k=4 " COPIES));
    EpGroupConfig config = spoiled_config(&c, all->rank);
    EpGroup *group = NULL;
    if (all->rank == 0) spoiled->device = config.device;
    if (all->rank < 2) REQUIRE_OK(ep_group_create(&spoiled->living[all->rank], &config, &group));
    if (all->rank < 2) CHECK_OK(place_experts(group, &c));
    REQUIRE_OK(all->barrier(all->context, 60));
    if (all->rank < 2)
        admit_spoiled(all, group, &c, spoiled);
    else
        join_spoiled(all, &c, spoiled);
    REQUIRE_OK(all->barrier(all->context, 60));
    ep_group_destroy(group);
}

static void run_spoiled(Spoiled *all, int count) {
    for (int i = 0; i < count; i++) {
        all[i].bootstrap[0] = all[i].living[0] = (EpBootstrap)EP_BOOTSTRAP_INIT;
        CHECK_OK(ep_bootstrap_local(3, all[i].bootstrap));
        CHECK_OK(ep_bootstrap_local(2, all[i].living));
    }
    run_side_by_side(count, 3, spoil, all, sizeof(*all));
    for (int i = 0; i < count; i++) {
        for (int r = 0; r < 3; r++)
            ep_bootstrap_destroy(&all[i].bootstrap[r]);
        for (int r = 0; r < 2; r++)
            ep_bootstrap_destroy(&all[i].living[r]);
    }
}

SoloTest(handles_joining, refused_newcomers) {
    Spoiled all[] = {
        {.place = 2,
         .experts = 1,
         .status = {EP_ERR_MISMATCH, EP_ERR_MISMATCH},
         .words = {"config.num_experts: expected one value on all ranks, got 6 on rank 0 and 7 on "
                   "rank 2",
                   "config.num_experts"}},
        {.place = 2,
         .max_ranks = 4,
         .status = {EP_ERR_MISMATCH, EP_ERR_MISMATCH},
         .words = {"config.max_ranks: expected one value on all ranks, got 3 on", "4 on rank 2"}},
        {.place = 2,
         .max_ranks = 1,
         .status = {EP_ERR_PEER, EP_ERR_RANGE},
         .words = {"rank 2 was refused: ", "config.max_ranks: expected 3 .. 1024"}},
        {.place = 2,
         .max_ranks = EP_DEFAULT,
         .status = {EP_ERR_PEER, EP_ERR_RANGE},
         .words = {"rank 2 was refused: ", "config.max_ranks: expected 3 .. 1024, got -1"}},
        {.place = 1,
         .status = {EP_ERR_ORDER, EP_ERR_ORDER},
         .words = {"expected places below 3 that ascend", "got 1 on rank 2"}},
        {.place = 2,
         .version = 1,
         .status = {EP_ERR_MISMATCH, EP_ERR_MISMATCH},
         .words = {"the library's version: expected one value", "on rank 0 and"}},
        {.place = 2,
         .creates = 1,
         .status = {EP_ERR_ORDER, EP_ERR_ORDER},
         .words = {"got rank 0 in ep_group_admit and rank 2 in ep_group_create", "in one call"}},
    };
    run_spoiled(all, LENGTH(all));
}

/* GPUs are those of one node, one for each rank. */
SoloTest(handles_joining, refused_newcomers_on_gpus) {
    if (!TESTS_ON_GPU) check_left_out("ranks of the host backend have no GPUs");
    Spoiled shares = {.place = 2,
                      .shares = 1,
                      .status = {EP_ERR_UNSUPPORTED, EP_ERR_UNSUPPORTED},
                      .words = {"expected a GPU for each rank, got one for ranks", "got one for"}};
    Spoiled apart = {.place = 2,
                     .status = {EP_ERR_UNSUPPORTED, EP_ERR_UNSUPPORTED},
                     .words = {"needs one node, that is one NVLink domain", "one NVLink domain"}};
    Spoiled fenced = {.place = 2,
                      .is_fenced = 1,
                      .status = {EP_ERR_UNSUPPORTED, EP_ERR_UNSUPPORTED},
                      .words = {"expected NVLink between every two GPUs, as the group has it",
                                "got rank 2 without"}};
    Spoiled lacks = {.place = 2,
                     .gpu = 99,
                     .status = {EP_ERR_PEER, EP_ERR_UNSUPPORTED},
                     .words = {"rank 2 was refused: ", "serve this rank: expected a device of 0"}};
    run_spoiled(&lacks, 1);
    run_spoiled(&shares, 1);
    setenv("LIBEP_LINES", "whole", 1);
    run_spoiled(&fenced, 1);
    unsetenv("LIBEP_LINES");
    setenv("LIBEP_TOPOLOGY", "0,0,1", 1);
    run_spoiled(&apart, 1);
    unsetenv("LIBEP_TOPOLOGY");
}

SoloTest(handles_joining, newcomers_that_die) {
    Spoiled all[TESTS_ON_GPU ? 4 : 12];
    int died = 0;
    for (int i = 0; i < (int)LENGTH(all); i++)
        all[i] = (Spoiled){.place = 2,
                           .dies_in = 1 + i * (TESTS_ON_GPU ? 7 : 1), /* of more gatherings */
                           .status = {EP_ERR_TIMEOUT, EP_ERR_SYSTEM},
                           .words = {"rank 2", "expected EP_OK, got EP_ERR_SYSTEM"}};
    run_spoiled(all, LENGTH(all));
    for (int i = 0; i < (int)LENGTH(all); i++)
        died += !all[i].joined;
    CHECK(died > (TESTS_ON_GPU ? 1 : 5) && died < (int)LENGTH(all), "%d gatherings", died);
}

static void *abort_soon(void *group) {
    usleep(50000);
    (void)ep_group_abort(group, "enough");
    return NULL;
}

/* An abort ends a wait for newcomers. Destroying the group waits for nobody. */
SoloTest(handles_joining, aborted) {
    EpBootstrap one = EP_BOOTSTRAP_INIT, two[2] = {EP_BOOTSTRAP_INIT};
    pthread_t thread;
    double begin = seconds_now();
    CHECK_OK(ep_bootstrap_local(1, &one));
    CHECK_OK(ep_bootstrap_local(2, two));
    Case c = case_complete(case_of("ranks=2 masks=1 " COPIES));
    EpGroupConfig config = config_of(&c, 0);
    EpGroup *group = open_group_with(&one, &config);
    pthread_create(&thread, NULL, abort_soon, group);
    CHECK_REFUSED(ep_group_admit(group, &two[0]), EP_ERR_ABORTED, "enough");
    pthread_join(thread, NULL);
    ep_group_destroy(group);
    CHECK(seconds_now() - begin < 30, "it took %.1f s", seconds_now() - begin);
    ep_bootstrap_destroy(&one), ep_bootstrap_destroy(&two[0]), ep_bootstrap_destroy(&two[1]);
}

/** An admission into a group of ranks 0 and 1, in which rank 1 meets the others so often. Rank 1
 *  aborts the group behind the last time; 0: it does not. */
typedef struct Admitting {
    EpBootstrap living[2], all[3];
    EpGroup *group; /* of rank 1 */
    int meetings, last;
} Admitting;

static EpStatus abort_in_the_end(void *test, const Wrapped *wrapped, const void *in, void *out,
                                 size_t bytes, double timeout) {
    Admitting *admitting = test;
    EpStatus status = forward_gather(wrapped, in, out, bytes, timeout);
    if (++admitting->meetings == admitting->last)
        CHECK_OK(ep_group_abort(admitting->group, "enough"));
    return status;
}

static void admit_and_abort(const EpBootstrap *all, void *arg) {
    Admitting *admitting = arg;
    int place = all->rank;
    uint32_t word = 7;
    Case c = case_complete(case_of("ranks=3 masks=1 " COPIES));
    EpGroupConfig config = config_of(&c, place);
    EpGroup *group = NULL;
    Wrapped wrapped = {.gather = abort_in_the_end, .test = admitting};
    EpBootstrap own = gathers_alone(&admitting->all[place]);
    if (place == 1) wrap_bootstrap(&own, &wrapped);
    if (place < 2) REQUIRE_OK(ep_group_create(&admitting->living[place], &config, &group));
    if (place == 1) admitting->group = group;
    REQUIRE_OK(place < 2 ? ep_group_admit(group, &own) : ep_group_join(&own, &config, &group));
    REQUIRE_OK(all->barrier(all->context, 60)); /* rank 1 has told the others */
    if (!admitting->last) {
        mask_to(group, "111", "1");
    } else if (place == 1) {
        CHECK_REFUSED(ep_group_status(group, NULL), EP_ERR_ABORTED, "enough");
    } else {
        CHECK_REFUSED(ep_group_mask(group, &word, NULL), EP_ERR_TIMEOUT,
                      "rank 1 is in `alive`, but has ended or was aborted");
        mask_to(group, "101", "1");
    }
    REQUIRE_OK(all->barrier(all->context, 60));
    ep_group_destroy(group);
}

/* A living rank aborts the group when all ranks have agreed, and before it has mapped the newcomer:
 * that one learns of it, too. */
SoloTest(handles_joining, aborted_in_the_end) {
    Admitting admitting = {.last = 0};
    for (int i = 0; i < 2; i++, admitting.last = admitting.meetings, admitting.meetings = 0) {
        admitting.living[0] = admitting.all[0] = (EpBootstrap)EP_BOOTSTRAP_INIT;
        CHECK_OK(ep_bootstrap_local(2, admitting.living));
        CHECK_OK(ep_bootstrap_local(3, admitting.all));
        run_side_by_side(1, 3, admit_and_abort, &admitting, sizeof(admitting));
        for (int r = 0; r < 3; r++)
            ep_bootstrap_destroy(&admitting.all[r]);
        for (int r = 0; r < 2; r++)
            ep_bootstrap_destroy(&admitting.living[r]);
    }
    CHECK(admitting.last > 2, "%d meetings", admitting.last);
}

/* A group takes the memory of all its places. */
static void check_memory(EpGroupConfig config) {
    EpGroupMemory places = EP_GROUP_MEMORY_INIT, ranks = EP_GROUP_MEMORY_INIT;
    CHECK_OK(ep_group_memory(&config, 1, &places));
    config.max_ranks = EP_DEFAULT;
    CHECK_OK(ep_group_memory(&config, 3, &ranks));
    CHECK(places.shared_bytes == ranks.shared_bytes && places.handle_bytes == ranks.handle_bytes,
          "%lld and %lld bytes", (long long)places.shared_bytes, (long long)ranks.shared_bytes);
}

/* Calls that are refused by themselves do not take part. */
SoloTest(handles_joining, refused) {
    EpBootstrap one = EP_BOOTSTRAP_INIT, two[2] = {EP_BOOTSTRAP_INIT};
    CHECK_OK(ep_bootstrap_local(1, &one));
    CHECK_OK(ep_bootstrap_local(2, two));
    EpGroup *plain = open_group_of(&one, "masks=1"), *group = NULL, *none = NULL;
    EpGroupConfig config = group_config(1);
    CHECK_REFUSED(ep_group_join(&one, &config, &none), EP_ERR_UNSUPPORTED, "config.max_ranks");
    config.masks = config.max_ranks = 1;
    CHECK_REFUSED(ep_group_join(&one, &config, NULL), EP_ERR_NULL, "out");
    CHECK_REFUSED(ep_group_join(&one, &config, &none), EP_ERR_ORDER, "got newcomers alone");
    REQUIRE_OK(ep_group_create(&one, &config, &group));
    CHECK_REFUSED(ep_group_admit(NULL, &one), EP_ERR_NULL, "group");
    CHECK_REFUSED(ep_group_admit(plain, &one), EP_ERR_UNSUPPORTED, "config.max_ranks");
    CHECK_REFUSED(ep_group_admit(group, NULL), EP_ERR_NULL, "bootstrap");
    CHECK_REFUSED(ep_group_admit(group, &two[0]), EP_ERR_RANGE, "1 places, got 2 ranks");
    CHECK_OK(ep_group_admit(group, &one)); /* nobody */
    CHECK_OK(ep_group_status(group, NULL));
    config.max_ranks = 3;
    check_memory(config);
    CHECK_NO_GROUP(&one, &config, EP_ERR_RANGE, "config.num_physical", "since 2 of 3 places are");
    config.backend = EP_BACKEND_CUDA, config.num_physical = config.num_experts;
    config.max_ranks = 73;
    CHECK_NO_GROUP(&one, &config, EP_ERR_UNSUPPORTED, "on one node, which has at most 72 ranks");
    config.nccl_comm = (void *)&config;
    CHECK_NO_GROUP(&one, &config, EP_ERR_UNSUPPORTED, "maps memory without NCCL");
    CHECK(!none, "a group was made");
    ep_group_destroy(group);
    ep_group_destroy(plain);
    ep_bootstrap_destroy(&one), ep_bootstrap_destroy(&two[0]), ep_bootstrap_destroy(&two[1]);
}
