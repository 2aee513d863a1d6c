/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BINDINGS_TORCH_TENSORS_H
#define EP_BINDINGS_TORCH_TENSORS_H

/** Tensors of PyTorch as the library's, new ones, and the numbers of a plan. For calls in C. */

#include "bindings/torch/call.h"
#include "bindings/torch/python.h"

#define ROW_UNIT 16 /* rows start on multiples of this many bytes */

/** PyTorch's number of a type. */
enum { TORCH_BOOL = 11 };
int32_t ep_torch_type(EpType type);

/** Returns whether `object` is a dense tensor on the handle's device, of a type of the library;
 * with is_bool of bool, whose elements are bytes. */
int ep_torch_convert(const EpTorchHandle *handle, void *object, int is_bool, EpTensor *out);

/** The current stream of the handle's device. Returns whether PyTorch tells it. */
int ep_torch_find_stream(const EpTorchHandle *handle, void **out);

/**
 * Allocate a tensor by PyTorch's allocator. Without the interpreter's lock: memory of a GPU may
 * wait for work that other threads start.
 *
 * device  as in EpTorchHandle
 * type    PyTorch's number of t->type
 * t       shape and type; its memory is written
 *
 * Returns whether there is memory. *out is PyTorch's tensor, which the caller drops.
 */
int ep_torch_allocate(const EpTorchFunctions *torch, int32_t device, int32_t type, EpTensor *t,
                      void **out);

/** The outputs of prepare that make up Plan.numbers. */
typedef struct EpTorchNumbers {
    EpTensor parts[5]; /* counts, padded, offsets, totals, source rows */
    EpPlanTensors outputs;
} EpTorchNumbers;

int64_t ep_torch_count_numbers(const EpTorchHandle *handle);

/** Divides `numbers`, which may be NULL. Returns 0 if it is not as large as the parts. */
int ep_torch_divide(const EpTorchHandle *handle, const EpTensor *numbers, EpTorchNumbers *out);

/** Prepare into memory of the host. A failure leaves -1 in all numbers. */
EpStatus ep_torch_prepare(const EpTorchHandle *handle, const EpTensor *plan,
                          const EpTensor *topk_idx, void *stream, int32_t *numbers);

/** Wait until the stream has written the numbers. */
EpStatus ep_torch_wait(const EpTorchHandle *handle, void *stream);

/** Returns None, without an exception: Python goes the slower way. */
void *ep_torch_leave(void) __attribute__((cold));

static inline void *none(void) {
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}

#endif
