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
    int32_t numbers;    /**< which one is Plan.numbers; -1: none */
    uint32_t gradients; /**< rows that Python copies to a multiple of 16 bytes */
    uint32_t weights;   /**< inputs that Python converts to float32 */
} EpTorchForm;

/** What a libep.torch.Handle knows of itself. */
typedef struct EpTorchHandle {
    const DlExchange *exchange;
    EpHandle *handle;
    int32_t device; /**< CUDA's number of the GPU; -1: the CPU */
    int32_t num_local_experts, num_ranks;
} EpTorchHandle;

/** What ep_torch_call returns where Python must go the slower way. Nothing has happened then. */
#define EP_TORCH_LEFT (-1)

/**
 * Call an operation on the current stream. `objects` is a tuple of its arguments in order, tensors
 * and None. Called with the interpreter's lock, which others may have while the operation runs.
 * Returns an EpStatus, or EP_TORCH_LEFT.
 */
int32_t ep_torch_call(const EpTorchHandle *handle, const EpTorchForm *form, void *objects);

#endif
