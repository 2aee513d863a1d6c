/* SPDX-License-Identifier: Apache-2.0 */
/* Groups: one EpGroup each, over the caller's communicator. */
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bindings/nccl_ep/adapter.h"

#define GROUP_MAGIC 0x4e45504bu
#define ROW_UNIT 16

/* ep/ep_nccl.h declares it with NCCL's header, which a build without CUDA does not have. */
EpStatus ep_bootstrap_nccl(struct ncclComm *comm, EpBootstrap *out);

int ncclEpGetVersion(int *version) {
    if (!version)
        return nep_fail("ncclEpGetVersion", NCCL_INVALID_ARGUMENT,
                        "version: expected a pointer, got NULL");
    *version = NCCL_EP_VERSION;
    return NCCL_SUCCESS;
}

int nep_check_group(const char *call, ncclEpGroup_t group) {
    if (group && group->magic == GROUP_MAGIC) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_ARGUMENT, "ep_group: expected a live group, got %s",
                    group ? "another pointer" : "NULL");
}

int nep_report(const char *call, ncclEpGroup_t group, int result) {
    return result != NCCL_SUCCESS ? result : nep_result(call, nep_poll(group));
}

/* ---- configuration ------------------------------------------------------------------------- */

static int check_config(const char *call, const ncclEpGroupConfig_t *c) {
    if (c->algorithm != NCCL_EP_ALGO_LOW_LATENCY && c->algorithm != NCCL_EP_ALGO_HIGH_THROUGHPUT)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "config.algorithm: expected 0 or 1, got %d",
                        c->algorithm);
    if (c->num_experts < 1 || c->num_experts > EP_MAX_EXPERTS)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "config.num_experts: expected 1 .. %d, got %u",
                        EP_MAX_EXPERTS, c->num_experts);
    if (c->max_dispatch_tokens_per_rank < 1 || c->max_dispatch_tokens_per_rank > INT32_MAX)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "config.max_dispatch_tokens_per_rank: expected 1 .. %d, got %u", INT32_MAX,
                        c->max_dispatch_tokens_per_rank);
    if (c->max_token_bytes < 1 || c->max_token_bytes > EP_MAX_ROW_BYTES)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "config.max_token_bytes: expected 1 .. %d, got %u", EP_MAX_ROW_BYTES,
                        c->max_token_bytes);
    if (c->max_recv_tokens_per_rank > INT32_MAX)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "config.max_recv_tokens_per_rank: expected at most %d, got %u", INT32_MAX,
                        c->max_recv_tokens_per_rank);
    if (c->num_topk > EP_MAX_TOP_K)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "config.num_topk: expected at most %d, got %u",
                        EP_MAX_TOP_K, c->num_topk);
    if (c->overflow_policy < NCCL_EP_OVERFLOW_AUTO || c->overflow_policy > NCCL_EP_OVERFLOW_DROP)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "config.overflow_policy: expected 0 .. 2, got %d", c->overflow_policy);
    if (c->algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT && !c->max_recv_tokens_per_rank &&
        c->overflow_policy == NCCL_EP_OVERFLOW_DROP)
        return nep_fail(call, NCCL_INVALID_ARGUMENT,
                        "config.overflow_policy: expected AUTO or TRAP with "
                        "max_recv_tokens_per_rank = 0, where nothing is dropped, got DROP");
    return NCCL_SUCCESS;
}

/* The environment's NCCL_EP_TIMEOUT_MS goes before the configuration. */
static double timeout_of(const ncclEpGroupConfig_t *c) {
    const char *text = getenv("NCCL_EP_TIMEOUT_MS");
    char *end = NULL;
    errno = 0;
    unsigned long ms = text ? strtoul(text, &end, 10) : 0;
    if (ms && !errno && !*end) return (double)ms / 1e3;
    return c->timeout_ns ? (double)c->timeout_ns / 1e9 : EP_DEFAULT;
}

static int64_t round_up(int64_t value, int64_t unit) {
    return (value + unit - 1) / unit * unit;
}

/* Returns 0 for "automatic". */
static unsigned inherit(unsigned own, const ncclEpGroupConfig_t *c) {
    return own ? own : c->max_num_sms;
}

