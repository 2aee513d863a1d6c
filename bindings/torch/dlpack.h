/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BINDINGS_TORCH_DLPACK_H
#define EP_BINDINGS_TORCH_DLPACK_H

/**
 * The part of DLPack that call.c uses: how C code asks a framework for a tensor's address, shape
 * and type, and for the current stream, without the framework's headers. The layouts are those of
 * version 1 of DLPack's exchange interface (https://dmlc.github.io/dlpack/latest/c_api.html), which
 * PyTorch offers since 2.10 as torch.Tensor.__dlpack_c_exchange_api__.
 */

#include <stdint.h>

/** Kinds of devices and of elements. */
enum {
    DL_CPU = 1,
    DL_CUDA = 2,

    DL_INT = 0,
    DL_UINT = 1,
    DL_FLOAT = 2,
    DL_BFLOAT = 4,
    DL_BOOL = 6,
    DL_FLOAT8_E4M3FN = 10,
    DL_FLOAT8_E5M2 = 12
};

typedef struct DlTensor {
    void *data;
    int32_t device_kind, device;
    int32_t ndim;
    uint8_t kind, bits; /**< of an element */
    uint16_t lanes;
    int64_t *shape, *strides; /**< in elements */
    uint64_t byte_offset;     /**< of the first element from `data` */
} DlTensor;

/** Functions return 0, or -1 with a Python exception set. They need the interpreter's lock. */
typedef struct DlExchange {
    uint32_t major, minor; /**< 1 and up: the layout from here on */
    struct DlExchange *older;
    void *allocate, *managed_from_object, *managed_to_object;
    int (*tensor_from_object)(void *object, DlTensor *out); /**< valid while the object is */
    int (*current_stream)(int32_t device_kind, int32_t device, void **out);
} DlExchange;

#endif
