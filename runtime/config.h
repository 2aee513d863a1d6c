/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CONFIG_H
#define EP_RUNTIME_CONFIG_H

/**
 * What a group's configuration means: which values are allowed, and the sizes that follow from it.
 */

#include "runtime/placement.h"
#include "runtime/settings.h"
#include "runtime/status.h"

/** Copy a caller's configuration, which may be of the size it had in an earlier version: fields it
 *  does not have get their defaults. And check it. */
EpStatus ep_config_read(const EpCall *call, const EpGroupConfig *given, int32_t num_ranks,
                        EpGroupConfig *out);

EpPlacement ep_config_placement(const EpGroupConfig *config, int32_t num_ranks);

/** What a backend need not have: bits of EpBackendOps.offers. */
#define EP_OFFERS_LATENCY 1u
#define EP_OFFERS_QUANT 2u         /* EpHandleConfig.quant */
#define EP_OFFERS_SCALE_COLUMNS 4u /* EP_SCALES_BY_COLUMN */
#define EP_OFFERS_SOURCE_COUNTS 8u /* EpPlanTensors.source_counts */

/** THROUGHPUT or LATENCY. `static_size`: the receive buffers' size is known before routing is. */
EpMode ep_config_mode(EpMode wish, int32_t max_tokens, int static_size, unsigned offers);

/** Deadline in force: the configuration's, else the setting's. */
double ep_config_timeout(const EpGroupConfig *config, const EpSettings *settings);

/** Staging bytes per rank on the host backend. */
int64_t ep_config_stage_bytes(const EpGroupConfig *config, int32_t num_ranks,
                              const EpSettings *settings);

/**
 * A token on its way between ranks: its row, one float per k, its scales; each part starts on 16
 * bytes. Shared by the code that writes records and the code that sizes their staging.
 */
typedef struct EpRecord {
    int64_t weights; /**< offset of the K floats; the row is at 0 */
    int64_t scales;  /**< offset */
    int64_t bytes;   /**< distance of records */
} EpRecord;

EpRecord ep_record(int64_t row_bytes, int64_t num_weights, int64_t scale_bytes);

/** A token's routing on its way to one rank: token, then K local experts, -1 where elsewhere. */
static inline int64_t ep_route_words(int64_t top_k) {
    return 1 + top_k;
}

/** Head of a routing message: number of records, of all rounds' records, then L counts. */
#define EP_ROUTE_HEAD_WORDS 2

static inline int64_t ep_round_up(int64_t value, int64_t unit) {
    return (value + unit - 1) / unit * unit;
}

static inline int64_t ep_min(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t ep_max(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static inline int ep_is_power_of_two(int64_t value) {
    return value > 0 && (value & (value - 1)) == 0;
}

#endif
