/* SPDX-License-Identifier: Apache-2.0 */
/* Handle memory that the caller owns, moves, saves, restores or overwrites by mistake. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/cases/fixture.h"

static const Case plain = {.ranks = 3, .experts = 7, .top_k = 3, .weighted = 1, .alignment = 4};

/* A handle in memory that the test owns. */
typedef struct Owned {
    EpGroup *group;
    EpHandle *handle;
    World *world;
    Step step;
    void *memory;
    size_t bytes;
} Owned;

static void *new_memory(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    memset(memory, 0xee, bytes);
    return memory;
}

static void owned_handle(Owned *o) {
    EpHandleConfig config = case_handle_config(&o->world->c);
    REQUIRE_OK(ep_handle_memory(o->group, &config, &o->bytes));
    o->memory = new_memory(o->bytes);
    REQUIRE_OK(ep_handle_create(o->group, &config, o->memory, o->bytes, &o->handle));
}

static Owned owned_open(const EpBootstrap *bootstrap, const Case *c) {
    Owned o = {.world = world_new(c)};
    o.group = open_group(bootstrap, &o.world->c);
    if (o.group) owned_handle(&o);
    o.step = (Step){o.group, o.handle, o.world, bootstrap->rank};
    return o;
}

static void owned_close(Owned *o) {
    ep_group_destroy(o->group);
    free(o->memory);
    world_free(o->world);
}

/* Move the handle's memory to a new address and overwrite the old one. */
static void move(Owned *o) {
    void *target = new_memory(o->bytes);
    memcpy(target, o->memory, o->bytes);
    CHECK_OK(ep_handle_bind(o->handle, target, o->bytes));
    memset(o->memory, 0xdd, o->bytes);
    free(o->memory);
    o->memory = target;
}

ThreadTest(handles_memory, moved_between_all_calls, 3) {
    for (int layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_BATCHED; layout++) {
        Case c = plain;
        c.layout = (EpLayout)layout;
        Owned o = owned_open(bootstrap, &c);
        REQUIRE(o.handle, "no handle");
        move(&o);
        step_prepare(&o.step);
        move(&o);
        step_dispatch(&o.step);
        move(&o);
        step_combine(&o.step);
        move(&o);
        step_combine_backward(&o.step);
        move(&o);
        step_dispatch_backward(&o.step);
        owned_close(&o);
    }
}

/* One rank moves its handle's memory, the others do not. */
ThreadTest(handles_memory, moved_on_one_rank, 3) {
    Owned o = owned_open(bootstrap, &plain);
    REQUIRE(o.handle, "no handle");
    step_prepare(&o.step);
    if (bootstrap->rank == 1) move(&o);
    step_move(&o.step);
    owned_close(&o);
}

/* ep_handle_info gives valid arrays after a move. */
ThreadTest(handles_memory, info_follows_the_move, 3) {
    Owned o = owned_open(bootstrap, &plain);
    REQUIRE(o.handle, "no handle");
    step_prepare(&o.step);
    move(&o);
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    CHECK_OK(ep_handle_info(o.handle, &info));
    const RankWorld *me = &o.world->rank[bootstrap->rank];
    for (int e = 0; e <= me->num_experts; e++)
        CHECK(info.expert_offsets[e] == me->offset[e], "expert %d: %d", e, info.expert_offsets[e]);
    owned_close(&o);
}

/* A saved plan can be restored after the handle has served another step. */
ThreadTest(handles_memory, saved_and_restored, 3) {
    Owned o = owned_open(bootstrap, &plain);
    REQUIRE(o.handle, "no handle");
    Case c = plain;
    c.seed = 77;
    World *other = world_new(&c);
    Step second = {o.group, o.handle, other, bootstrap->rank};
    void *saved = new_memory(o.bytes);

    step_prepare(&o.step);
    step_dispatch(&o.step);
    memcpy(saved, o.memory, o.bytes);
    step_all(&second);
    memcpy(o.memory, saved, o.bytes);
    CHECK_OK(ep_handle_bind(o.handle, o.memory, o.bytes));
    step_move(&o.step);
    step_all(&second);

    free(saved);
    world_free(other);
    owned_close(&o);
}

