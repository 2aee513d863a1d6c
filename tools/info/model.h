/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_INFO_MODEL_H
#define TOOLS_INFO_MODEL_H

/**
 * A model of what operations take: time, bytes and odds of overflow, from the size of a group and
 * from how its tokens choose experts. docs/scaling.md compares it with measured figures.
 */

#include <stdbool.h>
#include <stdint.h>

/** The constants of the model, with their unit and where they were measured. */
#define MODEL_CONSTANTS(X)                                                                         \
    X(nvlink, 355, "GB/s", "4 x H200, dispatch of 8,192 tokens: what a GPU sends to its peers")    \
    X(spread_memory, 3200, "GB/s", "1 and 2 x H200, dispatch: rows read, and written to slots")    \
    X(sum_memory, 4500, "GB/s", "1 x H200, combine: slots read, and sums written")                 \
    X(call, 26, "us", "2 and 4 x H200, throughput: a dispatch or combine beside its bytes")        \
    X(least_dispatch, 44, "us", "2 and 4 x H200, throughput: dispatch of 128 and 256 tokens")      \
    X(least_combine, 31, "us", "2 x H200, throughput: combine of 128 tokens")                      \
    X(prepare, 13.8, "us", "2 and 4 x H200, prepare of up to 2,048 tokens")                        \
    X(prepare_entries, 14, "entries/ns", "4 x H200, prepare of 8,192 and 16,384 tokens")           \
    X(latency_least_dispatch, 6.5, "us", "2 and 4 x H200, latency mode: dispatch of 1 token")      \
    X(latency_least_combine, 5.3, "us", "2 and 4 x H200, latency mode: combine of 1 token")        \
    X(latency_dispatch, 5.5, "us", "4 x H200, latency mode: dispatch beside its bytes")            \
    X(latency_combine, 5, "us", "4 x H200, latency mode: combine beside its bytes")                \
    X(latency_dispatch_wire, 309, "GB/s", "4 x H200, latency mode: dispatch of 128 to 512 tokens") \
    X(latency_combine_wire, 286, "GB/s", "4 x H200, latency mode: combine of 128 to 512 tokens")   \
    X(latency_memory, 2050, "GB/s", "2 x H200, latency mode: 512 tokens")                          \
    X(nodes_prepare, 49, "us", "2 x 2 H200, prepare of 16 to 512 tokens")                          \
    X(nodes_dispatch, 45.5, "us", "2 x 2 H200, dispatch: kernels of a chunk beside their bytes")   \
    X(nodes_combine, 40, "us", "2 x 2 H200, combine: kernels of a chunk beside their bytes")       \
    X(nvlink_network, 277, "GB/s", "2 H200, NCCL's send and receive over NVLink")                  \
    X(nvlink_exchange, 11, "us", "2 H200, NCCL's exchange of 256 KiB over NVLink")                 \
    X(sockets_network, 2.4, "GB/s", "2 x 2 H200, four ranks share loopback, 8,192 tokens")         \
    X(sockets_exchange, 86, "us", "2 pairs of H200, NCCL's exchange of 64 KiB over sockets")       \
    X(port_exchange, 20, "us", "assumed: an exchange over a network port; none has been tried")

typedef struct ModelConstant {
    const char *name;
    double value;
    const char *unit, *measured;
} ModelConstant;

/** Ends with the name NULL. */
extern const ModelConstant model_constants[];

/** A group and the network between its nodes, which have equal numbers of ranks. */
typedef struct ModelGroup {
    int64_t ranks, nodes, tokens, top_k;
    int64_t row_bytes;
    int64_t node_rows;              /**< places of a message to another node */
    double network_gbs, network_us; /**< of a rank, each way; of an exchange beside its bytes */
} ModelGroup;

/** How a token chooses: probabilities that it needs a node or a rank, and slots that it fills. */
typedef struct ModelRouting {
    double *node;                 /**< [nodes] */
    double *rank, *slots;         /**< [ranks] */
    double most_rank, most_slots; /**< the largest of each */
} ModelRouting;

typedef enum ModelMode { MODEL_EXACT, MODEL_STATIC, MODEL_LATENCY } ModelMode;

/** An operation's time, and the bytes that a rank sends. */
typedef struct ModelTime {
    double us, network_bytes, nvlink_bytes;
} ModelTime;

typedef struct ModelStep {
    ModelTime prepare, dispatch, combine; /**< latency mode: no prepare */
} ModelStep;

ModelStep model_step(const ModelGroup *group, const ModelRouting *routing, ModelMode mode);

/** Returns the probability that a binomial variable of n trials exceeds `most`. */
double model_tail(int64_t n, double p, int64_t most);

/** Returns the odds that a message of any rank in a step has too few places. `lost`, unless NULL,
 *  becomes the expected number of tokens that find none, of all ranks together. */
double model_overflow(const ModelGroup *group, const ModelRouting *routing, double *lost);

/** Returns the least number of places whose odds of overflow are at most `odds`. */
int64_t model_propose(ModelGroup group, const ModelRouting *routing, double odds);

/** Device memory of a rank, in bytes: messages of throughput mode with static sizes; the routing of
 *  all ranks in prepare; latency mode over nodes with `sets` sets, as the layout of buffers by
 *  (node, source of the relay) has it. */
typedef struct ModelMemory {
    int64_t messages, routing, latency;
} ModelMemory;
ModelMemory model_memory(const ModelGroup *group, int64_t sets);

#endif
