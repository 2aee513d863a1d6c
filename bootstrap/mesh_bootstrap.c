/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bootstrap of a group of a mesh, out of the bootstrap of all ranks, "the world". Where the
 * world has messages, a gathering sends its bytes to each other rank of the group. Where it has
 * none, the world gathers, and each group takes its own ranks' bytes.
 */
#include <stdlib.h>
#include <string.h>

#include "bootstrap/bootstrap.h"
#include "bootstrap/mesh.h"
#include "runtime/callback.h"
#include "runtime/object.h"
#include "runtime/wait.h"

/* Tags of messages are at least 14 bits wide, and groups of the world use them from 0 on. Each
 * bootstrap of a mesh has a range of its own, since groups along different axes may share pairs of
 * ranks. The range's last tag is that of gatherings. */
#define TAGS 512
#define RANGES 31 /* after the first TAGS tags */
#define GATHER_TAG (TAGS - 1)

typedef struct MeshContext {
    EpBootstrap world;
    int32_t rank, size; /* in the group */
    int32_t first_tag;
    int64_t turn;    /* number of gatherings */
    size_t room;     /* bytes of a rank that `memory` has place for */
    char *memory;    /* of a gathering: [size], or without messages [world's ranks] */
    void **requests; /* [2 * size] receives, then sends */
    char *pending;   /* [2 * size] */
    int32_t ranks[]; /* [size] of the world */
} MeshContext;

/* ---- gathering by messages ----------------------------------------------------------------- */

#define BARRIER (-1)

/* Precedes the bytes. A rank that gave up a gathering may later receive messages of that one. */
typedef struct Header {
    int64_t turn, bytes; /* or BARRIER */
} Header;

/* Allocate a place for `bytes` bytes of each rank. Returns 0 when out of memory. */
static int reserve(MeshContext *self, size_t bytes) {
    int32_t count = self->world.isend ? self->size : self->world.size;
    char *memory = realloc(self->memory, (size_t)count * (sizeof(Header) + bytes));
    if (!memory) return 0;
    self->memory = memory, self->room = bytes;
    return 1;
}

static int has_room(MeshContext *self, size_t bytes) {
    return (self->memory && bytes <= self->room) || reserve(self, bytes);
}

/* One gathering. Its messages lie in the context's memory, which is left to those that are given
 * up. */
typedef struct Gathering {
    MeshContext *self;
    Header header;
    size_t stride;   /* bytes of a message */
    char *messages;  /* [size, stride] received, by rank; the own place holds the sent one */
    void **requests; /* the context's, as the next */
    char *pending;
} Gathering;

static char *message_of(const Gathering *g, int32_t rank) {
    return g->messages + g->stride * (size_t)rank;
}

static EpStatus post_receive(const Gathering *g, int32_t r) {
    const EpBootstrap *world = &g->self->world;
    g->pending[r] = 1;
    return ep_call_irecv(world, g->self->ranks[r], g->self->first_tag + GATHER_TAG,
                         message_of(g, r), g->stride, &g->requests[r]);
}

static EpStatus post_send(const Gathering *g, int32_t r) {
    const EpBootstrap *world = &g->self->world;
    void **request = &g->requests[g->self->size + r];
    EP_TRY(ep_call_isend(world, g->self->ranks[r], g->self->first_tag + GATHER_TAG,
                         message_of(g, g->self->rank), g->stride, request));
    g->pending[g->self->size + r] = *request != NULL;
    return EP_OK;
}

static EpStatus post_all(const Gathering *g) {
    for (int32_t r = 0; r < g->self->size; r++) {
        if (r == g->self->rank) continue;
        EP_TRY(post_receive(g, r));
        EP_TRY(post_send(g, r));
    }
    return EP_OK;
}

