/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Latency mode's combine: sums of slots sent back to their tokens' ranks, in one launch, or in two
 * launches that send and receive.
 *
 * The plan says which slots each token of each rank has here. A sending block stores their sum into
 * a record that belongs to that token alone (runtime/cuda/latency.h). A receiving block takes this
 * rank's tokens, adds up the sums of all ranks that each token went to, and writes the rows.
 *
 * Weights come with the slots, or are given at the tokens' ranks. Then sending blocks first push
 * them to the ranks that have the tokens' slots, and sums await them.
 *
 * Rows may still be produced while this runs (EpExtras.done): then a warp that sums slots first
 * waits for the words of their blocks.
 *
 * Who waits on whom: sending blocks wait for no rank, or only for the weights of other ranks, which
 * every rank sends before it waits; receiving blocks wait for the sums and heads of
 * other ranks. runtime/cuda/latency.h says why no wait is circular. Memory order: every line
 * carries a flag that shows its own arrival; only where lines do not arrive whole, flags follow
 * behind a fence (runtime/cuda/latency.cuh). The first blocks send; see EpLatency for those that
 * receive.
 *
 * Sums by entry: the rows themselves are sent, each into a record of its k, and the token's rank
 * adds them all.
 *
 * Without a plan to read, a launch that receives takes the heads of an operation that was dropped.
 */
#include "combine/cuda/latency_gather.h"

#include "runtime/cuda/latency.cuh"
#include "runtime/cuda/rows.cuh"

EP_VARIANT_BEGIN

/* The sources are the ranks of the group, `self` is this one among them. */

__device__ __forceinline__ int num_sources(const EpLatencyGatherArgs &a) {
    return a.shape.num_ranks;
}

__device__ __forceinline__ int self(const EpLatencyGatherArgs &a) {
    return a.shape.rank;
}

/* The forms of the kernel: sums in the rows' type, packed sums, sums by entry. */
enum { PACKED_SUMS = 1, ENTRIES = 2 };

/* Whether a kernel relays what the ranks of this node have for others. */
__device__ __forceinline__ int relays(const EpLatencyGatherArgs &a, int form) {
    return EP_SEVERAL_NODES && ep_latency_relays(a.group.size, form == PACKED_SUMS);
}

/* Whether this launch receives this rank's own rows where they lie: it sends, too, or is the second
 * one of a whole operation on several nodes. Otherwise the send phase has stored their sums. */
__device__ __forceinline__ int reads_own(const EpLatencyGatherArgs &a) {
    return a.latency.senders || (EP_SEVERAL_NODES && a.latency.nodes.reads_landing);
}

/* Returns 1 if it leaves them to a launch that receives, 0 if it stores their sums. */
__device__ __forceinline__ int leaves_own(const EpLatencyGatherArgs &a) {
    if (EP_SEVERAL_NODES && a.latency.nodes.keeps_turn) return 1;
    return a.latency.receives;
}

/* ==== weights =============================================================================== */

/*
 * Weights that are given at the tokens' ranks: each rank pushes its tokens'
 * weights to the ranks that sum their slots, and these wait for them before they sum.
 *
 * Float k of a token is in unit k / 4 of its lines, so line i holds EP_LINE_WEIGHTS floats from
 * EP_LINE_WEIGHTS * i on. Its flag shows that they are here (runtime/cuda/latency.cuh).
 */

/* Whether sums wait for weights of the tokens' ranks. */
__device__ __forceinline__ int awaits_weights(const EpLatencyGatherArgs &a) {
    return a.latency.awaits_weights;
}

/* Lanes work in groups: each group has all lines of one token's weights. */

__device__ __forceinline__ int lanes_of_group(const EpLatencyGatherArgs &a) {
    return 8 * ep_weight_lines(a.top_k);
}

/* Returns what step_store and step_load take, so that this lane's group finds the lines at `lines`.
 */
__device__ __forceinline__ char *group_lines(const EpLatencyGatherArgs &a, char *lines) {
    return lines - 16 * ((int)(threadIdx.x % 32) & -lanes_of_group(a));
}

/* ---- pushing ------------------------------------------------------------------------------- */

/* Returns this lane's 16 bytes of a token's lines, in each group. Units that hold no weights repeat
 * others. By a warp. */
__device__ __forceinline__ ulonglong2 pack_weights(const EpLatencyGatherArgs &a, int token,
                                                   uint64_t flag) {
    int lane = threadIdx.x % 32, at = lane % lanes_of_group(a), k = 4 * (at / 8 * 7 + at % 8) % 32;
    const float *weights = a.t.topk_weights + (int64_t)token * a.top_k;
    uint32_t own = lane < a.top_k ? __float_as_uint(__ldg(weights + lane)) : 0;
    uint4 unit;
    unit.x = __shfl_sync(~0u, own, k), unit.y = __shfl_sync(~0u, own, k + 1);
    unit.z = __shfl_sync(~0u, own, k + 2), unit.w = __shfl_sync(~0u, own, k + 3);
    return step_pack(unit, flag);
}

/* Call store(to) for the token's lines on each other rank that has its row, with a rank for each
 * group of lanes; groups that are left over repeat the first one's. By a warp. */
template <typename Store>
__device__ __forceinline__ void for_each_owner(const EpLatencyGatherArgs &a, int token,
                                               uint64_t flag, Store store) {
    const EpCudaGroup &g = a.group;
    int lane = threadIdx.x % 32, lanes = lanes_of_group(a), owner = -1;
    if (lane < a.top_k) owner = __ldg(&a.plan.entries[token * a.top_k + lane].owner);
    if (EP_SEVERAL_NODES && (uint32_t)owner < (uint32_t)num_sources(a)) {
        EpRankPlace at = rank_place(a.latency, owner);
        owner = at.other < 0 ? at.number : -1;
    }
    owner = owner < g.size && owner != g.rank ? owner : -1;
    if (EP_MASKED && owner >= 0 && !ep_is_alive(owner)) owner = -1;
    int is_first = __ffs((int)__match_any_sync(~0u, owner)) - 1 == lane;
    unsigned owners = __ballot_sync(~0u, is_first && owner >= 0);
    while (owners) {
        int from = __ffs((int)owners) - 1;
#pragma unroll 1
        for (int group = 0; group < 32 && owners; group += lanes, owners &= owners - 1)
            if (lane / lanes * lanes == group) from = __ffs((int)owners) - 1;
        int r = __shfl_sync(~0u, owner, from);
        char *window = a.latency.window[r];
        store(group_lines(
            a, latency_weights(a.latency, window, self(a), num_sources(a), token, flag)));
    }
}

/* Push the weights of one of this rank's tokens. By a warp. */
__device__ __noinline__ void push_weights(const EpLatencyGatherArgs &a, int token, uint64_t flag) {
    int whole = a.latency.whole;
    ulonglong2 packed = pack_weights(a, token, flag);
    for_each_owner(a, token, flag, [&](char *to) { step_store(to, packed, whole); });
    if (whole) return;
    step_fence();
    for_each_owner(a, token, flag, [&](char *to) { step_store_flag(to, flag); });
}

/* ---- waiting ------------------------------------------------------------------------------- */

/* Lines of weights, as loaded by each group of lanes. */
typedef struct FetchedWeights {
    const char *from; /* see group_lines */
    ulonglong2 x;
} FetchedWeights;

/* Begin to load the weights of a source's token, arrived or not. */
__device__ __forceinline__ FetchedWeights fetch_weights(const EpLatencyGatherArgs &a, int source,
                                                        int token, uint64_t flag) {
    FetchedWeights f;
    f.from = group_lines(
        a, latency_weights(a.latency, a.latency.own, source, num_sources(a), token, flag));
    f.x = step_load(f.from);
    return f;
}

/* Returns in lane k the weight of entry k. By a warp. */
__device__ __forceinline__ float unpack_weights(const ulonglong2 &x) {
    int lane = threadIdx.x % 32, from = lane_of_unit(lane / 4);
    unsigned long long low = __shfl_sync(~0u, x.x, from), high = __shfl_sync(~0u, x.y, from);
    unsigned long long both = lane & 2 ? high : low;
    return __uint_as_float((uint32_t)(lane & 1 ? both >> 32 : both));
}

/* In lane k the weight of entry k, if `alive`. */
typedef struct AwaitedWeights {
    int alive;
    float weight;
} AwaitedWeights;

/* Wait for weights; alive is 0 if they will not come. Not inlined, since most combines await none.
 * By a warp. */
__device__ __noinline__ AwaitedWeights await_weights(const EpLatencyGatherArgs &a, int source,
                                                     int token, uint64_t flag, FetchedWeights f) {
    int peer = EP_SEVERAL_NODES ? rank_place(a.latency, source).number : source;
    const StepOrigin origin = {peer, EP_AWAIT_WEIGHTS, token};
    int alive = step_await(a.group, a.latency, f.from, flag, &f.x, origin);
    return AwaitedWeights{alive, unpack_weights(f.x)};
}

/* ==== quantised sums ======================================================================== */

/*
 * What a lane has of a step: a 16-byte unit of a sum in the rows' type,
 * or where sums are quantised (PACKED) 16 elements, which are several such units.
 *
 * A receiving warp has a step's 28 units of codes in the order of its lanes; the last four have
 * none. A sending warp quantises whole blocks, four of them, with eight neighbours to a block. So
 * an even step also sums the four units behind its own, and an odd one those before it: the other
 * half of the block that both share, of which each finds the same scale. Steps stay independent of
 * each other.
 *
 * Lines want a step's units in another order (runtime/cuda/latency.cuh), so codes move between
 * lanes on both sides.
 */

/* Units of a row, in the rows' type, that a lane has of a step. */
template <typename T, int PACKED> struct StepParts {
    static constexpr int COUNT = PACKED ? EpUnit<T>::PARTS : 1;
};

/* Returns how many units before a packed step's own its first block begins. */
__device__ __forceinline__ int units_before(int step) {
    return step % 2 * 4;
}

/* Returns unit `part` of those that this lane has of a step, -1: none. `sends`: where the warp's
 * own sums are packed, and not added to what arrives. */
template <typename T, int PACKED>
__device__ __forceinline__ int own_unit(int row_units, int step, int part, int sends) {
    int lane = threadIdx.x % 32, unit = step * EP_STEP_UNITS + step_unit(), has = step_unit() >= 0;
    if (PACKED) {
        int first = step * EP_PACKED_STEP_UNITS - (sends ? units_before(step) : 0);
        unit = (first + lane) * StepParts<T, PACKED>::COUNT + part;
        has = sends || lane < EP_PACKED_STEP_UNITS;
    }
    return has && unit < row_units ? unit : -1;
}

