/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_DIGEST_H
#define EP_RUNTIME_CUDA_DIGEST_H

/** Digests of operations (EP_DIGEST), and what ranks say of operations that differ. */

#include "runtime/op.h"
#include "runtime/status.h"

/** Returns the digest of an operation of a handle, or weight, that all ranks call with these
 * values. `id` 0 matches any. */
uint32_t ep_digest_of(const EpOp *op, int32_t id, const int64_t *values, int count);

/** Set the sentence of a rank that finds another one in another operation, or in the same one with
 *  other sizes. Returns EP_ERR_ORDER. */
EpStatus ep_fail_digests(int32_t rank, uint32_t own, int32_t peer, uint32_t other);

#endif
