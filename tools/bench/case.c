/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/bench/case.h"

#include <stdlib.h>

#include "tools/bench/device.h"
#include "tools/bench/placement.h"
#include "tools/common/data.h"
#include "tools/common/layout.h"
#include "tools/common/util.h"

/* ---- identities ---------------------------------------------------------------------------- */

uint64_t case_token_id(const Case *c, int rank, int64_t token) {
    return data_id(c->options->run.seed, DATA_TOKEN, rank, token, 0);
}

uint64_t case_scale_id(const Case *c, int rank, int64_t token) {
    return data_id(c->options->run.seed, DATA_SCALE, rank, token, 0);
}

uint64_t case_slot_id(const Case *c, int rank, int64_t token, int owner, int expert, int k) {
    return data_id(c->options->run.seed, DATA_SLOT, rank, token,
                   slots_tag(c->slots.layout, owner, expert, k));
}

float case_topk_weight(const Case *c, int rank, int64_t token, int k) {
    return data_weight(data_id(c->options->run.seed, DATA_TOPK_WEIGHT, rank, token, k));
}

float case_slot_weight(const Case *c, int rank, int64_t token, int owner, int k) {
    if (!slots_has_rows(c->slots.layout)) return case_topk_weight(c, rank, token, k);
    return data_weight(data_id(c->options->run.seed, DATA_ROW_WEIGHT, rank, token, owner));
}

float case_slot_grad(const Case *c, int rank, int64_t token, int k) {
    return data_weight(data_id(c->options->run.seed, DATA_SLOT_GRAD, rank, token, k));
}

/* ---- the group ----------------------------------------------------------------------------- */

static EpGroupConfig group_config(const Options *o, int64_t max_tokens) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.num_experts = (int32_t)o->experts;
    config.max_tokens = max_tokens > 0 ? (int32_t)max_tokens : 1;
    config.max_top_k = (int32_t)o->top_k;
    config.max_row_bytes = o->hidden * (int64_t)ep_type_bytes((EpType)o->type);
    config.max_scale_bytes = o->scale_bytes;
    config.alignment = (int32_t)o->alignment;
    config.max_recv_rows = o->capacity;
    config.overflow = (EpOverflow)o->overflow;
    config.backend = (EpBackend)o->backend;
    config.mode = (EpMode)o->mode;
    config.sums = (EpSums)o->sums;
    config.node_rows = (int32_t)o->node_rows;
    if (o->physical) config.num_physical = (int32_t)o->physical;
    config.choice = (EpCopyChoice)o->choice;
    config.masks = o->masks != BENCH_MASKS_OFF;
    if (o->masks == BENCH_MASKS_LATE)
        config.on_late = EP_LATE_MASK, config.late_us = (int32_t)o->late_us;
    return config;
}

static bool ask_memory(World *world, const EpGroupConfig *config, EpGroupMemory *out) {
    *out = (EpGroupMemory)EP_GROUP_MEMORY_INIT;
    if (!bench_ok(ep_group_memory(config, world->size, out), "ep_group_memory")) return false;
    return out->feasible || bench_refuse("this configuration is not feasible: %s", out->reason);
}

static bool refuse_unsupported(const Options *o, EpBackend backend) {
    if (backend == EP_BACKEND_HOST && o->graphs)
        return bench_refuse("--graphs: expected a GPU backend, got the host backend, whose calls "
                            "are synchronous");
    if (backend == EP_BACKEND_HOST && o->num_sms)
        return bench_refuse("--num-sms: expected a GPU backend, got the host backend, which uses "
                            "no multiprocessors");
    if (backend == EP_BACKEND_HOST && o->baseline && o->run.threads)
        return bench_refuse("--baseline: expected MPI ranks (mpirun) on the host backend, got "
                            "--threads %lld",
                            (long long)o->run.threads);
    if (backend != EP_BACKEND_HOST && !gpu_built())
        return bench_refuse("--backend: expected host, got %s, but this ep_bench was built "
                            "without CUDA",
                            option_choice_name(option_backends, backend));
    return true;
}

bool case_ask_backend(World *world, const Options *options, EpGroupMemory *out) {
    EpGroupConfig config = group_config(options, options->tokens_end);
    if (options->backend != EP_BACKEND_HOST && !gpu_select(world)) return false;
    bool ok = ask_memory(world, &config, out) && refuse_unsupported(options, out->backend);
    return world_all(world, ok);
}

/* Set the default capacity: the need of the rank that receives most. On GPUs exact sizing would
 * wait on the host in every step, and latency mode does not support it. */
static bool reserve_rows(Case *c) {
    int64_t rows = c->slots.needed_rows, alignment = c->options->alignment;
    if (!world_max(c->world, &rows, 1)) return false;
    rows = rows > 0 ? (rows + alignment - 1) / alignment * alignment : alignment;
    c->capacity = rows;
    return world_all(c->world, slots_reserve(&c->slots, rows));
}

/* Set the capacity. It is static if the CUDA backend serves every rank. */
static bool choose_capacity(Case *c) {
    EpGroupConfig config = group_config(c->options, c->routing.max_tokens);
    EpGroupMemory memory;
    c->capacity = c->options->capacity;
    if (!world_all(c->world, ask_memory(c->world, &config, &memory))) return false;
    int64_t cuda = memory.backend == EP_BACKEND_CUDA;
    if (!world_min(c->world, &cuda, 1)) return false;
    bool needs_static = cuda || c->options->mode != EP_MODE_THROUGHPUT;
    bool open = !c->capacity && !tool_layout(c->slots.layout)->is_fixed;
    return !needs_static || !open || reserve_rows(c);
}

