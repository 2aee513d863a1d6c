/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_check.h"

static void check_experts(Check *check, const EpHandleInfo *info) {
    const Slots *s = &check->c->slots;
    const int64_t *plan = check->c->buffers.plan;
    int64_t local = s->num_local;
    for (int64_t l = 0; l < local; l++) {
        check_int(check, "expert_counts", l, plan[l], s->counts[l]);
        check_int(check, "expert_padded", l, plan[local + l], s->padded[l]);
        check_int(check, "info.expert_counts", l, info->expert_counts[l], s->counts[l]);
        check_int(check, "info.expert_padded", l, info->expert_padded[l], s->padded[l]);
    }
    for (int64_t l = 0; l <= local; l++) {
        check_int(check, "expert_offsets", l, plan[2 * local + l], s->offsets[l]);
        check_int(check, "info.expert_offsets", l, info->expert_offsets[l], s->offsets[l]);
    }
}

void check_prepare(Check *check) {
    const Case *c = check->c;
    const Slots *s = &c->slots;
    const int64_t *totals = c->buffers.plan + 3 * s->num_local + 1;
    check_int(check, "totals", 0, totals[0], s->recv_rows);
    check_int(check, "totals", 1, totals[1], s->needed_rows);
    check_int(check, "totals", 2, totals[2], s->dropped);
    EpHandleInfo info = EP_HANDLE_INFO_INIT;
    if (ep_handle_info(c->handle, &info) != EP_OK) {
        check_note(check, "ep_handle_info", 0, 0, EP_OK, 1);
        return;
    }
    check_int(check, "info.num_tokens", 0, info.num_tokens, c->tokens);
    check_int(check, "info.top_k", 0, info.top_k, c->options->top_k);
    check_int(check, "info.recv_rows", 0, info.recv_rows, s->recv_rows);
    check_int(check, "info.needed_rows", 0, info.needed_rows, s->needed_rows);
    check_int(check, "info.dropped_slots", 0, info.dropped_slots, s->dropped);
    check_int(check, "info.num_local_experts", 0, info.num_local_experts, s->num_local);
    if (info.num_local_experts == s->num_local) check_experts(check, &info);
}
