/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Times a library with NCCL EP's interface: NVIDIA's own, or libep's. The program is the same for
 * both, so its lines can be held side by side.
 *
 *     mpirun -n 2 nccl_ep_bench LIBRARY [name=value ...]
 *
 *     mode=ht|ll  layout=em|flat|rm  tokens=4096  hidden=7168  topk=8  experts=256
 *     alignment=128  sms=0 (the library's default)  windows=0|1  repeat=30  graph=0|1
 *
 * Prints one line: the time of a group's creation in ms; of the first handle and of later ones, in
 * us of the host; of update, dispatch and combine, in us between events on the stream and, for the
 * host, of each call; and the device memory that group and handle take. Each time is the median of
 * `repeat` rounds of the slowest rank.
 */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <mpi.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bindings/nccl_ep/nccl_ep.h"

typedef struct Options {
    const char *library;
    int low_latency, layout, tokens, hidden, topk, experts, alignment, sms, windows, repeat, graph;
} Options;

/* The functions under test. */
static struct {
    __typeof__(&ncclEpGetVersion) version;
    __typeof__(&ncclEpCreateGroup) create_group;
    __typeof__(&ncclEpGroupDestroy) destroy_group;
    __typeof__(&ncclEpCreateHandle) create_handle;
    __typeof__(&ncclEpUpdateHandle) update;
    __typeof__(&ncclEpHandleDestroy) destroy_handle;
    __typeof__(&ncclEpDispatch) dispatch;
    __typeof__(&ncclEpCombine) combine;
} ep;

static struct {
    __typeof__(&ncclGetUniqueId) unique_id;
    __typeof__(&ncclCommInitRank) init;
    __typeof__(&ncclMemAlloc) alloc;
    __typeof__(&ncclCommWindowRegister) register_window;
} nccl;

static int rank, size;

static void die(const char *what, int error) {
    fprintf(stderr, "rank %d: %s: error %d\n", rank, what, error);
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

#define MUST(call)                      \
    do {                                \
        int error_ = (int)(call);       \
        if (error_) die(#call, error_); \
    } while (0)

static void find(void *library, const char *name, void *function) {
    void *symbol = dlsym(library, name);
    if (!symbol) die(name, -1);
    memcpy(function, &symbol, sizeof(symbol));
}

static void load(const char *path) {
    void *system = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    void *library = system ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        die("dlopen", -1);
    }
    find(system, "ncclGetUniqueId", &nccl.unique_id);
    find(system, "ncclCommInitRank", &nccl.init);
    find(system, "ncclMemAlloc", &nccl.alloc);
    find(system, "ncclCommWindowRegister", &nccl.register_window);
    find(library, "ncclEpGetVersion", &ep.version);
    find(library, "ncclEpCreateGroup", &ep.create_group);
    find(library, "ncclEpGroupDestroy", &ep.destroy_group);
    find(library, "ncclEpCreateHandle", &ep.create_handle);
    find(library, "ncclEpUpdateHandle", &ep.update);
    find(library, "ncclEpHandleDestroy", &ep.destroy_handle);
    find(library, "ncclEpDispatch", &ep.dispatch);
    find(library, "ncclEpCombine", &ep.combine);
}

/* ---- times --------------------------------------------------------------------------------- */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Returns the median of the slowest rank's times. */
static double median(double *times, int n) {
    MPI_Allreduce(MPI_IN_PLACE, times, n, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    qsort(times, (size_t)n, sizeof(*times), compare);
    return times[n / 2];
}

static double used_mib(void) {
    size_t left, all;
    MUST(cudaDeviceSynchronize());
    MUST(cudaMemGetInfo(&left, &all));
    return (double)(all - left) / (1 << 20);
}

/* ---- tensors ------------------------------------------------------------------------------- */

typedef struct Tensor {
    ncclEpTensor_t nccl;
    size_t sizes[3];
} Tensor;

static ncclComm_t comm;

static size_t bytes_of(int type) {
    return type == NCCL_INT64 ? 8 : type == NCCL_BFLOAT16 ? 2 : 4;
}

/* Make a tensor of up to three dimensions; sizes of 0 are left out. `window`: peers reach it. */
static ncclEpTensor_t *make(Tensor *t, int type, size_t a, size_t b, size_t c, int window) {
    size_t bytes = a * (b ? b : 1) * (c ? c : 1) * bytes_of(type);
    void *memory = NULL;
    *t = (Tensor){.nccl = {.size = sizeof(t->nccl),
                           .magic = NCCL_EP_TENSOR_MAGIC,
                           .ndim = 1 + (b > 0) + (c > 0),
                           .datatype = type},
                  .sizes = {a, b, c}};
    t->nccl.sizes = t->sizes;
    if (window) {
        bytes = (bytes + (2 << 20) - 1) >> 21 << 21;
        MUST(nccl.alloc(&memory, bytes));
        MUST(nccl.register_window(comm, memory, bytes, (ncclWindow_t *)&t->nccl.win_hdl, 1));
        if (!t->nccl.win_hdl) die("ncclCommWindowRegister gave no window", -1);
    } else {
        MUST(cudaMalloc(&memory, bytes));
        t->nccl.data = memory;
    }
    MUST(cudaMemset(memory, 0, bytes));
    return &t->nccl;
}

/** The tensors of a step, and the structs that calls take. */
typedef struct Step {
    Tensor tensor[16];
    ncclEpTensor_t *idx;
    ncclEpLayoutInfo_t update_info, dispatch_info;
    ncclEpDispatchInputs_t in;
    ncclEpDispatchOutputs_t out;
    ncclEpCombineInputs_t combine_in;
    ncclEpCombineOutputs_t combine_out;
    ncclEpHandle_t handle;
    cudaStream_t stream;
    int low_latency;
} Step;

/* Uniform routing: K experts of each token, none twice. */
static void fill_routing(const Options *o, ncclEpTensor_t *idx) {
    size_t n = (size_t)o->tokens * (size_t)o->topk;
    int64_t *host = malloc(n * sizeof(*host));
    srand((unsigned)rank + 1);
    for (size_t i = 0; i < n; i++) {
        int again = 1;
        while (again) {
            host[i] = rand() % o->experts, again = 0;
            for (size_t j = i / (size_t)o->topk * (size_t)o->topk; j < i; j++)
                again |= host[j] == host[i];
        }
    }
    MUST(cudaMemcpy(idx->data, host, n * sizeof(*host), cudaMemcpyHostToDevice));
    free(host);
}

static size_t capacity_of(const Options *o) {
    size_t local = (size_t)(o->experts / size), all = (size_t)size * (size_t)o->tokens;
    size_t most = (size_t)o->topk < local ? (size_t)o->topk : local;
    return o->layout == NCCL_EP_LAYOUT_FLAT ? all : all * most + local * (size_t)o->alignment;
}

static void make_high_throughput(const Options *o, Step *s) {
    size_t t = (size_t)o->tokens, h = (size_t)o->hidden, k = (size_t)o->topk;
    size_t rows = capacity_of(o), local = (size_t)(o->experts / size);
    int flat = o->layout == NCCL_EP_LAYOUT_FLAT;
    s->update_info.expert_counters = make(s->tensor + 1, NCCL_INT32, local, 0, 0, 0);
    s->update_info.recv_total_counter = make(s->tensor + 2, NCCL_INT32, 1, 0, 0, 0);
    s->in.topk_weights = make(s->tensor + 3, NCCL_FLOAT32, t, k, 0, 0);
    s->out.tokens = make(s->tensor + 4, NCCL_BFLOAT16, rows, h, 0, o->windows);
    s->out.topk_weights = make(s->tensor + 5, NCCL_FLOAT32, rows, flat ? k : 0, 0, 0);
    if (flat) s->out.topk_idx = make(s->tensor + 6, NCCL_INT64, rows, k, 0, 0);
    s->combine_in.tokens = make(s->tensor + 7, NCCL_BFLOAT16, rows, h, 0, o->windows);
}

static void make_low_latency(const Options *o, Step *s) {
    size_t t = (size_t)o->tokens, h = (size_t)o->hidden, k = (size_t)o->topk;
    size_t local = (size_t)(o->experts / size), r = (size_t)size;
    int rank_major = o->layout == NCCL_EP_LAYOUT_RANK_MAJOR;
    size_t blocks = rank_major ? r : local, room = rank_major ? t : r * t;
    ncclEpTensor_t *weights = make(s->tensor + 1, NCCL_FLOAT32, t, k, 0, 0);
    s->out.tokens = make(s->tensor + 2, NCCL_BFLOAT16, blocks, room, h, 0);
    s->combine_in.tokens = make(s->tensor + 3, NCCL_BFLOAT16, blocks, room, h, 0);
    if (rank_major) {
        s->in.topk_weights = weights;
        s->out.topk_weights = make(s->tensor + 4, NCCL_FLOAT32, blocks, room, k, 0);
        s->out.topk_idx = make(s->tensor + 5, NCCL_INT32, blocks, room, k, 0);
        s->dispatch_info.src_rank_counters = make(s->tensor + 6, NCCL_INT32, r, 0, 0, 0);
    } else {
        s->combine_out.topk_weights = weights;
        s->dispatch_info.expert_counters = make(s->tensor + 6, NCCL_INT32, local, 0, 0, 0);
    }
}

#define INIT(field) (field).size = sizeof(field), (field).magic = NCCL_EP_MAGIC

static void make_step(const Options *o, Step *s) {
    size_t t = (size_t)o->tokens, h = (size_t)o->hidden;
    *s = (Step){.low_latency = o->low_latency};
    INIT(s->update_info), INIT(s->dispatch_info), INIT(s->in), INIT(s->out);
    INIT(s->combine_in), INIT(s->combine_out);
    MUST(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking));
    s->idx = make(s->tensor, NCCL_INT64, t, (size_t)o->topk, 0, 0);
    fill_routing(o, s->idx);
    s->in.tokens = make(s->tensor + 8, NCCL_BFLOAT16, t, h, 0, 0);
    s->combine_out.tokens = make(s->tensor + 9, NCCL_BFLOAT16, t, h, 0, 0);
    o->low_latency ? make_low_latency(o, s) : make_high_throughput(o, s);
    MUST(cudaDeviceSynchronize());
}

/* ---- calls --------------------------------------------------------------------------------- */

static void create(const Options *o, ncclEpGroup_t group, Step *s) {
    ncclEpHandleConfig_t config = {sizeof(config), NCCL_EP_MAGIC, (size_t)o->alignment};
    MUST(ep.create_handle(&s->handle, group, o->layout, s->idx,
                          s->low_latency ? NULL : &s->update_info, &config, s->stream));
}

static void update(Step *s) {
    MUST(ep.update(s->handle, s->idx, s->low_latency ? NULL : &s->update_info, s->stream));
}

static void dispatch(Step *s) {
    MUST(ep.dispatch(s->handle, &s->in, &s->out, s->low_latency ? &s->dispatch_info : NULL, NULL,
                     s->stream));
}

static void combine(Step *s) {
    MUST(ep.combine(s->handle, &s->combine_in, &s->combine_out, NULL, s->stream));
}

/** Times of one call: on the device, and of the host. */
typedef struct Times {
    double device, host;
} Times;

/* Returns a graph of the call, or NULL. */
static cudaGraphExec_t capture(Step *s, void (*call)(Step *)) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    MUST(cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeThreadLocal));
    call(s);
    MUST(cudaStreamEndCapture(s->stream, &graph));
    MUST(cudaGraphInstantiate(&exec, graph, 0));
    return exec;
}

