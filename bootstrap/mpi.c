/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bootstrap over MPI, in a library of its own (libep_mpi) that uses nothing but the public header.
 *
 * Gathering is done with nonblocking point-to-point messages rather than MPI_Allgather, because a
 * deadline can then say which rank is missing. Everything runs on a duplicate of the caller's
 * communicator, on which errors return instead of aborting.
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
    int gathers; /* so far: tells one gathering's messages from the next one's */
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

/* Requests of one gathering: receives first, then sends, both by peer. The message is copied, so
 * that a rank which gives up can leave its sends to complete on their own. */
typedef struct Gathering {
    MPI_Request *requests; /* [2 * size] */
    char *message;
} Gathering;

static int post_gathering(const MpiContext *self, Gathering *g, void *out, size_t bytes, int tag) {
    for (int r = 0; r < 2 * self->size; r++)
        g->requests[r] = MPI_REQUEST_NULL;
    for (int r = 0; r < self->size; r++) {
        if (r == self->rank) continue;
        int code = MPI_Irecv((char *)out + (size_t)r * bytes, (int)bytes, MPI_BYTE, r, tag,
                             self->comm, &g->requests[r]);
        if (code == MPI_SUCCESS)
            code = MPI_Isend(g->message, (int)bytes, MPI_BYTE, r, tag, self->comm,
                             &g->requests[self->size + r]);
        if (code != MPI_SUCCESS) return code;
    }
    return MPI_SUCCESS;
}

static EpStatus fail_missing(const MpiContext *self, Gathering *g, double seconds) {
    int missing = -1;
    for (int r = 0; r < self->size; r++) {
        if (g->requests[r] == MPI_REQUEST_NULL) continue;
        missing = missing < 0 ? r : missing;
        MPI_Cancel(&g->requests[r]);
        MPI_Wait(&g->requests[r], MPI_STATUS_IGNORE);
    }
    if (missing >= 0)
        return fail(EP_ERR_TIMEOUT, "rank %d: bootstrap: rank %d did not arrive within %g s",
                    self->rank, missing, seconds);
    return fail(EP_ERR_TIMEOUT, "rank %d: bootstrap: a message was not received within %g s",
                self->rank, seconds);
}

/* One by one, because requests that are complete become null then: MPI_Testall would touch none
 * before all of them are, and nobody could tell which are missing. */
static int poll_gathering(const MpiContext *self, Gathering *g, int *left) {
    int code = MPI_SUCCESS;
    *left = 0;
    for (int r = 0; r < 2 * self->size && code == MPI_SUCCESS; r++) {
        int done = 1;
        if (g->requests[r] != MPI_REQUEST_NULL)
            code = MPI_Test(&g->requests[r], &done, MPI_STATUS_IGNORE);
        *left += !done;
    }
    return code;
}

static EpStatus finish_gathering(const MpiContext *self, Gathering *g, double seconds) {
    double start = MPI_Wtime();
    for (;;) {
        int left;
        EpStatus status = check(self, "MPI_Test", poll_gathering(self, g, &left));
        if (status != EP_OK || !left) return status;
        if (MPI_Wtime() - start > seconds) return fail_missing(self, g, seconds);
    }
}

/* Sends that nobody received cannot be cancelled reliably: leave them, and their bytes, behind. */
static void end_gathering(const MpiContext *self, Gathering *g) {
    int abandoned = 0;
    for (int r = 0; r < self->size; r++)
        if (g->requests[self->size + r] != MPI_REQUEST_NULL) {
            MPI_Request_free(&g->requests[self->size + r]);
            abandoned = 1;
        }
    free(g->requests);
    if (!abandoned) free(g->message);
}

