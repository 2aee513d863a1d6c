/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gather over NVLink: slots to token rows, for ep_combine and ep_dispatch_backward.
 *
 * One launch of sending and receiving blocks (pipeline_role). For every row that another rank has
 * sent, a sending block adds up the row's slots, and pushes the sum, rounded to the rows' type or
 * packed, through the ring back to that rank. A receiving block takes this
 * rank's tokens: it waits for the sums of all ranks that a token went to, adds them in ascending
 * rank, this rank's own slots unrounded in their turn, then the token's biases, and writes the
 * token's row.
 * runtime/cuda/pipeline.cuh describes the warps of a block; runtime/cuda/device.h how blocks divide
 * the work, why there is no circular wait, and the memory order of records, heads and credits.
 *
 * Rows may still be produced while this runs (EpExtras.done): scheduler warps then wait for a word
 * of the rows' block before they post what loads them. Tokens stay in their order.
 *
 * Who waits on whom: a receiving block waits for the heads of a token's rows; a sending block waits
 * for all ranks' arrivals and for credits, that is, until the other rank's receiving block has
 * emptied a record of the ring. Either waits for done blocks, whose producer waits for no rank.
 */
#include "combine/cuda/gather.h"

#include "runtime/cuda/plan.cuh"
#include "runtime/cuda/rows.cuh"
#include "runtime/cuda/scheduler.cuh"

EP_VARIANT_BEGIN

/* ==== sums ================================================================================== */

/* The compute warps' sums of rows, and the values that travel beside them, in blocks of both
 * kinds. */

/* Which sums a kernel can add up. Each form is a kernel of its own, since code that does not run is
 * not free: the compiler then orders the rest worse, and blocks wait longer for instructions. */
enum Form {
    ONE_NODE,
    NODES,  /* of this node for another one; and with the sums of other nodes */
    PACKED, /* either, with sums that travel packed */
    PACKED_BIASED,
    ENTRIES, /* sums by entry, on one node */
    ENTRIES_NODES
};

__device__ constexpr int is_packed_form(Form form) {
    return form == PACKED || form == PACKED_BIASED;
}

__device__ constexpr int is_entries_form(Form form) {
    return form == ENTRIES || form == ENTRIES_NODES;
}

__device__ constexpr int has_nodes(Form form) {
    return form != ONE_NODE && form != ENTRIES;
}

/* Load VECTORS vectors of a stage; each has an element for each compute thread. */
template <int VECTORS>
__device__ __forceinline__ void load_vectors(uint4 x[VECTORS], uint32_t stage, int at) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        x[v] = ep_load_shared(stage + at + v * COMPUTE_THREADS * 16);
}

/* The progress of sum_vectors: the next term's stage, weight and vectors. */
template <int VECTORS> struct NextTerm {
    uint32_t stage;
    float weight;
    uint4 x[VECTORS];
};

/* Add the terms from `begin` to before `end`. Each is loaded while the one before is added. */
template <typename T, int VECTORS>
__device__ __forceinline__ void add_terms(EpVector<T> sum[VECTORS], NextTerm<VECTORS> *next,
                                          int begin, int end, const Stages &s, const WorkItem &item,
                                          uint32_t weights, int at) {
    int i = begin;
    if (begin >= end) return;
#pragma unroll 1
    do {
        EpVector<T> term[VECTORS];
        float weight = next->weight;
        for (int v = 0; v < VECTORS; v++)
            term[v] = ep_unpack<T>(next->x[v]);
        if (++i < item.loaded) {
            next->stage = stage_of(s, next->stage, 1);
            next->weight = ep_load_shared_float(weights + i * (int)sizeof(float));
            load_vectors<VECTORS>(next->x, next->stage, at);
        }
        for (int v = 0; v < VECTORS; v++)
            ep_add_weighted(&sum[v], weight, term[v]);
    } while (i < end);
}

/* Compute VECTORS vectors of a sum, in place of its last term. The terms of the run are weighted
 * and summed on their own, rounded if `rounds`, then added to the total; every other term has
 * weight 1, and so have the biases behind the terms. */
template <typename T, int VECTORS>
__device__ __forceinline__ void sum_vectors(const Stages &s, const WorkItem &item, uint32_t first,
                                            uint32_t weights, int rounds, int at) {
    EpVector<T> total[VECTORS] = {};
    NextTerm<VECTORS> next = {first, ep_load_shared_float(weights), {}};
    load_vectors<VECTORS>(next.x, first, at);
    add_terms<T, VECTORS>(total, &next, 0, item.run, s, item, weights, at);
    if (item.run < item.run_end) {
        EpVector<T> run[VECTORS] = {};
        add_terms<T, VECTORS>(run, &next, item.run, item.run_end, s, item, weights, at);
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
            ep_add(&total[v], rounds ? ep_unpack<T>(ep_pack(run[v])) : run[v]);
    }
    add_terms<T, VECTORS>(total, &next, item.run_end, item.loaded, s, item, weights, at);
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        ep_store_shared(next.stage + at + v * COMPUTE_THREADS * 16, ep_pack(total[v]));
}

#define VECTORS_AT_ONCE 2

/* Sum the terms of all work items; see sum_vectors. By the compute warps. */
template <typename T> __device__ void sum_rows(Pipeline *p, int rounds, int thread) {
    constexpr int STEP = COMPUTE_THREADS * 16, STEPS = VECTORS_AT_ONCE * STEP;
    Stages s = pipeline_stages(p);
    uint32_t weights = ep_smem(p->weight.begin()), width = (uint32_t)p->shape.width;
    for (uint32_t n = 0;; n++) {
        pipeline_wait(p->barrier[ITEM_LOADED], n);
        WorkItem item = p->item[n % PIPELINE_ENTRIES];
        if (item.loads == PIPELINE_END) return;
        uint32_t first = p->first[n % PIPELINE_ENTRIES];
        uint32_t weight = weights + n % PIPELINE_ENTRIES * width * (uint32_t)sizeof(float);
        int at = thread * 16;
#pragma unroll 1
        for (; at + STEPS - STEP < item.bytes; at += STEPS)
            sum_vectors<T, VECTORS_AT_ONCE>(s, item, first, weight, rounds, at);
#pragma unroll 1
        for (; at < item.bytes; at += STEP)
            sum_vectors<T, 1>(s, item, first, weight, rounds, at);
        pipeline_computed(p, n);
    }
}

