/* SPDX-License-Identifier: Apache-2.0 */
/* Division by multiplication is exact in its range, and so is the placement of experts that uses
 * it. */
#include "runtime/layout.h"

#include "tests/harness/check.h"
#include "tests/harness/random.h"

/* Returns the largest number that may be divided by d. */
static int32_t last_dividend(int32_t d) {
    return ((1 << 30) - d - 1) / d;
}

static void check_quotient(int32_t n, int32_t d) {
    EpDivisor divisor = ep_divisor(d);
    CHECK(ep_quotient(n, divisor) == n / d && ep_remainder(n, divisor) == n % d,
          "%d / %d: %d, remainder %d", n, d, ep_quotient(n, divisor), ep_remainder(n, divisor));
}

SoloTest(runtime_divide, quotients) {
    Random random = random_stream(1, 0, 0);
    for (int32_t d = 1; d < 5000; d++) {
        int32_t last = last_dividend(d);
        for (int32_t n = 0; n <= 3 * d && n <= last; n++)
            check_quotient(n, d);
        for (int i = 0; i < 100; i++)
            check_quotient((int32_t)(random_next(&random) % ((uint64_t)last + 1)), d);
        /* Quotients change here, and the error is largest. */
        check_quotient(last, d);
        check_quotient(last / d * d, d);
        if (last / d > 0) check_quotient(last / d * d - 1, d);
    }
}

SoloTest(runtime_divide, owners) {
    for (int32_t ranks = 1; ranks <= 72; ranks++) {
        for (int32_t experts = 1; experts <= 4096; experts += experts < 300 ? 1 : 61) {
            EpPlacement placement = {experts, ranks};
            EpOwners owners = ep_placement_owners(&placement);
            for (int32_t e = 0; e < experts; e += 1 + experts / 200)
                CHECK(ep_owner(&owners, e) == ep_placement_owner(&placement, e),
                      "expert %d of %d on %d ranks: %d", e, experts, ranks, ep_owner(&owners, e));
            for (int32_t r = 0; r < ranks; r++)
                CHECK(ep_owner_first(&owners, r) == ep_placement_first(&placement, r) &&
                          ep_owner_count(&owners, r) == ep_placement_count(&placement, r),
                      "rank %d of %d, %d experts: %d from %d", r, ranks, experts,
                      ep_owner_count(&owners, r), ep_owner_first(&owners, r));
        }
    }
}
