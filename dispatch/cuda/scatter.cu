/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scatter over NVLink: token rows to slots, for ep_dispatch and ep_combine_backward.
 *
 * One launch of sending and receiving blocks (pipeline_role). A sending block loads tokens into
 * shared memory one by one, and pushes each to every rank that needs it, once: into the ring there
 * or, for a zero-copy receive, into the first of the row's slots. A receiving block takes what has
 * arrived and writes it to all (other) slots of each row. runtime/cuda/pipeline.cuh describes the
 * warps of a block; runtime/cuda/device.h how blocks divide the work, why there is no circular
 * wait, and the memory order of records, heads and credits.
 *
 * Who waits on whom: a sending block waits for all ranks' arrivals and for credits, that is, until
 * the receiver's block has emptied a record of the ring; a receiving block waits for heads.
 *
 * Where blocks of rows have words (EpExtras.ready), the signal warps of both kinds of blocks count
 * the rows that are written, and the threads that write padding what holds no token; see
 * EpBlockCounters.
 *
 * Rows of the rank's own tokens that are only copied go from the sending block straight to their
 * slots. Where rows are multiplied, the receiving block reads them in place.
 */
#include "dispatch/cuda/scatter.h"

#include "runtime/cuda/plan.cuh"
#include "runtime/cuda/rows.cuh"
#include "runtime/cuda/scheduler.cuh"

EP_VARIANT_BEGIN

/* ==== metadata ============================================================================== */

/* Weights, scales and local experts on the way to a row's slots, in blocks of both kinds. */

/* What becomes of rows. Each form has a kernel of its own: code that does not run is not free.
 * TILED: as COPIED, where ep_scatter_is_tiled. COUNTED: likewise, and counted for the words of
 * their blocks. */
enum Form { COPIED, MULTIPLIED, TILED, COUNTED, TILED_COUNTED };

__device__ constexpr int is_tiled(Form form) {
    return form == TILED || form == TILED_COUNTED;
}

__device__ constexpr int is_counted(Form form) {
    return form == COUNTED || form == TILED_COUNTED;
}

/* Whether rows have metadata. */
__device__ __forceinline__ int has_metadata(const EpScatterArgs &a) {
    return a.t.carries_weights || a.t.scale_bytes || a.t.out_idx;
}

/* Store the experts and weights of a flat row. By a warp. */
__device__ __forceinline__ void store_flat_metadata(const EpScatterArgs &a, int64_t row, int expert,
                                                    float weight, int lane) {
    int64_t at = row * a.top_k + lane;
    if (row < 0 || lane >= a.top_k) return;
    int has_weight = expert >= 0 || a.shape.row_weights == EP_WEIGHTS_ALL;
    if (a.t.carries_weights) a.t.out_weights[at] = has_weight ? weight : 0;
    int id = expert >= 0 ? expert + a.t.first_id : -1;
    if (a.t.out_idx && a.t.idx_type == EP_TYPE_INT64)
        ((int64_t *)a.t.out_idx)[at] = id;
    else if (a.t.out_idx)
        ((int32_t *)a.t.out_idx)[at] = id;
}

/* Copy a row of scales to columns; `to` is where the first scale goes. An element is `per` words.
 * By a warp. */
template <typename Word>
__device__ __forceinline__ void spread_column(const EpScaleMap &map, char *to, const char *from,
                                              int per) {
    int64_t step = ep_scale_step(&map);
    spread_words<Word>(to, from, (int)map.count * per,
                       [=](int i) { return i / per * step + i % per * (int64_t)sizeof(Word); });
}

/* Copy a row of scales to tiles, a word for each. By a warp. */
__device__ __forceinline__ void spread_tiles(const EpScaleMap &map, char *to, const char *from) {
    spread_each<uint32_t>(
        to, (int)(map.count + EP_TILE_SCALES - 1) / EP_TILE_SCALES,
        [&](int i) { return ep_swizzled_word(&map, i, __ldcg((const uint32_t *)from + i)); },
        [](int i) { return i * (int64_t)EP_TILE_BYTES; });
}

/* Copy a row of scales to columns, or to tiles. Columns are aligned to 4 bytes and no more: an
 * element of 8 bytes is two words. By a warp. */
template <Form FORM>
__device__ __forceinline__ void spread_columns(const EpScaleMap &map, char *to, const char *from) {
    if (is_tiled(FORM) && map.swizzled)
        spread_tiles(map, to, from);
    else if (map.element_bytes == 1)
        spread_column<uint8_t>(map, to, from, 1);
    else if (map.element_bytes == 2)
        spread_column<uint16_t>(map, to, from, 1);
    else
        spread_column<uint32_t>(map, to, from, map.element_bytes / 4);
}

/* Returns the byte offset of a slot's first scale. */
template <Form FORM>
__device__ __forceinline__ int64_t scale_at(const EpScaleMap &map, int64_t slot) {
    return is_tiled(FORM) ? ep_scale_at(&map, slot, 0) : ep_plain_scale_at(&map, slot, 0);
}

/* Entry k of a row, in lane k of a warp. */
typedef struct MetadataEntry {
    int slot;   /* that receives the row here, -1: none. has_rows: the row's, in one lane */
    int expert; /* among this rank's, -1: none */
    float weight;
    char *record; /* of another rank that gets the row, in one lane for each rank */
} MetadataEntry;

/* Copy the weights and scales of a row to its slots and records. By a warp. */
template <Form FORM>
__device__ __forceinline__ void spread_metadata(const EpScatterArgs &a, const MetadataEntry &e,
                                                const char *scales) {
    int lane = threadIdx.x % 32;
    unsigned slot_lanes = __ballot_sync(~0u, e.slot >= 0),
             record_lanes = __ballot_sync(~0u, e.record != NULL);
    if (slot_lanes && a.shape.has_rows)
        store_flat_metadata(a, __shfl_sync(~0u, e.slot, __ffs(slot_lanes) - 1), e.expert, e.weight,
                            lane);
    else if (a.t.carries_weights && e.slot >= 0)
        a.t.out_weights[e.slot] = e.weight;
    for (unsigned left = record_lanes; left && a.t.carries_weights; left &= left - 1) {
        char *record = (char *)__shfl_sync(~0u, (unsigned long long)e.record, __ffs(left) - 1);
        if (lane < a.top_k) ((float *)(record + a.record.weights))[lane] = e.weight;
    }
    if (!a.t.scale_bytes) return;
    char *to = e.record ? e.record + a.record.scales : NULL, *out = NULL;
    if (e.slot >= 0) out = a.t.out_scales + scale_at<FORM>(a.t.scale_map, e.slot);
    if (!a.t.scale_map.by_column && !(is_tiled(FORM) && a.t.scale_map.swizzled)) {
        spread_scales(out ? out : to, scales, a.t.scale_bytes);
        return;
    }
    if (record_lanes) spread_scales(to, scales, a.t.scale_bytes);
    if (slot_lanes) spread_columns<FORM>(a.t.scale_map, out, scales);
}

