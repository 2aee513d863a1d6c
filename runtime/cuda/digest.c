/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/cuda/digest.h"

#include <string.h>

#include "runtime/cuda/device.h"
#include "runtime/op.h"

/* Hashes with FNV-1a. */
uint32_t ep_digest_of(const EpOp *op, int32_t id, const int64_t *values, int count) {
    uint32_t hash = 2166136261u;
    const unsigned char *byte = (const unsigned char *)values;
    for (size_t i = 0; i < (size_t)count * sizeof(*values); i++)
        hash = (hash ^ byte[i]) * 16777619u;
    return EP_DIGEST(op->code, id, (hash ^ hash >> 16) & 0xffff);
}

static int differ_in_handle(uint32_t own, uint32_t other) {
    int32_t id = EP_DIGEST_HANDLE(own), other_id = EP_DIGEST_HANDLE(other);
    return id != other_id && id && other_id;
}

EpStatus ep_fail_digests(int32_t rank, uint32_t own, int32_t peer, uint32_t other) {
    int32_t op = EP_DIGEST_OP(own), other_op = EP_DIGEST_OP(other);
    int32_t id = EP_DIGEST_HANDLE(own), other_id = EP_DIGEST_HANDLE(other);
    char place[EP_OP_PLACE_BYTES], other_place[EP_OP_PLACE_BYTES];
    if (op != other_op)
        return ep_fail(EP_ERR_ORDER,
                       "rank %d: %s: expected all ranks to call it%s, rank %d called %s%s", rank,
                       ep_op_name(op), ep_op_place(op, id, place), peer, ep_op_name(other_op),
                       ep_op_place(other_op, other_id, other_place));
    if (differ_in_handle(own, other) && strcmp(ep_op_owner(op), "weight") == 0)
        return ep_fail(EP_ERR_ORDER, "rank %d: %s: weight differs: rank %d has %d, rank %d has %d",
                       rank, ep_op_find(op)->name, rank, id, peer, other_id);
    if (differ_in_handle(own, other))
        return ep_fail(EP_ERR_ORDER,
                       "rank %d: %s: the handle's id differs: rank %d has %d, rank %d has %d", rank,
                       ep_op_find(op)->name, rank, id, peer, other_id);
    return ep_fail(EP_ERR_ORDER,
                   "rank %d: %s: expected the same %s on all ranks, rank %d called it%s with "
                   "others",
                   rank, ep_op_find(op)->name,
                   strcmp(ep_op_owner(op), "weight") == 0 ? "arguments" : "sizes", peer,
                   ep_op_place(other_op, other_id, other_place));
}
