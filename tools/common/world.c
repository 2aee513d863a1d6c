/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/world.h"

#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep/ep_mpi.h"
#include "tools/common/util.h"

/* 5 s longer than the library's timeout, so that the library fails first: its message says more.
 * Set before threads start. */
static double deadline = 105;

static void read_deadline(const EpSetting *setting, void *context) {
    (void)context;
    double seconds = strcmp(setting->name, "LIBEP_TIMEOUT") == 0 ? strtod(setting->value, NULL) : 0;
    if (seconds > 0) deadline = seconds + 5;
}

double world_deadline(void) {
    return deadline;
}

/* ---- collectives --------------------------------------------------------------------------- */

/* After a rank is lost, the others still meet, so that a rank which failed for a reason of its own
 * can say it. They come within seconds, since the library's waits for the lost rank end together.
 */
static double wait_seconds(void) {
    const double grace = 5;
    return bench_peer_lost() && deadline > grace ? grace : deadline;
}

/* If a rank was lost before, the message already names it. */
static bool check_collective(World *world, EpStatus status, const char *call) {
    if (status == EP_OK) return true;
    if (!bench_peer_lost()) bench_ok(status, call);
    world->broken = true;
    return false;
}

bool world_allgather(World *world, const void *in, void *out, size_t bytes) {
    if (world->broken) return false;
    return check_collective(
        world, world->boot.allgather(world->boot.context, in, out, bytes, wait_seconds()),
        "gathering from all ranks");
}

bool world_barrier(World *world) {
    if (world->broken) return false;
    return check_collective(world, world->boot.barrier(world->boot.context, wait_seconds()),
                            "waiting for all ranks");
}

/* Allgathers deliver the bytes of the first `ranks` ranks. They need `size` times the memory, so
 * the data goes in pieces. */
static bool gather_pieces(World *world, const void *in, void *out, size_t bytes, int ranks) {
    const size_t piece = 65536;
    char *all = bench_alloc((size_t)world->size, piece, "pieces of all ranks");
    bool ok = world_all(world, all != NULL);
    for (size_t at = 0; ok && at < bytes; at += piece) {
        const size_t part = bytes - at < piece ? bytes - at : piece;
        ok = world_allgather(world, (const char *)in + at, all, part);
        for (size_t r = 0; ok && r < (size_t)ranks; r++)
            memcpy((char *)out + r * bytes + at, all + r * part, part);
    }
    free(all);
    return ok;
}

bool world_broadcast(World *world, void *data, size_t bytes) {
    return gather_pieces(world, data, data, bytes, 1);
}

bool world_gather(World *world, const void *in, void *out, size_t bytes) {
    return gather_pieces(world, in, out, bytes, world->rank == 0 ? world->size : 0);
}

typedef struct RankStatus {
    int ok, exit_status;
    char message[BENCH_MESSAGE_BYTES];
} RankStatus;

bool world_all(World *world, bool ok) {
    RankStatus mine = {.ok = ok, .exit_status = bench_error_exit_status()};
    snprintf(mine.message, sizeof(mine.message), "%s", bench_error_message());
    RankStatus *all = calloc((size_t)world->size, sizeof(RankStatus));
    if (!all) {
        world->broken = true;
        return bench_fail("no memory for the statuses of %d ranks", world->size);
    }
    bool agreed = world_allgather(world, &mine, all, sizeof(mine));
    if (!agreed && !ok) bench_error_set(mine.exit_status, mine.message);
    for (int r = 0; agreed && r < world->size; r++) {
        if (!all[r].ok) {
            bench_error_set(all[r].exit_status, all[r].message);
            agreed = false;
        }
    }
    free(all);
    return agreed;
}

static int64_t pick_max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static int64_t pick_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t pick_sum(int64_t a, int64_t b) {
    return a + b;
}

static bool reduce(World *world, int64_t *values, size_t count, int64_t (*pick)(int64_t, int64_t)) {
    int64_t *all = calloc(count * (size_t)world->size + 1, sizeof(int64_t));
    if (!all) abort(); /* a few bytes; the peers are already in the allgather */
    bool ok = world_allgather(world, values, all, count * sizeof(int64_t));
    for (size_t i = 0; ok && i < count; i++) {
        values[i] = all[i];
        for (int r = 1; r < world->size; r++)
            values[i] = pick(values[i], all[(size_t)r * count + i]);
    }
    free(all);
    return ok;
}