/* ---- packing ------------------------------------------------------------------------------- */

/* Returns the 16 bytes of lane `from` % 32. By a warp. */
__device__ __forceinline__ uint4 take_unit(const uint4 &own, int from) {
    uint4 x;
    x.x = __shfl_sync(~0u, own.x, from & 31), x.y = __shfl_sync(~0u, own.y, from & 31);
    x.z = __shfl_sync(~0u, own.z, from & 31), x.w = __shfl_sync(~0u, own.w, from & 31);
    return x;
}

/* Returns this lane's unit of a step whose elements the warp has summed; those past the scales have
 * no meaning. By a warp; `valid`: this lane has elements. */
template <typename T>
__device__ __forceinline__ uint4 pack_step(const EpVector<T> sum[EpUnit<T>::PARTS], int step,
                                           int valid) {
    EpQuantScale scale;
    uint4 codes =
        ep_quantise_unit(ep_quant_format(EP_SUM_QUANT), ep_unit_of_floats<T>(sum), valid, &scale);
    uint4 unit = take_unit(codes, step_unit() + units_before(step)), scales;
    scales.x = __shfl_sync(~0u, scale.stored, 0), scales.y = __shfl_sync(~0u, scale.stored, 8);
    scales.z = __shfl_sync(~0u, scale.stored, 16), scales.w = __shfl_sync(~0u, scale.stored, 24);
    return step_unit() == EP_PACKED_STEP_UNITS ? scales : unit;
}

/* Returns this lane's unit of a step, from its sum: rounded, or packed. By a warp. */
template <typename T, int PACKED>
__device__ __forceinline__ uint4 step_sum(const EpVector<T> *sum, int step, int valid) {
    if constexpr (PACKED)
        return pack_step<T>(sum, step, valid);
    else
        return ep_pack(sum[0]);
}

/* ---- unpacking ----------------------------------------------------------------------------- */

/* Add this lane's unit of another rank's sum, as step_unpack returns it, to this lane's elements.
 * By a warp. */
template <typename T>
__device__ __forceinline__ void add_packed(EpVector<T> sum[EpUnit<T>::PARTS], int step,
                                           const uint4 &unit) {
    int lane = threadIdx.x % 32, block = (lane + units_before(step)) / 8;
    uint4 codes = take_unit(unit, lane_of_unit(lane));
    uint4 scales = take_unit(unit, lane_of_unit(EP_PACKED_STEP_UNITS));
    float scale = __uint_as_float(block < 2 ? (block ? scales.y : scales.x)
                                            : (block == 2 ? scales.z : scales.w));
#pragma unroll
    for (int p = 0; p < EpUnit<T>::PARTS; p++)
        ep_add(&sum[p], ep_dequantise<T>(codes, p, scale));
}

/* Add this lane's unit of another rank's sum to what it has summed. By a warp. */
template <typename T, int PACKED>
__device__ __forceinline__ void add_step(EpVector<T> *sum, int step, const uint4 &unit) {
    if constexpr (PACKED)
        add_packed<T>(sum, step, unit);
    else
        ep_add(&sum[0], ep_unpack<T>(unit));
}

/* ==== sending blocks ======================================================================== */

/*
 * For each row that a rank has sent, the sum of its
 * slots here, rounded to the rows' type or packed, sent back to that rank.
 */

/* Steps that a sending warp sums at a time, and terms that it loads at once. */
template <typename T, int PACKED> struct SumShape {
    static constexpr int PARTS = StepParts<T, PACKED>::COUNT;
    static constexpr int STEPS = PACKED ? 1 : 2;
    static constexpr int UNITS = STEPS * PARTS;
    static constexpr int TERMS = UNITS > 2 ? 2 : 4;
};

/* ---- the slots of a row -------------------------------------------------------------------- */

/* The plan's words for a token that a source has, or may have; without the token they may be
 * anything. These functions begin loads and do not look at the words. */

__device__ __forceinline__ int load_row(const EpLatencyGatherArgs &a, int source, int token) {
    return __ldg(a.plan.begins + (source * (a.group.layout.max_tokens + 1) + token));
}

/* Load the slot of entry k in lane k. Where rows have one slot, lane 0 has it. By a warp. */
__device__ __forceinline__ int load_slot(const EpLatencyGatherArgs &a, int source, int token) {
    int lane = threadIdx.x % 32, index = source * a.group.layout.max_tokens + token;
    int flat = a.shape.has_rows;
    const int *at =
        flat ? a.plan.begins + (index + source) : a.plan.routes + (index * a.top_k + lane);
    return lane < (flat ? 1 : a.top_k) ? __ldg(at) : -1;
}

/* A row's slots, in a warp. */
typedef struct Terms {
    int slot;
    float weight;        /* if slots have weights, else anything */
    unsigned slot_lanes; /* lanes that have a slot */
} Terms;

/* Find the terms of a source's row. `own_token`: the token, if it is one of this rank's, else -1:
 * then weights that were given at its rank are still to come. */
__device__ __forceinline__ Terms find_terms(const EpLatencyGatherArgs &a, int source, int slot,
                                            int own_token) {
    int rows = a.plan.use.block_rows;
    if (rows) slot -= source * (a.plan.use.plan_block_rows - rows);
    slot = ep_check_slot(a.plan, slot);
    int has_weight = a.t.weighs && slot >= 0, lane = threadIdx.x % 32;
    const float *weight = (const float *)a.plan.begins;
    if (has_weight && !awaits_weights(a)) weight = a.t.slot_weights + slot;
    if (has_weight && awaits_weights(a) && own_token >= 0)
        weight = a.t.topk_weights + (own_token * a.top_k + lane);
    return Terms{slot, __ldg(weight), __ballot_sync(~0u, slot >= 0)};
}

/* Wait until the blocks of all slots of a row are done, a slot in a lane. Returns 0 if they will
 * not be. By a warp. */
__device__ __forceinline__ int await_done(const EpLatencyGatherArgs &a, int slot) {
    int alive = slot < 0 || ep_await_done(a.group, a.t.done, slot);
    __syncwarp();
    return __all_sync(~0u, alive);
}

/* Load 16 bytes of a row of slots. DONE: another kernel may have stored them meanwhile. */
template <int DONE> __device__ __forceinline__ uint4 load_row_unit(const char *from) {
    return DONE ? ep_load_global(from) : ep_load_unchanging(from);
}

/* Sum units unit[] of a row's slots: ascending k, each term by one fused operation. By a warp;
 * skips a negative unit. No load is conditional: compilers would load to other registers there and
 * wait before they copy, so that one load waits for another. A load that is not needed repeats an
 * address that is. */
template <typename T, int DONE, int UNITS, int AT_ONCE>
__device__ __forceinline__ void sum_slots(const EpLatencyGatherArgs &a, const Terms &t,
                                          const int unit[UNITS], EpVector<T> sum[UNITS]) {
    const char *from[UNITS];
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        from[u] = a.t.rows + 16 * max(unit[u], 0);
#pragma unroll 1
    for (unsigned left = t.slot_lanes; left;) {
        uint4 x[AT_ONCE][UNITS];
        int lane[AT_ONCE];
        bool valid[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            valid[i] = left != 0, lane[i] = valid[i] ? __ffs((int)left) - 1 : lane[0];
            uint64_t slot = (uint32_t)__shfl_sync(~0u, t.slot, lane[i]);
            left &= left - 1;
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                x[i][u] = load_row_unit<DONE>(from[u] + slot * (uint32_t)a.t.row_bytes);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float given = __shfl_sync(~0u, t.weight, lane[i]), weight = a.t.weighs ? given : 1;
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                if (!valid[i] || unit[u] < 0) continue;
                ep_add_weighted(&sum[u], weight, ep_unpack<T>(x[i][u]));
            }
        }
    }
}

/* Find this lane's units of COUNT / PARTS steps, `stride` steps apart; `sends` as in own_unit. */
template <typename T, int PACKED, int COUNT>
__device__ __forceinline__ void find_units(const EpLatencyGatherArgs &a, int step, int stride,
                                           int sends, int unit[COUNT]) {
    constexpr int PARTS = StepParts<T, PACKED>::COUNT;
#pragma unroll
    for (int u = 0; u < COUNT; u++)
        unit[u] = own_unit<T, PACKED>(a.row_units, step + u / PARTS * stride, u % PARTS, sends);
}

/* ---- rows of other ranks ------------------------------------------------------------------- */

/* A warp's part of what is sent, and the plan's words for its row. */
typedef struct SumPart {
    int source, token, step;
    int row, slot;
} SumPart;

/* Returns the place of a row in the message to another node, where this rank alone answers for this
 * node. A damaged plan must not lead past it. */
__device__ __forceinline__ char *answer_place(const EpLatencyGatherArgs &a, int other, int token) {
    const EpLatency &l = a.latency;
    return message_place(l, l.own + l.layout.outgoing, other, min(token, l.layout.node_rows - 1));
}

/* Returns where the sum of a row goes: to its rank, or to the relay that has brought it. */
template <int FORM>
__device__ __forceinline__ char *sum_to(const EpLatencyGatherArgs &a, const SumPart &s,
                                        uint64_t flag) {
    const EpCudaGroup &g = a.group;
    const EpLatency &l = a.latency;
    if (!EP_SEVERAL_NODES)
        return latency_record(l, l.window[s.source], g.rank, g.size, s.token, flag);
    EpRankPlace at = rank_place(l, s.source);
    char *window = l.window[at.number];
    if (at.other < 0) return latency_record(l, window, g.rank, g.size, s.token, flag);
    if (!relays(a, FORM)) return answer_place(a, at.other, s.token);
    return latency_partial(l, window, at.other, g.rank, g.size, s.token, flag);
}

