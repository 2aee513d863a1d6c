/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_error.h"

bool check_create(const Case *c, Check *out) {
    size_t hidden = (size_t)c->options->hidden;
    *out = (Check){.c = c};
    out->total = bench_alloc(hidden, sizeof(float), "check");
    out->partial = bench_alloc(hidden, sizeof(float), "check");
    out->term = bench_alloc(hidden, sizeof(float), "check");
    out->other = bench_alloc(hidden, sizeof(float), "check");
    out->row = bench_alloc(1, EP_MAX_ROW_BYTES, "check");
    out->scales = bench_alloc(1, EP_MAX_ROW_BYTES, "check");
    out->poison = bench_alloc(1, EP_MAX_ROW_BYTES, "check");
    if (!out->total || !out->partial || !out->term || !out->other || !out->row || !out->scales ||
        !out->poison)
        return false;
    memset(out->poison, POISON_BYTE, EP_MAX_ROW_BYTES);
    return true;
}

void check_destroy(Check *check) {
    free(check->total);
    free(check->partial);
    free(check->term);
    free(check->other);
    free(check->row);
    free(check->scales);
    free(check->poison);
}

/* ---- comparing ----------------------------------------------------------------------------- */

/* At most the first 8 bytes of an element, as the machine holds them. */
static unsigned long long raw(const char *element, size_t unit) {
    unsigned long long value = 0;
    memcpy(&value, element, unit < sizeof(value) ? unit : sizeof(value));
    return value;
}

void check_note(Check *check, const char *what, int64_t row, size_t column, unsigned long long want,
                unsigned long long got) {
    if (check->wrong++ == 0)
        snprintf(check->first, sizeof(check->first),
                 "rank %d, %s: %s row %lld column %zu: expected 0x%llx, got 0x%llx",
                 check->c->world->rank, check->phase, what, (long long)row, column, want, got);
}

void check_bytes(Check *check, const char *what, int64_t row, const void *got, const void *want,
                 size_t bytes, size_t unit) {
    if (memcmp(got, want, bytes) == 0) return;
    for (size_t at = 0; at < bytes; at += unit) {
        const char *g = (const char *)got + at, *w = (const char *)want + at;
        if (memcmp(g, w, unit) != 0)
            check_note(check, what, row, at / unit, raw(w, unit), raw(g, unit));
    }
}

void check_float(Check *check, const char *what, int64_t row, const float *got, float want) {
    check_bytes(check, what, row, got, &want, sizeof(want), sizeof(want));
}

void check_int(Check *check, const char *what, int64_t row, int64_t got, int64_t want) {
    check_bytes(check, what, row, &got, &want, sizeof(want), sizeof(want));
}

size_t check_unit(const Check *check) {
    return ep_type_bytes((EpType)check->c->options->type);
}

/* ---- phases
 * -------------------------------------------------------------------------------------- */

void check_phase(Check *check, PhaseId phase) {
    static void (*const checks[NUM_PHASES])(Check *) = {
        [PHASE_PREPARE] = check_prepare,
        [PHASE_DISPATCH] = check_dispatch,
        [PHASE_COMBINE] = check_combine,
        [PHASE_COMBINE_BACKWARD] = check_combine_backward,
        [PHASE_DISPATCH_BACKWARD] = check_dispatch_backward,
    };
    check->phase = phase_name(phase);
    checks[phase](check);
}

void check_baseline_dispatch(Check *check) {
    check->phase = "baseline dispatch";
    check_dispatch(check);
}