__device__ __forceinline__ void sum(const EpGatherArgs &a, Pipeline *p, int rounds, int thread) {
    if (a.t.type == EP_TYPE_BF16)
        sum_rows<__nv_bfloat16>(p, rounds, thread);
    else if (a.t.type == EP_TYPE_FP16)
        sum_rows<__half>(p, rounds, thread);
    else
        sum_rows<float>(p, rounds, thread);
}

/* ---- posting ------------------------------------------------------------------------------- */

/* What a lane adds to its team's work item. */
typedef struct Term {
    const char *from; /* a term, NULL: none */
    int at;           /* position of the term */
    float weight;
    int peer, row;    /* rank to signal, and the record to signal it about; peer -1: none */
    int run, run_end; /* of the item's terms, as in WorkItem; the same in all lanes of the team */
    int slot;         /* receiving blocks: of this rank that `from` is, -1: none */
} Term;

/* Returns the 16-byte units of a packed fragment. */
__device__ __forceinline__ int16_t packed_units(const EpGatherArgs &a, int32_t bytes) {
    return (int16_t)(ep_packed_bytes(bytes >> (a.t.type == EP_TYPE_FP32 ? 2 : 1)) / 16);
}

/* Post the work items of a team's sum, one for each fragment. The sum goes `to`; `index` is its
 * token, which has `biases`, or its row of `source`. PACKED: sums of other ranks and nodes, and for
 * them, are packed. */
template <Form FORM>
__device__ __forceinline__ void post_sum(const EpGatherArgs &a, Pipeline *p, const Team &t,
                                         uint32_t number, const Term &term, char *to, int index,
                                         int source, int biases, int valid) {
    int terms, signals, fragments = a.pipeline.fragments;
    team_rank(t, term.from != NULL, &terms);
    int signal = team_rank(t, term.peer >= 0, &signals), is_last = team_is_last(t, valid);
    int is_packed = is_packed_form(FORM) && (term.at < term.run || term.at >= term.run_end);
    int packs = is_packed_form(FORM) && (source != a.group.rank || a.rounds);
    for (int fragment = 0; fragment < fragments; fragment++) {
        uint32_t n = number + fragment;
        int j = n % PIPELINE_ENTRIES, cell = j * a.pipeline.width;
        int64_t offset = (int64_t)fragment * a.pipeline.stage_bytes;
        int64_t packed_offset = (int64_t)fragment * a.packed_stride;
        int32_t bytes = fragment_bytes(a.pipeline, a.t.row_bytes, fragment);
        if (valid) pipeline_await_entry(p, n);
        if (valid && term.from)
            p->from[cell + term.at] = term.from + (is_packed ? packed_offset : offset),
                           p->weight[cell + term.at] = term.weight;
        if (valid && term.peer >= 0)
            p->peer[cell + signal] = term.peer, p->row[cell + signal] = term.row;
        if (valid && t.k == 0) {
            if (!terms) p->from[cell] = NULL; /* an empty sum needs a stage, too */
#pragma unroll 1
            for (int i = 0; i < biases; i++)
                p->from[cell + terms + i] = a.t.bias[i] + index * a.t.row_bytes + offset,
                                       p->weight[cell + terms + i] = 1;
            p->to[cell] = to + (packs ? packed_offset : offset);
            p->item[j] = WorkItem{(int16_t)max(1, terms + biases),
                                  (int16_t)(terms + biases),
                                  1,
                                  (int16_t)terms,
                                  bytes,
                                  (int8_t)term.run,
                                  (int8_t)term.run_end,
                                  is_packed_form(FORM) ? packed_units(a, bytes) : (int16_t)0};
            p->signals[j] = pipeline_signals(signals, fragment, fragments, is_last);
            p->fragment[j] = fragment, p->index[j] = index, p->source[j] = source;
        }
        if (valid) ep_mbarrier_arrive(&p->barrier[ITEM_POSTED][j]);
    }
}

/* Post the work items of a token's entries, which are moved as they are: entry k's row to its place
 * in the record `to`. */
__device__ __forceinline__ void post_entries(const EpGatherArgs &a, Pipeline *p, const Team &t,
                                             uint32_t number, const Term &term, char *to, int index,
                                             int source, int valid) {
    int terms, signals, fragments = a.pipeline.fragments;
    team_rank(t, term.from != NULL, &terms);
    int signal = team_rank(t, term.peer >= 0, &signals), is_last = team_is_last(t, valid);
    for (int fragment = 0; fragment < fragments; fragment++) {
        uint32_t n = number + fragment;
        int j = n % PIPELINE_ENTRIES, cell = j * a.pipeline.width;
        int64_t offset = (int64_t)fragment * a.pipeline.stage_bytes;
        if (valid) pipeline_await_entry(p, n);
        if (valid && term.from)
            p->from[cell + term.at] = term.from + offset,
                           p->to[cell + term.at] = to + t.k * a.t.row_bytes + offset;
        if (valid && term.peer >= 0)
            p->peer[cell + signal] = term.peer, p->row[cell + signal] = term.row;
        if (valid && t.k == 0) {
            if (!terms) p->from[cell] = NULL; /* an item without rows needs a stage, too */
            int32_t bytes = fragment_bytes(a.pipeline, a.t.row_bytes, fragment);
            p->item[j] = WorkItem{(int16_t)max(1, terms),
                                  (int16_t)terms,
                                  (int16_t)terms,
                                  (int16_t)terms,
                                  bytes,
                                  0,
                                  0,
                                  0};
            p->signals[j] = pipeline_signals(signals, fragment, fragments, is_last);
            p->fragment[j] = fragment, p->index[j] = index, p->source[j] = source;
        }
        if (valid) ep_mbarrier_arrive(&p->barrier[ITEM_POSTED][j]);
    }
}

/* Returns whether the caller counts rows. With sums by entry each entry is one, which the plan does
 * not count. */
__device__ __forceinline__ int counts_rows(const EpGatherArgs &a) {
    return a.stats.peer_rows || a.stats.peer_bytes;
}

/* ---- values -------------------------------------------------------------------------------- */

