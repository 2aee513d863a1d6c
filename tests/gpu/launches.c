/* SPDX-License-Identifier: Apache-2.0 */
/* What blocks launches have, and which NCCL a group takes. */
#include "handles/cuda/handle.h"
#include "tests/gpu/communicator.h"
#include "tests/harness/ranked.h"

/* Bytes do not show how many blocks a launch has, so this asks for what all launches are made
 * from. */
ThreadTest(gpu_launches, num_sms, 1) {
    static const struct {
        int group, handle, expected;
    } limits[] = {{5, EP_DEFAULT, 5}, {5, 3, 3}, {3, 5, 3}, {EP_DEFAULT, 2, 2}, {4, 0, 4}};
    setenv("EMULATED_SMS", "8", 1);
    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        EpGroupConfig config = group_config(1);
        EpHandleConfig handle_config = EP_HANDLE_CONFIG_INIT;
        EpGroup *group = NULL;
        EpHandle *handle = NULL;
        config.num_sms = limits[i].group, handle_config.num_sms = limits[i].handle;
        REQUIRE_OK(ep_group_create(bootstrap, &config, &group));
        REQUIRE_OK(ep_handle_create(group, &handle_config, &handle));
        int blocks = ep_cuda_launch_group(handle).blocks;
        CHECK(blocks == limits[i].expected, "case %zu: %d blocks instead of %d", i, blocks,
              limits[i].expected);
        ep_handle_destroy(handle);
        ep_group_destroy(group);
    }
}

/* Blocks have as much shared memory as the setting allows, or the group is refused. */
ThreadTest(gpu_launches, shared_bytes, 1) {
    EpGroupConfig config = group_config(1);
    EpGroup *group = NULL;
    setenv("LIBEP_SHARED_BYTES", "10K", 1);
    CHECK_REFUSED(ep_group_create(bootstrap, &config, &group), EP_ERR_UNSUPPORTED,
                  "bytes of shared memory", "got 10240 bytes");
    CHECK(!group, "an output was written");
    setenv("LIBEP_SHARED_BYTES", "99K", 1);
    REQUIRE_OK(ep_group_create(bootstrap, &config, &group));
    CHECK(ep_cuda(group)->shared_bytes == 99 << 10, "%d bytes", ep_cuda(group)->shared_bytes);
    ep_group_destroy(group);
    unsetenv("LIBEP_SHARED_BYTES");
}

/* A version of NCCL after those that libep was tested with is used, with one warning. Emulated GPUs
 * take the version from the environment. */
ThreadTest(gpu_launches, newer_nccl_2, 2) {
    static const char *path;
    Nccl nccl;
    int version = 0;
    if (bootstrap->rank == 0 || ranked_is()) path = temporary_file();
    set_on_ranks(bootstrap, "EMULATED_NCCL", "23305");
    set_on_ranks(bootstrap, "LIBEP_LOG_FILE", path);
    nccl_serves(&nccl, 2);
    if (nccl.get_version(&version) != ncclSuccess || version <= 23299)
        check_left_out("this NCCL is not newer");
    EpGroupConfig config = group_config(2);
    config.backend = EP_BACKEND_AUTO;
    for (int i = 0; i < 2; i++) {
        EpGroup *group = open_group_with(bootstrap, &config);
        EpGroupInfo info = group_info(group);
        CHECK(info.backend == EP_BACKEND_CUDA, "%s", info.reason);
        ep_group_destroy(group);
    }
    int lines = count_lines(path, "NCCL 2.33.5 is newer than 2.32");
    CHECK(lines == 1, "%d warnings", lines);
    REQUIRE_OK(bootstrap->barrier(bootstrap->context, 60));
    if (bootstrap->rank == 0) unlink(path);
}
