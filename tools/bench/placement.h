/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_PLACEMENT_H
#define BENCH_PLACEMENT_H

/** --placement: the map that is placed, and what it makes of the routing. */

#include "tools/bench/case.h"

/** Read a file into the options: "ep-placement 1", "experts E places P", and P numbers, the expert
 * of each place or -1, all separated by blanks or newlines. */
bool placement_read(const char *path, Options *options);

/** Make the map, and a routing of physical experts of the case's routing. */
bool placement_make(Case *c);

/** Collective: ep_group_place, if there is a placement. */
bool placement_call(Case *c);

#endif
