/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BINDINGS_TORCH_CALL_H
#define EP_BINDINGS_TORCH_CALL_H

/**
 * libep_torch.so: one call from Python for an operation of libep.torch. It finds the tensors'
 * addresses and shapes through DLPack's exchange interface, and calls the operation. In Python each
 * tensor takes about a microsecond, and a call has five to eleven.
 *
 * Whatever is out of the ordinary is left to Python, which says what is wrong with it.
 * _fast.py is the other side.
 */

#include <ep/ep.h>

#include "bindings/torch/dlpack.h"

/** The numbers of operations, in the order of Python's table of them. */
enum {
    TORCH_PREPARE,
    TORCH_DISPATCH,
    TORCH_DISPATCH_ROUTED,
    TORCH_COMBINE,
    TORCH_COMBINE_BACKWARD,
    TORCH_DISPATCH_BACKWARD
};

/** The arguments of an operation. Masks have a bit for each argument. */
typedef struct EpTorchForm {
    int32_t number;     /**< of the operation */
    int32_t count;      /**< of its arguments */
    int32_t inputs;     /**< how many of them, the first ones, it reads */
    int32_t numbers;    /**< which one is Plan.numbers; -1: none */
    uint32_t gradients; /**< rows, biases too, that Python copies to a multiple of 16 bytes */
    uint32_t weights;   /**< inputs that Python converts to float32 */
} EpTorchForm;

/**
 * What is used of PyTorch. All but `exchange` allocate outputs: they are functions of the C
 * interface that its ahead-of-time compiler calls, and THPVariable_Wrap. Tensors that come through
 * DLPack do not serve as outputs, since record_stream() has no effect on them.
 */
typedef struct EpTorchFunctions {
    const DlExchange *exchange;
    int32_t (*empty)(int64_t ndim, const int64_t *shape, const int64_t *strides, int32_t type,
                     int32_t device_kind, int32_t device, void **out);
    int32_t (*data_of)(void *tensor, void **out);
    int32_t (*drop)(void *tensor);
    void *(*wrap)(const void *tensor); /**< returns a new torch.Tensor, which shares the tensor */
    int (*wait_stream)(void *stream);  /**< of CUDA: waits for a stream; returns 0, or an error */
    int (*is_capturing)(void *stream, int *out); /**< of CUDA, likewise; 0 where it is not */
} EpTorchFunctions;

/** A libep.torch.Group, and which thread is in a call on it. */
typedef struct EpTorchGroup {
    EpGroup *group;  /**< NULL: closed */
    uint64_t caller; /**< Python's number of the thread; 0: none */
    double began;    /**< when its call began, as Python's time() says */
    int32_t is_in;   /**< whether a thread is in a call */
} EpTorchGroup;

/** What a libep.torch.Handle knows of itself. */
typedef struct EpTorchHandle {
    const EpTorchFunctions *torch;
    EpTorchGroup *group;
    EpHandle *handle;
    int64_t plan_bytes, max_row_bytes;
    int64_t blocks, rows_per_block; /**< dimensions of receive rows with has_blocks */
    int32_t device;                 /**< CUDA's number of the GPU; -1: the CPU */
    int32_t num_local_experts, num_ranks, top_k;
    int32_t has_blocks, is_per_token, by_column; /**< of receive rows, weights and scales, where
                                                      by_column stands for any order but BY_ROW */
} EpTorchHandle;

/** What ep_torch_call returns where Python must go the slower way. Nothing has happened then. */
#define EP_TORCH_LEFT (-1)

/**
 * Call an operation on the current stream. `objects` is a tuple of its arguments in order, tensors
 * and None, and behind them perhaps the five counters of EpExtras, likewise. Called with the
 * interpreter's lock, which others may have while the operation runs. Returns an EpStatus, or
 * EP_TORCH_LEFT.
 */
int32_t ep_torch_call(const EpTorchHandle *handle, const EpTorchForm *form, void *objects);

/**
 * Returns a new tuple of functions of Python.
 *
 * make    Calls an operation with new outputs. Its arguments are
 *
 *             the addresses of an EpTorchHandle and an EpTorchForm
 *             the operation's inputs, tensors and None
 *             the rows of what a dispatch or combine_backward writes, or the tokens of the others'
 *             outputs
 *             whether the expert ids of a dispatch are int32; else they are int64
 *
 *         It returns a tuple of the outputs, tensors and None. Or it returns an EpStatus that is an
 *         error, or None where Python must go the slower way. Nothing has happened then.
 *
 * count   Calls ep_count_routing on the current stream. Its arguments are the address of an
 *         EpTorchFunctions, the device as in EpTorchHandle, topk_idx, and the numbers of ranks and
 *         experts. It returns rank_tokens, expert_tokens, and token_in_rank as bool, or what `make`
 *         does instead.
 *
 * send    Prepares, waits for the counts, and dispatches on a handle of exact sizes with flat rows.
 *         Its arguments are the addresses of an EpTorchHandle, of dispatch's EpTorchForm and of
 *         memory for Plan.numbers, which the host and the handle's GPU reach; the capacity and the
 *         spare expert (see Send in call.c); whether expert ids are int32; topk_idx, and the
 * tokens, weights and scales of dispatch. It returns dispatch's outputs; the plan; the rows
 * received, -1 if prepare has written no numbers; a list of the experts' counts, and one of each
 * source's rows. Without outputs dispatch has not run: there are no numbers, a rank has too many
 * tokens, or PyTorch has no memory. Or it returns what `make` does instead.
 *
 * dispatch_with_permute, combine_with_unpermute
 *         The calls of libep.deep_ep's HybridEPBuffer: see hybrid.c.
 *
 * dispatch, combine
 *         The calls of libep.deep_ep's Buffer: see normal.c.
 *
 * record  Takes the address of an EpTorchEvents, a device, and a stream's cudaStream_t as an int.
 *         It records an event there, and returns it, an object whose end gives it back.
 *
 * wait    Takes the address of an EpTorchEvents, a stream, and an event of `record`. Lets the
 * stream wait for it.
 *
 * enter   Takes the address of an EpTorchGroup. Returns whether this thread may call on it from now
 *         on: no thread was in a call.
 *
 * leave   Ends that.
 *
 * record and wait return CUDA's error, an int, if there is one.
 */