/* Returns the value for entry k of a row with slots here; 0 if the entry's slot is elsewhere or
 * lost. */
__device__ __forceinline__ float value_of(const EpGatherArgs &a, int source, int row, int k) {
    int has_rows = a.shape.has_rows;
    int64_t slot = ep_slot(a.plan, a.group, a.top_k, source, row, has_rows ? 0 : k);
    if (!has_rows) return slot >= 0 ? a.t.slot_values[slot] : 0;
    int expert = ep_flat_expert(a.plan, a.group, a.top_k, source, row, k);
    return expert >= 0 && slot >= 0 ? a.t.slot_values[slot * a.top_k + k] : 0;
}

/* ==== quantised sums ======================================================================== */

/*
 * The compute warps where partial sums travel as e4m3 with scales (gather.h): sending
 * blocks pack their sums; receiving blocks unpack those of other ranks and nodes and add them. What
 * they sum for another node they pack once more.
 *
 * Bytes, of a row of n bf16: a sender loads 2n for each slot and stores 1.03n instead of 2n, which
 * the wire and both memories then carry. A receiver loads 1.03n for each other rank and stores 2n.
 *
 * Rows are packed and unpacked in the stages that they are in, so an item holds no more stages than
 * one that is not packed. A sum takes the place of its last term, as elsewhere. Threads
 * read and write at different places there, so all of them read a round's units before any of them
 * stores. That also keeps the units of later rounds:
 *
 *   - Packing: `r` rounds have stored no more bytes than they have read, since a packed unit is
 *     shorter.
 *   - Unpacking: packed terms lie at the ends of their stages. What is still to be read there is
 *     shorter than what is still to be stored, so it begins behind what has been stored.
 *
 * Eight lanes have the units of a block, so they find its scale among themselves.
 */

/* A unit of a sum: 16 floats, in vectors of the rows' type. */
template <typename T> struct SumUnit { EpVector<T> part[EpUnit<T>::PARTS]; };

/* Add the item's own terms, the run, to a unit. */
template <typename T>
__device__ __forceinline__ void add_slots(SumUnit<T> *sum, const Stages &s, const WorkItem &item,
                                          uint32_t first, uint32_t weights, int unit) {
#pragma unroll 1
    for (int i = item.run; i < item.run_end; i++) {
        float weight = ep_load_shared_float(weights + i * (int)sizeof(float));
        uint32_t stage = stage_of(s, first, i);
        EpUnit<T> x = ep_load_unit<T>(stage + unit * (uint32_t)sizeof(x));
#pragma unroll
        for (int p = 0; p < EpUnit<T>::PARTS; p++)
            ep_add_weighted(&sum->part[p], weight, ep_unpack<T>(x.part[p]));
    }
}

/* Add a unit of packed terms `begin` to before `end`: each element is scale * code, rounded, and
 * then added. */
template <typename T>
__device__ __forceinline__ void add_packed(SumUnit<T> *sum, const Stages &s, const WorkItem &item,
                                           uint32_t first, int begin, int end, int unit) {
#pragma unroll 1
    for (int i = begin; i < end; i++) {
        uint32_t from = stage_of(s, first, i) + pipeline_packed_offset(item);
        uint4 codes = ep_load_shared(from + ep_packed_codes(unit));
        float scale = ep_load_shared_float(from + ep_packed_scale(unit));
#pragma unroll
        for (int p = 0; p < EpUnit<T>::PARTS; p++)
            ep_add(&sum->part[p], ep_dequantise<T>(codes, p, scale));
    }
}

/* Add a unit of the biases, which lie behind the terms. */
template <typename T>
__device__ __forceinline__ void add_biases(SumUnit<T> *sum, const Stages &s, const WorkItem &item,
                                           uint32_t first, int unit) {
#pragma unroll 1
    for (int i = item.terms; i < item.loaded; i++) {
        EpUnit<T> x = ep_load_unit<T>(stage_of(s, first, i) + unit * (uint32_t)sizeof(x));
#pragma unroll
        for (int p = 0; p < EpUnit<T>::PARTS; p++)
            ep_add(&sum->part[p], ep_unpack<T>(x.part[p]));
    }
}

/* Replace a unit by what its receiver makes of it. By a warp. */
template <typename T> __device__ __forceinline__ void requantise(SumUnit<T> *sum, int valid) {
    EpQuantScale scale;
    uint4 codes = ep_quantise_unit(ep_quant_format(EP_SUM_QUANT), ep_unit_of_floats<T>(sum->part),
                                   valid, &scale);
#pragma unroll
    for (int p = 0; p < EpUnit<T>::PARTS; p++)
        sum->part[p] = ep_dequantise<T>(codes, p, __uint_as_float(scale.stored));
}

/* Where an item's terms and its sum lie, in shared memory. */
typedef struct PackedItem {
    WorkItem item;
    uint32_t first, weights, to;
} PackedItem;

/* Returns a unit of an item's sum: the packed sums of lower ranks, this rank's own slots, the
 * packed sums of higher ranks, and biases. `rounds`: its own sum is requantised. By a warp. */
template <typename T, Form FORM>
__device__ __forceinline__ SumUnit<T> sum_unit(const Stages &s, const PackedItem &x, int rounds,
                                               int unit, int valid) {
    const WorkItem &item = x.item;
    SumUnit<T> total = {}, own = {};
    if (valid) add_packed(&total, s, item, x.first, 0, item.run, unit);
    if (valid) add_slots(&own, s, item, x.first, x.weights, unit);
    if (rounds) requantise(&own, valid);
#pragma unroll
    for (int p = 0; p < EpUnit<T>::PARTS; p++)
        ep_add(&total.part[p], own.part[p]);
    if (valid) add_packed(&total, s, item, x.first, item.run_end, item.terms, unit);
    if (FORM == PACKED_BIASED && valid) add_biases(&total, s, item, x.first, unit);
    return total;
}

/* Store a unit of a sum, packed or in the rows' type, when all threads have read their terms. By
 * the compute warps. */
