/* SPDX-License-Identifier: Apache-2.0 */

/**
 * The layer's arithmetic on GPUs, apart from GEMMs. Plain kernels: a warp for each row where a row
 * is reduced, a thread for each element elsewhere. Nothing waits for another block, so any number
 * of blocks is right.
 */

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>

#ifndef EP_WITH_CUDA
#define EP_WITH_CUDA 1
#endif
extern "C" {
#include "tools/common/gpu.h"
#include "tools/moe/cuda_state.h"
}
#include "tools/moe/elements.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define ALL_LANES 0xffffffffu

static __device__ __forceinline__ float warp_sum(float x) {
    for (int by = 16; by > 0; by /= 2)
        x += __shfl_xor_sync(ALL_LANES, x, by);
    return x;
}

static __device__ __forceinline__ int64_t warp_row(void) {
    return (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
}

static unsigned blocks_of(int64_t work, int64_t each) {
    return (unsigned)((work + each - 1) / each);
}

/* ---- router -------------------------------------------------------------------------------- */

/* A lane's logits, of experts lane, lane + 32, ...: in registers, or in memory. */
template <int COUNT> struct Logits {
    float x[COUNT];
    static __device__ __forceinline__ int count(int32_t) {
        return COUNT;
    }
    __device__ __forceinline__ Logits(const float *row, int32_t experts) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int32_t e = (int32_t)threadIdx.x % 32 + 32 * i;
            x[i] = e < experts ? row[e] : -INFINITY;
        }
    }
    __device__ __forceinline__ float at(int i) const {
        return x[i];
    }
};

template <> struct Logits<0> {
    const float *row;
    static __device__ __forceinline__ int count(int32_t experts) {
        return (experts - (int32_t)threadIdx.x % 32 + 31) / 32;
    }
    __device__ __forceinline__ Logits(const float *given, int32_t) : row(given) {}
    __device__ __forceinline__ float at(int i) const {
        return row[threadIdx.x % 32 + 32 * i];
    }
};

/* The first expert after (value, expert) in descending order of logits, of equal ones in ascending
 * order of experts; every lane gets it. */
template <int COUNT>
static __device__ __forceinline__ int32_t find_next(const Logits<COUNT> &logits, int32_t experts,
                                                    float *value, int32_t expert) {
    const float last = *value;
    float best = -INFINITY;
    int32_t at = experts;
#pragma unroll
    for (int i = 0; i < Logits<COUNT>::count(experts); i++) {
        const int32_t e = (int32_t)threadIdx.x % 32 + 32 * i;
        const float x = logits.at(i);
        const bool after = e < experts && (x < last || (x == last && e > expert));
        if (after && (x > best || at == experts)) best = x, at = e;
    }
    for (int by = 16; by > 0; by /= 2) {
        const float x = __shfl_xor_sync(ALL_LANES, best, by);
        const int32_t e = __shfl_xor_sync(ALL_LANES, at, by);
        if (e < experts && (at == experts || x > best || (x == best && e < at))) best = x, at = e;
    }
    *value = best;
    return at;
}

struct ChooseArgs {
    float *p; /* [tokens, experts] */
    int32_t *idx;
    float *weights; /* [tokens, k] */
    int64_t tokens;
    int32_t experts, k; /* k <= 32 */
};