/* ==== sending blocks ======================================================================== */

/* They send each token of this rank once to every rank that needs it, quantised on the way if the
 * caller asks for it. */

/** Where rows go on each rank. */
typedef struct ReceiveRows {
    char *rows[EP_CUDA_MAX_RANKS];    /* of each rank, as mapped here; NULL: into the ring */
    int64_t count[EP_CUDA_MAX_RANKS]; /* of rows there, which no slot may exceed */
} ReceiveRows;

/* Load the address of a rank's part of a window. It may be stored meanwhile
 * (bootstrap/memory/cuda/adopt.c), so the load is not one of constants. */
__device__ __forceinline__ uint64_t load_part(const EpCudaGroup &g, int window, int r) {
    return ep_load_relaxed_gpu((const uint64_t *)g.peers + window * EP_CUDA_MAX_RANKS + r);
}

/* Set where a rank's rows go. `part` is its part of window `guessed`, loaded before its arrival
 * was here; `rows` as in ep_await_rows. Returns 0 if that window has not been adopted here or,
 * where it is paired, is not the one that this rank receives in. */
__device__ __forceinline__ int set_receiver(const EpScatterArgs &a, ReceiveRows *receivers,
                                            uint32_t epoch, int r, uint64_t where, uint64_t rows,
                                            int guessed, uint64_t part) {
    const EpCudaGroup &g = a.group;
    int named = (int)(where >> 40) - 1, window = named == EP_PAIRED - 1 ? a.paired : named;
    uint64_t offset = (where & (((uint64_t)1 << 40) - 1)) * 16;
    if (window < 0) part = 0;
    if (window >= 0 && (window != guessed || !part)) part = load_part(g, window, r);
    receivers->rows[r] = part ? (char *)(part + offset) : (char *)NULL;
    receivers->count[r] = part ? ep_await_rows(g, r, epoch, rows) : 0;
    if (receivers->count[r] < 0) return 0;
    if (named < 0 || part) return 1;
    int id = named == EP_PAIRED - 1 ? -1 : named - EP_MAX_WINDOWS;
    ep_report(g, EP_FAULT_WINDOW, EpAwaited{g.rank, 0, id, 0, (uint32_t)ep_member(g, r)});
    return 0;
}

/* Wait for all ranks' arrivals, which say where their rows go. Most ranks receive in the window in
 * which this one does, so its addresses are loaded first. By a warp. Returns 0 on failure. */
__device__ __forceinline__ int await_receivers(const EpScatterArgs &a, ReceiveRows *receivers,
                                               uint32_t epoch) {
    const EpCudaGroup &g = a.group;
    int own = (int)(a.where >> 40) - 1, guessed = own == EP_PAIRED - 1 ? a.paired : own;
    int alive = 1;
    for (int r = threadIdx.x % 32; r < g.size && alive; r += 32) {
        uint64_t where = 0, rows = 0, part = guessed >= 0 ? load_part(g, guessed, r) : 0;
        alive = ep_await_arrival(g, r, epoch, &where, &rows) &&
                set_receiver(a, receivers, epoch, r, where, rows, guessed, part);
    }
    return __all_sync(~0u, alive);
}

/* Choose where this lane stores its team's token (*to, NULL: nowhere), and which rank it signals
 * (*peer, -1: none); wait until there is room in the ring. Own rows that are only copied go from
 * here straight to their slots. Returns 0 on timeout. */
template <Form FORM>
__device__ __forceinline__ int choose_target(const EpScatterArgs &a, const ReceiveRows *receivers,
                                             uint32_t epoch, const EpEntry &e, char **to,
                                             int *peer) {
    const EpCudaGroup &g = a.group;
    *to = NULL, *peer = -1;
    if (FORM != MULTIPLIED && e.owner == g.rank && e.slot >= 0)
        *to = a.t.out_rows + e.slot * a.t.row_bytes;
    if (e.owner < 0 || e.owner == g.rank || !e.leader) return 1;
    *peer = e.owner;
    if (!ep_await_room(g, epoch, e.owner, e.row, ep_load_credit(g, e.owner, e.row))) return 0;
    char *rows = receivers->rows[e.owner];
    if (!rows)
        *to = ep_ring(g, e.owner, g.rank, e.row);
    else if (e.slot >= 0 && e.slot < receivers->count[e.owner])
        *to = rows + e.slot * a.t.row_bytes;
    return 1;
}

/* Post the work items of a team's token, one for each fragment of its row. `number` is the first.
 * COUNTED: `slot` is one of this rank's that the row is stored to, -1: none. */
template <Form FORM>
__device__ __forceinline__ void post_token(const EpScatterArgs &a, Pipeline *p, const Team &t,
                                           uint32_t number, int token, int valid, char *to, int row,
                                           int peer, int slot) {
    int stores, slots = 0, place = 0;
    if (is_counted(FORM)) place = team_rank(t, slot >= 0, &slots);
    int signals, at = team_rank(t, to != NULL, &stores);
    int signal = team_rank(t, peer >= 0, &signals), is_last = team_is_last(t, valid);
    for (int fragment = 0; fragment < a.send.fragments; fragment++) {
        uint32_t n = number + fragment;
        int j = n % PIPELINE_ENTRIES, cell = j * a.send.width;
        int64_t offset = (int64_t)fragment * a.send.stage_bytes;
        if (valid) pipeline_await_entry(p, n);
        if (valid && to) p->to[cell + at] = to + (offset >> a.send.shrink);
        if (valid && peer >= 0) p->peer[cell + signal] = peer, p->row[cell + signal] = row;
        if (is_counted(FORM) && valid && slot >= 0) p->slot[cell + place] = slot;
        if (valid && t.k == 0) {
            p->from[cell] = a.t.rows + token * a.source.row_stride + offset;
            p->item[j] = WorkItem{1,
                                  1,
                                  (int16_t)stores,
                                  (int16_t)slots,
                                  fragment_bytes(a.send, a.t.source_row_bytes, fragment),
                                  0,
                                  0,
                                  0};
            p->signals[j] = pipeline_signals(signals, fragment, a.send.fragments, is_last);
            p->index[j] = token, p->fragment[j] = fragment;
        }
        if (valid) ep_mbarrier_arrive(&p->barrier[ITEM_POSTED][j]);
    }
}

/* A scheduler warp of a sending block. */
template <Form FORM>
__device__ void schedule_tokens(const EpScatterArgs &a, Pipeline *p, ReceiveRows *receivers,
                                const FirstClaim &first_claim, uint32_t epoch, int blocks) {
    Team t = make_team(a.top_k, a.send);
    if (FORM == MULTIPLIED && a.group.size == 1) return pipeline_end(p, t);
    auto ready = [&] { return await_receivers(a, receivers, epoch); };
    auto post = [&](const EpEntry &e, int token, int valid, int count) {
        char *to;
        int peer;
        if (!__all_sync(~0u, choose_target<FORM>(a, receivers, epoch, e, &to, &peer))) return 0;
        uint32_t number = pipeline_take(p, count * a.send.fragments) + t.index * a.send.fragments;
        int slot = is_counted(FORM) && e.owner == a.group.rank ? e.slot : -1;
        post_token<FORM>(a, p, t, number, token, valid, to, e.row, peer, slot);
        return 1;
    };
    walk_tokens(a, t, first_claim, SENDERS, blocks, ready, post);
    pipeline_end(p, t);
}