/* 64 bytes of alignment are enough, as the header says, and no byte past the end is touched. */
ThreadTest(handles_memory, exactly_the_bytes_asked_for, 2) {
    Case c = plain;
    c.ranks = 2;
    Owned o = owned_open(bootstrap, &c);
    REQUIRE(o.handle, "no handle");
    unsigned char *target = new_memory(o.bytes + 64 + 256);
    /* 64 but not 128 bytes of alignment */
    unsigned char *inside = target + ((uintptr_t)target % 128 ? 0 : 64);
    memcpy(inside, o.memory, o.bytes);
    CHECK_OK(ep_handle_bind(o.handle, inside, o.bytes));
    step_all(&o.step);
    for (int i = 0; i < 192; i++)
        CHECK(inside[o.bytes + (size_t)i] == 0xee, "byte %d past the end was written", i);
    owned_close(&o);
    free(target);
}

ThreadTest(handles_memory, too_small, 1) {
    Owned o = owned_open(bootstrap, &(Case){.ranks = 1});
    REQUIRE(o.handle, "no handle");
    char needed[32];
    snprintf(needed, sizeof(needed), "%zu", o.bytes);
    EpHandleConfig config = case_handle_config(&o.world->c);
    EpHandle *none = NULL;
    void *memory = new_memory(o.bytes);
    CHECK_REFUSED(ep_handle_create(o.group, &config, memory, o.bytes - 1, &none),
                  EP_ERR_BUFFER_SIZE, "bytes", needed);
    CHECK(none == NULL, "a handle was made");
    memcpy(memory, o.memory, o.bytes);
    CHECK_REFUSED(ep_handle_bind(o.handle, memory, o.bytes - 1), EP_ERR_BUFFER_SIZE, needed);
    CHECK_REFUSED(ep_handle_bind(o.handle, NULL, o.bytes), EP_ERR_NULL, "memory");
    CHECK_REFUSED(ep_handle_bind(o.handle, (char *)memory + 16, o.bytes), EP_ERR_ADDRESS, "64");
    step_all(&o.step);
    free(memory);
    owned_close(&o);
}

ThreadTest(handles_memory, misaligned, 1) {
    World *world = world_new(&(Case){.ranks = 1});
    EpGroup *group = open_group(bootstrap, &world->c);
    REQUIRE(group, "no group");
    size_t bytes = 0;
    CHECK_OK(ep_handle_memory(group, NULL, &bytes));
    char *memory = new_memory(bytes + 64);
    EpHandle *none = NULL;
    CHECK_REFUSED(ep_handle_create(group, NULL, memory + 32, bytes, &none), EP_ERR_ADDRESS, "64");
    CHECK(none == NULL, "a handle was made");
    ep_group_destroy(group);
    free(memory);
    world_free(world);
}

/* Bytes of another handle of the same group, of another group, and of no handle are refused. The
 * old memory stays in use each time. */
ThreadTest(handles_memory, bytes_of_others_are_refused, 2) {
    Case c = plain;
    c.ranks = 2;
    Owned mine = owned_open(bootstrap, &c), foreign = owned_open(bootstrap, &c);
    REQUIRE(mine.handle && foreign.handle, "no handle");
    Owned sibling = {.group = mine.group, .world = mine.world};
    owned_handle(&sibling);
    step_prepare(&mine.step);
    step_prepare(&foreign.step);

    void *target = new_memory(mine.bytes);
    memcpy(target, foreign.memory, mine.bytes);
    CHECK_REFUSED(ep_handle_bind(mine.handle, target, mine.bytes), EP_ERR_FOREIGN, "group");
    memcpy(target, sibling.memory, mine.bytes);
    CHECK_REFUSED(ep_handle_bind(mine.handle, target, mine.bytes), EP_ERR_FOREIGN, "handle");
    memset(target, 0, mine.bytes);
    CHECK_STATUS(ep_handle_bind(mine.handle, target, mine.bytes), EP_ERR_HANDLE_MEMORY);
    step_move(&mine.step);
    step_move(&foreign.step);

    ep_handle_destroy(sibling.handle);
    free(sibling.memory);
    free(target);
    owned_close(&foreign);
    owned_close(&mine);
}

