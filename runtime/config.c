/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/config.h"

#include <math.h>

#include "runtime/layouts.h"

static EpStatus check_range(const EpCall *call, const char *argument, int64_t value, int64_t low,
                            int64_t high) {
    if (value >= low && value <= high) return EP_OK;
    return ep_refuse(call, EP_ERR_RANGE, argument, "expected %lld .. %lld, got %lld",
                     (long long)low, (long long)high, (long long)value);
}

static EpStatus check_rows(const EpCall *call, const EpGroupConfig *c) {
    if (c->max_row_bytes < 16 || c->max_row_bytes > EP_MAX_ROW_BYTES || c->max_row_bytes % 16)
        return ep_refuse(call, EP_ERR_ROW_BYTES, "config.max_row_bytes",
                         "expected a multiple of 16 in 16 .. %d, got %lld", EP_MAX_ROW_BYTES,
                         (long long)c->max_row_bytes);
    if (c->max_scale_bytes < 0 || c->max_scale_bytes > EP_MAX_ROW_BYTES || c->max_scale_bytes % 4)
        return ep_refuse(call, EP_ERR_ROW_BYTES, "config.max_scale_bytes",
                         "expected a multiple of 4 in 0 .. %d, got %lld", EP_MAX_ROW_BYTES,
                         (long long)c->max_scale_bytes);
    return EP_OK;
}

EpStatus ep_config_check_sms(const EpCall *call, int32_t num_sms) {
    if (num_sms >= 2 || num_sms == EP_DEFAULT) return EP_OK;
    return ep_refuse(call, EP_ERR_RANGE, "config.num_sms",
                     "expected at least 2 multiprocessors or EP_DEFAULT, got %d", num_sms);
}

EpStatus ep_config_check_timeout(const EpCall *call, double seconds) {
    if ((isfinite(seconds) && seconds > 0) || seconds == EP_DEFAULT) return EP_OK;
    return ep_refuse(call, EP_ERR_RANGE, "config.timeout_seconds",
                     "expected seconds > 0 or EP_DEFAULT, got %g", seconds);
}

static EpStatus check_choices(const EpCall *call, const EpGroupConfig *c) {
    if (!ep_is_power_of_two(c->alignment))
        return ep_refuse(call, EP_ERR_ALIGNMENT, "config.alignment",
                         "expected a power of two, got %d", c->alignment);
    EP_TRY(check_range(call, "config.overflow", c->overflow, EP_OVERFLOW_ERROR, EP_OVERFLOW_DROP));
    EP_TRY(check_range(call, "config.backend", c->backend, EP_BACKEND_AUTO, EP_BACKEND_CUDA));
    EP_TRY(check_range(call, "config.mode", c->mode, EP_MODE_AUTO, EP_MODE_LATENCY));
    EP_TRY(check_range(call, "config.duplicates", c->duplicates, EP_DUPLICATES_KEEP,
                       EP_DUPLICATES_MERGE));
    EP_TRY(check_range(call, "config.sums", c->sums, EP_SUMS_BY_RANK, EP_SUMS_BY_ENTRY));
    EP_TRY(check_range(call, "config.choice", c->choice, EP_CHOICE_NEAR, EP_CHOICE_SPREAD));
    if (c->latency_sets != EP_DEFAULT)
        EP_TRY(check_range(call, "config.latency_sets", c->latency_sets, 0, EP_MAX_LATENCY_SETS));
    EP_TRY(ep_config_check_sms(call, c->num_sms));
    EP_TRY(check_range(call, "config.num_nodes", c->num_nodes, 0, EP_MAX_RANKS));
    EP_TRY(ep_config_check_timeout(call, c->timeout_seconds));
    if (c->device < 0 && c->device != EP_DEFAULT)
        return ep_refuse(call, EP_ERR_RANGE, "config.device",
                         "expected the number of a CUDA device or EP_DEFAULT, got %d", c->device);
    return EP_OK;
}

static EpStatus check_places(const EpCall *call, const EpGroupConfig *c, int32_t num_ranks) {
    if (c->max_ranks == EP_DEFAULT && c->place == EP_DEFAULT) return EP_OK;
    EP_TRY(check_range(call, "config.max_ranks", c->max_ranks, num_ranks, EP_MAX_RANKS));
    if (c->place != EP_DEFAULT)
        EP_TRY(check_range(call, "config.place", c->place, 0, c->max_ranks - 1));
    if (c->masks) return EP_OK;
    return ep_refuse(call, EP_ERR_RANGE, "config.masks",
                     "expected 1, since config.max_ranks is given, got 0");
}