template <typename T>
__device__ __forceinline__ void store_unit(const SumUnit<T> &sum, uint32_t to, int packs, int unit,
                                           int valid) {
    EpQuantScale scale;
    uint4 codes;
    if (packs)
        codes = ep_quantise_unit(ep_quant_format(EP_SUM_QUANT), ep_unit_of_floats<T>(sum.part),
                                 valid, &scale);
    ep_barrier(1, COMPUTE_THREADS);
    if (valid && packs) {
        ep_store_shared(to + ep_packed_codes(unit), codes);
        if (unit % 8 == 0) *ep_shared<uint32_t>(to + ep_packed_scale(unit)) = scale.stored;
    }
#pragma unroll
    for (int i = 0; valid && !packs && i < EpUnit<T>::PARTS; i++)
        ep_store_shared(to + unit * (uint32_t)sizeof(EpUnit<T>) + i * 16, ep_pack(sum.part[i]));
}

/* Sum the terms of all work items. By the compute warps. */
template <typename T, Form FORM>
__device__ void sum_packed_rows(Pipeline *p, int rounds, int packs, int thread) {
    Stages s = pipeline_stages(p);
    uint32_t weights = ep_smem(p->weight.begin()), width = (uint32_t)p->shape.width;
    for (uint32_t n = 0;; n++) {
        int j = n % PIPELINE_ENTRIES;
        pipeline_wait(p->barrier[ITEM_LOADED], n);
        WorkItem item = p->item[j];
        if (item.loads == PIPELINE_END) return;
        PackedItem x = {item, p->first[j], weights + j * width * (uint32_t)sizeof(float),
                        stage_of(s, p->first[j], item.loads - 1)};
        int units = item.bytes / (int)sizeof(EpUnit<T>);
#pragma unroll 1
        for (int base = 0; base < units; base += COMPUTE_THREADS) {
            int unit = base + thread, valid = unit < units;
            SumUnit<T> sum = sum_unit<T, FORM>(s, x, rounds, unit, valid);
            store_unit(sum, x.to, packs, unit, valid);
        }
        pipeline_computed(p, n);
    }
}

/* `rounds`: this rank's own sums are requantised; `packs`: sums are packed. */
template <Form FORM>
__device__ __forceinline__ void sum_packed(const EpGatherArgs &a, Pipeline *p, int rounds,
                                           int packs, int thread) {
    if (a.t.type == EP_TYPE_BF16)
        sum_packed_rows<__nv_bfloat16, FORM>(p, rounds, packs, thread);
    else if (a.t.type == EP_TYPE_FP16)
        sum_packed_rows<__half, FORM>(p, rounds, packs, thread);
    else
        sum_packed_rows<float, FORM>(p, rounds, packs, thread);
}

/* ==== sending blocks ======================================================================== */

/*
 * For each row of another rank, the sum of its slots, sent back to that rank. A receiving block
 * adds up the slots of own rows in place.
 *
 * Nothing may be stored on other ranks before all of them have entered the operation. But the first
 * sums are made meanwhile: a gate holds up the warps that store.
 */

/* ---- the gate ------------------------------------------------------------------------------ */

/** Opens once all ranks are here, or once it is known that they will not be: then nothing may be
 *  stored. */
typedef struct Gate {
    uint64_t is_open; /* mbarrier */
    int32_t is_void;
} Gate;

/** What a sending block has besides its pipeline. */
typedef struct Sending {
    ChunkRows rows[SCHEDULER_WARPS];
    Gate gate;
} Sending;

/** Initialise the gate, which can be used after the block's next barrier. By one thread. */
__device__ __forceinline__ void init_gate(Gate *gate) {
    ep_mbarrier_init(&gate->is_open, 1);
    ep_fence_mbarrier_init();
}

/* Wait for all ranks, and open the gate. Returns 0 if the wait has failed. By the signal warp,
 * which has nothing to do yet. */
__device__ __forceinline__ int open_gate(const EpGatherArgs &a, Gate *gate, uint32_t epoch) {
    int alive = ep_await_arrivals(a.group, epoch);
    if (threadIdx.x % 32 == 0) gate->is_void = !alive, ep_mbarrier_arrive(&gate->is_open);
    return alive;
}

/* Wait until the gate is open. Returns whether nothing may be stored. */
__device__ __forceinline__ int await_gate(Gate *gate) {
    while (!ep_mbarrier_try_wait(&gate->is_open, 0)) {
    }
    return gate->is_void;
}

/* ---- warps --------------------------------------------------------------------------------- */

/* Post the work items of a batch of rows, a row for each team. */
template <Form FORM>
__device__ __forceinline__ void post_batch(const EpGatherArgs &a, Pipeline *p, const Team &t,
                                           const RowBatch &r, float weight) {
    int terms, at = team_rank(t, r.slot >= 0, &terms);
    Term term = {NULL, at, weight, -1, r.row, 0, terms, r.slot};
    if (r.slot >= 0) term.from = a.t.rows + r.slot * a.t.row_bytes;
    if (r.valid && t.k == 0) term.peer = r.source;
    char *to = r.valid ? ep_ring(a.group, r.source, a.group.rank, r.row) : NULL;
    int fragments = a.pipeline.fragments;
    uint32_t number = pipeline_take(p, r.count * fragments) + t.index * fragments;
    if constexpr (!is_entries_form(FORM))
        return post_sum<FORM>(a, p, t, number, term, to, r.row, r.source, 0, r.valid);
    if (counts_rows(a) && term.peer >= 0)
        ep_count_row(a.stats, ep_member(a.group, r.source), terms);
    post_entries(a, p, t, number, term, to, r.row, r.source, r.valid);
}

/* A scheduler warp. DONE: it waits for blocks of rows. */
template <Form FORM, int DONE>
__device__ void schedule_rows(const EpGatherArgs &a, Pipeline *p, ChunkRows *rows,
                              const FirstClaim &first_claim, uint32_t epoch, int blocks) {
    Team t = make_team(a.top_k, a.pipeline);
    auto preload = [&](const RowBatch &r) {
        return r.valid && t.k == 0 ? ep_load_credit(a.group, r.source, r.row) : 0;
    };
    auto await = [&](const RowBatch &r, uint64_t word) {
        int waits = r.valid && t.k == 0;
        int alive = !waits || ep_await_room(a.group, epoch, r.source, r.row, word);
        if (DONE && alive && r.slot >= 0) alive = ep_await_done(a.group, a.t.done, r.slot);
        if (DONE) ep_fence_proxy_global();
        return __all_sync(~0u, alive);
    };
    auto post = [&](const RowBatch &r, float weight) { post_batch<FORM>(a, p, t, r, weight); };
    walk_rows(a, rows, t, first_claim, SENDERS, blocks, 1, preload, await, post);
    pipeline_end(p, t);
}

