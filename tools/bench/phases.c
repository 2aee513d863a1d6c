/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "tools/bench/case.h"
#include "tools/bench/counters.h"
#include "tools/bench/device.h"
#include "tools/common/util.h"

/* An optional tensor, or NULL. */
static const EpTensor *optional(bool wanted, const EpTensor *tensor) {
    return wanted ? tensor : NULL;
}

static EpStatus prepare(Case *c) {
    Tensors *t = &c->tensors;
    EpPlanTensors plan = EP_PLAN_TENSORS_INIT;
    plan.expert_counts = &t->plan_counts;
    plan.expert_padded = &t->plan_padded;
    plan.expert_offsets = &t->plan_offsets;
    plan.totals = &t->plan_totals;
    return ep_prepare_with(c->handle, c->plan, &t->index, NULL, c->stream, &plan,
                           c->latency ? NULL : counters_of(c, PHASE_PREPARE));
}

/* The outputs of dispatch besides the rows. */
typedef struct Received {
    const EpTensor *weights, *scales, *index;
} Received;

static Received list_received(Case *c) {
    Tensors *t = &c->tensors;
    return (Received){optional(c->options->weighted, &t->recv_weights),
                      optional(c->recv_scale_bytes > 0, &t->recv_scales),
                      optional(slots_has_rows(c->slots.layout), &t->recv_index)};
}

/* What a dispatch takes besides: counters, if any, and the scale of NVFP4. */
static EpExtras list_extras(Case *c, const EpExtras *counters) {
    EpExtras extras = EP_EXTRAS_INIT;
    if (counters) extras = *counters;
    extras.global_scale = optional(c->quant == EP_QUANT_NVFP4, &c->tensors.global_scale);
    return extras;
}

static EpStatus dispatch_send(Case *c) {
    Tensors *t = &c->tensors;
    EpExtras extras = list_extras(c, counters_of_split(c, SPLIT_DISPATCH_SEND));
    return ep_dispatch_send_with(
        c->handle, c->plan, NULL, &t->tokens_in, optional(c->options->weighted, &t->topk_weights),
        optional(c->options->scale_bytes > 0, &t->scales), c->stream, &extras);
}

static EpStatus dispatch_wait(Case *c) {
    Received to = list_received(c);
    return ep_dispatch_wait_with(c->handle, c->stream, &c->tensors.recv_tokens, to.weights,
                                 to.scales, to.index, counters_of_split(c, SPLIT_DISPATCH_WAIT));
}

static EpStatus dispatch(Case *c) {
    Tensors *t = &c->tensors;
    Received to = list_received(c);
    if (c->options->split) {
        EpStatus status = dispatch_send(c);
        return status == EP_OK ? dispatch_wait(c) : status;
    }
    EpExtras extras = list_extras(c, counters_of(c, PHASE_DISPATCH));
    return ep_dispatch_with(c->handle, c->plan, NULL, &t->tokens_in,
                            optional(c->options->weighted, &t->topk_weights),
                            optional(c->options->scale_bytes > 0, &t->scales), c->stream,
                            &t->recv_tokens, to.weights, to.scales, to.index, &extras);
}

static EpStatus combine_send(Case *c) {
    Tensors *t = &c->tensors;
    return ep_combine_send_with(c->handle, c->plan, &t->slots_in,
                                optional(c->options->weighted, &t->slot_weights), NULL, c->stream,
                                counters_of_split(c, SPLIT_COMBINE_SEND));
}

static EpStatus combine_wait(Case *c) {
    return ep_combine_wait_with(c->handle, c->stream, &c->tensors.tokens_out,
                                counters_of_split(c, SPLIT_COMBINE_WAIT));
}

static EpStatus combine(Case *c) {
    Tensors *t = &c->tensors;
    if (c->options->split) {
        EpStatus status = combine_send(c);
        return status == EP_OK ? combine_wait(c) : status;
    }
    return ep_combine_with(c->handle, c->plan, &t->slots_in,
                           optional(c->options->weighted, &t->slot_weights), NULL, c->stream,
                           &t->tokens_out, counters_of(c, PHASE_COMBINE));
}

static EpStatus combine_backward(Case *c) {
    Tensors *t = &c->tensors;
    bool weighted = c->options->weighted;
    return ep_combine_backward_with(
        c->handle, c->plan, &t->tokens_in, optional(weighted, &t->slot_weights),
        optional(weighted, &t->slots_in), c->stream, &t->slots_out,
        optional(weighted, &t->slot_grads_out), counters_of(c, PHASE_COMBINE_BACKWARD));
}

