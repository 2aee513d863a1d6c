/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_GPUS_H
#define EP_BOOTSTRAP_GPUS_H

/**
 * Which GPUs the ranks see, which of them each rank uses, and which backend serves a group. Each
 * rank reports what its process sees. Everything else follows from the reports, by the same rules
 * on every rank and without access to the machine, so tests can invent machines.
 */

#include "runtime/group.h"

#define EP_GPUS_LISTED 32 /* further GPUs of a process are not offered */

typedef struct EpGpu {
    unsigned char uuid[16]; /**< the same GPU has the same one in every process */
    char bus[20];           /**< PCI bus id: "0000:17:00.0" */
    char name[40];
    int32_t capability;       /**< 90 is 9.0 */
    int16_t code;             /**< capability that its code was compiled for: see ep_cuda_code */
    int16_t masked_code;      /**< likewise of kernels for groups with masks; 0: none */
    int32_t num_sms;          /**< multiprocessors */
    int32_t shared_bytes;     /**< that a block may have; LIBEP_SHARED_BYTES limits it */
    uint32_t reaches;         /**< bit d: it can load and store memory of device d */
    unsigned char fabric[16]; /**< the NVLink fabric that joins it to GPUs of other machines; zero:
                                   none */
    int32_t clique;           /**< its part of the fabric: GPUs of one clique reach each other */
} EpGpu;

/** What one rank reports. */
typedef struct EpGpuReport {
    int32_t count;     /**< devices that its process sees; 0: it can use none, see `reason` */
    int32_t current;   /**< device that is current on the calling thread */
    int32_t wanted;    /**< device by the configuration or its communicator, or EP_DEFAULT */
    int32_t process;   /**< a number of its process, of each process of a machine another one */
    int32_t present;   /**< a GPU is there, usable or not */
    int32_t apart;     /**< its GPU counts as if it reached no other: LIBEP_PEERS=none, or
                            NCCL_P2P_DISABLE=1, with which NCCL maps no memory of another GPU */
    int32_t masks;     /**< its group has masks */
    int32_t may_share; /**< may share its GPU with other ranks: setting LIBEP_SHARE_GPUS */
    char reason[192];
    char nccl_host[64]; /**< NCCL_HOSTID: ranks that differ in it are on different hosts for NCCL */
    EpGpu gpu[EP_GPUS_LISTED];
} EpGpuReport;

/** Report this process's GPUs. Also checks the driver and, for several ranks, NCCL. */
void ep_gpus_find(const EpGroupConfig *config, const EpSettings *settings, int32_t num_ranks,
                  EpGpuReport *out);

/** Returns 1 if the GPU that this process would use can serve a rank; else 0, and `reason` says
 *  why. */
int ep_gpus_usable_here(const EpGroupConfig *config, const EpSettings *settings, int32_t num_ranks,
                        char *reason, size_t reason_bytes);

/** Choose the device of a place of a group that processes may join, from its own process's report
 *  alone: ep.h states the rule, at EpGroupConfig. Returns -1 if it cannot serve a rank, and
 * `reason` says why. */
int32_t ep_gpus_choose(const EpGpuReport *mine, int32_t place, int64_t shared_bytes, char *reason,
                       size_t reason_bytes);

/** Assign a device to each rank: devices[size]. ep.h states the rule, at EpGroupConfig. */
void ep_gpus_assign(const EpGpuReport *all, int32_t size, int32_t *devices);

/**
 * Divide the ranks into NVLink domains: those whose GPUs, these devices, reach each other's memory.
 * nodes[size] has each rank's machine, or pretended node, and becomes its domain, numbered in the
 * order of the lowest ranks. Ranks of one machine part where GPUs do not reach each other; ranks of
 * several machines join where one fabric connects their GPUs, unless the nodes are pretended.
 */
void ep_gpus_domains(const EpGpuReport *all, int32_t size, const int32_t *devices, int pretended,
                     int32_t *nodes);

/** Returns 1 if no other rank of the group is in this rank's process. */
int ep_gpus_alone(const EpGpuReport *all, int32_t size, int32_t rank);

/** Returns 1 if some ranks use the same GPU. */
int ep_gpus_shared(const EpGpuReport *all, int32_t size, const int32_t *devices);

/** Returns 1 if NCCL can connect all ranks. It refuses ranks of one host that use the same GPU. */
int ep_gpus_nccl(const EpGpuReport *all, int32_t size, const int32_t *devices);

/**
 * Returns 1 if the CUDA backend can serve these ranks with these devices, whose blocks need
 * `shared_bytes` of shared memory; else 0, and `reason` says which rank lacks what.
 */
int ep_gpus_agree(const EpGpuReport *all, int32_t size, const int32_t *nodes,
                  const int32_t *devices, int64_t shared_bytes, char *reason, size_t reason_bytes);

/**
 * Local, before this rank meets others: choose the backend of a place of a group that processes may
 * join, and this rank's device, which becomes config->device.
 */
EpStatus ep_backend_choose(const EpCall *call, EpGroupConfig *config, const EpSettings *settings,
                           int32_t place, EpChoice *out);

/**
 * Collective: choose the backend. The ranks have agreed on the configuration before. Unless the
 * configuration asks for the host backend, ranks report their GPUs into reports[size]. Returns
 * EP_ERR_UNSUPPORTED on every rank if the cuda backend is asked for and some rank cannot use it.
 * nodes[] of the bootstrap's ranks are machines, or pretended; where the cuda backend is chosen
 * they become its domains.
 */
EpStatus ep_backend_agree(const EpCall *call, const EpBootstrap *bootstrap,
                          const EpGroupConfig *config, const EpSettings *settings,
                          EpPurpose purpose, int32_t *nodes, EpGpuReport *reports, EpChoice *out);

#endif
