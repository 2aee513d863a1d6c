/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CONFIG_H
#define EP_RUNTIME_CONFIG_H

/**
 * What a group's configuration means: which values are allowed, and what follows from them.
 */

#include "runtime/layout.h"
#include "runtime/nodes.h"
#include "runtime/settings.h"
#include "runtime/status.h"

/** Copy a caller's configuration and check it. It may have the size of an earlier version: fields
 *  that it lacks get their defaults. */
EpStatus ep_config_read(const EpCall *call, const EpGroupConfig *given, int32_t num_ranks,
                        EpGroupConfig *out);

/** Check config.timeout_seconds: EP_DEFAULT, or a number above 0. */
EpStatus ep_config_check_timeout(const EpCall *call, double seconds);

/** Check config.num_sms of a group or a handle: EP_DEFAULT or at least 2. */
EpStatus ep_config_check_sms(const EpCall *call, int32_t num_sms);

/** Returns where the physical experts are. */
EpPlacement ep_config_placement(const EpGroupConfig *config, int32_t num_ranks);

/** Returns whether processes may join a group. */
static inline int ep_config_joins(const EpGroupConfig *config) {
    return config->max_ranks != EP_DEFAULT;
}

/** Returns the places of a group that has `num_ranks` ranks at first: R. */
static inline int32_t ep_config_places(const EpGroupConfig *config, int32_t num_ranks) {
    return ep_config_joins(config) ? config->max_ranks : num_ranks;
}

/** Returns whether a group has a table of copies, and routes by it. */
static inline int ep_config_has_copies(const EpGroupConfig *config) {
    return config->num_physical != EP_DEFAULT;
}

/** Returns the bytes of a group's table of copies, 0 if it has none. */
int64_t ep_config_copies_bytes(const EpGroupConfig *config, int32_t num_ranks);

/** Features that a backend may lack: bits of EpBackendOps.offers. */
#define EP_OFFERS_LATENCY 1u
#define EP_OFFERS_QUANT 2u         /* EpHandleConfig.quant */
#define EP_OFFERS_SCALE_COLUMNS 4u /* EP_SCALES_BY_COLUMN */
#define EP_OFFERS_SOURCE_COUNTS 8u /* EpPlanTensors.source_counts */
#define EP_OFFERS_AUTO_LATENCY 16u /* EP_MODE_AUTO may be latency mode: see ep_backend_offers */

#define EP_OFFERS_BY_NAME 32u /* latency mode, but such a group has sets only if it is named */

/** Returns THROUGHPUT or LATENCY. `static_size`: the receive buffers' size does not depend on the
 *  routing. */
EpMode ep_config_mode(EpMode wish, int32_t max_tokens, int static_size, unsigned offers);

/** Returns the sets of buffers of latency mode that a group has, whose backend offers these. */
int32_t ep_config_latency_sets(const EpGroupConfig *config, unsigned offers);

/** Returns the bytes of the largest record that travels in any operation of a group. */
int64_t ep_config_record_bytes(const EpGroupConfig *config);

/** Returns the nodes that ep_group_memory counts with for a group of `num_ranks` ranks. */
EpNodeSizes ep_config_nodes(const EpGroupConfig *config, int32_t num_ranks,
                            const EpSettings *settings);

/** Returns the tokens of a rank that another node gets in one step, at most. */
int32_t ep_config_node_rows(const EpGroupConfig *config);

/**
 * Set limit, chunk, message and latency of a group whose other sizes are set. A message of
 * `message` places crosses the network at a time, and at most LIBEP_NODE_CHUNK bytes leave a rank
 * at a time. A step of max_tokens has at least four messages, so that little is left to do when the
 * last one arrives, unless they would be small: what an exchange costs besides its bytes is then no
 * longer small. There are as many chunks of the rank's tokens as messages: network, NVLink and
 * fan-out overlap chunk by chunk.
 */
void ep_config_chunks(const EpGroupConfig *config, const EpSettings *settings, EpNodeSizes *out);

/** Returns the timeout in seconds: the configuration's, else the setting's. */
double ep_config_timeout(const EpGroupConfig *config, const EpSettings *settings);

#endif