void *ep_torch_functions(void);

/** A configuration of steps of a HybridEPBuffer, or a Buffer's dispatch. */
typedef struct EpTorchStep {
    const struct EpTorchStep *next;  /**< of the same buffer */
    void *object;                    /**< of Python, which keeps all of this */
    const EpTorchHandle *send, *sum; /**< of dispatch and combine; NULL: none yet */
    int32_t *numbers;  /**< memory of the host for Plan.numbers; NULL where rows are given */
    int64_t width;     /**< elements of a row */
    int64_t row_bytes; /**< most bytes of a row, at least 2 for each element */
    int64_t bound;     /**< most tokens of a rank */
    int64_t alignment; /**< of each expert's rows */
    int64_t rows;      /**< of the outputs; 0: as many as come, which the host reads */
    int64_t send_sms, sum_sms;
} EpTorchStep;

/** What C reads of a HybridEPBuffer. Its multiprocessors are 0 where Buffer.num_sms counts. */
typedef struct EpTorchBuffer {
    const EpTorchStep *steps; /**< the first one; NULL: none */
    int64_t bound;            /**< most tokens of a rank */
    int64_t send_sms, sum_sms;
} EpTorchBuffer;

enum { MOST_WORDS = 20 };

/** A method of HybridEPBuffer that is one of C. Objects of Python, which keeps them. */
typedef struct EpTorchMethod {
    void *function; /**< of Python, which does what C leaves */
    int64_t count;  /**< of its keywords */
    void *names[MOST_WORDS];
} EpTorchMethod;

/** What the methods know. */
typedef struct EpTorchMethods {
    int64_t head;     /**< bytes with which each object begins; behind them a HybridEPBuffer has the
                           address of its EpTorchBuffer */
    int64_t bytes_at; /**< where the elements of bytes begin */
    void *kind;       /**< the type of handles */
    void *buffer, *num_sms; /**< the type Buffer, and the name of its attribute */
    void *settle;           /**< a function that raises a Status */
    EpTorchMethod send, sum;
} EpTorchMethods;
extern EpTorchMethods ep_torch_methods;

/** What C reads of a HybridEPBuffer's handle, which has it as bytes. Offsets are from `memory`, on
 *  multiples of 64. */
typedef struct EpTorchSent {
    const EpTorchStep *step;
    void *stream;       /**< on which the plan was made */
    void *memory;       /**< of the plan; behind it lies what is made of a routing map */
    int64_t ids_at;     /**< INT32 [T, K]; 0: the caller's ids are in the handle */
    int64_t weights_at; /**< FP32 [T, K], which calls on `stream` may overwrite; 0: none */
    int64_t num_tokens; /**< T */
    int64_t num_rows;   /**< of the outputs */
} EpTorchSent;

/** How often, and how long, calls of `send` have waited for a GPU's counts. */
typedef struct EpTorchWaits {
    int64_t count, ns;
} EpTorchWaits;
extern EpTorchWaits ep_torch_waits;

/** What is used of CUDA's runtime, the one that PyTorch uses. Functions return 0, or an error. */
typedef struct EpTorchEvents {
    int (*create)(void **out, unsigned flags); /**< on the current device */
    int (*record)(void *event, void *stream);
    int (*wait)(void *stream, void *event, unsigned flags);
    int (*get_device)(int *out);
    int (*set_device)(int device);
} EpTorchEvents;

/** Functions of ep_torch_functions. */
void *ep_torch_hybrid_dispatch(void *self, void *const *objects, ptrdiff_t count);
void *ep_torch_hybrid_combine(void *self, void *const *objects, ptrdiff_t count);
void *ep_torch_hybrid_send_method(void *self, void *const *objects, ptrdiff_t count, void *names);
void *ep_torch_hybrid_sum_method(void *self, void *const *objects, ptrdiff_t count, void *names);
void *ep_torch_normal_dispatch(void *self, void *const *objects, ptrdiff_t count);
void *ep_torch_normal_combine(void *self, void *const *objects, ptrdiff_t count);
void *ep_torch_enter(void *self, void *const *objects, ptrdiff_t count);
void *ep_torch_leave_group(void *self, void *const *objects, ptrdiff_t count);
void *ep_torch_record_event(void *self, void *const *objects, ptrdiff_t count);
void *ep_torch_wait_event(void *self, void *const *objects, ptrdiff_t count);

#endif
