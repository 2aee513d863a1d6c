/* SPDX-License-Identifier: Apache-2.0 */

/**
 * Rows to e4m3, by themselves or as the activation or its gradient computes them: in one pass, and
 * where gradients of weights take them also transposed.
 *
 * A block of threads takes 128 x 128 elements. A warp takes a row after another, four neighbouring
 * columns a lane: their scale is that of the row's block. Its elements, rounded to the type of
 * rows, stay in shared memory. Then a warp takes a pair of columns after another, four neighbouring
 * rows a lane. So both orientations have the bits that two passes over rounded rows would have.
 */

#include <cuda_runtime.h>

#ifndef EP_WITH_CUDA
#define EP_WITH_CUDA 1
#endif
extern "C" {
#include "tools/common/gpu.h"
#include "tools/moe/cuda_state.h"
}
#include "tools/moe/elements.cuh"

#define ALL_LANES 0xffffffffu
#define LARGEST 448.0f

enum {
    BLOCK = 128, /* rows and columns of a tile, and elements that share a scale */
    THREADS = 256,
    WARPS = THREADS / 32,
    PITCH = BLOCK / 2 + 1, /* words of a row in shared memory, two elements each: an odd number */
    BATCH = 4              /* rows that a warp reads before it computes */
};

struct QuantiseArgs {
    const void *in;       /* [rows, inputs of the source] */
    const void *grad;     /* [rows, width] backward */
    const float *w;       /* [rows], or NULL for 1 */
    void *plain;          /* [rows, outputs * width], not quantised; may be NULL */
    uint8_t *codes;       /* [rows, outputs * width] */
    float *scales;        /* [blocks of columns, rows] */
    uint8_t *across;      /* codes transposed, [outputs * width, rows]; may be NULL */
    float *scales_across; /* [blocks of rows, outputs * width] */
    int64_t rows, width;
    int power; /* scales are powers of two */
};

/* ---- e4m3 ---------------------------------------------------------------------------------- */

/* The codes of two numbers to the nearest, ties to even, at most 448: the first in the low byte. */
#ifdef __CUDA_ARCH__

static __device__ __forceinline__ uint32_t codes_of(float low, float high) {
    uint16_t both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}

#else

static __device__ __forceinline__ uint32_t code_of(float x) {
    const float magnitude = fminf(fabsf(x), LARGEST);
    const uint32_t bits = __float_as_uint(magnitude);
    const uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    const uint32_t code = magnitude < 0x1p-6f ? (uint32_t)rintf(magnitude * 512) : normal;
    return (x != x ? 0x7f : code) | (__float_as_uint(x) >> 24 & 0x80);
}

static __device__ __forceinline__ uint32_t codes_of(float low, float high) {
    return code_of(low) | code_of(high) << 8;
}

#endif

static __device__ __forceinline__ uint32_t codes_of(const float (&x)[4], float inverse) {
    return codes_of(x[0] * inverse, x[1] * inverse) | codes_of(x[2] * inverse, x[3] * inverse)
                                                          << 16;
}

static __device__ __forceinline__ float scale_of(float amax, int power, float *inverse) {
    const float scale = amax / LARGEST;
    if (!power) *inverse = LARGEST / amax;
    if (!power) return scale;
    const uint32_t bits = __float_as_uint(scale);
    const float above = __uint_as_float((bits + 0x7fffff) >> 23 << 23);
    *inverse = 1 / above;
    return above;
}

/* The largest of a warp's finite numbers. */
static __device__ __forceinline__ float largest(const float (&x)[4]) {
    float amax = 0x1p-100f;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (fabsf(x[i]) <= 0x1.fffffep127f) amax = fmaxf(amax, fabsf(x[i]));
#pragma unroll
    for (int by = 16; by > 0; by /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, by));
    return amax;
}

/* ---- four elements ------------------------------------------------------------------------- */

template <typename T> static __device__ __forceinline__ void unpack(uint2 words, float (&x)[4]) {
    T each[4];
    memcpy(each, &words, sizeof(each));
#pragma unroll
    for (int i = 0; i < 4; i++)
        x[i] = load(each + i);
}

/* The elements become what their type holds. */
template <typename T> static __device__ __forceinline__ uint2 pack(float (&x)[4]) {
    T each[4];
    uint2 words;
#pragma unroll
    for (int i = 0; i < 4; i++)
        store(each + i, x[i]), x[i] = load(each + i);
    memcpy(&words, each, sizeof(words));
    return words;
}

/* ---- sources: what a lane reads, and what comes of it -------------------------------------- */

