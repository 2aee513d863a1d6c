/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_PACKED_H
#define EP_RUNTIME_CUDA_PACKED_H

/**
 * How a partial sum that is quantised (EpHandleConfig.sum_quant) lies in a ring of throughput mode.
 *
 *     | 4 scales | codes of 512 elements | 4 scales | codes of 512 elements | ...
 *       16 bytes   512 bytes
 *
 * A bulk copy moves multiples of 16 bytes, and a row may be cut into pieces. So four scales, of 128
 * elements each, precede the codes that they belong to: each piece of whole groups is one copy, and
 * its place does not depend on the number of pieces. 528 bytes take the place of 1,024 of bf16. The
 * last group may be shorter; it has all four scales.
 *
 * A unit is 16 elements, and 16 bytes of codes: what a thread packs or unpacks at a time.
 */

#include "runtime/layout.h"

#define EP_PACKED_ELEMENTS 512 /* of a group */
#define EP_PACKED_UNITS 32     /* of a group */
#define EP_PACKED_BYTES 528    /* of a group */

/** Returns the bytes of a packed row, or of a piece of whole groups. `elements`: a multiple of 16.
 */
EP_HOST_DEVICE static inline int64_t ep_packed_bytes(int64_t elements) {
    return elements + (elements + EP_PACKED_ELEMENTS - 1) / EP_PACKED_ELEMENTS * 16;
}

/** Return the offset of a unit's codes, and that of the scale of its block. */
EP_HOST_DEVICE static inline int32_t ep_packed_codes(int32_t unit) {
    return unit * 16 + (unit / EP_PACKED_UNITS + 1) * 16;
}

EP_HOST_DEVICE static inline int32_t ep_packed_scale(int32_t unit) {
    return unit / EP_PACKED_UNITS * EP_PACKED_BYTES + unit % EP_PACKED_UNITS / 8 * 4;
}

#endif
