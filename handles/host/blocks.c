/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/host/blocks.h"

#include "runtime/wait.h"

/* Rows that follow one another from `begin` on. */
typedef struct Run {
    int64_t begin, rows;
} Run;

/* Find the rows of tokens among which a block's are. `expert`: with slabs that follow one another,
 * one not above the block's, which becomes it. */
static Run run_of(const EpPlanShape *shape, const EpPlan *plan, const EpRowBlocks *b, int32_t block,
                  int32_t *expert) {
    int32_t section = block / b->per_section;
    if (shape->has_rows && shape->is_fixed)
        return (Run){(int64_t)section * b->section_rows,
                     plan->recv_begin[section + 1] - plan->recv_begin[section]};
    if (shape->has_rows) return (Run){0, plan->header->recv_rows};
    if (shape->is_fixed) *expert = section;
    while (!shape->is_fixed && *expert < shape->num_local &&
           plan->expert_offsets[*expert + 1] <= ep_block_first(b, block))
        ++*expert;
    if (*expert == shape->num_local) return (Run){0, 0};
    return (Run){plan->expert_offsets[*expert], plan->expert_counts[*expert]};
}

/* Returns the rows of a block that hold a token. */
static int32_t count_rows(const EpPlanShape *shape, const EpPlan *plan, const EpRowBlocks *b,
                          int32_t block, int32_t *expert) {
    Run run = run_of(shape, plan, b, block, expert);
    int64_t left = run.begin + run.rows - ep_block_first(b, block);
    return (int32_t)ep_max(0, ep_min(left, ep_block_size(b, block)));
}

static int32_t count_blocks(const EpRowBlocks *b) {
    return b->words ? b->sections * b->per_section : 0;
}

void ep_host_set_ready(const EpPlanShape *shape, const EpPlan *plan, const EpRowBlocks *ready) {
    int32_t expert = 0;
    for (int32_t i = 0; i < count_blocks(ready); i++) {
        int32_t word = 1 + count_rows(shape, plan, ready, i, &expert);
        __atomic_store_n(&ready->words[i], word, __ATOMIC_RELEASE);
    }
}

static EpStatus await_block(const EpHandle *handle, const EpCall *call, const EpRowBlocks *done,
                            int32_t block) {
    const EpGroup *group = handle->group;
    EpWait wait;
    int32_t seen;
    ep_wait_begin(&wait, group->timeout, 0);
    while ((seen = __atomic_load_n(&done->words[block], __ATOMIC_ACQUIRE)) < done->expected) {
        if (ep_abort_requested(&group->abort)) return ep_group_fail_aborted(group, call->name);
        if (!ep_wait_pause(&wait))
            return ep_refuse(call, EP_ERR_TIMEOUT, "extras.done",
                             "block %d was not done within %g s (expected at least %d, seen %d)",
                             block, group->timeout, done->expected, seen);
    }
    return EP_OK;
}

EpStatus ep_host_await_done(const EpHandle *handle, const EpCall *call, const EpPlan *plan,
                            const EpRowBlocks *done) {
    int32_t expert = 0;
    for (int32_t i = 0; i < count_blocks(done); i++)
        if (count_rows(&handle->shape, plan, done, i, &expert))
            EP_TRY(await_block(handle, call, done, i));
    return EP_OK;
}
