/* SPDX-License-Identifier: Apache-2.0 */
#include "handles/host/blocks.h"

#include "runtime/host/host.h"
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

/* Returns how many of these rows are in a block. */
static int32_t count_in(const EpRowBlocks *b, int32_t block, Run run) {
    int64_t first = ep_block_first(b, block), end = first + ep_block_size(b, block);
    return (int32_t)ep_max(0, ep_min(run.begin + run.rows, end) - ep_max(run.begin, first));
}

/* Returns which of the rows `all` of a section, or slab, are of a rank. */
static Run rows_of(const EpPlanShape *shape, const EpPlan *plan, Run all, int32_t section,
                   int32_t expert, int32_t rank) {
    int64_t local = shape->num_local, end = all.begin + all.rows;
    Run run = {all.begin, all.rows};
    if (shape->has_rows && shape->is_fixed) return section == rank ? all : (Run){0, 0};
    if (shape->has_rows) {
        run = (Run){plan->recv_begin[rank], plan->recv_begin[rank + 1] - plan->recv_begin[rank]};
    } else {
        for (int32_t r = 0; r < rank; r++)
            run.begin += plan->source_counts[r * local + expert];
        run.rows = plan->source_counts[rank * local + expert];
    }
    run.rows = ep_min(run.rows, ep_max(0, end - run.begin));
    return run;
}

/* Returns the rows of a block that hold a token: rows of lost ranks hold none any more. */
static int32_t count_rows(const EpPlanShape *shape, const EpPlan *plan, const EpMask *lost,
                          const EpRowBlocks *b, int32_t block, int32_t *expert) {
    Run run = run_of(shape, plan, b, block, expert);
    int32_t rows = count_in(b, block, run), section = block / b->per_section;
    for (int32_t r = 0; r < shape->num_ranks && rows && !ep_mask_is_empty(lost); r++)
        if (ep_mask_has(lost, r))
            rows -= count_in(b, block, rows_of(shape, plan, run, section, *expert, r));
    return rows;
}

static int32_t count_blocks(const EpRowBlocks *b) {
    return b->words ? b->sections * b->per_section : 0;
}

EpMask ep_host_lost(const EpGroup *group) {
    EpMask lost = {{0}};
    for (int32_t r = 0; r < group->size; r++)
        if (!ep_exchange_is_alive(ep_host(group)->exchange, r)) ep_mask_add(&lost, r);
    return lost;
}

void ep_host_set_ready(const EpPlanShape *shape, const EpPlan *plan, const EpMask *lost,
                       const EpRowBlocks *ready) {
    int32_t expert = 0;
    for (int32_t i = 0; i < count_blocks(ready); i++) {
        int32_t word = 1 + count_rows(shape, plan, lost, ready, i, &expert);
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
    int32_t expert = 0, count = count_blocks(done);
    EpMask lost = count ? ep_host_lost(handle->group) : (EpMask){{0}};
    for (int32_t i = 0; i < count; i++)
        if (count_rows(&handle->shape, plan, &lost, done, i, &expert))
            EP_TRY(await_block(handle, call, done, i));
    return EP_OK;
}
