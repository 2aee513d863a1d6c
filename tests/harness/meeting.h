/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_MEETING_H
#define TESTS_HARNESS_MEETING_H

/**
 * A bootstrap for processes that share memory: some of them meet, any of which may be killed.
 */

#include <stdint.h>

#include "ep/ep.h"

enum { MEETING_PLACES = 8, MEETING_ROOM = 4096 };

/** In shared memory, zeroed. Contributions of two collectives: no rank is more than one ahead of
 *  another. */
typedef struct Meeting {
    uint32_t ranks;              /**< that meet */
    int entered[MEETING_PLACES]; /**< collectives that each has entered */
    char bytes[2][MEETING_PLACES][MEETING_ROOM];
} Meeting;

/** A process in a meeting. */
typedef struct Attendee {
    Meeting *meeting;
    int rank, collectives;
    int kill_before, kill_after; /**< numbers of a collective, from 1; 0: never */
    double patience;             /**< seconds that a collective waits at least */
} Attendee;

/** Returns the bootstrap of the ranks in `meeting` for one of them, in ascending order. */
EpBootstrap meeting_bootstrap(Attendee *self, Meeting *meeting);

#endif
