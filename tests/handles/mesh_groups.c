/* SPDX-License-Identifier: Apache-2.0 */
/* Bootstraps of the groups of a mesh, over worlds with messages and without them. */
#include "tests/cases/meshes.h"
#include "tests/cases/run.h"
#include "tests/harness/bootstraps.h"
#include "tests/harness/ranked.h"

enum { RANKS = 8, DEADLINE = 60 };

static const char MESH[] = "data=2,fsdp=2,expert=2";

static EpBootstrap open_along(const EpBootstrap *world, const char *text) {
    EpMesh mesh = mesh_of(MESH);
    EpAxes axes = {0, {0}};
    EpBootstrap made = EP_BOOTSTRAP_INIT;
    CHECK_OK(ep_mesh_axes(&mesh, text, &axes));
    CHECK_OK(ep_bootstrap_mesh(world, &mesh, &axes, &made));
    return made;
}

/* Gather the world's ranks over the group, and compare them with the mesh's. */
static void check_gathers(const EpBootstrap *world, const EpBootstrap *group, const char *text) {
    EpMesh mesh = mesh_of(MESH);
    EpAxes axes;
    int32_t size, place, expected[RANKS], got[RANKS];
    CHECK_OK(ep_mesh_axes(&mesh, text, &axes));
    CHECK_OK(ep_mesh_group(&mesh, &axes, world->rank, &size, &place, expected));
    CHECK(group->size == size && group->rank == place, "%d of %d", group->rank, group->size);
    for (int round = 0; round < 20; round++) {
        CHECK_OK(group->allgather(group->context, &world->rank, got, sizeof(got[0]), DEADLINE));
        CHECK(memcmp(got, expected, (size_t)size * sizeof(got[0])) == 0, "%s: others", text);
        CHECK_OK(group->barrier(group->context, DEADLINE));
    }
}

static const char *const tuples[] = {"expert", "(fsdp,expert)",     "(expert,data)", "data",
                                     "_",      "(data,fsdp,expert)"};
enum { TUPLES = sizeof(tuples) / sizeof(tuples[0]) };

static void check_all(const EpBootstrap *world) {
    EpBootstrap groups[TUPLES];
    for (int i = 0; i < TUPLES; i++)
        groups[i] = open_along(world, tuples[i]);
    for (int i = 0; i < TUPLES; i++)
        check_gathers(world, &groups[i], tuples[i]);
    for (int i = 0; i < TUPLES; i++)
        ep_bootstrap_destroy(&groups[i]);
}

RankTest(handles_mesh_groups, gather, RANKS, check_all(bootstrap));

ThreadTest(handles_mesh_groups, gather_without_messages, RANKS) {
    EpBootstrap plain = without_messages(bootstrap);
    check_all(&plain);
}

/* With messages, the groups of a mesh need not call together. */
ThreadTest(handles_mesh_groups, one_group_alone, RANKS) {
    EpBootstrap group = open_along(bootstrap, "(fsdp,expert)");
    if (bootstrap->rank < 4) check_gathers(bootstrap, &group, "(fsdp,expert)");
    CHECK_OK(bootstrap->barrier(bootstrap->context, DEADLINE));
    ep_bootstrap_destroy(&group);
}

/* ---- EP groups over them ------------------------------------------------------------------- */

/* Whole steps, in groups along different axes that live at the same time. */
static void check_steps(const EpBootstrap *world) {
    EpBootstrap expert = open_along(world, "expert"), both = open_along(world, "(fsdp,expert)");
    Case c = {.ranks = expert.size, .weighted = 1, .seed = 5 + (uint64_t)world->rank / 2};
    Case d = {.ranks = both.size, .weighted = 1, .seed = 50 + (uint64_t)world->rank / 4};
    Step of_c = open_step(&expert, &c), of_d = open_step(&both, &d);
    for (int i = 0; i < 3; i++) {
        step_all(&of_c);
        step_all(&of_d);
    }
    close_step(&of_d);
    close_step(&of_c);
    ep_bootstrap_destroy(&expert);
    ep_bootstrap_destroy(&both);
}

