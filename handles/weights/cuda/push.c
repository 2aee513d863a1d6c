/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernels of push.cu are given: which weights, and where their shards lie. */
#include "handles/weights/cuda/push.h"

#include "runtime/layout.h"

int32_t ep_push_word_of(int64_t bytes) {
    return bytes % 16 == 0 ? 16 : bytes % 4 == 0 ? 4 : 1;
}

int ep_push_reaches(const EpNodeSizes *nodes, int32_t ranks, const EpShards *s, int64_t unit) {
    int64_t words = ep_shard_elements(s) * unit / ep_push_word_of(ep_shards_run(s) * unit);
    return nodes->nodes == 1 && ranks > 1 && ranks <= EP_CUDA_MAX_RANKS && words > 0 &&
           words < INT32_MAX / 2;
}

int32_t ep_push_word(const EpShards *s, int64_t unit) {
    return ep_push_word_of(ep_shards_run(s) * unit);
}

EpPushedShards ep_push_describe(const EpShards *s, int64_t unit, int32_t word) {
    int dim = ep_shards_run_dim(s);
    EpPushedShards p = {.word = word,
                        .words = (int32_t)(ep_shard_elements(s) * unit / word),
                        .chunk = EP_PUSH_BYTES / word,
                        .run = ep_large_divisor(ep_shards_run(s) * unit / word),
                        .rows = ep_large_divisor(dim == 2 ? s->part[1] : 1),
                        .row_step = ep_shards_whole(s, 1) * ep_shards_whole(s, 2) * unit / word,
                        .step = ep_shards_whole(s, 2) * unit / word};
    p.chunks = (p.words + p.chunk - 1) / p.chunk;
    return p;
}