/* Look at a received message. One of an earlier gathering, which this rank gave up, is dropped. */
static EpStatus check_message(const Gathering *g, int32_t r) {
    Header theirs;
    memcpy(&theirs, message_of(g, r), sizeof(theirs));
    if (theirs.turn < g->header.turn) return post_receive(g, r);
    if (theirs.turn == g->header.turn && theirs.bytes == g->header.bytes) return EP_OK;
    return ep_fail(EP_ERR_ORDER,
                   "rank %d: bootstrap: expected all ranks in the same call, got different ones "
                   "from rank %d",
                   g->self->rank, r);
}

static EpStatus poll(const Gathering *g, int *left) {
    const EpBootstrap *world = &g->self->world;
    *left = 0;
    for (int32_t i = 0; i < 2 * g->self->size; i++) {
        int done = 0;
        if (!g->pending[i]) continue;
        EP_TRY(ep_call_test(world, &g->requests[i], &done));
        if (done) {
            g->pending[i] = 0;
            if (i < g->self->size) EP_TRY(check_message(g, i));
        }
        *left += g->pending[i];
    }
    return EP_OK;
}

static EpStatus fail_missing(const Gathering *g, double seconds) {
    int32_t i = 0;
    while (!g->pending[i])
        i++;
    int32_t missing = i % g->self->size;
    return ep_fail(EP_ERR_TIMEOUT,
                   "rank %d: bootstrap: rank %d, which is rank %d of the mesh, did not %s within "
                   "%g s",
                   g->self->rank, missing, g->self->ranks[missing],
                   i < g->self->size ? "arrive" : "receive a message", seconds);
}

static EpStatus wait_for_all(const Gathering *g, double seconds) {
    EpWait wait;
    ep_wait_begin(&wait, seconds, 0);
    for (;;) {
        int left;
        EP_TRY(poll(g, &left));
        if (!left) return EP_OK;
        EP_TRY(ep_poll_abort());
        if (!ep_wait_pause(&wait)) return fail_missing(g, seconds);
    }
}

/* End the gathering. Messages that are still pending keep their memory. */
static void close_gathering(Gathering *g) {
    const EpBootstrap *world = &g->self->world;
    int kept = 0;
    for (int32_t i = 0; i < 2 * g->self->size; i++) {
        if (!g->pending[i]) continue;
        if (g->requests[i]) world->cancel(world->context, &g->requests[i]);
        g->pending[i] = 0, g->requests[i] = NULL;
        kept = 1;
    }
    if (!kept) return;
    ep_keep_memory(g->self->memory);
    g->self->memory = NULL;
}

static EpStatus refuse_memory(const MeshContext *self) {
    return ep_fail(EP_ERR_NO_MEMORY, "rank %d: bootstrap: out of memory", self->rank);
}

static EpStatus gather(MeshContext *self, int64_t kind, const void *in, void *out, size_t bytes,
                       double seconds) {
    if (!has_room(self, bytes)) return refuse_memory(self);
    Gathering g = {.self = self,
                   .header = {self->turn++, kind},
                   .stride = sizeof(Header) + bytes,
                   .messages = self->memory,
                   .requests = self->requests,
                   .pending = self->pending};
    memcpy(message_of(&g, self->rank), &g.header, sizeof(g.header));
    if (bytes) memcpy(message_of(&g, self->rank) + sizeof(g.header), in, bytes);
    EpStatus status = post_all(&g);
    if (status == EP_OK) status = wait_for_all(&g, seconds);
    for (int32_t r = 0; r < self->size && status == EP_OK && bytes; r++)
        memcpy((char *)out + (size_t)r * bytes, message_of(&g, r) + sizeof(Header), bytes);
    close_gathering(&g);
    return status;
}

static EpStatus gather_by_messages(void *context, const void *in, void *out, size_t bytes,
                                   double seconds) {
    return gather(context, (int64_t)bytes, in, out, bytes, seconds);
}

static EpStatus meet_by_messages(void *context, double seconds) {
    return gather(context, BARRIER, NULL, NULL, 0, seconds);
}

