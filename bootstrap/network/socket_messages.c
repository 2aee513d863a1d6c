/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "bootstrap/network/sockets.h"

/* Requests are entries of queues, so a request tells its queue and its connection. */

/* ---- moving bytes -------------------------------------------------------------------------- */

/* The parts of a message that have not been moved. Returns their number. */
static int remaining(EpTransfer *t, struct iovec parts[2]) {
    size_t head = sizeof(t->length);
    int count = 0;
    if (t->done < head)
        parts[count++] = (struct iovec){(char *)&t->length + t->done, head - t->done};
    size_t moved = t->done > head ? t->done - head : 0;
    if (t->length > moved) parts[count++] = (struct iovec){t->data + moved, t->length - moved};
    return count;
}

static EpTransfer *next_transfer(EpTransfers *queue) {
    if (queue->completed == queue->posted) return NULL;
    return &queue->entry[queue->completed % EP_SOCKET_QUEUE];
}

static void complete(EpTransfers *queue, EpTransfer *t) {
    t->complete = 1;
    queue->completed++;
}

static int would_block(int error) {
    return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

/* Send what the connection takes. What a closed connection does not take counts as sent: its peer
 * has gone, which receiving reports. */
static void send_some(EpConnection *c) {
    for (EpTransfer *t; (t = next_transfer(&c->send));) {
        struct iovec parts[2];
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = (size_t)remaining(t, parts)};
        ssize_t moved = c->closed ? 0 : sendmsg(c->socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (moved < 0 && would_block(errno)) return;
        if (moved < 0) c->closed = 1;
        t->done += moved > 0 ? (size_t)moved : 0;
        if (c->closed || t->done == sizeof(t->length) + t->length) complete(&c->send, t);
    }
}

static EpStatus fail_closed(const EpSockets *self, int32_t peer) {
    return ep_fail(EP_ERR_PEER,
                   "rank %d: bootstrap: rank %d has closed its connection, as a process does that "
                   "ends",
                   self->rank, peer);
}

/* Receive the length of a message alone: it says how many bytes follow. */
static ssize_t receive_part(const EpConnection *c, EpTransfer *t) {
    size_t head = sizeof(t->length);
    if (t->done < head)
        return recv(c->socket, (char *)&t->length + t->done, head - t->done, MSG_DONTWAIT);
    return recv(c->socket, t->data + (t->done - head), head + t->length - t->done, MSG_DONTWAIT);
}

static EpStatus receive_some(EpSockets *self, int32_t peer) {
    EpConnection *c = &self->connection[peer];
    for (EpTransfer *t; (t = next_transfer(&c->receive));) {
        ssize_t moved = receive_part(c, t);
        if (moved < 0 && would_block(errno)) return EP_OK;
        if (moved <= 0) return fail_closed(self, peer);
        t->done += (size_t)moved;
        if (t->done < sizeof(t->length)) continue;
        if (t->length > t->room)
            return ep_fail(EP_ERR_ORDER,
                           "rank %d: bootstrap: expected a message of at most %zu bytes from rank "
                           "%d, got %llu",
                           self->rank, t->room, peer, (unsigned long long)t->length);
        if (t->done == sizeof(t->length) + t->length) complete(&c->receive, t);
    }
    return EP_OK;
}

/* ---- callbacks ----------------------------------------------------------------------------- */

static EpStatus post(EpSockets *self, int32_t peer, EpTransfers *queue, EpTransfer transfer,
                     void **request) {
    EpTransfer *t = &queue->entry[queue->posted % EP_SOCKET_QUEUE];
    if (t->busy)
        return ep_fail(EP_ERR_BOOTSTRAP,
                       "rank %d: bootstrap: expected at most %d messages under way to or from rank "
                       "%d, got more",
                       self->rank, EP_SOCKET_QUEUE, peer);
    *t = transfer;
    t->busy = 1;
    queue->posted++;
    *request = t;
    return EP_OK;
}

EpStatus ep_socket_isend(void *context, int32_t peer, int32_t tag, const void *data, size_t bytes,
                         void **request) {
    EpSockets *self = context;
    EpConnection *c = &self->connection[peer];
    (void)tag;
    EpTransfer transfer = {.length = bytes, .data = (char *)(uintptr_t)data, .room = bytes};
    EP_TRY(post(self, peer, &c->send, transfer, request));
    send_some(c);
    return EP_OK;
}

EpStatus ep_socket_irecv(void *context, int32_t peer, int32_t tag, void *data, size_t bytes,
                         void **request) {
    EpSockets *self = context;
    (void)tag;
    EpTransfer transfer = {.data = data, .room = bytes};
    return post(self, peer, &self->connection[peer].receive, transfer, request);
}

/* Returns the rank of the connection that a request belongs to. */
static int32_t peer_of(const EpSockets *self, const EpTransfer *t) {
    return (int32_t)(((const char *)t - (const char *)self->connection) /
                     (ptrdiff_t)sizeof(self->connection[0]));
}

static int is_send(const EpConnection *c, const EpTransfer *t) {
    return t < c->send.entry + EP_SOCKET_QUEUE;
}

/* A connection may end with a later message than this one, or while this one is sent: who receives
 * learns of it. */
EpStatus ep_socket_test(void *context, void **request, int *done) {
    EpSockets *self = context;
    EpTransfer *t = *request;
    *done = !t;
    if (!t) return EP_OK;
    int32_t peer = peer_of(self, t);
    EpConnection *c = &self->connection[peer];
    send_some(c);
    EpStatus status = receive_some(self, peer);
    *done = t->complete;
    if (*done) t->busy = 0, *request = NULL;
    return *done || is_send(c, t) ? EP_OK : status;
}

/* A message that has begun cannot be taken back, and nothing may follow its part: so the connection
 * ends. Canceled messages are those of groups that have failed. */
void ep_socket_cancel(void *context, void **request) {
    EpSockets *self = context;
    EpTransfer *t = *request;
    EpConnection *c = &self->connection[peer_of(self, t)];
    if (!t->complete) {
        c->closed = 1;
        shutdown(c->socket, SHUT_RDWR);
    }
    t->busy = 0;
    *request = NULL;
}