/* ---- weights and scales -------------------------------------------------------------------- */

/* Copy a token's weights and scales into the records that go to peers and to its own slots. By a
 * warp. `await_scales()` returns once the scales are there. */
template <Form FORM, typename Await>
__device__ __forceinline__ void send_metadata(const EpScatterArgs &a, int64_t token,
                                              Await await_scales) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x % 32, has_entry = lane < a.top_k;
    EpEntry e = {-1, 0, -1, 0, 0};
    MetadataEntry metadata = {-1, -1, 0, NULL};
    if (has_entry) e = a.plan.entries[token * a.top_k + lane];
    if (has_entry && a.t.carries_weights)
        metadata.weight =
            *((const float *)((const char *)a.t.topk_weights + token * a.source.weight_stride) +
              lane);
    if (e.owner >= a.owners) e.owner = -1; /* damaged; now, since both loads overlap */
    if (EP_MASKED && e.owner >= 0 && !ep_is_alive(e.owner)) e.owner = -1;
    if (FORM != MULTIPLIED && e.owner == g.rank)
        metadata.slot = ep_check_slot(a.plan, ep_flat_position(a.plan, g.rank, e.row, e.slot));
    if (e.owner == g.rank) metadata.expert = e.expert;
    if (e.owner >= 0 && e.owner != g.rank && e.leader)
        metadata.record = ep_ring(g, e.owner, g.rank, e.row);
    await_scales();
    spread_metadata<FORM>(a, metadata, a.t.scales + token * a.source.scale_stride);
}

template <Form FORM>
__device__ void send_all_metadata(const EpScatterArgs &a, Pipeline *p, int warp,
                                  PipelineWork work) {
    int count = work == WORK_CONVERT ? METADATA_WARPS : ALL_METADATA_WARPS;
    pipeline_metadata(p, warp, count, [&](int j, uint32_t n) {
        send_metadata<FORM>(a, p->index[j], [&] {
            if (work == WORK_CONVERT) pipeline_wait(p->barrier[ITEM_COMPUTED], n);
        });
    });
}

/* ---- quantising ---------------------------------------------------------------------------- */

/* Quantise a fragment of a row in place. The codes of unit u go where an earlier unit was, in this
 * round or an earlier one, so all threads read their units first. */
template <typename T, typename Format>
__device__ __forceinline__ void quantise_fragment(Format format, uint32_t stage, int bytes,
                                                  void *scales, int thread) {
    int units = bytes / (int)sizeof(EpUnit<T>);
    for (int base = 0; base < units; base += COMPUTE_THREADS) {
        int unit = base + thread, valid = unit < units;
        EpUnit<T> x = {};
        EpQuantScale scale;
        if (valid) x = ep_load_unit<T>(stage + unit * (uint32_t)sizeof(x));
        uint4 codes = ep_quantise_unit(format, x, valid, &scale);
        ep_barrier(1, COMPUTE_THREADS);
        if (!valid) continue;
        ep_store_shared_codes(format, stage, unit, codes);
        ep_store_scale_of(format, scales, unit, scale);
    }
}

/* Quantise the rows of all work items; a fragment is whole blocks. By the compute warps. */
template <typename T, int IS_NVFP4>
__device__ void quantise_rows(const EpScatterArgs &a, Pipeline *p, int thread) {
    int blocks = p->shape.stage_bytes / (int)sizeof(T) / a.t.format.block; /* of a fragment */
    const auto &format = ep_format_of<IS_NVFP4>(a.t.format, a.t.global_scale);
    int is_byte = IS_NVFP4 || a.t.format.scaling == EP_SCALE_EXPONENT;
    int scale_bytes = is_byte ? 1 : (int)sizeof(float);
    for (uint32_t n = 0;; n++) {
        int j = n % PIPELINE_ENTRIES;
        pipeline_wait(p->barrier[ITEM_LOADED], n);
        WorkItem item = p->item[j];
        if (item.loads == PIPELINE_END) return;
        char *scales = a.made_scales + p->index[j] * a.source.scale_stride;
        quantise_fragment<T>(format, p->first[j], item.bytes,
                             scales + p->fragment[j] * blocks * scale_bytes, thread);
        pipeline_computed(p, n);
    }
}

template <int IS_NVFP4>
__device__ __forceinline__ void quantise(const EpScatterArgs &a, Pipeline *p, int thread) {
    if (a.t.source_type == EP_TYPE_BF16)
        quantise_rows<__nv_bfloat16, IS_NVFP4>(a, p, thread);
    else if (a.t.source_type == EP_TYPE_FP16)
        quantise_rows<__half, IS_NVFP4>(a, p, thread);
    else
        quantise_rows<float, IS_NVFP4>(a, p, thread);
}

/* ==== receiving blocks ====================================================================== */

/* They copy or multiply rows of other ranks into their slots. */

/* Returns where a row lies that is copied or multiplied: in the ring, among this rank's tokens or,
 * for a zero-copy receive, in the slot where its sender has stored it. NULL: the plan is damaged
 * and names no token of this rank; nothing is loaded. */
__device__ __forceinline__ const char *find_row(const EpScatterArgs &a, int source, int row,
                                                int leader_slot) {
    const EpCudaGroup &g = a.group;
    if (source == g.rank) {
        int64_t token = a.plan.own_token[row];
        return (uint64_t)token < (uint64_t)ep_num_tokens(a.plan, g)
                   ? a.t.rows + token * a.source.row_stride
                   : NULL;
    }
    if (a.zero_copy) return a.t.out_rows + leader_slot * a.t.row_bytes;
    return ep_ring(g, g.rank, source, row);
}

/* Write a work item. By one lane. */
__device__ __forceinline__ void write_item(const EpScatterArgs &a, Pipeline *p, uint32_t n,
                                           int source, int row, int fragment, int loads, int loaded,
                                           int stores, int terms) {
    int j = n % PIPELINE_ENTRIES, cell = j * a.receive.width;
    p->item[j] = WorkItem{(int16_t)loads,
                          (int16_t)loaded,
                          (int16_t)stores,
                          (int16_t)terms,
                          fragment_bytes(a.receive, a.t.row_bytes, fragment),
                          0,
                          0,
                          0};
    p->signals[j] = source != a.group.rank && fragment == a.receive.fragments - 1;
    p->source[j] = source, p->index[j] = row, p->fragment[j] = fragment;
    p->peer[cell] = source, p->row[cell] = row;
}