static EpStatus check_masks(const EpCall *call, const EpGroupConfig *c) {
    EP_TRY(check_range(call, "config.masks", c->masks, 0, 1));
    EP_TRY(check_range(call, "config.on_late", c->on_late, EP_LATE_FAIL, EP_LATE_MASK));
    if (c->on_late == EP_LATE_FAIL) return EP_OK;
    if (!c->masks)
        return ep_refuse(call, EP_ERR_RANGE, "config.masks",
                         "expected 1, since config.on_late is EP_LATE_MASK, got 0");
    return check_range(call, "config.late_us", c->late_us, 1, INT32_MAX);
}

static EpStatus check(const EpCall *call, const EpGroupConfig *c, int32_t num_ranks) {
    EP_TRY(check_range(call, "num_ranks", num_ranks, 1, EP_MAX_RANKS));
    EP_TRY(check_range(call, "config.num_experts", c->num_experts, 1, EP_MAX_EXPERTS));
    EP_TRY(check_range(call, "config.max_tokens", c->max_tokens, 1, INT32_MAX));
    if (c->max_top_k < 1 || c->max_top_k > EP_MAX_TOP_K)
        return ep_refuse(call, EP_ERR_TOP_K, "config.max_top_k", "expected 1 .. %d, got %d",
                         EP_MAX_TOP_K, c->max_top_k);
    EP_TRY(check_rows(call, c));
    EP_TRY(check_range(call, "config.max_recv_rows", c->max_recv_rows, 0, INT32_MAX));
    EP_TRY(check_range(call, "config.node_rows", c->node_rows, 0, c->max_tokens));
    if (c->num_physical != EP_DEFAULT)
        EP_TRY(check_range(call, "config.num_physical", c->num_physical, 1, EP_MAX_EXPERTS));
    EP_TRY(check_masks(call, c));
    EP_TRY(check_places(call, c, num_ranks));
    return check_choices(call, c);
}

EpStatus ep_config_read(const EpCall *call, const EpGroupConfig *given, int32_t num_ranks,
                        EpGroupConfig *out) {
    EpGroupConfig full = EP_GROUP_CONFIG_INIT;
    EP_TRY(ep_read_struct(call, "config", given, EP_FIRST_SIZE(EpGroupConfig, nccl_comm), &full));
    /* Even a refused configuration sets the timeout: this rank still meets its peers within it. */
    if (isfinite(full.timeout_seconds)) out->timeout_seconds = full.timeout_seconds;
    EP_TRY(check(call, &full, num_ranks));
    *out = full;
    return EP_OK;
}

EpPlacement ep_config_placement(const EpGroupConfig *config, int32_t num_ranks) {
    return (EpPlacement){ep_physical_experts(config), num_ranks};
}

int64_t ep_config_copies_bytes(const EpGroupConfig *config, int32_t num_ranks) {
    EpCopyMemory memory;
    if (!ep_config_has_copies(config)) return 0;
    return ep_copies_map(ep_config_placement(config, num_ranks), config->num_experts, NULL,
                         &memory);
}

double ep_config_timeout(const EpGroupConfig *config, const EpSettings *settings) {
    return config->timeout_seconds > 0 ? config->timeout_seconds : settings->timeout;
}

EpMode ep_config_mode(EpMode wish, int32_t max_tokens, int static_size, unsigned offers) {
    if (wish != EP_MODE_AUTO) return wish;
    int fits = max_tokens <= EP_LATENCY_TOKENS && static_size && offers & EP_OFFERS_AUTO_LATENCY;
    return fits ? EP_MODE_LATENCY : EP_MODE_THROUGHPUT;
}

/* By default a group has sets if a handle without a mode of its own may be in latency mode on one
 * node: how much memory a group takes on the host backend does not depend on nodes. */
int32_t ep_config_latency_sets(const EpGroupConfig *config, unsigned offers) {
    enum { USUAL_SETS = 4 };
    if (!(offers & EP_OFFERS_LATENCY)) return 0;
    if (config->latency_sets != EP_DEFAULT) return config->latency_sets;
    unsigned usual = offers & EP_OFFERS_BY_NAME ? 0 : EP_OFFERS_AUTO_LATENCY;
    EpMode mode = ep_config_mode(config->mode, config->max_tokens, 1, usual);
    return mode == EP_MODE_LATENCY ? USUAL_SETS : 0;
}

int64_t ep_config_record_bytes(const EpGroupConfig *c) {
    int64_t one = ep_record(c->max_row_bytes, c->max_top_k, c->max_scale_bytes).bytes;
    if (c->sums != EP_SUMS_BY_ENTRY) return one;
    return ep_max(one, ep_entries_record(c->max_row_bytes, c->max_top_k, 1).bytes);
}

/* ---- several nodes --------------------------------------------------------------------------- */

#define LEAST_CHUNK_BYTES (1 << 20) /* 20 us at 50 GB/s, as much as an exchange takes besides */
#define LEAST_CHUNKS 4

int32_t ep_config_node_rows(const EpGroupConfig *config) {
    return config->node_rows ? config->node_rows : config->max_tokens;
}

static int32_t parts(int32_t all, int32_t each) {
    return all / each + (all % each != 0);
}

