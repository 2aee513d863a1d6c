/* SPDX-License-Identifier: Apache-2.0 */
/* The host backend and the CUDA backend give the same bytes for the same step. Each backend sums
 * dot products in an order of its own; both agree with the oracle within 1e-5. */
#include <dlfcn.h>

#include "handles/cuda/handle.h"
#include "tests/gpu/device_step.h"
#include "tests/harness/ranked.h"

static void reserve(void) {
    gpu_reserve((size_t)800 << 20);
}

TestSuite(gpu_backends, .init = reserve);

enum { LATENCY_TOKENS = 61 };

static const EpType types[] = {EP_TYPE_BF16, EP_TYPE_FP16, EP_TYPE_FP32};

static Case draw_case(int ranks, EpLayout layout, EpType type, int weighted) {
    Case c = {.ranks = ranks, .experts = 5 * ranks + 2, .top_k = 5, .hidden = 264};
    c.max_tokens = 257, c.masked_percent = 10, c.duplicates = weighted, c.row_type = type;
    c.sum_type = type, c.weighted = weighted, c.scale_bytes = weighted ? 20 : 0, c.alignment = 16;
    c.capacity = 1300, c.rows_per_expert = 272, c.overflow = EP_OVERFLOW_DROP;
    c.padding = weighted ? EP_PADDING_KEEP : EP_PADDING_ZERO, c.layout = layout;
    c.counted = weighted, c.seed = (uint64_t)(100 * layout + 10 * (int)type + weighted);
    return case_complete(c);
}

/* A dispatch that quantises: each format once, each with another layout. */
static Case draw_quantised(int ranks, EpQuant quant) {
    EpType type = quant == EP_QUANT_FP8 ? EP_TYPE_FP16 : EP_TYPE_BF16;
    Case c = draw_case(ranks, (EpLayout)(quant - 1), type, quant != EP_QUANT_FP8_UE8M0);
    c.quant = quant;
    c.scale_order = quant == EP_QUANT_FP8 ? EP_SCALES_BY_ROW : EP_SCALES_BY_COLUMN;
    return case_complete(c);
}

/* Sums that travel quantised: each type once, each with another layout. */
static Case draw_packed(int ranks, EpType type) {
    Case c = draw_case(ranks, (EpLayout)type, type, type != EP_TYPE_FP16);
    c.sum_quant = EP_QUANT_FP8, c.hidden = 256;
    return case_complete(c);
}

/* Latency mode with fewer tokens, whole or in phases. Some cases quantise if both backends do. */
static Case draw_latency_case(int ranks, int i) {
    Case c = draw_case(ranks, (EpLayout)(1 + i % 4), types[i / 4 % 3], i % 2);
    c.mode = EP_MODE_LATENCY, c.phases = i / 12 % 2, c.global_ids = i % 3;
    c.max_tokens = LATENCY_TOKENS, c.capacity = 240, c.rows_per_expert = 64;
    if (i % 5 == 3) c.quant = (EpQuant)(EP_QUANT_FP8 + i / 5 % 5), c.hidden = 256;
    if (i % 4 == i / 4 % 4) c.sum_quant = EP_QUANT_FP8, c.hidden = 256;
    return case_complete(c);
}

/* Rank-major tensors have the group's max_tokens rows for each rank, so it is small in latency
 * mode: the pinned buffer has no room for more. */
static EpGroup *group_on(const EpBootstrap *bootstrap, EpBackend backend, EpMode mode) {
    Case widest = draw_case(bootstrap->size, EP_LAYOUT_EXPERT_MAJOR, EP_TYPE_FP32, 1);
    widest.mode = mode;
    if (mode == EP_MODE_LATENCY) widest.max_tokens = LATENCY_TOKENS;
    EpGroupConfig config = case_group_config(&widest);
    config.backend = backend;
    EpGroup *group = open_group_with(bootstrap, &config);
    return group;
}

/* Run one step on each backend and compare their outputs. The host backend gets pinned memory and
 * has finished when a call returns. */