/* Send a part of a sum. Returns 0 if the row's weights do not come. */
template <typename T, int PACKED, int DONE>
__device__ int send_sum(const EpLatencyGatherArgs &a, const SumPart &s, int stride, uint64_t flag) {
    const EpLatency &l = a.latency;
    FetchedWeights f;
    if (awaits_weights(a)) f = fetch_weights(a, s.source, s.token, flag);
    Terms t = find_terms(a, s.source, s.slot, -1);
    if (s.row == EP_ROW_NONE) return 1;
    if (awaits_weights(a)) {
        AwaitedWeights w = await_weights(a, s.source, s.token, flag, f);
        if (!w.alive) return 0;
        if (EP_MASKED && w.alive == STEP_LATE) return 1; /* it gets no sum */
        t.weight = w.weight;
    }
    if (DONE && !await_done(a, t.slot)) return 0;
    char *to = sum_to<PACKED>(a, s, flag);
    constexpr int STEPS = SumShape<T, PACKED>::STEPS, PARTS = SumShape<T, PACKED>::PARTS;
    constexpr int UNITS = SumShape<T, PACKED>::UNITS;
#pragma unroll 1
    for (int step = s.step; step < a.steps; step += STEPS * stride) {
        EpVector<T> sum[UNITS] = {};
        int unit[UNITS];
        find_units<T, PACKED, UNITS>(a, step, stride, 1, unit);
        sum_slots<T, DONE, UNITS, SumShape<T, PACKED>::TERMS>(a, t, unit, sum);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            int at = step + i * stride;
            uint4 own = step_sum<T, PACKED>(sum + i * PARTS, at, unit[i * PARTS] >= 0);
            ulonglong2 packed = step_pack(own, flag);
            if (at < a.steps) step_store(to + at * EP_STEP_BYTES, packed, l.whole);
        }
        if (l.whole) continue;
        step_fence();
#pragma unroll 1
        for (int i = 0; i < STEPS; i++)
            if (step + i * stride < a.steps)
                step_store_flag(to + (step + i * stride) * EP_STEP_BYTES, flag);
    }
    return 1;
}

/* ---- own rows ------------------------------------------------------------------------------ */

/* Returns the address of a unit of this rank's own sum for one of its tokens. */
template <typename T>
__device__ __forceinline__ uint4 *own_sum_unit(const EpLatencyGatherArgs &a, int token, int unit,
                                               uint64_t flag) {
    const EpLatency &l = a.latency;
    int row = EP_FLAG_SET(flag) * l.layout.max_tokens + token;
    char *stored = l.own + l.layout.sums + (int64_t)row * l.layout.sum_bytes;
    return (uint4 *)(stored + unit * (int)sizeof(EpVector<T>));
}

/* Store this rank's own sum for one of its tokens, not rounded, for the receive phase. Returns 0 if
 * its blocks are not done in time. */
template <typename T, int PACKED, int DONE>
__device__ int store_own_sum(const EpLatencyGatherArgs &a, const SumPart &s, int stride,
                             uint64_t flag) {
    constexpr int PARTS = StepParts<T, PACKED>::COUNT;
    Terms t = find_terms(a, self(a), s.slot, s.token);
    if (DONE && !await_done(a, t.slot)) return 0;
#pragma unroll 1
    for (int step = s.step; step < a.steps; step += stride) {
        EpVector<T> sum[PARTS] = {};
        int unit[PARTS];
        find_units<T, PACKED, PARTS>(a, step, stride, 0, unit);
        sum_slots<T, DONE, PARTS, 2>(a, t, unit, sum);
#pragma unroll
        for (int u = 0; u < PARTS; u++) {
            if (unit[u] < 0) continue;
            uint4 *to = own_sum_unit<T>(a, s.token, unit[u], flag);
#pragma unroll
            for (int i = 0; i < EpVector<T>::SIZE; i += 4)
                to[i / 4] = ep_pack(EpVector<float>{
                    {sum[u].at[i], sum[u].at[i + 1], sum[u].at[i + 2], sum[u].at[i + 3]}});
        }
    }
    return 1;
}

/* ---- entries ------------------------------------------------------------------------------- */

/*
 * Sums by entry: for each row that a rank has sent, the row of each of its slots here as it is, in
 * the record of its k. Unit 29 of each step has the entry's weight, and whether the entry has a
 * slot (runtime/cuda/latency.h). A send phase stores this rank's own rows in its own window
 * likewise.
 */

#define ENTRIES_AT_ONCE 4

/* Returns this lane's unit of a step of an entry's row, -1: none. */
__device__ __forceinline__ int entry_unit(const EpLatencyGatherArgs &a, int step, int end) {
    int own = step_unit(), unit = step * EP_ENTRY_STEP_UNITS + own;
    return own >= 0 && own < EP_ENTRY_STEP_UNITS && step < end && unit < a.row_units ? unit : -1;
}

/* Returns where the topk_weights of one of this rank's tokens lie between the phases. */
__device__ __forceinline__ float *kept_weights(const EpLatencyGatherArgs &a, int token,
                                               uint64_t flag) {
    const EpLatency &l = a.latency;
    int row = EP_FLAG_SET(flag) * l.layout.max_tokens + token;
    return (float *)(l.own + l.layout.sums + (int64_t)row * l.layout.sum_bytes);
}

/* Returns the address of a unit of a slot's row; without either, one that may be read all the same:
 * no load is conditional, see sum_slots. */
__device__ __forceinline__ const char *unit_address(const EpLatencyGatherArgs &a, int slot,
                                                    int unit) {
    uint64_t at = (uint64_t)(uint32_t)slot * (uint32_t)a.t.row_bytes + 16 * (uint32_t)max(unit, 0);
    return slot >= 0 ? a.t.rows + at : (const char *)a.plan.begins;
}

/* Returns the rank of this node to which what comes of a source's row goes. */
__device__ __forceinline__ int peer_of(const EpLatencyGatherArgs &a, int source) {
    return EP_SEVERAL_NODES ? rank_place(a.latency, source).number : source;
}

/* Add the rows of entries to the caller's counters: those to the rank of this node, and those that
 * this rank sends on without a relay. By one thread. */
__device__ __forceinline__ void count_entries(const EpLatencyGatherArgs &a, int source, int rows) {
    ep_count_row(a.stats, ep_member(a.group, peer_of(a, source)), rows);
    if (!EP_SEVERAL_NODES || relays(a, ENTRIES)) return;
    if (rank_place(a.latency, source).other >= 0) ep_count_row(a.stats, source, rows);
}

/* Returns where the row of an entry goes. */
__device__ __forceinline__ char *entry_to(const EpLatencyGatherArgs &a, const SumPart &s, int k,
                                          uint64_t flag) {
    const EpLatency &l = a.latency;
    char *window = l.window[peer_of(a, s.source)];
    if (EP_SEVERAL_NODES) {
        EpRankPlace at = rank_place(l, s.source);
        if (at.other >= 0 && !relays(a, ENTRIES))
            return answer_place(a, at.other, s.token) + k * a.steps * EP_STEP_BYTES;
        if (at.other >= 0) return latency_relay_entry(l, window, at.other, s.token, k, flag);
    }
    return latency_entry(l, window, k, s.token, flag);
}

/* Send a part of a row's entries; a lost one's elements have no meaning. Returns 0 on timeout. By a
 * warp. */
template <int DONE>
__device__ int send_entries(const EpLatencyGatherArgs &a, const SumPart &s, int stride,
                            uint64_t flag) {
    const EpLatency &l = a.latency;
    int lane = threadIdx.x % 32, slot = ep_check_slot(a.plan, s.slot);
    int is_own = s.source == self(a), is_first = s.step == 0;
    if (is_own && is_first && a.t.weighs_entries && lane < a.top_k)
        kept_weights(a, s.token, flag)[lane] = __ldg(a.t.topk_weights + (s.token * a.top_k + lane));
    if (s.row == EP_ROW_NONE) return 1;
    if (DONE && !await_done(a, slot)) return 0;
    float weight = a.carries_weights && slot >= 0 ? __ldg(a.t.slot_values + slot) : 1;
    unsigned lanes = __ballot_sync(~0u, s.slot != -1 && lane < a.top_k);
    unsigned kept = __ballot_sync(~0u, slot >= 0);
    if (a.counts && is_first && lane == 0) count_entries(a, s.source, __popc(kept));
#pragma unroll 1
    for (int step = s.step; step < a.steps; step += stride) {
        int unit = entry_unit(a, step, a.steps);
#pragma unroll 1
        for (unsigned left = lanes; left;) {
            uint4 x[ENTRIES_AT_ONCE];
            int k[ENTRIES_AT_ONCE];
#pragma unroll
            for (int i = 0; i < ENTRIES_AT_ONCE; i++) {
                k[i] = left ? __ffs((int)left) - 1 : -1;
                left &= left - 1;
                int row = __shfl_sync(~0u, slot, max(k[i], 0));
                x[i] = load_row_unit<DONE>(unit_address(a, k[i] < 0 ? -1 : row, unit));
            }
#pragma unroll
            for (int i = 0; i < ENTRIES_AT_ONCE; i++) {
                float given = __shfl_sync(~0u, weight, max(k[i], 0));
                if (k[i] < 0) continue;
                if (step_unit() == EP_ENTRY_STEP_UNITS)
                    x[i] = make_uint4(__float_as_uint(given), kept >> k[i] & 1, 0, 0);
                char *to = entry_to(a, s, k[i], flag);
                step_store(to + step * EP_STEP_BYTES, step_pack(x[i], flag), l.whole);
            }
        }
        if (l.whole) continue;
        step_fence();
#pragma unroll 1
        for (unsigned left = lanes; left; left &= left - 1) {
            char *to = entry_to(a, s, __ffs((int)left) - 1, flag);
            step_store_flag(to + step * EP_STEP_BYTES, flag);
        }
    }
    return 1;
}

/* ---- all ----------------------------------------------------------------------------------- */

#if EP_SEVERAL_NODES
/* The start of each message says how many places are filled. By a block, a warp for each. */
template <typename Rows>
__device__ __forceinline__ void store_message_heads(const EpLatencyGatherArgs &a, uint64_t flag,
                                                    Rows rows_of) {
    const EpLatency &l = a.latency;
#pragma unroll 1
    for (int o = (int)(threadIdx.x / 32); o < l.nodes.num_others; o += LATENCY_WARPS) {
        int rows = rows_of(o);
        store_head(l, l.own + l.layout.outgoing + o * l.layout.message_bytes, 1, flag,
                   [&](int unit) { return make_uint4(0, 0, 0, unit ? 0 : (uint32_t)rows); });
    }
}
#endif

/* Send the heads. They are the last work item, since no sum waits for them: a block without other
 * work sends them, or else the block that finishes first. Its warps that receive last begin. Where
 * sums await weights, the heads come before them: ranks that disagree find that while they wait. */
__device__ void send_heads(const EpLatencyGatherArgs &a, const LatencyOp &op) {
    int warp = LATENCY_WARPS - 1 - (int)(threadIdx.x / 32);
    const EpOwnOperation own = *ep_own_operation();
#pragma unroll 1
    for (int r = warp; r < a.group.size; r += LATENCY_WARPS)
        if (ep_is_alive(r))
            send_head(a.group, a.latency, r, 1, op.flag,
                      [&](int) { return make_uint4(own.digest, own.generation, 0, 0); });
    if (warp == LATENCY_WARPS - 1) store_operation_number(a.group, a.latency, op);
}

/* Returns a warp's part of an item. An item is as many parts as a block has warps. This rank's own
 * row comes last of each token's, and only where its sum is to be stored. */
