/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_TOPOLOGY_H
#define EP_BOOTSTRAP_TOPOLOGY_H

/**
 * Where ranks are: which share a node, the NUMA node and the number of CPUs of each. Read from
 * Linux, or pretended (setting EP_TOPOLOGY, with a machine that hwloc makes up) so that "2 nodes of
 * 8 cores" runs on a laptop. A pretended node never joins ranks of different machines.
 */

#include "runtime/settings.h"

/** What a rank finds out about itself and tells the others. */
typedef struct EpPlace {
    char machine[64];  /**< host name and boot id: equal on ranks of one machine */
    int32_t pretended; /**< node by EP_TOPOLOGY, else 0 */
    int32_t numa;      /**< -1 if its CPUs span several */
    int32_t cpus;      /**< CPUs it may run on */
} EpPlace;

/** Describe this rank. EP_ERR_SETTING if EP_TOPOLOGY is malformed. */
EpStatus ep_place_find(const EpSettingTopology *topology, int32_t rank, int32_t size, EpPlace *out);

int ep_place_same_node(const EpPlace *a, const EpPlace *b);

#endif
