/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_LATENCY_FILL_CUH
#define EP_DISPATCH_LATENCY_FILL_CUH

/**
 * The receiving part of latency mode's dispatch: warps wait for the records of all ranks' tokens,
 * several of them for each, and copy rows, weights and scales to their slots.
 */

#include "dispatch/latency_route.cuh"

/* What lane k knows of a record's entry k. */
typedef struct Entry {
    int local; /* expert among this rank's, -1: another's */
    int slot;  /* FLAT: the row's, in each lane with an expert; -1: none */
    float weight;
    char *scales;    /* of its slot, the first */
    unsigned filled; /* lanes whose slots are to be filled: FLAT one of them */
    unsigned mine;   /* lanes with an expert */
} Entry;

/* ---- header -------------------------------------------------------------------------------- */

/* Entry k of a header whose units lie in a warp's lanes: its word, and its weight, if that is
 * there.
 */
typedef struct HeaderWords {
    uint32_t word, weight;
} HeaderWords;

__device__ __forceinline__ HeaderWords header_words(const uint4 &unit, int has_weights, int k) {
    int lane = lane_of_unit(has_weights ? k / 2 : k / 4);
    uint32_t x = __shfl_sync(~0u, unit.x, lane), y = __shfl_sync(~0u, unit.y, lane);
    uint32_t z = __shfl_sync(~0u, unit.z, lane), w = __shfl_sync(~0u, unit.w, lane);
    if (has_weights) return k & 1 ? HeaderWords{z, w} : HeaderWords{x, y};
    return HeaderWords{k & 2 ? (k & 1 ? w : z) : (k & 1 ? y : x), 0};
}

/* The slot of an entry, behind `before` of its source's. */
__device__ __forceinline__ int find_slot(const EpLatencyScatterArgs &a, int source, int local,
                                         int before) {
    int num_local = a.route.shape.num_local;
    int64_t slot = (int64_t)before + desk()->flat_begin[source];
    if (a.route.shape.layout != EP_LAYOUT_FLAT)
        slot = (int64_t)before + desk_offset(a)[local] + desk_counts(a)[source * num_local + local];
    return slot < slot_limit(a.route, local) ? (int)slot : -1;
}

/* By a warp. */
__device__ __forceinline__ Entry read_header(const EpLatencyScatterArgs &a, int source,
                                             const uint4 &unit) {
    int lane = threadIdx.x % 32, k = a.route.top_k;
    HeaderWords h = header_words(unit, a.carries_weights, lane < k ? lane : 0);
    int expert = (int)(h.word & ((1u << a.record.expert_bits) - 1)) - 1;
    Entry e = {-1, -1, __uint_as_float(h.weight), NULL, 0, 0};
    if (lane < k && expert >= 0) e.local = expert - a.first_expert;
    if (e.local >= a.route.shape.num_local || e.local < 0) e.local = -1;
    if (e.local >= 0) e.slot = find_slot(a, source, e.local, (int)(h.word >> a.record.expert_bits));
    if (a.scale_bytes && e.slot >= 0)
        e.scales = a.out_scales + ep_scale_at(&a.scale_map, e.slot, 0);
    e.mine = __ballot_sync(~0u, e.local >= 0);
    e.filled = __ballot_sync(~0u, e.slot >= 0);
    if (a.route.shape.layout == EP_LAYOUT_FLAT) e.filled &= 0u - e.filled; /* the lowest lane */
    return e;
}

/* ---- into the plan and beside the rows ------------------------------------------------------ */

__device__ __forceinline__ int flat_slot(const Entry &e) {
    return __shfl_sync(~0u, e.slot, e.filled ? __ffs((int)e.filled) - 1 : 0);
}

/* By one warp of those that have a record. */
__device__ __forceinline__ void note_row(const EpLatencyScatterArgs &a, const Entry &e, int source,
                                         int token) {
    const EpPrepareArgs &route = a.route;
    int lane = threadIdx.x % 32, flat = route.shape.layout == EP_LAYOUT_FLAT, slot = flat_slot(e);
    int64_t index = (int64_t)source * route.group.layout.max_tokens + token;
    if (lane < route.top_k) route.plan.routes[index * route.top_k + lane] = flat ? e.local : e.slot;
    int row = !e.mine ? EP_ROW_NONE : !flat ? 0 : e.filled ? slot : EP_ROW_LOST;
    if (lane == 0) route.plan.begins[index + source] = row;
}

