/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BINDINGS_TORCH_WHOLE_H
#define EP_BINDINGS_TORCH_WHOLE_H

/** What the calls of libep.deep_ep share that are functions of C as a whole. */

#include "bindings/torch/tensors.h"

#define NO_MEMORY (-1) /* what a call returns where PyTorch has none */

enum { MOST_GIVEN = 7, MOST_MADE = 8 };

/** A call under way. */
typedef struct EpTorchWhole {
    const EpTorchStep *step;
    EpTorchSent sent; /**< of a HybridEPBuffer */
    const EpTorchHandle *h;
    void *stream;
    const EpTensor *rows, *map, *probs, *scales, *idx, *weights, *plan; /**< NULL: none */
    EpTensor given[MOST_GIVEN];
    EpTensor outputs[MOST_MADE];
    void *made[MOST_MADE]; /**< tensors of PyTorch */
    int64_t num_rows, num_tokens;
    int is_short; /**< whether PyTorch has refused memory */
    int is_asked; /**< whether a rank asks for a larger group */
} EpTorchWhole;

/** Convert an argument of `ndim` dimensions. None becomes NULL. Returns 0 for all that Python must
 *  look at. */
int ep_torch_take(const EpTorchWhole *call, void *object, int is_bool, int ndim, EpTensor *t,
                  const EpTensor **out);

int64_t ep_torch_element_bytes(EpType type);

/** Returns whether t is NULL, or of this type and shape. */
int ep_torch_is_matrix(const EpTensor *t, EpType type, int64_t rows, int64_t columns);

/** Returns whether they are rows of a type that is summed. */
int ep_torch_are_summable(const EpTensor *t);

/** Returns whether they are rows of at most `most` bytes, which the library takes as they are. */
int ep_torch_are_rows(const EpTensor *t, int64_t most);

/** Finds the current stream. Returns whether it is `stream`, an int of Python, on which a handle's
 *  plan was made, so that it can be read. */
int ep_torch_is_on(EpTorchWhole *call, void *stream);

/** Allocate a tensor at a place. Without columns it has one dimension. */
const EpTensor *ep_torch_make(EpTorchWhole *call, int place, EpType type, int64_t rows,
                              int64_t columns);
const EpTensor *ep_torch_make_on(EpTorchWhole *call, int32_t device, int place, EpType type,
                                 int64_t rows, int64_t columns);

/** A new torch.Tensor for what was made at a place, or None. */
void *ep_torch_wrap(const EpTorchWhole *call, int place);

/** Plan.numbers as bytes of Python. */
void *ep_torch_copy_numbers(const EpTorchWhole *call);

/** A new tuple of new references, which it takes. */
void *ep_torch_tuple(void *const *items, ptrdiff_t count);

/** Likewise an object of a type derived from tuple, whose __new__ is tuple's. */
void *ep_torch_handle(void *type, void *const *items, ptrdiff_t count);

void ep_torch_drop(EpTorchWhole *call);

/** Run a part of a call on its group alone, without the interpreter's lock. Returns NULL where it
 *  has succeeded, else what Python gets. */
void *ep_torch_run(EpTorchWhole *call, EpStatus (*part)(EpTorchWhole *call));

static inline void *share(void *object) {
    Py_IncRef(object);
    return object;
}

#endif