__device__ __forceinline__ SumPart find_sum(const EpLatencyGatherArgs &a, int item,
                                            const EpDivisor &stride) {
    int i = item * LATENCY_WARPS + (int)(threadIdx.x / 32), row = ep_quotient(i, stride);
    int token = ep_quotient(row, a.targets), source = self(a) + 1 + row - token * a.targets.by;
    return SumPart{source - (source < num_sources(a) ? 0 : num_sources(a)), token,
                   i - row * stride.by, EP_ROW_NONE, -1};
}

__device__ __forceinline__ void load_sum(const EpLatencyGatherArgs &a, SumPart *s) {
    s->row = load_row(a, s->source, s->token);
    s->slot = load_slot(a, s->source, s->token);
}

/* Whether all items are claimed: where blocks wait after they have sent something, so that not all
 * of them need to be resident. */
__device__ __forceinline__ int is_all_claimed(const EpLatencyGatherArgs &a) {
    const EpLatency &l = a.latency;
    return (l.receives && l.first_receiver < l.senders) || awaits_weights(a);
}

/* Load the words of this block's first item, before anything else is known. Only if items are not
 * all claimed and the row is one that the host expects. */
__device__ __forceinline__ SumPart load_first_sum(const EpLatencyGatherArgs &a) {
    SumPart s = find_sum(a, (int)blockIdx.x, a.sent.each);
    int sends = (int)blockIdx.x < a.latency.senders;
    if (sends && !is_all_claimed(a) && s.token * a.targets.by < a.sent.rows) load_sum(a, &s);
    return s;
}

/* Returns the number of rows of all ranks whose sums are sent or stored here, as if each rank had
 * as many tokens as the largest has. */
__device__ __forceinline__ int count_sums(const EpLatencyGatherArgs &a, const int *tokens) {
    int most = 0;
#pragma unroll 1
    for (int r = threadIdx.x % 32; r < num_sources(a); r += 32)
        if (r != self(a) || !leaves_own(a)) most = max(most, tokens[r]);
    return __reduce_max_sync(~0u, most) * (num_sources(a) - leaves_own(a));
}

/* Returns the number of items before the sums, if these await weights: one for the weights of as
 * many tokens as a block has warps, and one for the heads. */
__device__ __forceinline__ int count_pushes(const EpLatencyGatherArgs &a, const int *tokens) {
    if (!awaits_weights(a)) return 0;
    return (tokens[self(a)] + LATENCY_WARPS - 1) / LATENCY_WARPS + 1;
}

/* Push the weights of an item's tokens: one for each warp of the block. */
__device__ __forceinline__ void push_item(const EpLatencyGatherArgs &a, const int *tokens, int item,
                                          uint64_t flag) {
    int token = item * LATENCY_WARPS + (int)(threadIdx.x / 32);
    if (token < tokens[self(a)]) push_weights(a, token, flag);
}

/* Send or store the sums of all rows. tokens[R]: of each rank. */
template <typename T, int FORM, int DONE>
__device__ void send_sums(const EpLatencyGatherArgs &a, const int *tokens, const SumPart &first,
                          const LatencyOp &op) {
    int rows = count_sums(a, tokens), expected = rows <= a.sent.rows;
    int warps = max(1, a.latency.senders) * LATENCY_WARPS;
    EpPartition partition = expected ? a.sent : ep_partition(rows, a.steps, EP_SENT_STEPS, warps);
    int items = (rows * partition.each.by + LATENCY_WARPS - 1) / LATENCY_WARPS,
        stride = partition.each.by;
    int all_claimed = is_all_claimed(a), begin = all_claimed ? claimed_items()[0] : (int)blockIdx.x;
    int claimed = all_claimed ? 0 : a.latency.senders;
    int known = all_claimed || !expected ? -1 : begin; /* item that `first` belongs to */
    int pushes = count_pushes(a, tokens), heads = pushes ? pushes - 1 : items, alive = 1;
    claims_work_from(a.latency, begin, claimed, items + max(1, pushes), [&](int item) {
#if EP_SEVERAL_NODES
        if (item == heads && !relays(a, FORM))
            store_message_heads(a, op.flag, [&](int o) {
                return min(tokens[other_node(a.latency, o).peer], a.latency.layout.node_rows);
            });
#endif
        if (item == heads) return send_heads(a, op);
        if (item < pushes) return push_item(a, tokens, item, op.flag);
        SumPart s = first;
        if (item != known) s = find_sum(a, item - pushes, partition.each);
        if (!alive || s.token * a.targets.by >= rows || s.token >= tokens[s.source]) return;
        if (item != known) load_sum(a, &s);
        if constexpr (FORM == ENTRIES)
            alive = send_entries<DONE>(a, s, stride, op.flag);
        else if (s.source != self(a))
            alive = send_sum<T, FORM, DONE>(a, s, stride, op.flag);
        else
            alive = store_own_sum<T, FORM, DONE>(a, s, stride, op.flag);
    });
}

/* ==== receiving blocks ====================================================================== */

/*
 * For each token of this rank, the sums of all ranks
 * that it went to, as they arrive, added in ascending rank.
 *
 * A part has no more steps than a warp loads at once, and parts are taken in the order of tokens,
 * in which they arrive. So all warps work on what has arrived last, and little is left to do when
 * the last token is here.
 */

#define AWAITED_AT_ONCE 3 /* ranks besides this one */
#define OWN_AT_ONCE 2     /* own terms, while awaited steps take registers, too */

/* Steps that a receiving warp reduces at a time, at most MOST, and this lane's units of them. A
 * packed step has twice the elements, or more. */
template <typename T, int PACKED, int MOST> struct ReducedShape {
    static constexpr int STEPS = PACKED ? 1 : MOST;
    static constexpr int PARTS = StepParts<T, PACKED>::COUNT;
    static constexpr int UNITS = STEPS * PARTS;
};

/* Up to this number of parts, waiting warps load all of their steps again until they have arrived,
 * which sees them soonest. With more parts they load only flags, to leave the cache to others. */
#define EAGER_PARTS 512

#define RANK_NONE INT32_MAX

/* ---- parts --------------------------------------------------------------------------------- */

__device__ __forceinline__ int count_parts(const EpLatencyGatherArgs &a) {
    return a.latency.received.rows * a.latency.received.each.by;
}

/* The plan's words for a token, while they are being loaded: in lane k the rank of entry k, -1 for
 * none, and the slots that the token has here. */
typedef struct TokenWords {
    int owner, slot;
    int place; /* several nodes: in the message to the entry's node */
} TokenWords;

/* Returns a source's number of tokens. A damaged plan must not lead past this rank's weights. */
__device__ __forceinline__ int count_source_tokens(const EpLatencyGatherArgs &a, int source) {
    int count = a.plan.use.is_read ? ep_check_count(a.group, __ldg(a.plan.tokens + source)) : 0;
    if (awaits_weights(a) && source == self(a)) count = min(count, (int)a.plan.use.num_rows);
    return max(0, count);
}

/* Load the plan's words for a token; a row past this step's tokens has none. By a warp. */
__device__ __forceinline__ TokenWords load_token(const EpLatencyGatherArgs &a, int tokens,
                                                 int token) {
    int lane = threadIdx.x % 32;
    TokenWords w = {-1, -1, 0};
    if (token >= tokens || token >= a.latency.received.rows) return w;
    const EpEntry *entry = &a.plan.entries[token * a.top_k + lane];
    if (lane < a.top_k) w.owner = __ldg(&entry->owner);
    if (EP_SEVERAL_NODES && lane < a.top_k) w.place = __ldg(&entry->row);
    if (reads_own(a)) w.slot = load_slot(a, self(a), token);
    return w;
}

/* Returns the rank of this lane's entry, -1: none, or it is masked. */
__device__ __forceinline__ int living_owner(const EpLatencyGatherArgs &a, const TokenWords &w) {
    int owner = w.owner < num_sources(a) ? w.owner : -1;
    return EP_MASKED && owner >= 0 && !ep_is_alive(owner) ? -1 : owner;
}

/* Returns it again, -1 if it is late in this operation. */
__device__ __forceinline__ int drop_late(const EpLatencyGatherArgs &a, int owner, uint64_t flag) {
    int is_late = owner >= 0 && owner != self(a) && latency_is_late(a.latency, owner, flag);
    return is_late ? -1 : owner;
}

/* Some steps of a token. In lane k, `owner` is the rank of its entry k, -1 for none or this
 * rank. */
typedef struct TokenPart {
    int token, step, end, owner;
    int has_own; /* whether this rank has a sum to add */
    int place;   /* see TokenWords */
} TokenPart;

/* Returns the lowest of a token's other ranks above `last`. By a warp. */
__device__ __forceinline__ int next_rank(int owner, int last) {
    return __reduce_min_sync(~0u, owner > last ? owner : RANK_NONE);
}

/* ---- this rank's own sum ------------------------------------------------------------------- */

/* Load this rank's own sum as the send phase has stored it. */
template <typename T, int UNITS>
__device__ __forceinline__ void load_own_sum(const EpLatencyGatherArgs &a, int token,
                                             const int unit[UNITS], uint64_t flag,
                                             EpVector<T> own[UNITS]) {
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        if (unit[u] < 0) continue;
        const uint4 *stored = own_sum_unit<T>(a, token, unit[u], flag);
#pragma unroll
        for (int i = 0; i < EpVector<T>::SIZE; i += 4) {
            EpVector<float> x = ep_unpack<float>(__ldg(stored + i / 4));
#pragma unroll
            for (int e = 0; e < 4; e++)
                own[u].at[i + e] = x.at[e];
        }
    }
}

template <typename T, int UNITS>
__device__ __forceinline__ void add_own(const EpVector<T> own[UNITS], EpVector<T> sum[UNITS]) {
#pragma unroll
    for (int i = 0; i < UNITS; i++)
        ep_add(&sum[i], own[i]);
}

/* ---- sums of other ranks ------------------------------------------------------------------- */

/* A part's steps from some ranks, in ascending order, RANK_NONE after the last. Step i from rank[r]
 * is awaited if incoming_bit(r, i) is set. */
template <int STEPS> struct Incoming {
    int rank[AWAITED_AT_ONCE];
    const char *from[AWAITED_AT_ONCE];
    unsigned awaited;
    ulonglong2 x[AWAITED_AT_ONCE][STEPS];
};

template <int STEPS> __device__ __forceinline__ unsigned incoming_bit(int r, int i) {
    return 1u << (r * STEPS + i);
}

