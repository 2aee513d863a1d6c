/* SPDX-License-Identifier: Apache-2.0 */
/* Derives a plan's shape and its memory from a handle's configuration. */
#include <stdio.h>
#include <string.h>

#include "bootstrap/gpus.h"
#include "handles/handle.h"
#include "runtime/args.h"

/* Returns the group's value where the handle has EP_DEFAULT. */
static int64_t inherit(int64_t value, int64_t of_group) {
    return value == EP_DEFAULT ? of_group : value;
}

static EpStatus check_layout(const EpCall *call, const EpHandleConfig *c) {
    if (!ep_layout_facts(c->layout))
        return ep_refuse(call, EP_ERR_RANGE, "config.layout", "expected %s, got %d",
                         ep_layout_choices().text, (int)c->layout);
    int is_sized = ep_layout_has(c->layout, EP_SLOTS_SIZED);
    if (is_sized ? c->rows_per_expert >= 1 && c->rows_per_expert <= INT32_MAX
                 : c->rows_per_expert == EP_DEFAULT)
        return EP_OK;
    return ep_refuse(call, EP_ERR_RANGE, "config.rows_per_expert",
                     "expected %s the %s layout, got %lld",
                     is_sized ? "1 .. 2147483647 in" : "EP_DEFAULT outside",
                     ep_layout_names(EP_SLOTS_SIZED, " and ").text, (long long)c->rows_per_expert);
}

static EpStatus check_tail(const EpCall *call, const EpHandleConfig *c) {
    if (c->zero_tail < EP_TAIL_KEEP || c->zero_tail > EP_TAIL_IDS)
        return ep_refuse(call, EP_ERR_RANGE, "config.zero_tail", "expected an EpTail, got %d",
                         c->zero_tail);
    if (c->zero_tail != EP_TAIL_IDS || ep_layout_has(c->layout, EP_SLOTS_OF_ROWS)) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.zero_tail",
                     "expected EP_TAIL_KEEP or EP_TAIL_ZERO outside the %s layouts, which alone "
                     "deliver expert ids, got EP_TAIL_IDS",
                     ep_layout_names(EP_SLOTS_OF_ROWS, " and ").text);
}

/* The flat and rank-major layouts accept either, since they have no padding. */
static EpStatus check_padding(const EpCall *call, const EpHandleConfig *c) {
    if (c->padding == EP_PADDING_ZERO || c->padding == EP_PADDING_KEEP) return EP_OK;
    return ep_refuse(call, EP_ERR_RANGE, "config.padding", "expected an EpPadding, got %d",
                     (int)c->padding);
}

static EpStatus check_sum_quant(const EpCall *call, const EpHandleConfig *c) {
    EpQuantFormat format = ep_quant_format(c->sum_quant);
    EP_TRY(ep_arg_quant(call, "config.sum_quant", c->sum_quant));
    if (!format.bits || format.uses & EP_FOR_SUMS) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.sum_quant",
                     "expected EP_QUANT_NONE or EP_QUANT_FP8, the only formats in which sums "
                     "travel, got %d",
                     (int)c->sum_quant);
}

/* NVFP4 has a global scale, which only a dispatch is given. */
static EpStatus check_grad_quant(const EpCall *call, const EpHandleConfig *c) {
    EpQuantFormat format = ep_quant_format(c->grad_quant);
    EP_TRY(ep_arg_quant(call, "config.grad_quant", c->grad_quant));
    if (!format.bits || format.uses & EP_FOR_GRADS) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.grad_quant",
                     "expected EP_QUANT_NONE or a format of FP8, in which gradients travel, got %d",
                     (int)c->grad_quant);
}

/* Where sums are by entry, each entry has a slot of its own, whose row travels as it is. */
static EpStatus check_sums(const EpCall *call, const EpGroupConfig *group,
                           const EpHandleConfig *c) {
    if (group->sums != EP_SUMS_BY_ENTRY) return EP_OK;
    if (ep_layout_has(c->layout, EP_SLOTS_OF_ROWS))
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.layout",
                         "expected another layout than %s, whose rows stand for several entries, "
                         "in a group with EP_SUMS_BY_ENTRY, got %s",
                         ep_layout_names(EP_SLOTS_OF_ROWS, " and ").text,
                         ep_layout_facts(c->layout)->symbol);
    if (!ep_quant_format(c->sum_quant).bits) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.sum_quant",
                     "expected EP_QUANT_NONE in a group with EP_SUMS_BY_ENTRY, where no sum "
                     "travels, got %d",
                     (int)c->sum_quant);
}