template <int COUNT>
static __global__ void __launch_bounds__(THREADS) choose(const __grid_constant__ ChooseArgs a) {
    const int64_t t = warp_row();
    const int32_t lane = (int32_t)threadIdx.x % 32;
    if (t >= a.tokens) return;
    float *row = a.p + t * a.experts;
    const Logits<COUNT> logits(row, a.experts);
    float value = INFINITY, most = 0, sum = 0;
    int32_t expert = -1, mine = 0;
    for (int32_t i = 0; i < a.k; i++) {
        expert = find_next(logits, a.experts, &value, expert);
        if (i == 0) most = value;
        if (i == lane) mine = expert;
    }
    for (int32_t e = lane; e < a.experts; e += 32)
        sum += expf(row[e] - most);
    sum = warp_sum(sum);
    /* Each lane reads its expert's logit before any lane overwrites logits. */
    const bool valid = lane < a.k && mine < a.experts;
    const float weight = valid ? expf(row[mine] - most) / sum : 0;
    __syncwarp();
    for (int32_t e = lane; e < a.experts; e += 32)
        row[e] = expf(row[e] - most) / sum;
    if (lane >= a.k) return;
    a.idx[t * a.k + lane] = mine;
    a.weights[t * a.k + lane] = weight;
}

bool cuda_choose(MoeDevice *d, const EpTensor *p, const EpTensor *idx, const EpTensor *weights) {
    ChooseArgs args = {(float *)p->data, (int32_t *)idx->data, (float *)weights->data,
                       p->shape[0],      (int32_t)p->shape[1], (int32_t)idx->shape[1]};
    if (args.tokens == 0) return true;
    auto kernel = args.experts <= 128 ? choose<4> : args.experts <= 512 ? choose<16> : choose<0>;
    kernel<<<blocks_of(args.tokens, WARPS), THREADS, 0, cuda_stream_of(d)>>>(args);
    return cuda_ok(cudaGetLastError(), "choosing experts");
}

struct ChooseBackwardArgs {
    const float *p, *grad_weights;
    const int32_t *idx;
    void *grad;
    EpType type; /* of grad */
    int64_t tokens;
    int32_t experts, k;
};

static __global__ void __launch_bounds__(THREADS)
    choose_backward(const __grid_constant__ ChooseBackwardArgs a) {
    const int64_t t = warp_row();
    const int32_t lane = (int32_t)threadIdx.x % 32;
    if (t >= a.tokens) return;
    const float *row = a.p + t * a.experts;
    float part = 0;
    const int32_t mine = lane < a.k ? a.idx[t * a.k + lane] : 0;
    if (lane < a.k) part = row[mine] * a.grad_weights[t * a.k + lane];
    const float mean = warp_sum(part);
    for (int32_t e = lane; e < a.experts; e += 32)
        store_as(a.type, a.grad, t * a.experts + e, -row[e] * mean);
    __syncwarp();
    if (lane < a.k) store_as(a.type, a.grad, t * a.experts + mine, -row[mine] * mean + part);
}

bool cuda_choose_backward(MoeDevice *d, const EpTensor *p, const EpTensor *idx,
                          const EpTensor *grad_weights, const EpTensor *grad) {
    ChooseBackwardArgs args = {(const float *)p->data,
                               (const float *)grad_weights->data,
                               (const int32_t *)idx->data,
                               grad->data,
                               grad->type,
                               p->shape[0],
                               (int32_t)p->shape[1],
                               (int32_t)idx->shape[1]};
    if (args.tokens == 0) return true;
    choose_backward<<<blocks_of(args.tokens, WARPS), THREADS, 0, cuda_stream_of(d)>>>(args);
    return cuda_ok(cudaGetLastError(), "the router's gradient");
}

/* ---- conversion ---------------------------------------------------------------------------- */

/* to = from, converted by way of fp32. */
struct ConvertArgs {
    const void *from;
    void *to;
    EpType from_type, to_type;
    int64_t count;
};

static __global__ void __launch_bounds__(THREADS) convert(const __grid_constant__ ConvertArgs a) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < a.count) store_as(a.to_type, a.to, i, load_as(a.from_type, a.from, i));
}

bool cuda_convert(MoeDevice *d, const EpTensor *from, const EpTensor *to) {
    ConvertArgs args = {from->data, to->data, from->type, to->type, tensor_elements(from)};
    if (args.count == 0) return true;
    convert<<<blocks_of(args.count, THREADS), THREADS, 0, cuda_stream_of(d)>>>(args);
    return cuda_ok(cudaGetLastError(), "converting");
}