static EpStatus mpi_allgather(void *context, const void *in, void *out, size_t bytes,
                              double seconds) {
    MpiContext *self = context;
    int tag = self->gathers++ & TAG_MASK;
    Gathering g = {malloc(2 * (size_t)self->size * sizeof(MPI_Request)), malloc(bytes ? bytes : 1)};
    if (!g.requests || !g.message) {
        free(g.requests);
        free(g.message);
        return fail(EP_ERR_NO_MEMORY, "rank %d: bootstrap: out of memory", self->rank);
    }
    memcpy(g.message, in, bytes);
    memcpy((char *)out + (size_t)self->rank * bytes, in, bytes);
    EpStatus status = check(self, "MPI_Isend", post_gathering(self, &g, out, bytes, tag));
    if (status == EP_OK) status = finish_gathering(self, &g, seconds);
    end_gathering(self, &g);
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

/* ---- shared windows ------------------------------------------------------------------------ */

typedef struct SharedWindow {
    MPI_Comm comm;
    MPI_Win window;
} SharedWindow;

static char *aligned_64(char *address) {
    return (char *)(((uintptr_t)address + 63) & ~(uintptr_t)63);
}

/* Ranks of `comm` are ranks of the node in the same order; find where each lies. */
static EpStatus find_segments(const MpiContext *self, const SharedWindow *shared, void **segments) {
    MPI_Group everyone, here;
    MPI_Comm_group(self->comm, &everyone);
    MPI_Comm_group(shared->comm, &here);
    int code = MPI_SUCCESS;
    for (int r = 0; r < self->size && code == MPI_SUCCESS; r++) {
        int local, unit;
        MPI_Aint bytes;
        char *base = NULL;
        code = MPI_Group_translate_ranks(everyone, 1, &r, here, &local);
        segments[r] = NULL;
        if (code != MPI_SUCCESS || local == MPI_UNDEFINED) continue;
        code = MPI_Win_shared_query(shared->window, local, &bytes, &unit, &base);
        segments[r] = aligned_64(base);
    }
    MPI_Group_free(&everyone);
    MPI_Group_free(&here);
    return check(self, "MPI_Win_shared_query", code);
}

/* Each rank's part is apart from the others' (noncontig), so that it starts on a page of its own,
 * near its owner. One line more than asked for leaves room to align. */
static EpStatus open_window(const MpiContext *self, size_t bytes, SharedWindow *shared) {
    MPI_Info info;
    char *mine = NULL;
    MPI_Info_create(&info);
    MPI_Info_set(info, "alloc_shared_noncontig", "true");
    int code = MPI_Win_allocate_shared((MPI_Aint)(bytes + 64), 1, info, shared->comm, &mine,
                                       &shared->window);
    MPI_Info_free(&info);
    if (code != MPI_SUCCESS) {
        check(self, "MPI_Win_allocate_shared", code);
        return EP_ERR_NO_MEMORY;
    }
    memset(aligned_64(mine), 0, bytes);
    return check(self, "MPI_Win_lock_all", MPI_Win_lock_all(MPI_MODE_NOCHECK, shared->window));
}

static EpStatus mpi_share(void *context, int32_t node, size_t bytes, double seconds,
                          void **segments, void **memory) {
    MpiContext *self = context;
    MPI_Comm machine;
    SharedWindow *shared = calloc(1, sizeof(*shared));
    if (!shared) return fail(EP_ERR_NO_MEMORY, "rank %d: bootstrap: out of memory", self->rank);
    int code =
        MPI_Comm_split_type(self->comm, MPI_COMM_TYPE_SHARED, self->rank, MPI_INFO_NULL, &machine);
    if (code == MPI_SUCCESS) {
        code = MPI_Comm_split(machine, node, self->rank, &shared->comm);
        MPI_Comm_free(&machine);
    }
    EpStatus status = check(self, "MPI_Comm_split", code);
    if (status == EP_OK) {
        MPI_Comm_set_errhandler(shared->comm, MPI_ERRORS_RETURN);
        status = open_window(self, bytes, shared);
    }
    if (status == EP_OK) status = find_segments(self, shared, segments);
    /* Also where this rank has failed: the others are waiting. */
    EpStatus arrived = mpi_barrier(context, seconds);
    if (status == EP_OK) status = arrived;
    if (status == EP_OK)
        *memory = shared;
    else
        free(shared);
    return status;
}

/* Freeing a window is collective and without a deadline: with ranks missing, leave it to exit. */
static void mpi_share_free(void *context, void *memory, int together) {
    (void)context;
    SharedWindow *shared = memory;
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (together && !finalized) {
        MPI_Win_unlock_all(shared->window);
        MPI_Win_free(&shared->window);
        MPI_Comm_free(&shared->comm);
    }
    free(shared);
}

/* ---- messages ------------------------------------------------------------------------------ */

/* Requests travel in the caller's void *: no allocation while operations run. */
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
    (void)context;
    MPI_Request r = load_request(request);
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!finalized) {
        MPI_Cancel(&r);
        MPI_Request_free(&r);
    }
    *request = NULL;
}

/* ---- life ---------------------------------------------------------------------------------- */

static void mpi_destroy(void *context) {
    MpiContext *self = context;
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!finalized) MPI_Comm_free(&self->comm);
    free(self);
}

EpStatus ep_bootstrap_mpi(MPI_Comm comm, EpBootstrap *out) {
    if (!out) return fail(EP_ERR_NULL, "ep_bootstrap_mpi: out: expected a pointer, got NULL");
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
    EpStatus status = check(self, "MPI_Comm_dup", MPI_Comm_dup(comm, &self->comm));
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
                         .share = mpi_share,
                         .share_free = mpi_share_free,
                         .isend = mpi_isend,
                         .irecv = mpi_irecv,
                         .test = mpi_test,
                         .cancel = mpi_cancel,
                         .destroy = mpi_destroy};
    return EP_OK;
}