bool world_max(World *world, int64_t *values, size_t count) {
    return reduce(world, values, count, pick_max);
}

bool world_min(World *world, int64_t *values, size_t count) {
    return reduce(world, values, count, pick_min);
}

bool world_sum(World *world, int64_t *values, size_t count) {
    return reduce(world, values, count, pick_sum);
}

bool world_max_double(World *world, double *values, size_t count) {
    double *all = calloc(count * (size_t)world->size + 1, sizeof(double));
    if (!all) abort(); /* a few bytes; the peers are already in the allgather */
    bool ok = world_allgather(world, values, all, count * sizeof(double));
    for (size_t i = 0; ok && i < count * (size_t)world->size; i++) {
        if (all[i] > values[i % count]) values[i % count] = all[i];
    }
    free(all);
    return ok;
}

/* ---- ranks as threads ---------------------------------------------------------------------- */

typedef struct Thread {
    World world;
    WorldBody body;
    void *argument;
    pthread_t thread;
    int exit_status;
} Thread;

static void *thread_main(void *argument) {
    Thread *me = argument;
    me->exit_status = me->body(&me->world, me->argument);
    return NULL;
}

/* If a thread cannot start, the process exits: the other ranks would wait for it. */
static void threads_start(Thread *threads, int count) {
    for (int r = 0; r < count; r++) {
        if (pthread_create(&threads[r].thread, NULL, thread_main, &threads[r]) != 0) {
            fprintf(stderr, "%s: --threads: thread %d of %d could not start\n", bench_program, r,
                    count);
            exit(BENCH_EXIT_WRONG);
        }
    }
}

static int threads_join(Thread *threads, int count) {
    int worst = BENCH_EXIT_OK;
    for (int r = 0; r < count; r++) {
        pthread_join(threads[r].thread, NULL);
        if (threads[r].exit_status > worst) worst = threads[r].exit_status;
    }
    for (int r = 0; r < count; r++)
        ep_bootstrap_destroy(&threads[r].world.boot);
    return worst;
}

static int run_threads(int count, WorldBody body, void *argument) {
    Thread *threads = calloc((size_t)count, sizeof(Thread));
    EpBootstrap *boots = calloc((size_t)count, sizeof(EpBootstrap));
    int status = BENCH_EXIT_WRONG;
    if (boots) boots[0] = (EpBootstrap)EP_BOOTSTRAP_INIT;
    if (!threads || !boots || ep_bootstrap_local(count, boots) != EP_OK) {
        fprintf(stderr, "%s: --threads %d: %s\n", bench_program, count, ep_last_error());
        goto done;
    }
    for (int r = 0; r < count; r++) {
        threads[r].world = (World){.rank = r, .size = count, .threads = true, .boot = boots[r]};
        threads[r].body = body;
        threads[r].argument = argument;
    }
    threads_start(threads, count);
    status = threads_join(threads, count);
done:
    free(boots);
    free(threads);
    return status;
}

/* ---- ranks as MPI processes ---------------------------------------------------------------- */

bool world_launched(void) {
    return getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_SIZE") || getenv("PMIX_RANK");
}

static int run_mpi(WorldBody body, void *argument) {
    int provided;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    World world = {.rank = 0, .boot = EP_BOOTSTRAP_INIT};
    MPI_Comm_rank(MPI_COMM_WORLD, &world.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world.size);
    if (ep_bootstrap_mpi(MPI_COMM_WORLD, &world.boot) != EP_OK) {
        fprintf(stderr, "%s: rank %d: %s\n", bench_program, world.rank, ep_last_error());
        MPI_Abort(MPI_COMM_WORLD, BENCH_EXIT_WRONG);
    }
    int status = body(&world, argument);
    if (!world.broken && !world_barrier(&world))
        fprintf(stderr, "%s: %s\n", bench_program, bench_error_message());
    if (world.broken) /* a peer is lost: MPI_Finalize would wait for it without a timeout */
        MPI_Abort(MPI_COMM_WORLD, BENCH_EXIT_WRONG);
    ep_bootstrap_destroy(&world.boot);
    MPI_Finalize();
    return status;
}

int world_run(int threads, WorldBody body, void *argument) {
    (void)ep_settings(read_deadline, NULL); /* creating the first group refuses a bad setting */
    return threads > 0 ? run_threads(threads, body, argument) : run_mpi(body, argument);
}
