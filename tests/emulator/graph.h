/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_EMULATOR_GRAPH_H
#define TESTS_EMULATOR_GRAPH_H

/**
 * Graphs: what streams recorded under capture, in tracks. A stream that joins the capture has a
 * track of its own; marks stand for the events between tracks. A replay runs each track in a
 * thread.
 */

#include <stddef.h>

#include "tests/emulator/launch.h"

cudaGraph_t emulated_graph_open(void);
/** Returns the number of a new track; the first is 0, that of the stream which began the capture.
 */
int emulated_graph_add_track(cudaGraph_t graph);
/** Returns the number of a new mark. */
int emulated_graph_add_mark(cudaGraph_t graph);

/** Record a task with a copy of its arguments. When a replay is launched, they are renewed in the
 *  order of the recording. */
void emulated_graph_record(cudaGraph_t graph, int track, void (*run)(void *arguments),
                           const EmulatedReplays *replays, const void *arguments, size_t bytes);
void emulated_graph_pass(cudaGraph_t graph, int track, int mark);
void emulated_graph_await(cudaGraph_t graph, int track, int mark);

/** Returns whether some track goes on after what all others wait for: a capture must not end so. */
int emulated_graph_is_unjoined(const struct CUgraph_st *graph);

#endif
