/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_NETWORK_SOCKETS_H
#define EP_BOOTSTRAP_NETWORK_SOCKETS_H

/**
 * Messages over TCP, for bootstraps that have none: one connection for each pair of ranks on
 * different nodes. Where NCCL moves weights, also of ranks on one node: their watchers need it.
 *
 *     sockets.c           finds addresses, connects the ranks
 *     socket_messages.c   moves messages: the callbacks isend, irecv, test and cancel
 *
 * A message is its length (8 bytes), then its bytes. The messages of a connection are sent and
 * received in order, whatever their tag: a group uses one.
 *
 * A process that ends closes its connections, so its peers learn of it at once. A rank that finds
 * one closed still receives what was sent before. A send on it counts as done. Children of a fork
 * close their copies: else the peers would learn nothing as long as a child lives.
 */

#include "runtime/group.h"

#define EP_SOCKET_QUEUE 8 /* most messages of a connection under way in one direction */

/** A message under way. */
typedef struct EpTransfer {
    uint64_t length; /**< as it travels */
    char *data;
    size_t room; /**< of `data` */
    size_t done; /**< bytes that have been moved, those of `length` included */
    int busy;    /**< from isend or irecv until test or cancel */
    int complete;
} EpTransfer;

/** The messages of one direction. Number n is in entry n % EP_SOCKET_QUEUE. */
typedef struct EpTransfers {
    EpTransfer entry[EP_SOCKET_QUEUE];
    unsigned posted, completed;
} EpTransfers;

typedef struct EpConnection {
    int socket; /**< -1: none */
    int closed; /**< 1 once nothing more can be sent */
    EpTransfers send, receive;
} EpConnection;

typedef struct EpSockets {
    int32_t rank, size;
    int listener;           /**< -1: none */
    struct EpSockets *next; /**< of the process's open ones */
    EpConnection connection[];
} EpSockets;

/** Returns whether this rank and another one are connected, or are to connect where ranks join. */
static inline int ep_sockets_connect(const EpGroup *group, int32_t rank) {
    if (ep_config_joins(&group->config) && !ep_group_connects(group, rank)) return 0;
    int all = group->purpose == EP_FOR_WEIGHTS && group->backend->id == EP_BACKEND_CUDA;
    return all ? rank != group->rank : group->nodes.of[rank] != group->nodes.node;
}

/**
 * Collective over a group whose bootstrap sends no messages: connect its ranks. `*out` gets what
 * sends messages; destroy it with ep_bootstrap_destroy. It has only the four callbacks of messages.
 * The status is this rank's alone.
 */
EpStatus ep_sockets_open(EpGroup *group, EpBootstrap *out);

/**
 * The same in groups that processes may join. `reserve`, local: make what sends messages, without
 * connections. `connect`, collective: connect the ranks of which ep_group_connects speaks. The
 * status is this rank's alone; *found may be NULL then. `adopt`, once all ranks have succeeded: let
 * `messages` have the connections of the places that have changed. `discard` closes what is left.
 */
EpStatus ep_sockets_reserve(const EpGroup *group, EpBootstrap *messages);
EpStatus ep_sockets_connect_new(EpGroup *group, EpSockets **found);
void ep_sockets_adopt(const EpBootstrap *messages, EpSockets *found, const EpMask *changed);
void ep_sockets_discard(EpSockets *found);

/** The callbacks. `context` is an EpSockets. */
EpStatus ep_socket_isend(void *context, int32_t peer, int32_t tag, const void *data, size_t bytes,
                         void **request);
EpStatus ep_socket_irecv(void *context, int32_t peer, int32_t tag, void *data, size_t bytes,
                         void **request);
EpStatus ep_socket_test(void *context, void **request, int *done);
void ep_socket_cancel(void *context, void **request);

#endif
