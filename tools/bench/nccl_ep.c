/* SPDX-License-Identifier: Apache-2.0 */

/**
 * --nccl-ep LIBRARY: any library with NCCL EP's interface, NVIDIA's own or libep's drop-in. The
 * code is the same for both, so their lines can be held side by side. Nothing of libep moves a byte
 * here: the ranks meet by its bootstrap, and the clock is ep_bench's own.
 */

#if EP_WITH_CUDA

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

/* The interface, as NVIDIA's header has it. */
#include <nccl_ep.h>

#include "tools/bench/device.h"
#include "tools/bench/lines.h"
#include "tools/bench/nccl.h"

enum { MAX_TENSORS = 16 };

typedef struct Tensor {
    ncclEpTensor_t nccl;
    size_t sizes[3];
    void *memory;
} Tensor;

typedef struct Library {
    Case c; /* its stream, its clock and its routing alone */
    Lines lines;
    Nccl nccl;
    __typeof__(&ncclMemAlloc) mem_alloc;
    __typeof__(&ncclCommWindowRegister) register_window;
    /* the functions under test */
    __typeof__(&ncclEpGetVersion) version;
    __typeof__(&ncclEpCreateGroup) create_group;
    __typeof__(&ncclEpGroupDestroy) destroy_group;
    __typeof__(&ncclEpCreateHandle) create_handle;
    __typeof__(&ncclEpUpdateHandle) update;
    __typeof__(&ncclEpHandleDestroy) destroy_handle;
    __typeof__(&ncclEpDispatch) dispatch;
    __typeof__(&ncclEpCombine) combine;
    /* a step */
    bool low_latency;
    int layout;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    Tensor tensors[MAX_TENSORS];
    int count;
    double took_us; /* by the host, to create the last handle */
    ncclEpTensor_t *idx;
    ncclEpLayoutInfo_t update_info, dispatch_info;
    ncclEpDispatchInputs_t in;
    ncclEpDispatchOutputs_t out;
    ncclEpCombineInputs_t combine_in;
    ncclEpCombineOutputs_t combine_out;
} Library;

static bool ep_ok(int result, const char *call) {
    return result == 0 || bench_fail("%s: error %d", call, result);
}

static bool load(Library *l) {
    void *ep = dlopen(l->c.options->nccl_ep, RTLD_NOW | RTLD_LOCAL), *nccl = l->nccl.library;
    if (!ep) return bench_refuse("--nccl-ep: expected a library, got: %s", dlerror());
    return library_find(nccl, "ncclMemAlloc", &l->mem_alloc) &&
           library_find(nccl, "ncclCommWindowRegister", &l->register_window) &&
           library_find(ep, "ncclEpGetVersion", &l->version) &&
           library_find(ep, "ncclEpCreateGroup", &l->create_group) &&
           library_find(ep, "ncclEpGroupDestroy", &l->destroy_group) &&
           library_find(ep, "ncclEpCreateHandle", &l->create_handle) &&
           library_find(ep, "ncclEpUpdateHandle", &l->update) &&
           library_find(ep, "ncclEpHandleDestroy", &l->destroy_handle) &&
           library_find(ep, "ncclEpDispatch", &l->dispatch) &&
           library_find(ep, "ncclEpCombine", &l->combine);
}

/* ---- tensors ------------------------------------------------------------------------------- */

static size_t bytes_of(int type) {
    return type == NCCL_INT64 ? 8 : type == NCCL_BFLOAT16 ? 2 : 4;
}

static bool give_memory(Library *l, Tensor *t, size_t bytes, bool window) {
    bool ok;
    if (!window) {
        ok = cuda_ok(cudaMalloc(&t->memory, bytes), "cudaMalloc");
        t->nccl.data = t->memory;
    } else {
        bytes = (bytes + (2 << 20) - 1) >> 21 << 21;
        ok = nccl_ok(&l->nccl, l->mem_alloc(&t->memory, bytes), "ncclMemAlloc") &&
             nccl_ok(&l->nccl,
                     l->register_window(l->nccl.comm, t->memory, bytes,
                                        (ncclWindow_t *)&t->nccl.win_hdl, 1),
                     "ncclCommWindowRegister");
        if (ok && !t->nccl.win_hdl) ok = bench_fail("ncclCommWindowRegister: expected a window");
    }
    return ok && cuda_ok(cudaMemset(t->memory, 0, bytes), "cudaMemset");
}