static void run_both(EpGroup *const *groups, int rank, const World *world, cudaStream_t stream) {
    DeviceStep gpu[2];
    void *plain = gpu_allocate(128, device_step_bytes(&world->c));
    REQUIRE(plain, "no memory");
    for (int i = 0; i < 2; i++) {
        EpHandle *handle = device_step_handle(groups[i], &world->c);
        device_step_open(&gpu[i], groups[i], handle, &world->c, rank, stream, i ? plain : NULL);
        device_step_load(&gpu[i], world);
        CHECK_CUDA(cudaStreamSynchronize(stream));
        device_step_issue(&gpu[i], device_step_all(&world->c));
        device_step_check(&gpu[i]);
        CHECK_OK(ep_group_status(groups[i], NULL));
        ep_handle_destroy(handle);
    }
    device_step_check_equal(&gpu[0], &gpu[1], 0, "cuda and host");
    device_step_close(&gpu[0]);
    device_step_close(&gpu[1]);
    gpu_release(plain);
}

static Case draw_any(int ranks, int i, EpMode mode) {
    if (mode == EP_MODE_LATENCY) return draw_latency_case(ranks, i);
    if (i >= 21) return draw_packed(ranks, types[i - 21]);
    if (i >= 18) return draw_quantised(ranks, (EpQuant)(i - 16));
    return draw_case(ranks, (EpLayout)(1 + i % 3), types[i / 3 % 3], i / 9);
}

static void both_backends(const EpBootstrap *bootstrap, EpMode mode) {
    EpGroup *groups[] = {group_on(bootstrap, EP_BACKEND_CUDA, mode),
                         group_on(bootstrap, EP_BACKEND_HOST, mode)};
    cudaStream_t stream = new_stream();
    for (int i = 0; i < 24; i++) {
        Case c = draw_any(bootstrap->size, i, mode);
        World *world = world_new(&c);
        check_note("%s", case_describe(&c));
        run_both(groups, bootstrap->rank, world, stream);
        world_free(world);
    }
    CHECK_CUDA(cudaStreamDestroy(stream));
    ep_group_destroy(groups[1]);
    ep_group_destroy(groups[0]);
}

RankTests(gpu_backends, equal, both_backends(bootstrap, EP_MODE_THROUGHPUT));
LatencyTests(gpu_backends, equal_in_latency_mode, both_backends(bootstrap, EP_MODE_LATENCY));

/* ---- numbers of multiprocessors ---- */

/* Bytes do not show how many blocks a launch has, so this asks for what all launches are made
 * from. */
ThreadTest(gpu_backends, num_sms, 1) {
    static const struct {
        int group, handle, expected;
    } limits[] = {{5, EP_DEFAULT, 5}, {5, 3, 3}, {3, 5, 3}, {EP_DEFAULT, 2, 2}, {4, 0, 4}};
    setenv("EMULATED_SMS", "8", 1);
    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        Case c = draw_case(1, EP_LAYOUT_EXPERT_MAJOR, EP_TYPE_BF16, 1);
        EpGroupConfig config = case_group_config(&c);
        EpHandleConfig handle_config = case_handle_config(&c);
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

/* ---- versions of NCCL ---- */

/* Returns NCCL's version as a program finds it; 0: none. */
static int nccl_version(void) {
    int (*get_version)(int *version) = NULL;
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    void *symbol = library ? dlsym(library, "ncclGetVersion") : NULL;
    int version = 0;
    memcpy(&get_version, &symbol, sizeof(symbol));
    return get_version && get_version(&version) == 0 ? version : 0;
}

/* A version of NCCL after those that libep was tested with is used, with one warning. Emulated GPUs
 * take the version from the environment. */
ThreadTest(gpu_backends, newer_nccl_2, 2) {
    static const char *path;
    if (bootstrap->rank == 0) path = temporary_file();
    set_on_ranks(bootstrap, "EMULATED_NCCL", "23305");
    set_on_ranks(bootstrap, "LIBEP_LOG_FILE", path);
    if (nccl_version() <= 23299) check_left_out("this NCCL is not newer");
    for (int i = 0; i < 2; i++) {
        EpGroup *group = group_on(bootstrap, EP_BACKEND_AUTO, EP_MODE_THROUGHPUT);
        EpGroupInfo info = EP_GROUP_INFO_INIT;
        CHECK_OK(ep_group_query(group, &info));
        CHECK(info.backend == EP_BACKEND_CUDA, "%s", info.reason);
        ep_group_destroy(group);
    }
    int lines = count_lines(path, "NCCL 2.33.5 is newer than 2.32");
    CHECK(lines == 1, "%d warnings", lines);
    REQUIRE_OK(bootstrap->barrier(bootstrap->context, 60));
    if (bootstrap->rank == 0) unlink(path);
}