/* ---- memory that was overwritten ---- */

typedef enum Damage { CLEARED, OTHER_BEGINNING, OTHER_END, SIBLING, DAMAGES } Damage;

static const EpStatus damage_status[] = {EP_ERR_HANDLE_MEMORY, EP_ERR_HANDLE_MEMORY,
                                         EP_ERR_HANDLE_MEMORY, EP_ERR_FOREIGN};

static void overwrite(const Owned *o, const Owned *sibling, Damage damage) {
    if (damage == CLEARED) memset(o->memory, 0, o->bytes);
    if (damage == OTHER_BEGINNING) memset(o->memory, 0xff, 64);
    if (damage == OTHER_END) memset((char *)o->memory + o->bytes / 2, 0, o->bytes - o->bytes / 2);
    if (damage == SIBLING) memcpy(o->memory, sibling->memory, o->bytes);
}

/* Returns the status of a call. On GPUs kernels check the memory, so ep_group_status has it. */
static EpStatus outcome(Fixture *fixture, Op op) {
    EpStatus status = fixture_call(fixture, op);
    return TESTS_ON_GPU && status == EP_OK ? ep_group_status(fixture->group, NULL) : status;
}

/* On the host the call is refused, and the memory can be restored. On GPUs the group has failed,
 * since other ranks have entered the operation. */
static void check_overwritten(Fixture *fixture, const Owned *o, const Owned *sibling, Op op,
                              Damage damage) {
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    void *saved = new_memory(o->bytes);
    memcpy(saved, o->memory, o->bytes);
    overwrite(o, sibling, damage);
    fixture_reset(fixture);
    CHECK_REFUSED(outcome(fixture, op), damage_status[damage], "rank 0", "handle memory");
    for (int i = OP_PREPARE; i <= OP_COMBINE_BACKWARD; i++)
        CHECK_STATUS(fixture_call(fixture, (Op)i), damage_status[damage]);
    CHECK_STATUS(ep_handle_info(o->handle, &info), damage_status[damage]);
    fixture_check_untouched(fixture);
    CHECK_STATUS(ep_handle_bind(o->handle, o->memory, o->bytes), damage_status[damage]);
    memcpy(o->memory, saved, o->bytes);
    CHECK_OK(ep_handle_bind(o->handle, o->memory, o->bytes));
    if (!TESTS_ON_GPU) step_move(&o->step);
    free(saved);
}

static void overwritten_before(Op op, Damage damage) {
    Fixture fixture;
    Case c = fixture_case(EP_LAYOUT_EXPERT_MAJOR);
    check_note("operation %d, damage %d", (int)op, (int)damage);
    fixture_open(&fixture, &c);
    REQUIRE(fixture.handle, "no handle");
    Owned o = {.group = fixture.group, .world = fixture.world}, sibling = o;
    owned_handle(&o);
    owned_handle(&sibling);
    fixture.handle = sibling.handle;
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    fixture.handle = o.handle, fixture.step.handle = o.handle, o.step = fixture.step;
    CHECK_OK(fixture_call(&fixture, OP_PREPARE));
    check_overwritten(&fixture, &o, &sibling, op, damage);
    fixture_close(&fixture);
    free(o.memory);
    free(sibling.memory);
}

/* Every call that reads the plan detects the damage on that rank before anything moves. One kind of
 * damage is another handle's bytes. */
SoloTest(handles_memory, overwritten) {
    setenv("LIBEP_LOG_FILE", "/dev/null", 1); /* groups that fail on GPUs log a warning */
    for (int op = OP_PREPARE; op <= OP_COMBINE_BACKWARD; op++)
        for (int damage = 0; damage < DAMAGES; damage++)
            overwritten_before((Op)op, (Damage)damage);
}