/* The metadata warps: copy the values of a row's slots into the record of its sum. */
__device__ void send_values(const EpGatherArgs &a, Pipeline *p, Gate *gate, int warp) {
    const EpCudaGroup &g = a.group;
    int k = threadIdx.x % 32, sends = !await_gate(gate) && k < a.top_k;
    pipeline_metadata(p, warp, METADATA_WARPS, [&](int j, uint32_t) {
        int source = p->source[j], row = p->index[j];
        char *record = ep_ring(g, source, g.rank, row);
        if (sends) ((float *)(record + a.record.weights))[k] = value_of(a, source, row, k);
    });
}

template <Form FORM, int DONE>
__device__ void send(const EpGatherArgs &a, Pipeline *p, Sending *s, const FirstClaim &first_claim,
                     uint32_t epoch, int blocks) {
    constexpr PipelineWork work = is_packed_form(FORM)    ? WORK_PACKED
                                  : is_entries_form(FORM) ? WORK_MOVE
                                                          : WORK_COMPUTE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (pipeline_is_scheduler(warp, a.schedulers))
        schedule_rows<FORM, DONE>(a, p, &s->rows[warp - SCHEDULER_WARP], first_claim, epoch,
                                  blocks);
    else if (warp == LOAD_WARP)
        pipeline_load(p, work);
    else if (pipeline_is_storing(warp, lane))
        pipeline_store(p, warp - FIRST_STORE_WARP, work, 1, is_packed_form(FORM),
                       await_gate(&s->gate));
    else if (warp == SIGNAL_WARP)
        pipeline_signal(p, a.group, epoch, open_gate(a, &s->gate, epoch) ? LATE_HEADS : NO_SIGNALS);
    else if (warp >= FIRST_METADATA_WARP && a.t.carries_values)
        send_values(a, p, &s->gate, warp - FIRST_METADATA_WARP);
}

/* ==== receiving blocks ====================================================================== */

/* For each token of this rank, the total of the sums of all ranks that it went to. */

/* ---- terms --------------------------------------------------------------------------------- */

/* Returns the place of a rank, or of another node, in the order of summation. */
template <Form FORM> __device__ __forceinline__ int place_of(const EpGatherArgs &a, int owner) {
    return has_nodes(FORM) && a.nodes.order && owner >= 0 ? a.nodes.order[owner] : owner;
}

/* Returns the position of a lane's term in its team's sum: by place, and within this rank by k.
 * Counts the lanes before it bit by bit of the places, from the highest bit down: as long as the
 * bits are equal, a lane with 0 where this one has 1 comes first. On one rank there is no bit to
 * compare. */
__device__ __forceinline__ int order_term(const Team &t, int is_term, int place) {
    int highest = __reduce_max_sync(~0u, is_term ? place : 0);
    unsigned equal = __ballot_sync(~0u, is_term) & t.mask, before = 0;
    for (int bit = 31 - __clz(highest); bit >= 0; bit--) {
        unsigned ones = __ballot_sync(~0u, place >> bit & 1);
        if (place >> bit & 1) before |= equal & ~ones;
        equal &= place >> bit & 1 ? ones : ~ones;
    }
    return __popc(before | (equal & ((1u << threadIdx.x % 32) - 1)));
}

/* Returns the record of another node's sum; `owner` is beyond the ranks. */
__device__ __forceinline__ const char *node_sum(const EpGatherArgs &a, int owner, int row) {
    int64_t at = (int64_t)(owner - a.group.size) * a.nodes.message_slots + row;
    return a.nodes.records + at * a.record.bytes;
}

/* Whether an entry's sum comes from elsewhere. A damaged slot in a node's records is none. */
template <Form FORM>
__device__ __forceinline__ int is_elsewhere(const EpGatherArgs &a, const EpEntry &e) {
    if (e.owner < 0 || e.owner == a.group.rank) return 0;
    return !has_nodes(FORM) || e.owner < a.group.size || (uint32_t)e.row < (uint32_t)a.nodes.rows;
}

/* Returns a lane's term of its token's sum: the sum of another rank or node, or one of this rank's
 * own slots, which are added up on their own first. Its weight is 1. */
template <Form FORM>
__device__ __forceinline__ Term make_term(const EpGatherArgs &a, const Team &t, const EpEntry &e) {
    const EpCudaGroup &g = a.group;
    int is_own = e.owner == g.rank && e.slot >= 0, place = place_of<FORM>(a, e.owner);
    int is_sum = is_elsewhere<FORM>(a, e) && e.leader, own, before;
    team_rank(t, is_own, &own);
    team_rank(t, is_sum && place < place_of<FORM>(a, g.rank), &before);
    Term term = {NULL,
                 order_term(t, is_own || is_sum, place),
                 1,
                 -1,
                 e.row,
                 before,
                 before + own,
                 is_own ? e.slot : -1};
    if (FORM != ONE_NODE && is_sum && e.owner >= g.size)
        term.from = node_sum(a, e.owner, e.row);
    else if (is_sum)
        term.from = ep_ring(g, g.rank, e.owner, e.row), term.peer = e.owner;
    if (is_own) term.from = a.t.rows + e.slot * a.t.row_bytes;
    return term;
}

/* Returns a lane's term of sums by entry: its own entry's row, from wherever it is, in ascending k.
 * The leader of the entries on another rank waits for them. */
