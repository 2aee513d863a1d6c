/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_PAIRS_H
#define BENCH_PAIRS_H

/**
 * The period of chained pairs (--pair): dispatch and combine of many steps in a row, without a wait
 * of the host or a barrier between them. This is what the public CollectiveX benchmark reports as
 * the headline of a library. Planning the routing is part of a pair; staging the experts' outputs
 * is not.
 */

#include "tools/bench/case.h"
#include "tools/bench/collectives.h"
#include "tools/common/time.h"

typedef enum PairSide { PAIR_LIBEP, PAIR_BASELINE, NUM_PAIR_SIDES } PairSide;

/** Collective, after the phases have run once. Each time is of a rank's own pairs, then the median
 *  over the ranks. `baseline` may be NULL; else its chains and libep's take turns. */
bool pairs_measure(Case *c, Collectives *baseline, Quantiles out[NUM_PAIR_SIDES]);

#endif