static EpStatus check_expert_ids(const EpCall *call, const EpHandleConfig *c) {
    if (c->expert_ids != EP_IDS_LOCAL && c->expert_ids != EP_IDS_GLOBAL)
        return ep_refuse(call, EP_ERR_RANGE, "config.expert_ids", "expected an EpExpertIds, got %d",
                         (int)c->expert_ids);
    if (c->expert_ids == EP_IDS_LOCAL || ep_layout_has(c->layout, EP_SLOTS_OF_ROWS)) return EP_OK;
    return ep_refuse(
        call, EP_ERR_UNSUPPORTED, "config.expert_ids",
        "expected EP_IDS_LOCAL outside the %s layouts, which alone deliver expert ids, "
        "got EP_IDS_GLOBAL",
        ep_layout_names(EP_SLOTS_OF_ROWS, " and ").text);
}

static EpStatus check_row_weights(const EpCall *call, const EpHandleConfig *c) {
    if (c->row_weights != EP_WEIGHTS_HERE && c->row_weights != EP_WEIGHTS_ALL)
        return ep_refuse(call, EP_ERR_RANGE, "config.row_weights",
                         "expected an EpRowWeights, got %d", (int)c->row_weights);
    if (c->row_weights == EP_WEIGHTS_HERE || ep_layout_has(c->layout, EP_SLOTS_WEIGHED))
        return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.row_weights",
                     "expected EP_WEIGHTS_HERE outside the %s layout, got EP_WEIGHTS_ALL",
                     ep_layout_names(EP_SLOTS_WEIGHED, " and ").text);
}

static EpStatus check_mode_and_scales(const EpCall *call, const EpHandleConfig *c) {
    if (c->mode != EP_DEFAULT && (c->mode < EP_MODE_AUTO || c->mode > EP_MODE_LATENCY))
        return ep_refuse(call, EP_ERR_RANGE, "config.mode",
                         "expected an EpMode or EP_DEFAULT, got %d", c->mode);
    EP_TRY(ep_arg_quant(call, "config.quant", c->quant));
    if ((int)c->scale_order < EP_SCALES_BY_ROW || (int)c->scale_order > EP_SCALES_SWIZZLED)
        return ep_refuse(call, EP_ERR_RANGE, "config.scale_order",
                         "expected an EpScaleOrder, got %d", (int)c->scale_order);
    if ((int)c->plans < EP_PLANS_OWNED || (int)c->plans > EP_PLANS_NAMED)
        return ep_refuse(call, EP_ERR_RANGE, "config.plans", "expected an EpPlans, got %d",
                         (int)c->plans);
    if (c->id < 0 || c->id > EP_MAX_HANDLE_ID)
        return ep_refuse(call, EP_ERR_RANGE, "config.id", "expected 0 .. %d, got %d",
                         EP_MAX_HANDLE_ID, c->id);
    return c->num_sms ? ep_config_check_sms(call, c->num_sms) : EP_OK;
}

static EpStatus check_config(const EpCall *call, const EpGroupConfig *group,
                             const EpHandleConfig *c) {
    EP_TRY(check_layout(call, c));
    EP_TRY(check_expert_ids(call, c));
    EP_TRY(check_row_weights(call, c));
    if (c->top_k != EP_DEFAULT && (c->top_k < 1 || c->top_k > group->max_top_k))
        return ep_refuse(call, EP_ERR_TOP_K, "config.top_k",
                         "expected 1 .. %d (the group's max_top_k) or EP_DEFAULT, got %d",
                         group->max_top_k, c->top_k);
    if (c->alignment != EP_DEFAULT && !ep_is_power_of_two(c->alignment))
        return ep_refuse(call, EP_ERR_ALIGNMENT, "config.alignment",
                         "expected a power of two or EP_DEFAULT, got %d", c->alignment);
    if (c->max_recv_rows != EP_DEFAULT && (c->max_recv_rows < 0 || c->max_recv_rows > INT32_MAX))
        return ep_refuse(call, EP_ERR_RANGE, "config.max_recv_rows",
                         "expected 0 .. 2147483647 or EP_DEFAULT, got %lld",
                         (long long)c->max_recv_rows);
    if (c->overflow != EP_DEFAULT &&
        (c->overflow < EP_OVERFLOW_ERROR || c->overflow > EP_OVERFLOW_DROP))
        return ep_refuse(call, EP_ERR_RANGE, "config.overflow",
                         "expected an EpOverflow or EP_DEFAULT, got %d", c->overflow);
    EP_TRY(check_tail(call, c));
    EP_TRY(check_padding(call, c));
    EP_TRY(check_sum_quant(call, c));
    EP_TRY(check_grad_quant(call, c));
    EP_TRY(check_sums(call, group, c));
    return check_mode_and_scales(call, c);
}