/* ---- sums ---------------------------------------------------------------------------------- */

struct AddPartsArgs {
    const float *in; /* [parts, count] */
    float *out;
    int64_t count;
    int parts;
};

static __global__ void __launch_bounds__(THREADS)
    add_parts(const __grid_constant__ AddPartsArgs a) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    float sum = 0;
    if (i >= a.count) return;
#pragma unroll 8
    for (int part = 0; part < a.parts; part++)
        sum += a.in[part * a.count + i];
    a.out[i] = sum;
}

bool cuda_add_parts(MoeDevice *d, const float *in, int parts, const EpTensor *out) {
    AddPartsArgs args = {in, (float *)out->data, tensor_elements(out), parts};
    if (args.count == 0) return true;
    add_parts<<<blocks_of(args.count, THREADS), THREADS, 0, cuda_stream_of(d)>>>(args);
    return cuda_ok(cudaGetLastError(), "adding parts of a product");
}

/* ---- activation ---------------------------------------------------------------------------- */

struct ActivateArgs {
    const void *z; /* [rows, 2 * width] */
    const float *w;
    void *a;            /* [rows, width] */
    const void *grad_a; /* backward */
    void *grad_z;
    float *grad_w;
    int64_t rows, width;
};

template <typename T, int COUNT> struct alignas(sizeof(T) * COUNT) Pack { T x[COUNT]; };

template <typename T, int COUNT>
static __device__ __forceinline__ void read(const T *from, float (&x)[COUNT]) {
    const Pack<T, COUNT> pack = *(const Pack<T, COUNT> *)from;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        x[i] = load(pack.x + i);
}

template <typename T, int COUNT>
static __device__ __forceinline__ void write(T *to, const float (&x)[COUNT]) {
    Pack<T, COUNT> pack;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        store(pack.x + i, x[i]);
    *(Pack<T, COUNT> *)to = pack;
}

template <typename T, int COUNT>
static __global__ void __launch_bounds__(THREADS) activate(const __grid_constant__ ActivateArgs a) {
    const int64_t row = warp_row();
    if (row >= a.rows) return;
    const T *gate = (const T *)a.z + row * 2 * a.width, *up = gate + a.width;
    const float w = a.w ? a.w[row] : 1;
    T *out = (T *)a.a + row * a.width;
#pragma unroll 2
    for (int64_t i = threadIdx.x % 32 * COUNT; i < a.width; i += 32 * COUNT) {
        float x[COUNT], y[COUNT];
        read(gate + i, x), read(up + i, y);
#pragma unroll
        for (int n = 0; n < COUNT; n++)
            x[n] = w * (x[n] * sigmoid(x[n]) * y[n]);
        write(out + i, x);
    }
}

template <typename T, int COUNT>
static __global__ void __launch_bounds__(THREADS)
    activate_backward(const __grid_constant__ ActivateArgs a) {
    const int64_t row = warp_row();
    if (row >= a.rows) return;
    const T *gate = (const T *)a.z + row * 2 * a.width, *up = gate + a.width;
    const T *grad = (const T *)a.grad_a + row * a.width;
    T *out = (T *)a.grad_z + row * 2 * a.width;
    const float w = a.w ? a.w[row] : 1;
    float sum = 0;
#pragma unroll 2
    for (int64_t i = threadIdx.x % 32 * COUNT; i < a.width; i += 32 * COUNT) {
        float x[COUNT], y[COUNT], g[COUNT];
        read(gate + i, x), read(up + i, y), read(grad + i, g);
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            const float s = sigmoid(x[n]), silu = x[n] * s, given = w * g[n];
            sum += g[n] * (silu * y[n]);
            x[n] = given * y[n] * (s * (1 + x[n] * (1 - s)));
            y[n] = given * silu;
        }
        write(out + i, x), write(out + a.width + i, y);
    }
    sum = warp_sum(sum);
    if (a.grad_w && threadIdx.x % 32 == 0) a.grad_w[row] = sum;
}