void ep_config_chunks(const EpGroupConfig *config, const EpSettings *settings, EpNodeSizes *out) {
    int64_t token = out->most * ep_config_record_bytes(config);
    int32_t rows = ep_config_node_rows(config);
    out->limit = out->chunk = out->message = out->latency = 0;
    /* Handles outlive a change of nodes, so such a group has the limit on any. */
    if (ep_config_joins(config) && rows < config->max_tokens) out->limit = rows;
    if (out->nodes == 1) return;
    out->latency = config->max_tokens <= settings->node_latency;
    int64_t bytes = ep_max(LEAST_CHUNK_BYTES, rows * token / LEAST_CHUNKS);
    bytes = ep_min(bytes, settings->node_chunk);
    out->chunk = out->message = (int32_t)ep_max(1, ep_min(rows, bytes / token));
    if (rows == config->max_tokens) return;
    out->limit = rows;
    out->chunk = parts(config->max_tokens, parts(rows, out->message));
    out->message = parts(rows, parts(config->max_tokens, out->chunk));
}

EpNodeSizes ep_config_nodes(const EpGroupConfig *config, int32_t num_ranks,
                            const EpSettings *settings) {
    int32_t nodes = config->num_nodes ? config->num_nodes : settings->topology.nodes;
    EpNodeSizes sizes = ep_node_sizes_even(num_ranks, nodes ? nodes : 1);
    ep_config_chunks(config, settings, &sizes);
    return sizes;
}

/* ---- public -------------------------------------------------------------------------------- */

EpStatus ep_expert_range(int32_t num_experts, int32_t num_ranks, int32_t rank, int32_t *first,
                         int32_t *count) {
    EpCall call = {"ep_expert_range", -1};
    EP_TRY(check_range(&call, "num_experts", num_experts, 1, INT32_MAX));
    EP_TRY(check_range(&call, "num_ranks", num_ranks, 1, EP_MAX_RANKS));
    EP_TRY(check_range(&call, "rank", rank, 0, num_ranks - 1));
    if (!first || !count)
        return ep_refuse(&call, EP_ERR_NULL, first ? "count" : "first",
                         "expected a pointer, got NULL");
    EpPlacement placement = {num_experts, num_ranks};
    *first = ep_placement_first(&placement, rank);
    *count = ep_placement_count(&placement, rank);
    return EP_OK;
}

/* Returns the largest number of rows of all slabs, padding included, given the most slots of one
 * expert and of the rank. The public header derives it, at ep_max_recv_rows. */
static int64_t worst_slabs(int64_t per_expert, int64_t per_rank, int64_t local, int64_t align) {
    int64_t touched = ep_min(local, per_rank);
    int64_t by_expert = ep_saturated_product(local, ep_round_up(per_expert, align));
    int64_t by_rank = ep_round_up(per_rank + (align - 1) * touched, align);
    return ep_min(by_expert, by_rank);
}

EpStatus ep_max_recv_rows(const EpGroupConfig *given, int32_t num_ranks, int32_t rank,
                          EpLayout layout, unsigned flags, int64_t *rows) {
    EpCall call = {"ep_max_recv_rows", -1};
    EpGroupConfig read;
    EP_TRY(ep_config_read(&call, given, num_ranks, &read));
    const EpGroupConfig *config = &read;
    num_ranks = ep_config_places(config, num_ranks);
    EP_TRY(check_range(&call, "rank", rank, 0, num_ranks - 1));
    EP_TRY(check_range(&call, "layout", layout, 1, ep_layout_last()));
    EP_TRY(check_range(&call, "flags", flags, 0, EP_ROWS_DUPLICATES));
    if (!rows) return ep_refuse(&call, EP_ERR_NULL, "rows", "expected a pointer, got NULL");
    EpPlacement placement = ep_config_placement(config, num_ranks);
    int64_t tokens = (int64_t)num_ranks * config->max_tokens, k = config->max_top_k;
    int64_t local = ep_placement_count(&placement, rank), align = config->alignment;
    int duplicates = (flags & EP_ROWS_DUPLICATES) != 0;
    int64_t per_expert = duplicates ? tokens * k : tokens;
    int64_t per_rank = duplicates ? tokens * k : tokens * ep_min(k, local);
    int has_rows = ep_layout_has(layout, EP_SLOTS_OF_ROWS);
    int is_fixed = ep_layout_has(layout, EP_SLOTS_FIXED);
    int64_t most = 0;
    if (has_rows)
        most = local || is_fixed ? tokens : 0;
    else if (local)
        most = is_fixed ? ep_round_up(per_expert, align)
                        : worst_slabs(per_expert, per_rank, local, align);
    if (most > INT32_MAX)
        return ep_refuse(&call, EP_ERR_RANGE, "config",
                         "expected at most 2147483647 rows, padding included, got up to %lld",
                         (long long)most);
    *rows = most;
    return EP_OK;
}
