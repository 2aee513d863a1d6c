/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_CASES_MESHES_H
#define TESTS_CASES_MESHES_H

/**
 * Meshes, specs and communicators from text. A test ends where one of them fails.
 */

#include "ep/ep_weight.h"
#include "tests/harness/check.h"

static inline EpMesh mesh_of(const char *text) {
    EpMesh mesh = EP_MESH_INIT;
    REQUIRE_OK(ep_mesh_parse(text, &mesh));
    return mesh;
}

static inline EpSpec spec_of(const EpMesh *mesh, const char *text) {
    EpSpec spec = EP_SPEC_INIT;
    REQUIRE_OK(ep_spec_parse(mesh, text, &spec));
    return spec;
}

static inline EpMeshCommConfig comm_config(double seconds) {
    EpMeshCommConfig config = EP_MESH_COMM_CONFIG_INIT;
    config.backend = TEST_BACKEND, config.timeout_seconds = seconds;
    return config;
}

static inline EpMeshComm *connect_mesh(const EpBootstrap *world, const EpMesh *mesh,
                                       double seconds) {
    EpMeshCommConfig config = comm_config(seconds);
    EpMeshComm *comm = NULL;
    REQUIRE_OK(ep_mesh_comm_create(world, mesh, &config, &comm));
    return comm;
}

#endif