__device__ __forceinline__ void store_weights(const EpLatencyScatterArgs &a, const Entry &e) {
    int lane = threadIdx.x % 32, k = a.route.top_k;
    if (a.route.shape.layout != EP_LAYOUT_FLAT) {
        if (a.carries_weights && e.slot >= 0) a.out_weights[e.slot] = e.weight;
        return;
    }
    int64_t at = (int64_t)flat_slot(e) * k + lane;
    if (!e.filled || lane >= k) return;
    if (a.carries_weights) a.out_weights[at] = e.local >= 0 ? e.weight : 0;
    store_integer(a.out_idx, at, e.local);
}

/* ---- units --------------------------------------------------------------------------------- */

/* Bytes of scales that are stored at once. */
__device__ __forceinline__ int scale_grain(const EpLatencyScatterArgs &a) {
    int bytes = a.scale_map.by_column ? a.scale_map.element_bytes : (int)a.scale_bytes;
    return bytes % 4 == 0 ? 4 : 1;
}

/* Byte `at` of the scales of a slot; whose elements have a power of two of bytes. */
__device__ __forceinline__ char *scale_to(const EpLatencyScatterArgs &a, char *scales, int at) {
    int bytes = a.scale_map.element_bytes, element = at >> (31 - __clz(bytes));
    if (!a.scale_map.by_column) return scales + at;
    return scales + element * a.scale_map.slab_rows * bytes + (at & (bytes - 1));
}

__device__ __forceinline__ void store_scales(const EpLatencyScatterArgs &a, char *scales, int unit,
                                             const uint4 &x) {
    const uint32_t word[4] = {x.x, x.y, x.z, x.w};
    int grain = scale_grain(a);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int at = unit * 16 + i * 4;
        if (grain == 4 && at < a.scale_bytes) *(uint32_t *)scale_to(a, scales, at) = word[i];
#pragma unroll 1
        for (int b = 0; b < 4 && grain == 1 && at + b < a.scale_bytes; b++)
            *scale_to(a, scales, at + b) = (char)(word[i] >> 8 * b);
    }
}

/* Steps of a record, from `step` to before `end` and no more than x has: this lane's units to all
 * slots. What a slot takes, it takes for all steps at once, since it is the instructions that take
 * the time. */
__device__ __forceinline__ void place_units(const EpLatencyScatterArgs &a, const Entry &e, int step,
                                            int end, const uint4 x[EP_FILLED_AT_ONCE]) {
    unsigned first = (unsigned)(step * EP_STEP_UNITS + step_unit() - a.record.header_units);
    if (step_unit() < 0) first = 0u - EP_STEP_BYTES; /* past every row, and so are those behind */
#pragma unroll 1
    for (unsigned left = e.filled; left; left &= left - 1) {
        int slot = __shfl_sync(~0u, e.slot, __ffs((int)left) - 1);
        uint4 *to = (uint4 *)(a.out_rows + (int64_t)slot * a.row_bytes) + (int)first;
#pragma unroll
        for (int i = 0; i < EP_FILLED_AT_ONCE; i++)
            if (step + i < end && first + i * EP_STEP_UNITS < (unsigned)a.record.row_units)
                to[i * EP_STEP_UNITS] = x[i];
    }
    if (!a.scale_bytes ||
        (step + EP_FILLED_AT_ONCE) * EP_STEP_UNITS <= a.record.header_units + a.record.row_units)
        return;
    first -= (unsigned)a.record.row_units;
#pragma unroll 1
    for (unsigned left = e.filled; left; left &= left - 1) {
        unsigned long long scales = (unsigned long long)e.scales;
        char *to = (char *)__shfl_sync(~0u, scales, __ffs((int)left) - 1);
#pragma unroll
        for (int i = 0; i < EP_FILLED_AT_ONCE; i++)
            if (step + i < end && first + i * EP_STEP_UNITS < (unsigned)a.record.scale_units)
                store_scales(a, to, (int)(first + i * EP_STEP_UNITS), x[i]);
    }
}

/* ---- a record ------------------------------------------------------------------------------ */

/* Of which token a warp has a share, and what of it: steps `step` to before `end`. */
typedef struct Record {
    int source, token, step, end;
} Record;

/* Steps of a record as they may have come: its first one, which has the header, and a warp's. */
typedef struct Fetched {
    ulonglong2 head, x[EP_FILLED_AT_ONCE];
} Fetched;

__device__ __forceinline__ const char *record_from(const EpLatencyScatterArgs &a, const Record &r,
                                                   uint64_t flag) {
    return latency_record(a.latency, a.latency.own, r.source, a.route.group.size, r.token, flag);
}

