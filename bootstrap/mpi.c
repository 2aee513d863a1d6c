/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bootstrap over MPI, in a library of its own (libep_mpi) that uses only the public header.
 *
 * An allgather uses nonblocking point-to-point messages rather than MPI_Allgather, so that a
 * timeout can name the missing rank. `share` is left to libep: creating an MPI shared-memory window
 * has no timeout and hangs if one rank gets no memory. Everything runs on a duplicate of the
 * caller's communicator, on which errors return instead of aborting.
 */
#include "ep/ep_mpi.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Tags are at least 15 bits wide: the lower half for gathering, the upper for group messages. */
#define TAG_MASK 0x3fff
#define TAG_MESSAGES 0x4000

typedef struct MpiContext {
    MPI_Comm comm;
    int rank, size;
    int gathers;   /* count, from which each gathering takes its tag */
    int abandoned; /* 1 if messages were abandoned: unreceived, or still to arrive */
} MpiContext;

static EpStatus fail(EpStatus status, const char *format, ...) {
    char sentence[384];
    va_list args;
    va_start(args, format);
    vsnprintf(sentence, sizeof(sentence), format, args);
    va_end(args);
    return ep_set_last_error(status, sentence);
}

static EpStatus check(const MpiContext *self, const char *what, int code) {
    if (code == MPI_SUCCESS) return EP_OK;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    return fail(EP_ERR_BOOTSTRAP, "rank %d: %s: %s", self->rank, what, text);
}

/* ---- gathering ----------------------------------------------------------------------------- */

/* One gathering. It sends from and receives into memory of its own, so that a rank which gives up
 * can leave that memory to messages that may still arrive. */
typedef struct Gathering {
    const MpiContext *self;
    int tag, bytes;
    double seconds;
    MPI_Request *requests; /* [2 * size] receives, then sends, by peer; null once complete */
    char *sent, *received; /* [bytes], [size, bytes] */
} Gathering;

static int post_gathering(Gathering *g) {
    const MpiContext *self = g->self;
    for (int r = 0; r < 2 * self->size; r++)
        g->requests[r] = MPI_REQUEST_NULL;
    for (int r = 0; r < self->size; r++) {
        if (r == self->rank) continue;
        int code = MPI_Irecv(g->received + (size_t)r * (size_t)g->bytes, g->bytes, MPI_BYTE, r,
                             g->tag, self->comm, &g->requests[r]);
        if (code == MPI_SUCCESS)
            code = MPI_Isend(g->sent, g->bytes, MPI_BYTE, r, g->tag, self->comm,
                             &g->requests[self->size + r]);
        if (code != MPI_SUCCESS) return code;
    }
    return MPI_SUCCESS;
}

static EpStatus check_length(const Gathering *g, int r, const MPI_Status *message) {
    int bytes = 0;
    if (r >= g->self->size) return EP_OK; /* a send */
    MPI_Get_count(message, MPI_BYTE, &bytes);
    if (bytes == g->bytes) return EP_OK;
    return fail(EP_ERR_ORDER,
                "rank %d: bootstrap: expected all ranks in the same call, rank %d brought %d bytes "
                "and not %d",
                g->self->rank, r, bytes, g->bytes);
}

/* Test the requests one by one; *left becomes the number of pending ones. MPI_Test sets each
 * complete request to null, which shows who is missing; MPI_Testall changes none until all are
 * complete. */
static EpStatus poll_gathering(Gathering *g, int *left) {
    const MpiContext *self = g->self;
    *left = 0;
    for (int r = 0; r < 2 * self->size; r++) {
        MPI_Status message;
        int done = 0;
        if (g->requests[r] == MPI_REQUEST_NULL) continue;
        EpStatus status = check(self, "MPI_Test", MPI_Test(&g->requests[r], &done, &message));
        if (status == EP_OK && done) status = check_length(g, r, &message);
        if (status != EP_OK) return status;
        *left += !done;
    }
    return EP_OK;
}