/* Copy and check the caller's configuration, which may have the size of an earlier version. NULL:
 * defaults. */
static EpStatus read_config(const EpCall *call, const EpGroupConfig *group,
                            const EpHandleConfig *given, EpHandleConfig *out) {
    *out = (EpHandleConfig)EP_HANDLE_CONFIG_INIT;
    if (!given) return EP_OK;
    EP_TRY(ep_read_struct(call, "config", given, EP_FIRST_SIZE(EpHandleConfig, zero_tail), out));
    return check_config(call, group, out);
}

/* Set the rule of the layout's slots. The capacity of blocks of fixed size is that of all. */
static void set_layout(const EpHandleConfig *c, EpPlanShape *s) {
    s->layout = c->layout;
    s->has_rows = ep_layout_has(c->layout, EP_SLOTS_OF_ROWS);
    s->is_fixed = ep_layout_has(c->layout, EP_SLOTS_FIXED);
    if (!s->is_fixed) return;
    s->block_rows = ep_layout_has(c->layout, EP_SLOTS_SIZED) ? c->rows_per_expert : s->max_tokens;
    s->capacity = (s->has_rows ? s->num_ranks : s->num_local) * s->block_rows;
}

/* Choose the mode from values that are equal on all ranks, so that all choose the same. */
static EpStatus choose_mode(const EpCall *call, const EpGroupConfig *group, unsigned offers,
                            const EpHandleConfig *c, EpPlanShape *s) {
    int static_size = s->is_fixed || s->capacity > 0;
    EpMode wish = (EpMode)inherit(c->mode, group->mode);
    if (wish == EP_MODE_AUTO && !ep_config_latency_sets(group, offers)) wish = EP_MODE_THROUGHPUT;
    s->mode = ep_config_mode(wish, s->max_tokens, static_size, offers);
    if (s->mode == EP_MODE_THROUGHPUT) return EP_OK;
    if (!(offers & EP_OFFERS_LATENCY))
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.mode",
                         "expected throughput mode or AUTO, since %s, got EP_MODE_LATENCY",
                         s->nodes.nodes > 1 ? "nodes of GPUs have different numbers of ranks"
                                            : "this backend has no latency mode");
    if (!static_size)
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.max_recv_rows",
                         "expected a capacity, or the %s layout, in latency mode, where no size is "
                         "known before rows arrive, got 0 (exact sizing)",
                         ep_layout_names(EP_SLOTS_FIXED, " or ").text);
    if (ep_config_latency_sets(group, offers)) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.mode",
                     "expected throughput mode, since the group has no buffers for latency mode "
                     "(EpGroupConfig.latency_sets), got EP_MODE_LATENCY");
}

/* Messages with fewer places than tokens have a fixed size. With exact sizing they hold what there
 * is. */
static EpStatus check_limit(const EpCall *call, const EpPlanShape *s) {
    if (!s->nodes.limit || s->is_fixed || s->capacity > 0) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.max_recv_rows",
                     "expected a capacity, or the %s layout, in a group on several nodes whose "
                     "messages have %d places (EpGroupConfig.node_rows), got 0 (exact sizing)",
                     ep_layout_names(EP_SLOTS_FIXED, " or ").text, s->nodes.limit);
}

/* A tile of swizzled scales has bytes, and rows of one slab. */
static EpStatus check_swizzled(const EpCall *call, const EpHandleConfig *c, const EpPlanShape *s) {
    const EpQuantFormat formats[] = {ep_quant_format(c->quant), ep_quant_format(c->grad_quant)};
    for (int i = 0; i < 2; i++)
        if (formats[i].bits && ep_quant_scale_type(formats[i]) != EP_TYPE_UINT8)
            return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.scale_order",
                             "expected EP_SCALES_BY_ROW or EP_SCALES_BY_COLUMN with scales of "
                             "FP32, got EP_SCALES_SWIZZLED, which is for scales of one byte");
    if (s->is_fixed || s->has_rows || s->alignment % EP_TILE_ROWS == 0) return EP_OK;
    return ep_refuse(call, EP_ERR_ALIGNMENT, "config.alignment",
                     "expected a multiple of %d with EP_SCALES_SWIZZLED, so that no tile has rows "
                     "of two experts, got %d",
                     EP_TILE_ROWS, s->alignment);
}

