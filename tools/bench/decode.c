/* SPDX-License-Identifier: Apache-2.0 */

/**
 * --case decode, --mask, --kill-at: steps of decoding in a group with masks. Ranks are processes,
 * so that one can be killed. The others cut it in the step in which it dies, since it is late.
 * MASK_AFTER steps later they meet, and mask it. Another process may take its place: the tool
 * starts it at once, and the others admit it before a given step.
 *
 * An expert gives its rows back, and those of odd numbers have weight 2. All numbers are small, so
 * sums are exact. So each rank knows every element: it depends on which experts' ranks are alive.
 */

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tools/bench/decode_device.h"
#include "tools/bench/lines.h"
#include "tools/common/data.h"
#include "tools/common/report.h"
#include "tools/common/util.h"

enum { ROOM = 4096, POLL_US = 100, SECONDS = 100, MASK_WORDS = EP_MAX_RANKS / 32 };

/* ---- memory that the processes share ------------------------------------------------------- */

/** What a rank gives to a bootstrap: contributions of two collectives, since no rank is more than
 *  one ahead. */
typedef struct Given {
    int entered; /* collectives */
    char bytes[2][ROOM];
} Given;

enum { CREATING, JOINING, NUM_MEETINGS };

/** A rank's part. */
typedef struct Seat {
    Given given[NUM_MEETINGS];
    int steps; /* that it has begun, or 1 + the number of the first */
    int is_done;
    int exit_status;
    char message[BENCH_MESSAGE_BYTES];
    int64_t wrong;   /* elements */
    double mask_us;  /* of the call after the death */
    double pause_us; /* from ep_group_admit of the last one until ep_group_mask has returned */
    double join_us;  /* from ep_group_join to the first step */
    double *us;      /* [steps] of dispatch and combine */
} Seat;

typedef struct Decode {
    const Options *options;
    Seat *seats; /* [ranks], in shared memory, followed by all times */
    size_t bytes;
    int ranks, steps; /* warm-up included */
    int kill_step;    /* likewise, from 0; -1: nobody is killed */
    int join_step;    /* likewise: before it the killed rank is replaced; -1: it is not */
} Decode;