/* Make a tensor of up to three dimensions; sizes of 0 are left out. `window`: peers reach it. */
static bool make(Library *l, ncclEpTensor_t **out, int type, size_t a, size_t b, size_t c,
                 bool window) {
    Tensor *t = &l->tensors[l->count++];
    *t = (Tensor){.nccl = {.size = sizeof(t->nccl),
                           .magic = NCCL_EP_TENSOR_MAGIC,
                           .ndim = 1 + (b > 0) + (c > 0),
                           .datatype = type},
                  .sizes = {a, b, c}};
    t->nccl.sizes = t->sizes;
    *out = &t->nccl;
    return give_memory(l, t, a * (b ? b : 1) * (c ? c : 1) * bytes_of(type), window);
}

static size_t capacity_of(const Library *l) {
    const Options *o = l->c.options;
    const size_t local = (size_t)(o->experts / l->c.world->size), k = (size_t)o->top_k;
    const size_t all = (size_t)l->c.world->size * (size_t)o->tokens_end;
    const size_t most = k < local ? k : local;
    return l->layout == NCCL_EP_LAYOUT_FLAT ? all : all * most + local * (size_t)o->alignment;
}

static bool make_high_throughput(Library *l) {
    const Options *o = l->c.options;
    const size_t t = (size_t)o->tokens_end, h = (size_t)o->hidden, k = (size_t)o->top_k;
    const size_t rows = capacity_of(l), local = (size_t)(o->experts / l->c.world->size);
    const bool flat = l->layout == NCCL_EP_LAYOUT_FLAT, windows = o->zero_copy;
    return make(l, &l->update_info.expert_counters, NCCL_INT32, local, 0, 0, false) &&
           make(l, &l->update_info.recv_total_counter, NCCL_INT32, 1, 0, 0, false) &&
           make(l, &l->in.topk_weights, NCCL_FLOAT32, t, k, 0, false) &&
           make(l, &l->out.tokens, NCCL_BFLOAT16, rows, h, 0, windows) &&
           make(l, &l->out.topk_weights, NCCL_FLOAT32, rows, flat ? k : 0, 0, false) &&
           (!flat || make(l, &l->out.topk_idx, NCCL_INT64, rows, k, 0, false)) &&
           make(l, &l->combine_in.tokens, NCCL_BFLOAT16, rows, h, 0, windows);
}

static bool make_low_latency(Library *l) {
    const Options *o = l->c.options;
    const size_t t = (size_t)o->tokens_end, h = (size_t)o->hidden, k = (size_t)o->top_k;
    const size_t r = (size_t)l->c.world->size, local = (size_t)o->experts / r;
    const bool by_rank = l->layout == NCCL_EP_LAYOUT_RANK_MAJOR;
    const size_t blocks = by_rank ? r : local, room = by_rank ? t : r * t;
    ncclEpTensor_t *weights;
    if (!make(l, &weights, NCCL_FLOAT32, t, k, 0, false) ||
        !make(l, &l->out.tokens, NCCL_BFLOAT16, blocks, room, h, false) ||
        !make(l, &l->combine_in.tokens, NCCL_BFLOAT16, blocks, room, h, false))
        return false;
    if (!by_rank) {
        l->combine_out.topk_weights = weights;
        return make(l, &l->dispatch_info.expert_counters, NCCL_INT32, local, 0, 0, false);
    }
    l->in.topk_weights = weights;
    return make(l, &l->out.topk_weights, NCCL_FLOAT32, blocks, room, k, false) &&
           make(l, &l->out.topk_idx, NCCL_INT32, blocks, room, k, false) &&
           make(l, &l->dispatch_info.src_rank_counters, NCCL_INT32, r, 0, 0, false);
}

/* The routing of ep_bench's steps; 64-bit, as NCCL EP takes it. */
static bool fill_routing(Library *l) {
    const Options *o = l->c.options;
    const size_t n = (size_t)(o->tokens_end * o->top_k);
    int64_t *host = bench_alloc(n, sizeof(*host), "routing");
    const int32_t *from = routing_row(&l->c.routing, l->c.world->rank, 0);
    for (size_t i = 0; host && i < n; i++)
        host[i] = from[i];
    bool ok =
        host && cuda_ok(cudaMemcpy(l->idx->data, host, n * sizeof(*host), cudaMemcpyHostToDevice),
                        "cudaMemcpy");
    free(host);
    return ok;
}