static EpStatus dispatch_backward(Case *c) {
    Tensors *t = &c->tensors;
    bool weighted = c->options->weighted;
    return ep_dispatch_backward_with(c->handle, c->plan, &t->slots_in,
                                     optional(weighted, &t->slot_grads_in), c->stream,
                                     &t->tokens_out, optional(weighted, &t->topk_grads),
                                     counters_of(c, PHASE_DISPATCH_BACKWARD));
}

/* The phases in the order of a training step, then the halves of latency mode's. */
static const struct {
    const char *name;
    const char *call;
    EpStatus (*run)(Case *c);
} phases[NUM_PHASES + NUM_SPLIT_PHASES] = {
    [PHASE_PREPARE] = {"prepare", "ep_prepare", prepare},
    [PHASE_DISPATCH] = {"dispatch", "ep_dispatch", dispatch},
    [PHASE_COMBINE] = {"combine", "ep_combine", combine},
    [PHASE_COMBINE_BACKWARD] = {"combine_backward", "ep_combine_backward", combine_backward},
    [PHASE_DISPATCH_BACKWARD] = {"dispatch_backward", "ep_dispatch_backward", dispatch_backward},
    [NUM_PHASES + SPLIT_DISPATCH_SEND] = {"dispatch_send", "ep_dispatch_send", dispatch_send},
    [NUM_PHASES + SPLIT_DISPATCH_WAIT] = {"dispatch_wait", "ep_dispatch_wait", dispatch_wait},
    [NUM_PHASES + SPLIT_COMBINE_SEND] = {"combine_send", "ep_combine_send", combine_send},
    [NUM_PHASES + SPLIT_COMBINE_WAIT] = {"combine_wait", "ep_combine_wait", combine_wait},
};

const char *phase_name(PhaseId phase) {
    return phases[phase].name;
}

const char *split_phase_name(SplitPhaseId phase) {
    return phases[NUM_PHASES + phase].name;
}

bool split_phase_run(Case *c, SplitPhaseId phase) {
    return bench_ok(phases[NUM_PHASES + phase].run(c), phases[NUM_PHASES + phase].call);
}

bool phase_exists(const Case *c, PhaseId phase) {
    return !c->latency || phase == PHASE_DISPATCH || phase == PHASE_COMBINE;
}

bool phase_begin(Case *c) {
    return !c->latency || bench_ok(prepare(c), "ep_prepare");
}

static bool call(Case *c, PhaseId phase) {
    return !phase_exists(c, phase) || bench_ok(phases[phase].run(c), phases[phase].call);
}

bool phase_run(Case *c, PhaseId phase) {
    if (phase_exists(c, phase) && c->device && c->device->graphs) return device_replay(c, phase);
    return call(c, phase);
}

bool phase_run_pair(Case *c) {
    return call(c, PHASE_PREPARE) && call(c, PHASE_DISPATCH) && call(c, PHASE_COMBINE);
}

bool phase_run_step(Case *c) {
    if (c->device && c->device->graphs) return device_replay_step(c);
    for (int p = 0; p < NUM_PHASES; p++) {
        if (!phase_run(c, (PhaseId)p)) return false;
    }
    return true;
}

/* Whether every entry's row travels in the phase, in place of a sum for each rank. */
static bool moves_entries(const Case *c, PhaseId phase) {
    bool sums = phase == PHASE_COMBINE || phase == PHASE_DISPATCH_BACKWARD;
    return sums && c->options->sums == EP_SUMS_BY_ENTRY;
}

int64_t phase_bytes(const Case *c, PhaseId phase, int64_t rows, int64_t entries) {
    int64_t row = (int64_t)c->row_bytes, weight = 0;
    if (phase == PHASE_PREPARE)
        return entries * (int64_t)ep_type_bytes((EpType)c->options->index_type);
    if (phase == PHASE_DISPATCH) row = (int64_t)(c->recv_bytes + c->recv_scale_bytes);
    bool by_entry = moves_entries(c, phase);
    if (by_entry) rows = entries;
    if (phase == PHASE_DISPATCH || phase == PHASE_DISPATCH_BACKWARD || by_entry)
        weight = c->options->weighted ? (int64_t)sizeof(float) : 0;
    return rows * row + entries * weight;
}

int64_t phase_remote_bytes(const Case *c, PhaseId phase, int64_t rows, int64_t entries) {
    bool sums = phase == PHASE_COMBINE || phase == PHASE_DISPATCH_BACKWARD;
    int64_t saved = sums ? rows * (int64_t)(c->row_bytes - c->sum_bytes) : 0;
    return phase_bytes(c, phase, rows, entries) - saved;
}

/* ---- outputs ------------------------------------------------------------------------------- */

bool phase_poison(Case *c, PhaseId phase) {
    if (c->device) return device_poison(c, phase);
    buffers_poison(c, phase);
    return true;
}

bool phase_fetch(Case *c, PhaseId phase) {
    return !c->device || device_fetch(c, phase);
}