struct Rows {
    static constexpr int INPUTS = 1, OUTPUTS = 1;
    template <typename T>
    static __device__ __forceinline__ void read(const QuantiseArgs &a, int64_t row, int64_t column,
                                                uint2 *in) {
        in[0] = *(const uint2 *)((const T *)a.in + row * a.width + column);
    }
    template <typename T>
    static __device__ __forceinline__ void compute(const uint2 *in, float, float (*out)[4]) {
        unpack<T>(in[0], out[0]);
    }
};

struct Activation {
    static constexpr int INPUTS = 2, OUTPUTS = 1;
    template <typename T>
    static __device__ __forceinline__ void read(const QuantiseArgs &a, int64_t row, int64_t column,
                                                uint2 *in) {
        const T *gate = (const T *)a.in + row * 2 * a.width + column;
        in[0] = *(const uint2 *)gate, in[1] = *(const uint2 *)(gate + a.width);
    }
    template <typename T>
    static __device__ __forceinline__ void compute(const uint2 *in, float w, float (*out)[4]) {
        float gate[4], up[4];
        unpack<T>(in[0], gate), unpack<T>(in[1], up);
#pragma unroll
        for (int i = 0; i < 4; i++)
            out[0][i] = w * (gate[i] * sigmoid(gate[i]) * up[i]);
    }
};

struct ActivationBackward {
    static constexpr int INPUTS = 3, OUTPUTS = 2;
    template <typename T>
    static __device__ __forceinline__ void read(const QuantiseArgs &a, int64_t row, int64_t column,
                                                uint2 *in) {
        Activation::read<T>(a, row, column, in);
        in[2] = *(const uint2 *)((const T *)a.grad + row * a.width + column);
    }
    template <typename T>
    static __device__ __forceinline__ void compute(const uint2 *in, float w, float (*out)[4]) {
        float gate[4], up[4], grad[4];
        unpack<T>(in[0], gate), unpack<T>(in[1], up), unpack<T>(in[2], grad);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float s = sigmoid(gate[i]);
            out[0][i] = w * grad[i] * up[i] * (s * (1 + gate[i] * (1 - s)));
            out[1][i] = w * grad[i] * (gate[i] * s);
        }
    }
};

/* ---- the kernel ---------------------------------------------------------------------------- */

/* The part of a row that is in the tile. Columns of an output follow those of the one before. */
template <typename T, typename Source>
static __device__ __forceinline__ void store_row(const QuantiseArgs &a, int64_t row, int64_t column,
                                                 const uint2 *in, uint32_t *tile) {
    const int64_t width = Source::OUTPUTS * a.width;
    const int lane = (int)threadIdx.x % 32;
    const bool is = row < a.rows && column < a.width;
    float x[Source::OUTPUTS][4];
    Source::template compute<T>(in, a.w && is ? a.w[row] : 1, x);
#pragma unroll
    for (int o = 0; o < Source::OUTPUTS; o++) {
        const int64_t at = row * width + o * a.width + column;
        const uint2 words = pack<T>(x[o]);
        float inverse;
        const float scale = scale_of(largest(x[o]), a.power, &inverse);
        uint32_t *stash = tile + (o * BLOCK + row % BLOCK) * PITCH + 2 * lane;
        stash[0] = words.x, stash[1] = words.y;
        if (!is) continue;
        if (a.plain) *(uint2 *)((T *)a.plain + at) = words;
        *(uint32_t *)(a.codes + at) = codes_of(x[o], inverse);
        if (lane == 0) a.scales[(o * a.width + column) / BLOCK * a.rows + row] = scale;
    }
}

template <typename T, typename Source>
static __device__ __forceinline__ void store_rows(const QuantiseArgs &a, int64_t first_row,
                                                  int64_t column, uint32_t *tile) {
    for (int i = 0; i < BLOCK / WARPS; i += BATCH) {
        uint2 in[BATCH][Source::INPUTS];
        const int64_t row = first_row + (int)threadIdx.x / 32 * (BLOCK / WARPS) + i;
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
#pragma unroll
            for (int n = 0; n < Source::INPUTS; n++)
                in[b][n] = make_uint2(0, 0);
            if (row + b < a.rows && column < a.width)
                Source::template read<T>(a, row + b, column, in[b]);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            store_row<T, Source>(a, row + b, column, in[b], tile);
    }
}

