/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_CUDA_DIGEST_H
#define EP_RUNTIME_CUDA_DIGEST_H

/** What ranks say of operations that differ, by their digests (EP_DIGEST). */

#include "runtime/status.h"

/** Returns whether two digests are of different calls, or of different handles. */
int ep_digests_differ_in_call(uint32_t own, uint32_t other);

/** Set the sentence of a rank that finds another one in another operation, or in the same one with
 *  other sizes. Returns EP_ERR_ORDER. */
EpStatus ep_fail_digests(int32_t rank, uint32_t own, int32_t peer, uint32_t other);

#endif