RankTest(handles_mesh_groups, steps, RANKS, check_steps(bootstrap));

ThreadTest(handles_mesh_groups, steps_without_messages, RANKS) {
    EpBootstrap plain = without_messages(bootstrap);
    check_steps(&plain);
}

RankedTest(mpi_mesh_groups, gathers_and_steps, RANKS, 60) {
    check_all(bootstrap);
    check_steps(bootstrap);
}

/* A line of the log begins with the rank of the mesh, whatever group it is about. */
ThreadTest(handles_mesh_groups, ranks_in_the_log, RANKS) {
    static char path[32], text[1 << 16];
    char line[64];
    if (bootstrap->rank == 0) {
        snprintf(path, sizeof(path), "%s", temporary_file());
        setenv("LIBEP_LOG", "info", 1);
        setenv("LIBEP_LOG_FILE", path, 1);
    }
    CHECK_OK(bootstrap->barrier(bootstrap->context, DEADLINE));
    EpBootstrap expert = open_along(bootstrap, "expert");
    Case c = case_complete((Case){.ranks = 2});
    EpGroup *group = open_group(&expert, &c);
    ep_group_destroy(group);
    ep_bootstrap_destroy(&expert);
    CHECK_OK(bootstrap->barrier(bootstrap->context, DEADLINE));
    if (bootstrap->rank == 0) read_file(path, text, sizeof(text)), unlink(path);
    CHECK_OK(bootstrap->barrier(bootstrap->context, DEADLINE));
    snprintf(line, sizeof(line), "libep: info: rank %d: backend: ", bootstrap->rank);
    CHECK(strstr(text, line), "no '%s' in: %s", line, text);
    CHECK_OK(bootstrap->barrier(bootstrap->context, DEADLINE));
}

/* ---- absent ranks -------------------------------------------------------------------------- */

/* A group whose rank does not come gives up, by name; the next gathering of all is right again. */
ThreadTest(handles_mesh_groups, absent_rank, RANKS) {
    EpBootstrap group = open_along(bootstrap, "(data,expert)");
    int32_t got[4], mine = bootstrap->rank;
    int late = bootstrap->rank == 5;
    CHECK_OK(bootstrap->barrier(bootstrap->context, DEADLINE));
    if (bootstrap->rank == 0 || bootstrap->rank == 1 || bootstrap->rank == 4)
        CHECK_TIMEOUT(group.allgather(group.context, &mine, got, sizeof(mine), 1.0), 1.0,
                      "bootstrap: rank 3, which is rank 5 of the mesh",
                      "did not arrive within 1 s");
    else if (!late)
        CHECK_OK(group.allgather(group.context, &mine, got, sizeof(mine), DEADLINE));
    CHECK_OK(bootstrap->barrier(bootstrap->context, DEADLINE));
    if (late) CHECK_OK(group.allgather(group.context, &mine, got, sizeof(mine), DEADLINE));
    CHECK_OK(bootstrap->barrier(bootstrap->context, DEADLINE));
    check_gathers(bootstrap, &group, "(data,expert)");
    ep_bootstrap_destroy(&group);
}

ThreadTest(handles_mesh_groups, different_calls, RANKS) {
    EpBootstrap group = open_along(bootstrap, "expert");
    int64_t mine = 1, got[2];
    EpStatus status = bootstrap->rank % 2 ? group.barrier(group.context, DEADLINE)
                                          : group.allgather(group.context, &mine, got, 1, DEADLINE);
    CHECK(status == EP_ERR_ORDER, "status %d: %s", (int)status, ep_last_error());
    CHECK_OK(bootstrap->barrier(bootstrap->context, DEADLINE));
    ep_bootstrap_destroy(&group);
}

/* ---- ranks that disagree ------------------------------------------------------------------- */

