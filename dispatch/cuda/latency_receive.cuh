/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_DISPATCH_CUDA_LATENCY_RECEIVE_CUH
#define EP_DISPATCH_CUDA_LATENCY_RECEIVE_CUH

/**
 * The receiving part of latency mode's dispatch: warps wait for the records of all ranks' tokens,
 * several warps for each record, and copy rows, weights and scales to their slots.
 */

#include "dispatch/cuda/latency_route.cuh"

/* Entry k of a record, in lane k. */
typedef struct Entry {
    int local; /* expert among this rank's, -1: none or another rank's */
    int slot;  /* if rows have one slot: the row's, in each lane with an expert; -1: none */
    float weight;
    char *scales;          /* the first scale of its slot */
    unsigned slot_lanes;   /* lanes whose slots receive the row; one if rows have one slot */
    unsigned expert_lanes; /* lanes with an expert of this rank */
} Entry;

/* ---- header -------------------------------------------------------------------------------- */

/* Entry k of a header whose units lie in a warp's lanes: its word, and its weight if weights
 * travel. */
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

/* Returns the slot of an entry, or -1 beyond the capacity. `before` is the number of the source's
 * earlier entries for the expert (if rows have one slot: of its earlier rows). */
__device__ __forceinline__ int find_slot(const EpLatencyScatterArgs &a, int source, int local,
                                         int before) {
    int num_local = a.route.shape.num_local;
    int64_t slot = (int64_t)before + workspace()->flat_begin[source];
    if (a.route.shape.has_rows) return slot < ep_row_limit(&a.route.shape) ? (int)slot : -1;
    slot = (int64_t)before + workspace_offset(a)[local] +
           workspace_counts(a)[source * num_local + local];
    return slot < ep_slot_limit(&a.route.shape, local) ? (int)slot : -1;
}

/* Read a record's header from this lane's unit of its first step. By a warp. */
__device__ __forceinline__ Entry read_header(const EpLatencyScatterArgs &a, int source,
                                             const uint4 &unit) {
    int lane = threadIdx.x % 32, k = a.route.top_k;
    HeaderWords h = header_words(unit, a.t.carries_weights, lane < k ? lane : 0);
    int expert = (int)(h.word & ((1u << a.record.expert_bits) - 1)) - 1;
    Entry e = {-1, -1, __uint_as_float(h.weight), NULL, 0, 0};
    if (lane < k && expert >= 0) e.local = expert - a.first_expert;
    if (e.local >= a.route.shape.num_local || e.local < 0) e.local = -1;
    if (e.local >= 0) e.slot = find_slot(a, source, e.local, (int)(h.word >> a.record.expert_bits));
    if (scale_bytes_of(a) && e.slot >= 0)
        e.scales = a.t.out_scales + ep_scale_at(&a.t.scale_map, e.slot, 0);
    e.expert_lanes = __ballot_sync(~0u, e.local >= 0);
    e.slot_lanes = __ballot_sync(~0u, e.slot >= 0);
    if (a.route.shape.has_rows) e.slot_lanes &= 0u - e.slot_lanes; /* the lowest lane */
    return e;
}

/* ---- plan and weights ---------------------------------------------------------------------- */

__device__ __forceinline__ int flat_slot(const Entry &e) {
    return __shfl_sync(~0u, e.slot, e.slot_lanes ? __ffs((int)e.slot_lanes) - 1 : 0);
}

/* Store a row's routes and begin into the plan. By one of the warps that share its record. */
__device__ __forceinline__ void store_plan_row(const EpLatencyScatterArgs &a, const Entry &e,
                                               int source, int token) {
    const EpPrepareArgs &route = a.route;
    int lane = threadIdx.x % 32, flat = route.shape.has_rows, slot = flat_slot(e);
    int64_t index = (int64_t)source * route.group.layout.max_tokens + token;
    if (lane < route.top_k) route.plan.routes[index * route.top_k + lane] = flat ? e.local : e.slot;
    int row = !e.expert_lanes ? EP_ROW_NONE : !flat ? 0 : e.slot_lanes ? slot : EP_ROW_LOST;
    if (lane == 0) route.plan.begins[index + source] = row;
}

/* Returns where the experts of rows with one slot go; data is NULL if the caller does not ask for
 * them. */
__device__ __forceinline__ EpCudaVector row_experts(const EpLatencyScatterArgs &a) {
    return EpCudaVector{a.t.out_idx, a.t.idx_type == EP_TYPE_INT64};
}

