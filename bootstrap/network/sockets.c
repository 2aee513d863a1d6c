/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connects the ranks of a group (ep_sockets_connect says which):
 *
 *   1. Each rank listens on a port of its own. The ranks gather ports, addresses and secrets.
 *   2. Each rank connects to all lower ones of these, in ascending order, and then accepts
 *      connections from all higher ones. Who connects sends a greeting with the other's secret, and
 *      waits for the answer. Rank 0 connects to nobody, so it answers; then rank 1 can go on, and
 * so forth: no ring of ranks wait for each other.
 *
 * Somebody else's connection has no secret, and is closed. A rank that fails closes its sockets,
 * so ranks that wait for its answer fail as well.
 */
#include "bootstrap/network/sockets.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bootstrap/bootstrap.h"
#include "runtime/wait.h"

#define MOST_ADDRESSES 8
/* Of the deadline: ranks that have connected wait in the next rendezvous, to which those that could
 * not still come in time. */
#define SHARE_TO_CONNECT 0.5
#define SECONDS_TO_CONNECT 10.0 /* to one address, where others may be tried */
#define SECONDS_TO_GREET 2.0    /* for whoever connects */
#define MOST_ARRIVALS 64

/* What a rank tells the others. Addresses are IPv6, or IPv4 mapped into it. */
typedef struct Card {
    uint8_t secret[16];
    struct in6_addr address[MOST_ADDRESSES];
    int32_t num_addresses;
    uint16_t port; /* in the network's order */
} Card;
_Static_assert(sizeof(Card) <= EP_RENDEZVOUS_BYTES, "the group has memory for it");

/* The first bytes in each direction. */
typedef struct Greeting {
    uint64_t group;
    int32_t rank, unused;
    uint8_t secret[16]; /* of the rank that receives it */
} Greeting;

/* ---- addresses ----------------------------------------------------------------------------- */

static int is_loopback(const struct ifaddrs *at) {
    return (at->ifa_flags & IFF_LOOPBACK) != 0;
}

/* Returns whether an interface has an address that peers may reach: any that is up, or the one
 * that LIBEP_INTERFACE names; of the loopback interface, only where `loopback` is asked for. */
static int is_wanted(const struct ifaddrs *at, const char *interface, int loopback) {
    if (!at->ifa_addr || !(at->ifa_flags & IFF_UP)) return 0;
    if (interface[0]) return strcmp(at->ifa_name, interface) == 0;
    return is_loopback(at) == loopback;
}

static int convert(const struct sockaddr *from, struct in6_addr *out) {
    if (from->sa_family == AF_INET6) {
        *out = ((const struct sockaddr_in6 *)(const void *)from)->sin6_addr;
        return !IN6_IS_ADDR_LINKLOCAL(out); /* means nothing without an interface */
    }
    if (from->sa_family != AF_INET) return 0;
    memset(out, 0, sizeof(*out));
    memset(&out->s6_addr[10], 0xff, 2);
    memcpy(&out->s6_addr[12], &((const struct sockaddr_in *)(const void *)from)->sin_addr, 4);
    return 1;
}

static void list_addresses(const char *interface, int loopback, Card *card) {
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all)) return;
    for (const struct ifaddrs *at = all; at && card->num_addresses < MOST_ADDRESSES;
         at = at->ifa_next)
        if (is_wanted(at, interface, loopback))
            card->num_addresses += convert(at->ifa_addr, &card->address[card->num_addresses]);
    freeifaddrs(all);
}

static EpStatus fail_system(const EpGroup *group, const char *what, int error) {
    return ep_fail(EP_ERR_SYSTEM, "rank %d: %s: messages between nodes: %s: %s", group->rank,
                   group->call, what, strerror(error));
}

static EpStatus find_addresses(const EpGroup *group, Card *card) {
    const char *interface = group->settings.interface.text;
    list_addresses(interface, 0, card);
    if (!card->num_addresses) list_addresses(interface, 1, card);
    if (card->num_addresses) return EP_OK;
    return ep_fail(
        EP_ERR_SYSTEM,
        "rank %d: %s: messages between nodes: expected a network interface that is up%s%s, "
        "got none",
        group->rank, group->call, interface[0] ? ", LIBEP_INTERFACE=" : "", interface);
}

/* ---- sockets ------------------------------------------------------------------------------- */