/* The last rank describes another mesh, or other axes. */
static void check_disagreement(const EpBootstrap *world, const char *theirs, const char *axes_text,
                               EpStatus expected, const char *what, const char *how) {
    int other = world->rank == world->size - 1;
    EpMesh mesh = mesh_of(other ? theirs : MESH);
    EpAxes axes;
    EpBootstrap out = EP_BOOTSTRAP_INIT, before = out;
    CHECK_OK(ep_mesh_axes(&mesh, other ? axes_text : "expert", &axes));
    CHECK_REFUSED(ep_bootstrap_mesh(world, &mesh, &axes, &out), expected, "ep_bootstrap_mesh", what,
                  how);
    CHECK(memcmp(&out, &before, sizeof(out)) == 0, "a refused call has changed the output");
}

ThreadTest(handles_mesh_groups, ranks_disagree, RANKS) {
    check_disagreement(bootstrap, "data=2,fsdp=4,expert=1", "expert", EP_ERR_MISMATCH, "mesh.axes",
                       "one axis 1 on all ranks, got fsdp=2 on rank 0 and fsdp=4 on rank 7");
    check_disagreement(bootstrap, "data=2,zero:fsdp=2,expert=2", "expert", EP_ERR_MISMATCH,
                       "mesh.axes", "fsdp=2 on rank 0 and zero=2 on rank 7");
    check_disagreement(bootstrap, "data=2,fsdp:data=2,expert=2", "expert", EP_ERR_MISMATCH,
                       "mesh.axes", "rank 7, of another role");
    check_disagreement(bootstrap, "data=2,expert=4", "expert", EP_ERR_MISMATCH, "mesh.num_axes",
                       "got 3 on rank 0 and 2 on rank 7");
    check_disagreement(bootstrap, MESH, "(fsdp,expert)", EP_ERR_MISMATCH, "axes", "on rank 7");
    check_gathers(bootstrap, bootstrap, "(data,fsdp,expert)");
}

ThreadTest(handles_mesh_groups, grids_disagree, 2) {
    int32_t grids[2][2] = {{0, 1}, {1, 0}};
    EpMesh mesh = mesh_of("expert=2");
    EpAxes axes = {1, {0}};
    EpBootstrap out = EP_BOOTSTRAP_INIT;
    mesh.grid = grids[bootstrap->rank];
    CHECK_REFUSED(ep_bootstrap_mesh(bootstrap, &mesh, &axes, &out), EP_ERR_MISMATCH, "mesh.grid");
    mesh.grid = grids[1];
    CHECK_OK(ep_bootstrap_mesh(bootstrap, &mesh, &axes, &out));
    CHECK(out.rank == 1 - bootstrap->rank, "rank %d", out.rank);
    CHECK_OK(out.barrier(out.context, DEADLINE));
    ep_bootstrap_destroy(&out);
}

/* One rank's own fault is told to all. */
ThreadTest(handles_mesh_groups, refuses, 2) {
    EpMesh mesh = mesh_of("expert=2"), large = mesh_of("expert=4");
    EpAxes axes = {1, {0}}, unknown = {1, {3}};
    EpBootstrap out = EP_BOOTSTRAP_INIT;
    int first = bootstrap->rank == 0;
    EpStatus status = ep_bootstrap_mesh(bootstrap, first ? &large : &mesh, &axes, &out);
    CHECK_REFUSED(status, first ? EP_ERR_RANGE : EP_ERR_PEER,
                  "mesh: expected a mesh of the 2 ranks of world, got 4");
    status = ep_bootstrap_mesh(bootstrap, &mesh, first ? &unknown : &axes, &out);
    CHECK_REFUSED(status, first ? EP_ERR_RANGE : EP_ERR_PEER, "axes: expected axes of the mesh");
    status = ep_bootstrap_mesh(bootstrap, &mesh, first ? NULL : &axes, &out);
    CHECK_REFUSED(status, first ? EP_ERR_NULL : EP_ERR_PEER, "axes");
    status = ep_bootstrap_mesh(bootstrap, &mesh, &axes, first ? NULL : &out);
    CHECK_REFUSED(status, first ? EP_ERR_NULL : EP_ERR_PEER, "out");
    CHECK(out.size == 0, "a refused call has changed the output");
    CHECK_REFUSED(ep_bootstrap_mesh(NULL, &mesh, &axes, &out), EP_ERR_NULL, "bootstrap");
}
