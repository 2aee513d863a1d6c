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

#include "runtime/abort.h"
#include "runtime/mask.h"
#include "runtime/movement.h"
#include "runtime/nodes.h"
#include "runtime/recorder.h"
#include "runtime/settings.h"
#include "runtime/status.h"

struct EpGpuReport;
struct EpPlanShape;
struct EpSources;
struct EpRowsQuant;
struct EpRoutingCount;
struct EpRoutingMap;
struct EpWeightGather;
struct EpWeightReduce;
struct EpWeightAmax;
struct EpMove;
struct EpWeight;
struct EpWeightView;

typedef struct EpHandle EpHandle;

/** Numbers of windows: those below EP_MAX_WINDOWS are made together by all ranks, EP_MAX_WINDOWS +
 * id is adopted. */
#define EP_WINDOW_NUMBERS (EP_MAX_WINDOWS + EP_MAX_ADOPTED_WINDOWS)

/** Memory that the peers of a group reach. */
typedef struct EpWindow {
    void *memory; /**< NULL: no window */
    size_t bytes; /**< bytes that this rank asked for */
    size_t most;  /**< the most bytes that any rank asked for */
    int owned;    /**< from ep_mem_alloc: allocated and freed with the window */
    int32_t
        number; /**< below EP_WINDOW_NUMBERS; the same on all ranks, unless the window is paired */
    int32_t paired; /**< see EP_WINDOW_PAIRED */
    void *adopted;  /**< of ep_window_adopt: the caller's ncclWindow_t */
} EpWindow;

/** What calls check their arguments against: the user's view of the plan, and the shape of the
 *  token tensors that belong to it. */
typedef struct EpStep {
    int prepared; /**< whether a prepare was issued */
    int known;    /**< whether the prepare has finished; until then `info` has no numbers */
    EpHandleInfo info;
    int64_t num_rows; /**< T of the token tensors: rows of topk_idx; -1: the first tensor sets it */
    int64_t exact;    /**< 1: T is the rows of topk_idx; 0: any T from info.num_tokens on */
    int checked_later; /**< whether a kernel compares the plan with the tensors' numbers of rows */
} EpStep;

#define EP_STAY (-1) /* keep the current device */

/** Returns the GPU in whose memory an address lies, or -1 if CPUs can load from it. */
typedef int (*EpDeviceOf)(const void *data);

