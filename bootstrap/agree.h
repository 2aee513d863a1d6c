/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_AGREE_H
#define EP_BOOTSTRAP_AGREE_H

/**
 * Ranks introduce themselves when a group is created: whether their own arguments were in order,
 * what they were configured with, and where they run. All compare all introductions, and so all
 * come to the same verdict.
 */

#include "bootstrap/topology.h"
#include "runtime/config.h"

#define EP_AGREE_FIELDS 14

typedef struct EpIntroduction {
    EpStatus status;                /**< this rank's own checks */
    int64_t field[EP_AGREE_FIELDS]; /**< what must be equal */
    uint64_t id;                    /**< rank 0's becomes the group's */
    EpPlace place;
    char sentence[200]; /**< of a failed check */
} EpIntroduction;

/** Fill in the fields that must be equal. */
void ep_introduce_config(EpIntroduction *mine, const EpGroupConfig *config, int32_t num_ranks,
                         const EpSettings *settings);

/** Number the nodes in order of their first rank: nodes[size], returns how many. */
int32_t ep_introductions_nodes(const EpIntroduction *all, int32_t size, int32_t *nodes);

/** EP_OK if all ranks are in order and agree. */
EpStatus ep_introductions_check(const EpCall *call, const EpIntroduction *all, int32_t size);

#endif
