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

/** The operations; tensors that GPUs cannot reach are copied to the pinned buffer and back. In
 *  latency mode the copies of ep_prepare stay until the handle or its group is destroyed. */
__typeof__(ep_prepare) gpu_prepare;
__typeof__(ep_dispatch) gpu_dispatch;
__typeof__(ep_combine) gpu_combine;
__typeof__(ep_dispatch_backward) gpu_dispatch_backward;
__typeof__(ep_combine_backward) gpu_combine_backward;
__typeof__(ep_dispatch_send) gpu_dispatch_send;
__typeof__(ep_dispatch_wait) gpu_dispatch_wait;
__typeof__(ep_combine_send) gpu_combine_send;
__typeof__(ep_combine_wait) gpu_combine_wait;
__typeof__(ep_prepare_with) gpu_prepare_with;
__typeof__(ep_dispatch_with) gpu_dispatch_with;
__typeof__(ep_combine_backward_with) gpu_combine_backward_with;
__typeof__(ep_dispatch_send_with) gpu_dispatch_send_with;
__typeof__(ep_dispatch_wait_with) gpu_dispatch_wait_with;
__typeof__(ep_combine_send_with) gpu_combine_send_with;
__typeof__(ep_combine_with) gpu_combine_with;
__typeof__(ep_combine_wait_with) gpu_combine_wait_with;
__typeof__(ep_dispatch_backward_with) gpu_dispatch_backward_with;
__typeof__(ep_weight_gather) gpu_weight_gather;
__typeof__(ep_weight_reduce) gpu_weight_reduce;
__typeof__(ep_weight_amax) gpu_weight_amax;
__typeof__(ep_quantise_rows) gpu_quantise_rows;
__typeof__(ep_count_routing) gpu_count_routing;
__typeof__(ep_read_routing_map) gpu_read_routing_map;
__typeof__(ep_write_routing_map) gpu_write_routing_map;
__typeof__(ep_handle_destroy) gpu_handle_destroy;
__typeof__(ep_group_destroy) gpu_group_destroy;

#define malloc(bytes) gpu_allocate(64, bytes)
#define calloc(count, bytes) gpu_allocate_zeroed(count, bytes)
#define aligned_alloc(alignment, bytes) gpu_allocate(alignment, bytes)
#define free(memory) gpu_release(memory)

#ifndef GPU_CALLS_UNCHANGED
#define ep_prepare gpu_prepare
#define ep_dispatch gpu_dispatch
#define ep_combine gpu_combine
#define ep_dispatch_backward gpu_dispatch_backward
#define ep_combine_backward gpu_combine_backward
#define ep_dispatch_send gpu_dispatch_send
#define ep_dispatch_wait gpu_dispatch_wait
#define ep_combine_send gpu_combine_send
#define ep_combine_wait gpu_combine_wait
#define ep_prepare_with gpu_prepare_with
#define ep_dispatch_with gpu_dispatch_with
#define ep_combine_backward_with gpu_combine_backward_with
#define ep_dispatch_send_with gpu_dispatch_send_with
#define ep_dispatch_wait_with gpu_dispatch_wait_with
#define ep_combine_send_with gpu_combine_send_with
#define ep_combine_with gpu_combine_with
#define ep_combine_wait_with gpu_combine_wait_with
#define ep_dispatch_backward_with gpu_dispatch_backward_with
#define ep_weight_gather gpu_weight_gather
#define ep_weight_reduce gpu_weight_reduce
#define ep_weight_amax gpu_weight_amax
#define ep_quantise_rows gpu_quantise_rows
#define ep_count_routing gpu_count_routing
#define ep_read_routing_map gpu_read_routing_map
#define ep_write_routing_map gpu_write_routing_map
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
#define HOST_ONLY(why) check_left_out(why)

#endif