/* Post the work items of a batch's rows, one for each fragment. Where rows are copied, one load
 * feeds a store to each slot except the one where the sender has stored the row. Where they are
 * multiplied, each slot has a stage of its own, which holds the slot's row of slot_rows if dot
 * products are taken. */
template <Form FORM>
__device__ __forceinline__ void post_rows(const EpScatterArgs &a, Pipeline *p, const Team &t,
                                          const RowBatch &r, float weight) {
    int valid = r.valid, slot = r.slot, slots, at = team_rank(t, slot >= 0, &slots);
    constexpr int multiplies = FORM == MULTIPLIED;
    int is_stored = !multiplies && a.zero_copy;
    int stores = is_stored && slots ? slots - 1 : slots;
    int loads = multiplies ? 1 + slots : stores > 0;
    int leader_slot =
        __shfl_sync(~0u, slot, max(0, __ffs(__ballot_sync(~0u, slot >= 0) & t.mask) - 1));
    const char *from = valid && loads ? find_row(a, r.source, r.row, leader_slot) : NULL;
    int loaded = (from != NULL) + (multiplies && a.t.takes_dots ? slots : 0);
    uint32_t number =
        pipeline_take(p, r.count * a.receive.fragments) + t.index * a.receive.fragments;
    for (int fragment = 0; fragment < a.receive.fragments; fragment++) {
        uint32_t n = number + fragment;
        int j = n % PIPELINE_ENTRIES, cell = j * a.receive.width, index = at - is_stored;
        int64_t offset = (int64_t)fragment * a.receive.stage_bytes;
        if (valid) pipeline_await_entry(p, n);
        if (valid && slot >= 0 && index >= 0)
            p->to[cell + index] = a.t.out_rows + slot * a.t.row_bytes + offset;
        if (valid && slot >= 0 && multiplies) {
            p->from[cell + 1 + at] =
                a.t.takes_dots ? a.t.slot_rows + slot * a.t.row_bytes + offset : NULL;
            p->slot[cell + at] = slot, p->weight[cell + at] = weight;
        }
        if (is_counted(FORM) && valid && slot >= 0) p->slot[cell + at] = slot;
        if (valid && t.k == 0) {
            p->from[cell] = from ? from + offset : NULL;
            write_item(a, p, n, r.source, r.row, fragment, loads, loaded, stores,
                       is_counted(FORM) ? slots : stores);
        }
        if (valid) ep_mbarrier_arrive(&p->barrier[ITEM_POSTED][j]);
    }
}

/* A scheduler warp of a receiving block that copies. Sending blocks store rows that stay here. */
template <Form FORM>
__device__ void schedule_copies(const EpScatterArgs &a, Pipeline *p, ChunkRows *rows,
                                const FirstClaim &first_claim, uint32_t epoch, int blocks) {
    const EpCudaGroup &g = a.group;
    Team t = make_team(a.top_k, a.receive);
    auto preload = [](const RowBatch &) { return (uint64_t)0; };
    auto await = [&](const RowBatch &r, uint64_t) {
        int waits = r.valid && t.k == 0;
        int alive = !waits || ep_await_record(g, epoch, r.source, r.row);
        return __all_sync(~0u, alive);
    };
    auto post = [&](const RowBatch &r, float weight) { post_rows<FORM>(a, p, t, r, weight); };
    walk_rows(a, rows, t, first_claim, RECEIVERS, blocks, 0, preload, await, post);
    pipeline_end(p, t);
}

/*
 * A scheduler warp of a receiving block that multiplies. Rows that stay here are multiplied while
 * those of other ranks are waited for, and after these. So blocks have work before the first row
 * arrives, which takes some 20 us.
 */
__device__ void schedule_products(const EpScatterArgs &a, Pipeline *p, ChunkRows *rows,
                                  const FirstClaim &first_claim, uint32_t epoch, int blocks) {
    Team t = make_team(a.top_k, a.receive);
    OwnWalk own = open_own(a, t, blocks);
    int alive = 1;
    auto post = [&](const RowBatch &r, float weight) { post_rows<MULTIPLIED>(a, p, t, r, weight); };
    auto preload = [](const RowBatch &) { return (uint64_t)0; };
    auto await = [&](const RowBatch &r, uint64_t) {
        int here = !r.valid || t.k != 0;
        do
            here = here || ep_has_record(a.group, epoch, r.source, r.row);
        while (!__all_sync(~0u, here) && post_own(a, t, &own, post));
        alive = __all_sync(~0u, here || ep_await_record(a.group, epoch, r.source, r.row));
        ep_fence_proxy_global();
        return alive;
    };
    walk_rows(a, rows, t, first_claim, RECEIVERS, blocks, 0, preload, await, post);
    while (alive && post_own(a, t, &own, post)) {
    }
    pipeline_end(p, t);
}

template <Form FORM>
__device__ __forceinline__ void schedule_rows(const EpScatterArgs &a, Pipeline *p, ChunkRows *rows,
                                              const FirstClaim &first_claim, uint32_t epoch,
                                              int blocks) {
    if (FORM == MULTIPLIED)
        schedule_products(a, p, rows, first_claim, epoch, blocks);
    else
        schedule_copies<FORM>(a, p, rows, first_claim, epoch, blocks);
}

/* ---- weights and scales -------------------------------------------------------------------- */

/* Copy a record's weights and scales to its row's slots. By a warp. */
template <Form FORM>
__device__ __forceinline__ void receive_metadata(const EpScatterArgs &a, int source, int row) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x % 32;
    const char *record = ep_ring(g, g.rank, source, row);
    MetadataEntry metadata = {-1, -1, 0, NULL};
    if (lane < a.top_k && a.t.carries_weights)
        metadata.weight = __ldcg((const float *)(record + a.record.weights) + lane);
    if (lane < a.top_k) metadata.slot = ep_slot(a.plan, g, a.top_k, source, row, lane);
    if (lane < a.top_k && a.shape.has_rows)
        metadata.expert = ep_flat_expert(a.plan, g, a.top_k, source, row, lane);
    spread_metadata<FORM>(a, metadata, record + a.record.scales);
}

template <Form FORM>
__device__ void receive_all_metadata(const EpScatterArgs &a, Pipeline *p, int warp) {
    pipeline_metadata(p, warp, ALL_METADATA_WARPS, [&](int j, uint32_t) {
        receive_metadata<FORM>(a, p->source[j], p->index[j]);
    });
}

/* ---- multiplying --------------------------------------------------------------------------- */

/* Rows that are multiplied have no metadata, so a metadata warp multiplies, too. Where fragments
 * are small, each half of the warps takes every other pair of a row's slots. */
#define MULTIPLY_WARPS 16
#define FIRST_MULTIPLY_WARP (FIRST_COMPUTE_WARP + COMPUTE_WARPS - MULTIPLY_WARPS)
#define SLOTS_AT_ONCE 2
static_assert(FIRST_MULTIPLY_WARP >= FIRST_METADATA_WARP, "other warps have work");