/* Returns where the sum of a rank, or of the node whose lowest rank it is, comes. By a warp. */
__device__ __forceinline__ const char *sum_from(const EpLatencyGatherArgs &a, const TokenPart &s,
                                                int rank, uint64_t flag) {
    const EpLatency &l = a.latency;
    if (EP_SEVERAL_NODES) {
        EpRankPlace at = rank_place(l, rank);
        int lane = __ffs((int)__ballot_sync(~0u, s.owner == rank)) - 1;
        int place = __shfl_sync(~0u, s.place, lane & 31);
        char *messages = l.own + l.layout.landing;
        if (!l.nodes.reads_landing) messages = latency_messages(l, l.own, flag);
        rank = at.number;
        if (at.other >= 0)
            return message_place(l, messages, at.other, min(max(place, 0), l.layout.node_rows - 1));
    }
    return latency_record(l, l.own, rank, a.group.size, s.token, flag);
}

/* List the steps of the next ranks above `last`. By a warp. */
template <int STEPS>
__device__ __forceinline__ void find_incoming(const EpLatencyGatherArgs &a, const TokenPart &s,
                                              int last, uint64_t flag, Incoming<STEPS> *c) {
    c->awaited = 0;
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++) {
        c->rank[r] = last = next_rank(s.owner, last);
        if (last == RANK_NONE) continue;
        c->from[r] = sum_from(a, s, last, flag) + s.step * EP_STEP_BYTES;
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            if (s.step + i < s.end) c->awaited |= incoming_bit<STEPS>(r, i);
    }
}

template <int STEPS> __device__ __forceinline__ void load_incoming(Incoming<STEPS> *c) {
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++)
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            if (c->awaited & incoming_bit<STEPS>(r, i))
                c->x[r][i] = step_load(c->from[r] + i * EP_STEP_BYTES);
}

/* Returns the steps that have not arrived. By a warp, like step_is_here. */
template <int STEPS>
__device__ __forceinline__ unsigned find_missing(const Incoming<STEPS> &c, uint64_t flag) {
    unsigned missing = 0;
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++)
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            if (c.x[r][i].y != flag) missing |= incoming_bit<STEPS>(r, i);
    return __reduce_or_sync(~0u, has_flag() ? missing & c.awaited : 0u);
}

/* Load the flags of some missing steps alone, and return those still missing. By a warp. */
template <int STEPS>
__device__ __forceinline__ unsigned poll_missing(const Incoming<STEPS> &c, unsigned missing,
                                                 uint64_t flag) {
    uint64_t seen[AWAITED_AT_ONCE][STEPS];
    int at = (int)(threadIdx.x % 32) * 16 + 8;
    unsigned own = has_flag() ? missing : 0, still = 0;
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++)
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            if (own & incoming_bit<STEPS>(r, i))
                seen[r][i] =
                    ep_load_relaxed_sys((const uint64_t *)(c.from[r] + i * EP_STEP_BYTES + at));
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++)
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            if (seen[r][i] != flag) still |= incoming_bit<STEPS>(r, i);
    return __reduce_or_sync(~0u, still & own);
}

/* Load all steps together, again and again until all have arrived; returns those still missing
 * after many loads. Calls meanwhile() while the first loads are under way. There is one place that
 * loads, since then no load has to preserve what another has loaded: see sum_slots. By a warp. */
template <int STEPS, typename Meanwhile>
__device__ __forceinline__ unsigned receive_incoming(const EpLatencyGatherArgs &a,
                                                     Incoming<STEPS> *c, uint64_t flag,
                                                     Meanwhile meanwhile) {
    int arrived = 0;
#pragma unroll 1
    for (int polls = 0;; polls++) {
        load_incoming(c);
        if (polls == 0) meanwhile();
        if (arrived) return 0;
        unsigned missing = find_missing(*c, flag);
        arrived = !missing;
        if (arrived && a.latency.whole) return 0;
        if (arrived) {
            step_fence();
            __syncwarp();
            continue;
        }
        if (polls >= EP_POLLS_PER_CLOCK_READ) return missing;
        if (count_parts(a) <= EAGER_PARTS) continue;
#pragma unroll 1
        for (; missing && polls < EP_POLLS_PER_CLOCK_READ; polls++)
            missing = poll_missing(*c, missing, flag);
    }
}

/* ---- a part -------------------------------------------------------------------------------- */

/* Steps of a part that have not arrived: bits as in Incoming, for the ranks above `last`. */
typedef struct Missing {
    int last;
    unsigned bits;
} Missing;

/* Add the sums of other ranks, and this rank's own in its turn if *has_own, which is then
 * cleared. */
template <typename T, int PACKED, int STEPS, int UNITS>
__device__ __forceinline__ void add_incoming(const Incoming<STEPS> &c, int rank, int step,
                                             const EpVector<T> own[UNITS], int *has_own,
                                             EpVector<T> sum[UNITS]) {
#pragma unroll
    for (int r = 0; r < AWAITED_AT_ONCE; r++) {
        if (*has_own && c.rank[r] > rank) add_own<T, UNITS>(own, sum), *has_own = 0;
        if (c.rank[r] == RANK_NONE) break;
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            add_step<T, PACKED>(sum + i * (UNITS / STEPS), step + i, step_unpack(c.x[r][i]));
    }
}

/* Add the biases of a token; a row past this step's tokens has none. */
template <typename T, int UNITS>
__device__ __forceinline__ void add_biases(const EpLatencyGatherArgs &a, int token,
                                           const int unit[UNITS], EpVector<T> sum[UNITS]) {
    if (token >= count_source_tokens(a, self(a))) return;
#pragma unroll 1
    for (int b = 0; b < a.t.num_biases; b++) {
        const uint4 *row = (const uint4 *)a.t.bias[b] + (int64_t)token * a.row_units;
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            if (unit[u] >= 0) ep_add(&sum[u], ep_unpack<T>(__ldg(row + unit[u])));
    }
}

/* Sum up and write some steps of a token, or return those that have not arrived in time. This
 * rank's own sum is computed while other ranks' sums are loaded. Ranks beyond the first few have a
 * loop of their own, so that no total takes registers meanwhile. */
template <typename T, int PACKED, int DONE, int MOST>
__device__ __forceinline__ Missing receive_steps(const EpLatencyGatherArgs &a, const TokenPart &s,
                                                 int slot, uint64_t flag) {
    using Shape = ReducedShape<T, PACKED, MOST>;
    constexpr int STEPS = Shape::STEPS, UNITS = Shape::UNITS;
    EpVector<T> own[UNITS] = {};
    Terms t = find_terms(a, self(a), slot, s.token);
    Incoming<STEPS> c;
    int unit[UNITS], last = -1, has_own = s.has_own;
    find_units<T, PACKED, UNITS>(a, s.step, 1, 0, unit);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (s.step + u / (UNITS / STEPS) >= s.end) unit[u] = -1;
    find_incoming(a, s, last, flag, &c);
    if (s.has_own && !reads_own(a)) load_own_sum<T, UNITS>(a, s.token, unit, flag, own);
    unsigned missing = receive_incoming(
        a, &c, flag, [&]() { sum_slots<T, DONE, UNITS, OWN_AT_ONCE>(a, t, unit, own); });
    if (missing) return Missing{last, missing};
    EpVector<T> sum[UNITS] = {};
    add_incoming<T, PACKED, STEPS, UNITS>(c, self(a), s.step, own, &has_own, sum);
    last = c.rank[AWAITED_AT_ONCE - 1];
#pragma unroll 1
    while (__any_sync(~0u, s.owner > last)) {
        find_incoming(a, s, last, flag, &c);
        missing = receive_incoming(a, &c, flag, [] {});
        if (missing) return Missing{last, missing};
        add_incoming<T, PACKED, STEPS, UNITS>(c, self(a), s.step, own, &has_own, sum);
        last = c.rank[AWAITED_AT_ONCE - 1];
    }
    if (has_own) add_own<T, UNITS>(own, sum);
    if (a.t.num_biases) add_biases<T, UNITS>(a, s.token, unit, sum);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (unit[u] >= 0)
            *((uint4 *)a.t.out_rows + ((int64_t)s.token * a.row_units + unit[u])) = ep_pack(sum[u]);
    return Missing{last, 0};
}

/* Wait for the first missing step. By a warp, which keeps nothing in registers meanwhile: what had
 * arrived is loaded again. Returns 0 on timeout. */
template <int STEPS>
__device__ __noinline__ int await_missing(const EpLatencyGatherArgs &a, TokenPart s,
                                          Missing missing, uint64_t flag) {
    int at = __ffs((int)missing.bits) - 1, rank = missing.last;
#pragma unroll 1
    for (int r = 0; r <= at / STEPS; r++)
        rank = next_rank(s.owner, rank);
    int step = s.step + at % STEPS;
    const char *from = sum_from(a, s, rank, flag) + step * EP_STEP_BYTES;
    if (EP_SEVERAL_NODES) rank = rank_place(a.latency, rank).number;
    ulonglong2 x = step_load(from);
    return step_await(a.group, a.latency, from, flag, &x,
                      StepOrigin{rank, EP_AWAIT_LINES, s.token});
}

/* Receive a part of a token. It has more steps than are reduced at a time only if rows are so long
 * that the host has made longer parts. By a warp. Returns 0 on timeout. */
template <typename T, int PACKED, int DONE, int MOST>
__device__ __forceinline__ int receive_part(const EpLatencyGatherArgs &a, int token, int step,
                                            const TokenWords &w, uint64_t flag) {
    constexpr int STEPS = ReducedShape<T, PACKED, MOST>::STEPS;
    int owner = living_owner(a, w);
    int has_own = __any_sync(~0u, owner == self(a));
    int end = min(step + a.latency.received.steps, a.steps);
    TokenPart s = {token, step, end, owner == self(a) ? -1 : owner, has_own, w.place};
    if (DONE && !await_done(a, find_terms(a, self(a), w.slot, token).slot)) return 0;
#pragma unroll 1
    while (s.step < s.end) {
        Missing missing = receive_steps<T, PACKED, DONE, MOST>(a, s, w.slot, flag);
        if (!missing.bits) {
            s.step += STEPS;
            continue;
        }
        int here = await_missing<STEPS>(a, s, missing, flag);
        if (!here) return 0;
        if (EP_MASKED && here == STEP_LATE) s.owner = drop_late(a, s.owner, flag);
    }
    return 1;
}

/* ---- a part of sums by entry --------------------------------------------------------------- */

/* Some steps of a token. Lane k has entry k: the rank of its expert, -1 for none; its slot, if its
 * row is read where it lies on this rank, else -1; and its weight, if it is known here. */
typedef struct EntriesPart {
    int token, step, end;
    int owner, slot;
    float weight;
    unsigned entries; /* whose rows are to be added, or come as lost */
    int place;        /* see TokenWords */
} EntriesPart;

