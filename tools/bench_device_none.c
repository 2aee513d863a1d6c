/* SPDX-License-Identifier: Apache-2.0 */

/** What builds without CUDA have of bench_device.h: no case has a device. */

#if !EP_WITH_CUDA

#include "bench_device.h"
#include "bench_error.h"

static bool refuse(void) {
    return bench_fail("this ep_bench was built without CUDA");
}

bool device_built(void) {
    return false;
}

bool device_select(World *world, const Options *options) {
    (void)world;
    (void)options;
    return true;
}

void device_name(char *out, size_t bytes) {
    if (bytes) out[0] = 0;
}

bool device_create(Case *c) {
    (void)c;
    return true;
}

void device_destroy(Case *c) {
    (void)c;
}

bool device_poison(Case *c, PhaseId phase) {
    (void)c;
    (void)phase;
    return true;
}

bool device_fetch(Case *c, PhaseId phase) {
    (void)c;
    (void)phase;
    return true;
}

bool device_capture(Case *c) {
    (void)c;
    return refuse();
}

bool graph_run(Case *c, PhaseId phase) {
    (void)c;
    (void)phase;
    return refuse();
}

bool graph_run_step(Case *c) {
    (void)c;
    return refuse();
}

bool device_time_calls(Case *c, int64_t iterations, TimedCall call, void *context, int count,
                       Quantiles *out, double *issue_us) {
    (void)c;
    (void)iterations;
    (void)call;
    (void)context;
    (void)count;
    (void)out;
    (void)issue_us;
    return refuse();
}

bool signal_measure(Case *c, double *empty_node_us, double *flag_us) {
    (void)c;
    (void)empty_node_us;
    (void)flag_us;
    return refuse();
}

bool wire_measure(Case *c, double floor_us[NUM_PHASES]) {
    (void)c;
    (void)floor_us;
    return refuse();
}

bool nccl_measure(Case *c, Check *check, BaselineResult *out) {
    (void)c;
    (void)check;
    (void)out;
    return refuse();
}

#endif
