/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cases/run.h"

#include <stdarg.h>

#include "tests/harness/ranked.h"

EpGroup *open_group_with(const EpBootstrap *bootstrap, const EpGroupConfig *config) {
    EpGroup *group = NULL;
    REQUIRE_OK(ep_group_create(bootstrap, config, &group));
    return group;
}

EpGroup *open_group(const EpBootstrap *bootstrap, const Case *c) {
    EpGroupConfig config = case_group_config(c);
    return open_group_with(bootstrap, &config);
}

EpGroup *open_group_of(const EpBootstrap *bootstrap, const char *text) {
    Case c = case_complete(case_of("ranks=%d %s", bootstrap->size, text));
    return open_group(bootstrap, &c);
}

EpGroupConfig group_config(int ranks) {
    Case c = case_complete((Case){.ranks = ranks});
    return case_group_config(&c);
}

void check_no_group(const EpBootstrap *bootstrap, const EpGroupConfig *config, EpStatus status,
                    const char *const *words, const char *file, int line) {
    EpGroup *group = NULL;
    check_refused(ep_group_create(bootstrap, config, &group), status, words, file, line,
                  "ep_group_create");
    check_that(!group, file, line, "ep_group_create", "a group was made");
}

EpHandle *open_handle_with(EpGroup *group, const EpHandleConfig *config) {
    EpHandle *handle = NULL;
    REQUIRE_OK(ep_handle_create(group, config, &handle));
    return handle;
}

EpHandle *open_handle(EpGroup *group, const Case *c) {
    EpHandleConfig config = case_handle_config(c);
    return open_handle_with(group, &config);
}

Step open_step(const EpBootstrap *bootstrap, const Case *c) {
    if (c->mode == EP_MODE_LATENCY) needs_latency();
    Step step = {.world = world_new(c), .rank = bootstrap->rank};
    step.group = open_group(bootstrap, &step.world->c);
    step.handle = open_handle(step.group, &step.world->c);
    return step;
}

Step open_step_of(const EpBootstrap *bootstrap, const char *text) {
    Case c = case_of("ranks=%d %s", bootstrap->size, text);
    return open_step(bootstrap, &c);
}

void close_step(Step *step) {
    ep_group_destroy(step->group);
    world_free(step->world);
}

void open_plan(EpGroup *group, const Case *c, EpTensor *plan) {
    EpHandleConfig config = case_handle_config(c);
    size_t bytes = 0;
    CHECK_OK(ep_handle_memory(group, &config, &bytes));
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    REQUIRE(memory, "no memory for %zu bytes", bytes);
    *plan = ep_tensor_1d(memset(memory, 0xee, bytes), EP_TYPE_UINT8, (int64_t)bytes);
}

/* Pretend the nodes of the case, unless the test has a topology of its own. Returns whether it did.
 */
static int pretend_nodes(const Case *c) {
    char list[2 * sizeof(c->nodes)];
    int has_own = getenv("LIBEP_TOPOLOGY") && !getenv("LIBEP_TEST_NODES");
    if ((!c->nodes[0] && !c->even_nodes) || has_own) return 0;
    snprintf(list, sizeof(list), "%d", c->even_nodes);
    for (int r = 0; r < c->ranks && !c->even_nodes; r++)
        list[2 * r] = c->nodes[r], list[2 * r + 1] = r + 1 < c->ranks ? ',' : 0;
    setenv("LIBEP_TOPOLOGY", list, 1);
    return 1;
}

static void restore_nodes(void) {
    const char *all = getenv("LIBEP_TEST_NODES");
    if (all)
        setenv("LIBEP_TOPOLOGY", all, 1);
    else
        unsetenv("LIBEP_TOPOLOGY");
}

/* Check that the group has the nodes that the oracle assumes. */
static void check_nodes(const EpGroup *group, const Case *c, int rank) {
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    int nodes = 0, node = 0;
    for (int r = 0; r < c->ranks; r++) {
        if (case_node(c, r) != r) continue;
        if (r == case_node(c, rank)) node = nodes;
        nodes++;
    }
    CHECK_OK(ep_group_query(group, &info));
    CHECK(info.num_nodes == nodes && info.node == node, "node %d of %d, not %d of %d", info.node,
          info.num_nodes, node, nodes);
}

EpStatus place_experts(EpGroup *group, const Case *c) {
    int32_t *map = calloc((size_t)c->physical, sizeof(*map));
    for (int p = 0; p < c->physical; p++)
        map[p] = world_map(c, p);
    EpTensor tensor = ep_tensor_1d(map, EP_TYPE_INT32, c->physical);
    EpStatus status = ep_group_place(group, &tensor, NULL);
    free(map);
    return status;
}

static void run_on_handle(EpGroup *group, EpHandle *handle, int rank, const World *world) {
    EpTensor plan = {.data = NULL};
    Step step = {group, handle, world, rank, NULL};
    if (world->c.named) open_plan(group, &world->c, &plan), step.plan = &plan;
    if (world->c.map != MAP_FIRST) CHECK_OK(place_experts(group, &world->c));
    step_all(&step);
    free(plan.data);
    ep_handle_destroy(handle);
}

void run_world(const EpBootstrap *bootstrap, const World *world) {
    EpGroup *group = open_group(bootstrap, &world->c);
    check_nodes(group, &world->c, bootstrap->rank);
    run_on_handle(group, open_handle(group, &world->c), bootstrap->rank, world);
    ep_group_destroy(group);
}

