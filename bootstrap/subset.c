/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/subset.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/callback.h"
#include "runtime/kept.h"
#include "runtime/wait.h"

/* Tags of messages are at least 14 bits wide, and groups of the world use them from 0 on. Each
 * subset has a range of its own, since subsets may share pairs of ranks. The range's last tag is
 * that of gatherings. */
#define TAGS 512
#define RANGES 31 /* after the first TAGS tags */
#define GATHER_TAG (TAGS - 1)

/* ---- gathering by messages ----------------------------------------------------------------- */

#define BARRIER (-1)

/* Precedes the bytes. A rank that gave up a gathering may later receive messages of that one. */
typedef struct Header {
    int64_t turn, bytes; /* or BARRIER */
} Header;

int ep_subset_reserve(EpSubset *self, size_t bytes) {
    int32_t count = self->world.isend ? self->size : self->world.size;
    char *memory = realloc(self->memory, (size_t)count * (sizeof(Header) + bytes));
    if (!memory) return 0;
    self->memory = memory, self->room = bytes;
    return 1;
}

static int has_room(EpSubset *self, size_t bytes) {
    return (self->memory && bytes <= self->room) || ep_subset_reserve(self, bytes);
}

/* One gathering. Its messages lie in the subset's memory, which is left to those that are given
 * up. */
typedef struct Gathering {
    EpSubset *self;
    Header header;
    size_t stride;   /* bytes of a message */
    char *messages;  /* [size, stride] received, by rank; the own place holds the sent one */
    void **requests; /* the subset's, as the next */
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

static EpStatus refuse_memory(const EpSubset *self) {
    return ep_fail(EP_ERR_NO_MEMORY, "rank %d: bootstrap: out of memory", self->rank);
}

static EpStatus gather(EpSubset *self, int64_t kind, const void *in, void *out, size_t bytes,
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
    EpSubset *self = context;
    const EpBootstrap *world = &self->world;
    if (!has_room(self, bytes)) return refuse_memory(self);
    char *all = self->memory;
    EpStatus status = ep_call_allgather(world, in, all, bytes, seconds);
    for (int32_t r = 0; r < self->size && status == EP_OK; r++)
        memcpy((char *)out + (size_t)r * bytes, all + (size_t)self->ranks[r] * bytes, bytes);
    return status;
}

static EpStatus meet_by_world(void *context, double seconds) {
    const EpSubset *self = context;
    return ep_call_barrier(&self->world, seconds);
}

/* ---- messages of the subset ---------------------------------------------------------------- */

static int32_t tag_of(const EpSubset *self, int32_t tag) {
    return self->first_tag + (int32_t)((uint32_t)tag % GATHER_TAG);
}

static EpStatus subset_isend(void *context, int32_t peer, int32_t tag, const void *data,
                             size_t bytes, void **request) {
    const EpSubset *self = context;
    return ep_call_isend(&self->world, self->ranks[peer], tag_of(self, tag), data, bytes, request);
}

static EpStatus subset_irecv(void *context, int32_t peer, int32_t tag, void *data, size_t bytes,
                             void **request) {
    const EpSubset *self = context;
    return ep_call_irecv(&self->world, self->ranks[peer], tag_of(self, tag), data, bytes, request);
}

static EpStatus subset_test(void *context, void **request, int *done) {
    const EpSubset *self = context;
    return ep_call_test(&self->world, request, done);
}

static void subset_cancel(void *context, void **request) {
    const EpSubset *self = context;
    self->world.cancel(self->world.context, request);
}

/* ---- the world behind a bootstrap ---------------------------------------------------------- */

/* Returns the subset that a bootstrap is of, or NULL. */
static EpSubset *subset_of(const EpBootstrap *bootstrap) {
    int is_subset =
        bootstrap->allgather == gather_by_messages || bootstrap->allgather == gather_by_world;
    return is_subset ? bootstrap->context : NULL;
}

void ep_bootstrap_place(const EpBootstrap *bootstrap, int32_t *rank, int32_t *size) {
    for (const EpSubset *of; (of = subset_of(bootstrap));)
        bootstrap = &of->world;
    *rank = bootstrap->rank, *size = bootstrap->size;
}

const void *ep_bootstrap_elsewhere(const EpBootstrap *bootstrap, size_t stride, int32_t *rank) {
    const EpSubset *self = subset_of(bootstrap);
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
    EpSubset *self = subset_of(bootstrap);
    if (!self) return 1;
    return ep_subset_reserve(self, bytes) &&
           (self->world.isend || ep_bootstrap_reserve(&self->world, bytes));
}

/* ---- life ---------------------------------------------------------------------------------- */

void ep_subset_free(void *subset) {
    EpSubset *self = subset;
    if (!self) return;
    free(self->memory);
    free(self->requests);
    free(self->pending);
    free(self);
}

EpSubset *ep_subset_create(const EpBootstrap *world) {
    size_t size = (size_t)world->size;
    EpSubset *self = calloc(1, sizeof(*self) + sizeof(int32_t) * size);
    if (!self) return NULL;
    self->world = *world;
    self->requests = calloc(2 * size, sizeof(*self->requests));
    self->pending = calloc(2 * size, sizeof(*self->pending));
    if (self->requests && self->pending) return self;
    ep_subset_free(self);
    return NULL;
}

EpBootstrap ep_subset_bootstrap(EpSubset *self, int32_t number) {
    EpBootstrap made = EP_BOOTSTRAP_INIT;
    int messages = self->world.isend != NULL;
    self->first_tag = TAGS * (1 + (int32_t)((uint32_t)number % RANGES));
    made.rank = self->rank, made.size = self->size, made.context = self;
    made.allgather = messages ? gather_by_messages : gather_by_world;
    made.barrier = messages ? meet_by_messages : meet_by_world;
    made.destroy = ep_subset_free;
    if (!messages) return made;
    made.isend = subset_isend, made.irecv = subset_irecv;
    made.test = subset_test, made.cancel = subset_cancel;
    return made;
}
