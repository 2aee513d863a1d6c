/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Times what the calls of meshes and weights take the host, on any machine.
 *
 *     make build/mesh_time && build/mesh_time
 *
 * The calls of meshes are for 512 ranks, none of which is started. Those of weights are one rank's,
 * whose weight has 8 elements: so there is nearly nothing to move, and the rest is the call's own.
 * Prints microseconds per call, the fastest of several runs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "ep/ep_weight.h"

enum { CALLS = 20000, RUNS = 7, RANKS = 512, MOST_BYTES = 4096 };

static EpMesh mesh = EP_MESH_INIT;
static EpAxes axes;
static EpSpec spec = EP_SPEC_INIT;
static const int64_t shape[] = {256, 7168, 2048};

static EpMeshComm *comm;
static EpWeight *weight;
static EpTensor shard, full, result;

static void must(EpStatus status) {
    if (status == EP_OK) return;
    fprintf(stderr, "mesh_time: %s\n", ep_last_error());
    exit(1);
}

/* ---- calls ---------------------------------------------------------------------------------- */

static void parse_mesh(void) {
    must(ep_mesh_parse("data=8,fsdp=8,expert=8", &mesh));
}

static void find_group(void) {
    int32_t ranks[RANKS];
    must(ep_mesh_group(&mesh, &axes, 77, NULL, NULL, ranks));
}

static void parse_spec(void) {
    must(ep_spec_parse(&mesh, "expert,fsdp,_", &spec));
}

static void plan_tensor(void) {
    EpSharding sharding = EP_SHARDING_INIT;
    must(ep_sharding(&mesh, &spec, EP_TENSOR_EXPERT_WEIGHT, "w1", shape, &sharding));
}

static void create_weight(void) {
    EpWeightConfig config = EP_WEIGHT_CONFIG_INIT;
    EpWeight *made = NULL;
    config.name = "w", config.shape[0] = 2, config.shape[1] = 2, config.shape[2] = 2;
    must(ep_spec_parse(&mesh, "expert,fsdp,_", &config.spec));
    must(ep_weight_create(comm, &config, &made));
    ep_weight_destroy(made);
}

static void ask_sizes(void) {
    EpWeightSizes sizes = EP_WEIGHT_SIZES_INIT;
    must(ep_weight_sizes(weight, NULL, &sizes));
}

static void gather(void) {
    must(ep_weight_gather(weight, NULL, &shard, NULL, NULL, &full, NULL));
}

static void reduce(void) {
    must(ep_weight_reduce(weight, &full, 0, NULL, NULL, &result));
}

/* ---- timing --------------------------------------------------------------------------------- */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

static void time_call(const char *name, void (*call)(void)) {
    double best = 0;
    for (int run = 0; run < RUNS; run++) {
        double start = now();
        for (int i = 0; i < CALLS; i++)
            call();
        double each = (now() - start) / CALLS;
        if (run == 0 || each < best) best = each;
    }
    printf("%-40s %8.3f us\n", name, best);
}

static void open_weight(EpBootstrap *alone) {
    EpMeshCommConfig config = EP_MESH_COMM_CONFIG_INIT;
    EpWeightConfig w = EP_WEIGHT_CONFIG_INIT;
    static double memory[3][MOST_BYTES / sizeof(double)];
    config.backend = EP_BACKEND_HOST;
    must(ep_mesh_parse("fsdp=1,expert=1", &mesh));
    must(ep_bootstrap_local(1, alone));
    must(ep_mesh_comm_create(alone, &mesh, &config, &comm));
    w.name = "w", w.shape[0] = 2, w.shape[1] = 2, w.shape[2] = 2;
    must(ep_spec_parse(&mesh, "expert,fsdp,_", &w.spec));
    must(ep_weight_create(comm, &w, &weight));
    shard = ep_tensor_3d(memory[0], EP_TYPE_BF16, 2, 2, 2);
    full = ep_tensor_3d(memory[1], EP_TYPE_BF16, 2, 2, 2);
    result = ep_tensor_3d(memory[2], EP_TYPE_FP32, 2, 2, 2);
}

int main(void) {
    EpBootstrap alone = EP_BOOTSTRAP_INIT;
    parse_mesh();
    must(ep_mesh_axes(&mesh, "(fsdp,expert)", &axes));
    parse_spec();
    time_call("ep_mesh_parse", parse_mesh);
    time_call("ep_mesh_group, 64 of 512 ranks", find_group);
    time_call("ep_spec_parse", parse_spec);
    time_call("ep_sharding", plan_tensor);
    open_weight(&alone);
    time_call("ep_weight_create and _destroy, 1 rank", create_weight);
    time_call("ep_weight_sizes", ask_sizes);
    time_call("ep_weight_gather, 1 rank", gather);
    time_call("ep_weight_reduce, 1 rank", reduce);
    ep_weight_destroy(weight);
    ep_mesh_comm_destroy(comm);
    ep_bootstrap_destroy(&alone);
    return 0;
}