typedef struct EpBackendOps {
    EpBackend id;
    const char *name;
    unsigned offers; /**< EP_OFFERS_...; the callers refuse features that are not among them */
    /** Set out->within and out->between. */
    void (*describe)(const EpGroup *group, EpGroupInfo *out);
    /** Optional (NULL: there are none): write the constants of the division of blocks. Returns their
     *  length, as snprintf does. */
    size_t (*write_tuning)(const EpGroup *group, char *text, size_t bytes);
    /** Optional (NULL: the backend uses no GPU): report this process's GPUs. */
    void (*find_gpus)(const EpGroupConfig *config, int32_t num_ranks, struct EpGpuReport *out);
    /** Compute a group's memory in bytes per rank, from its configuration and nodes alone. */
    void (*measure)(const EpGroupConfig *config, int32_t num_ranks, const EpNodeSizes *nodes,
                    const EpSettings *settings, int64_t *shared_bytes, int64_t *private_bytes);
    /** Collective: open and close a group. `together`: whether all ranks close it now. */
    EpStatus (*open)(EpGroup *group);
    void (*close)(EpGroup *group, int together);
    /**
     * Optional (NULL: nobody joins a group). `reserve`, local: allocate a group's memory, before
     * its rank meets the others; `close` frees it, also after a failure. `admit`, collective over
     * the group's bootstrap: connect the ranks of which ep_group_connects speaks, and forget those
     * that are no members. group->nodes and `members` are the new ones. A rank outside of `alive` is
     * masked from then on, and those in it take part. On failure nothing has changed.
     */
    EpStatus (*reserve)(EpGroup *group);
    EpStatus (*admit)(EpGroup *group, const EpMask *alive);
    /** Bring asynchronous errors into the group. */
    void (*poll)(EpGroup *group);
    /** Optional (NULL: no peer can wait): the group has failed outside of operations; let peers
     *  know that wait for this rank in an operation. */
    void (*give_up)(EpGroup *group);
    /**
     * The group is aborted: let peers know, and this rank's operations that wait. Any thread calls
     * it, once, while another thread may use the group, and it waits for nothing. `sentence` has
     * EP_ABORT_BYTES bytes. `leaving`: peers may be freeing what this rank reaches. Returns 0 and
     * does nothing if the group has failed already.
     */
    int (*abort)(EpGroup *group, const char *sentence, int leaving);
    /** Returns a rank that has given up on the group and could let this one know, or -1. *blamed
     *  becomes the rank because of which, `why` its sentence if it has one, else "". */
    int32_t (*find_failed)(EpGroup *group, int32_t *blamed, char why[EP_ABORT_BYTES]);
    /**
     * This rank's last call was refused: let peers know, who quote `text` where they give up
     * because of this rank. "": this rank has corrected it. The caller holds the mutex of aborts.
     * `text` has EP_ABORT_BYTES bytes.
     */
    void (*refuse)(EpGroup *group, const char *text);
    /** This rank's last call was refused, and it destroys the group: end what peers have begun that
     *  waits for this rank, with this sentence of EP_ABORT_BYTES bytes. Its operations have ended.
     */
    void (*depart)(EpGroup *group, const char *why);
    /** Collective over the ranks in `alive`, in groups with masks: see ep_group_mask. The caller
     *  sets group->alive afterwards. On failure the group is suspended or has failed. Optional
     *  (NULL: no group has masks). */
    EpStatus (*mask)(EpGroup *group, const EpMask *alive, EpStream stream);
    /** Local, where late ranks are cut: see ep_group_cut. Optional likewise. */
    EpStatus (*cut)(EpGroup *group, int32_t rank, EpStream stream);
    /** Wait until this rank's operations have finished. */
    EpStatus (*finish)(EpGroup *group);
    /** Collective, after all ranks have finished: make a window and, if it is `owned`, its zeroed
     *  memory. On failure no rank has a window. */
    EpStatus (*open_window)(EpGroup *group, const struct EpCall *call, EpWindow *window);
    void (*close_window)(EpGroup *group, EpWindow *window, int together);
    /** Optional (NULL: nothing to do). Local, while operations may be running: let senders use an
     *  adopted window by its number, or no longer. After EP_ERR_TIMEOUT they may do either. */
    EpStatus (*adopt_window)(EpGroup *group, const struct EpCall *call, const EpWindow *window);
    EpStatus (*release_window)(EpGroup *group, const struct EpCall *call, const EpWindow *window);
    /** Optional (NULL: there are none): find an NCCL window's memory; see ep_window_locate. */
    EpStatus (*locate_window)(EpGroup *group, const struct EpCall *call, void *window,
                              void **memory, size_t *bytes);
    int64_t (*plan_bytes)(const struct EpPlanShape *shape);
    /** Make a handle's own plan, empty, and give it back. close_plan waits for nobody; it also
     *  accepts a handle whose open_plan failed. */
    EpStatus (*open_plan)(EpHandle *handle, const struct EpCall *call);
    void (*close_plan)(EpHandle *handle);
    /** Read the numbers of a plan to the host. Leaves out->prepared 0 if the handle's own memory
     *  holds none; refuses a named one that is none of this handle's. */
    EpStatus (*read_plan)(const EpHandle *handle, const struct EpCall *call, EpPlanRef plan,
                          EpStep *out);
    /** Fill the outputs of ep_plan_sources from a plan, after the work on `stream`. */
    EpStatus (*read_sources)(const EpHandle *handle, EpPlanRef plan, EpStream stream,
                             const struct EpSources *out);
    /** Fill the output of ep_plan_source_tokens likewise. Throughput mode alone. */
    EpStatus (*read_source_tokens)(const EpHandle *handle, const struct EpCall *call,
                                   EpPlanRef plan, EpStream stream, int32_t *counts);
    /** Optional (NULL: no limit of its own): refuse shapes that this rank cannot serve. */
    EpStatus (*check_shape)(const EpGroup *group, const struct EpCall *call,
                            const struct EpPlanShape *shape);
    /** Optional (NULL: nothing to do): the handle's pending operation, which was not captured, will
     *  never be received. Waits for nobody. */
    void (*drop)(EpHandle *handle);
    /** Optional (NULL: nothing is captured): set *captured to whether a stream is under capture. */
    EpStatus (*captures)(const EpGroup *group, EpStream stream, int32_t *captured);
    /** Read a map [P] of ep_group_place, compare it among ranks and make the group's table. */
    EpStatus (*place)(EpGroup *group, const int32_t *map, EpStream stream);
    EpStatus (*prepare)(EpHandle *handle, const EpRouting *routing);
    /** Copy numbers of a plan to routing->out. Local; after an operation that has checked the
     *  plan. */
    EpStatus (*publish)(EpHandle *handle, const EpRouting *routing);
    EpStatus (*scatter)(EpHandle *handle, const EpScatter *scatter);
    EpStatus (*gather)(EpHandle *handle, const EpGather *gather);
    /** Optional (NULL: nothing to do). Collective: a weight was created. Let its groups connect as
     * it needs. */
    EpStatus (*open_weight)(const struct EpWeight *weight);
    /** See handles/weights/weight.h and rows_quant.h. */
    EpStatus (*gather_weight)(const struct EpWeightGather *gather);
    EpStatus (*reduce_weight)(const struct EpWeightReduce *reduce);
    EpStatus (*reduce_amax)(const struct EpWeightAmax *amax);
    /** See handles/weights/move.h. */
    EpStatus (*move_weights)(const struct EpMove *move);
    /** Set the workspaces in view->sizes. */
    void (*measure_weight)(const struct EpWeight *weight, struct EpWeightView *view);
    EpStatus (*quantise_rows)(const struct EpRowsQuant *quant);
    /** See handles/prepare/count.h. Without a group. */
    EpStatus (*count_routing)(const struct EpCall *call, const struct EpRoutingCount *count);
    /** See handles/prepare/routing_map.h. Without a group. */
    EpStatus (*read_routing_map)(const struct EpCall *call, const struct EpRoutingMap *map);
    EpStatus (*write_routing_map)(const struct EpCall *call, const struct EpRoutingMap *map);
    /** Optional (NULL: nothing to do). Both surround calls on a group that use the backend. They
     *  make the group's device the thread's current one, and show the activity to profilers.
     * `leave` takes what `enter` returned, or EP_STAY. */
    int (*enter)(const EpGroup *group, const EpActivity *activity);
    void (*leave)(const EpGroup *group, int before);
    /** Optional (NULL: accept all memory): refuse memory that the backend cannot reach. */
    EpStatus (*check_pointer)(const EpGroup *group, const EpCall *call, const char *argument,
                              const void *data);
    /** Optional (NULL: the backend has no memory that CPUs cannot load from): returns a function
     * that knows such memory, or NULL if this machine has no driver. */
    EpDeviceOf (*find_device_of)(void);
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

/** Returns the features that a backend offers to a group on these nodes. Between nodes of GPUs
 * there is latency mode where all have as many ranks. EP_MODE_AUTO chooses it there as a setting
 * says, and alike on both backends: a program does the same on CPUs and on GPUs. */
unsigned ep_backend_offers(const EpBackendOps *backend, const EpNodeSizes *nodes);

/** Returns the table of a backend, or NULL if this build does not have it. */
const EpBackendOps *ep_backend_ops(EpBackend backend);

#endif