/* The warps that multiply by a slot, among those that do so at the same time. */
typedef struct MultiplyGroup {
    int index, count; /* of this group; of all groups */
    int warps, thread;
} MultiplyGroup;

__device__ __forceinline__ MultiplyGroup make_group(const Stages &s, int thread) {
    int count = s.bytes <= MULTIPLY_WARPS / 2 * 32 * 16 ? 2 : 1, warps = MULTIPLY_WARPS / count;
    return MultiplyGroup{thread / (warps * 32), count, warps, thread % (warps * 32)};
}

/** Dot products of a row's slots, by warp of its group, over all fragments of the row. There are
 * two sets, so that one can be read while the next row's is written. */
typedef struct Dots {
    float partial[2][EP_MAX_TOP_K][MULTIPLY_WARPS];
} Dots;

/* Multiply a row in shared memory by the weights of N slots from slot `base` on. Each product,
 * rounded, replaces its slot's stage; with dot products, these are summed over the row and what the
 * stage held. Each thread sums the products of its vectors in order, each warp those of its
 * threads, finish_dots those of the warps: always in the same order. By a group. */
template <typename T, int N>
__device__ __forceinline__ void multiply_few(const EpScatterArgs &a, const Stages &s,
                                             const WorkItem &item, uint32_t first,
                                             const float *weight, int base, const MultiplyGroup &g,
                                             float (*partial)[MULTIPLY_WARPS], int accumulates) {
    float dot[N] = {0};
    for (int at = g.thread * 16; at < item.bytes; at += g.warps * 32 * 16) {
        uint4 x = ep_load_shared(first + at), y[N];
        EpVector<T> row = ep_unpack<T>(x);
#pragma unroll
        for (int i = 0; i < N; i++)
            y[i] = a.t.takes_dots ? ep_load_shared(stage_of(s, first, 1 + base + i) + at) : x;
#pragma unroll
        for (int i = 0; i < N; i++) {
            EpVector<T> other = ep_unpack<T>(y[i]), product;
#pragma unroll
            for (int e = 0; e < EpVector<T>::SIZE; e++) {
                if (a.t.takes_dots) dot[i] = fmaf(row.at[e], other.at[e], dot[i]);
                product.at[e] = weight[base + i] * row.at[e];
            }
            ep_store_shared(stage_of(s, first, 1 + base + i) + at,
                            a.t.weighs ? ep_pack(product) : x);
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        for (int d = 16; d > 0; d /= 2)
            dot[i] += __shfl_xor_sync(~0u, dot[i], d);
        float *sum = &partial[base + i][g.thread / 32];
        if (g.thread % 32 == 0) *sum = accumulates ? *sum + dot[i] : dot[i];
    }
}

/* Add up the warps' sums behind the last fragment of a row, a thread for each slot. */
__device__ __forceinline__ void finish_dots(const EpScatterArgs &a, const Pipeline *p, uint32_t n,
                                            const float (*partial)[MULTIPLY_WARPS], int warps,
                                            int slots, int thread) {
    ep_barrier(1, MULTIPLY_WARPS * 32);
    if (thread >= slots) return;
    float dot = 0;
    for (int w = 0; w < warps; w++)
        dot += partial[thread][w];
    a.t.out_weights[p->slot[n % PIPELINE_ENTRIES * p->shape.width + thread]] = dot;
}

template <typename T>
__device__ void multiply_rows(const EpScatterArgs &a, Pipeline *p, Dots *dots, int thread) {
    int fragments = p->shape.fragments;
    Stages s = pipeline_stages(p);
    MultiplyGroup g = make_group(s, thread);
    for (uint32_t n = 0, row = 0;; n++) {
        pipeline_wait(p->barrier[ITEM_LOADED], n);
        WorkItem item = p->item[n % PIPELINE_ENTRIES];
        if (item.loads == PIPELINE_END) return;
        uint32_t first = p->first[n % PIPELINE_ENTRIES];
        const float *weight = &p->weight[n % PIPELINE_ENTRIES * p->shape.width];
        int fragment = p->fragment[n % PIPELINE_ENTRIES], base = g.index * SLOTS_AT_ONCE;
        float(*partial)[MULTIPLY_WARPS] = dots->partial[row % 2];
        for (; base + SLOTS_AT_ONCE <= item.terms; base += g.count * SLOTS_AT_ONCE)
            multiply_few<T, SLOTS_AT_ONCE>(a, s, item, first, weight, base, g, partial, fragment);
        if (base < item.terms)
            multiply_few<T, 1>(a, s, item, first, weight, base, g, partial, fragment);
        if (a.t.takes_dots && fragment == fragments - 1)
            finish_dots(a, p, n, partial, g.warps, item.terms, thread);
        row += fragment == fragments - 1;
        pipeline_computed(p, n);
    }
}

__device__ __forceinline__ void multiply(const EpScatterArgs &a, Pipeline *p, Dots *dots,
                                         int thread) {
    if (a.multiplied == EP_TYPE_BF16)
        multiply_rows<__nv_bfloat16>(a, p, dots, thread);
    else if (a.multiplied == EP_TYPE_FP16)
        multiply_rows<__half>(a, p, dots, thread);
    else
        multiply_rows<float>(a, p, dots, thread);
}

/* ==== padding =============================================================================== */

/* A thread among those that write zeros. */
typedef struct ZeroThreads {
    int index, count;
} ZeroThreads;

/* Nobody reads the zeros soon, so they leave the cache first (__stcs); several stores at once would
 * delay the rows. */
template <typename Word> __device__ void zero_words(char *out, int64_t bytes, ZeroThreads z) {
    int64_t words = bytes / (int64_t)sizeof(Word);
#pragma unroll 1
    for (int64_t at = z.index; at < words; at += z.count)
        __stcs((Word *)out + at, Word{});
}

__device__ void zero_bytes(char *out, int64_t bytes, ZeroThreads z) {
    if (((uintptr_t)out | (uintptr_t)bytes) % sizeof(uint32_t) == 0)
        zero_words<uint32_t>(out, bytes, z);
    else
        zero_words<uint8_t>(out, bytes, z);
}

/* Zero the swizzled scales of slots. */
__device__ void zero_tiles(const EpScatterArgs &a, int64_t begin, int64_t end, ZeroThreads z) {
    const EpScaleMap &map = a.t.scale_map;
    int64_t words = (map.count + EP_TILE_SCALES - 1) / EP_TILE_SCALES;
    for (int64_t i = z.index; i < (end - begin) * words; i += z.count) {
        int64_t at = ep_swizzled_at(&map, begin + i / words) + i % words * EP_TILE_BYTES;
        *(uint32_t *)(a.t.out_scales + at) = 0;
    }
}

/* Zero the scales of slots of one slab; by column, these are a range in each column. */
template <Form FORM>
__device__ void zero_scales(const EpScatterArgs &a, int64_t begin, int64_t end, ZeroThreads z) {
    const EpScaleMap &map = a.t.scale_map;
    if (is_tiled(FORM) && map.swizzled) return zero_tiles(a, begin, end, z);
    char *out = a.t.out_scales + scale_at<FORM>(map, begin);
    int64_t step = ep_scale_step(&map), rows = end - begin;
    if (!map.by_column) zero_bytes(out, rows * a.t.scale_bytes, z);
    for (int64_t i = 0; map.by_column && i < map.count; i++)
        zero_bytes(out + i * step, rows * map.element_bytes, z);
}

__device__ void set_no_experts(const EpScatterArgs &a, int64_t begin, int64_t end, ZeroThreads z) {
    for (int64_t i = begin * a.top_k + z.index; a.t.out_idx && i < end * a.top_k; i += z.count) {
        if (a.t.idx_type == EP_TYPE_INT64)
            ((int64_t *)a.t.out_idx)[i] = -1;
        else
            ((int32_t *)a.t.out_idx)[i] = -1;
    }
}

/* ROWS: they are slots of rows that do not come. */
template <Form FORM, int ROWS = 0>
__device__ void zero_slots(const EpScatterArgs &a, int64_t begin, int64_t end, ZeroThreads z) {
    begin = max(begin, (int64_t)0), end = min(end, a.t.out_capacity);
    if (begin >= end) return;
    set_no_experts(a, begin, end, z);
    /* Such layouts have no padding but the tail. */
    if (a.shape.tail == EP_TAIL_IDS && !ROWS) return;
    zero_words<uint4>(a.t.out_rows + begin * a.t.row_bytes, (end - begin) * a.t.row_bytes, z);
    int64_t values = a.shape.has_rows && a.t.carries_weights ? a.top_k : 1;
    if (a.t.out_weights)
        zero_bytes((char *)(a.t.out_weights + begin * values), (end - begin) * values * 4, z);
    if (a.t.scale_bytes) zero_scales<FORM>(a, begin, end, z);
}

/* Zero a receiving block's part of all slabs' padding. Where slabs are few, each is divided, so
 * that every block has a part, or two of half the size. */
template <Form FORM>
__device__ void zero_slabs(const EpScatterArgs &a, const Role &role, ZeroThreads z) {
    const EpPlanShape &s = a.shape;
    int parts = max(1, 2 * role.count / max(s.num_local, 1));
    for (int i = role.index; i < s.num_local * parts; i += role.count) {
        int e = i / parts;
        int64_t begin = ep_padding_begin(&s, a.plan.expert_offsets, a.plan.expert_counts,
                                         a.plan.expert_padded, e);
        int64_t end = ep_padding_end(&s, a.plan.expert_offsets, a.plan.expert_padded, e);
        int64_t rows = (max(end - begin, (int64_t)0) + parts - 1) / parts;
        begin += i % parts * rows;
        zero_slots<FORM>(a, begin, min(begin + rows, end), z);
    }
}

/* Zero a receiving block's part of the rows behind those of each source. The plan knows where each
 * source's rows would begin if they followed one another. */
template <Form FORM>
__device__ void zero_source_tails(const EpScatterArgs &a, const Role &role, ZeroThreads z) {
    int end = a.plan.header->rows_received + a.plan.header->rows_kept, all = a.plan.use.block_rows;
#pragma unroll 1
    for (int r = a.shape.num_ranks - 1; r >= 0; r--) {
        int begin = a.plan.flat_begin[r], rows = min(max(end - begin, 0), all);
        int part = (all - rows + role.count - 1) / role.count, first = rows + role.index * part;
        zero_slots<FORM>(a, (int64_t)r * all + first, (int64_t)r * all + min(first + part, all), z);
        end = begin;
    }
}

/* Zero a receiving block's part of all padding. */
template <Form FORM>
__device__ void zero_padding(const EpScatterArgs &a, const Role &role, ZeroThreads z) {
    const EpPlanShape &s = a.shape;
    if (!s.has_rows) zero_slabs<FORM>(a, role, z);
    if (ep_has_source_blocks(&s) && s.tail != EP_TAIL_KEEP) zero_source_tails<FORM>(a, role, z);
    int64_t tail = a.plan.header->recv_rows, rows = a.t.out_capacity - tail;
    if (s.is_fixed || s.tail == EP_TAIL_KEEP || rows <= 0) return;
    rows = (rows + role.count - 1) / role.count;
    int64_t begin = tail + role.index * rows;
    zero_slots<FORM>(a, begin, min(begin + rows, a.t.out_capacity), z);
}

/* ==== counting ============================================================================== */

/* For the words of blocks: what holds a token, and what does not. */

/* Counts the rows of finished items: those that have ended, with their last fragment. A lane has
 * one of a row's slots, whichever items they are of: an addition takes a microsecond, and a fence
 * of its own. So signals go first. By a signal warp; see pipeline_signal. */
struct CountRows {
    const EpScatterArgs &a;
    const Pipeline *p;
    int block; /* of the lane's slot, -1: none */

    __device__ __forceinline__ void note(uint32_t n, uint32_t items) {
        int lane = threadIdx.x % 32, j = (n + lane) % PIPELINE_ENTRIES, slots = 0;
        if (lane < (int)items && p->fragment[j] == p->shape.fragments - 1) slots = p->item[j].terms;
        int through = ep_warp_prefix(slots), all = __shfl_sync(~0u, through, 31);
        block = -1;
#pragma unroll 1
        for (int i = lane; __any_sync(~0u, i < all); i += 32) {
            finish(); /* those before, where they are more than lanes */
            int item = 0;
#pragma unroll
            for (int step = 16; step; step /= 2)
                if (__shfl_sync(~0u, through, item + step - 1) <= i) item += step;
            int before = __shfl_sync(~0u, through - slots, item);
            int cell = (n + item) % PIPELINE_ENTRIES * p->shape.width + i - before;
            block = i < all ? ep_row_block(&a.t.ready, p->slot[cell]) : -1;
        }
    }

    __device__ __forceinline__ void finish() {
        if (!__any_sync(~0u, block >= 0)) return;
        ep_fence_proxy_global();
        if (block >= 0) ep_add_to_block(a.t.ready, a.blocks.counter, block, 1, 1, 1, 0);
        block = -1;
    }
};

#define REST_BARRIER 2

/* Zero rows `zero_begin` to before `zero_end` of rows `begin` to before `end`, none of which holds
 * a token, and count them all. By all threads of `z`. */
template <Form FORM>
__device__ void finish_rest(const EpScatterArgs &a, int64_t begin, int64_t end, int64_t zero_begin,
                            int64_t zero_end, ZeroThreads z) {
    if (begin >= end) return;
    zero_slots<FORM>(a, max(begin, zero_begin), min(end, zero_end), z);
    ep_barrier(REST_BARRIER, z.count);
    ep_add_rest(a.t.ready, a.blocks.counter, begin, end, 1, 0, z.index, z.count);
}

/* Divide rows that hold no token among the receiving blocks. */
template <Form FORM>
__device__ void finish_part(const EpScatterArgs &a, const Role &role, int64_t begin, int64_t end,
                            int64_t zero_begin, int64_t zero_end, ZeroThreads z) {
    int64_t part = (max(end - begin, (int64_t)0) + role.count - 1) / role.count;
    begin += role.index * part;
    finish_rest<FORM>(a, begin, min(begin + part, end), zero_begin, zero_end, z);
}

/* Zero a receiving block's part of all padding, as zero_padding does, and count all rows that hold
 * no token. */
template <Form FORM>
__device__ void finish_padding(const EpScatterArgs &a, const Role &role, ZeroThreads z) {
    const EpPlanShape &s = a.shape;
    const int32_t *offsets = a.plan.expert_offsets, *padded = a.plan.expert_padded;
    int64_t rows = (int64_t)a.t.ready.sections * a.t.ready.section_rows;
    int64_t zeroed = s.tail == EP_TAIL_KEEP ? 0 : a.t.out_capacity;
    int parts = max(1, 2 * role.count / max(s.num_local, 1)); /* see zero_slabs */
#pragma unroll 1
    for (int i = role.index; i < s.num_local * parts && !s.has_rows; i += role.count) {
        int e = i / parts;
        int64_t begin = offsets[e] + (int64_t)a.plan.expert_counts[e];
        int64_t end = offsets[s.is_fixed ? e + 1 : e] + (int64_t)(s.is_fixed ? 0 : padded[e]);
        int64_t part = (max(end - begin, (int64_t)0) + parts - 1) / parts;
        begin += i % parts * part;
        finish_rest<FORM>(a, begin, min(begin + part, end),
                          ep_padding_begin(&s, offsets, a.plan.expert_counts, padded, e),
                          ep_padding_end(&s, offsets, padded, e), z);
    }
    int end = a.plan.header->rows_received + a.plan.header->rows_kept, all = a.plan.use.block_rows;
#pragma unroll 1
    for (int r = s.num_ranks - 1; r >= 0 && ep_has_source_blocks(&s); r--) {
        int begin = a.plan.flat_begin[r];
        int64_t first = (int64_t)r * all, filled = first + min(max(end - begin, 0), all);
        finish_part<FORM>(a, role, filled, first + all, 0, zeroed, z);
        end = begin;
    }
    if (!s.is_fixed) finish_part<FORM>(a, role, a.plan.header->recv_rows, rows, 0, zeroed, z);
}

/* Leave counters for the next operation as this one has found them. By all threads of the last
 * block. */
__device__ void clear_counters(const EpScatterArgs &a) {
    int words = a.t.ready.sections * a.t.ready.per_section;
    for (int i = threadIdx.x; i < words; i += (int)blockDim.x)
        a.blocks.counter[i] = 0;
}

/* ==== masked ranks ========================================================================== */

/* Zero a receiving block's part of the slots of masked ranks' rows, which a plan made before still
 * has. Where rows are counted, count them as rows without a token. */
template <Form FORM>
__device__ void zero_masked_rows(const EpScatterArgs &a, const Role &role, ZeroThreads z) {
    const EpCudaGroup &g = a.group;
    int64_t stride = g.layout.max_tokens + 1;
    int slots = a.shape.has_rows ? 1 : a.top_k; /* of a row, at most */
#pragma unroll 1
    for (int r = 0; r < g.size; r++) {
        if (ep_is_alive(r)) continue;
        int tokens = ep_check_count(g, a.plan.tokens[r]);
        int rows = ep_check_count(g, a.plan.begins[r * stride + tokens]);
#pragma unroll 1
        for (int i = role.index; i < rows * slots; i += role.count) {
            int slot = ep_slot(a.plan, g, a.top_k, r, i / slots, i % slots);
            if (slot < 0) continue;
            zero_slots<FORM, 1>(a, slot, slot + 1, z);
            if (is_counted(FORM)) finish_rest<FORM>(a, slot, slot + 1, 0, 0, z);
        }
    }
}

/* ==== kernel ================================================================================ */

#define SCATTER_THREADS (FIRST_COMPUTE_WARP * 32 + COMPUTE_THREADS)

typedef struct Shared {
    Pipeline pipeline;
    union {
        ReceiveRows receivers[SCHEDULER_WARPS];
        struct {
            ChunkRows rows[SCHEDULER_WARPS];
            Dots dots;
        };
    };
} Shared;
static_assert(sizeof(Shared) <= EP_SCATTER_STATIC_BYTES, "the pipeline has the rest");

template <Form FORM>
__device__ void send(const EpScatterArgs &a, Shared *s, const FirstClaim &first_claim,
                     uint32_t epoch, int blocks) {
    Pipeline *p = &s->pipeline;
    PipelineWork work = FORM != MULTIPLIED && a.t.format.bits ? WORK_CONVERT : WORK_COPY;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (pipeline_is_scheduler(warp, a.schedulers))
        schedule_tokens<FORM>(a, p, &s->receivers[warp - SCHEDULER_WARP], first_claim, epoch,
                              blocks);
    else if (warp == LOAD_WARP)
        pipeline_load(p,
                      WORK_COPY); /* for either work: all stages are held until they are stored */
    else if (pipeline_is_storing(warp, lane))
        pipeline_store(p, warp - FIRST_STORE_WARP, work, 1, 0, 0);
    else if (warp == SIGNAL_WARP && is_counted(FORM))
        pipeline_signal(p, a.group, epoch, HEADS, CountRows{a, p, -1});
    else if (warp == SIGNAL_WARP)
        pipeline_signal(p, a.group, epoch, HEADS);
    else if (warp >= FIRST_COMPUTE_WARP && is_tiled(FORM) && a.t.global_scale)
        quantise<1>(a, p, threadIdx.x - FIRST_COMPUTE_WARP * 32);
    else if (warp >= FIRST_COMPUTE_WARP && work == WORK_CONVERT)
        quantise<0>(a, p, threadIdx.x - FIRST_COMPUTE_WARP * 32);
    else if (warp >= FIRST_METADATA_WARP && warp < FIRST_METADATA_WARP + ALL_METADATA_WARPS &&
             has_metadata(a))
        send_all_metadata<FORM>(a, p, warp - FIRST_METADATA_WARP, work);
}

/* Whether metadata warps work in receiving blocks. Rows that are multiplied have no metadata:
 * compute warps write their dot products. */
template <Form FORM>
__device__ __forceinline__ int has_metadata_to_receive(const EpScatterArgs &a) {
    return FORM != MULTIPLIED && has_metadata(a);
}

/* Add to the caller's counters. By a signal warp, before its first item: until all ranks are here
 * there is none. */
__device__ __forceinline__ void count(const EpScatterArgs &a, const Role &role, uint32_t epoch) {
    if (a.plan.use.fills_rest)
        ep_count_experts(a.stats, a.plan.expert_counts, a.shape.num_local,
                         role.index * 32 + (int)threadIdx.x % 32, role.count * 32);
    if (role.index) return;
    ep_count_rows(a.group, a.stats, a.plan.rows_to);
    ep_measure_arrivals(a.group, a.stats, epoch);
}

template <Form FORM>
__device__ void receive(const EpScatterArgs &a, Shared *s, const FirstClaim &first_claim,
                        uint32_t epoch, const Role &role) {
    Pipeline *p = &s->pipeline;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr PipelineWork work = FORM == MULTIPLIED ? WORK_COMPUTE : WORK_COPY;
    int moves_metadata = has_metadata_to_receive<FORM>(a);
    int first_free =
        (moves_metadata ? FIRST_METADATA_WARP + ALL_METADATA_WARPS : FIRST_COMPUTE_WARP) * 32;
    ZeroThreads zero_threads = {(int)threadIdx.x - first_free, SCATTER_THREADS - first_free};
    /* Warps that multiply do this first, while the first rows are still on their way. */
    if (zero_threads.index >= 0 && a.plan.use.fills_rest && is_counted(FORM))
        finish_padding<FORM>(a, role, zero_threads);
    else if (zero_threads.index >= 0 && a.plan.use.fills_rest)
        zero_padding<FORM>(a, role, zero_threads);
    if (EP_MASKED && zero_threads.index >= 0) zero_masked_rows<FORM>(a, role, zero_threads);
    if (pipeline_is_scheduler(warp, a.schedulers))
        schedule_rows<FORM>(a, p, &s->rows[warp - SCHEDULER_WARP], first_claim, epoch, role.count);
    else if (warp == LOAD_WARP)
        pipeline_load(p, work);
    else if (pipeline_is_storing(warp, lane))
        pipeline_store(p, warp - FIRST_STORE_WARP, work, is_counted(FORM), 0, 0);
    else if (warp == SIGNAL_WARP && is_counted(FORM))
        count(a, role, epoch), pipeline_signal(p, a.group, epoch, CREDITS, CountRows{a, p, -1});
    else if (warp == SIGNAL_WARP)
        count(a, role, epoch), pipeline_signal(p, a.group, epoch, CREDITS);
    else if (warp >= FIRST_METADATA_WARP && warp < FIRST_METADATA_WARP + ALL_METADATA_WARPS &&
             moves_metadata)
        receive_all_metadata<FORM>(a, p, warp - FIRST_METADATA_WARP);
    else if (FORM == MULTIPLIED && warp >= FIRST_MULTIPLY_WARP)
        multiply(a, p, &s->dots, threadIdx.x - FIRST_MULTIPLY_WARP * 32);
}

/* Claim the first chunk of what this block moves. By a scheduler warp. */
__device__ __forceinline__ FirstClaim claim_first(const EpScatterArgs &a, const Role &role,
                                                  Shared *s, int warp) {
    return role.receives ? claim_first_rows(a, &s->rows[warp - SCHEDULER_WARP], RECEIVERS)
                         : claim_first_tokens(a, SENDERS);
}

/* A kernel of its own reads records of other nodes: its code would cost the others half a
 * microsecond. */
template <Form FORM, int READS_RECORDS>
__global__ void __launch_bounds__(SCATTER_THREADS, 1)
    scatter_kernel(const __grid_constant__ EpScatterArgs a) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared s;
    Shared *shared = ep_keep_shared(&s);
    uint32_t epoch;
    EpLoadedHeader header = ep_load_header(a.group, a.plan);
    Role role = pipeline_role(a.receivers);
    FirstClaim first_claim = {0, 0};
    int warp = (int)threadIdx.x / 32;
    if (warp == SCHEDULER_WARP) first_claim = claim_first(a, role, shared, warp);
    pipeline_open(&shared->pipeline, role.receives ? a.receive : a.send, memory,
                  FORM == MULTIPLIED && role.receives ? MULTIPLY_WARPS : COMPUTE_WARPS,
                  role.receives ? has_metadata_to_receive<FORM>(a) : has_metadata(a), a.schedulers,
                  a.top_k);
    if (READS_RECORDS) ep_compare_stamps(a.marks, &header);
    int has_global = !is_tiled(FORM) || ep_has_global(a.t.global_scale);
    if (!ep_begin_operation(a.group, a.plan, header, &epoch) || !has_global) {
        if (READS_RECORDS) ep_report_stamps(a.group, a.marks);
        if (is_tiled(FORM)) ep_report_global(a.group, a.t.global_scale);
        ep_report_plan(a.group, a.plan);
        ep_end_operation(a.group, epoch, 0);
        return;
    }
    if (READS_RECORDS) ep_take_messages(a.marks);
    ep_arrive(a.group, epoch, a.where, a.zero_copy ? (uint32_t)a.plan.use.num_slots : 0);
    if (warp > SCHEDULER_WARP && pipeline_is_scheduler(warp, a.schedulers))
        first_claim = claim_first(a, role, shared, warp);
    if (role.receives)
        receive<FORM>(a, shared, first_claim, epoch, role);
    else
        send<FORM>(a, shared, first_claim, epoch, role.count);
    int is_last = ep_end_operation(a.group, epoch, 0) != EP_NOT_LAST;
    if (is_counted(FORM) && is_last && a.blocks.clears) clear_counters(a);
}

