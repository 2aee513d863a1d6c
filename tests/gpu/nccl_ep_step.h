/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_GPU_NCCL_EP_STEP_H
#define TESTS_GPU_NCCL_EP_STEP_H

/**
 * Steps through NCCL EP's interface, in the order in which frameworks call it, compared byte by
 * byte with the oracle.
 *
 * There a high-throughput dispatch carries weights and its combine applies none. A case of the
 * oracle is weighted in both or in neither, so a step has two device steps of equal inputs.
 */

#include "bindings/nccl_ep/nccl_ep.h"
#include "tests/gpu/communicator.h"

/** One rank: a communicator and a group, as a framework makes them. */
typedef struct NcclEpRank {
    NcclRank rank;
    ncclEpGroup_t group;
} NcclEpRank;

/** Cases of high throughput with changes, with rows of several blocks, and none a multiple of
 * anything; and of low latency: BATCHED or RANK_MAJOR. */
Case nccl_ep_training_case(int ranks, const char *changes);
Case nccl_ep_decoding_case(int ranks, EpLayout layout);
/** Changes to flat rows; before what the rows are in which nothing arrives. */
#define NCCL_EP_FLAT "layout=flat alignment=1 zero_tail="
/** A vector of int32 in device memory. */
ncclEpTensor_t nccl_ep_vector(void *data, size_t *size);

/** Returns the configuration of a group for a case of either mode; with static sizes if the case's
 *  capacity is `fixed`. */
ncclEpGroupConfig_t nccl_ep_config(const Case *c, int fixed);

/** Skips the test if the machine cannot run it. */
void nccl_ep_open(NcclEpRank *rank, const EpBootstrap *harness, const ncclEpGroupConfig_t *config);
void nccl_ep_close(NcclEpRank *rank);
bool nccl_ep_is_on_one_node(const NcclEpRank *rank);

/** Numbers that prepare, or a low-latency dispatch, writes: counts or rows of each source, offsets,
 *  total. */
enum { NCCL_EP_COUNTS, NCCL_EP_OFFSETS, NCCL_EP_TOTAL, NCCL_EP_SOURCES, NCCL_EP_VECTORS };

typedef struct NcclEpStep {
    NcclEpRank *rank;
    Case c;
    World *world[2];
    DeviceStep dispatched; /**< weighted: dispatch, and combine backward */
    DeviceStep combined;   /**< not weighted: combine, and dispatch backward */
    ncclEpHandle_t handle;
    void *plan; /**< the caller's handle memory, or NULL */
    size_t plan_bytes;
    char *numbers;        /**< device memory of all vectors */
    int expected_numbers; /**< bits: vectors that a call has written */
    int quant_recipe, round_scales, send_only;
    int passes_weights;     /**< a forward combine gets the backward pass's output of weights */
    int counts_at_dispatch; /**< high throughput: dispatch delivers the numbers, not prepare */
    enum {
        NCCL_EP_RIGHT,
        NCCL_EP_EMPTY_WEIGHTS, /**< weights of rows where there are none, and the other way round */
        NCCL_EP_MORE_TOKENS,   /**< one more than topk_idx has */
        NCCL_EP_FEWER_ROWS     /**< one less than arrive */
    } wrong;
    const NcclWindow *window; /**< that receive rows are in, or NULL */
} NcclEpStep;

/** Make the inputs of step `number` of a case. `window`: receive rows lie in it, behind `skipped`
 *  bytes. */
void nccl_ep_step_open(NcclEpStep *s, NcclEpRank *rank, const Case *c, int number,
                       const NcclWindow *window, size_t skipped);
/** Load the inputs of another step, of as many tokens, into the same memory, and poison the
 * outputs: a graph that was captured with it may be replayed. */
void nccl_ep_step_reload(NcclEpStep *s, int number);
void nccl_ep_step_close(NcclEpStep *s);

/** Returns NCCL EP's layout for the case's. */
int nccl_ep_layout(const Case *c);

/* Each issues one call, and returns its result. */
int nccl_ep_init(NcclEpStep *s, int num_topk); /**< over s->plan, or memory of the library */
int nccl_ep_update(NcclEpStep *s);
int nccl_ep_create(NcclEpStep *s); /**< both at once */
int nccl_ep_dispatch(NcclEpStep *s);
int nccl_ep_combine(NcclEpStep *s);
int nccl_ep_combine_backward(NcclEpStep *s);  /**< a dispatch in the backward pass */
int nccl_ep_dispatch_backward(NcclEpStep *s); /**< a combine in the backward pass */
int nccl_ep_complete(NcclEpStep *s);

/** Issue all calls that move rows: dispatch, combine and, of high throughput, the backward pass. */
void nccl_ep_move(NcclEpStep *s);
/** Likewise, and check. */
void nccl_ep_run(NcclEpStep *s);

/** Open a rank with a group, and a step of many tokens with a handle in the library's memory; and
 *  close them. With static sizes if the case has a capacity. */
void nccl_ep_begin(NcclEpRank *rank, NcclEpStep *s, const EpBootstrap *harness, const Case *c);
void nccl_ep_end(NcclEpRank *rank, NcclEpStep *s);

/** Allocate handle memory for the step, as large as the library says. */
void nccl_ep_step_allocate(NcclEpStep *s);
/** Move the handle memory: other memory gets its bytes, and the old one garbage. The handle is
 *  opened again over it. */
void nccl_ep_step_move(NcclEpStep *s);

/** Wait, and compare all outputs of the calls so far. */
void nccl_ep_step_check(NcclEpStep *s);

#define CHECK_NCCL(call) check_that((call) == NCCL_SUCCESS, __FILE__, __LINE__, #call, "no success")

#endif
