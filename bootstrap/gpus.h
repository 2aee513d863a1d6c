/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_GPUS_H
#define EP_BOOTSTRAP_GPUS_H

/**
 * Which GPUs the ranks see, which of them is whose, and whether the CUDA backend can serve the
 * ranks with them. Each rank reports what its process sees; the rest is decided from all reports,
 * by the same rules on every rank, without a look at the machine.
 */

#include <stddef.h>

#include "ep/ep.h"

#define EP_GPUS_LISTED 32 /* what lies beyond is not offered */

typedef struct EpGpu {
    unsigned char uuid[16]; /**< the same GPU has the same in every process */
    char bus[20];           /**< PCI bus id: "0000:17:00.0" */
    char name[40];
    int32_t capability;   /**< 90 is 9.0 */
    int32_t num_sms;      /**< multiprocessors */
    int32_t shared_bytes; /**< shared memory that a block may have */
    uint32_t reaches;     /**< bit d: it can load and store memory of device d */
} EpGpu;

/** What one rank reports. */
typedef struct EpGpuReport {
    int32_t count;   /**< devices its process sees; 0: `reason` says why it can use none */
    int32_t current; /**< device that is current on the calling thread */
    int32_t wanted;  /**< device by the configuration or its communicator, or EP_DEFAULT */
    int32_t process; /**< process id */
    int32_t shares;  /**< would share its GPU with other ranks: setting EP_SHARE_GPUS */
    char reason[192];
    EpGpu gpu[EP_GPUS_LISTED];
} EpGpuReport;

/** Look at this process's GPUs, at the driver and, for several ranks, at NCCL. */
void ep_gpus_find(const EpGroupConfig *config, int32_t num_ranks, EpGpuReport *out);

/** Could the GPU that this process would use serve a rank? 0: `reason` says why not. */
int ep_gpus_usable_here(const EpGroupConfig *config, int32_t num_ranks, char *reason,
                        size_t reason_bytes);

/** The device of each rank: devices[size]. The rule is in ep.h, at EpGroupConfig. */
void ep_gpus_deal(const EpGpuReport *all, int32_t size, const int32_t *nodes, int32_t *devices);

/** Do some ranks have the same GPU? */
int ep_gpus_shared(const EpGpuReport *all, int32_t size, const int32_t *devices);

/**
 * Can the CUDA backend serve these ranks with these devices, whose blocks need `shared_bytes` of
 * shared memory? 0: `reason` says which rank lacks what.
 */
int ep_gpus_agree(const EpGpuReport *all, int32_t size, const int32_t *nodes,
                  const int32_t *devices, int64_t shared_bytes, char *reason, size_t reason_bytes);

#endif