/* Each round is the call whose time is taken and, to keep ranks in step, all others. */
static Times time_call(const Options *o, Step *s, int which) {
    void (*const calls[])(Step *) = {update, dispatch, combine};
    int n = o->repeat;
    double *device = calloc((size_t)n, sizeof(*device)), *host = calloc((size_t)n, sizeof(*host));
    cudaEvent_t begin, end;
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
    cudaGraphExec_t exec = o->graph && which ? capture(s, calls[which]) : NULL;
    for (int i = -3; i < n; i++) {
        float ms;
        double called = 0;
        MPI_Barrier(MPI_COMM_WORLD);
        for (int c = 0; c < 3; c++) {
            if (c == which) MUST(cudaEventRecord(begin, s->stream));
            double before = now();
            if (c == which && exec)
                MUST(cudaGraphLaunch(exec, s->stream));
            else
                calls[c](s);
            if (c == which) called = now() - before;
            if (c == which) MUST(cudaEventRecord(end, s->stream));
        }
        MUST(cudaStreamSynchronize(s->stream));
        MUST(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 0) device[i] = (double)ms * 1e3, host[i] = called;
    }
    Times times = {median(device, n), median(host, n)};
    free(device), free(host);
    return times;
}

/* The host's time of making a handle. */
static double time_handles(const Options *o, ncclEpGroup_t group, Step *s, double *first) {
    double *times = calloc((size_t)o->repeat, sizeof(*times));
    for (int i = -1; i < o->repeat; i++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double before = now();
        create(o, group, s);
        double took = now() - before;
        MUST(cudaStreamSynchronize(s->stream));
        if (i < 0) *first = took;
        if (i >= 0) times[i] = took;
        if (i + 1 < o->repeat) MUST(ep.destroy_handle(s->handle));
    }
    double later = median(times, o->repeat);
    free(times);
    return later;
}

