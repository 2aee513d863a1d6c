/* SPDX-License-Identifier: Apache-2.0 */
/* The sources of rows, from a copy of a plan in device memory. Its words may be damaged: none leads
 * outside the copy or the outputs. */
#include <stdlib.h>

#include "handles/cuda/handle.h"
#include "handles/sources.h"

/* A row that has arrived. */
typedef struct Row {
    int32_t rank, token;
    int64_t route; /* of its first entry, in units of K */
    int32_t slot;  /* where rows have one slot */
} Row;

/* Latency mode: begins hold a word for each token. Returns whether the token has a row. */
static int find_latency_row(const EpPlanShape *s, const EpCudaPlan *plan, Row *row) {
    int64_t max_tokens = s->max_tokens;
    row->slot = plan->begins[row->rank * (max_tokens + 1) + row->token];
    row->route = row->rank * max_tokens + row->token;
    return row->slot >= 0;
}

/* Throughput mode: begins number the rows of a rank, by token. */
static int find_row(const EpPlanShape *s, const EpCudaPlan *plan, Row *row) {
    int64_t max_tokens = s->max_tokens;
    const int32_t *begin = plan->begins + row->rank * (max_tokens + 1) + row->token;
    if (begin[0] < 0 || begin[0] >= max_tokens || begin[1] <= begin[0]) return 0;
    row->route = row->rank * max_tokens + begin[0];
    row->slot = (int32_t)ep_block_begin(s, row->rank, plan->flat_begin[row->rank]) + begin[0];
    return 1;
}

/* Put the slots of a row with a slot for each entry. */
static void put_entries(const EpCudaPlan *plan, int32_t top_k, const Row *row,
                        const EpSources *out) {
    if (plan->sizes.form != EP_ROUTES_CHAINED) {
        for (int32_t k = 0; k < top_k; k++)
            ep_sources_put(out, plan->routes[row->route * top_k + k], row->rank, row->token, k);
        return;
    }
    EpChain chain = plan->chains[row->route];
    int32_t slot = chain.slot;
    for (uint32_t left = chain.mask; left; left &= left - 1) {
        if (slot < 0 || slot >= plan->sizes.slots) return;
        ep_sources_put(out, slot, row->rank, row->token, __builtin_ctz(left));
        slot = plan->next[slot];
    }
}

static void put_rows(const EpHandle *handle, const EpCudaPlan *plan, int32_t top_k,
                     const EpSources *out) {
    const EpPlanShape *s = &handle->shape;
    int latency = ep_handle_is_latency(handle);
    for (int32_t rank = 0; rank < s->num_ranks; rank++) {
        int32_t tokens = (int32_t)ep_max(0, ep_min(plan->tokens[rank], s->max_tokens));
        for (int32_t token = 0; token < tokens; token++) {
            Row row = {.rank = rank, .token = token};
            if (!(latency ? find_latency_row : find_row)(s, plan, &row)) continue;
            if (!s->has_rows)
                put_entries(plan, top_k, &row, out);
            else if (row.slot < plan->header->recv_rows)
                ep_sources_put(out, row.slot, rank, token, -1);
        }
    }
}

/* A handle's own plan has the K of its step. */
static EpStatus read_copy(const EpHandle *handle, int is_named, void *copy, const EpSources *out) {
    EpCudaPlan plan;
    ep_cuda_plan_map(&handle->shape, copy, &plan);
    int32_t top_k = ep_handle_top_k(handle);
    if (!is_named) top_k = (int32_t)ep_max(1, ep_min(plan.header->top_k, top_k));
    EpPlanHeader expected = ep_plan_mark(handle, top_k);
    EP_TRY(ep_plan_check(out->call, plan.header, *plan.tail, &expected));
    EP_TRY(ep_sources_begin(out, plan.header->recv_rows));
    put_rows(handle, &plan, top_k, out);
    return EP_OK;
}

static EpStatus refuse_nodes(const EpHandle *handle, const EpCall *call) {
    if (handle->shape.nodes.nodes == 1) return EP_OK;
    return ep_refuse(call, EP_ERR_UNSUPPORTED, "handle",
                     "expected a group on one node, got one on %d nodes of GPUs",
                     handle->shape.nodes.nodes);
}

EpStatus ep_cuda_read_sources(const EpHandle *handle, EpPlanRef ref, EpStream stream,
                              const EpSources *out) {
    const EpGroup *group = handle->group;
    size_t bytes = (size_t)handle->bytes;
    EP_TRY(refuse_nodes(handle, out->call));
    void *copy = aligned_alloc(128, (bytes + 127) / 128 * 128);
    if (!copy) return ep_refuse(out->call, EP_ERR_NO_MEMORY, "plan", "out of memory");
    EpStatus status =
        ep_cuda_check(group, "cudaMemcpyAsync",
                      cudaMemcpyAsync(copy, ref.memory, bytes, cudaMemcpyDeviceToHost, stream));
    if (status == EP_OK)
        status = ep_cuda_check(group, "cudaStreamSynchronize", cudaStreamSynchronize(stream));
    if (status == EP_OK) status = read_copy(handle, ref.is_named, copy, out);
    free(copy);
    return status;
}

/* Copy `count` words to the host, after the work on the stream. */
static EpStatus read_words(const EpGroup *group, EpStream stream, const int32_t *from,
                           int32_t count, int32_t *to) {
    return ep_cuda_check(
        group, "cudaMemcpyAsync",
        cudaMemcpyAsync(to, from, (size_t)count * sizeof(*to), cudaMemcpyDeviceToHost, stream));
}

EpStatus ep_cuda_read_source_tokens(const EpHandle *handle, const EpCall *call, EpPlanRef ref,
                                    EpStream stream, int32_t *counts) {
    const EpGroup *group = handle->group;
    const EpPlanShape *s = &handle->shape;
    int32_t tokens[EP_CUDA_MAX_RANKS];
    EpCudaPlan plan;
    EP_TRY(refuse_nodes(handle, call));
    ep_cuda_plan_map(s, ref.memory, &plan);
    EP_TRY(read_words(group, stream, plan.tokens, s->num_ranks, tokens));
    EP_TRY(ep_cuda_check(group, "cudaStreamSynchronize", cudaStreamSynchronize(stream)));
    /* A rank's rows are numbered by token; the number behind its last token is that of its rows. */
    for (int32_t rank = 0; rank < s->num_ranks; rank++) {
        int64_t last = ep_max(0, ep_min(tokens[rank], s->max_tokens));
        const int32_t *begins = plan.begins + rank * ((int64_t)s->max_tokens + 1);
        counts[rank] = 0;
        if (last > 0) EP_TRY(read_words(group, stream, begins + last, 1, counts + rank));
    }
    EP_TRY(ep_cuda_check(group, "cudaStreamSynchronize", cudaStreamSynchronize(stream)));
    for (int32_t rank = 0; rank < s->num_ranks; rank++)
        counts[rank] = (int32_t)ep_max(0, ep_min(counts[rank], s->max_tokens));
    return EP_OK;
}