/* ---- gathering by the world ---------------------------------------------------------------- */

static EpStatus gather_by_world(void *context, const void *in, void *out, size_t bytes,
                                double seconds) {
    MeshContext *self = context;
    const EpBootstrap *world = &self->world;
    if (!has_room(self, bytes)) return refuse_memory(self);
    char *all = self->memory;
    EpStatus status = ep_call_allgather(world, in, all, bytes, seconds);
    for (int32_t r = 0; r < self->size && status == EP_OK; r++)
        memcpy((char *)out + (size_t)r * bytes, all + (size_t)self->ranks[r] * bytes, bytes);
    return status;
}

static EpStatus meet_by_world(void *context, double seconds) {
    const MeshContext *self = context;
    return ep_call_barrier(&self->world, seconds);
}

/* ---- messages of the group ----------------------------------------------------------------- */

static int32_t tag_of(const MeshContext *self, int32_t tag) {
    return self->first_tag + (int32_t)((uint32_t)tag % GATHER_TAG);
}

static EpStatus mesh_isend(void *context, int32_t peer, int32_t tag, const void *data, size_t bytes,
                           void **request) {
    const MeshContext *self = context;
    return ep_call_isend(&self->world, self->ranks[peer], tag_of(self, tag), data, bytes, request);
}

static EpStatus mesh_irecv(void *context, int32_t peer, int32_t tag, void *data, size_t bytes,
                           void **request) {
    const MeshContext *self = context;
    return ep_call_irecv(&self->world, self->ranks[peer], tag_of(self, tag), data, bytes, request);
}

static EpStatus mesh_test(void *context, void **request, int *done) {
    const MeshContext *self = context;
    return ep_call_test(&self->world, request, done);
}

static void mesh_cancel(void *context, void **request) {
    const MeshContext *self = context;
    self->world.cancel(self->world.context, request);
}

/* ---- the world behind a bootstrap
 * ------------------------------------------------------------------------------ */

/* Returns what the bootstrap of a group of a mesh refers to, or NULL for another one. */
static MeshContext *context_of(const EpBootstrap *bootstrap) {
    int is_mesh =
        bootstrap->allgather == gather_by_messages || bootstrap->allgather == gather_by_world;
    return is_mesh ? bootstrap->context : NULL;
}

void ep_bootstrap_place(const EpBootstrap *bootstrap, int32_t *rank, int32_t *size) {
    for (const MeshContext *of; (of = context_of(bootstrap));)
        bootstrap = &of->world;
    *rank = bootstrap->rank, *size = bootstrap->size;
}

const void *ep_bootstrap_elsewhere(const EpBootstrap *bootstrap, size_t stride, int32_t *rank) {
    const MeshContext *self = context_of(bootstrap);
    if (!self || self->world.isend) return NULL;
    for (*rank = 0; *rank < self->world.size; ++*rank) {
        const char *theirs = self->memory + (size_t)*rank * stride;
        EpStatus status;
        memcpy(&status, theirs, sizeof(status));
        if (status != EP_OK) return theirs;
    }
    return ep_bootstrap_elsewhere(&self->world, stride, rank);
}

int ep_bootstrap_reserve(const EpBootstrap *bootstrap, size_t bytes) {
    MeshContext *self = context_of(bootstrap);
    if (!self) return 1;
    return reserve(self, bytes) && (self->world.isend || ep_bootstrap_reserve(&self->world, bytes));
}

/* ---- agreement ----------------------------------------------------------------------------- */

/* What each rank tells all others. */
typedef struct MeshHello {
    EpRankStatus status;
    EpAxes along;
    int32_t num_axes;
    EpAxis axes[EP_MESH_MAX_AXES];
    uint64_t grid;  /* digest */
    int32_t number; /* of this bootstrap; rank 0's counts */
} MeshHello;

