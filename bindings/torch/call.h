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
} EpTorchFunctions;

/** What a libep.torch.Handle knows of itself. */
typedef struct EpTorchHandle {
    const EpTorchFunctions *torch;
    EpHandle *handle;
    int64_t plan_bytes;
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
 * Returns a new function of Python that calls an operation with new outputs. Its arguments are
 *
 *     the addresses of an EpTorchHandle and an EpTorchForm
 *     the operation's inputs, tensors and None
 *     the rows of what a dispatch or combine_backward writes, or the tokens of the others' outputs
 *     whether the expert ids of a dispatch are int32; else they are int64
 *
 * It returns a tuple of the outputs, tensors and None. Or it returns an EpStatus that is an error,
 * or None where Python must go the slower way. Nothing has happened then.
 */
void *ep_torch_function(void);

#endif
