/* SPDX-License-Identifier: Apache-2.0 */
/* Wrong arguments of ep_dispatch and ep_dispatch_backward: refusals.def, and calls that it cannot
 * say. */
#include "tests/cases/fixture.h"

RefusalsTest(dispatch_arguments, wrong_tensors, "dispatch", "");
RefusalsTest(dispatch_arguments, wrong_tensors_of_flat, "dispatch_flat", "layout=flat");
RefusalsTest(dispatch_arguments, wrong_tensors_of_batched, "dispatch_batched", "layout=batched");
RefusalsTest(dispatch_arguments, wrong_tensors_of_rank_major, "rank_major", "layout=rank-major");
/* recv_topk_idx exists in FLAT and RANK_MAJOR only. */
RefusalsTest(dispatch_arguments, expert_ids_of_expert_major, "no_ids", "");
RefusalsTest(dispatch_arguments, expert_ids_of_batched, "no_ids", "layout=batched");
RefusalsTest(dispatch_arguments, scales_without_room, "no_scales", "scale_bytes=0");

/* The sentence says how many rows are needed, and that many are enough: what arrives, or with a
 * static capacity all of it. */
SoloTest(dispatch_arguments, size_needed_is_in_the_sentence) {
    static const char *const sizes[] = {"", "capacity=77"};
    for (int i = 0; i < LENGTH(sizes); i++) {
        Fixture *f = fixture_new(sizes[i]);
        CHECK_OK(fixture_call(f, STEP_PREPARE));
        long long rows = i ? 77 : (long long)f->world->rank->recv_rows;
        char said[64];
        snprintf(said, sizeof(said), "expected at least %lld rows, got %lld", rows, rows - 1);
        f->tensor[OUT_TOKENS].shape[0] = rows - 1;
        CHECK_REFUSED(fixture_call(f, STEP_DISPATCH), EP_ERR_BUFFER_SIZE, "recv_tokens", said);
        f->tensor[OUT_TOKENS].shape[0] = rows;
        CHECK_OK(fixture_call(f, STEP_DISPATCH));
        fixture_free(f);
    }
}

/* A refused call does not take part in the operation: the peers wait until the rank calls again. */
ThreadTest(dispatch_arguments, refused_call_is_repeated, 3) {
    Case c = case_of("ranks=3 top_k=3 weighted=1 seed=4");
    Step step = open_step(bootstrap, &c);
    EpTensor tokens = step_tokens(&step);
    tokens.ndim = 1;
    step_prepare(&step);
    for (int i = 0; bootstrap->rank == 1 && i < 3; i++)
        CHECK_REFUSED(ep_dispatch(step.handle, NULL, NULL, &tokens, NULL, NULL, NULL, &tokens, NULL,
                                  NULL, NULL),
                      EP_ERR_NDIM, "rank 1", "tokens");
    step_move(&step);
    close_step(&step);
}

/* Scales of any type need 4-byte alignment only. The call is refused for another argument. */
SoloTest(dispatch_arguments, scales_of_eight_bytes_on_four) {
    Fixture *f = fixture_new_prepared("");
    EpTensor *scales = &f->tensor[IN_SCALES], *received = &f->tensor[OUT_SCALES];
    scales->type = received->type = EP_TYPE_INT64;
    scales->shape[1] = received->shape[1] = 1;
    received->data = (char *)received->data + (uintptr_t)received->data % 8 + 4;
    f->arg[OUT_INDEX] = &f->tensor[OUT_INDEX];
    CHECK_REFUSED(fixture_call(f, STEP_DISPATCH), EP_ERR_UNSUPPORTED, "recv_topk_idx", "flat");
    fixture_check_untouched(f);
    fixture_free(f);
}

SoloCall(dispatch_arguments, tail_of_a_shorter_tensor,
         fixture_check_shorter_tail(STEP_DISPATCH, OUT_WEIGHTS));