static uint64_t digest_grid(const EpMesh *mesh, int32_t ranks) {
    uint64_t digest = 0xcbf29ce484222325u;
    for (int32_t i = 0; i < ranks; i++)
        digest = (digest ^ (uint64_t)(mesh->grid ? mesh->grid[i] : i)) * 0x100000001b3u;
    return digest;
}

/* Check this rank's own arguments, and find its group. `self` is NULL when out of memory, which
 * ranks tell each other first. */
static EpStatus check_own(const EpCall *call, const EpBootstrap *world, const EpMesh *given,
                          const EpAxes *along, const EpBootstrap *out, EpMesh *mesh,
                          MeshContext *self) {
    int32_t ranks;
    EP_TRY(ep_mesh_read(call, given, mesh));
    EP_TRY(ep_axes_check(call, mesh, "axes", along));
    EP_TRY(ep_check_struct(call, "out", out, sizeof(*out)));
    EP_TRY(ep_mesh_ranks(mesh, &ranks));
    if (ranks != world->size)
        return ep_refuse(call, EP_ERR_RANGE, "mesh",
                         "expected a mesh of the %d ranks of world, got %d", world->size, ranks);
    if (!self) return EP_OK;
    return ep_mesh_group(mesh, along, world->rank, &self->size, &self->rank, self->ranks);
}

static MeshHello describe(EpStatus status, const EpMesh *mesh, const EpAxes *along) {
    static _Atomic int32_t made;
    MeshHello hello;
    memset(&hello, 0, sizeof(hello));
    hello.status = ep_rank_status(status);
    hello.number = made++;
    if (status != EP_OK) return hello;
    EpAxes none = {.num = 0};
    int32_t ranks = 1;
    hello.along = none, hello.num_axes = mesh->num_axes;
    for (int32_t i = 0; i < along->num; i++)
        ep_axes_add(&hello.along, along->axis[i]);
    for (int32_t i = 0; i < mesh->num_axes; i++) {
        strcpy(hello.axes[i].name, mesh->axes[i].name);
        hello.axes[i].size = mesh->axes[i].size, hello.axes[i].role = mesh->axes[i].role;
        ranks *= mesh->axes[i].size;
    }
    hello.grid = digest_grid(mesh, ranks);
    return hello;
}

static EpStatus mismatch(const EpCall *call, const char *what, int32_t rank) {
    return ep_refuse(call, EP_ERR_MISMATCH, what,
                     "expected the same on all ranks, got others on rank %d than on rank 0", rank);
}

static EpStatus compare_axes(const EpCall *call, const MeshHello *first, const MeshHello *other,
                             int32_t rank) {
    if (other->num_axes != first->num_axes)
        return ep_refuse(call, EP_ERR_MISMATCH, "mesh.num_axes",
                         "expected one value on all ranks, got %d on rank 0 and %d on rank %d",
                         first->num_axes, other->num_axes, rank);
    for (int32_t i = 0; i < first->num_axes; i++) {
        const EpAxis *a = &first->axes[i], *b = &other->axes[i];
        if (strncmp(a->name, b->name, sizeof(a->name)) == 0 && a->size == b->size &&
            a->role == b->role)
            continue;
        return ep_refuse(call, EP_ERR_MISMATCH, "mesh.axes",
                         "expected one axis %d on all ranks, got %s=%d on rank 0 and %.31s=%d on "
                         "rank %d%s",
                         i, a->name, a->size, b->name, b->size, rank,
                         a->role != b->role ? ", of another role" : "");
    }
    return EP_OK;
}

static EpStatus compare(const EpCall *call, const EpBootstrap *world, const MeshHello *all) {
    int32_t size = world->size;
    EP_TRY(ep_rank_status_check(call, world, all, sizeof(*all)));
    for (int32_t r = 1; r < size; r++) {
        EP_TRY(compare_axes(call, &all[0], &all[r], r));
        if (all[r].grid != all[0].grid) return mismatch(call, "mesh.grid", r);
        if (memcmp(&all[r].along, &all[0].along, sizeof(all->along)) != 0)
            return mismatch(call, "axes", r);
    }
    return EP_OK;
}

