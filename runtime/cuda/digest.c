/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/cuda/digest.h"

#include "runtime/cuda/device.h"
#include "runtime/op.h"

static int differ_in_handle(uint32_t own, uint32_t other) {
    int32_t id = EP_DIGEST_HANDLE(own), other_id = EP_DIGEST_HANDLE(other);
    return id != other_id && id && other_id;
}

int ep_digests_differ_in_call(uint32_t own, uint32_t other) {
    return EP_DIGEST_OP(own) != EP_DIGEST_OP(other) || differ_in_handle(own, other);
}

EpStatus ep_fail_digests(int32_t rank, uint32_t own, int32_t peer, uint32_t other) {
    int32_t op = EP_DIGEST_OP(own), other_op = EP_DIGEST_OP(other);
    int32_t id = EP_DIGEST_HANDLE(own), other_id = EP_DIGEST_HANDLE(other);
    char place[EP_OP_PLACE_BYTES], other_place[EP_OP_PLACE_BYTES];
    if (op != other_op)
        return ep_fail(EP_ERR_ORDER,
                       "rank %d: %s: expected all ranks to call it%s, rank %d called %s%s", rank,
                       ep_op_name(op), ep_op_place(id, place), peer, ep_op_name(other_op),
                       ep_op_place(other_id, other_place));
    if (differ_in_handle(own, other))
        return ep_fail(EP_ERR_ORDER,
                       "rank %d: %s: the handle's id differs: rank %d has %d, rank %d has %d", rank,
                       ep_op_find(op)->name, rank, id, peer, other_id);
    return ep_fail(EP_ERR_ORDER,
                   "rank %d: %s: expected the same sizes on all ranks, rank %d called it%s with "
                   "others",
                   rank, ep_op_find(op)->name, peer, ep_op_place(other_id, other_place));
}
