/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/recorded.h"

static const EpTensor *copy_tensor(const EpTensor *given, EpTensor *copy) {
    if (!given) return NULL;
    *copy = *given;
    return copy;
}

void ep_recorded_keep(EpRecorded *recorded, const EpRouting *routing) {
    const EpPlanTensors *out = routing->out;
    recorded->given = recorded->pending = 1;
    recorded->routing = *routing;
    if (!out) return;
    EpTensor *copy = recorded->tensor;
    recorded->out = (EpPlanTensors)EP_PLAN_TENSORS_INIT;
    recorded->out.expert_counts = copy_tensor(out->expert_counts, &copy[0]);
    recorded->out.expert_padded = copy_tensor(out->expert_padded, &copy[1]);
    recorded->out.expert_offsets = copy_tensor(out->expert_offsets, &copy[2]);
    recorded->out.totals = copy_tensor(out->totals, &copy[3]);
    recorded->out.source_counts = copy_tensor(out->source_counts, &copy[4]);
    recorded->routing.out = &recorded->out;
}

EpStep ep_recorded_step(const EpRecorded *recorded) {
    EpStep step = {.prepared = recorded->given, .info = EP_HANDLE_INFO_INIT};
    step.info.top_k = recorded->routing.top_k;
    step.num_rows = recorded->routing.num_rows;
    step.exact = 1;
    return step;
}
