/* SPDX-License-Identifier: Apache-2.0 */
/* Bootstraps without messages on several pretended nodes: libep connects the ranks over TCP. */
#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "bootstrap/network/sockets.h"
#include "tests/cases/run.h"
#include "tests/harness/bootstraps.h"
#include "tests/harness/ranked.h"

#define SOON 20.0 /* below the deadlines */

static void use_loopback(void) {
    setenv("LIBEP_INTERFACE", "lo", 1);
    be_quiet();
}

TestSuite(bootstrap_sockets, .init = use_loopback);

/* Whole cases, whose expected results know the nodes. */
static void run_cases(const EpBootstrap *bootstrap, const char *topology, const char *nodes) {
    EpBootstrap own = gathers_alone(bootstrap);
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", topology);
    for (int layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_RANK_MAJOR; layout++) {
        Case c = case_of("ranks=%d nodes=%s experts=11 top_k=4 layout=%d weighted=1 scale_bytes=8 "
                         "max_tokens=30 seed=%d",
                         bootstrap->size, nodes, layout, layout);
        run_case(&own, &c);
    }
}

RankTest(bootstrap_sockets, two_nodes, 4, run_cases(bootstrap, "2", "0011"));
RankTest(bootstrap_sockets, every_rank_a_node, 5, run_cases(bootstrap, "5", "01234"));
RankTest(bootstrap_sockets, uneven_nodes, 5, run_cases(bootstrap, "3,1,3,3,0", "31330"));
ThreadTest(bootstrap_sockets, any_interface, 3) {
    set_on_ranks(bootstrap, "LIBEP_INTERFACE", "");
    run_cases(bootstrap, "0,1,0", "010");
}

/* Messages that are far larger than what a connection buffers, in both directions at once. */
ThreadTest(bootstrap_sockets, large_rounds, 2) {
    EpBootstrap own = gathers_alone(bootstrap);
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "2");
    Case c = case_of("ranks=2 nodes=01 experts=4 top_k=4 hidden=8192 max_tokens=%d spread=full "
                     "weighted=1",
                     TESTS_SANITIZED ? 100 : 400);
    run_case(&own, &c);
}

/* Groups that live at the same time have connections of their own. */
ThreadTest(bootstrap_sockets, two_groups, 3) {
    EpBootstrap own = gathers_alone(bootstrap);
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "3");
    Case c = case_of("ranks=3 nodes=012 weighted=1 seed=4");
    Step first = open_step(&own, &c), second = open_step(&own, &c);
    for (int i = 0; i < 3; i++) {
        step_all(&first);
        step_all(&second);
    }
    close_step(&second);
    close_step(&first);
}

/* ---- forks ---- */

static int count_sockets(void) {
    int count = 0;
    for (int fd = 0; fd < 1024; fd++) {
        struct stat facts;
        count += fstat(fd, &facts) == 0 && S_ISSOCK(facts.st_mode);
    }
    return count;
}

/* A child has no connection, and its parent's group goes on. */
ThreadTest(bootstrap_sockets, children_close_their_copies, 3) {
    EpBootstrap own = gathers_alone(bootstrap);
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "3");
    Case c = case_of("ranks=3 nodes=012 weighted=1 seed=4");
    int before = count_sockets(), status = 0;
    bootstrap->barrier(bootstrap->context, 60);
    Step step = open_step(&own, &c);
    bootstrap->barrier(bootstrap->context, 60);
    if (bootstrap->rank == 0) {
        int here = count_sockets() - before;
        CHECK(here == 6, "%d sockets instead of one for each of two peers of three ranks", here);
        pid_t child = fork();
        if (child == 0) _exit(count_sockets() - before);
        REQUIRE(child > 0 && waitpid(child, &status, 0) == child, "no child");
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child has %d sockets",
              WEXITSTATUS(status));
    }
    step_all(&step);
    close_step(&step);
}

/* ---- refused ---- */

static void expect_refusal(const EpBootstrap *own, EpStatus status, const char *sentence) {
    EpGroupConfig config = group_config(own->size);
    config.timeout_seconds = 40;
    double begin = seconds_now();
    CHECK_NO_GROUP(own, &config, status, sentence);
    CHECK(seconds_now() - begin < SOON, "it took %.1f s", seconds_now() - begin);
}

/* Only one rank has no messages: the others do not wait for it. */
ThreadTest(bootstrap_sockets, only_one_rank_has_no_messages, 4) {
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "2");
    EpBootstrap own = bootstrap->rank == 3 ? gathers_alone(bootstrap) : *bootstrap;
    own.share = bootstrap->share, own.share_free = bootstrap->share_free;
    expect_refusal(&own, EP_ERR_MISMATCH, "bootstrap.isend being given");
}

ThreadTest(bootstrap_sockets, no_such_interface, 2) {
    EpBootstrap own = gathers_alone(bootstrap);
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "2");
    set_on_ranks(bootstrap, "LIBEP_INTERFACE", "eth77");
    expect_refusal(&own, EP_ERR_SYSTEM, "LIBEP_INTERFACE=eth77");
}