/* Make a socket for both families, or, on a system without IPv6, for IPv4. Returns -1 and errno. */
static int make_socket(int *family) {
    int off = 0;
    int made = socket(*family = AF_INET6, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (made >= 0) setsockopt(made, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    if (made >= 0 || errno != EAFNOSUPPORT) return made;
    return socket(*family = AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
}

/* Returns the bytes of the address in `out`. */
static socklen_t make_address(int family, const struct in6_addr *address, uint16_t port,
                              struct sockaddr_in6 *out) {
    memset(out, 0, sizeof(*out));
    if (family == AF_INET6) {
        out->sin6_family = AF_INET6, out->sin6_port = port, out->sin6_addr = *address;
        return sizeof(*out);
    }
    struct sockaddr_in *v4 = (struct sockaddr_in *)(void *)out;
    v4->sin_family = AF_INET, v4->sin_port = port;
    memcpy(&v4->sin_addr, &address->s6_addr[12], 4);
    return sizeof(*v4);
}

/* Listen on every address or, where the setting names an interface, on its first one. */
static EpStatus listen_to(const EpGroup *group, EpSockets *self, Card *card) {
    int family;
    struct sockaddr_in6 address;
    struct in6_addr any = {0};
    self->listener = make_socket(&family);
    if (self->listener < 0) return fail_system(group, "socket", errno);
    const struct in6_addr *from = group->settings.interface.text[0] ? &card->address[0] : &any;
    socklen_t bytes = make_address(family, from, 0, &address);
    struct sockaddr *plain = (struct sockaddr *)(void *)&address;
    if (bind(self->listener, plain, bytes) || listen(self->listener, SOMAXCONN) ||
        getsockname(self->listener, plain, &bytes))
        return fail_system(group, "listening", errno);
    card->port = address.sin6_port; /* at the same place in both families */
    if (getrandom(card->secret, sizeof(card->secret), 0) != (ssize_t)sizeof(card->secret))
        return fail_system(group, "getrandom", errno);
    return EP_OK;
}

/* Wait until a socket can be read or written. Returns 0, or ETIMEDOUT after `end`. */
static int wait_for(int socket, short events, double end) {
    struct pollfd one = {.fd = socket, .events = events};
    for (double left; (left = end - ep_clock()) > 0;) {
        int found = poll(&one, 1, left < 1 ? 1 + (int)(1e3 * left) : 1000);
        if (found > 0) return 0;
        if (found < 0 && errno != EINTR) return errno;
    }
    return ETIMEDOUT;
}

/* Send or receive all of `bytes`. Returns 0, or errno. */
static int move_all(int socket, void *data, size_t bytes, int sends, double end) {
    for (size_t done = 0; done < bytes;) {
        char *at = (char *)data + done;
        int error = wait_for(socket, sends ? POLLOUT : POLLIN, end);
        if (error) return error;
        ssize_t moved = sends ? send(socket, at, bytes - done, MSG_NOSIGNAL)
                              : recv(socket, at, bytes - done, 0);
        if (moved == 0) return ECONNRESET;
        if (moved < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) return errno;
        done += moved > 0 ? (size_t)moved : 0;
    }
    return 0;
}

static Greeting greet(const EpGroup *group, const Card *to) {
    Greeting mine = {.group = group->id, .rank = group->rank};
    memcpy(mine.secret, to->secret, sizeof(mine.secret));
    return mine;
}

static void adopt(EpSockets *self, int32_t peer, int socket) {
    int on = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    self->connection[peer].socket = socket;
}

/* ---- connecting to lower ranks ------------------------------------------------------------- */

/* Connect to one address. Returns the socket, or -1 and errno. */
static int connect_to(const struct in6_addr *to, uint16_t port, double end) {
    int family, error = 0;
    socklen_t bytes = sizeof(error);
    struct sockaddr_in6 address;
    int made = make_socket(&family);
    if (made < 0) return -1;
    socklen_t length = make_address(family, to, port, &address);
    if (family == AF_INET && !IN6_IS_ADDR_V4MAPPED(to))
        error = EAFNOSUPPORT;
    else if (connect(made, (struct sockaddr *)(void *)&address, length))
        error = errno == EINPROGRESS ? wait_for(made, POLLOUT, end) : errno;
    if (!error) getsockopt(made, SOL_SOCKET, SO_ERROR, &error, &bytes);
    if (!error) return made;
    close(made);
    errno = error;
    return -1;
}

/* Exchange greetings. The answer comes when the peer accepts connections. Returns 0, or errno. */
static int introduce(const EpGroup *group, const Card *cards, int32_t peer, int socket,
                     double end) {
    Greeting mine = greet(group, &cards[peer]), theirs;
    Greeting expected = greet(group, &cards[group->rank]);
    expected.rank = peer;
    int error = move_all(socket, &mine, sizeof(mine), 1, end);
    if (!error) error = move_all(socket, &theirs, sizeof(theirs), 0, end);
    return error || !memcmp(&theirs, &expected, sizeof(theirs)) ? error : EPROTO;
}

static EpStatus connect_lower(const EpGroup *group, EpSockets *self, const Card *cards,
                              int32_t peer, double end) {
    char text[INET6_ADDRSTRLEN] = "";
    int error = ETIMEDOUT;
    for (int i = 0; i < cards[peer].num_addresses && i < MOST_ADDRESSES && ep_clock() < end; i++) {
        double soon = ep_clock() + SECONDS_TO_CONNECT;
        int is_last = i + 1 == cards[peer].num_addresses;
        int made = connect_to(&cards[peer].address[i], cards[peer].port,
                              is_last || soon > end ? end : soon);
        inet_ntop(AF_INET6, &cards[peer].address[i], text, sizeof(text));
        error = made < 0 ? errno : introduce(group, cards, peer, made, end);
        if (!error) adopt(self, peer, made);
        if (!error) return EP_OK;
        if (made >= 0) close(made);
    }
    /* A peer that has given up closes its sockets. Whoever it waited for is missing in the
     * rendezvous that follows, whose error is reported after a timeout. */
    int gone = error == ETIMEDOUT || error == ECONNREFUSED || error == ECONNRESET;
    return ep_fail(
        gone ? EP_ERR_TIMEOUT : EP_ERR_SYSTEM,
        "rank %d: %s: messages between nodes: rank %d does not answer at %s, port %d: %s",
        group->rank, group->call, peer, text, ntohs(cards[peer].port), strerror(error));
}

/* ---- accepting connections from higher ranks ------------------------------------------------ */

/** Connections that have yet to say whose they are. Somebody else's may say nothing, so no rank
 * waits for one of them alone. */
typedef struct Arrivals {
    int count;
    struct pollfd poll[1 + MOST_ARRIVALS]; /* of the listener, then theirs */
    Greeting greeting[MOST_ARRIVALS];
    size_t heard[MOST_ARRIVALS]; /* bytes of the greeting */
    double end[MOST_ARRIVALS];
} Arrivals;

static void remove_arrival(Arrivals *a, int i) {
    int last = --a->count;
    a->poll[1 + i] = a->poll[1 + last];
    a->greeting[i] = a->greeting[last];
    a->heard[i] = a->heard[last], a->end[i] = a->end[last];
}

/* Wait until somebody connects or speaks, or has been silent for too long. Those for whom there is
 * no room wait in the listener's queue. Returns 0, or ETIMEDOUT after `end`. */
static int wait_for_arrivals(Arrivals *a, double end) {
    double now = ep_clock(), left = end - now;
    if (left <= 0) return ETIMEDOUT;
    for (int i = 0; i < a->count; i++)
        if (a->end[i] - now < left) left = a->end[i] - now;
    a->poll[0].events = a->count < MOST_ARRIVALS ? POLLIN : 0;
    int milliseconds = left < 0 ? 0 : left < 1 ? 1 + (int)(1e3 * left) : 1000;
    for (int i = 0; i <= a->count; i++)
        a->poll[i].revents = 0;
    return poll(a->poll, 1 + (nfds_t)a->count, milliseconds) < 0 && errno != EINTR ? errno : 0;
}

/* Accept one connection, if there is one. Returns 0, or errno. */
static int accept_arrival(Arrivals *a) {
    if (!(a->poll[0].revents & POLLIN)) return 0;
    int made = accept4(a->poll[0].fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (made < 0) return errno == EMFILE || errno == ENFILE ? errno : 0;
    int i = a->count++;
    a->poll[1 + i] = (struct pollfd){.fd = made, .events = POLLIN};
    a->heard[i] = 0, a->end[i] = ep_clock() + SECONDS_TO_GREET;
    return 0;
}

/* Receive what there is of a greeting. Returns 1 if it is complete, -1 if it will not be. */
static int hear(Arrivals *a, int i) {
    char *at = (char *)&a->greeting[i] + a->heard[i];
    size_t room = sizeof(a->greeting[i]) - a->heard[i];
    if (!a->poll[1 + i].revents) return ep_clock() < a->end[i] ? 0 : -1;
    ssize_t moved = recv(a->poll[1 + i].fd, at, room, 0);
    if (moved < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
    a->heard[i] += (size_t)moved;
    return moved == 0 ? -1 : (size_t)moved == room;
}

/* Answer a greeting. Returns 0 if it is no rank's that is expected. */
static int answer(const EpGroup *group, EpSockets *self, const Card *cards, int socket,
                  const Greeting *theirs) {
    Greeting expected = greet(group, &cards[group->rank]);
    int32_t peer = expected.rank = theirs->rank;
    if (memcmp(theirs, &expected, sizeof(expected)) || peer <= group->rank || peer >= group->size ||
        !ep_sockets_connect(group, peer) || self->connection[peer].socket >= 0)
        return 0;
    Greeting mine = greet(group, &cards[peer]);
    if (move_all(socket, &mine, sizeof(mine), 1, ep_clock() + SECONDS_TO_GREET)) return 0;
    adopt(self, peer, socket);
    return 1;
}

static void hear_arrivals(const EpGroup *group, EpSockets *self, const Card *cards, Arrivals *a) {
    for (int i = a->count - 1; i >= 0; i--) {
        int heard = hear(a, i), socket = a->poll[1 + i].fd;
        if (heard == 0) continue;
        if (heard < 0 || !answer(group, self, cards, socket, &a->greeting[i])) close(socket);
        remove_arrival(a, i);
    }
}

/* Returns the lowest rank above this one that has yet to connect, or the number of ranks. */
static int32_t first_missing(const EpGroup *group, const EpSockets *self) {
    int32_t r = group->rank + 1;
    while (r < group->size && (!ep_sockets_connect(group, r) || self->connection[r].socket >= 0))
        r++;
    return r;
}

static EpStatus accept_all(const EpGroup *group, EpSockets *self, const Card *cards, Arrivals *a,
                           double end) {
    for (int32_t missing; (missing = first_missing(group, self)) < group->size;) {
        int error = wait_for_arrivals(a, end);
        if (error == ETIMEDOUT)
            return ep_fail(
                EP_ERR_TIMEOUT,
                "rank %d: %s: messages between nodes: rank %d did not connect within %g s",
                group->rank, group->call, missing, SHARE_TO_CONNECT * group->timeout);
        hear_arrivals(group, self, cards, a);
        if (!error) error = accept_arrival(a);
        if (error) return fail_system(group, "accepting", error);
    }
    return EP_OK;
}

static EpStatus accept_higher(const EpGroup *group, EpSockets *self, const Card *cards,
                              double end) {
    Arrivals arrivals = {.count = 0};
    arrivals.poll[0].fd = self->listener;
    EpStatus status = accept_all(group, self, cards, &arrivals, end);
    for (int i = 0; i < arrivals.count; i++)
        close(arrivals.poll[1 + i].fd);
    return status;
}

static void close_socket(int *socket) {
    if (*socket >= 0) close(*socket);
    *socket = -1;
}

static void close_all(EpSockets *self) {
    close_socket(&self->listener);
    for (int32_t r = 0; r < self->size; r++)
        close_socket(&self->connection[r].socket);
}

/* ---- forks --------------------------------------------------------------------------------- */

static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;
static EpSockets *first_open;

static void before_fork(void) {
    pthread_mutex_lock(&open_lock);
}

static void after_fork(void) {
    pthread_mutex_unlock(&open_lock);
}

static void after_fork_in_child(void) {
    for (EpSockets *s = first_open; s; s = s->next)
        close_all(s);
    first_open = NULL;
    pthread_mutex_unlock(&open_lock);
}

static void watch_forks(void) {
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

static void note_open(EpSockets *self) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&open_lock);
    self->next = first_open, first_open = self;
    pthread_mutex_unlock(&open_lock);
}

static void forget_open(const EpSockets *self) {
    pthread_mutex_lock(&open_lock);
    for (EpSockets **at = &first_open; *at; at = &(*at)->next)
        if (*at == self) {
            *at = self->next;
            break;
        }
    pthread_mutex_unlock(&open_lock);
}

/* ---- life ---------------------------------------------------------------------------------- */

static void sockets_destroy(void *context) {
    forget_open(context);
    close_all(context);
    free(context);
}

static EpSockets *make_sockets(const EpGroup *group) {
    size_t peers = (size_t)group->size;
    EpSockets *self = calloc(1, sizeof(*self) + peers * sizeof(self->connection[0]));
    if (!self) return NULL;
    self->rank = group->rank, self->size = group->size, self->listener = -1;
    for (int32_t r = 0; r < group->size; r++)
        self->connection[r].socket = -1;
    note_open(self);
    return self;
}

static EpStatus connect_all(const EpGroup *group, EpSockets *self, const Card *cards) {
    double end = ep_clock() + group->timeout * SHARE_TO_CONNECT;
    for (int32_t r = 0; r < group->rank; r++)
        if (ep_sockets_connect(group, r)) EP_TRY(connect_lower(group, self, cards, r, end));
    return accept_higher(group, self, cards, end);
}

static int connects_any(const EpGroup *group) {
    for (int32_t r = 0; r < group->size; r++)
        if (ep_sockets_connect(group, r)) return 1;
    return 0;
}

/* The ranks of a group on one node gather, too: groups of a mesh may have to gather together. */
static EpStatus meet(EpGroup *group, EpSockets *self, EpStatus mine, Card *cards) {
    EpCall call = {group->call, group->rank};
    Card card = {.num_addresses = 0};
    int connects = connects_any(group);
    if (mine == EP_OK && connects) mine = find_addresses(group, &card);
    if (mine == EP_OK && connects) mine = listen_to(group, self, &card);
    EP_TRY(ep_group_agree(group, &call, mine));
    EP_TRY(ep_group_gather(group, &card, cards, sizeof(card)));
    return connects ? connect_all(group, self, cards) : EP_OK;
}

static EpStatus refuse_memory(const EpGroup *group) {
    return ep_fail(EP_ERR_NO_MEMORY, "rank %d: %s: memory: out of memory", group->rank,
                   group->call);
}

static EpBootstrap make_messages(const EpGroup *group, EpSockets *self) {
    return (EpBootstrap){.struct_size = sizeof(EpBootstrap),
                         .rank = group->rank,
                         .size = group->size,
                         .context = self,
                         .isend = ep_socket_isend,
                         .irecv = ep_socket_irecv,
                         .test = ep_socket_test,
                         .cancel = ep_socket_cancel,
                         .destroy = sockets_destroy};
}

EpStatus ep_sockets_connect_new(EpGroup *group, EpSockets **found) {
    EpSockets *self = make_sockets(group);
    Card *cards = calloc((size_t)group->size, sizeof(*cards));
    EpStatus status = self && cards ? EP_OK : refuse_memory(group);
    status = meet(group, self, status, cards);
    free(cards);
    if (self) close_socket(&self->listener);
    if (status != EP_OK && self) sockets_destroy(self);
    *found = status == EP_OK ? self : NULL;
    return status;
}

EpStatus ep_sockets_open(EpGroup *group, EpBootstrap *out) {
    EpSockets *self;
    EP_TRY(ep_sockets_connect_new(group, &self));
    *out = make_messages(group, self);
    return EP_OK;
}

EpStatus ep_sockets_reserve(const EpGroup *group, EpBootstrap *messages) {
    EpSockets *self = make_sockets(group);
    if (!self) return refuse_memory(group);
    *messages = make_messages(group, self);
    return EP_OK;
}

void ep_sockets_adopt(const EpBootstrap *messages, EpSockets *found, const EpMask *changed) {
    EpSockets *self = messages->context;
    for (int32_t r = 0; r < self->size; r++) {
        if (!ep_mask_has(changed, r)) continue;
        close_socket(&self->connection[r].socket);
        self->connection[r] = found->connection[r];
        found->connection[r].socket = -1;
    }
}

void ep_sockets_discard(EpSockets *found) {
    if (found) sockets_destroy(found);
}
