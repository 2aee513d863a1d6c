/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_BACKEND_H
#define EP_RUNTIME_BACKEND_H

/**
 * A backend: a table of functions. The public calls check their arguments and describe the movement
 * (movement.h); the backend moves the bytes. It implements each of the two movements once.
 *
 * Each table is filled in one file, runtime/<backend>/backend.c, from the backend's functions in
 * all folders. All other files of a layer use only layers below it.
 */

#include "runtime/movement.h"
#include "runtime/settings.h"
#include "runtime/status.h"

struct EpGpuReport;
struct EpPlanShape;

typedef struct EpHandle EpHandle;

/** Memory that the peers of a group reach. */
typedef struct EpWindow {
    void *memory;   /**< NULL: no window */
    size_t bytes;   /**< bytes that this rank asked for */
    size_t most;    /**< the most bytes that any rank asked for */
    int owned;      /**< from ep_mem_alloc: allocated and freed with the window */
    int32_t number; /**< below EP_MAX_WINDOWS; the same on all ranks */
} EpWindow;

/** What calls check their arguments against: the user's view of the plan, and the shape of the
 *  token tensors that belong to it. */
typedef struct EpStep {
    int prepared; /**< whether a prepare was issued */
    int known;    /**< whether the prepare has finished; until then `info` has no numbers */
    EpHandleInfo info;
    int64_t num_rows; /**< rows of topk_idx */
    int64_t exact;    /**< 1: token tensors have num_rows rows; 0: at least info.num_tokens */
} EpStep;

#define EP_STAY (-1) /* keep the current device */

/** Returns the GPU in whose memory an address lies, or -1 if CPUs can load from it. */
typedef int (*EpDeviceOf)(const void *data);

typedef struct EpBackendOps {
    EpBackend id;
    const char *name;
    unsigned offers; /**< EP_OFFERS_...; the callers refuse features that are not among them */
    /** Optional (NULL: the backend uses no GPU): report this process's GPUs. */
    void (*find_gpus)(const EpGroupConfig *config, int32_t num_ranks, struct EpGpuReport *out);
    /** Compute a group's memory in bytes per rank, from its configuration alone. */
    void (*measure)(const EpGroupConfig *config, int32_t num_ranks, const EpSettings *settings,
                    int64_t *shared_bytes, int64_t *private_bytes);
    /** Collective: open and close a group. `together`: whether all ranks close it now. */
    EpStatus (*open)(EpGroup *group);
    void (*close)(EpGroup *group, int together);
    /** Bring asynchronous errors into the group. */
    void (*poll)(EpGroup *group);
    /** Optional (NULL: no peer can wait): the group has failed in a rendezvous; let peers know that
     *  wait for this rank in an operation. */
    void (*give_up)(EpGroup *group);
    /** Wait until this rank's operations have finished. */
    EpStatus (*finish)(EpGroup *group);
    /** Collective, after all ranks have finished: make a window and, if it is `owned`, its zeroed
     *  memory. On failure no rank has a window. */
    EpStatus (*open_window)(EpGroup *group, const struct EpCall *call, EpWindow *window);
    void (*close_window)(EpGroup *group, EpWindow *window, int together);
    /** Allocate and free memory for handles whose caller gives none; bytes of a plan. */
    void *(*allocate)(const EpGroup *group, size_t bytes);
    void (*release)(const EpGroup *group, void *memory);
    int64_t (*plan_bytes)(const struct EpPlanShape *shape);
    /** Optional (NULL: none): private memory that the operations of a handle need beside its plan.
     *  It is allocated with the handle, freed with it, and nothing in it outlives an operation. */
    int64_t (*workspace_bytes)(const struct EpPlanShape *shape, const EpGroupConfig *config);
    /** Write an empty plan into a handle's memory; check that memory holds this handle's plan; mark
     *  the plan as dead. */
    EpStatus (*format_plan)(EpHandle *handle);
    EpStatus (*check_plan)(const EpHandle *handle, const char *call, void *memory);
    void (*retire_plan)(EpHandle *handle);
    /** Read the plan in the memory to which the handle is now bound. */
    EpStatus (*adopt_plan)(EpHandle *handle);
    /** Read the plan's numbers to the host. */
    EpStatus (*read_plan)(const EpHandle *handle, EpStep *out);
    EpStatus (*prepare)(EpHandle *handle, const EpRouting *routing);
    EpStatus (*scatter)(EpHandle *handle, const EpScatter *scatter);
    EpStatus (*gather)(EpHandle *handle, const EpGather *gather);
    /** Optional (NULL: nothing to do). Both surround calls on a group that use the backend. They
     *  make the group's device the thread's current one, and show the call to profilers. `leave`
     *  takes what `enter` returned, or EP_STAY. */
    int (*enter)(const EpGroup *group, const char *call);
    void (*leave)(const EpGroup *group, int before);
    /** Optional (NULL: accept all memory): refuse memory that the backend cannot reach. */
    EpStatus (*check_pointer)(const EpGroup *group, const EpCall *call, const char *argument,
                              const void *data);
    /** Optional (NULL: the backend has no memory that CPUs cannot load from): returns a function
     * that knows such memory, or NULL if this machine has no driver. */
    EpDeviceOf (*find_device_of)(void);
    /** Required by EP_OFFERS_LATENCY, for handles in latency mode: buffers that outlive an
     *  operation, possibly in memory that peers reach. open_buffers is collective and sets
     *  handle->buffer. A rank whose handle has already failed (with status `mine`) calls it too,
     * and gets `mine` back. close_buffers also accepts a handle whose open_buffers failed. */
    int64_t (*buffer_bytes)(const struct EpPlanShape *shape, const EpGroupConfig *config);
    EpStatus (*open_buffers)(EpHandle *handle, const struct EpCall *call, EpStatus mine);
    void (*close_buffers)(EpHandle *handle);
} EpBackendOps;

extern const EpBackendOps ep_backend_host, ep_backend_cuda;

/** The CUDA backend's features. Calls and configurations that need a missing feature are refused
 *  before they reach a backend. EP_MODE_AUTO depends on the features. */
#define EP_CUDA_OFFERS \
    (EP_OFFERS_LATENCY | EP_OFFERS_QUANT | EP_OFFERS_SCALE_COLUMNS | EP_OFFERS_SOURCE_COUNTS)

/** Returns the backend that configuration and settings ask for: AUTO, HOST or CUDA. */
EpBackend ep_backend_wish(const EpGroupConfig *config, const EpSettings *settings);

/** Returns why no machine can serve `wish` with this configuration, or NULL. */
const char *ep_backend_contradiction(const EpGroupConfig *config, EpBackend wish);

/**
 * Returns the backend that serves `wish`: HOST or CUDA, or AUTO if none can. `why_not` says why
 * CUDA is not usable. Writes the reason, a sentence for ep_info.
 */
EpBackend ep_backend_decide(EpBackend wish, int cuda_usable, const char *why_not, char *reason,
                            size_t reason_bytes);

/** Returns the table of a backend, or NULL if this build does not have it. */
const EpBackendOps *ep_backend_ops(EpBackend backend);

#endif
