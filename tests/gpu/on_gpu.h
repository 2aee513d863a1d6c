/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_ON_GPU_H
#define TESTS_GPU_ON_GPU_H

/**
 * Runs the same tests on the CUDA backend, with unchanged test bodies and oracle. This header
 * precedes every test source (-include). Memory comes from a pinned buffer that GPUs can read and
 * write; other tensors are copied there for the call. A synchronization follows each operation.
 * Each rank has a GPU of its own (but see gpu_shares), and tests of more ranks than GPUs are
 * skipped.
 *
 * Tests may run side by side on the same GPUs (criterion's -j): kernels of several processes share
 * a GPU by turns, also while they wait for a peer.
 */

#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "ep/ep_weight.h"
#include "tests/gpu/devices.h"

void gpu_handle_destroy(EpHandle *handle);
void gpu_group_destroy(EpGroup *group);

/** What a call does to the routing that ep_prepare has deferred in latency mode: the copies of its
 *  tensors stay until the handle or its group is destroyed. */
enum { GPU_KEEPS = 1, GPU_READS = 2, GPU_WRITES = 4 };

/** Begin a call, pass one argument each, and end it. */
void gpu_begin(int routing);
EpStatus gpu_end(EpStatus status);
EpHandle *gpu_handle(const void *handle);
const EpTensor *gpu_tensor(const void *tensor);
const EpPlanTensors *gpu_numbers(const void *numbers);
const EpPrepare *gpu_routing(const void *prepare);
const EpExtras *gpu_extras(const void *extras);

#define malloc(bytes) gpu_allocate(64, bytes)
#define calloc(count, bytes) gpu_allocate_zeroed(count, bytes)
#define aligned_alloc(alignment, bytes) gpu_allocate(alignment, bytes)
#define free(memory) gpu_release(memory)

#ifndef GPU_CALLS_UNCHANGED
/* The operations: tensors that GPUs cannot reach are copied to the pinned buffer and back. */
#define GPU_ANY(x) ((const void *)(uintptr_t)(x))
#define GPU_ARG(x) \
    _Generic((x),                                    \
        EpHandle * : gpu_handle(GPU_ANY(x)),         \
        EpTensor * : gpu_tensor(GPU_ANY(x)),         \
        const EpTensor * : gpu_tensor(GPU_ANY(x)),   \
        EpPlanTensors * : gpu_numbers(GPU_ANY(x)),   \
        const EpPlanTensors * : gpu_numbers(GPU_ANY(x)), \
        EpPrepare * : gpu_routing(GPU_ANY(x)),       \
        const EpPrepare * : gpu_routing(GPU_ANY(x)), \
        const EpExtras * : gpu_extras(GPU_ANY(x)),   \
        EpExtras * : gpu_extras(GPU_ANY(x)),         \
        default : (x))
#define GPU_1(x) GPU_ARG(x)
#define GPU_2(x, ...) GPU_ARG(x), GPU_1(__VA_ARGS__)
#define GPU_3(x, ...) GPU_ARG(x), GPU_2(__VA_ARGS__)
#define GPU_4(x, ...) GPU_ARG(x), GPU_3(__VA_ARGS__)
#define GPU_5(x, ...) GPU_ARG(x), GPU_4(__VA_ARGS__)
#define GPU_6(x, ...) GPU_ARG(x), GPU_5(__VA_ARGS__)
#define GPU_7(x, ...) GPU_ARG(x), GPU_6(__VA_ARGS__)
#define GPU_8(x, ...) GPU_ARG(x), GPU_7(__VA_ARGS__)
#define GPU_9(x, ...) GPU_ARG(x), GPU_8(__VA_ARGS__)
#define GPU_10(x, ...) GPU_ARG(x), GPU_9(__VA_ARGS__)
#define GPU_11(x, ...) GPU_ARG(x), GPU_10(__VA_ARGS__)
#define GPU_12(x, ...) GPU_ARG(x), GPU_11(__VA_ARGS__)
#define GPU_PICK(a, b, c, d, e, f, g, h, i, j, k, l, picked, ...) picked
#define GPU_EACH(...)                                                                              \
    GPU_PICK(__VA_ARGS__, GPU_12, GPU_11, GPU_10, GPU_9, GPU_8, GPU_7, GPU_6, GPU_5, GPU_4, GPU_3, \
             GPU_2, GPU_1, )                                                                       \
    (__VA_ARGS__)