#define INIT(field) (field).size = sizeof(field), (field).magic = NCCL_EP_MAGIC

static bool make_step(Library *l) {
    const size_t t = (size_t)l->c.options->tokens_end, h = (size_t)l->c.options->hidden;
    INIT(l->update_info), INIT(l->dispatch_info), INIT(l->in), INIT(l->out);
    INIT(l->combine_in), INIT(l->combine_out);
    return make(l, &l->idx, NCCL_INT64, t, (size_t)l->c.options->top_k, 0, false) &&
           fill_routing(l) && make(l, &l->in.tokens, NCCL_BFLOAT16, t, h, 0, false) &&
           make(l, &l->combine_out.tokens, NCCL_BFLOAT16, t, h, 0, false) &&
           (l->low_latency ? make_low_latency(l) : make_high_throughput(l)) &&
           cuda_ok(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

/* ---- calls --------------------------------------------------------------------------------- */

static bool create(Library *l) {
    const size_t alignment = (size_t)l->c.options->alignment;
    ncclEpHandleConfig_t config = {sizeof(config), NCCL_EP_MAGIC, alignment};
    return ep_ok(l->create_handle(&l->handle, l->group, l->layout, l->idx,
                                  l->low_latency ? NULL : &l->update_info, &config, l->c.stream),
                 "ncclEpCreateHandle");
}

enum { UPDATE, DISPATCH, COMBINE, NUM_CALLS };
static const char *const names[] = {"update", "dispatch", "combine"};

static bool run(void *context, int which) {
    Library *l = context;
    if (which == UPDATE)
        return ep_ok(
            l->update(l->handle, l->idx, l->low_latency ? NULL : &l->update_info, l->c.stream),
            "ncclEpUpdateHandle");
    if (which == DISPATCH)
        return ep_ok(l->dispatch(l->handle, &l->in, &l->out,
                                 l->low_latency ? &l->dispatch_info : NULL, NULL, l->c.stream),
                     "ncclEpDispatch");
    return ep_ok(l->combine(l->handle, &l->combine_in, &l->combine_out, NULL, l->c.stream),
                 "ncclEpCombine");
}

/* Dispatch and combine, of the handle's last update. */
static bool run_in_graph(void *context, int which) {
    return run(context, DISPATCH + which);
}

/* A handle; the one before goes. */
static bool renew_handle(void *context, int which) {
    Library *l = context;
    (void)which;
    if (!cuda_ok(cudaStreamSynchronize(l->c.stream), "cudaStreamSynchronize") ||
        !ep_ok(l->destroy_handle(l->handle), "ncclEpHandleDestroy"))
        return false;
    l->handle = NULL;
    double before = time_now_us();
    bool ok = create(l);
    l->took_us = time_now_us() - before;
    return ok;
}

static double took(void *context) {
    return ((Library *)context)->took_us;
}

/* ---- measuring ----------------------------------------------------------------------------- */

static bool used_mib(double *out) {
    size_t left, all;
    if (!cuda_ok(cudaDeviceSynchronize(), "cudaDeviceSynchronize") ||
        !cuda_ok(cudaMemGetInfo(&left, &all), "cudaMemGetInfo"))
        return false;
    *out = (double)(all - left) / (1 << 20);
    return true;
}

static void add(Library *l, const char *name, const char *unit, double value) {
    lines_add(&l->lines, name, unit, (Quantiles){value, value}, -1, 0);
}

static bool measure_group(Library *l) {
    const Options *o = l->c.options;
    double before_mib = 0, mib = 0, ms[2];
    ncclEpGroupConfig_t config = {
        .version = 2,
        .algorithm = !l->low_latency,
        .num_experts = (unsigned)o->experts,
        .max_dispatch_tokens_per_rank = (unsigned)o->tokens_end,
        .max_recv_tokens_per_rank = l->low_latency ? 0 : (unsigned)capacity_of(l),
        .max_token_bytes = (unsigned)o->hidden * 2,
        .max_num_sms = (unsigned)o->num_sms,
        .zero_copy = o->zero_copy ? NCCL_EP_ZERO_COPY_ON : NCCL_EP_ZERO_COPY_AUTO,
        .num_topk = (unsigned)o->top_k};
    INIT(config);
    if (!world_all(l->c.world, used_mib(&before_mib))) return false;
    double start = time_now_us();
    bool ok = ep_ok(l->create_group(&l->group, l->nccl.comm, &config), "ncclEpCreateGroup");
    ms[0] = (time_now_us() - start) * 1e-3;
    if (!world_all(l->c.world, ok)) return false;
    start = time_now_us();
    ok = create(l);
    ms[1] = time_now_us() - start;
    if (!world_all(l->c.world, ok && used_mib(&mib)) || !world_max_double(l->c.world, ms, 2))
        return false;
    add(l, "group", "ms", ms[0]);
    add(l, "first handle, host", "us", ms[1]);
    add(l, "memory of group and handle", "MiB", mib - before_mib);
    return true;
}

static bool measure_handles(Library *l) {
    Quantiles time;
    const RunOptions *o = &l->c.options->run;
    if (!time_calls_by(l->c.world, 1, o->iterations, renew_handle, took, l, 1, &time)) return false;
    lines_add(&l->lines, "handle, host", "us", time, -1, 0);
    return true;
}

static bool measure_calls(Library *l) {
    Quantiles times[NUM_CALLS];
    double host_us[NUM_CALLS];
    const Options *o = l->c.options;
    if (!device_time_calls(&l->c, o->run.iterations, run, l, NUM_CALLS, times, host_us))
        return false;
    for (int i = 0; i < NUM_CALLS; i++)
        lines_add(&l->lines, names[i], "us", times[i], host_us[i], 0);
    if (!o->graphs) return true;
    if (!device_time_graphs(&l->c, run_in_graph, l, 2, times)) return false;
    lines_add(&l->lines, "dispatch in graphs", "us", times[0], -1, 0);
    lines_add(&l->lines, "combine in graphs", "us", times[1], -1, 0);
    return true;
}

static bool measure(Library *l) {
    int version = 0;
    if (!world_all(l->c.world, ep_ok(l->version(&version), "ncclEpGetVersion") && make_step(l)) ||
        !measure_group(l))
        return false;
    add(l, "version", "", version);
    return measure_handles(l) && measure_calls(l) && lines_end(&l->lines);
}

static void destroy(Library *l) {
    if (l->handle) l->destroy_handle(l->handle);
    if (l->group) l->destroy_group(l->group);
    /* Memory of windows goes with the process: peers may still have it mapped. */
    for (int i = 0; i < l->count; i++)
        if (!l->tensors[i].nccl.win_hdl) cudaFree(l->tensors[i].memory);
    nccl_close(&l->nccl);
    routing_free(&l->c.routing);
    if (l->c.device) device_destroy(&l->c);
}

bool nccl_ep_case(World *world, const Options *options) {
    char about[512];
    Library l = {.c = {.world = world, .options = options}};
    l.low_latency = options->mode == EP_MODE_LATENCY;
    l.layout = options->layout == EP_LAYOUT_FLAT         ? NCCL_EP_LAYOUT_FLAT
               : options->layout == EP_LAYOUT_RANK_MAJOR ? NCCL_EP_LAYOUT_RANK_MAJOR
                                                         : NCCL_EP_LAYOUT_EXPERT_MAJOR;
    snprintf(about, sizeof(about),
             "%s, %s, layout %s, %lld tokens, hidden %lld, top-%lld of %lld%s", options->nccl_ep,
             options_name(options, "mode"), options_name(options, "layout"),
             (long long)options->tokens_end, (long long)options->hidden, (long long)options->top_k,
             (long long)options->experts, options->zero_copy ? ", windows" : "");
    bool ok = gpu_select(world) && device_open(&l.c) &&
              routing_make(world, options, options->tokens_end, &l.c.routing) &&
              nccl_open(world, &l.nccl) && world_all(world, load(&l)) &&
              lines_begin(&l.lines, world, options, about) && measure(&l);
    if (!world->broken) destroy(&l);
    return ok;
}

#endif