static int32_t sms_of(unsigned count) {
    return !count ? EP_DEFAULT : count < 2 ? 2 : count > INT32_MAX ? INT32_MAX : (int32_t)count;
}

int32_t nep_num_sms(const struct ncclEpGroup *group, unsigned own) {
    return sms_of(inherit(own, &group->config));
}

/* The group has as many as the operation with the most. */
static int32_t most_sms(const ncclEpGroupConfig_t *c) {
    unsigned dispatch = inherit(c->dispatch_num_sms, c), combine = inherit(c->combine_num_sms, c);
    return !dispatch || !combine ? EP_DEFAULT : sms_of(dispatch > combine ? dispatch : combine);
}

/* There the largest row stands for rows and scales together, and how they divide it is known only
 * when a dispatch comes. So scales get a quarter of it besides: as much as one byte for four
 * elements of fp8. */
static EpGroupConfig describe(const ncclEpGroupConfig_t *c, struct ncclComm *comm) {
    int low_latency = c->algorithm == NCCL_EP_ALGO_LOW_LATENCY;
    unsigned most = c->num_experts < EP_MAX_TOP_K ? c->num_experts : EP_MAX_TOP_K;
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.num_experts = (int32_t)c->num_experts;
    config.max_tokens = (int32_t)c->max_dispatch_tokens_per_rank;
    config.max_top_k = (int32_t)(c->num_topk ? c->num_topk : most);
    config.max_row_bytes = round_up(c->max_token_bytes, ROW_UNIT);
    config.max_scale_bytes = round_up((c->max_token_bytes + 3) / 4, ROW_UNIT);
    config.max_recv_rows = low_latency ? 0 : c->max_recv_tokens_per_rank;
    config.overflow =
        c->overflow_policy == NCCL_EP_OVERFLOW_DROP ? EP_OVERFLOW_DROP : EP_OVERFLOW_ERROR;
    config.backend = EP_BACKEND_CUDA;
    config.timeout_seconds = timeout_of(c);
    config.nccl_comm = comm;
    config.mode = low_latency ? EP_MODE_LATENCY : EP_MODE_THROUGHPUT;
    config.num_sms = most_sms(c);
    config.duplicates = EP_DUPLICATES_MERGE;
    return config;
}

/* ---- masks ----------------------------------------------------------------------------------- */

static void find_timeout(const EpSetting *setting, void *seconds) {
    if (!strcmp(setting->name, "LIBEP_TIMEOUT")) *(double *)seconds = atof(setting->value);
}

/* A rank is late after the caller's timeout. The group's deadline is later, so that it does not
 * come first. */
static void add_masks(EpGroupConfig *config) {
    double seconds = config->timeout_seconds;
    if (!(seconds > 0)) ep_settings(find_timeout, &seconds);
    double late = seconds * 1e6;
    config->masks = 1, config->on_late = EP_LATE_MASK;
    config->late_us = late < 1 ? 1 : late < INT32_MAX ? (int32_t)late : INT32_MAX;
    config->timeout_seconds = 2 * seconds;
}

/* On several nodes libep's groups of GPUs have no masks. All ranks learn of it together. */
static EpStatus create(ncclEpGroup_t group, const EpGroupConfig *config) {
    EpGroupConfig masked = *config;
    add_masks(&masked);
    if (nep_is_low_latency(group) && group->config.enable_mask) {
        EpStatus status = ep_group_create(&group->bootstrap, &masked, &group->ep);
        group->has_masks = status == EP_OK;
        if (status != EP_ERR_UNSUPPORTED) return status;
    }
    return ep_group_create(&group->bootstrap, config, &group->ep);
}

/* ---- life ---------------------------------------------------------------------------------- */

static void find_sums(const EpSetting *setting, void *config) {
    if (!strcmp(setting->name, "LIBEP_SUMS") && !strcmp(setting->value, "entry"))
        ((EpGroupConfig *)config)->sums = EP_SUMS_BY_ENTRY;
}

static void find_log_level(const EpSetting *setting, void *is_info) {
    if (!strcmp(setting->name, "LIBEP_LOG"))
        *(int *)is_info = !strcmp(setting->value, "info") || !strcmp(setting->value, "trace");
}