template <Form FORM>
__device__ __forceinline__ Term make_entry(const EpGatherArgs &a, const Team &t, const EpEntry &e) {
    const EpCudaGroup &g = a.group;
    int is_own = e.owner == g.rank && e.slot >= 0, is_other = is_elsewhere<FORM>(a, e), terms;
    Term term = {NULL, 0, 1, -1, e.row, 0, 0, is_own ? e.slot : -1};
    if (is_own) term.from = a.t.rows + e.slot * a.t.row_bytes;
    if (has_nodes(FORM) && is_other && e.owner >= g.size) {
        const char *record = node_sum(a, e.owner, e.row);
        uint32_t mask = __ldcg((const uint32_t *)(record + a.record.scales));
        if (mask >> t.k & 1) term.from = record + t.k * a.t.row_bytes;
    } else if (is_other) {
        if (e.slot >= 0) term.from = ep_ring(g, g.rank, e.owner, e.row) + t.k * a.t.row_bytes;
        if (e.leader) term.peer = e.owner;
    }
    term.at = team_rank(t, term.from != NULL, &terms);
    term.run_end = terms;
    return term;
}

/* ---- the scheduler warps ------------------------------------------------------------------- */

/* A token that a team holds until all its sums are here; -1: none. */
typedef struct HeldToken {
    int token;
    Term term;              /* of this lane */
    const float *weight_at; /* sums by entry: where its weight is once its row is here, or NULL */
} HeldToken;

/* Give a lane its entry's weight, or the place where it will be. */
__device__ __forceinline__ void find_weight(const EpGatherArgs &a, const Team &t, const EpEntry &e,
                                            HeldToken *held) {
    if (!held->term.from) return;
    if (a.t.weighs_entries)
        held->term.weight = a.t.topk_weights[(int64_t)held->token * a.top_k + t.k];
    else if (a.carries_weights && e.owner == a.group.rank)
        held->term.weight = a.t.slot_values[e.slot];
    else if (a.carries_weights)
        held->weight_at =
            (const float *)(held->term.from - t.k * a.t.row_bytes + a.record.weights) + t.k;
}

/* Count a lane's entry: one that stays here, or is passed on to the rank that has its token. */
__device__ __forceinline__ void count_entry(const EpGatherArgs &a, const EpEntry &e,
                                            const HeldToken &held) {
    if (!held.term.from || !counts_rows(a)) return;
    if (e.owner == a.group.rank) ep_count_row(a.stats, ep_member(a.group, a.group.rank), 1);
    if (!a.rounds) return;
    int source = held.token / max(1, a.shape.nodes.message);
    if (source < a.num_sources) ep_count_row(a.stats, a.sources[source], 1);
}

/* Give the next chunk's tokens to teams that hold none: `free` are the first lanes of such teams. A
 * weight is only begun to load. */
template <Form FORM>
__device__ __forceinline__ void hold_chunk(const EpGatherArgs &a, const Team &t, TokenWalk *walk,
                                           unsigned free, HeldToken *held) {
    int i = __popc(free & ((1u << t.index * t.width) - 1)), token = walk->first + i;
    EpEntry e = check_entry(a, shuffle_entry(walk->entry, (i * t.width + t.k) % 32));
    Term term;
    if constexpr (is_entries_form(FORM))
        term = make_entry<FORM>(a, t, e);
    else
        term = make_term<FORM>(a, t, e);
    if (held->token < 0 && t.index < t.count && i < walk->size && token < walk->tokens) {
        *held = HeldToken{token, term, NULL};
        if constexpr (is_entries_form(FORM))
            find_weight(a, t, e, held), count_entry(a, e, *held);
        else if (a.t.weighs && e.owner == a.group.rank && e.slot >= 0)
            held->term.weight = a.t.slot_weights[e.slot];
    }
    next_tokens(a, t, walk);
}

/*
 * A scheduler warp: claim tokens, and post those whose sums are here, a token for each team. Rows
 * come in another order than they were sent in. So the teams hold two chunks or more, if these have
 * room, and who is here first is posted first. Otherwise a chunk is posted as a whole: a pass
 * through this loop takes a microsecond, whatever it posts. Looking is not waiting: no token that
 * is held keeps another one from being posted.
 */
template <Form FORM, int DONE>
__device__ void schedule_tokens(const EpGatherArgs &a, Pipeline *p, const FirstClaim &first_claim,
                                uint32_t epoch, int blocks) {
    const EpCudaGroup &g = a.group;
    Team t = make_team(a.top_k, a.pipeline);
    TokenWalk walk = open_tokens(a, t, first_claim, RECEIVERS, blocks);
    int leads = t.k == 0 && t.index < t.count;
    int is_whole = t.count < 2 * walk.size;
    HeldToken held = {-1, {NULL, 0, 1, -1, 0, 0, 0, -1}, NULL};
    EpTimeout timeout = {0, 0};
    for (;;) {
        unsigned free = __ballot_sync(~0u, leads && held.token < 0);
        if (walk.first < walk.tokens && __popc(free) >= walk.size) {
            hold_chunk<FORM>(a, t, &walk, free, &held);
            continue;
        }
        if (__popc(free) == t.count) break;
        int alive = 1, here = 1;
        if (held.token >= 0 && held.term.peer >= 0)
            here = ep_poll_record(g, epoch, held.term.peer, held.term.row, &timeout, &alive);
        if (DONE && held.token >= 0 && held.term.slot >= 0)
            here = ep_poll_done(g, a.t.done, held.term.slot, &timeout, &alive);
        if (!__all_sync(~0u, alive)) break;
        unsigned missing = __ballot_sync(~0u, !here);
        int ready = held.token >= 0 && !(missing & t.mask);
        unsigned posted = __ballot_sync(~0u, leads && ready);
        if (!posted || (is_whole && missing)) continue;
        ep_fence_proxy_global();
        int before = __popc(posted & ((1u << t.index * t.width) - 1)),
            fragments = a.pipeline.fragments;
        uint32_t number = pipeline_take(p, __popc(posted) * fragments) + before * fragments;
        char *to = a.t.out_rows + (int64_t)held.token * a.target.row_stride;
        if constexpr (is_entries_form(FORM)) {
            __syncwarp(); /* the leader has seen that the rows and their weights are here */
            if (ready && held.weight_at) held.term.weight = __ldcg(held.weight_at);
        }
        if (FORM == ENTRIES_NODES && a.rounds)
            post_entries(a, p, t, number, held.term, to, held.token, g.rank, ready);
        else
            post_sum<FORM>(a, p, t, number, held.term, to, held.token, g.rank,
                           FORM == PACKED ? 0 : a.t.num_biases, ready);
        if (ready) held.token = -1;
        timeout = EpTimeout{0, 0};
    }
    pipeline_end(p, t);
}

