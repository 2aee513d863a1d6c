/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A step with a handle of its own, as frameworks make it that keep nothing between calls: create a
 * handle, prepare and dispatch with a plan in memory that the calls name, destroy the handle.
 */
#include "tools/bench/device.h"
#include "tools/bench/measure.h"
#include "tools/common/util.h"

typedef enum HandleCall { CREATE_AND_USE, DESTROY, HANDLE_CALLS } HandleCall;

/* In latency mode ep_prepare is no phase: it only records the routing. */
static bool create_and_use(Case *c) {
    EpHandleConfig config = case_handle_config(c);
    config.plans = EP_PLANS_NAMED;
    if (!bench_ok(ep_handle_create(c->group, &config, &c->handle), "ep_handle_create"))
        return false;
    bool prepared = c->latency ? phase_begin(c) : phase_run(c, PHASE_PREPARE);
    return prepared && phase_run(c, PHASE_DISPATCH);
}

static bool run(void *context, int which) {
    Case *c = context;
    if (which == CREATE_AND_USE) return create_and_use(c);
    ep_handle_destroy(c->handle);
    return true;
}

bool measure_new_handle(Case *c, double *new_us, double *destroy_us) {
    const Options *o = c->options;
    Case named = *c;
    Quantiles times[HANDLE_CALLS];
    double host_us[HANDLE_CALLS];
    named.plan = &c->tensors.plan_memory;
    if (c->device) {
        if (!device_time_calls(&named, o->run.iterations, run, &named, HANDLE_CALLS, times,
                               host_us))
            return false;
    } else {
        if (!time_calls(c->world, o->run.warmup, o->run.iterations, run, &named, HANDLE_CALLS,
                        times))
            return false;
        for (int i = 0; i < HANDLE_CALLS; i++)
            host_us[i] = times[i].median_us;
    }
    *new_us = host_us[CREATE_AND_USE], *destroy_us = host_us[DESTROY];
    return true;
}