/* A lane reads and writes 16 bytes of a row, if F elements are multiples of them: the up half of a
 * row then begins on 16 bytes. Else it takes one element. */
template <typename T> static auto kernel_of(const ActivateArgs &args) {
    enum { COUNT = 16 / sizeof(T) };
    const bool is_wide = args.width % COUNT == 0;
    if (args.grad_a) return is_wide ? activate_backward<T, COUNT> : activate_backward<T, 1>;
    return is_wide ? activate<T, COUNT> : activate<T, 1>;
}

static bool launch_activation(MoeDevice *d, EpType type, const ActivateArgs &args,
                              const char *what) {
    auto kernel = type == EP_TYPE_BF16   ? kernel_of<__nv_bfloat16>(args)
                  : type == EP_TYPE_FP16 ? kernel_of<__half>(args)
                                         : kernel_of<float>(args);
    if (args.rows == 0) return true;
    kernel<<<blocks_of(args.rows, WARPS), THREADS, 0, cuda_stream_of(d)>>>(args);
    return cuda_ok(cudaGetLastError(), what);
}

/* Rows up to the end of the last slab, padding included: it is computed and not used. */
static int64_t rows_of(const Groups *groups) {
    const int32_t last = groups->num - 1;
    return last < 0 ? 0 : groups->first[last] + groups->count[last];
}

static float *floats_of(const EpTensor *tensor) {
    return tensor ? (float *)tensor->data : nullptr;
}

bool cuda_activate(MoeDevice *d, const Groups *groups, const EpTensor *z, const EpTensor *w,
                   const EpTensor *a) {
    ActivateArgs args = {z->data, floats_of(w), a->data,         nullptr,
                         nullptr, nullptr,      rows_of(groups), a->shape[1]};
    return launch_activation(d, a->type, args, "the activation");
}

bool cuda_activate_backward(MoeDevice *d, const Groups *groups, const EpTensor *z,
                            const EpTensor *w, const EpTensor *grad_a, const EpTensor *grad_z,
                            const EpTensor *grad_w) {
    ActivateArgs args = {z->data,      floats_of(w),      nullptr,         grad_a->data,
                         grad_z->data, floats_of(grad_w), rows_of(groups), grad_a->shape[1]};
    return launch_activation(d, z->type, args, "the activation's gradient");
}

/* ---- transposing --------------------------------------------------------------------------- */

struct TransposeArgs {
    const void *in; /* [matrices, rows, columns] */
    void *out;      /* [matrices, columns, rows] */
    int64_t count, rows, columns;
};

/* Few numbers. */
static __global__ void __launch_bounds__(THREADS)
    transpose_floats(const __grid_constant__ TransposeArgs a) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.count) return;
    const int64_t row = i / a.columns % a.rows, column = i % a.columns;
    const int64_t matrix = i - row * a.columns - column;
    ((float *)a.out)[matrix + column * a.rows + row] = ((const float *)a.in)[i];
}