/* Set how rows are quantised and how scales lie; refuse what the backend lacks. */
static EpStatus choose_scales(const EpCall *call, unsigned offers, const EpHandleConfig *c,
                              EpPlanShape *s) {
    s->quant = c->quant, s->sum_quant = c->sum_quant, s->scale_order = c->scale_order;
    const struct {
        const char *name;
        EpQuant quant;
    } quants[] = {{"config.quant", c->quant},
                  {"config.sum_quant", c->sum_quant},
                  {"config.grad_quant", c->grad_quant}};
    for (int i = 0; i < 3; i++)
        if (ep_quant_format(quants[i].quant).bits && !(offers & EP_OFFERS_QUANT))
            return ep_refuse(call, EP_ERR_UNSUPPORTED, quants[i].name,
                             "expected EP_QUANT_NONE, since this backend does not quantise, got %d",
                             (int)quants[i].quant);
    if (s->scale_order != EP_SCALES_BY_ROW && !(offers & EP_OFFERS_SCALE_COLUMNS))
        return ep_refuse(call, EP_ERR_UNSUPPORTED, "config.scale_order",
                         "expected EP_SCALES_BY_ROW, since this backend has no other order, got "
                         "%d",
                         (int)c->scale_order);
    return s->scale_order == EP_SCALES_SWIZZLED ? check_swizzled(call, c, s) : EP_OK;
}

EpStatus ep_handle_shape(const EpCall *call, const EpGroupConfig *group, unsigned offers,
                         const EpNodeSizes *nodes, int32_t num_ranks, int32_t rank,
                         const EpHandleConfig *config, EpHandleConfig *c, EpPlanShape *shape) {
    EP_TRY(read_config(call, group, config, c));
    EpPlacement placement = ep_config_placement(group, num_ranks);
    EpPlanShape s = {.num_ranks = num_ranks,
                     .rank = rank,
                     .num_experts = placement.num_experts,
                     .nodes = *nodes};
    s.num_local = ep_placement_count(&placement, rank);
    s.max_tokens = group->max_tokens;
    s.max_top_k = (int32_t)inherit(c->top_k, group->max_top_k);
    s.alignment = (int32_t)inherit(c->alignment, group->alignment);
    s.capacity = inherit(c->max_recv_rows, group->max_recv_rows);
    s.overflow = (EpOverflow)inherit(c->overflow, group->overflow);
    s.tail = (EpTail)c->zero_tail;
    s.padding = c->padding;
    s.expert_ids = c->expert_ids;
    s.row_weights = (EpRowWeights)c->row_weights;
    s.by_entry = group->sums == EP_SUMS_BY_ENTRY;
    s.merges = group->duplicates == EP_DUPLICATES_MERGE;
    s.num_sms = c->num_sms ? c->num_sms : EP_DEFAULT;
    set_layout(c, &s);
    EP_TRY(check_limit(call, &s));
    EP_TRY(choose_mode(call, group, offers, c, &s));
    EP_TRY(choose_scales(call, offers, c, &s));
    if (ep_plan_largest_index(&s) > INT32_MAX)
        return ep_refuse(call, EP_ERR_RANGE, "config",
                         "expected at most 2147483647 slots, padding and lost ones included, got "
                         "up to %lld",
                         (long long)ep_plan_largest_index(&s));
    *shape = s;
    return EP_OK;
}

EpStatus ep_group_handle_shape(const EpCall *call, const EpGroup *group,
                               const EpHandleConfig *config, EpHandleConfig *read,
                               EpPlanShape *shape) {
    const EpNodeSizes *nodes = &group->nodes.sizes;
    EP_TRY(ep_handle_shape(call, &group->config, ep_group_offers(group), nodes, group->size,
                           group->rank, config, read, shape));
    return group->backend->check_shape ? group->backend->check_shape(group, call, shape) : EP_OK;
}

/* Check the group and derive the shape, for a call that only asks. */
static EpStatus find_shape(EpCall *call, const EpGroup *group, const EpHandleConfig *config,
                           EpPlanShape *shape) {
    EpHandleConfig read;
    call->rank = group->rank;
    return ep_group_handle_shape(call, group, config, &read, shape);
}