/* The first step that has not arrived. */
typedef struct MissingEntry {
    int k, step; /* k -1: none */
} MissingEntry;

/* A unit in the registers of a step that is loaded. */
__device__ __forceinline__ ulonglong2 as_pair(const uint4 &x) {
    return ulonglong2{x.x | (unsigned long long)x.y << 32, x.z | (unsigned long long)x.w << 32};
}

__device__ __forceinline__ uint4 as_unit(const ulonglong2 &x) {
    return make_uint4((uint32_t)x.x, (uint32_t)(x.x >> 32), (uint32_t)x.y, (uint32_t)(x.y >> 32));
}

/* Returns where the row of an entry comes. By a warp. */
__device__ __forceinline__ const char *entry_from(const EpLatencyGatherArgs &a,
                                                  const EntriesPart &s, int k, uint64_t flag) {
    const EpLatency &l = a.latency;
    if (EP_SEVERAL_NODES) {
        EpRankPlace at = rank_place(l, max(0, __shfl_sync(~0u, s.owner, k)));
        int place = min(max(__shfl_sync(~0u, s.place, k), 0), l.layout.node_rows - 1);
        char *messages = l.own + l.layout.landing;
        if (!l.nodes.reads_landing) messages = latency_messages(l, l.own, flag);
        if (at.other >= 0)
            return message_place(l, messages, at.other, place) + k * a.steps * EP_STEP_BYTES;
    }
    return latency_entry(l, l.own, k, s.token, flag);
}

/* Sum up and write some steps of a token, or return one that has not arrived in time. By a warp. */
template <typename T, int DONE, int MOST>
__device__ __forceinline__ MissingEntry add_entries(const EpLatencyGatherArgs &a,
                                                    const EntriesPart &s, uint64_t flag) {
    constexpr int STEPS = MOST;
    EpVector<T> sum[STEPS] = {};
    int unit[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        unit[i] = entry_unit(a, s.step + i, s.end);
#pragma unroll 1
    for (unsigned left = s.entries; left;) {
        Incoming<STEPS> c;
        int slot[AWAITED_AT_ONCE];
        c.awaited = 0;
#pragma unroll
        for (int r = 0; r < AWAITED_AT_ONCE; r++) {
            int k = c.rank[r] = left ? __ffs((int)left) - 1 : RANK_NONE;
            left &= left - 1;
            slot[r] = __shfl_sync(~0u, s.slot, k & 31);
            if (k == RANK_NONE || slot[r] >= 0) continue;
            c.from[r] = entry_from(a, s, k, flag) + s.step * EP_STEP_BYTES;
#pragma unroll
            for (int i = 0; i < STEPS; i++)
                if (s.step + i < s.end) c.awaited |= incoming_bit<STEPS>(r, i);
        }
        unsigned missing = receive_incoming(a, &c, flag, [&]() {
#pragma unroll
            for (int r = 0; r < AWAITED_AT_ONCE; r++)
#pragma unroll
                for (int i = 0; i < STEPS; i++)
                    if (slot[r] >= 0)
                        c.x[r][i] = as_pair(load_row_unit<DONE>(unit_address(a, slot[r], unit[i])));
        });
        if (missing) {
            int at = __ffs((int)missing) - 1, k = c.rank[0];
#pragma unroll
            for (int r = 1; r < AWAITED_AT_ONCE; r++)
                if (at / STEPS == r) k = c.rank[r];
            return MissingEntry{k, s.step + at % STEPS};
        }
#pragma unroll
        for (int r = 0; r < AWAITED_AT_ONCE; r++) {
            if (c.rank[r] == RANK_NONE) break;
            float weight = __shfl_sync(~0u, s.weight, c.rank[r] & 31);
            int is_here = 1;
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                uint4 x = as_unit(c.x[r][i]);
                if (slot[r] < 0 && s.step + i < s.end) {
                    x = step_unpack(c.x[r][i]);
                    int from = lane_of_unit(EP_ENTRY_STEP_UNITS);
                    uint32_t sent = __shfl_sync(~0u, x.x, from);
                    is_here = __shfl_sync(~0u, x.y, from) != 0;
                    if (!a.t.weighs_entries) weight = __uint_as_float(sent);
                }
                if (is_here && unit[i] >= 0) ep_add_weighted(&sum[i], weight, ep_unpack<T>(x));
            }
        }
    }
    EpVector<T> total[STEPS] = {};
    add_own<T, STEPS>(sum, total); /* zeros become positive, as in other sums */
    if (a.t.num_biases) add_biases<T, STEPS>(a, s.token, unit, total);
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        if (unit[i] >= 0)
            *((uint4 *)a.t.out_rows + ((int64_t)s.token * a.row_units + unit[i])) =
                ep_pack(total[i]);
    return MissingEntry{-1, 0};
}

/* Wait for a missing step. By a warp, which keeps nothing in registers meanwhile. Returns 0 on
 * timeout. */
__device__ __noinline__ int await_entry(const EpLatencyGatherArgs &a, EntriesPart s, MissingEntry m,
                                        uint64_t flag) {
    const char *from = entry_from(a, s, m.k, flag) + m.step * EP_STEP_BYTES;
    int rank = peer_of(a, max(0, __shfl_sync(~0u, s.owner, m.k)));
    ulonglong2 x = step_load(from);
    return step_await(a.group, a.latency, from, flag, &x,
                      StepOrigin{rank, EP_AWAIT_LINES, s.token});
}

/* Find the entries of a token. A launch that also sends reads this rank's own rows where they lie;
 * otherwise the send phase has put them where other ranks' come. By a warp. */
__device__ __forceinline__ EntriesPart find_entries(const EpLatencyGatherArgs &a, int token,
                                                    int step, const TokenWords &w, uint64_t flag) {
    int lane = threadIdx.x % 32, end = min(step + a.latency.received.steps, a.steps);
    int owner = living_owner(a, w);
    int reads = owner == self(a) && reads_own(a), slot = -1;
    if (reads) slot = ep_check_slot(a.plan, w.slot);
    EntriesPart s = {token, step, end, owner, slot, 1, 0, w.place};
    s.entries = __ballot_sync(~0u, owner >= 0 && (!reads || slot >= 0));
    if (a.t.weighs_entries && owner >= 0)
        s.weight = reads_own(a) ? __ldg(a.t.topk_weights + (token * a.top_k + lane))
                                : kept_weights(a, token, flag)[lane];
    else if (a.carries_weights && slot >= 0)
        s.weight = __ldg(a.t.slot_values + slot);
    unsigned own = __ballot_sync(~0u, slot >= 0);
    if (a.counts && step == 0 && own && lane == 0)
        ep_count_row(a.stats, ep_member(a.group, a.group.rank), __popc(own));
    return s;
}

/* Receive a part of a token of sums by entry; see receive_part. */
template <typename T, int DONE, int MOST>
__device__ __forceinline__ int receive_entries(const EpLatencyGatherArgs &a, int token, int step,
                                               const TokenWords &w, uint64_t flag) {
    EntriesPart s = find_entries(a, token, step, w, flag);
    if (DONE && !await_done(a, s.slot)) return 0;
#pragma unroll 1
    while (s.step < s.end) {
        MissingEntry missing = add_entries<T, DONE, MOST>(a, s, flag);
        if (missing.k < 0) {
            s.step += MOST;
            continue;
        }
        int here = await_entry(a, s, missing, flag);
        if (!here) return 0;
        if (!EP_MASKED || here != STEP_LATE) continue;
        s.owner = drop_late(a, s.owner, flag);
        s.entries &= __ballot_sync(~0u, s.owner >= 0);
    }
    return 1;
}

/* ---- all tokens ---------------------------------------------------------------------------- */

/* Wait for all heads, which show that every rank has sent its sums and is in the same operation. By
 * one block, beginning with the warps that have the fewest parts. */
__device__ void take_heads(const EpLatencyGatherArgs &a, uint64_t flag) {
#pragma unroll 1
    for (int r = LATENCY_WARPS - 1 - (int)(threadIdx.x / 32); r < a.group.size; r += LATENCY_WARPS)
        if (ep_is_alive(r) && !take_head(a.group, a.latency, r, r, 1, flag, a.plan.use.is_read,
                                         [](int, const uint4 &) {}))
            return;
}

/* Receive all tokens, MOST steps at a time. By the receiving blocks. A warp loads the plan's words
 * for its next part while it works on one. */
template <typename T, int FORM, int DONE, int MOST>
__device__ void receive_sums(const EpLatencyGatherArgs &a, const LatencyRole &role, int tokens,
                             uint64_t flag) {
    int warps = role.blocks * LATENCY_WARPS, i = (int)(threadIdx.x / 32) * role.blocks + role.block;
    const EpPartition &partition = a.latency.received;
    TokenWords next = load_token(a, tokens, ep_quotient(i, partition.each));
#pragma unroll 1
    for (; i < count_parts(a); i += warps) {
        int token = ep_quotient(i, partition.each), part = i - token * partition.each.by;
        TokenWords words = next;
        next = load_token(a, tokens, ep_quotient(i + warps, partition.each));
        int step = part * a.latency.received.steps, alive;
        if constexpr (FORM == ENTRIES)
            alive = receive_entries<T, DONE, MOST>(a, token, step, words, flag);
        else
            alive = receive_part<T, FORM, DONE, MOST>(a, token, step, words, flag);
        if (!alive) break;
    }
    if (role.block == role.blocks - 1) take_heads(a, flag);
}

#if EP_MASKED
/* End an operation in which ranks may have been late: parts of a token may have a late rank's
 * sum or not, so all tokens are received again, without these ranks. By all threads of the last
 * block. That takes one step at a time: with more registers here the kernel would keep a ticket in
 * memory, and wait for it. */
template <typename T, int FORM, int DONE>
__device__ __noinline__ void end_late(const EpLatencyGatherArgs &a, int blocks, int tokens,
                                      uint64_t flag) {
    EpLateRanks *late = latency_late(a.latency, flag);
    int t = (int)threadIdx.x;
    int skipped = t < a.group.size ? latency_take_skipped(a.latency, t, flag) : 0;
    if (skipped && skipped != blocks) atomicOr(&late->lost[t / 32], 1u << t % 32);
    __syncthreads();
    if (!latency_leave_late(a.latency, flag)) {
        if (late->since[0] | late->since[1] | late->since[2]) latency_cut(a.group, a.latency, flag);
        return;
    }
    if (ep_failed(a.group)) return;
    receive_sums<T, FORM, DONE, 1>(a, LatencyRole{0, 1, 0, 1}, tokens, flag);
    __syncthreads();
    latency_cut(a.group, a.latency, flag);
}
#endif

/* ==== kernel ================================================================================ */

