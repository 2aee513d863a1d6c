/* SPDX-License-Identifier: Apache-2.0 */
/* Where the rows of a plan come from, for programs that show or check it. */
#include "handles/sources.h"

#include <string.h>

static EpStatus check_outputs(const EpCall *call, const EpSources *s) {
    if (s->rows < 0)
        return ep_refuse(call, EP_ERR_RANGE, "rows", "expected at least 0, got %lld",
                         (long long)s->rows);
    if (s->rows && (!s->ranks || !s->tokens))
        return ep_refuse(call, EP_ERR_NULL, s->ranks ? "tokens" : "ranks",
                         "expected a pointer, got NULL");
    return EP_OK;
}

static EpStatus find_plan(EpCall *call, const EpHandle *handle, const EpTensor *plan,
                          EpPlanRef *ref) {
    EP_TRY(ep_handle_enter(call, handle));
    return ep_handle_find_plan(call, handle, plan, ref);
}

static EpStatus read_sources(EpCall *call, EpHandle *handle, const EpTensor *plan, EpStream stream,
                             const EpSources *sources) {
    EpPlanRef ref;
    EpStep step;
    EP_TRY(find_plan(call, handle, plan, &ref));
    EP_TRY(check_outputs(call, sources));
    EP_TRY(ep_handle_read(call, handle, ref, &step));
    EpGroup *group = handle->group;
    int before = ep_group_enter(group, call->name);
    EpStatus status = group->backend->read_sources(handle, ref, stream, sources);
    ep_group_leave(group, before);
    return status;
}

EpStatus ep_plan_sources(EpHandle *handle, const EpTensor *plan, EpStream stream, int64_t rows,
                         int32_t *ranks, int32_t *tokens) {
    EpCall call = {"ep_plan_sources", -1};
    const EpSources sources = {&call, rows, ranks, tokens, NULL};
    return read_sources(&call, handle, plan, stream, &sources);
}

EpStatus ep_plan_entries(EpHandle *handle, const EpTensor *plan, EpStream stream, int64_t rows,
                         int32_t *ranks, int32_t *tokens, int32_t *entries) {
    EpCall call = {"ep_plan_entries", -1};
    const EpSources sources = {&call, rows, ranks, tokens, entries};
    if (!entries && rows && ranks && tokens)
        return ep_refuse(&call, EP_ERR_NULL, "entries", "expected a pointer, got NULL");
    return read_sources(&call, handle, plan, stream, &sources);
}

EpStatus ep_plan_source_tokens(EpHandle *handle, const EpTensor *plan, EpStream stream,
                               int32_t *counts) {
    EpCall call = {"ep_plan_source_tokens", -1};
    EpPlanRef ref;
    EpStep step;
    EP_TRY(find_plan(&call, handle, plan, &ref));
    if (!counts) return ep_refuse(&call, EP_ERR_NULL, "counts", "expected a pointer, got NULL");
    if (ep_handle_is_latency(handle))
        return ep_refuse(&call, EP_ERR_UNSUPPORTED, "handle",
                         "expected a handle in throughput mode, got one in latency mode");
    EP_TRY(ep_handle_read(&call, handle, ref, &step));
    EpGroup *group = handle->group;
    int before = ep_group_enter(group, call.name);
    EpStatus status = group->backend->read_source_tokens(handle, &call, ref, stream, counts);
    ep_group_leave(group, before);
    return status;
}

EpStatus ep_sources_begin(const EpSources *s, int64_t recv_rows) {
    if (s->rows < recv_rows)
        return ep_refuse(s->call, EP_ERR_BUFFER_SIZE, "rows", "expected at least %lld, got %lld",
                         (long long)recv_rows, (long long)s->rows);
    size_t bytes = (size_t)s->rows * sizeof(int32_t);
    if (!bytes) return EP_OK;
    memset(s->ranks, 0xff, bytes); /* -1 */
    memset(s->tokens, 0xff, bytes);
    if (s->entries) memset(s->entries, 0xff, bytes);
    return EP_OK;
}