__device__ __forceinline__ void store_weights(const EpLatencyScatterArgs &a, const Entry &e) {
    int lane = threadIdx.x % 32, k = a.route.top_k;
    if (!a.route.shape.has_rows) {
        if (a.t.carries_weights && e.slot >= 0) a.t.out_weights[e.slot] = e.weight;
        return;
    }
    int64_t at = (int64_t)flat_slot(e) * k + lane;
    if (!e.slot_lanes || lane >= k) return;
    int has_weight = e.local >= 0 || a.route.shape.row_weights == EP_WEIGHTS_ALL;
    if (a.t.carries_weights) a.t.out_weights[at] = has_weight ? e.weight : 0;
    store_integer(row_experts(a), at, e.local >= 0 ? e.local + a.t.first_id : -1);
}

/* ---- units --------------------------------------------------------------------------------- */

/* Returns how many bytes of scales one store writes. */
__device__ __forceinline__ int scale_unit(const EpLatencyScatterArgs &a) {
    int bytes = a.t.scale_map.by_column ? a.t.scale_map.element_bytes : scale_bytes_of(a);
    return bytes % 4 == 0 ? 4 : 1;
}

/* Returns the address of byte `at` of a slot's scales. Elements have a power of two of bytes. */
__device__ __forceinline__ char *scale_to(const EpLatencyScatterArgs &a, char *scales, int at) {
    int bytes = a.t.scale_map.element_bytes, element = at >> (31 - __clz(bytes));
    if (!a.t.scale_map.by_column) return scales + at;
    return scales + element * a.t.scale_map.slab_rows * bytes + (at & (bytes - 1));
}

__device__ __forceinline__ void store_scales(const EpLatencyScatterArgs &a, char *scales, int unit,
                                             const uint4 &x) {
    const uint32_t word[4] = {x.x, x.y, x.z, x.w};
    int unit_bytes = scale_unit(a);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int at = unit * 16 + i * 4;
        if (unit_bytes == 4 && at < scale_bytes_of(a))
            *(uint32_t *)scale_to(a, scales, at) = word[i];
#pragma unroll 1
        for (int b = 0; b < 4 && unit_bytes == 1 && at + b < scale_bytes_of(a); b++)
            *scale_to(a, scales, at + b) = (char)(word[i] >> 8 * b);
    }
}

/* Store this lane's units of steps `step` to before `end`, at most as many as x has, to all slots.
 * Each slot's address is computed once for all steps, since instructions limit the speed. */
__device__ __forceinline__ void store_units(const EpLatencyScatterArgs &a, const Entry &e, int step,
                                            int end, const uint4 x[EP_RECEIVED_AT_ONCE]) {
    unsigned first = (unsigned)(step * EP_STEP_UNITS + step_unit() - a.record.header_units);
    if (step_unit() < 0)
        first = 0u - EP_STEP_BYTES; /* no unit: past the end of every row, in all steps */
#pragma unroll 1
    for (unsigned left = e.slot_lanes; left; left &= left - 1) {
        int slot = __shfl_sync(~0u, e.slot, __ffs((int)left) - 1);
        uint4 *to = (uint4 *)(a.t.out_rows + (int64_t)slot * row_bytes_of(a)) + (int)first;
#pragma unroll
        for (int i = 0; i < EP_RECEIVED_AT_ONCE; i++)
            if (step + i < end && first + i * EP_STEP_UNITS < (unsigned)a.record.row_units)
                to[i * EP_STEP_UNITS] = x[i];
    }
    if (!scale_bytes_of(a) ||
        (step + EP_RECEIVED_AT_ONCE) * EP_STEP_UNITS <= a.record.header_units + a.record.row_units)
        return;
    first -= (unsigned)a.record.row_units;
#pragma unroll 1
    for (unsigned left = e.slot_lanes; left; left &= left - 1) {
        unsigned long long scales = (unsigned long long)e.scales;
        char *to = (char *)__shfl_sync(~0u, scales, __ffs((int)left) - 1);
#pragma unroll
        for (int i = 0; i < EP_RECEIVED_AT_ONCE; i++)
            if (step + i < end && first + i * EP_STEP_UNITS < (unsigned)a.record.scale_units)
                store_scales(a, to, (int)(first + i * EP_STEP_UNITS), x[i]);
    }
}

/* ---- a record ------------------------------------------------------------------------------ */

/* A warp's part of a record: steps `step` to before `end`. */
typedef struct Record {
    int source, token, step, end;
} Record;

/* Steps of a record as loaded, arrived or not: the first one, which has the header, and a
 * warp's. */
typedef struct Fetched {
    ulonglong2 head, x[EP_RECEIVED_AT_ONCE];
} Fetched;

__device__ __forceinline__ const char *record_from(const EpLatencyScatterArgs &a, const Record &r,
                                                   uint64_t flag) {
    return latency_record(a.latency, a.latency.own, r.source, a.route.group.size, r.token, flag);
}

__device__ __forceinline__ void fetch_steps(const Record &r, const char *from,
                                            ulonglong2 x[EP_RECEIVED_AT_ONCE]) {
    const char *at = from + r.step * EP_STEP_BYTES;
#pragma unroll
    for (int i = 0; i < EP_RECEIVED_AT_ONCE; i++)
        if (r.step + i < r.end) x[i] = step_load(at + i * EP_STEP_BYTES);
}