/* Destroying a handle does not touch its memory, which may be in other use. */
ThreadTest(handles_memory, in_other_use_when_destroyed, 1) {
    Owned o = owned_open(bootstrap, &(Case){.ranks = 1, .spread = SPREAD_FULL});
    REQUIRE(o.handle, "no handle");
    step_all(&o.step);
    memset(o.memory, 0x5a, o.bytes);
    ep_handle_destroy(o.handle);
    for (size_t i = 0; i < o.bytes; i++)
        if (!CHECK(((unsigned char *)o.memory)[i] == 0x5a, "byte %zu was written", i)) break;
    owned_close(&o);
}

/* ---- use at the wrong time ---- */

static void check_all_refused(const Step *step, EpStatus status) {
    EpTensor rows = step_expert_out(step), tokens = step_grad_out(step);
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    CHECK_STATUS(ep_dispatch(step->handle, &tokens, NULL, NULL, NULL, &rows, NULL, NULL, NULL),
                 status);
    CHECK_STATUS(ep_combine(step->handle, &rows, NULL, NULL, &tokens), status);
    CHECK_STATUS(ep_combine_backward(step->handle, &tokens, NULL, NULL, NULL, &rows, NULL), status);
    CHECK_STATUS(ep_dispatch_backward(step->handle, &rows, NULL, NULL, &tokens, NULL), status);
    CHECK_STATUS(ep_handle_info(step->handle, &info), status);
}

ThreadTest(handles_memory, use_before_prepare, 2) {
    Case c = plain;
    c.ranks = 2;
    c.spread = SPREAD_FULL;
    Owned o = owned_open(bootstrap, &c);
    REQUIRE(o.handle, "no handle");
    check_all_refused(&o.step, EP_ERR_NOT_PREPARED);
    CHECK(strstr(ep_last_error(), "prepared"), "%s", ep_last_error());
    step_all(&o.step);
    owned_close(&o);
}

ThreadTest(handles_memory, use_after_destroy, 2) {
    Case c = plain;
    c.ranks = 2;
    c.spread = SPREAD_FULL;
    Owned o = owned_open(bootstrap, &c);
    REQUIRE(o.handle, "no handle");
    step_all(&o.step);
    ep_handle_destroy(o.handle);
    check_all_refused(&o.step, EP_ERR_DESTROYED);
    CHECK_STATUS(ep_handle_bind(o.handle, o.memory, o.bytes), EP_ERR_DESTROYED);
    /* The caller's memory is no longer accepted as a plan. */
    EpHandle *next = open_handle(o.group, &o.world->c);
    if (next) CHECK_REFUSED(ep_handle_bind(next, o.memory, o.bytes), EP_ERR_DESTROYED, "destroyed");
    owned_close(&o);
}

ThreadTest(handles_memory, use_after_the_group_is_destroyed, 2) {
    Case c = plain;
    c.ranks = 2;
    c.spread = SPREAD_FULL;
    Owned o = owned_open(bootstrap, &c);
    REQUIRE(o.handle, "no handle");
    step_all(&o.step);
    ep_group_destroy(o.group);
    check_all_refused(&o.step, EP_ERR_DESTROYED);
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    EpHandle *none = NULL;
    CHECK_STATUS(ep_group_query(o.group, &info), EP_ERR_DESTROYED);
    CHECK_STATUS(ep_group_status(o.group, NULL), EP_ERR_DESTROYED);
    CHECK_STATUS(ep_handle_create(o.group, NULL, NULL, 0, &none), EP_ERR_DESTROYED);
    o.group = NULL;
    owned_close(&o);
}

/* Destroying twice does not crash; NULL is allowed. */
ThreadTest(handles_memory, destroyed_twice, 1) {
    Owned o = owned_open(bootstrap, &(Case){.ranks = 1});
    REQUIRE(o.handle, "no handle");
    ep_handle_destroy(o.handle);
    ep_handle_destroy(o.handle);
    ep_handle_destroy(NULL);
    EpGroup *group = o.group;
    owned_close(&o);
    ep_group_destroy(group);
    ep_group_destroy(NULL);
    ep_bootstrap_destroy(NULL);
    CHECK_STATUS(ep_group_status(group, NULL), EP_ERR_DESTROYED);
}
