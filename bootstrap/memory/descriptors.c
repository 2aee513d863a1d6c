/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each rank has a datagram socket with a random name and tells the others name and secret. It then
 * sends a datagram with its descriptor to each of them. Sockets have short queues, so sending and
 * receiving take turns: no rank waits for one that waits for it. A datagram without the secret is
 * somebody else's.
 */
#include "bootstrap/memory/descriptors.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "runtime/wait.h"

/* What ranks gather. */
typedef struct Card {
    uint64_t name, secret;
} Card;

typedef struct Letter {
    uint64_t secret; /* of who receives it */
    int32_t from, unused;
} Letter;

typedef struct Exchange {
    EpGroup *group;
    Card cards[EP_MAX_RANKS];
    int socket, mine;
    int *found;
    char sent[EP_MAX_RANKS];
} Exchange;

static int is_peer(const EpGroup *group, int32_t rank) {
    return group->nodes.of[rank] == group->nodes.node && ep_group_connects(group, rank);
}

/* Sockets whose names begin with a zero are in no file system. Returns the address's bytes. */
static socklen_t make_address(const Card *card, struct sockaddr_un *out) {
    memset(out, 0, sizeof(*out));
    out->sun_family = AF_UNIX;
    int length = snprintf(out->sun_path + 1, sizeof(out->sun_path) - 1, "libep-%016llx",
                          (unsigned long long)card->name);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static EpStatus fail_system(const EpGroup *group, const char *what) {
    return ep_fail(EP_ERR_SYSTEM, "rank %d: %s: giving memory to ranks of this node: %s: %s",
                   group->rank, group->call, what, strerror(errno));
}

static EpStatus open_socket(Exchange *x, Card *card) {
    struct sockaddr_un address;
    if (getrandom(card, sizeof(*card), 0) != (ssize_t)sizeof(*card))
        return fail_system(x->group, "getrandom");
    socklen_t bytes = make_address(card, &address);
    x->socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (x->socket < 0) return fail_system(x->group, "socket");
    if (bind(x->socket, (struct sockaddr *)(void *)&address, bytes))
        return fail_system(x->group, "bind");
    return EP_OK;
}

/* A descriptor travels beside the bytes of a message. */
typedef union Ancillary {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr aligned;
} Ancillary;

/* Returns 0 if the rank's queue is full, or the rank is gone: then it is missing elsewhere, too. */
static int send_letter(const Exchange *x, int32_t rank) {
    struct sockaddr_un address;
    Letter letter = {.secret = x->cards[rank].secret, .from = x->group->rank};
    Ancillary beside = {{0}};
    struct iovec part = {&letter, sizeof(letter)};
    struct msghdr message = {.msg_name = &address,
                             .msg_namelen = make_address(&x->cards[rank], &address),
                             .msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = beside.bytes,
                             .msg_controllen = sizeof(beside.bytes)};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(x->mine));
    memcpy(CMSG_DATA(header), &x->mine, sizeof(x->mine));
    return sendmsg(x->socket, &message, MSG_NOSIGNAL) == (ssize_t)sizeof(letter);
}

/* Receive one letter. Returns 0 if there is none. */
static int receive_letter(Exchange *x) {
    Letter letter;
    Ancillary beside;
    int descriptor = -1;
    struct iovec part = {&letter, sizeof(letter)};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = beside.bytes,
                             .msg_controllen = sizeof(beside.bytes)};
    ssize_t bytes = recvmsg(x->socket, &message, MSG_CMSG_CLOEXEC);
    if (bytes < 0) return 0;
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int)))
        memcpy(&descriptor, CMSG_DATA(header), sizeof(descriptor));
    int is_expected = bytes == (ssize_t)sizeof(letter) && descriptor >= 0 && letter.from >= 0 &&
                      letter.from < x->group->size &&
                      letter.secret == x->cards[x->group->rank].secret &&
                      is_peer(x->group, letter.from) && x->found[letter.from] < 0;
    if (is_expected)
        x->found[letter.from] = descriptor;
    else if (descriptor >= 0)
        close(descriptor);
    return 1;
}

/* Returns a rank that is missing, or -1. */
static int32_t exchange_some(Exchange *x) {
    int32_t missing = -1;
    while (receive_letter(x))
        ;
    for (int32_t r = 0; r < x->group->size; r++) {
        if (!is_peer(x->group, r)) continue;
        if (!x->sent[r]) x->sent[r] = (char)send_letter(x, r);
        if (!x->sent[r] || x->found[r] < 0) missing = r;
    }
    return missing;
}

static EpStatus exchange_all(Exchange *x) {
    enum { MILLISECONDS = 1 }; /* between two attempts to send */
    double end = ep_clock() + x->group->timeout;
    for (int32_t missing; (missing = exchange_some(x)) >= 0;) {
        struct pollfd one = {.fd = x->socket, .events = POLLIN};
        if (ep_clock() > end)
            return ep_fail(EP_ERR_TIMEOUT,
                           "rank %d: %s: rank %d did not give its memory to this rank, or take "
                           "this rank's, within %g s",
                           x->group->rank, x->group->call, missing, x->group->timeout);
        (void)poll(&one, 1, MILLISECONDS);
    }
    return EP_OK;
}

EpStatus ep_descriptors_exchange(EpGroup *group, const EpCall *call, EpStatus status, int mine,
                                 int *found) {
    Exchange x = {.group = group, .socket = -1, .mine = mine, .found = found};
    Card card = {0, 0};
    for (int32_t r = 0; r < group->size; r++)
        found[r] = -1;
    if (status == EP_OK) status = open_socket(&x, &card);
    status = ep_group_agree(group, call, status);
    if (status == EP_OK) status = ep_group_gather(group, &card, x.cards, sizeof(card));
    if (status == EP_OK) status = ep_group_agree(group, call, exchange_all(&x));
    if (x.socket >= 0) close(x.socket);
    return status;
}
