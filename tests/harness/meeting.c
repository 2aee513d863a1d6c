/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/meeting.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/harness/check.h"

static EpStatus gather(void *context, const void *in, void *out, size_t bytes, double timeout) {
    Attendee *self = context;
    Meeting *meeting = self->meeting;
    int now = ++self->collectives;
    double end = seconds_now() + (timeout > self->patience ? timeout : self->patience);
    if (now == self->kill_before) kill(getpid(), SIGKILL);
    if (bytes > MEETING_ROOM) return ep_set_last_error(EP_ERR_BOOTSTRAP, "too many bytes");
    memcpy(meeting->bytes[now % 2][self->rank], in, bytes);
    __atomic_store_n(&meeting->entered[self->rank], now, __ATOMIC_RELEASE);
    for (int r = 0; r < MEETING_PLACES; r++) {
        if (!(meeting->ranks >> r & 1)) continue;
        while (__atomic_load_n(&meeting->entered[r], __ATOMIC_ACQUIRE) < now) {
            char missing[32];
            snprintf(missing, sizeof(missing), "rank %d is missing", r);
            if (seconds_now() > end) return ep_set_last_error(EP_ERR_TIMEOUT, missing);
            usleep(200);
        }
        memcpy(out, meeting->bytes[now % 2][r], bytes);
        out = (char *)out + bytes;
    }
    if (now == self->kill_after) kill(getpid(), SIGKILL);
    return EP_OK;
}

static EpStatus meet(void *context, double timeout) {
    char mine = 0, all[MEETING_PLACES];
    return gather(context, &mine, all, 1, timeout);
}

EpBootstrap meeting_bootstrap(Attendee *self, Meeting *meeting) {
    EpBootstrap b = EP_BOOTSTRAP_INIT;
    self->meeting = meeting, self->collectives = 0;
    b.rank = __builtin_popcount(meeting->ranks & ((1u << self->rank) - 1));
    b.size = __builtin_popcount(meeting->ranks), b.context = self;
    b.allgather = gather, b.barrier = meet;
    return b;
}