__device__ __forceinline__ void fetch_steps(const Record &r, const char *from,
                                            ulonglong2 x[EP_FILLED_AT_ONCE]) {
    const char *at = from + r.step * EP_STEP_BYTES;
#pragma unroll
    for (int i = 0; i < EP_FILLED_AT_ONCE; i++)
        if (r.step + i < r.end) x[i] = step_load(at + i * EP_STEP_BYTES);
}

/* Whether all that was loaded has come. */
__device__ __forceinline__ int steps_are_here(const Record &r, uint64_t flag,
                                              const ulonglong2 x[EP_FILLED_AT_ONCE]) {
    int here = 1;
#pragma unroll
    for (int i = 0; i < EP_FILLED_AT_ONCE; i++)
        here &= r.step + i >= r.end || x[i].y == flag;
    return __all_sync(~0u, here || !has_flag());
}

__device__ __forceinline__ Fetched fetch_record(const EpLatencyScatterArgs &a, const Record &r,
                                                uint64_t flag) {
    Fetched f;
    const char *from = record_from(a, r, flag);
    f.head = step_load(from);
    fetch_steps(r, from, f.x);
    return f;
}

/* 0: they do not come. */
__device__ __forceinline__ int await_steps(const EpLatencyScatterArgs &a, const Record &r,
                                           const char *from, uint64_t flag,
                                           ulonglong2 x[EP_FILLED_AT_ONCE]) {
    const StepOrigin origin = {r.source, EP_PHASE_LINES, r.token};
    int alive = 1;
#pragma unroll
    for (int i = 0; i < EP_FILLED_AT_ONCE; i++)
        if (alive && r.step + i < r.end)
            alive = step_await(a.route.group, a.latency, from + (r.step + i) * EP_STEP_BYTES, flag,
                               &x[i], origin);
    return alive;
}

/* A warp's part of a record; 0: it does not come. */
__device__ __forceinline__ int fill_record(const EpLatencyScatterArgs &a, Record r, Fetched f,
                                           uint64_t flag) {
    const char *from = record_from(a, r, flag);
    const StepOrigin origin = {r.source, EP_PHASE_LINES, r.token};
    if (!step_await(a.route.group, a.latency, from, flag, &f.head, origin)) return 0;
    if (!steps_are_here(r, flag, f.x)) fetch_steps(r, from, f.x);
    Entry e = read_header(a, r.source, step_unpack(f.head));
    if (r.step == 0) note_row(a, e, r.source, r.token), store_weights(a, e);
#pragma unroll 1
    while (e.filled) {
        uint4 unit[EP_FILLED_AT_ONCE];
        if (!a.latency.whole || !steps_are_here(r, flag, f.x))
            if (!await_steps(a, r, from, flag, f.x)) return 0;
#pragma unroll
        for (int i = 0; i < EP_FILLED_AT_ONCE; i++)
            unit[i] = step_unpack(f.x[i]);
        place_units(a, e, r.step, r.end, unit);
        r.step += EP_FILLED_AT_ONCE;
        if (r.step >= r.end) break;
        fetch_steps(r, from, f.x);
    }
    return 1;
}

/* ---- all ----------------------------------------------------------------------------------- */

/* How the warps of `blocks` blocks share the records, if no rank has more tokens than this one has
 * rows, which is to be expected; and what may have come of this warp's share `at`, before the heads
 * have. */
typedef struct Filling {
    EpShares shares;
    int warp, warps, at;
    Fetched fetched;
} Filling;

__device__ __forceinline__ Record record_at(const EpLatencyScatterArgs &a, const Filling &f) {
    const EpCudaGroup &g = a.route.group;
    int row = ep_quotient(f.at, f.shares.each), token = ep_quotient(row, a.latency.ranks);
    int source = g.rank + row - token * g.size;
    int step = (f.at - row * f.shares.each.by) * f.shares.steps;
    return Record{source - (source < g.size ? 0 : g.size), token, step,
                  min(step + f.shares.steps, a.record.steps)};
}

__device__ __forceinline__ int has_record(const Filling &f) {
    return f.at < f.shares.rows * f.shares.each.by;
}

__device__ __forceinline__ void begin_share(const EpLatencyScatterArgs &a, Filling *f, int at,
                                            uint64_t flag) {
    f->at = at;
    if (has_record(*f)) f->fetched = fetch_record(a, record_at(a, *f), flag);
}

__device__ __forceinline__ Filling begin_filling(const EpLatencyScatterArgs &a, int block,
                                                 int blocks, uint64_t flag) {
    Filling f;
    f.shares = a.latency.received;
    f.warps = blocks * WARPS, f.warp = (int)(threadIdx.x / 32) * blocks + block;
    begin_share(a, &f, block < blocks ? f.warp : INT32_MAX, flag);
    return f;
}