/* Byte i of each of four words becomes word i. */
static __device__ __forceinline__ void turn(uint32_t (&x)[4]) {
    uint32_t y[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        y[i] = (x[0] >> 8 * i & 0xff) | (x[1] >> 8 * i & 0xff) << 8 | (x[2] >> 8 * i & 0xff) << 16 |
               (x[3] >> 8 * i & 0xff) << 24;
#pragma unroll
    for (int i = 0; i < 4; i++)
        x[i] = y[i];
}

/* Bytes, 128 x 128 a block: rows by 16 bytes into shared memory. Then a lane takes four columns of
 * four rows, so that a warp writes 128 bytes of each column. */
static __global__ void __launch_bounds__(THREADS)
    transpose_bytes(const __grid_constant__ TransposeArgs a) {
    enum { TILE = 128, WORDS = TILE / 4, PITCH = WORDS + 1, CHUNKS = TILE / 16 };
    __shared__ uint32_t tile[TILE * PITCH];
    const int64_t down = (a.rows + TILE - 1) / TILE, across = (a.columns + TILE - 1) / TILE;
    const int64_t matrix = blockIdx.x / (down * across) * a.rows * a.columns;
    const int64_t row = blockIdx.x / across % down * TILE, column = blockIdx.x % across * TILE;
    const uint8_t *in = (const uint8_t *)a.in + matrix;
    uint8_t *out = (uint8_t *)a.out + matrix;
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += THREADS) {
        const int r = i / CHUNKS, c = i % CHUNKS * 16;
        uint4 words = {0, 0, 0, 0};
        if (row + r < a.rows && column + c < a.columns)
            words = *(const uint4 *)(in + (row + r) * a.columns + column + c);
        uint32_t *to = tile + r * PITCH + c / 4;
        to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
    }
    __syncthreads();
    const int r = (int)threadIdx.x % 32 * 4;
    for (int word = (int)threadIdx.x / 32; word < WORDS; word += WARPS) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            x[i] = tile[(r + i) * PITCH + word];
        turn(x);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (row + r < a.rows && column + 4 * word < a.columns)
                *(uint32_t *)(out + (column + 4 * word + i) * a.rows + row + r) = x[i];
    }
}

bool cuda_transpose(MoeDevice *d, const EpTensor *in, const EpTensor *out) {
    TransposeArgs args = {in->data, out->data, tensor_elements(in), in->shape[1], in->shape[2]};
    const bool bytes = in->type == EP_TYPE_FP8_E4M3;
    const int64_t tiles = in->shape[0] * ((args.rows + 127) / 128) * ((args.columns + 127) / 128);
    const unsigned blocks = bytes ? (unsigned)tiles : blocks_of(args.count, THREADS);
    auto kernel = bytes ? transpose_bytes : transpose_floats;
    if (args.count == 0) return true;
    kernel<<<blocks, THREADS, 0, cuda_stream_of(d)>>>(args);
    return cuda_ok(cudaGetLastError(), "transposing a weight");
}

/* ---- dequantising -------------------------------------------------------------------------- */

struct DequantiseArgs {
    const uint8_t *q; /* [matrices, height, width] */
    const void *scales;
    float *out;
    int64_t count, height, width;      /* count: of all elements */
    int64_t block_rows, block_columns; /* that share a scale */
    int64_t scales_per_matrix, scales_per_row;
    int bytes; /* scales are UE8M0 rather than fp32 */
};

static __global__ void __launch_bounds__(THREADS)
    dequantise(const __grid_constant__ DequantiseArgs a) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.count) return;
    const int64_t line = i / a.width, matrix = line / a.height;
    const int64_t at = matrix * a.scales_per_matrix +
                       line % a.height / a.block_rows * a.scales_per_row +
                       i % a.width / a.block_columns;
    const float scale = a.bytes ? exp2f((float)((const uint8_t *)a.scales)[at] - 127)
                                : ((const float *)a.scales)[at];
    a.out[i] = value_of(a.q[i]) * scale;
}

bool cuda_dequantise(MoeDevice *d, const EpTensor *q, const EpTensor *scales, int64_t rows,
                     int64_t columns, const EpTensor *out) {
    DequantiseArgs args = {(const uint8_t *)q->data,
                           scales->data,
                           (float *)out->data,
                           tensor_elements(q),
                           q->shape[1],
                           q->shape[2],
                           rows,
                           columns,
                           scales->shape[1] * scales->shape[2],
                           scales->shape[2],
                           scales->type == EP_TYPE_UINT8};
    if (args.count == 0) return true;
    dequantise<<<blocks_of(args.count, THREADS), THREADS, 0, cuda_stream_of(d)>>>(args);
    return cuda_ok(cudaGetLastError(), "dequantising");
}
