/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of experts: placements and choices against the oracle, changed between steps. */
#include "tests/cases/run.h"

#define MAPS "map=first,random,identity,everywhere,half,nobody map_seed=3 masked_percent=10 "
GridTest(handles_placement, choices, EACH_LAYOUT MAPS "choice=near,spread weighted=1 seed=3",
         "ranks=3 experts=7 physical=11 top_k=3 alignment=4", /* some ranks have one more */
         "ranks=1 experts=5 physical=9 top_k=2", "ranks=4 experts=3 physical=8 top_k=3 merged=1");