static bool open_board(Decode *d) {
    size_t times = (size_t)d->ranks * (size_t)d->steps * sizeof(double);
    d->bytes = (size_t)d->ranks * sizeof(Seat) + times;
    d->seats = mmap(NULL, d->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (d->seats == MAP_FAILED)
        return bench_fail("expected %zu bytes that processes share, got none", d->bytes);
    for (int r = 0; r < d->ranks; r++)
        d->seats[r].us = (double *)(void *)(d->seats + d->ranks) + (size_t)r * (size_t)d->steps;
    return true;
}

/* ---- one rank ------------------------------------------------------------------------------ */

/** The context of a bootstrap. */
typedef struct Meeting {
    const Decode *d;
    int which, place, collectives;
    int places[EP_MAX_RANKS], count; /* who takes part */
} Meeting;

/** The tensors of a step. */
typedef struct Memory {
    int32_t *idx;
    float *weights;
    char *tokens, *received, *sums;
} Memory;

typedef struct Rank {
    const Decode *d;
    int rank;
    Meeting meeting[NUM_MEETINGS];
    EpGroup *group;
    EpHandle *handle;
    uint32_t alive[MASK_WORDS]; /* as this rank sees it */
    Pool pool;
    DecodeDevice *device; /* NULL: the host backend */
    Memory host, used;    /* `used`: on the device, if there is one */
    char *row;
    float *numbers;
    int64_t row_bytes, slab_rows, local;
} Rank;

static EpStatus gather(void *context, const void *in, void *out, size_t bytes, double timeout) {
    Meeting *m = context;
    int now = ++m->collectives;
    double end = time_now_us() + 1e6 * timeout;
    if (bytes > ROOM) return ep_set_last_error(EP_ERR_BOOTSTRAP, "too many bytes");
    Given *mine = &m->d->seats[m->place].given[m->which];
    memcpy(mine->bytes[now % 2], in, bytes);
    __atomic_store_n(&mine->entered, now, __ATOMIC_RELEASE);
    for (int i = 0; i < m->count; i++) {
        const Given *given = &m->d->seats[m->places[i]].given[m->which];
        while (__atomic_load_n(&given->entered, __ATOMIC_ACQUIRE) < now) {
            EpStatus status = ep_poll_abort();
            if (status != EP_OK) return status;
            if (time_now_us() > end)
                return ep_set_last_error(EP_ERR_TIMEOUT, "a rank did not come");
            usleep(POLL_US);
        }
        memcpy((char *)out + (size_t)i * bytes, given->bytes[now % 2], bytes);
    }
    return EP_OK;
}

static EpStatus barrier(void *context, double timeout) {
    char mine = 0, all[EP_MAX_RANKS];
    return gather(context, &mine, all, 1, timeout);
}

/* Returns the bootstrap of the ranks in `words`, ascending; NULL: of all. */
static EpBootstrap meet(Rank *self, int which, const uint32_t *words) {
    EpBootstrap boot = EP_BOOTSTRAP_INIT;
    Meeting *m = &self->meeting[which];
    *m = (Meeting){.d = self->d, .which = which, .place = self->rank};
    for (int r = 0; r < self->d->ranks; r++) {
        if (words && !(words[r / 32] >> r % 32 & 1)) continue;
        if (r == self->rank) boot.rank = m->count;
        m->places[m->count++] = r;
    }
    boot.size = m->count, boot.context = m;
    boot.allgather = gather, boot.barrier = barrier;
    return boot;
}

static bool has(const uint32_t *words, int rank) {
    return words[rank / 32] >> rank % 32 & 1;
}

static EpGroupConfig group_config(const Rank *self) {
    const Options *o = self->d->options;
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.num_experts = (int32_t)o->experts, config.max_top_k = (int32_t)o->top_k;
    config.max_tokens = (int32_t)(o->tokens_end > 0 ? o->tokens_end : 1);
    config.max_row_bytes = self->row_bytes;
    config.backend = self->device ? EP_BACKEND_CUDA : EP_BACKEND_HOST,
    config.mode = EP_MODE_LATENCY;
    config.masks = 1, config.on_late = EP_LATE_MASK, config.late_us = (int32_t)o->late_us;
    if (self->d->join_step >= 0) config.max_ranks = self->d->ranks, config.place = self->rank;
    return config;
}

static bool create_handle(Rank *self) {
    EpHandleConfig layer = EP_HANDLE_CONFIG_INIT;
    layer.layout = EP_LAYOUT_BATCHED, layer.rows_per_expert = self->slab_rows;
    layer.top_k = (int32_t)self->d->options->top_k;
    return bench_ok(ep_handle_create(self->group, &layer, &self->handle), "ep_handle_create");
}

static bool create_group(Rank *self) {
    EpBootstrap boot = meet(self, CREATING, NULL);
    EpGroupConfig config = group_config(self);
    return bench_ok(ep_group_create(&boot, &config, &self->group), "ep_group_create") &&
           create_handle(self);
}

/* Elements of a step's tensors, at least 1. */
typedef struct Sizes {
    size_t entries, rows, slots;
} Sizes;

static Sizes sizes_of(const Rank *self) {
    const Options *o = self->d->options;
    size_t rows = (size_t)o->tokens_end;
    return (Sizes){rows * (size_t)o->top_k + 1, rows + 1,
                   (size_t)(self->local * self->slab_rows) + 1};
}

static bool allocate_device(Rank *self) {
    Sizes n = sizes_of(self);
    size_t row = (size_t)self->row_bytes;
    Memory *m = &self->used;
    m->idx = decode_device_alloc(self->device, n.entries * sizeof(*m->idx));
    m->weights = decode_device_alloc(self->device, n.entries * sizeof(*m->weights));
    m->tokens = decode_device_alloc(self->device, n.rows * row);
    m->received = decode_device_alloc(self->device, n.slots * row);
    m->sums = decode_device_alloc(self->device, n.rows * row);
    return m->idx && m->weights && m->tokens && m->received && m->sums;
}

static bool allocate(Rank *self) {
    const Options *o = self->d->options;
    int32_t first, local;
    if (!bench_ok(ep_expert_range((int32_t)o->experts, self->d->ranks, self->rank, &first, &local),
                  "ep_expert_range"))
        return false;
    size_t row = (size_t)self->row_bytes;
    self->local = local;
    Sizes n = sizes_of(self);
    Memory *m = &self->host;
    m->idx = pool_alloc(&self->pool, n.entries, sizeof(*m->idx), "indices");
    m->weights = pool_alloc(&self->pool, n.entries, sizeof(*m->weights), "weights");
    m->tokens = pool_alloc(&self->pool, n.rows, row, "tokens");
    m->sums = pool_alloc(&self->pool, n.rows, row, "sums");
    if (!self->device) m->received = pool_alloc(&self->pool, n.slots, row, "receive rows");
    self->row = pool_alloc(&self->pool, 1, row, "row");
    self->numbers = pool_alloc(&self->pool, (size_t)o->hidden, sizeof(float), "row");
    self->used = self->host;
    return !self->pool.failed && (!self->device || allocate_device(self));
}

/* ---- a step -------------------------------------------------------------------------------- */

static float factor_of(int64_t expert) {
    return expert % 2 ? 2.0f : 1.0f;
}

static float number_of(int64_t token) {
    return token % 2 ? 2.0f : 1.0f;
}

static void fill_row(Rank *self, float value, char *row) {
    const Options *o = self->d->options;
    for (int64_t i = 0; i < o->hidden; i++)
        self->numbers[i] = value;
    data_from_float((EpType)o->type, self->numbers, row, o->hidden);
}

/* A token's experts differ. */
static void route(Rank *self, int step) {
    const Options *o = self->d->options;
    for (int64_t t = 0; t < o->tokens_end; t++) {
        uint64_t hash = hash_add(hash_add(hash_word((uint64_t)o->run.seed), self->rank), step);
        uint64_t begin = hash_add(hash, t) % (uint64_t)o->experts;
        for (int64_t k = 0; k < o->top_k; k++) {
            int64_t i = t * o->top_k + k;
            self->host.idx[i] =
                (int32_t)((begin + (uint64_t)(k * (o->experts / o->top_k))) % (uint64_t)o->experts);
            self->host.weights[i] = factor_of(self->host.idx[i]);
        }
    }
}

/* Enqueue dispatch and combine. */
static bool issue(void *context) {
    const Rank *self = context;
    const Options *o = self->d->options;
    const Memory *m = &self->used;
    EpStream stream = decode_device_stream(self->device);
    EpType type = (EpType)o->type;
    EpPrepare prepare = EP_PREPARE_INIT;
    EpTensor idx = ep_tensor_2d(m->idx, EP_TYPE_INT32, o->tokens_end, o->top_k);
    EpTensor weights = ep_tensor_2d(m->weights, EP_TYPE_FP32, o->tokens_end, o->top_k);
    EpTensor tokens = ep_tensor_2d(m->tokens, type, o->tokens_end, o->hidden);
    EpTensor rows = ep_tensor_3d(m->received, type, self->local, self->slab_rows, o->hidden);
    EpTensor sums = ep_tensor_2d(m->sums, type, o->tokens_end, o->hidden);
    prepare.topk_idx = &idx;
    return bench_ok(ep_dispatch(self->handle, NULL, &prepare, &tokens, NULL, NULL, stream, &rows,
                                NULL, NULL, NULL),
                    "ep_dispatch") &&
           bench_ok(ep_combine(self->handle, NULL, &rows, NULL, &weights, stream, &sums),
                    "ep_combine");
}

static bool lives(const Decode *d, int rank, int step);

/* Wait until all ranks that live through a step begin it. */
static bool align(Rank *self, int step) {
    const Decode *d = self->d;
    double end = time_now_us() + 1e6 * SECONDS;
    __atomic_store_n(&d->seats[self->rank].steps, step + 1, __ATOMIC_RELEASE);
    for (int r = 0; r < d->ranks; r++) {
        if (has(d->options->mask, r) || !lives(d, r, step)) continue;
        while (__atomic_load_n(&d->seats[r].steps, __ATOMIC_ACQUIRE) <= step) {
            if (time_now_us() > end) return bench_fail("rank %d did not come to step %d", r, step);
            sched_yield();
        }
    }
    return true;
}

static bool run_on_device(Rank *self, int step) {
    Sizes n = sizes_of(self);
    const Memory *m = &self->used, *host = &self->host;
    return decode_device_copy(self->device, m->idx, host->idx, n.entries * sizeof(*m->idx)) &&
           decode_device_copy(self->device, m->weights, host->weights,
                              n.entries * sizeof(*m->weights)) &&
           align(self, step) &&
           decode_device_run(self->device, issue, self, &self->d->seats[self->rank].us[step]) &&
           decode_device_copy(self->device, host->sums, m->sums, n.rows * (size_t)self->row_bytes);
}

static bool run_on_host(Rank *self, int step) {
    if (!align(self, step)) return false;
    double begin = time_now_us();
    bool ok = issue(self);
    self->d->seats[self->rank].us[step] = time_now_us() - begin;
    return ok;
}

/* Returns the rank that owns an expert. */
static int owner_of(const Rank *self, int64_t expert) {
    int64_t base = self->d->options->experts / self->d->ranks;
    int64_t larger = self->d->options->experts % self->d->ranks;
    if (expert < larger * (base + 1)) return (int)(expert / (base + 1));
    return (int)(larger + (expert - larger * (base + 1)) / base);
}

static void check_sums(Rank *self) {
    const Options *o = self->d->options;
    size_t unit = ep_type_bytes((EpType)o->type), bytes = (size_t)self->row_bytes;
    for (int64_t t = 0; t < o->tokens_end; t++) {
        const char *sum = self->host.sums + (size_t)t * bytes;
        float expected = 0;
        for (int64_t i = t * o->top_k; i < (t + 1) * o->top_k; i++)
            if (has(self->alive, owner_of(self, self->host.idx[i])))
                expected += number_of(t) * self->host.weights[i];
        fill_row(self, expected, self->row);
        for (size_t at = 0; at < bytes; at += unit)
            self->d->seats[self->rank].wrong += memcmp(sum + at, self->row + at, unit) != 0;
    }
}

/* Ask who was cut in this step: what such a rank had to add is missing in the sums, or not. */
static bool look_for_late(Rank *self, bool *found) {
    EpStatus status = ep_group_status(self->group, NULL);
    *found = status == EP_ERR_MASKED;
    if (!*found) return bench_ok(status, "ep_group_status");
    return bench_ok(ep_group_alive(self->group, self->alive), "ep_group_alive");
}

/* All ranks of the set call it before the same step. */
static bool mask(Rank *self, const uint32_t *alive) {
    double begin = time_now_us();
    EpStream stream = decode_device_stream(self->device);
    if (!bench_ok(ep_group_mask(self->group, alive, stream), "ep_group_mask")) return false;
    self->d->seats[self->rank].mask_us = time_now_us() - begin;
    memcpy(self->alive, alive, sizeof(self->alive));
    return true;
}

static bool play_step(Rank *self, int step) {
    bool is_late = false;
    route(self, step);
    bool ok = self->device ? run_on_device(self, step) : run_on_host(self, step);
    if (!ok || !look_for_late(self, &is_late)) return false;
    if (self->d->options->run.check && !is_late) check_sums(self);
    return true;
}

/* ---- a rank's life ------------------------------------------------------------------------- */

static void list_living(const Decode *d, bool killed, uint32_t *alive) {
    memset(alive, 0, MASK_WORDS * sizeof(*alive));
    for (int r = 0; r < d->ranks; r++)
        if (!has(d->options->mask, r) && !(killed && r == d->options->kill_rank))
            alive[r / 32] |= 1u << r % 32;
}

/* The living mask the rank that died, which each of them has cut by now. */
static bool mask_killed(Rank *self) {
    uint32_t alive[MASK_WORDS];
    if (has(self->alive, (int)self->d->options->kill_rank))
        return bench_fail("rank %d: expected EP_ERR_MASKED for rank %lld within %d steps, got none",
                          self->rank, (long long)self->d->options->kill_rank, MASK_AFTER);
    list_living(self->d, true, alive);
    return mask(self, alive);
}

/* Wait until another process has memory, and waits for the living. */
static bool await_newcomer(const Decode *d) {
    const Given *given = &d->seats[d->options->kill_rank].given[JOINING];
    double end = time_now_us() + 1e6 * SECONDS;
    while (!__atomic_load_n(&given->entered, __ATOMIC_ACQUIRE)) {
        if (time_now_us() > end) return bench_fail("no process came to join");
        usleep(POLL_US);
    }
    return true;
}

/* The living let the new process in. They come at the same time, as those who serve would. */
static bool admit(Rank *self) {
    uint32_t alive[MASK_WORDS];
    Seat *seat = &self->d->seats[self->rank];
    double before = seat->mask_us;
    list_living(self->d, false, alive);
    EpBootstrap boot = meet(self, JOINING, alive);
    if (!await_newcomer(self->d)) return false;
    double begin = time_now_us();
    if (!bench_ok(ep_group_admit(self->group, &boot), "ep_group_admit") || !mask(self, alive))
        return false;
    seat->pause_us = time_now_us() - begin, seat->mask_us = before;
    return true;
}

static bool capture(Rank *self) {
    return !self->d->options->graphs || decode_device_capture(self->device, issue, self);
}

static bool join(Rank *self) {
    uint32_t alive[MASK_WORDS];
    double begin = time_now_us();
    EpGroupConfig config = group_config(self);
    list_living(self->d, false, alive);
    EpBootstrap boot = meet(self, JOINING, alive);
    bool ok = bench_ok(ep_group_join(&boot, &config, &self->group), "ep_group_join") &&
              create_handle(self) && mask(self, alive) && capture(self);
    self->d->seats[self->rank].join_us = time_now_us() - begin;
    return ok;
}

static bool play(Rank *self, int first) {
    const Decode *d = self->d;
    bool dies = d->kill_step >= 0 && self->rank == d->options->kill_rank && first == 0;
    for (int step = first; step < d->steps; step++) {
        if (dies && step == d->kill_step) raise(SIGKILL);
        if (d->kill_step >= 0 && step == d->kill_step + MASK_AFTER && !mask_killed(self))
            return false;
        if (first == 0 && step == d->join_step && !admit(self)) return false;
        if (!play_step(self, step)) return false;
    }
    return true;
}

static bool create(Rank *self) {
    uint32_t alive[MASK_WORDS];
    list_living(self->d, false, alive);
    if (!create_group(self)) return false;
    return has(self->d->options->mask, self->rank) || (mask(self, alive) && capture(self));
}

static bool prepare_tensors(Rank *self) {
    const Options *o = self->d->options;
    if (!allocate(self)) return false;
    for (int64_t t = 0; t < o->tokens_end; t++)
        fill_row(self, number_of(t), self->host.tokens + t * self->row_bytes);
    return !self->device || decode_device_copy(self->device, self->used.tokens, self->host.tokens,
                                               (size_t)(o->tokens_end * self->row_bytes));
}

/* A masked rank has nothing to do. */
static bool live(const Decode *d, int rank, bool joins) {
    Rank self = {.d = d, .rank = rank};
    self.row_bytes = d->options->hidden * (int64_t)ep_type_bytes((EpType)d->options->type);
    self.slab_rows = d->options->tokens_end * d->ranks > 0 ? d->options->tokens_end * d->ranks : 1;
    if (d->options->backend == EP_BACKEND_CUDA && !(self.device = decode_device_open(rank)))
        return false;
    if (!prepare_tensors(&self)) return false;
    if (!(joins ? join(&self) : create(&self))) return false;
    if (has(d->options->mask, rank)) return true;
    bool ok = play(&self, joins ? d->join_step : 0);
    ep_group_destroy(self.group);
    decode_device_close(self.device);
    pool_free(&self.pool);
    return ok;
}

static void run_rank(const Decode *d, int rank, bool joins) {
    Seat *seat = &d->seats[rank];
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    seat->exit_status = live(d, rank, joins) ? BENCH_EXIT_OK : bench_error_exit_status();
    snprintf(seat->message, sizeof(seat->message), "%s", bench_error_message());
    seat->is_done = 1;
    _exit(0);
}

/* ---- all ranks ----------------------------------------------------------------------------- */

static bool start(const Decode *d, int rank, bool joins, pid_t *child) {
    *child = fork();
    if (*child < 0) return bench_fail("rank %d: fork: %s", rank, strerror(errno));
    if (*child == 0) run_rank(d, rank, joins);
    return true;
}

/* Whether the process was killed that should be. */
static bool was_killed(const Decode *d, int rank, int status, bool replaced) {
    bool dies = d->kill_step >= 0 && rank == d->options->kill_rank && !replaced;
    return dies && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

static bool judge(const Decode *d, int rank, int status) {
    const Seat *seat = &d->seats[rank];
    if (seat->is_done && seat->exit_status != BENCH_EXIT_OK) {
        bench_error_set(seat->exit_status, seat->message);
        return false;
    }
    return seat->is_done || bench_fail("rank %d: expected it to end by itself, got signal %d", rank,
                                       WIFSIGNALED(status) ? WTERMSIG(status) : 0);
}

static int find_child(const pid_t *children, int count, pid_t child) {
    int r = 0;
    while (r < count && children[r] != child)
        r++;
    return r;
}

/* Those that are left after a failure would wait for each other. */
static void kill_all(const pid_t *children, int count) {
    for (int r = 0; r < count; r++)
        if (children[r] > 0) kill(children[r], SIGKILL);
}

static bool run_all(const Decode *d) {
    pid_t children[EP_MAX_RANKS] = {0}, child;
    bool ok = true, replaced = false;
    fflush(stdout);
    for (int r = 0; ok && r < d->ranks; r++)
        ok = start(d, r, false, &children[r]);
    if (!ok) kill_all(children, d->ranks);
    for (int status; (child = waitpid(-1, &status, 0)) > 0 || errno == EINTR;) {
        int rank = child > 0 ? find_child(children, d->ranks, child) : d->ranks;
        if (rank == d->ranks) continue;
        children[rank] = 0;
        if (!ok) continue;
        if (!was_killed(d, rank, status, replaced))
            ok = judge(d, rank, status);
        else if (d->join_step >= 0)
            replaced = true, ok = start(d, rank, true, &children[rank]);
        if (!ok) kill_all(children, d->ranks);
    }
    return ok;
}

/* ---- results ------------------------------------------------------------------------------- */

static bool lives(const Decode *d, int rank, int step) {
    if (d->kill_step < 0 || rank != d->options->kill_rank) return true;
    return step < d->kill_step || (d->join_step >= 0 && step >= d->join_step);
}

/* Add a line of steps first .. last - 1: the slowest of the ranks that lived through them. */
static bool add_steps(Lines *lines, const Decode *d, const char *name, int first, int last) {
    double *slowest = bench_alloc((size_t)(last - first) + 1, sizeof(double), "times");
    Quantiles time;
    bool ok = slowest != NULL;
    for (int r = 0; ok && r < d->ranks; r++)
        for (int s = first; s < last; s++) {
            double us = lives(d, r, s) ? d->seats[r].us[s] : 0;
            if (us > slowest[s - first]) slowest[s - first] = us;
        }
    ok = ok && time_evaluate(lines->world, true, slowest, last - first, 1, &time);
    if (ok) lines_add(lines, name, "us", time, -1, 0);
    free(slowest);
    return ok;
}

/* Add a time that each rank has once: that of the slowest of those that were there before. */
static void add_once(Lines *lines, const Decode *d, const char *name, size_t at) {
    double most = 0, us;
    for (int r = 0; r < d->ranks; r++) {
        memcpy(&us, (const char *)&d->seats[r] + at, sizeof(us));
        if (r != d->options->kill_rank && us > most) most = us;
    }
    lines_add(lines, name, "us", (Quantiles){most, most}, -1, 0);
}

static bool add_death(Lines *lines, const Decode *d) {
    char name[64];
    int masked = d->kill_step + MASK_AFTER, end = d->join_step >= 0 ? d->join_step : d->steps;
    snprintf(name, sizeof(name), "step in which rank %lld dies", (long long)d->options->kill_rank);
    if (!add_steps(lines, d, name, d->kill_step, d->kill_step + 1) ||
        !add_steps(lines, d, "step without it, cut", d->kill_step + 1, masked))
        return false;
    add_once(lines, d, "ep_group_mask", offsetof(Seat, mask_us));
    return add_steps(lines, d, "step without it, masked", masked, end);
}

static bool add_return(Lines *lines, const Decode *d, const char *name) {
    double us = d->seats[d->options->kill_rank].join_us;
    add_once(lines, d, "ep_group_admit to ep_group_mask", offsetof(Seat, pause_us));
    lines_add(lines, "ep_group_join to the first step", "us", (Quantiles){us, us}, -1, 0);
    return add_steps(lines, d, name, d->join_step, d->steps);
}

static bool add_lines(Lines *lines, const Decode *d) {
    char name[64];
    int living = 0;
    for (int r = 0; r < d->ranks; r++)
        living += !has(d->options->mask, r);
    snprintf(name, sizeof(name), "step of %d ranks", living);
    if (!add_steps(lines, d, name, (int)d->options->run.warmup,
                   d->kill_step >= 0 ? d->kill_step : d->steps))
        return false;
    if (d->kill_step >= 0 && !add_death(lines, d)) return false;
    return d->join_step < 0 || add_return(lines, d, name);
}

bool decode_case(World *world, const Options *options) {
    Lines lines;
    Decode d = {
        .options = options, .ranks = (int)options->processes, .kill_step = -1, .join_step = -1};
    d.steps = (int)(options->run.warmup + options->run.iterations);
    if (options->kill_step) d.kill_step = (int)(options->run.warmup + options->kill_step - 1);
    if (options->join_step) d.join_step = (int)(options->run.warmup + options->join_step - 1);
    if (!lines_begin(&lines, world, options, "decoding in a group with masks") || !open_board(&d))
        return false;
    int64_t wrong = 0;
    bool ok = run_all(&d) && add_lines(&lines, &d);
    for (int r = 0; r < d.ranks; r++)
        wrong += d.seats[r].wrong;
    munmap(d.seats, d.bytes);
    if (!ok) return false;
    report_wrong(options->run.check, wrong);
    return lines_end(&lines) &&
           (wrong == 0 || bench_fail("%lld elements are wrong", (long long)wrong));
}