/* ---- life ---------------------------------------------------------------------------------- */

static void free_context(void *context) {
    MeshContext *self = context;
    if (!self) return;
    free(self->memory);
    free(self->requests);
    free(self->pending);
    free(self);
}

static EpBootstrap bootstrap_of(MeshContext *self) {
    EpBootstrap made = EP_BOOTSTRAP_INIT;
    int messages = self->world.isend != NULL;
    made.rank = self->rank, made.size = self->size, made.context = self;
    made.allgather = messages ? gather_by_messages : gather_by_world;
    made.barrier = messages ? meet_by_messages : meet_by_world;
    made.destroy = free_context;
    if (!messages) return made;
    made.isend = mesh_isend, made.irecv = mesh_irecv;
    made.test = mesh_test, made.cancel = mesh_cancel;
    return made;
}

/* Allocate the context. Its arrays have a place for each rank of the world, since the arguments
 * that give the group's size are not checked yet. Returns NULL when out of memory. */
static MeshContext *make_context(const EpBootstrap *world) {
    size_t size = (size_t)world->size;
    MeshContext *self = calloc(1, sizeof(*self) + sizeof(int32_t) * size);
    if (!self) return NULL;
    self->world = *world;
    self->requests = calloc(2 * size, sizeof(*self->requests));
    self->pending = calloc(2 * size, sizeof(*self->pending));
    if (self->requests && self->pending) return self;
    free_context(self);
    return NULL;
}

/* Gather the hellos, and compare them. */
static EpStatus agree(const EpCall *call, const EpBootstrap *world, const MeshHello *mine,
                      MeshHello *all, double timeout) {
    EP_TRY(ep_bootstrap_gather(world, mine, all, sizeof(*mine), timeout));
    for (int32_t r = 0; r < world->size; r++)
        all[r].status.sentence[sizeof(all->status.sentence) - 1] = 0;
    return compare(call, world, all);
}

/* Where a rank has what it needs before the ranks meet, nothing can fail on it alone afterwards. */
EpStatus ep_bootstrap_mesh_within(const EpBootstrap *world, const EpMesh *given, const EpAxes *axes,
                                  double timeout, EpBootstrap *out) {
    EpCall call = {"ep_bootstrap_mesh", -1};
    EpMesh mesh = EP_MESH_INIT;
    EP_TRY(ep_bootstrap_check(&call, world));
    call.rank = world->rank;
    MeshContext *self = make_context(world);
    MeshHello mine = describe(check_own(&call, world, given, axes, out, &mesh, self), &mesh, axes);
    MeshHello *all = calloc((size_t)world->size, sizeof(*all));
    int has_memory = all && self && ep_bootstrap_reserve(world, sizeof(*all)) &&
                     (mine.status.status != EP_OK || reserve(self, EP_RESERVED_BYTES));
    EpStatus status = ep_bootstrap_agree_on_memory(&call, world, has_memory, timeout);
    if (status == EP_OK) status = agree(&call, world, &mine, all, timeout);
    if (status == EP_OK) self->first_tag = TAGS * (1 + (int32_t)((uint32_t)all[0].number % RANGES));
    free(all);
    (void)ep_bootstrap_reserve(world, EP_RESERVED_BYTES);
    if (status != EP_OK) {
        free_context(self);
        return status;
    }
    *out = bootstrap_of(self);
    return EP_OK;
}

EpStatus ep_bootstrap_mesh(const EpBootstrap *world, const EpMesh *mesh, const EpAxes *axes,
                           EpBootstrap *out) {
    EpSettings settings = {.timeout = EP_FALLBACK_TIMEOUT};
    (void)ep_settings_load(&settings);
    return ep_bootstrap_mesh_within(world, mesh, axes, settings.timeout, out);
}
