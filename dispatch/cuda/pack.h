/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_CUDA_PACK_H
#define EP_DISPATCH_CUDA_PACK_H

/**
 * Packs the tokens of a chunk for the network: a record for each other node that needs a token, at
 * the message slot that the plan's entry names. Rows are quantised here if the caller asks for it:
 * the relays get rows and scales as the receivers do.
 */

#include "dispatch/cuda/scatter.h"

typedef struct EpPackArgs {
    EpCudaGroup group;
    EpCudaPlan plan; /**< the own plan of the chunk */
    EpScatterTensors t;
    EpSource source;
    EpRecord record;
    int32_t top_k;
    int32_t message_slots; /**< records of a message */
    int32_t messages;      /**< other nodes */
    char *out;             /**< [messages, message_slots] records */
    const int32_t *relays; /**< device [messages]: the rank of the group that gets each of them */
    EpStatistics stats;
    EpStamp *stamp; /**< this rank's, which goes with the messages */
    /* With a limit (node_rows): `plan` is the first of the chunk plans whose tokens may be in the
     * messages, and tensors begin with its tokens. */
    int32_t chunks;       /**< of such plans, each chunk_stride bytes behind another; else 0 */
    int32_t chunk_tokens; /**< of one */
    int32_t first_row;    /**< the messages' first: see ep_message_row */
    int64_t chunk_stride;
    int64_t num_rows;      /**< rows of the token tensors */
    const int32_t *filled; /**< rows_to of the messages' own chunk plan */
} EpPackArgs;

#ifdef __cplusplus
extern "C" {
#endif

/** See ep_cuda_open_prepare. */
int ep_cuda_open_pack(int shared_bytes);
int ep_cuda_launch_pack(const void *args, int blocks, void *stream);

#ifdef __cplusplus
}
#endif

#endif