/* Whether this block looks when heads arrive: the first one, which has nothing else to do after it
 * has sent; or, if it also receives, the last one, whose last warp has the fewest parts. */
__device__ __forceinline__ int observes(const EpLatency &l) {
    return l.receives && blockIdx.x == (l.first_receiver ? 0 : gridDim.x - 1);
}

/* Several nodes: add the sums to the ranks of this node, as sources and as relays, and what this
 * rank sends on as a relay. By a warp. */
__device__ __forceinline__ void count_rows_on_nodes(const EpLatencyGatherArgs &a) {
    const EpLatency &l = a.latency;
    int lane = threadIdx.x % 32;
    if (!a.stats.peer_rows && !a.stats.peer_bytes) return;
#pragma unroll 1
    for (int r = lane; r < num_sources(a); r += 32)
        ep_count_row(a.stats, ep_member(a.group, rank_place(l, r).number),
                     ep_check_count(a.group, a.plan.rows_from[r]));
#pragma unroll 1
    for (int o = lane; o < l.nodes.num_others; o += 32) {
        int peer = other_node(l, o).peer;
        ep_count_row(a.stats, peer, ep_check_count(a.group, a.plan.tokens[peer]));
    }
}

/* Add to the caller's counters; entries are counted one by one. */
template <int FORM>
__device__ __forceinline__ void count(const EpLatencyGatherArgs &a, uint64_t flag) {
    int counts_rows = FORM != ENTRIES && blockIdx.x + threadIdx.x / 32 == 0 && a.latency.senders;
    if (EP_SEVERAL_NODES && counts_rows) count_rows_on_nodes(a);
    if (!EP_SEVERAL_NODES && counts_rows) ep_count_rows(a.group, a.stats, a.plan.rows_from);
    if (observes(a.latency)) latency_measure_heads(a.group, a.latency, a.stats, flag);
}

template <typename T, int FORM, int DONE>
__global__ void __launch_bounds__(LATENCY_THREADS, 1)
    latency_gather_kernel(const __grid_constant__ EpLatencyGatherArgs a) {
    __shared__ int tokens[EP_SEVERAL_NODES ? EP_MAX_RANKS : EP_CUDA_MAX_RANKS];
    LatencyOp op;
    LatencyRole role = latency_role(a.latency);
    latency_begin(a.latency);
    SumPart first = load_first_sum(a);
    if (role.sends && is_all_claimed(a)) claims_begin(a.latency);
#pragma unroll 1
    for (int r = LATENCY_THREADS - 1 - (int)threadIdx.x; r < num_sources(a); r += LATENCY_THREADS) {
        int count = count_source_tokens(a, r); /* both loads are under way together */
        tokens[r] = ep_find_alive(a.group, r) ? count : 0;
    }
    if (!latency_begin_operation(a.group, a.plan, a.latency, &op)) {
        latency_report(a.group, a.plan, a.latency);
        if (EP_SEVERAL_NODES) latency_mark_begin(a.group, a.latency);
        latency_pass(a.group, a.latency, op, latency_ticket(a.latency, op));
        return;
    }
    if (EP_SEVERAL_NODES) latency_mark_begin(a.group, a.latency);
    if (role.sends) send_sums<T, FORM, DONE>(a, tokens, first, op);
    uint32_t ticket = latency_ticket(a.latency, op);
    if (a.counts) count<FORM>(a, op.flag);
    if (role.receives)
        receive_sums<T, FORM, DONE, EP_REDUCED_AT_ONCE>(a, role, tokens[self(a)], op.flag);
#if EP_MASKED
    /* Blocks that only send may wait for weights, or look when heads arrive. */
    int asks = a.latency.awaits_weights || a.counts;
    if (ep_cuts() && role.receives &&
        latency_ends_late(a.group, a.latency, role.blocks, op.flag, asks))
        end_late<T, FORM, DONE>(a, role.blocks, tokens[self(a)], op.flag);
#endif
    latency_pass(a.group, a.latency, op, ticket);
    if (EP_SEVERAL_NODES && role.sends) latency_seal_stamps(a.group, a.latency);
}

#if EP_SEVERAL_NODES
/* ==== relaying ============================================================================== */

/*
 * For each row that this rank has brought from another node, the sum of what the ranks of this node
 * have for it, this rank's own part too: all of them rounded, added in ascending rank from 0, and
 * rounded again. It goes into the place of the row in the message to that node.
 */

/* A part of a row that this rank relays: in lane k the number of entry k's rank on this node, or
 * -1. */
typedef struct RelayPart {
    int other, place, step, owner;
} RelayPart;

/* Returns what a lane of a sending warp has of an even (`odd` 0) or odd step of packed sums, from
 * the pair's units: see "quantised sums". */
__device__ __forceinline__ uint4 pair_codes(const uint4 unit[2], int odd) {
    int lane = threadIdx.x % 32, split = odd ? 4 : EP_PACKED_STEP_UNITS;
    uint4 low = take_unit(unit[0], lane_of_unit(odd ? 24 + lane % 4 : min(lane, split - 1)));
    uint4 high = take_unit(unit[1], lane_of_unit(lane < split ? 0 : lane - split));
    return lane < split ? low : high;
}

/* Add a pair of packed steps to the sums of both. */
template <typename T>
__device__ __forceinline__ void add_pair(const ulonglong2 x[2], int has_odd,
                                         EpVector<T> sum[2 * EpUnit<T>::PARTS]) {
    int block = (int)(threadIdx.x % 32) / 8;
    uint4 unit[2] = {step_unpack(x[0]), step_unpack(x[1])};
#pragma unroll
    for (int odd = 0; odd < 2; odd++) {
        if (odd > has_odd) break;
        uint4 codes = pair_codes(unit, odd);
        uint4 scales = take_unit(unit[odd], lane_of_unit(EP_PACKED_STEP_UNITS));
        float scale = __uint_as_float(block < 2 ? (block ? scales.y : scales.x)
                                                : (block == 2 ? scales.z : scales.w));
#pragma unroll
        for (int p = 0; p < EpUnit<T>::PARTS; p++)
            ep_add(&sum[odd * EpUnit<T>::PARTS + p], ep_dequantise<T>(codes, p, scale));
    }
}

/* Relay two steps of a row. By a warp. Returns 0 on timeout. */
template <typename T, int PACKED>
__device__ __forceinline__ int relay_part(const EpLatencyGatherArgs &a, const RelayPart &s,
                                          uint64_t flag) {
    constexpr int PARTS = StepParts<T, PACKED>::COUNT, STEPS = 2;
    const EpLatency &l = a.latency;
    int last = -1, has_odd = s.step + 1 < a.steps;
    EpVector<T> sum[STEPS * PARTS] = {};
#pragma unroll 1
    while (__any_sync(~0u, s.owner > last)) {
        Incoming<STEPS> c = {};
#pragma unroll
        for (int r = 0; r < AWAITED_AT_ONCE; r++) {
            c.rank[r] = last = next_rank(s.owner, last);
            if (last == RANK_NONE) continue;
            c.from[r] = latency_partial(l, l.own, s.other, last, a.group.size, s.place, flag) +
                        s.step * EP_STEP_BYTES;
            c.awaited |= incoming_bit<STEPS>(r, 0);
            if (has_odd) c.awaited |= incoming_bit<STEPS>(r, 1);
        }
        for (unsigned missing = receive_incoming(a, &c, flag, [] {}); missing;
             missing = receive_incoming(a, &c, flag, [] {})) {
            int at = __ffs((int)missing) - 1, rank = c.rank[0];
            const char *from = c.from[0];
#pragma unroll
            for (int r = 1; r < AWAITED_AT_ONCE; r++)
                if (at / STEPS == r) rank = c.rank[r], from = c.from[r];
            from += at % STEPS * EP_STEP_BYTES;
            ulonglong2 x = step_load(from);
            if (!step_await(a.group, l, from, flag, &x, StepOrigin{rank, EP_AWAIT_LINES, s.place}))
                return 0;
        }
#pragma unroll
        for (int r = 0; r < AWAITED_AT_ONCE; r++) {
            if (c.rank[r] == RANK_NONE) break;
            if constexpr (PACKED) {
                add_pair<T>(c.x[r], has_odd, sum);
            } else {
#pragma unroll
                for (int i = 0; i < STEPS; i++)
                    ep_add(&sum[i], ep_unpack<T>(step_unpack(c.x[r][i])));
            }
        }
    }
    char *to = message_place(l, l.own + l.layout.outgoing, s.other, s.place);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        int step = s.step + i;
        if (step >= a.steps) break;
        int valid = own_unit<T, PACKED>(a.row_units, step, 0, 1) >= 0;
        ulonglong2 packed = step_pack(step_sum<T, PACKED>(sum + i * PARTS, step, valid), flag);
        step_store(to + step * EP_STEP_BYTES, packed, l.whole);
        if (!l.whole) step_fence(), step_store_flag(to + step * EP_STEP_BYTES, flag);
    }
    return 1;
}

/* Relay two steps of an entry's row as they are. By a warp. Returns 0 on timeout. */
__device__ __forceinline__ int relay_entry(const EpLatencyGatherArgs &a, const RelayPart &s, int k,
                                           uint64_t flag) {
    const EpLatency &l = a.latency;
    const char *from = latency_relay_entry(l, l.own, s.other, s.place, k, flag);
    char *to =
        message_place(l, l.own + l.layout.outgoing, s.other, s.place) + k * a.steps * EP_STEP_BYTES;
    const StepOrigin origin = {s.owner, EP_AWAIT_LINES, s.place};
#pragma unroll 1
    for (int step = s.step; step < min(s.step + 2, a.steps); step++) {
        ulonglong2 x = step_load(from + step * EP_STEP_BYTES);
        if (!step_await(a.group, l, from + step * EP_STEP_BYTES, flag, &x, origin)) return 0;
        uint4 unit = step_unpack(x);
        int is_here = __shfl_sync(~0u, unit.y, lane_of_unit(EP_ENTRY_STEP_UNITS)) != 0;
        if (a.counts && step == 0 && is_here && threadIdx.x % 32 == 0)
            ep_count_row(a.stats, other_node(l, s.other).peer, 1);
        step_store(to + step * EP_STEP_BYTES, x, l.whole);
        if (!l.whole) step_fence(), step_store_flag(to + step * EP_STEP_BYTES, flag);
    }
    return 1;
}

