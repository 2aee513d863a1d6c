/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_CUDA_PACK_H
#define EP_DISPATCH_CUDA_PACK_H

/**
 * Packs the tokens of a chunk for the network: a record for each other node that needs a token, at
 * the place that the plan's entry names. Rows are quantised here if the caller asks for it: the
 * relays get rows and scales as the receivers do.
 */

#include "bootstrap/network/cuda/mark.h"
#include "dispatch/cuda/scatter.h"

typedef struct EpPackArgs {
    EpCudaGroup group;
    EpCudaPlan plan; /**< the own part of the chunk */
    EpScatterTensors t;
    EpSource source;
    EpRecord record;
    int32_t top_k;
    int32_t places;   /**< records of a message */
    int32_t messages; /**< other nodes */
    char *out;        /**< [messages, places] records */
    EpStamp *stamp;   /**< this rank's, which goes with the messages */
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