EpStatus ep_handle_memory(const EpGroup *group, const EpHandleConfig *config, size_t *bytes) {
    EpCall call = {"ep_handle_memory", -1};
    EpPlanShape shape;
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    if (!bytes) return ep_refuse(&call, EP_ERR_NULL, "bytes", "expected a pointer, got NULL");
    EP_TRY(find_shape(&call, group, config, &shape));
    *bytes = (size_t)group->backend->plan_bytes(&shape);
    return EP_OK;
}

EpStatus ep_handle_cost(const EpGroup *group, const EpHandleConfig *config, EpHandleCost *out) {
    EpCall call = {"ep_handle_cost", -1};
    EpPlanShape shape;
    EpHandleCost cost = EP_HANDLE_COST_INIT;
    EP_TRY(ep_object_check(&call, "group", group, EP_OBJECT_GROUP));
    EP_TRY(ep_check_grown_struct(&call, "out", out, EP_FIRST_SIZE(EpHandleCost, buffer_bytes),
                                 sizeof(*out)));
    EP_TRY(find_shape(&call, group, config, &shape));
    cost.mode = shape.mode;
    cost.plan_bytes = group->backend->plan_bytes(&shape);
    ep_write_struct(out, &cost);
    return EP_OK;
}

/* ---- before a group exists ----------------------------------------------------------------- */

/* Choose the backend from what this process sees of its GPUs. Writes the reason; returns NULL where
 * no backend will do. */
static const EpBackendOps *choose_backend(const EpGroupConfig *config, int32_t num_ranks,
                                          const EpSettings *settings, EpGroupMemory *m) {
    EpBackend wish = ep_backend_wish(config, settings);
    const char *contradiction = ep_backend_contradiction(config, wish);
    if (contradiction) {
        snprintf(m->reason, sizeof(m->reason), "%s", contradiction);
        return NULL;
    }
    char why_not[192] = "";
    int usable = wish != EP_BACKEND_HOST &&
                 ep_gpus_usable_here(config, settings, num_ranks, why_not, sizeof(why_not));
    return ep_backend_ops(ep_backend_decide(wish, usable, why_not, m->reason, sizeof(m->reason)));
}

/* Compute the memory of a group and of a plan with the group's defaults. */
static EpStatus measure(const EpCall *call, const EpGroupConfig *config, int32_t num_ranks,
                        const EpSettings *settings, EpGroupMemory *m) {
    const EpBackendOps *backend = choose_backend(config, num_ranks, settings, m);
    EpPlanShape shape;
    if (!backend) return EP_OK;
    m->backend = backend->id;
    EpNodeSizes nodes = ep_config_nodes(config, num_ranks, settings);
    if (config->num_nodes > num_ranks) {
        snprintf(m->reason, sizeof(m->reason),
                 "expected a rank or more on each of %d nodes, got %d ranks", config->num_nodes,
                 num_ranks);
        return EP_OK;
    }
    backend->measure(config, num_ranks, &nodes, settings, &m->shared_bytes, &m->private_bytes);
    m->private_bytes += ep_group_own_bytes(num_ranks);
    m->feasible = 1;
    /* Here every handle must set a size or a layout, so there is no default to measure. */
    int needs_size = config->mode == EP_MODE_LATENCY || nodes.limit;
    if (needs_size && config->max_recv_rows == 0) return EP_OK;
    /* Rank 0 has the most experts. */
    EpHandleConfig defaults;
    EpStatus status = ep_handle_shape(call, config, ep_backend_offers(backend, &nodes), &nodes,
                                      num_ranks, 0, NULL, &defaults, &shape);
    if (status != EP_OK) {
        snprintf(m->reason, sizeof(m->reason), "%s", ep_last_error());
        m->feasible = 0;
        return EP_OK;
    }
    m->handle_bytes = backend->plan_bytes(&shape);
    return EP_OK;
}

EpStatus ep_group_memory(const EpGroupConfig *config, int32_t num_ranks, EpGroupMemory *out) {
    EpCall call = {"ep_group_memory", -1};
    EpGroupConfig read;
    EP_TRY(ep_config_read(&call, config, num_ranks, &read));
    EP_TRY(ep_check_grown_struct(&call, "out", out, EP_FIRST_SIZE(EpGroupMemory, reason),
                                 sizeof(*out)));
    EpSettings settings;
    EP_TRY(ep_settings_load(&settings));
    EpGroupMemory m = EP_GROUP_MEMORY_INIT;
    EP_TRY(measure(&call, &read, ep_config_places(&read, num_ranks), &settings, &m));
    ep_write_struct(out, &m);
    return EP_OK;
}