void run_case(const EpBootstrap *bootstrap, const Case *c) {
    World *world = world_new(c);
    check_note("case: %s", case_describe(&world->c));
    run_world(bootstrap, world);
    world_free(world);
}

/* ---- on threads ---- */

/* Complete cases that run one after the other in one group. */
typedef struct CaseList {
    Case *cases;
    int count;
    World *world; /* of the case that runs; ranks that are threads share it */
} CaseList;

/* Returns the configuration of a group that serves all cases. It has the first one's defaults. */
static EpGroupConfig shared_config(const CaseList *list) {
    EpGroupConfig config = case_group_config(&list->cases[0]);
    for (int i = 1; i < list->count; i++) {
        EpGroupConfig other = case_group_config(&list->cases[i]);
        if (other.max_row_bytes > config.max_row_bytes) config.max_row_bytes = other.max_row_bytes;
        if (other.max_scale_bytes > config.max_scale_bytes)
            config.max_scale_bytes = other.max_scale_bytes;
        if (list->cases[i].mode == EP_MODE_LATENCY) config.latency_sets = other.latency_sets;
    }
    return config;
}

static void cases_body(const EpBootstrap *bootstrap, void *arg) {
    CaseList *list = arg;
    EpGroupConfig config = shared_config(list);
    int makes = bootstrap->rank == 0 || ranked_is();
    check_note("case: %s", case_describe(&list->cases[0]));
    EpGroup *group = open_group_with(bootstrap, &config);
    check_nodes(group, &list->cases[0], bootstrap->rank);
    for (int i = 0; i < list->count; i++) {
        const Case *c = &list->cases[i];
        if (makes) list->world = world_new(c);
        REQUIRE_OK(bootstrap->barrier(bootstrap->context, 60));
        check_note("case: %s", case_describe(c));
        run_on_handle(group, open_handle(group, c), bootstrap->rank, list->world);
        REQUIRE_OK(bootstrap->barrier(bootstrap->context, 60));
        if (makes) world_free(list->world);
    }
    ep_group_destroy(group);
}

/* Between nodes of GPUs there is latency mode where all have as many ranks. */
static int case_has_latency(const Case *given) {
    Case c = case_complete(*given);
    int on[sizeof(c.nodes)] = {0}, nodes = 0;
    for (int r = 0; r < c.ranks; r++)
        nodes += on[case_node(&c, r)]++ == 0;
    for (int r = 0; r < c.ranks && TESTS_ON_GPU && nodes > 1; r++)
        if (on[case_node(&c, r)] * nodes != c.ranks) return 0;
    return TESTS_HAVE_LATENCY;
}

static void add_mode(CaseList *list, Case c, EpMode mode, int phases) {
    c.mode = mode, c.phases = phases;
    list->cases[list->count++] = case_complete(c);
}

/* Add a case in its mode, or in those that its layout has where it names none. */
static void add_case(CaseList *list, Case c) {
    static int turn;
    if (c.mode != EP_MODE_LATENCY) add_mode(list, c, EP_MODE_THROUGHPUT, 0);
    if (c.mode == EP_MODE_THROUGHPUT || !case_has_latency(&c)) return;
    if (TESTS_ON_GPU) {
        /* GPU time is scarce: run whole calls and separate phases alternately. */
        add_mode(list, c, EP_MODE_LATENCY, c.phases || turn++ % 2);
        return;
    }
    if (!c.phases) add_mode(list, c, EP_MODE_LATENCY, 0);
    add_mode(list, c, EP_MODE_LATENCY, 1);
}

void run_cases_on_threads(const Case *cases, int count) {
    CaseList list = {.cases = malloc(3 * (size_t)count * sizeof(*cases))};
    for (int i = 0; i < count; i++)
        add_case(&list, cases[i]);
    int pretends = list.count && pretend_nodes(&list.cases[0]);
    if (list.count) run_ranks(list.cases[0].ranks, cases_body, &list);
    if (pretends) restore_nodes();
    free(list.cases);
}

void run_case_on_threads(const Case *c) {
    run_cases_on_threads(c, 1);
}

/* Whether cases can share a group. */
static int share_group(const Case *first, const Case *next) {
    Case a = case_complete(*first), b = case_complete(*next);
    return a.ranks == b.ranks && !strcmp(a.nodes, b.nodes) && a.experts == b.experts &&
           a.top_k == b.top_k && a.max_tokens == b.max_tokens && a.merged == b.merged &&
           a.spare_tokens == b.spare_tokens && a.by_entry == b.by_entry &&
           a.physical == b.physical && a.choice == b.choice && (!a.physical || b.map != MAP_FIRST);
}

void run_grid(const char *format, ...) {
    static Case cases[256];
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    int count = cases_of(cases, LENGTH(cases), text), end;
    for (int begin = 0; begin < count; begin = end) {
        for (end = begin + 1; end < count && share_group(&cases[begin], &cases[end]);)
            end++;
        run_cases_on_threads(&cases[begin], end - begin);
    }
}

void run_texts(void (*run)(Case c), const char *more, const char *const *texts) {
    for (int i = 0; texts[i]; i++) {
        if (run)
            run(case_of("seed=%d %s %s", i, more, texts[i]));
        else
            run_grid("seed=%d %s %s", 100 * i, more, texts[i]);
    }
}

static void dispatch_body(const EpBootstrap *bootstrap, void *arg) {
    Step step = open_step(bootstrap, arg);
    step_prepare(&step);
    step_dispatch(&step);
    close_step(&step);
}

void run_dispatch(Case c) {
    GPU_NEEDS(c.ranks);
    run_ranks(c.ranks, dispatch_body, &c);
}