/* Columns of an output in the tile, the sums over rows take them as rows. */
template <typename T>
static __device__ __forceinline__ void store_columns(const QuantiseArgs &a, int64_t row,
                                                     int64_t column, int64_t left, int64_t width,
                                                     const uint32_t *tile) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    for (int pair = warp; 2 * pair < BLOCK && 2 * pair < left; pair += WARPS) {
        float x[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            T both[2];
            memcpy(both, tile + (4 * lane + i) * PITCH + pair, sizeof(both));
            x[0][i] = load(both), x[1][i] = load(both + 1);
        }
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int64_t at = column + 2 * pair + c;
            float inverse;
            const float scale = scale_of(largest(x[c]), a.power, &inverse);
            if (row + 4 * lane < a.rows)
                *(uint32_t *)(a.across + at * a.rows + row + 4 * lane) = codes_of(x[c], inverse);
            if (lane == 0) a.scales_across[row / BLOCK * width + at] = scale;
        }
    }
}

template <typename T, typename Source>
static __global__ void __launch_bounds__(THREADS) quantise(const __grid_constant__ QuantiseArgs a) {
    extern __shared__ uint32_t tile[];
    const int64_t across = (a.width + BLOCK - 1) / BLOCK;
    const int64_t row = blockIdx.x / across * BLOCK, column = blockIdx.x % across * BLOCK;
    store_rows<T, Source>(a, row, column + threadIdx.x % 32 * 4, tile);
    if (!a.across) return;
    __syncthreads();
    for (int o = 0; o < Source::OUTPUTS; o++)
        store_columns<T>(a, row, o * a.width + column, a.width - column, Source::OUTPUTS * a.width,
                         tile + o * BLOCK * PITCH);
}

/* ---- launches ------------------------------------------------------------------------------ */

template <typename T, typename Source>
static bool launch(MoeDevice *d, const QuantiseArgs &args, const char *what) {
    auto kernel = quantise<T, Source>;
    const int bytes = Source::OUTPUTS * BLOCK * PITCH * 4;
    const int64_t down = (args.rows + BLOCK - 1) / BLOCK, across = (args.width + BLOCK - 1) / BLOCK;
    if (args.rows == 0) return true;
    if (!cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                 "cudaFuncSetAttribute"))
        return false;
    kernel<<<(unsigned)(down * across), THREADS, bytes, cuda_stream_of(d)>>>(args);
    return cuda_ok(cudaGetLastError(), what);
}

/* All rows that the codes have. */
static QuantiseArgs args_of(EpQuant quant, const EpTensor *in, const Scaled *rows,
                            const Scaled *transposed) {
    QuantiseArgs args = {};
    args.in = in->data, args.rows = rows->codes.shape[0];
    args.codes = (uint8_t *)rows->codes.data, args.scales = (float *)rows->scales.data;
    args.across = (uint8_t *)transposed->codes.data;
    args.scales_across = (float *)transposed->scales.data;
    args.power = quant == EP_QUANT_FP8_POW2;
    return args;
}

template <typename Source>
static bool launch_typed(MoeDevice *d, EpType type, const QuantiseArgs &args, const char *what) {
    if (type == EP_TYPE_BF16) return launch<__nv_bfloat16, Source>(d, args, what);
    return launch<__half, Source>(d, args, what);
}

bool cuda_quantise(MoeDevice *d, EpQuant quant, const EpTensor *in, const Scaled *rows,
                   const Scaled *transposed) {
    QuantiseArgs args = args_of(quant, in, rows, transposed);
    args.width = in->shape[1];
    return launch_typed<Rows>(d, in->type, args, "quantising rows");
}

bool cuda_activate_scaled(MoeDevice *d, EpQuant quant, const EpTensor *z, const EpTensor *w,
                          const EpTensor *a, const Scaled *rows, const Scaled *transposed) {
    QuantiseArgs args = args_of(quant, z, rows, transposed);
    args.width = z->shape[1] / 2;
    args.w = w ? (const float *)w->data : nullptr, args.plain = a ? a->data : nullptr;
    return launch_typed<Activation>(d, z->type, args, "the activation");
}

bool cuda_activate_backward_scaled(MoeDevice *d, EpQuant quant, const EpTensor *z,
                                   const EpTensor *grad_a, const EpTensor *grad_z,
                                   const Scaled *rows, const Scaled *transposed) {
    QuantiseArgs args = args_of(quant, z, rows, transposed);
    args.width = z->shape[1] / 2, args.grad = grad_a->data;
    args.plain = grad_z ? grad_z->data : nullptr;
    return launch_typed<ActivationBackward>(d, z->type, args, "the activation's gradient");
}