/* Ranks on one node need no network. */
ThreadTest(bootstrap_sockets, one_node_needs_no_interface, 2) {
    EpBootstrap own = gathers_alone(bootstrap);
    set_on_ranks(bootstrap, "LIBEP_INTERFACE", "eth77");
    run_case(&own, &(Case){.ranks = 2, .weighted = 1});
}

/* ---- a stranger ---- */

/* Sits between a rank and the others in the gather of addresses, whose bytes it can read: it
 * connects to every rank's port, and says something else than a rank would. */
typedef struct Listened {
    int rank;
    int each; /* strangers at each port; several: they say nothing */
    int strangers;
} Listened;

enum { MOST_STRANGERS = 64 };
static int stranger[MOST_STRANGERS];

/* Connect to a port. */
static void disturb_one(const struct sockaddr_in6 *address, socklen_t bytes, int speaks, int *out) {
    static const char rubbish[64] = "GET / HTTP/1.1\r\n\r\n";
    *out = socket(address->sin6_family, SOCK_STREAM, 0);
    if (!connect(*out, (const struct sockaddr *)(const void *)address, bytes) && speaks)
        (void)!write(*out, rubbish, sizeof(rubbish));
}

/* Connect to each port of this process that listens on the loopback interface. */
static int disturb(int each) {
    int count = 0;
    for (int fd = 3; fd < 256 && count < MOST_STRANGERS; fd++) {
        struct sockaddr_in6 address;
        socklen_t bytes = sizeof(address), size = sizeof(int);
        int listens = 0;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) || !listens) continue;
        if (getsockname(fd, (struct sockaddr *)(void *)&address, &bytes)) continue;
        for (int i = 0; i < each && count < MOST_STRANGERS; i++)
            disturb_one(&address, bytes, each == 1, &stranger[count++]);
    }
    return count;
}

static EpStatus listened_gather(void *test, const Wrapped *wrapped, const void *in, void *out,
                                size_t bytes, double timeout) {
    Listened *self = test;
    EpStatus status = forward_gather(wrapped, in, out, bytes, timeout);
    if (in && self->rank == 0) self->strangers += disturb(self->each);
    return status;
}

static void run_disturbed(const EpBootstrap *bootstrap, int each) {
    Listened self = {.rank = bootstrap->rank, .each = each};
    Wrapped wrapped = {.gather = listened_gather, .test = &self};
    EpBootstrap own = gathers_alone(bootstrap);
    wrap_bootstrap(&own, &wrapped);
    set_on_ranks(bootstrap, "LIBEP_TOPOLOGY", "3");
    double begin = seconds_now();
    run_case(&own, &(Case){.ranks = 3, .nodes = "012", .weighted = 1});
    CHECK(seconds_now() - begin < SOON, "it took %.1f s", seconds_now() - begin);
    if (bootstrap->rank == 0) CHECK(self.strangers >= each, "nobody was disturbed");
    for (int i = 0; bootstrap->rank == 0 && i < MOST_STRANGERS && stranger[i]; i++)
        close(stranger[i]);
}

/* Others that connect to the ports are sent away, and the group is made. */
RankTest(bootstrap_sockets, strangers_are_sent_away, 3, run_disturbed(bootstrap, 1));

/* No rank waits for them. */
RankTest(bootstrap_sockets, silent_strangers_are_not_waited_for, 3, run_disturbed(bootstrap, 8));

/* ---- a peer that ends ---- */

/* Rank 0's end of a connection to rank 1, whose end is *other. */
static EpSockets *open_pair(int *other) {
    int ends[2];
    EpSockets *self = calloc(1, sizeof(*self) + 2 * sizeof(self->connection[0]));
    if (!self || socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends)) abort();
    self->size = 2, self->listener = -1;
    self->connection[0].socket = -1, self->connection[1].socket = ends[0];
    *other = ends[1];
    return self;
}

/* Its last message is received, and what is sent to it counts as sent, although more is awaited. */
SoloTest(bootstrap_sockets, last_message_of_a_peer_that_ends) {
    static const char said[] = "the last words";
    uint64_t length = sizeof(said);
    char first[32], second[32];
    void *send = NULL, *receive[2] = {NULL, NULL};
    int other, done = 0;
    EpSockets *self = open_pair(&other);
    CHECK_OK(ep_socket_irecv(self, 1, 0, first, sizeof(first), &receive[0]));
    CHECK_OK(ep_socket_irecv(self, 1, 0, second, sizeof(second), &receive[1]));
    CHECK_OK(ep_socket_isend(self, 1, 0, said, sizeof(said), &send));
    CHECK(write(other, &length, sizeof(length)) == sizeof(length) &&
              write(other, said, sizeof(said)) == sizeof(said),
          "no message");
    close(other);
    CHECK_OK(ep_socket_test(self, &send, &done));
    CHECK(done && !send, "the message to it is still being sent");
    CHECK_OK(ep_socket_test(self, &receive[0], &done));
    CHECK(done && !receive[0] && !strcmp(first, said), "its last message was not received");
    CHECK_REFUSED(ep_socket_test(self, &receive[1], &done), EP_ERR_PEER, "closed its connection");
    close(self->connection[1].socket);
    free(self);
}