/* ---- the metadata warps -------------------------------------------------------------------- */

/* Returns the value of an entry whose slot is here. The entry names the slot, unless it shares a
 * flat row: the row's chain of slots would take up to K loads, one after another. */
__device__ __forceinline__ float own_value(const EpGatherArgs &a, const EpEntry &e, int k) {
    if (a.shape.has_rows) return value_of(a, a.group.rank, e.row, k);
    int slot = ep_check_slot(a.plan, e.slot);
    return slot >= 0 ? a.t.slot_values[slot] : 0;
}

/* Returns the value of an entry: from its slot here, or from the record of its owner's sum. */
__device__ __forceinline__ float returned_value(const EpGatherArgs &a, const EpEntry &e, int k) {
    const EpCudaGroup &g = a.group;
    if (e.owner < 0 || e.owner >= a.owners) return 0;
    if (EP_MASKED && !ep_is_alive(e.owner)) return 0;
    if (e.owner == g.rank) return own_value(a, e, k);
    if (!is_elsewhere<NODES>(a, e)) return 0;
    const char *record =
        e.owner < g.size ? ep_ring(g, g.rank, e.owner, e.row) : node_sum(a, e.owner, e.row);
    return __ldcg((const float *)(record + a.record.weights) + k);
}

/* The metadata warps of a receiving block: write the values of a token's entries. */
__device__ void receive_values(const EpGatherArgs &a, Pipeline *p, int warp) {
    int k = threadIdx.x % 32;
    pipeline_metadata(p, warp, METADATA_WARPS, [&](int j, uint32_t) {
        int64_t token = p->index[j];
        float *out = (float *)((char *)a.t.out_values + token * a.target.value_stride);
        if (k < a.top_k) out[k] = returned_value(a, a.plan.entries[token * a.top_k + k], k);
    });
}

/* The metadata warps of a receiving block that passes entries on: their values or weights, and
 * which of them have rows. */
__device__ void pass_values(const EpGatherArgs &a, Pipeline *p, int warp) {
    int k = threadIdx.x % 32;
    pipeline_metadata(p, warp, METADATA_WARPS, [&](int j, uint32_t) {
        int64_t token = p->index[j];
        char *record = a.t.out_rows + token * a.target.row_stride;
        EpEntry e = {-1, 0, -1, 0, 0};
        if (k < a.top_k) e = a.plan.entries[token * a.top_k + k];
        float value = a.t.carries_values ? returned_value(a, e, k) : 0;
        if (a.t.carries_values && k < a.top_k) ((float *)(record + a.record.weights))[k] = value;
        int slot = e.owner == a.group.rank ? ep_check_slot(a.plan, e.slot) : e.slot;
        int is_here = e.owner >= 0 && e.owner < a.owners && slot >= 0;
        uint32_t mask = __ballot_sync(~0u, is_here);
        if (k == 0) *(uint32_t *)(record + a.record.scales) = mask;
    });
}

/* Zero the rows of a fixed-shape buffer past this step's tokens, which have no slots. By the
 * compute warps. */
__device__ void zero_extra_rows(const EpGatherArgs &a, const Role &role, int thread) {
    int64_t tokens = a.plan.header->num_tokens;
    for (int64_t t = tokens + role.index; t < a.t.out_num_rows; t += role.count) {
        for (int64_t at = thread * 16; at < a.t.row_bytes; at += COMPUTE_THREADS * 16)
            *(uint4 *)(a.t.out_rows + t * a.t.row_bytes + at) = make_uint4(0, 0, 0, 0);
        if (a.t.carries_values && !a.carries_weights && thread < a.top_k)
            a.t.out_values[t * a.top_k + thread] = 0;
    }
}

/* ---- all warps ----------------------------------------------------------------------------- */

/* Add to the caller's counters. By the signal warp of the first receiving block, before its first
 * item: until all ranks are here there is none. */
template <Form FORM> __device__ __forceinline__ void count(const EpGatherArgs &a, uint32_t epoch) {
    constexpr int counts = !is_entries_form(FORM); /* else entries are counted one by one */
    if (blockIdx.x != 1) return;
    if (counts) ep_count_rows(a.group, a.stats, a.plan.rows_from);
    for (int i = threadIdx.x % 32; counts && has_nodes(FORM) && i < a.num_sources; i += 32)
        ep_count_row(a.stats, a.sources[i],
                     min(max(a.plan.rows_to[a.group.size + i], 0), a.group.layout.max_tokens));
    ep_measure_arrivals(a.group, a.stats, epoch);
}

/* Whether receiving blocks pass entries on as they are. */
template <Form FORM> __device__ __forceinline__ int passes_on(const EpGatherArgs &a) {
    return FORM == ENTRIES_NODES && a.rounds;
}

/* Whether they write values that have travelled. */
template <Form FORM> __device__ __forceinline__ int receives_values(const EpGatherArgs &a) {
    return a.t.carries_values && !(is_entries_form(FORM) && a.carries_weights);
}

template <Form FORM, int DONE>
__device__ void receive(const EpGatherArgs &a, Pipeline *p, const FirstClaim &first_claim,
                        uint32_t epoch, int blocks) {
    constexpr PipelineWork work = is_packed_form(FORM) ? WORK_PACKED : WORK_COMPUTE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (pipeline_is_scheduler(warp, a.schedulers))
        schedule_tokens<FORM, DONE>(a, p, first_claim, epoch, blocks);
    else if (warp == LOAD_WARP)
        pipeline_load(p, passes_on<FORM>(a) ? WORK_MOVE : work);
    else if (pipeline_is_storing(warp, lane))
        pipeline_store(p, warp - FIRST_STORE_WARP, passes_on<FORM>(a) ? WORK_MOVE : work, 0,
                       is_packed_form(FORM) && a.rounds, 0);
    else if (warp == SIGNAL_WARP)
        count<FORM>(a, epoch), pipeline_signal(p, a.group, epoch, CREDITS);
    else if (warp >= FIRST_METADATA_WARP && passes_on<FORM>(a))
        pass_values(a, p, warp - FIRST_METADATA_WARP);
    else if (warp >= FIRST_METADATA_WARP && receives_values<FORM>(a))
        receive_values(a, p, warp - FIRST_METADATA_WARP);
}