/* Whether all steps of the part have arrived. By a warp. */
__device__ __forceinline__ int steps_are_here(const Record &r, uint64_t flag,
                                              const ulonglong2 x[EP_RECEIVED_AT_ONCE]) {
    int here = 1;
#pragma unroll
    for (int i = 0; i < EP_RECEIVED_AT_ONCE; i++)
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

/* Wait for the steps of a part. By a warp. Returns 0 on timeout. */
__device__ __forceinline__ int await_steps(const EpLatencyScatterArgs &a, const Record &r,
                                           const char *from, uint64_t flag,
                                           ulonglong2 x[EP_RECEIVED_AT_ONCE]) {
    const StepOrigin origin = {r.source, EP_AWAIT_LINES, r.token};
    int alive = 1;
#pragma unroll
    for (int i = 0; i < EP_RECEIVED_AT_ONCE; i++)
        if (alive && r.step + i < r.end)
            alive = step_await(a.route.group, a.latency, from + (r.step + i) * EP_STEP_BYTES, flag,
                               &x[i], origin);
    return alive;
}

/* Receive a warp's part of a record. Returns 0 on timeout. */
__device__ __forceinline__ int receive_record(const EpLatencyScatterArgs &a, Record r, Fetched f,
                                              uint64_t flag) {
    const char *from = record_from(a, r, flag);
    const StepOrigin origin = {r.source, EP_AWAIT_LINES, r.token};
    if (!step_await(a.route.group, a.latency, from, flag, &f.head, origin)) return 0;
    if (!steps_are_here(r, flag, f.x)) fetch_steps(r, from, f.x);
    Entry e = read_header(a, r.source, step_unpack(f.head));
    if (r.step == 0) store_plan_row(a, e, r.source, r.token), store_weights(a, e);
#pragma unroll 1
    while (e.slot_lanes) {
        uint4 unit[EP_RECEIVED_AT_ONCE];
        if (!a.latency.whole || !steps_are_here(r, flag, f.x))
            if (!await_steps(a, r, from, flag, f.x)) return 0;
#pragma unroll
        for (int i = 0; i < EP_RECEIVED_AT_ONCE; i++)
            unit[i] = step_unpack(f.x[i]);
        store_units(a, e, r.step, r.end, unit);
        r.step += EP_RECEIVED_AT_ONCE;
        if (r.step >= r.end) break;
        fetch_steps(r, from, f.x);
    }
    return 1;
}

/* ---- all records --------------------------------------------------------------------------- */

/* A warp's progress through the records. `partition` divides them among the warps of `blocks`
 * blocks, and expects that no rank has more tokens than this one has rows. `fetched` holds part
 * `at`, of which some may have arrived before the heads. */
typedef struct ReceiveState {
    EpPartition partition;
    int warp, warps, at;
    Fetched fetched;
} ReceiveState;

__device__ __forceinline__ Record record_at(const EpLatencyScatterArgs &a, const ReceiveState &s) {
    const EpCudaGroup &g = a.route.group;
    int row = ep_quotient(s.at, s.partition.each), token = ep_quotient(row, a.latency.ranks);
    int source = g.rank + row - token * g.size;
    int step = (s.at - row * s.partition.each.by) * s.partition.steps;
    return Record{source - (source < g.size ? 0 : g.size), token, step,
                  min(step + s.partition.steps, a.record.steps)};
}

__device__ __forceinline__ int has_record(const ReceiveState &s) {
    return s.at < s.partition.rows * s.partition.each.by;
}

__device__ __forceinline__ void begin_part(const EpLatencyScatterArgs &a, ReceiveState *s, int at,
                                           uint64_t flag) {
    s->at = at;
    if (has_record(*s)) s->fetched = fetch_record(a, record_at(a, *s), flag);
}

__device__ __forceinline__ ReceiveState begin_receiving(const EpLatencyScatterArgs &a, int block,
                                                        int blocks, uint64_t flag) {
    ReceiveState s;
    s.partition = a.latency.received;
    s.warps = blocks * LATENCY_WARPS, s.warp = (int)(threadIdx.x / 32) * blocks + block;
    begin_part(a, &s, block < blocks ? s.warp : INT32_MAX, flag);
    return s;
}

/* Load again what had not arrived of the current part. */
__device__ __forceinline__ void refetch_part(const EpLatencyScatterArgs &a, ReceiveState *s,
                                             uint64_t flag) {
    if (!has_record(*s)) return;
    Record r = record_at(a, *s);
    const char *from = record_from(a, r, flag);
    if (!step_is_here(s->fetched.head, flag)) s->fetched.head = step_load(from);
    if (!steps_are_here(r, flag, s->fetched.x)) fetch_steps(r, from, s->fetched.x);
}

/* Receive this warp's parts of all records. The next part is loaded while one is copied. Returns 0
 * on timeout. */
__device__ __forceinline__ int receive_records(const EpLatencyScatterArgs &a, ReceiveState s,
                                               uint64_t flag) {
    int most = workspace()->most_tokens;
    if (most > a.route.num_rows) {
        s.partition =
            ep_partition(most * a.route.group.size, a.record.steps, EP_RECEIVED_AT_ONCE, s.warps);
        begin_part(a, &s, s.warp, flag);
    }
#pragma unroll 1
    while (has_record(s)) {
        Record r = record_at(a, s);
        Fetched fetched = s.fetched;
        begin_part(a, &s, s.at + s.warps, flag);
        if (r.token < workspace()->source_tokens[r.source] && !receive_record(a, r, fetched, flag))
            return 0;
    }
    return 1;
}

/* ---- padding ------------------------------------------------------------------------------- */

/* Zero a slot. By a warp. */
__device__ __noinline__ void zero_slot(const EpLatencyScatterArgs &a, int64_t slot) {
    int lane = threadIdx.x % 32, k = a.route.top_k, flat = a.route.shape.has_rows;
    int values = flat ? k : 1, unit_bytes = scale_unit(a);
    if (lane < k) store_integer(row_experts(a), slot * k + lane, -1);
    if (a.route.shape.tail == EP_TAIL_IDS) return; /* such layouts have no padding but the tail */
#pragma unroll 1
    for (int at = lane; at < a.record.row_units; at += 32)
        *((uint4 *)(a.t.out_rows + slot * row_bytes_of(a)) + at) = make_uint4(0, 0, 0, 0);
    if (a.t.carries_weights && lane < values) a.t.out_weights[slot * values + lane] = 0;
    if (!scale_bytes_of(a)) return;
    char *scales = a.t.out_scales + ep_scale_at(&a.t.scale_map, slot, 0);
#pragma unroll 1
    for (int at = lane * unit_bytes; at < scale_bytes_of(a); at += 32 * unit_bytes)
#pragma unroll 1
        for (int b = 0; b < unit_bytes; b++)
            *(scale_to(a, scales, at) + b) = 0;
}

/* Zero slots `begin` to before `end` of each lane. By `warps` warps that pass the same ranges and
 * divide them; this one is number `warp`. */
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

/* Zero the slots behind each source's rows, in blocks of fixed size. */
__device__ __forceinline__ void zero_source_tails(const EpLatencyScatterArgs &a, int warp,
                                                  int warps) {
    int size = a.route.group.size, lane = threadIdx.x % 32, most = (int)a.route.shape.block_rows;
#pragma unroll 1
    for (int at = 0; at < size; at += 32) {
        int source = min(at + lane, size - 1);
        int64_t begin = workspace()->flat_begin[source], end = at + lane < size ? begin + most : 0;
        zero_slots(a, begin + workspace()->source_rows[source], end, warp, warps);
    }
}

/* Zero the slots of slabs that receive nothing and, on request, the rows behind the slabs. */
__device__ __forceinline__ void zero_padding(const EpLatencyScatterArgs &a, int warp, int warps) {
    const EpPrepareArgs &route = a.route;
    const EpPlanShape &s = route.shape;
    int local = s.num_local, lane = threadIdx.x % 32;
    int keeps = s.padding == EP_PADDING_KEEP, has_tails = s.is_fixed && s.tail == EP_TAIL_ZERO;
    int has_slabs = !s.has_rows && (ep_has_padding(&s) || has_tails);
    int64_t end = 0;
#pragma unroll 1
    for (int at = 0; at < local && has_slabs; at += 32) {
        int e = min(at + lane, local - 1), total = workspace_total(a)[e];
        int64_t limit = ep_slot_limit(&route.shape, e), begin = workspace_offset(a)[e];
        int64_t last = min(limit, begin + ep_slab_rows(&s, total));
        int64_t first = keeps ? last : begin + total;
        if (has_tails) last = limit;
        zero_slots(a, first, at + lane < local ? last : 0, warp, warps);
    }
    if (s.tail == EP_TAIL_KEEP || (s.is_fixed && !s.has_rows)) return;
    if (s.is_fixed) return zero_source_tails(a, warp, warps);
    if (s.has_rows)
        end = workspace()->flat_begin[route.group.size - 1] +
              (int64_t)workspace()->source_rows[route.group.size - 1];
    else if (local)
        end = workspace_offset(a)[local - 1] +
              (int64_t)ep_slab_rows(&s, workspace_total(a)[local - 1]);
    zero_slots(a, min(end, ep_row_limit(&route.shape)), lane == 0 ? a.t.out_capacity : 0, warp,
               warps);
}

#endif
