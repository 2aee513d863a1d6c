/* SPDX-License-Identifier: Apache-2.0 */
/* The flight recorder: the log of a failure has the operations before it. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/cases/run.h"

#define CALLS 70 /* more than the recorder keeps */

/* Prepare steps of 1, 2, 3, 1, ... tokens until an abort has failed the group. */
static void fail_a_group(const EpBootstrap *bootstrap) {
    int32_t idx[3] = {0, 0, 0};
    Case c = case_complete((Case){.ranks = 1, .max_tokens = 3});
    EpHandleConfig config = case_handle_config(&c);
    EpHandle *handle;
    EpGroup *group = open_group(bootstrap, &c);
    REQUIRE(group, "no group");
    config.id = 7;
    REQUIRE_OK(ep_handle_create(group, &config, &handle));
    for (int i = 0; i < CALLS; i++) {
        EpTensor topk_idx = ep_tensor_2d(idx, EP_TYPE_INT32, 1 + i % 3, 1);
        CHECK_OK(ep_prepare(handle, NULL, &topk_idx, NULL, NULL, NULL));
    }
    CHECK_OK(ep_group_abort(group, "enough"));
    CHECK_REFUSED(ep_group_status(group, NULL), EP_ERR_ABORTED, "enough");
    ep_group_destroy(group);
}

SoloTest(runtime_recorder, a_failure_shows_the_last_operations) {
    static char text[65536];
    const char *path = temporary_file();
    EpBootstrap bootstrap = EP_BOOTSTRAP_INIT;
    setenv("LIBEP_LOG_FILE", path, 1);
    REQUIRE_OK(ep_bootstrap_local(1, &bootstrap));
    fail_a_group(&bootstrap);
    ep_bootstrap_destroy(&bootstrap);
    read_file(path, text, sizeof(text));
    unlink(path);
    const char *failure = strstr(text, "group failed");
    REQUIRE(failure, "no failure in '%s'", text);
    const char *at = strstr(failure, "the last 64 of 70 operations");
    CHECK(at, "no operations in '%s'", text);
    double before = -3600;
    int calls = 0;
    for (; (at = strstr(at, " s ep_prepare on handle 7, T ")); calls++, at++) {
        const char *start = at;
        while (start[-1] != ' ')
            start--;
        double seconds = atof(start);
        CHECK(seconds < 0 && seconds >= before, "call %d began %g s before the failure", calls,
              seconds);
        before = seconds;
        int tokens = atoi(strstr(at, "T ") + 2), expected = 1 + (CALLS - 64 + calls) % 3;
        CHECK(tokens == expected, "call %d: T %d, not %d", calls, tokens, expected);
    }
    CHECK(calls == 64, "%d calls", calls);
}