static void say_hello(const struct ncclEpGroup *group) {
    int is_info = 0, version = ep_version();
    ep_settings(find_log_level, &is_info);
    if (is_info && group->rank == 0)
        fprintf(stderr, "libnccl_ep: info: libep %d.%d.%d serves NCCL EP's %s calls on %d ranks\n",
                version / 10000, version / 100 % 100, version % 100,
                nep_is_low_latency(group) ? "low-latency" : "high-throughput", group->size);
}

/* The process has loaded NCCL, since the caller has a communicator. */
static NepPeerPointer find_peer_pointer(void) {
    NepPeerPointer function = NULL;
    void *nccl = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    void *symbol = nccl ? dlsym(nccl, "ncclGetPeerDevicePointer") : NULL;
    memcpy(&function, &symbol, sizeof(symbol));
    return function;
}

/* Here, where all ranks learn of it together, and not with the first handle. */
static int check_nodes(const char *call, ncclEpGroup_t group, const EpGroupInfo *info) {
    EpHandleConfig config = EP_HANDLE_CONFIG_INIT;
    EpHandleCost cost = EP_HANDLE_COST_INIT;
    if (info->num_nodes == 1 || !nep_is_low_latency(group)) return NCCL_SUCCESS;
    config.layout = EP_LAYOUT_BATCHED, config.rows_per_expert = 1;
    if (ep_handle_cost(group->ep, &config, &cost) == EP_OK) return NCCL_SUCCESS;
    return nep_fail(call, NCCL_INVALID_USAGE,
                    "rank %d: config.algorithm: expected %d (high throughput) on %d nodes, got %d "
                    "(low latency): %s",
                    info->rank, NCCL_EP_ALGO_HIGH_THROUGHPUT, info->num_nodes,
                    NCCL_EP_ALGO_LOW_LATENCY, ep_last_error());
}

static int open_group(const char *call, ncclEpGroup_t group, struct ncclComm *comm) {
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    EpGroupConfig config = describe(&group->config, comm);
    ep_settings(find_sums, &config);
    group->bootstrap = (EpBootstrap)EP_BOOTSTRAP_INIT;
    NEP_TRY(nep_result(call, ep_bootstrap_nccl(comm, &group->bootstrap)));
    NEP_TRY(nep_result(call, create(group, &config)));
    NEP_TRY(nep_result(call, ep_group_query(group->ep, &info)));
    NEP_TRY(check_nodes(call, group, &info));
    group->peer_pointer = find_peer_pointer();
    group->rank = info.rank, group->size = info.size, group->num_local = info.num_local_experts;
    group->num_nodes = info.num_nodes;
    return NCCL_SUCCESS;
}

static void close_group(ncclEpGroup_t group) {
    ep_group_destroy(group->ep);
    ep_bootstrap_destroy(&group->bootstrap);
    free(group);
}

int ncclEpCreateGroup(ncclEpGroup_t *out, struct ncclComm *comm,
                      const ncclEpGroupConfig_t *config) {
    const char *call = "ncclEpCreateGroup";
    ncclEpGroupConfig_t read;
    NEP_TRY(NEP_READ(call, config, 0, NCCL_EP_GROUP_CONFIG_V1, &read));
    if (!out || !comm)
        return nep_fail(call, NCCL_INVALID_ARGUMENT, "%s: expected a pointer, got NULL",
                        out ? "comm" : "ep_group");
    NEP_TRY(check_config(call, &read));
    ncclEpGroup_t group = calloc(1, sizeof(*group));
    if (!group) return nep_fail(call, NCCL_SYSTEM_ERROR, "out of memory");
    group->config = read;
    int result = open_group(call, group, comm);
    if (result != NCCL_SUCCESS) {
        close_group(group);
        return result;
    }
    group->magic = GROUP_MAGIC;
    say_hello(group);
    *out = group;
    return NCCL_SUCCESS;
}

/* Handles may be destroyed afterwards. */
int ncclEpGroupDestroy(ncclEpGroup_t group) {
    if (!group) return NCCL_SUCCESS;
    NEP_TRY(nep_check_group("ncclEpGroupDestroy", group));
    for (ncclEpHandle_t h = group->handles, next; h; h = next) {
        next = h->next;
        nep_orphan(h);
    }
    group->magic = 0;
    close_group(group);
    return NCCL_SUCCESS;
}