/* ==== kernel ================================================================================ */

#define GATHER_THREADS (FIRST_COMPUTE_WARP * 32 + COMPUTE_THREADS)

typedef struct Shared {
    Pipeline pipeline;
    Sending sending;
} Shared;
static_assert(sizeof(Shared) <= EP_GATHER_STATIC_BYTES, "the pipeline has the rest");

/* Claim the first chunk of what this block moves. By a scheduler warp. */
__device__ __forceinline__ FirstClaim claim_first(const EpGatherArgs &a, const Role &role,
                                                  Sending *s, int warp) {
    return role.receives ? claim_first_tokens(a, RECEIVERS)
                         : claim_first_rows(a, &s->rows[warp - SCHEDULER_WARP], SENDERS);
}

template <Form FORM, int DONE>
__global__ void __launch_bounds__(GATHER_THREADS, 1)
    gather_kernel(const __grid_constant__ EpGatherArgs a) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Shared s;
    int thread = (int)threadIdx.x - FIRST_COMPUTE_WARP * 32;
    Shared *shared = ep_keep_shared(&s);
    uint32_t epoch;
    EpLoadedHeader header = ep_load_header(a.group, a.plan);
    Role role = pipeline_role(a.receivers);
    FirstClaim first_claim = {0, 0};
    int warp = (int)threadIdx.x / 32;
    if (warp == SCHEDULER_WARP) first_claim = claim_first(a, role, &shared->sending, warp);
    if (threadIdx.x == SCHEDULER_WARP * 32) init_gate(&shared->sending.gate);
    int has_metadata = a.t.carries_values;
    if (is_entries_form(FORM) && role.receives)
        has_metadata = passes_on<FORM>(a) || receives_values<FORM>(a);
    pipeline_open(&shared->pipeline, a.pipeline, memory, COMPUTE_WARPS, has_metadata, a.schedulers,
                  a.top_k);
    int reads_messages = has_nodes(FORM) && a.marks.watch != NULL;
    if (reads_messages) ep_compare_stamps(a.marks, &header);
    if (!ep_begin_operation(a.group, a.plan, header, &epoch)) {
        if (reads_messages) ep_report_stamps(a.group, a.marks);
        ep_report_plan(a.group, a.plan);
        ep_end_operation(a.group, epoch, 0);
        if (has_nodes(FORM) && a.stamp) ep_seal_stamp(a.group, a.stamp);
        return;
    }
    if (reads_messages) ep_take_messages(a.marks);
    ep_arrive(a.group, epoch, 0, 0);
    if (warp > SCHEDULER_WARP && pipeline_is_scheduler(warp, a.schedulers))
        first_claim = claim_first(a, role, &shared->sending, warp);
    /* First, since nothing has been loaded yet that could be summed. */
    if (thread >= 0 && role.receives && a.plan.use.fills_rest) zero_extra_rows(a, role, thread);
    int rounds = has_nodes(FORM) && !is_entries_form(FORM) && role.receives && a.rounds;
    if (thread >= 0 && is_entries_form(FORM) && (!role.receives || passes_on<FORM>(a)))
        ; /* nothing to add */
    else if (thread >= 0 && is_packed_form(FORM))
        sum_packed<FORM>(a, &shared->pipeline, rounds, !role.receives || rounds, thread);
    else if (thread >= 0)
        sum(a, &shared->pipeline, rounds, thread);
    else if (role.receives)
        receive<FORM, DONE>(a, &shared->pipeline, first_claim, epoch, role.count);
    else
        send<FORM, DONE>(a, &shared->pipeline, &shared->sending, first_claim, epoch, role.count);
    ep_end_operation(a.group, epoch, 0);
    if (has_nodes(FORM) && a.stamp) ep_seal_stamp(a.group, a.stamp);
}

/* Groups with masks are on one node. */
#if EP_MASKED
#define NODES_TOO ONE_NODE
#define ENTRIES_NODES_TOO ENTRIES
#else
#define NODES_TOO NODES
#define ENTRIES_NODES_TOO ENTRIES_NODES
#endif

/* With done blocks a kernel without biases is that with any. */
static decltype(&gather_kernel<ONE_NODE, 0>) kernel_of(int is_packed, int has_nodes, int has_biases,
                                                       int waits) {
    if (is_packed && waits) return gather_kernel<PACKED_BIASED, 1>;
    if (is_packed) return has_biases ? gather_kernel<PACKED_BIASED, 0> : gather_kernel<PACKED, 0>;
    if (waits) return has_nodes ? gather_kernel<NODES_TOO, 1> : gather_kernel<ONE_NODE, 1>;
    return has_nodes ? gather_kernel<NODES_TOO, 0> : gather_kernel<ONE_NODE, 0>;
}

static decltype(&gather_kernel<ONE_NODE, 0>) entries_kernel_of(int has_nodes, int waits) {
    if (waits) return has_nodes ? gather_kernel<ENTRIES_NODES_TOO, 1> : gather_kernel<ENTRIES, 1>;
    return has_nodes ? gather_kernel<ENTRIES_NODES_TOO, 0> : gather_kernel<ENTRIES, 0>;
}

extern "C" int EP_VARIANT(ep_cuda_open_gather)(int shared_bytes) {
    int error = 0;
    for (int i = 0; i < 16 && !error; i++) {
        error = ep_open_kernel(kernel_of(i & 1, i & 2, i & 4, i & 8), shared_bytes);
        if (!error) error = ep_open_kernel(entries_kernel_of(i & 2, i & 8), shared_bytes);
    }
    return error;
}

extern "C" int EP_VARIANT(ep_cuda_launch_gather)(const void *args, int blocks, void *stream) {
    const EpGatherArgs *a = (const EpGatherArgs *)args;
    int on_nodes = a->rounds || a->nodes.order || a->nodes.records, waits = !!a->t.done.words;
    auto kernel = a->t.by_entry
                      ? entries_kernel_of(on_nodes, waits)
                      : kernel_of(a->t.format.bits != 0, on_nodes, a->t.num_biases, waits);
    return ep_launch(kernel, blocks, GATHER_THREADS, pipeline_bytes(a->pipeline), stream, *a);
}

EP_VARIANT_END
