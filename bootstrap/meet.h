/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_MEET_H
#define EP_BOOTSTRAP_MEET_H

/**
 * Meetings of a group's ranks over its bootstrap. What may fail on one rank alone is told to all
 * before anybody goes on, so that all come to the same verdict.
 */

#include "runtime/group.h"

/** Whether a rank stands well; if not, why. The beginning of whatever it brings to a meeting. */
typedef struct EpVerdict {
    EpStatus status;
    char sentence[200];
} EpVerdict;

/** This thread's verdict: `status`, and its last sentence where that is an error. */
EpVerdict ep_verdict(EpStatus status);

/** Gather `bytes` bytes of every rank into all[size]. A failure marks the group as lost: its ranks
 *  may be out of step from there on. */
EpStatus ep_group_gather(EpGroup *group, const void *mine, void *all, size_t bytes);

/**
 * Of what was gathered, `stride` bytes for each rank beginning with its verdict: this rank's own
 * status and sentence if it does not stand well, EP_ERR_PEER quoting another's if that does not.
 */
EpStatus ep_verdicts_check(const EpCall *call, const void *all, size_t stride, int32_t size);

/** Collective: do all ranks stand well? Both of the above for a status alone. A rank that has
 * failed in a group that is lost does not wait for the others once more. */
EpStatus ep_group_agree(EpGroup *group, const EpCall *call, EpStatus mine);
/** The same with another deadline than the group's. */
EpStatus ep_group_agree_within(EpGroup *group, const EpCall *call, EpStatus mine, double seconds);

#endif
