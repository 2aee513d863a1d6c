/* SPDX-License-Identifier: Apache-2.0 */
/* The sources of rows, from a plan of the host backend. */
#include "handles/sources.h"
#include "handles/host/plan.h"

EpStatus ep_host_read_sources(const EpHandle *handle, EpPlanRef ref, EpStream stream,
                              const EpSources *out) {
    const EpPlan plan = ep_host_plan(handle, ref);
    (void)stream;
    EP_TRY(ep_sources_begin(out, plan.header->recv_rows));
    for (int32_t rank = 0; rank < handle->shape.num_ranks; rank++)
        for (int32_t row = plan.recv_begin[rank]; row < plan.recv_begin[rank + 1]; row++)
            for (int32_t i = 0; i < plan.row_entries[row]; i++) {
                int32_t entry = plan.row_entry[row] + i;
                int32_t k = handle->shape.has_rows ? -1 : plan.entry_k[entry];
                ep_sources_put(out, plan.entry_slot[entry], rank, plan.row_token[row], k);
            }
    return EP_OK;
}

EpStatus ep_host_read_source_tokens(const EpHandle *handle, const EpCall *call, EpPlanRef ref,
                                    EpStream stream, int32_t *counts) {
    const EpPlan plan = ep_host_plan(handle, ref);
    (void)stream, (void)call;
    for (int32_t rank = 0; rank < handle->shape.num_ranks; rank++)
        counts[rank] = plan.recv_begin[rank + 1] - plan.recv_begin[rank];
    return EP_OK;
}
