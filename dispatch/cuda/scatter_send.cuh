/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_CUDA_SCATTER_SEND_CUH
#define EP_DISPATCH_CUDA_SCATTER_SEND_CUH

/**
 * A sending block: sends each token of this rank once to every rank that needs it, quantised on the
 * way if the caller asks for it (quantise.cuh).
 */

#include "dispatch/cuda/scatter_metadata.cuh"
#include "runtime/cuda/quantise.cuh"

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

/* Note where a rank's rows go. `part` is its part of window `guessed`, loaded before its arrival
 * was here; `rows` as in ep_await_rows. Returns 0 if that window has not been adopted here or,
 * where it is paired, is not the one that this rank receives in. */
__device__ __forceinline__ int note_receiver(const EpScatterArgs &a, ReceiveRows *receivers,
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
                note_receiver(a, receivers, epoch, r, where, rows, guessed, part);
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
    if (FORM == COPIED && e.owner == g.rank && e.slot >= 0)
        *to = a.t.out_rows + e.slot * a.t.row_bytes;
    if (e.owner < 0 || e.owner == g.rank || !e.leader) return 1;
    *peer = e.owner;
    if (!ep_await_room(g, epoch, e.owner, e.row, ep_look_for_room(g, e.owner, e.row))) return 0;
    char *rows = receivers->rows[e.owner];
    if (!rows)
        *to = ep_ring(g, e.owner, g.rank, e.row);
    else if (e.slot >= 0 && e.slot < receivers->count[e.owner])
        *to = rows + e.slot * a.t.row_bytes;
    return 1;
}

/* Post the work items of a team's token, one for each piece of its row. `number` is the first. */
__device__ __forceinline__ void post_token(const EpScatterArgs &a, Pipeline *p, const Team &t,
                                           uint32_t number, int token, int valid, char *to, int row,
                                           int peer) {
    int stores, signals, at = team_rank(t, to != NULL, &stores);
    int signal = team_rank(t, peer >= 0, &signals), is_last = team_is_last(t, valid);
    for (int piece = 0; piece < a.send.pieces; piece++) {
        uint32_t n = number + piece;
        int j = n % PIPELINE_ENTRIES, cell = j * a.send.width;
        int64_t offset = (int64_t)piece * a.send.stage_bytes;
        if (valid) pipeline_await_entry(p, n);
        if (valid && to) p->to[cell + at] = to + (offset >> a.send.shrink);
        if (valid && peer >= 0) p->peer[cell + signal] = peer, p->row[cell + signal] = row;
        if (valid && t.k == 0) {
            p->from[cell] = a.t.rows + token * a.source.row_stride + offset;
            p->item[j] = WorkItem{
                1, 1, (int16_t)stores, 0, piece_bytes(a.send, a.t.source_row_bytes, piece), 0,
                0, 0};
            p->signals[j] = pipeline_signals(signals, piece, a.send.pieces, is_last);
            p->index[j] = token, p->piece[j] = piece;
        }
        if (valid) ep_mbarrier_arrive(&p->barrier[ITEM_POSTED][j]);
    }
}

/* A scheduler warp of a sending block. */
template <Form FORM>
__device__ void schedule_tokens(const EpScatterArgs &a, Pipeline *p, ReceiveRows *receivers,
                                const Start &start, uint32_t epoch, int blocks) {
    Team t = make_team(a.top_k, a.send);
    if (FORM == MULTIPLIED && a.group.size == 1) return pipeline_end(p, t);
    auto ready = [&] { return await_receivers(a, receivers, epoch); };
    auto post = [&](const EpEntry &e, int token, int valid, int count) {
        char *to;
        int peer;
        if (!__all_sync(~0u, choose_target<FORM>(a, receivers, epoch, e, &to, &peer))) return 0;
        uint32_t number = pipeline_take(p, count * a.send.pieces) + t.index * a.send.pieces;
        post_token(a, p, t, number, token, valid, to, e.row, peer);
        return 1;
    };
    walk_tokens(a, t, start, SENDERS, blocks, ready, post);
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
    if (FORM == COPIED && e.owner == g.rank) metadata.slot = ep_check_slot(a.plan, e.slot);
    if (e.owner == g.rank) metadata.expert = e.expert;
    if (e.owner >= 0 && e.owner != g.rank && e.leader)
        metadata.record = ep_ring(g, e.owner, g.rank, e.row);
    await_scales();
    spread_metadata(a, metadata, a.t.scales + token * a.source.scale_stride);
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

/* Quantise a piece of a row in place. The codes of unit u go where an earlier unit was, in this
 * round or an earlier one, so all threads read their units first. */
template <typename T>
__device__ __forceinline__ void quantise_piece(EpQuantFormat format, uint32_t stage, int bytes,
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

/* Quantise the rows of all work items; a piece is whole blocks. By the compute warps. */
template <typename T>
__device__ void quantise_rows(const EpScatterArgs &a, Pipeline *p, int thread) {
    int blocks = p->shape.stage_bytes / (int)sizeof(T) / a.t.format.block; /* of a piece */
    int scale_bytes = ep_quant_scale_type(a.t.format) == EP_TYPE_FP32 ? (int)sizeof(float) : 1;
    for (uint32_t n = 0;; n++) {
        int j = n % PIPELINE_ENTRIES;
        pipeline_wait(p->barrier[ITEM_LOADED], n);
        WorkItem item = p->item[j];
        if (item.loads == PIPELINE_END) return;
        char *scales = a.made_scales + p->index[j] * a.source.scale_stride;
        quantise_piece<T>(a.t.format, p->first[j], item.bytes,
                          scales + p->piece[j] * blocks * scale_bytes, thread);
        pipeline_computed(p, n);
    }
}

__device__ __forceinline__ void quantise(const EpScatterArgs &a, Pipeline *p, int thread) {
    if (a.t.source_type == EP_TYPE_BF16)
        quantise_rows<__nv_bfloat16>(a, p, thread);
    else if (a.t.source_type == EP_TYPE_FP16)
        quantise_rows<__half>(a, p, thread);
    else
        quantise_rows<float>(a, p, thread);
}

#endif