/* ---- the program --------------------------------------------------------------------------- */

static Options read_options(int argc, char **argv) {
    Options o = {argc > 1 ? argv[1] : "", 0, 0, 4096, 7168, 8, 256, 128, 0, 0, 30, 0};
    const char *layout = "em";
    struct {
        const char *name;
        int *value;
    } numbers[] = {{"tokens", &o.tokens},       {"hidden", &o.hidden}, {"topk", &o.topk},
                   {"experts", &o.experts},     {"sms", &o.sms},       {"windows", &o.windows},
                   {"alignment", &o.alignment}, {"repeat", &o.repeat}, {"graph", &o.graph}};
    for (int i = 2; i < argc; i++) {
        int known = 0;
        if (!strcmp(argv[i], "mode=ll")) o.low_latency = known = 1;
        if (!strcmp(argv[i], "mode=ht")) known = 1;
        if (!strncmp(argv[i], "layout=", 7)) layout = argv[i] + 7, known = 1;
        for (size_t n = 0; n < sizeof(numbers) / sizeof(*numbers); n++) {
            size_t length = strlen(numbers[n].name);
            if (strncmp(argv[i], numbers[n].name, length) || argv[i][length] != '=') continue;
            *numbers[n].value = atoi(argv[i] + length + 1), known = 1;
        }
        if (!known) die(argv[i], -1);
    }
    o.layout = !strcmp(layout, "flat") ? NCCL_EP_LAYOUT_FLAT
               : !strcmp(layout, "rm") ? NCCL_EP_LAYOUT_RANK_MAJOR
                                       : NCCL_EP_LAYOUT_EXPERT_MAJOR;
    if (o.layout != NCCL_EP_LAYOUT_EXPERT_MAJOR || o.low_latency) o.alignment = 1;
    return o;
}