/* Collective: tell all ranks the node of each, which this one has of a group. */
static bool share_nodes(Case *c, bool ok, const EpGroupInfo *info) {
    if (!c->nodes) c->nodes = bench_alloc((size_t)c->world->size, sizeof(*c->nodes), "nodes");
    return world_all(c->world, ok && c->nodes) &&
           world_allgather(c->world, &info->node, c->nodes, sizeof(info->node));
}

/* Messages with few places decide which slots there are, so nodes must be known before the group
 * is made. A small group has the same. */
static bool find_nodes(Case *c) {
    EpGroupConfig config = group_config(c->options, 1);
    EpGroup *group = NULL;
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    config.max_row_bytes = 16, config.max_scale_bytes = 0;
    config.max_recv_rows = config.node_rows = 0;
    bool ok = bench_ok(ep_group_create(&c->world->boot, &config, &group), "ep_group_create") &&
              bench_ok(ep_group_query(group, &info), "ep_group_query");
    ep_group_destroy(group);
    return share_nodes(c, ok, &info);
}

static bool create_group(Case *c) {
    EpGroupConfig config = group_config(c->options, c->routing.max_tokens);
    EpGroupMemory memory;
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    config.max_recv_rows = c->capacity;
    if (!world_all(c->world, ask_memory(c->world, &config, &memory))) return false;
    c->promised_bytes = memory.shared_bytes + memory.private_bytes;
    bool ok = bench_ok(ep_group_create(&c->world->boot, &config, &c->group), "ep_group_create") &&
              bench_ok(ep_group_query(c->group, &info), "ep_group_query");
    c->cuda = ok && info.backend == EP_BACKEND_CUDA;
    return share_nodes(c, ok, &info);
}

bool case_zeroes_row(const Case *c, int64_t row) {
    return c->slots.rows[row].state == ROW_PADDING && c->options->padding == EP_PADDING_ZERO;
}

EpHandleConfig case_handle_config(const Case *c) {
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    config.layout = c->slots.layout;
    config.top_k = (int32_t)c->options->top_k;
    config.quant = c->quant;
    config.sum_quant = (EpQuant)c->options->sum_quant;
    config.padding = (EpPadding)c->options->padding;
    if (tool_layout(config.layout)->is_sized) config.rows_per_expert = c->slots.block_rows;
    return config;
}

static bool create_handle(Case *c) {
    EpHandleConfig config = case_handle_config(c);
    EpHandleCost cost = EP_HANDLE_COST_INIT;
    bool ok = bench_ok(ep_handle_cost(c->group, &config, &cost), "ep_handle_cost") &&
              bench_ok(ep_handle_create(c->group, &config, &c->handle), "ep_handle_create");
    c->latency = cost.mode == EP_MODE_LATENCY;
    c->plan_bytes = cost.plan_bytes;
    c->promised_bytes += cost.plan_bytes + cost.buffer_bytes;
    return world_all(c->world, ok);
}

/* Sizes and types of a row as it is sent and as dispatch delivers it. */
static void describe_received(Case *c) {
    const Options *o = c->options;
    c->row_bytes = c->recv_bytes = (size_t)o->hidden * ep_type_bytes((EpType)o->type);
    c->recv_type = (EpType)o->type, c->recv_scale_type = EP_TYPE_UINT8;
    c->recv_scale_bytes = (size_t)o->scale_bytes;
    c->quant = (EpQuant)o->quant;
    c->sum_bytes = c->row_bytes;
    EpQuant sum_quant = (EpQuant)o->sum_quant;
    const QuantFormat *format = quant_format(c->quant);
    if (quant_format(sum_quant)->bits)
        c->sum_bytes =
            (size_t)(quant_bytes(sum_quant, o->hidden) + quant_scales(sum_quant, o->hidden) * 4);
    if (!format->bits) return;
    c->recv_type = format->type, c->recv_bytes = (size_t)quant_bytes(c->quant, o->hidden);
    c->recv_scale_type = format->scale_type;
    c->recv_scale_bytes =
        (size_t)quant_scales(c->quant, o->hidden) * ep_type_bytes(c->recv_scale_type);
}

bool case_create(World *world, const Options *options, int64_t size, Case *out) {
    *out = (Case){.world = world, .options = options};
    describe_received(out);
    if (!routing_make(world, options, size, &out->routing)) return false;
    out->tokens = out->routing.tokens[world->rank];
    if ((options->node_rows || options->physical) && !find_nodes(out)) return false;
    if (options->physical && !world_all(world, placement_make(out))) return false;
    bool ok = slots_make(options, &out->routing, out->nodes, world->rank, &out->slots);
    out->weights_width = slots_has_rows(out->slots.layout) ? (int)options->top_k : 1;
    return world_all(world, ok) && choose_capacity(out) && create_group(out) &&
           world_all(world, placement_call(out)) && create_handle(out) && zero_copy_create(out) && world_all(world, buffers_create(out)) &&
           (!out->cuda || device_create(out));
}

/* Destroying the group also releases its peer-accessible memory. */
void case_destroy(Case *c) {
    ep_handle_destroy(c->handle);
    ep_group_destroy(c->group);
    free(c->nodes);
    if (c->device) device_destroy(c);
    pool_free(&c->pool);
    slots_free(&c->slots);
    routing_free(&c->routing);
}