static EpStatus fail_missing(const Gathering *g) {
    const MpiContext *self = g->self;
    for (int r = 0; r < self->size; r++)
        if (g->requests[r] != MPI_REQUEST_NULL)
            return fail(EP_ERR_TIMEOUT, "rank %d: bootstrap: rank %d did not arrive within %g s",
                        self->rank, r, g->seconds);
    int unsent = self->size; /* all have arrived, but one has not received */
    while (unsent + 1 < 2 * self->size && g->requests[unsent] == MPI_REQUEST_NULL)
        unsent++;
    return fail(EP_ERR_TIMEOUT, "rank %d: bootstrap: rank %d did not receive a message within %g s",
                self->rank, unsent - self->size, g->seconds);
}

static EpStatus finish_gathering(Gathering *g) {
    double start = MPI_Wtime();
    for (;;) {
        int left;
        EpStatus status = poll_gathering(g, &left);
        if (status != EP_OK || !left) return status;
        if ((status = ep_poll_abort()) != EP_OK) return status;
        if (MPI_Wtime() - start > g->seconds) return fail_missing(g);
    }
}

/* Give up a gathering. MPI cannot cancel a send that nobody has received or a receive that has been
 * matched, so the messages' memory is never freed. */
static void abandon(Gathering *g) {
    for (int r = 0; r < 2 * g->self->size; r++) {
        if (g->requests[r] == MPI_REQUEST_NULL) continue;
        if (r < g->self->size) MPI_Cancel(&g->requests[r]);
        MPI_Request_free(&g->requests[r]);
    }
    free(g->requests);
}

static EpStatus gather(Gathering *g, const void *in, void *out) {
    const MpiContext *self = g->self;
    size_t bytes = (size_t)g->bytes;
    memcpy(g->sent, in, bytes);
    EpStatus status = check(self, "MPI_Isend", post_gathering(g));
    if (status == EP_OK) status = finish_gathering(g);
    if (status != EP_OK) {
        abandon(g);
        return status;
    }
    memcpy(g->received + (size_t)self->rank * bytes, in, bytes);
    memcpy(out, g->received, (size_t)self->size * bytes);
    free(g->requests);
    free(g->sent);
    free(g->received);
    return EP_OK;
}

static EpStatus mpi_allgather(void *context, const void *in, void *out, size_t bytes,
                              double seconds) {
    MpiContext *self = context;
    size_t size = (size_t)self->size;
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized)
        return fail(EP_ERR_BOOTSTRAP,
                    "rank %d: bootstrap: expected MPI to be running, got MPI "
                    "after MPI_Finalize",
                    self->rank);
    Gathering g = {.self = self,
                   .tag = self->gathers++ & TAG_MASK,
                   .bytes = (int)bytes,
                   .seconds = seconds,
                   .requests = malloc(2 * size * sizeof(MPI_Request)),
                   .sent = malloc(bytes + 1),
                   .received = malloc(size * bytes + 1)};
    if (!g.requests || !g.sent || !g.received) {
        free(g.requests);
        free(g.sent);
        free(g.received);
        return fail(EP_ERR_NO_MEMORY, "rank %d: bootstrap: out of memory", self->rank);
    }
    EpStatus status = gather(&g, in, out);
    if (status != EP_OK) self->abandoned = 1;
    return status;
}

static EpStatus mpi_barrier(void *context, double seconds) {
    MpiContext *self = context;
    char mine = 0, *all = malloc((size_t)self->size);
    if (!all) return fail(EP_ERR_NO_MEMORY, "rank %d: bootstrap: out of memory", self->rank);
    EpStatus status = mpi_allgather(context, &mine, all, 1, seconds);
    free(all);
    return status;
}

/* ---- messages ------------------------------------------------------------------------------ */

/* Requests are stored in the caller's void *, so operations allocate no memory. */
_Static_assert(sizeof(MPI_Request) <= sizeof(void *), "an MPI_Request fits a pointer");

static void store_request(void **request, MPI_Request value) {
    *request = NULL;
    memcpy(request, &value, sizeof(value));
}

static MPI_Request load_request(void *const *request) {
    MPI_Request value;
    memcpy(&value, request, sizeof(value));
    return value;
}