/* Groups with masks are on one node. */
#define READS_RECORDS_TOO (!EP_MASKED)

template <Form FORM> static int open(int shared_bytes) {
    int error = ep_open_kernel(scatter_kernel<FORM, 0>, shared_bytes);
    return error ? error : ep_open_kernel(scatter_kernel<FORM, READS_RECORDS_TOO>, shared_bytes);
}

extern "C" int EP_VARIANT(ep_cuda_open_scatter)(int shared_bytes) {
    int error = open<COPIED>(shared_bytes);
    if (!error) error = open<MULTIPLIED>(shared_bytes);
    if (!error) error = open<TILED>(shared_bytes);
    if (!error) error = open<COUNTED>(shared_bytes);
    return error ? error : open<TILED_COUNTED>(shared_bytes);
}

template <Form FORM> static int launch(const EpScatterArgs &a, int blocks, void *stream) {
    size_t send = pipeline_bytes(a.send), receive = pipeline_bytes(a.receive);
    auto kernel = a.marks.watch ? scatter_kernel<FORM, READS_RECORDS_TOO> : scatter_kernel<FORM, 0>;
    return ep_launch(kernel, blocks, SCATTER_THREADS, send > receive ? send : receive, stream, a);
}

extern "C" int EP_VARIANT(ep_cuda_launch_scatter)(const void *args, int blocks, void *stream) {
    const EpScatterArgs *a = (const EpScatterArgs *)args;
    int tiled = ep_scatter_is_tiled(&a->t), counts = a->t.ready.words != NULL;
    if (a->multiplied) return launch<MULTIPLIED>(*a, blocks, stream);
    if (tiled && counts) return launch<TILED_COUNTED>(*a, blocks, stream);
    if (tiled) return launch<TILED>(*a, blocks, stream);
    return counts ? launch<COUNTED>(*a, blocks, stream) : launch<COPIED>(*a, blocks, stream);
}

EP_VARIANT_END
