/* SPDX-License-Identifier: Apache-2.0 */
/* ep_weight_move in rounds. The rows that a rank sends another one in a batch are one message, as
 * if they lay one after the other. It is as long as the longest of all ranks, so all have as many
 * rounds; only what there is travels. */
#include "handles/weights/host/weight.h"

#include <string.h>

#include "handles/host/statistics.h"
#include "runtime/host/host.h"
#include "runtime/layout.h"

typedef struct Exchange {
    const EpMoveSlice *slice;
    const EpMoveBatch *batch;
    EpExchange *exchange;
    int32_t rank;
} Exchange;

typedef enum Direction { TO_ROWS, FROM_ROWS } Direction;

/* Copy bytes [at, at + length) of the message with a peer, as far as there are. Returns how many.
 */
static int64_t copy_message(const EpMoveSlice *s, const EpMoveRows *rows, int32_t peer,
                            Direction direction, int64_t at, int64_t length, char *flat) {
    int64_t end = (rows->begin[peer + 1] - rows->begin[peer]) * s->bytes, copied = 0;
    end = ep_min(end, at + length);
    for (int64_t bytes; at < end; at += bytes, copied += bytes) {
        int64_t row = rows->row[rows->begin[peer] + at / s->bytes], into = at % s->bytes;
        bytes = ep_min(s->bytes - into, end - at);
        if (direction == FROM_ROWS)
            memcpy(flat + copied, s->from + row * s->from_step + into, (size_t)bytes);
        else
            memcpy(s->to + row * s->to_step + into, flat + copied, (size_t)bytes);
    }
    return copied;
}

static void fill_rows(void *context, int32_t peer, int64_t at, int64_t length, void *region) {
    const Exchange *e = context;
    if (peer == e->rank) return;
    int64_t bytes =
        copy_message(e->slice, &e->batch->sent, peer, FROM_ROWS, at, length, (char *)region);
    ep_round_fill(e->exchange, peer, bytes);
}

static void take_rows(void *context, int32_t peer, int64_t at, int64_t length,
                      const void *message) {
    const Exchange *e = context;
    (void)copy_message(e->slice, &e->batch->got, peer, TO_ROWS, at, length,
                       (char *)(uintptr_t)message);
}

static EpStatus exchange(void *context, const EpMoveSlice *slice, const EpMoveBatch *batch) {
    const EpMove *move = context;
    Exchange e = {slice, batch, ep_host(move->group)->exchange, move->group->rank};
    EpWeightRounds rounds = {.group = move->group,
                             .op = &ep_op_weight_move,
                             .mode = EP_ROUND_EACH,
                             .bytes = ep_max(1, batch->most * slice->bytes),
                             .context = &e,
                             .fill = fill_rows,
                             .take = take_rows};
    memcpy(rounds.fact, move->fact, sizeof(rounds.fact));
    return ep_host_weight_rounds(&rounds);
}

static EpStatus copy(void *context, void *to, const void *from, int64_t bytes) {
    (void)context;
    memcpy(to, from, (size_t)bytes);
    return EP_OK;
}

EpStatus ep_host_weight_move(const EpMove *move) {
    EP_TRY(ep_host_refuse_cuts(move->group));
    return ep_move_run(move, &(EpMover){(void *)(uintptr_t)move, INT64_MAX, exchange, copy});
}