static EpStatus mpi_isend(void *context, int32_t peer, int32_t tag, const void *data, size_t bytes,
                          void **request) {
    MpiContext *self = context;
    MPI_Request r;
    int code = MPI_Isend(data, (int)bytes, MPI_BYTE, peer, TAG_MESSAGES | (tag & TAG_MASK),
                         self->comm, &r);
    if (code == MPI_SUCCESS) store_request(request, r);
    return check(self, "MPI_Isend", code);
}

static EpStatus mpi_irecv(void *context, int32_t peer, int32_t tag, void *data, size_t bytes,
                          void **request) {
    MpiContext *self = context;
    MPI_Request r;
    int code = MPI_Irecv(data, (int)bytes, MPI_BYTE, peer, TAG_MESSAGES | (tag & TAG_MASK),
                         self->comm, &r);
    if (code == MPI_SUCCESS) store_request(request, r);
    return check(self, "MPI_Irecv", code);
}

static EpStatus mpi_test(void *context, void **request, int *done) {
    MPI_Request r = load_request(request);
    int code = MPI_Test(&r, done, MPI_STATUS_IGNORE);
    store_request(request, r);
    if (*done) *request = NULL;
    return check(context, "MPI_Test", code);
}

static void mpi_cancel(void *context, void **request) {
    MpiContext *self = context;
    MPI_Request r = load_request(request);
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!finalized) MPI_Cancel(&r);
    /* A receive that nothing has matched is done now, and leaves nothing behind. */
    MPI_Status message;
    int done = 0, canceled = 0;
    if (!finalized) MPI_Test(&r, &done, &message);
    if (done) MPI_Test_cancelled(&message, &canceled);
    if (!finalized && !done) MPI_Request_free(&r);
    self->abandoned |= !canceled;
    *request = NULL;
}

/* ---- life ---------------------------------------------------------------------------------- */

/* Free the context. MPI may reuse a freed communicator's number for the next one, which would then
 * receive the abandoned messages: so a communicator that has any is not freed. */
static void mpi_destroy(void *context) {
    MpiContext *self = context;
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!finalized && !self->abandoned) MPI_Comm_free(&self->comm);
    free(self);
}

static EpStatus check_out(const EpBootstrap *out) {
    if (!out) return fail(EP_ERR_NULL, "ep_bootstrap_mpi: out: expected a pointer, got NULL");
    if (out->struct_size == sizeof(*out)) return EP_OK;
    return fail(EP_ERR_STRUCT_SIZE,
                "ep_bootstrap_mpi: out: expected struct_size %zu, got %zu (initialize it with "
                "EP_BOOTSTRAP_INIT)",
                sizeof(*out), out->struct_size);
}

EpStatus ep_bootstrap_mpi(MPI_Comm comm, EpBootstrap *out) {
    EpStatus status = check_out(out);
    if (status != EP_OK) return status;
    int initialized = 0, finalized = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (!initialized || finalized)
        return fail(EP_ERR_BOOTSTRAP, "ep_bootstrap_mpi: expected MPI to be running, got %s",
                    finalized ? "MPI after MPI_Finalize" : "MPI before MPI_Init");
    if (comm == MPI_COMM_NULL)
        return fail(EP_ERR_NULL, "ep_bootstrap_mpi: comm: expected a communicator, got "
                                 "MPI_COMM_NULL");
    MpiContext *self = calloc(1, sizeof(*self));
    if (!self) return fail(EP_ERR_NO_MEMORY, "ep_bootstrap_mpi: out of memory");
    status = check(self, "MPI_Comm_dup", MPI_Comm_dup(comm, &self->comm));
    if (status != EP_OK) {
        free(self);
        return status;
    }
    MPI_Comm_set_errhandler(self->comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(self->comm, &self->rank);
    MPI_Comm_size(self->comm, &self->size);
    *out = (EpBootstrap){.struct_size = sizeof(*out),
                         .rank = self->rank,
                         .size = self->size,
                         .context = self,
                         .allgather = mpi_allgather,
                         .barrier = mpi_barrier,
                         .isend = mpi_isend,
                         .irecv = mpi_irecv,
                         .test = mpi_test,
                         .cancel = mpi_cancel,
                         .destroy = mpi_destroy};
    return EP_OK;
}
