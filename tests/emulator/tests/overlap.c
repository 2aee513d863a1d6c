/* SPDX-License-Identifier: Apache-2.0 */
/* Experts that work while rows travel: a thread of each rank, as another stream's kernel would.
 * When a block's word changes, its rows and the plan's numbers must be there. It produces the
 * block's rows for combine late, and from the last block to the first. */
#include <pthread.h>
#include <unistd.h>

#include "tests/gpu/device_step.h"

enum { DONE = 7, MOST_US = 3000, MOST_LOOKS = 100000 };

typedef struct Experts {
    DeviceStep *gpu;
    EpTensor ready, done;
    int64_t block_rows, section_rows;
    int wrong; /* rows, numbers or words */
} Experts;

static const RankWorld *rank_of(const Experts *x) {
    return device_step_rank(x->gpu);
}

/* Compare `count` units from `first` on of an output with what it must be; `all`: its units. */
static int differs(const Experts *x, StepOutput output, int64_t all, int64_t first, int64_t count) {
    Image expected = device_step_image(x->gpu, x->gpu->expected, output);
    size_t unit = all ? expected.bytes / (size_t)all : 0, at = (size_t)first * unit;
    if (!case_asks(&x->gpu->c, output)) return 0;
    return memcmp((char *)x->gpu->memory.out[output] + at, expected.data + at,
                  (size_t)count * unit) != 0;
}

/* Returns the first row of a block, and in *end the row behind its last. */
static int64_t rows_of(const Experts *x, int64_t block, int64_t *end) {
    int64_t each = (x->section_rows + x->block_rows - 1) / x->block_rows;
    int64_t section = block / each * x->section_rows, at = block % each * x->block_rows;
    *end = section + at + x->block_rows;
    if (*end > section + x->section_rows) *end = section + x->section_rows;
    return section + at;
}

static void check_block(Experts *x, int64_t block, int word) {
    const RankWorld *me = rank_of(x);
    int64_t end, filled = 0;
    for (int64_t i = rows_of(x, block, &end); i < end; i++) {
        filled += me->row[i].kind == ROW_FILLED;
        if (!world_writes(x->gpu->step.world, &me->row[i])) continue;
        x->wrong += differs(x, OUT_TOKENS, me->buffer_rows, i, 1);
        x->wrong += differs(x, OUT_WEIGHTS, me->buffer_rows, i, 1);
    }
    x->wrong += word != 1 + filled;
    x->wrong += differs(x, OUT_COUNTS, 1, 0, 1) + differs(x, OUT_TOTALS, 1, 0, 1);
}

static void produce_block(const Experts *x, int64_t block) {
    int64_t end, begin = rows_of(x, block, &end);
    size_t bytes = case_sum_bytes(&x->gpu->c), at = (size_t)begin * bytes;
    usleep((useconds_t)((uint64_t)(block + 1) * 2654435761u % MOST_US));
    memcpy((char *)x->gpu->memory.in[IN_EXPERT_OUT] + at, rank_of(x)->expert_out + at,
           (size_t)(end - begin) * bytes);
    __atomic_store_n((int32_t *)x->done.data + block, DONE, __ATOMIC_RELEASE);
}

static void *run_experts(void *arg) {
    Experts *x = arg;
    int64_t blocks = x->ready.shape[0], left = blocks;
    char *seen = calloc((size_t)blocks + 1, 1);
    for (int looks = 0; left > 0 && looks < MOST_LOOKS; looks++) {
        for (int64_t i = 0; i < blocks; i++) {
            int word = __atomic_load_n((int32_t *)x->ready.data + i, __ATOMIC_ACQUIRE);
            if (!word || seen[i]) continue;
            seen[i] = 1, left--;
            check_block(x, i, word);
        }
        usleep(50);
    }
    x->wrong += (int)left;
    for (int64_t i = blocks - 1; i >= 0; i--)
        produce_block(x, i);
    free(seen);
    return NULL;
}

