/* SPDX-License-Identifier: Apache-2.0 */
/* The symbols that the library needs, as nm lists them, and the layout of public structs. */
#include <stddef.h>

#include "ep/ep_weight.h"
#include "tests/harness/check.h"
#include "tests/harness/process.h"

/* The library never ends the process or writes to stdout, and its core calls no MPI. */
static void check_needed(const char *name) {
    static const char *const never[] = {
        "exit",   "_exit",   "abort",        "quick_exit", "printf", "puts",     "putchar",
        "stdout", "vprintf", "__printf_chk", "setenv",     "signal", "sigaction"};
    for (int i = 0; i < LENGTH(never); i++)
        CHECK(strcmp(name, never[i]) != 0, "libep calls %s", name);
    CHECK(strncmp(name, "MPI_", 4) != 0, "libep calls %s", name);
}

SoloTest(runtime_exports, calls_that_a_library_does_not_make) {
    if (TESTS_SANITIZED) cr_skip_test("sanitizers add calls of their own");
    /* The archive contains only our own code. */
    const char *argv[] = {"nm", "-A", "--undefined-only", build_path("libep.a"), NULL};
    ProcessResult result = process_run(argv, 0);
    CHECK(result.exit_status == 0, "nm exits with %d: %s", result.exit_status, result.err);
    for (char *line = strtok(result.out, "\n"); line; line = strtok(NULL, "\n")) {
        char *name = strrchr(line, ' ') + 1;
        name[strcspn(name, "@")] = 0;
        /* nvcc's wrappers of kernels refer to exit. */
        if (!strstr(line, ".cu.o:")) check_needed(name);
    }
    process_result_free(&result);
}

/* Check that a struct begins with its size, and that the initializer fills it in. */
#define CHECK_STRUCT(type, init)                                            \
    do {                                                                    \
        type value = init;                                                  \
        CHECK(offsetof(type, struct_size) == 0, "in the middle");           \
        CHECK(value.struct_size == sizeof(type), "%zu", value.struct_size); \
    } while (0)

SoloTest(runtime_exports, structs_begin_with_their_size) {
    CHECK_STRUCT(EpBootstrap, EP_BOOTSTRAP_INIT);
    CHECK_STRUCT(EpGroupConfig, EP_GROUP_CONFIG_INIT);
    CHECK_STRUCT(EpGroupMemory, EP_GROUP_MEMORY_INIT);
    CHECK_STRUCT(EpGroupInfo, EP_GROUP_INFO_INIT);
    CHECK_STRUCT(EpHandleConfig, EP_HANDLE_CONFIG_INIT);
    CHECK_STRUCT(EpHandleInfo, EP_HANDLE_INFO_INIT);
    CHECK_STRUCT(EpHandleCost, EP_HANDLE_COST_INIT);
    CHECK_STRUCT(EpPlanTensors, EP_PLAN_TENSORS_INIT);
    CHECK_STRUCT(EpExtras, EP_EXTRAS_INIT);
    CHECK_STRUCT(EpFinding, EP_FINDING_INIT);
    CHECK_STRUCT(EpMesh, EP_MESH_INIT);
    CHECK_STRUCT(EpSpec, EP_SPEC_INIT);
    CHECK_STRUCT(EpSharding, EP_SHARDING_INIT);
    CHECK_STRUCT(EpRowsForm, EP_ROWS_FORM_INIT);
    CHECK_STRUCT(EpMeshCommConfig, EP_MESH_COMM_CONFIG_INIT);
    CHECK_STRUCT(EpWeightConfig, EP_WEIGHT_CONFIG_INIT);
    CHECK_STRUCT(EpWeightForm, EP_WEIGHT_FORM_INIT);
    CHECK_STRUCT(EpWeightSizes, EP_WEIGHT_SIZES_INIT);
    CHECK_STRUCT(EpTensor, ep_tensor_3d(NULL, EP_TYPE_BF16, 1, 2, 3));
    CHECK_STRUCT(EpTensor, ep_tensor_1d(NULL, EP_TYPE_BF16, 1));
}

/* The initializers hold the defaults that the header promises. */
SoloTest(runtime_exports, defaults_of_initializers) {
    EpGroupConfig group = EP_GROUP_CONFIG_INIT;
    CHECK(group.alignment == 1 && group.max_recv_rows == 0, "%d", group.alignment);
    CHECK(group.overflow == EP_OVERFLOW_ERROR && group.backend == EP_BACKEND_AUTO, "policy");
    CHECK(group.mode == EP_MODE_THROUGHPUT, "mode %d", (int)group.mode);
    CHECK(group.timeout_seconds == EP_DEFAULT && group.nccl_comm == NULL, "timeout");
    EpHandleConfig handle = EP_HANDLE_CONFIG_INIT;
    CHECK(handle.layout == EP_LAYOUT_EXPERT_MAJOR && handle.zero_tail == 0, "layout");
    CHECK(handle.top_k == EP_DEFAULT && handle.alignment == EP_DEFAULT, "inherited");
    CHECK(handle.max_recv_rows == EP_DEFAULT && handle.overflow == EP_DEFAULT, "inherited");
    CHECK(handle.mode == EP_DEFAULT && handle.num_sms == EP_DEFAULT, "mode");
    CHECK(handle.quant == EP_QUANT_NONE && handle.scale_order == EP_SCALES_BY_ROW, "scales");
    CHECK(handle.rows_per_expert == EP_DEFAULT, "rows_per_expert");
    CHECK(handle.expert_ids == EP_IDS_LOCAL && handle.row_weights == EP_WEIGHTS_HERE, "expert ids");
}
