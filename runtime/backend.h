/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_BACKEND_H
#define EP_RUNTIME_BACKEND_H

/**
 * What a backend is: a table of functions. The public calls check their arguments and describe
 * what is to be done; the backend moves the bytes. There are two movements:
 *
 *     scatter   token rows -> slots     ep_dispatch, ep_combine_backward
 *     gather    slots -> token rows     ep_combine, ep_dispatch_backward
 *
 * and each backend writes each of them once.
 */

#include "ep/ep.h"
#include "runtime/scales.h"
#include "runtime/settings.h"
#include "runtime/status.h"

struct EpCall;
struct EpPlanShape;

typedef struct EpHandle EpHandle;
struct EpOp;

/** A step's routing, checked. */
typedef struct EpRouting {
    const void *topk_idx; /**< [num_rows, top_k] */
    EpType idx_type;
    int64_t num_rows;
    int64_t top_k;
    const void *num_tokens; /**< one integer: how many of the rows count; NULL: all */
    EpType num_tokens_type;
    const EpPlanTensors *out; /**< may be NULL */
    EpStream stream;
    const struct EpOp *op; /**< as which ranks announce it */
    const char *call;      /**< whose arguments these are, for sentences */
} EpRouting;

/*
 * Whether an optional tensor is given is told by a flag of its own or by a size: a rank without
 * tokens or slots may pass tensors whose data is NULL.
 */

/** Which part of an operation is to be done. The wait half has the description that its send half
 * had, less the inputs, plus the outputs. */
typedef enum EpHalf { EP_WHOLE, EP_SEND_HALF, EP_WAIT_HALF } EpHalf;

/**
 * Token rows to slots. Weights, scales and the derivative's parts are optional (NULL). `type`,
 * `row_bytes` and `scale_bytes` are those of rows on their way and in their slots. `rows` are like
 * that, too, unless they are quantised (runtime/quant.h) before they leave.
 */
typedef struct EpScatter {
    const struct EpOp *op;
    EpHalf half;
    const void *rows; /**< [T, row_bytes], or [T, source_row_bytes] */
    EpQuant quant;    /**< EP_QUANT_NONE or 0: copy */
    EpType source_type;
    int64_t source_row_bytes;
    EpType type;
    int64_t row_bytes;
    int64_t row_elements;
    int carries_weights;       /**< whether topk_weights travel; equal on all ranks */
    const float *topk_weights; /**< [T, K]: delivered with the rows */
    const void *scales;        /**< [T, scale_bytes]; none where rows are quantised */
    int64_t scale_bytes;
    EpType scale_type;
    EpScaleMap scale_map;      /**< how out_scales lies */
    int weighs;                /**< whether slot_weights multiply */
    const float *slot_weights; /**< [rows]: multiply each delivered row */
    int takes_dots;            /**< whether dot products are asked for */
    const void *slot_rows;     /**< [rows, row_bytes]: dot product with each delivered row */
    void *out_rows;
    float *out_weights; /**< [rows] ([rows, K] if flat): topk_weights, or the dot products */
    void *out_scales;
    void *out_idx; /**< flat: [rows, K] local experts */
    EpType idx_type;
    int64_t out_capacity;     /**< rows of the output buffer; up to there zero_tail reaches */
    const EpRouting *routing; /**< latency mode's dispatch: make the plan first; else NULL */
    EpStream stream;
} EpScatter;

/** Slots to token rows. */
typedef struct EpGather {
    const struct EpOp *op;
    EpHalf half;
    const void *rows; /**< [rows, row_bytes] */
    EpType type;
    int64_t row_bytes;
    int64_t row_elements;
    int weighs;                /**< whether slot_weights multiply */
    const float *slot_weights; /**< [rows]: multiply each row before it is added */
    int carries_values;        /**< whether slot_values travel; equal on all ranks */
    const float *slot_values;  /**< [rows] ([rows, K] if flat): carried back to [T, K] */
    void *out_rows;            /**< [out_num_rows, row_bytes]; zero past the step's tokens */
    int64_t out_num_rows;
    float *out_values; /**< [T, K] */
    EpStream stream;
} EpGather;

/** Memory that the peers of a group reach. */
typedef struct EpWindow {
    void *memory;   /**< NULL: no window */
    size_t bytes;   /**< that this rank asked for */
    size_t most;    /**< that any rank asked for */
    int owned;      /**< from ep_mem_alloc: allocated with the window, and freed with it */
    int32_t number; /**< below EP_MAX_WINDOWS; the same on all ranks */
} EpWindow;

/** What the calls check their arguments by: the user's view of the plan, and which token tensors
 *  belong to it. */
typedef struct EpStep {
    int prepared; /**< whether a prepare was issued */
    int known;    /**< whether it has finished: without that, `info` has no numbers */
    EpHandleInfo info;
    int64_t num_rows; /**< rows of topk_idx */
    int64_t exact;    /**< 1: token tensors have num_rows rows; 0: at least info.num_tokens */
} EpStep;