static ncclEpGroup_t create_group(const Options *o, double *ms) {
    ncclEpGroup_t group;
    ncclEpGroupConfig_t config = {
        .version = 2,
        .algorithm = !o->low_latency,
        .num_experts = (unsigned)o->experts,
        .max_dispatch_tokens_per_rank = (unsigned)o->tokens,
        .max_recv_tokens_per_rank = o->low_latency ? 0 : (unsigned)capacity_of(o),
        .max_token_bytes = (unsigned)o->hidden * 2,
        .max_num_sms = (unsigned)o->sms,
        .zero_copy = o->windows ? NCCL_EP_ZERO_COPY_ON : NCCL_EP_ZERO_COPY_AUTO,
        .num_topk = (unsigned)o->topk};
    INIT(config);
    MPI_Barrier(MPI_COMM_WORLD);
    double before = now();
    MUST(ep.create_group(&group, comm, &config));
    *ms = (now() - before) * 1e-3;
    return group;
}

static void start(void) {
    ncclUniqueId id;
    int devices;
    MUST(cudaGetDeviceCount(&devices));
    MUST(cudaSetDevice(rank % devices));
    if (rank == 0) MUST(nccl.unique_id(&id));
    MPI_Bcast(&id, sizeof(id), MPI_BYTE, 0, MPI_COMM_WORLD);
    MUST(nccl.init(&comm, size, id, rank));
}

int main(int argc, char **argv) {
    Step s;
    double group_ms = 0, first = 0, before_mib;
    int version = 0;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    Options o = read_options(argc, argv);
    load(o.library);
    start();
    make_step(&o, &s);
    MUST(ep.version(&version));
    before_mib = used_mib();
    ncclEpGroup_t group = create_group(&o, &group_ms);
    double handle = time_handles(&o, group, &s, &first), took = used_mib() - before_mib;
    Times updates = time_call(&o, &s, 0), dispatches = time_call(&o, &s, 1);
    Times combines = time_call(&o, &s, 2);
    if (rank == 0)
        printf(
            "version %d, %d ranks, %s, layout %d, %d tokens, %d sms, windows %d, graph %d: group "
            "%.0f ms, first handle %.0f us, handle %.1f us, update %.1f (host %.1f), dispatch "
            "%.1f (host %.1f), combine %.1f (host %.1f) us, %.0f MiB\n",
            version, size, o.low_latency ? "ll" : "ht", o.layout, o.tokens, o.sms, o.windows,
            o.graph, group_ms, first, handle, updates.device, updates.host, dispatches.device,
            dispatches.host, combines.device, combines.host, took);
    MUST(ep.destroy_handle(s.handle));
    MUST(ep.destroy_group(group));
    MPI_Finalize();
    return 0;
}