template <typename T, int FORM>
__global__ void __launch_bounds__(LATENCY_THREADS, 1)
    latency_relay_kernel(const __grid_constant__ EpLatencyGatherArgs a) {
    __shared__ int rows[EP_MAX_RANKS]; /* of each other node's message */
    __shared__ uint64_t flag;
    const EpLatency &l = a.latency;
    int others = l.nodes.num_others, lane = threadIdx.x % 32, most = 0;
    LatencyOp op;
    ep_grid_wait();
    EpLoadedHeader header = ep_load_header(a.group, a.plan);
    if (threadIdx.x / 32 == OP_WARP && latency_find(l, &op) && lane == 0) flag = op.flag;
#pragma unroll 1
    for (int o = (int)threadIdx.x; o < others; o += LATENCY_THREADS)
        rows[o] = min(count_source_tokens(a, other_node(l, o).peer), l.layout.node_rows);
    if (!ep_begin_operation_as(a.group, a.plan, header, 0)) return; /* as the kernel before */
    if (blockIdx.x == 0) store_message_heads(a, flag, [&](int o) { return rows[o]; });
    for (int o = lane; o < others; o += 32)
        most = max(most, rows[o]);
    most = __reduce_max_sync(~0u, most);
    int entries = FORM == ENTRIES ? a.top_k : 1;
    int pairs = (a.steps + 1) / 2 * entries, warps = (int)gridDim.x * LATENCY_WARPS;
#pragma unroll 1
    for (int i = (int)(threadIdx.x / 32) * (int)gridDim.x + (int)blockIdx.x;
         i < most * others * pairs; i += warps) {
        int row = i / pairs, place = row / others, other = row - place * others;
        if (place >= rows[other]) continue;
        int owner = -1, at = (other * l.layout.node_rows + place) * a.top_k + lane;
        if (lane < a.top_k) owner = a.plan.relay_owners[at];
        int pair = (i - row * pairs) / entries, k = i - row * pairs - pair * entries, alive = 1;
        RelayPart s = {other, place, 2 * pair, owner < a.group.size ? owner : -1};
        if constexpr (FORM == ENTRIES) {
            s.owner = __shfl_sync(~0u, s.owner, k);
            if (s.owner >= 0) alive = relay_entry(a, s, k, flag);
        } else {
            alive = relay_part<T, FORM>(a, s, flag);
        }
        if (!alive) break;
    }
    if (blockIdx.x == 0) {
        await_node(a.group, l, flag);
        __syncthreads();
    }
    latency_seal_stamps(a.group, l);
}

/* ---- weights ------------------------------------------------------------------------------- */

/*
 * Weights that are given at the tokens' ranks cross the network before the sums: a kernel fills
 * messages of lines, another one gives what has come to all ranks of the node, where sums await it.
 */

/* Begin a kernel before the one that sends. Returns whether it may run. By all threads of a
 * block. */
__device__ __forceinline__ int begin_weights(const EpLatencyGatherArgs &a, uint64_t *flag,
                                             int compares) {
    LatencyOp op;
    EpLoadedHeader header = ep_load_header(a.group, a.plan);
    if (threadIdx.x / 32 == OP_WARP && latency_find(a.latency, &op) && threadIdx.x % 32 == 0)
        *flag = op.flag;
    if (compares) latency_compare_stamps(a.latency, 1, &header);
    return ep_begin_operation_as(a.group, a.plan, header, 0);
}

/* Fill the places of one of this rank's tokens. By a warp. */
__device__ __forceinline__ void fill_places(const EpLatencyGatherArgs &a, int token,
                                            uint64_t flag) {
    const EpLatency &l = a.latency;
    int lane = threadIdx.x % 32, other = -1, place = 0;
    ulonglong2 packed = pack_weights(a, token, flag);
    const EpEntry *entry = &a.plan.entries[token * a.top_k + lane];
    if (lane < a.top_k) other = entry->owner, place = entry->row;
    other = (uint32_t)other < (uint32_t)num_sources(a) ? rank_place(l, other).other : -1;
    place = min(max(place, 0), l.layout.node_rows - 1);
#pragma unroll 1
    for (unsigned left = __ballot_sync(~0u, other >= 0); left;) {
        int o = __shfl_sync(~0u, other, __ffs((int)left) - 1);
        int row = __shfl_sync(~0u, place, __ffs((int)left) - 1);
        left &= ~__ballot_sync(~0u, other == o);
        char *to = message_weights(l, l.layout.weights_out, o, row);
        if (lane < lanes_of_group(a)) ((ulonglong2 *)to)[lane] = packed;
    }
}

__global__ void __launch_bounds__(LATENCY_THREADS, 1)
    latency_weights_kernel(const __grid_constant__ EpLatencyGatherArgs a) {
    __shared__ uint64_t flag;
    int alive = begin_weights(a, &flag, 0), tokens = count_source_tokens(a, self(a));
    if (!alive) latency_report(a.group, a.plan, a.latency);
    latency_mark_begin(a.group, a.latency);
#pragma unroll 1
    for (int token = (int)(threadIdx.x / 32) * (int)gridDim.x + (int)blockIdx.x;
         token < tokens && alive; token += (int)gridDim.x * LATENCY_WARPS)
        fill_places(a, token, flag);
}

/* Give the weights of a place to the ranks of this node, with a rank for each group of lanes. By a
 * warp. */
__device__ __forceinline__ void spread_weights(const EpLatencyGatherArgs &a, int other, int place,
                                               uint64_t flag) {
    const EpLatency &l = a.latency;
    int lane = threadIdx.x % 32, lanes = lanes_of_group(a), ranks = a.group.size;
    int source = other_node(l, other).peer;
    const char *from = message_weights(l, l.layout.weights_in, other, place);
    ulonglong2 x = ((const ulonglong2 *)from)[lane % lanes];
#pragma unroll 1
    for (int base = 0; base < ranks; base += 32 / lanes) {
        char *window = l.window[min(base + lane / lanes, ranks - 1)];
        char *to = latency_weights(l, window, source, num_sources(a), place, flag);
        step_store(group_lines(a, to), x, l.whole);
        if (!l.whole) step_fence(), step_store_flag(group_lines(a, to), flag);
    }
}

__global__ void __launch_bounds__(LATENCY_THREADS, 1)
    latency_spread_kernel(const __grid_constant__ EpLatencyGatherArgs a) {
    __shared__ uint64_t flag;
    const EpLatency &l = a.latency;
    int warp = (int)(threadIdx.x / 32) * (int)gridDim.x + (int)blockIdx.x;
    if (!begin_weights(a, &flag, 1)) {
        latency_report_stamps(a.group, l, 1);
        ep_take_messages(l.nodes.marks);
        return;
    }
    ep_take_messages(l.nodes.marks);
#pragma unroll 1
    for (int o = 0; o < l.nodes.num_others; o++) {
        int rows = min(count_source_tokens(a, other_node(l, o).peer), l.layout.node_rows);
#pragma unroll 1
        for (int place = warp; place < rows; place += (int)gridDim.x * LATENCY_WARPS)
            spread_weights(a, o, place, flag);
    }
}

extern "C" int ep_cuda_launch_latency_weights(const void *args, int blocks, void *stream) {
    const EpLatencyGatherArgs *a = (const EpLatencyGatherArgs *)args;
    return ep_launch(latency_weights_kernel, blocks, LATENCY_THREADS, 0, stream, *a);
}

extern "C" int ep_cuda_launch_latency_spread(const void *args, int blocks, void *stream) {
    const EpLatencyGatherArgs *a = (const EpLatencyGatherArgs *)args;
    return ep_launch(latency_spread_kernel, blocks, LATENCY_THREADS, 0, stream, *a);
}

/* ---- launching ----------------------------------------------------------------------------- */

template <typename T>
static int launch_relay(const EpLatencyGatherArgs &a, int blocks, void *stream) {
    auto kernel = a.t.format.bits ? latency_relay_kernel<T, 1> : latency_relay_kernel<T, 0>;
    if (a.t.by_entry) kernel = latency_relay_kernel<T, ENTRIES>;
    return ep_launch_early(kernel, blocks, LATENCY_THREADS, 0, stream, a, a.group.early);
}

extern "C" int ep_cuda_launch_latency_relay(const void *args, int blocks, void *stream) {
    const EpLatencyGatherArgs *a = (const EpLatencyGatherArgs *)args;
    if (a->t.type == EP_TYPE_BF16) return launch_relay<__nv_bfloat16>(*a, blocks, stream);
    if (a->t.type == EP_TYPE_FP16) return launch_relay<__half>(*a, blocks, stream);
    return launch_relay<float>(*a, blocks, stream);
}
#endif

template <typename T>
static decltype(&latency_gather_kernel<T, 0, 0>) kernel_of(int form, int waits) {
    if (form == ENTRIES)
        return waits ? latency_gather_kernel<T, ENTRIES, 1> : latency_gather_kernel<T, ENTRIES, 0>;
    if (form) return waits ? latency_gather_kernel<T, 1, 1> : latency_gather_kernel<T, 1, 0>;
    return waits ? latency_gather_kernel<T, 0, 1> : latency_gather_kernel<T, 0, 0>;
}

/* Each type has kernels of its own: the instruction caches hold the code of one. */
template <typename T> static int open_kernels(int shared_bytes) {
    int error = 0;
    for (int i = 0; i < 6 && !error; i++)
        error = ep_open_kernel(kernel_of<T>(i / 2, i % 2), shared_bytes);
    return error;
}

extern "C" int EP_VARIANT(ep_cuda_open_latency_gather)(int shared_bytes) {
    int error = open_kernels<__nv_bfloat16>(shared_bytes);
    if (!error) error = open_kernels<__half>(shared_bytes);
    return error ? error : open_kernels<float>(shared_bytes);
}

/* Words of blocks are stored while the kernel runs, so it starts after all that is before it. */
template <typename T> static int launch(const EpLatencyGatherArgs &a, int blocks, void *stream) {
    int form = a.t.by_entry ? (int)ENTRIES : a.t.format.bits != 0;
    auto kernel = kernel_of<T>(form, !!a.t.done.words);
    int follows_nccl = EP_SEVERAL_NODES && a.latency.nodes.reads_landing; /* not a kernel alone */
    if (a.t.done.words || follows_nccl)
        return ep_launch(kernel, blocks, LATENCY_THREADS, 0, stream, a);
    return ep_launch_early(kernel, blocks, LATENCY_THREADS, 0, stream, a, a.group.early);
}

extern "C" int EP_VARIANT(ep_cuda_launch_latency_gather)(const void *args, int blocks,
                                                         void *stream) {
    const EpLatencyGatherArgs *a = (const EpLatencyGatherArgs *)args;
    if (a->t.type == EP_TYPE_BF16) return launch<__nv_bfloat16>(*a, blocks, stream);
    if (a->t.type == EP_TYPE_FP16) return launch<__half>(*a, blocks, stream);
    return launch<float>(*a, blocks, stream);
}

EP_VARIANT_END