#define EP_STAY (-1) /* nothing to go back to, or no wish to */

typedef struct EpBackendOps {
    EpBackend id;
    const char *name;
    unsigned offers; /**< EP_OFFERS_...: what else is refused above the backend */
    /** Memory of a group, per rank, before anything exists. */
    void (*measure)(const EpGroupConfig *config, int32_t num_ranks, const EpSettings *settings,
                    int64_t *shared_bytes, int64_t *private_bytes);
    /** Collective parts of a group's life. `together`: whether all ranks close it now. */
    EpStatus (*open)(EpGroup *group);
    void (*close)(EpGroup *group, int together);
    /** Bring findings that wait elsewhere into the group. */
    void (*poll)(EpGroup *group);
    /** Optional (NULL: nobody): the group has failed in a meeting. Tell those that wait for this
     * rank in an operation. */
    void (*give_up)(EpGroup *group);
    /** Wait until this rank's operations have finished. */
    EpStatus (*finish)(EpGroup *group);
    /** Collective, when all ranks have finished: make a window, and where it is `owned` its memory,
     *  zeroed. On failure there is none, on any rank. */
    EpStatus (*open_window)(EpGroup *group, const struct EpCall *call, EpWindow *window);
    void (*close_window)(EpGroup *group, EpWindow *window, int together);
    /** Memory for handles that bring none, and how much a plan takes. */
    void *(*allocate)(const EpGroup *group, size_t bytes);
    void (*release)(const EpGroup *group, void *memory);
    int64_t (*plan_bytes)(const struct EpPlanShape *shape);
    /** Optional (NULL: none): private memory that the operations of a handle need beside its plan.
     *  It is allocated with the handle, freed with it, and nothing in it outlives an operation. */
    int64_t (*workspace_bytes)(const struct EpPlanShape *shape, const EpGroupConfig *config);
    /** Give a handle's memory its empty plan; check that memory is this handle's; mark it dead. */
    EpStatus (*format_plan)(EpHandle *handle);
    EpStatus (*check_plan)(const EpHandle *handle, const char *call, void *memory);
    void (*retire_plan)(EpHandle *handle);
    /** The handle's memory was bound anew: learn what it holds. */
    EpStatus (*adopt_plan)(EpHandle *handle);
    /** The plan's numbers on the host. */
    EpStatus (*read_plan)(const EpHandle *handle, EpStep *out);
    EpStatus (*prepare)(EpHandle *handle, const EpRouting *routing);
    EpStatus (*scatter)(EpHandle *handle, const EpScatter *scatter);
    EpStatus (*gather)(EpHandle *handle, const EpGather *gather);
    /** Optional (NULL: nothing to do). What surrounds calls on a group in which the backend takes
     *  part: its device becomes the thread's, profilers see the call. `leave` takes what `enter`
     *  returned, or EP_STAY. */
    int (*enter)(const EpGroup *group, const char *call);
    void (*leave)(const EpGroup *group, int before);
    /** Optional (NULL: any will do): refuse memory that the backend cannot reach. */
    EpStatus (*check_pointer)(const EpGroup *group, const EpCall *call, const char *argument,
                              const void *data);
    /** With EP_OFFERS_LATENCY alone, for handles in that mode: buffers that outlive an operation,
     *  which may be memory that peers reach. open_buffers is collective and sets handle->buffer; a
     *  rank whose handle has failed before (`mine`) comes to it, too, and its status is returned.
     *  close_buffers takes a handle whose open_buffers failed, too. */
    int64_t (*buffer_bytes)(const struct EpPlanShape *shape, const EpGroupConfig *config);
    EpStatus (*open_buffers)(EpHandle *handle, const struct EpCall *call, EpStatus mine);
    void (*close_buffers)(EpHandle *handle);
} EpBackendOps;

extern const EpBackendOps ep_backend_host, ep_backend_cuda;

/** What the CUDA backend has of EP_OFFERS_...: calls and configurations that need what a backend
 * has not are refused before they reach it, and EP_MODE_AUTO follows. */
#define EP_CUDA_OFFERS \
    (EP_OFFERS_LATENCY | EP_OFFERS_QUANT | EP_OFFERS_SCALE_COLUMNS | EP_OFFERS_SOURCE_COUNTS)

/** Which backend a configuration asks for: AUTO, HOST or CUDA. */
EpBackend ep_backend_wish(const EpGroupConfig *config, const EpSettings *settings);

/** What speaks against a wish whatever the machine is, or NULL. */
const char *ep_backend_contradiction(const EpGroupConfig *config, EpBackend wish);

/**
 * The backend that meets a wish: HOST or CUDA, or AUTO where none does. `why_not` says why CUDA is
 * not usable. Writes the reason, a sentence for ep_info.
 */
EpBackend ep_backend_decide(EpBackend wish, int cuda_usable, const char *why_not, char *reason,
                            size_t reason_bytes);

/** The table of a backend, NULL where this build does not have it. */
const EpBackendOps *ep_backend_ops(EpBackend backend);

#endif