#define GPU_CALL(routing, call, ...) (gpu_begin(routing), gpu_end(call(GPU_EACH(__VA_ARGS__))))
#define ep_prepare(...) GPU_CALL(GPU_KEEPS, ep_prepare, __VA_ARGS__)
#define ep_prepare_with(...) GPU_CALL(GPU_KEEPS, ep_prepare_with, __VA_ARGS__)
#define ep_dispatch(...) GPU_CALL(GPU_READS | GPU_WRITES, ep_dispatch, __VA_ARGS__)
#define ep_dispatch_with(...) GPU_CALL(GPU_READS | GPU_WRITES, ep_dispatch_with, __VA_ARGS__)
#define ep_dispatch_send(...) GPU_CALL(GPU_READS, ep_dispatch_send, __VA_ARGS__)
#define ep_dispatch_send_with(...) GPU_CALL(GPU_READS, ep_dispatch_send_with, __VA_ARGS__)
#define ep_dispatch_wait(...) GPU_CALL(GPU_WRITES, ep_dispatch_wait, __VA_ARGS__)
#define ep_dispatch_wait_with(...) GPU_CALL(GPU_WRITES, ep_dispatch_wait_with, __VA_ARGS__)
#define ep_combine(...) GPU_CALL(0, ep_combine, __VA_ARGS__)
#define ep_combine_with(...) GPU_CALL(0, ep_combine_with, __VA_ARGS__)
#define ep_combine_send(...) GPU_CALL(0, ep_combine_send, __VA_ARGS__)
#define ep_combine_send_with(...) GPU_CALL(0, ep_combine_send_with, __VA_ARGS__)
#define ep_combine_wait(...) GPU_CALL(0, ep_combine_wait, __VA_ARGS__)
#define ep_combine_wait_with(...) GPU_CALL(0, ep_combine_wait_with, __VA_ARGS__)
#define ep_dispatch_backward(...) GPU_CALL(0, ep_dispatch_backward, __VA_ARGS__)
#define ep_dispatch_backward_with(...) GPU_CALL(0, ep_dispatch_backward_with, __VA_ARGS__)
#define ep_combine_backward(...) GPU_CALL(0, ep_combine_backward, __VA_ARGS__)
#define ep_combine_backward_with(...) GPU_CALL(0, ep_combine_backward_with, __VA_ARGS__)
#define ep_weight_gather(...) GPU_CALL(0, ep_weight_gather, __VA_ARGS__)
#define ep_weight_reduce(...) GPU_CALL(0, ep_weight_reduce, __VA_ARGS__)
#define ep_weight_amax(...) GPU_CALL(0, ep_weight_amax, __VA_ARGS__)
#define ep_weight_move(...) (gpu_begin(0), gpu_end(ep_weight_move(__VA_ARGS__)))
#define ep_quantise_rows(...) GPU_CALL(0, ep_quantise_rows, __VA_ARGS__)
#define ep_group_place(...) GPU_CALL(0, ep_group_place, __VA_ARGS__)
#define ep_count_routing(...) GPU_CALL(0, ep_count_routing, __VA_ARGS__)
#define ep_read_routing_map(...) GPU_CALL(0, ep_read_routing_map, __VA_ARGS__)
#define ep_write_routing_map(...) GPU_CALL(0, ep_write_routing_map, __VA_ARGS__)
#define ep_handle_destroy gpu_handle_destroy
#define ep_group_destroy gpu_group_destroy
#endif

/* tests/harness/check.h explains these. */
#define TESTS_ON_GPU 1
#define TEST_BACKEND EP_BACKEND_CUDA
#define TESTS_HAVE_LATENCY gpu_has_latency()
#define GPU_SKIP_UNLESS(enough, ranks)                                                    \
    do {                                                                                  \
        if (!(enough)) cr_skip_test("needs %d GPUs, there are %d", (ranks), gpu_count()); \
    } while (0)
#define GPU_NEEDS(ranks) GPU_SKIP_UNLESS(gpu_serve(ranks), ranks)
#define THREADS_NEED(ranks) GPU_SKIP_UNLESS((ranks) <= gpu_count(), ranks)
#define GPU_TAKE(rank) gpu_take(rank)
#define GPU_RANKS(wanted) gpu_least(wanted)
#define GPU_MISSING() gpu_missing()
#define GPU_ROOM(bytes) gpu_reserve(bytes)
#define GPU_ENQUEUES(only) gpu_only_enqueue(only)
#define HOST_ONLY(why) check_left_out(why)

#endif