/* Has more of it come? */
__device__ __forceinline__ void go_on_filling(const EpLatencyScatterArgs &a, Filling *f,
                                              uint64_t flag) {
    if (!has_record(*f)) return;
    Record r = record_at(a, *f);
    const char *from = record_from(a, r, flag);
    if (!step_is_here(f->fetched.head, flag)) f->fetched.head = step_load(from);
    if (!steps_are_here(r, flag, f->fetched.x)) fetch_steps(r, from, f->fetched.x);
}

/* The next share is on its way while one is copied. */
__device__ __forceinline__ int fill_all(const EpLatencyScatterArgs &a, Filling f, uint64_t flag) {
    int most = desk()->most_tokens;
    if (most > a.route.num_rows) {
        f.shares = ep_shares(most * a.route.group.size, a.record.steps, EP_FILLED_AT_ONCE, f.warps);
        begin_share(a, &f, f.warp, flag);
    }
#pragma unroll 1
    while (has_record(f)) {
        Record r = record_at(a, f);
        Fetched fetched = f.fetched;
        begin_share(a, &f, f.at + f.warps, flag);
        if (r.token < desk()->source_tokens[r.source] && !fill_record(a, r, fetched, flag))
            return 0;
    }
    return 1;
}

/* ---- padding ------------------------------------------------------------------------------- */

/* By a warp. */
__device__ __noinline__ void zero_slot(const EpLatencyScatterArgs &a, int64_t slot) {
    int lane = threadIdx.x % 32, k = a.route.top_k, flat = a.route.shape.layout == EP_LAYOUT_FLAT;
    int values = flat ? k : 1, grain = scale_grain(a);
#pragma unroll 1
    for (int at = lane; at < a.record.row_units; at += 32)
        *((uint4 *)(a.out_rows + slot * a.row_bytes) + at) = make_uint4(0, 0, 0, 0);
    if (a.carries_weights && lane < values) a.out_weights[slot * values + lane] = 0;
    if (lane < k) store_integer(a.out_idx, slot * k + lane, -1);
    if (!a.scale_bytes) return;
    char *scales = a.out_scales + ep_scale_at(&a.scale_map, slot, 0);
#pragma unroll 1
    for (int at = lane * grain; at < a.scale_bytes; at += 32 * grain)
#pragma unroll 1
        for (int b = 0; b < grain; b++)
            *(scale_to(a, scales, at) + b) = 0;
}

/* Slots `begin` to `end` of each lane of a warp that is number `warp` of `warps`, which share all
 * of them and are told the same. */
__device__ __forceinline__ void zero_slots(const EpLatencyScatterArgs &a, int64_t begin,
                                           int64_t end, int warp, int warps) {
    int count = (int)max((int64_t)0, end - begin), through = ep_warp_prefix(count);
    int all = __shfl_sync(~0u, through, 31);
#pragma unroll 1
    for (int i = warp; i < all; i += warps) {
        int lane = __popc(__ballot_sync(~0u, through <= i));
        zero_slot(a, __shfl_sync(~0u, begin + i - (through - count), lane));
    }
}

/* Slots of slabs that nobody fills, and what is behind the slabs if that is asked for. */
__device__ __forceinline__ void zero_padding(const EpLatencyScatterArgs &a, int warp, int warps) {
    const EpPrepareArgs &route = a.route;
    const EpPlanShape &s = route.shape;
    int local = s.num_local, batched = s.layout == EP_LAYOUT_BATCHED, lane = threadIdx.x % 32;
    int has_slabs = s.layout != EP_LAYOUT_FLAT && (s.alignment > 1 || (batched && s.zero_tail));
    int64_t end = 0;
#pragma unroll 1
    for (int at = 0; at < local && has_slabs; at += 32) {
        int e = min(at + lane, local - 1), total = desk_total(a)[e];
        int64_t limit = slot_limit(route, e), begin = desk_offset(a)[e];
        int64_t last = min(limit, begin + slab_rows(s, total));
        if (batched && s.zero_tail) last = limit;
        zero_slots(a, begin + total, at + lane < local ? last : 0, warp, warps);
    }
    if (batched || !s.zero_tail) return;
    if (s.layout == EP_LAYOUT_FLAT)
        end = desk()->flat_begin[route.group.size - 1] +
              (int64_t)desk()->source_rows[route.group.size - 1];
    else if (local)
        end = desk_offset(a)[local - 1] + (int64_t)slab_rows(s, desk_total(a)[local - 1]);
    zero_slots(a, min(end, slot_limit(route, 0)), lane == 0 ? a.out_capacity : 0, warp, warps);
}

#endif
