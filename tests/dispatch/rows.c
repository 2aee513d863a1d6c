/* SPDX-License-Identifier: Apache-2.0 */
/* Rows are opaque bytes: types, sizes around a cache line, with and without scales and weights. */
#include "tests/cases/run.h"

#define LENGTH(array) (int)(sizeof(array) / sizeof((array)[0]))

Test(dispatch_rows, opaque_types, .timeout = 120) {
    static const EpType types[] = {EP_TYPE_FP8_E4M3, EP_TYPE_FP8_E5M2, EP_TYPE_UINT8,
                                   EP_TYPE_INT32,    EP_TYPE_INT64,    EP_TYPE_FP32};
    for (int i = 0; i < LENGTH(types); i++) {
        Case c = {.ranks = 3, .hidden = 48, .row_type = types[i], .scale_bytes = 4, .alignment = 4};
        run_case_on_threads(&c);
    }
}

Test(dispatch_rows, sizes, .timeout = 120) {
    static const int hiddens[] = {8, 24, 32, 40, 72, 248, 256, 264, 1016, 4096};
    for (int i = 0; i < LENGTH(hiddens); i++) {
        Case c = {.ranks = 2, .hidden = hiddens[i], .weighted = 1, .alignment = 2};
        c.sum_type = c.row_type = i % 2 ? EP_TYPE_FP16 : EP_TYPE_BF16;
        run_case_on_threads(&c);
    }
}

Test(dispatch_rows, one_row_of_sixteen_bytes, .timeout = 120) {
    Case c = {.ranks = 2,
              .hidden = 4,
              .row_type = EP_TYPE_FP32,
              .sum_type = EP_TYPE_FP32,
              .max_tokens = 1,
              .top_k = 1,
              .spread = SPREAD_ALONE,
              .weighted = 1};
    run_case_on_threads(&c);
}

/* The largest rows. Only prepare and dispatch run. */
static void largest_row_body(const EpBootstrap *bootstrap, void *arg) {
    const World *world = arg;
    EpGroup *group = open_group(bootstrap, &world->c);
    EpHandle *handle = group ? open_handle(group, &world->c) : NULL;
    if (handle) {
        Step step = {group, handle, world, bootstrap->rank, NULL};
        step_prepare(&step);
        step_dispatch(&step);
    }
    ep_group_destroy(group);
}

Test(dispatch_rows, largest_row, .timeout = 120) {
    /* With INT64 elements the rows of dispatch are larger than those of combine. */
    Case c = {.ranks = 2, .hidden = EP_MAX_ROW_BYTES / 8, .row_type = EP_TYPE_INT64};
    World *world = world_new(&c);
    run_ranks(2, largest_row_body, world);
    world_free(world);
}

Test(dispatch_rows, scales, .timeout = 120) {
    static const int bytes[] = {4, 12, 16, 60, 224, 1028};
    for (int i = 0; i < LENGTH(bytes); i++)
        for (int layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_RANK_MAJOR; layout++) {
            Case c = {.ranks = 2, .scale_bytes = bytes[i], .layout = (EpLayout)layout};
            c.weighted = i % 2;
            c.alignment = 8;
            run_case_on_threads(&c);
        }
}

Test(dispatch_rows, weights_or_none, .timeout = 120) {
    for (int weighted = 0; weighted < 2; weighted++)
        for (int layout = EP_LAYOUT_EXPERT_MAJOR; layout <= EP_LAYOUT_RANK_MAJOR; layout++) {
            Case c = {.ranks = 3, .top_k = 4, .layout = (EpLayout)layout, .weighted = weighted};
            run_case_on_threads(&c);
        }
}