static void run_overlapped(DeviceStep *gpu) {
    pthread_t thread;
    int64_t fixed = case_block_rows(&gpu->c);
    gpu->memory.counters = step_counters_new(&gpu->step);
    Experts x = {.gpu = gpu,
                 .ready = step_counter(&gpu->step, gpu->memory.counters, READY_WORDS),
                 .done = step_counter(&gpu->step, gpu->memory.counters, DONE_WORDS),
                 .block_rows = gpu->c.block_rows,
                 .section_rows = fixed ? fixed : device_step_rank(gpu)->buffer_rows};
    memset(x.done.data, 0, step_bytes(x.done));
    memset(gpu->memory.in[IN_EXPERT_OUT], 0xff, step_bytes(step_expert_out(&gpu->step)));
    CHECK(!pthread_create(&thread, NULL, run_experts, &x), "no thread");
    device_step_issue(gpu, gpu->c.phases ? STEP_PREPARE | STEP_DISPATCH_PHASES
                                         : STEP_PREPARE | STEP_DISPATCH);
    gpu->step.expected = DONE;
    device_step_issue(gpu, gpu->c.phases ? STEP_COMBINE_SEND : STEP_COMBINE);
    gpu->step.expected = 0;
    if (gpu->c.phases) device_step_issue(gpu, STEP_COMBINE_WAIT);
    pthread_join(thread, NULL);
    device_step_check(gpu);
    CHECK(!x.wrong, "%d rows, numbers or words were wrong when a word changed", x.wrong);
    gpu_release(gpu->memory.counters);
    gpu->memory.counters = NULL;
}

static void overlap(const EpBootstrap *bootstrap, Case c) {
    c.ranks = bootstrap->size, c.experts = 3 * c.ranks, c.top_k = 3, c.hidden = 136;
    c.max_tokens = 33, c.spread = SPREAD_FULL, c.alignment = 8, c.block_rows = 8,
    c = case_complete(c);
    EpGroup *group = open_group(bootstrap, &c);
    DeviceStep gpu;
    if (!c.capacity) c.capacity = 1600;
    device_step_new(&gpu, group, &c, bootstrap->rank);
    for (int step = 0; step < 3; step++) {
        c.seed = (uint64_t)step;
        device_step_draw(&gpu, &c);
        run_overlapped(&gpu);
    }
    CHECK_OK(ep_group_status(group, NULL));
    device_step_close(&gpu);
    ep_group_destroy(group);
}

#define OverlapTest(name, changes) \
    RankTest(gpu_overlap, name, 2, overlap(bootstrap, case_of("%s", changes)))
OverlapTest(expert_major, "weighted=1 zero_tail=zero capacity=1600");
OverlapTest(flat, "weighted=1 layout=flat capacity=1600");
OverlapTest(batched_of_two_blocks, "layout=batched padding=keep num_sms=2");
OverlapTest(rank_major, "weighted=1 layout=rank-major zero_tail=ids");
OverlapTest(fp8_sums, "capacity=1600 sum_quant=fp8 sum_type=fp32");
OverlapTest(latency, "weighted=1 mode=latency capacity=1600");
OverlapTest(latency_batched, "weights_at_combine=1 mode=latency layout=batched num_sms=3");
OverlapTest(latency_in_phases, "weighted=1 mode=latency layout=flat phases=1 capacity=1600");

/* Rank 1, which has no rows, has completed combine, and calls ep_group_mask while rank 0 waits for
 * its blocks, and rank 2 for rank 0. */
ThreadTest(gpu_overlap, masks_early, 3) {
    Case c = case_of("ranks=3 spread=alone routing=one-rank alignment=16 block_rows=4 masks=1");
    uint32_t all = 7;
    DeviceStep gpu;
    c.capacity = 1600, c = case_complete(c);
    EpGroup *group = open_group(bootstrap, &c);
    device_step_new(&gpu, group, &c, bootstrap->rank);
    device_step_draw(&gpu, &c);
    gpu.memory.counters = step_counters_new(&gpu.step);
    EpTensor done = step_counter(&gpu.step, gpu.memory.counters, DONE_WORDS);
    memset(done.data, 0, step_bytes(done));
    device_step_issue(&gpu, STEP_PREPARE | STEP_DISPATCH);
    gpu.step.expected = DONE;
    device_step_issue(&gpu, STEP_COMBINE);
    if (bootstrap->rank == 0) {
        usleep(500000);
        for (int64_t i = 0; i < done.shape[0]; i++)
            __atomic_store_n((int32_t *)done.data + i, DONE, __ATOMIC_RELEASE);
        CHECK_CUDA(cudaStreamSynchronize(gpu.stream));
        CHECK_OK(ep_group_status(group, NULL));
    }
    CHECK_OK(ep_group_mask(group, &all, gpu.stream));
    device_step_check(&gpu);
    gpu_release(gpu.memory.counters), gpu.memory.counters = NULL;
    device_step_close(&gpu);
    ep_group_destroy(group);
}
