/* SPDX-License-Identifier: Apache-2.0 */

/**
 * Rows to e4m3, by themselves or as the activation or its gradient computes them: in one pass, and
 * where gradients of weights take them also transposed.
 *
 * A block of threads takes 128 x 128 elements, 8 lanes of a warp a row: twice 8 neighbouring
 * columns each. Their scale is that of the row's block. The elements, rounded to the type of rows,
 * stay in shared memory. Then 8 lanes take a pair of columns: four times 4 neighbouring rows each.
 * So both orientations have the bits that two passes over rounded rows would have.
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
    TEAM = 8,             /* lanes that share a row, or a pair of columns */
    EACH = 16,            /* elements of a lane */
    RUN = 8,              /* of them follow one another in a row */
    PITCH = BLOCK / 2 + 1 /* words of a row in shared memory, two elements each: an odd number */
};

struct QuantiseArgs {
    const void *in;         /* [rows, inputs of the source] */
    const void *grad;       /* [rows, width] backward */
    const float *w;         /* [rows], or NULL for 1 */
    void *plain;            /* [rows, outputs * width], not quantised; may be NULL */
    uint8_t *codes;         /* [rows, outputs * width]; may be NULL */
    float *scales;          /* [blocks of columns, rows] */
    uint8_t *across;        /* codes transposed, [outputs * width, rows]; may be NULL */
    float *scales_across;   /* [blocks of rows, outputs * width] */
    const float *scales_in; /* of rows that are e4m3: [blocks of columns, pitch_in] */
    int64_t rows, width, pitch_in;
    int power; /* scales are powers of two */
};

/* ---- e4m3 ---------------------------------------------------------------------------------- */

/* The codes of two numbers to the nearest, ties to even, at most 448: the first in the low byte. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

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

/* Of four neighbours. */
static __device__ __forceinline__ uint32_t codes_of(const float *x, float inverse) {
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

/* The largest of a team's finite numbers. NaN is never larger; infinities are rare. */
static __device__ __forceinline__ float largest(const float (&x)[EACH]) {
    float amax = 0x1p-100f;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        amax = fmaxf(amax, fabsf(x[i]));
    if (amax > 0x1.fffffep127f) {
        amax = 0x1p-100f;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (fabsf(x[i]) <= 0x1.fffffep127f) amax = fmaxf(amax, fabsf(x[i]));
    }
#pragma unroll
    for (int by = TEAM / 2; by > 0; by /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, by));
    return amax;
}

/* ---- elements of a lane: two runs of 16 bytes, half a block of columns apart ---------------- */

struct Raw {
    uint4 run[2];
};

template <typename T>
static __device__ __forceinline__ void unpack(const Raw &raw, float (&x)[EACH]) {
    T each[EACH];
    memcpy(each, &raw, sizeof(each));
#pragma unroll
    for (int i = 0; i < EACH; i++)
        x[i] = load(each + i);
}

/* The elements become what their type holds. */
template <typename T> static __device__ __forceinline__ Raw pack(float (&x)[EACH]) {
    T each[EACH];
    Raw raw;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        store(each + i, x[i]), x[i] = load(each + i);
    memcpy(&raw, each, sizeof(raw));
    return raw;
}

/* ---- sources: what a lane reads, of so many rows before it computes, and what comes of it -----
 */

/* Zeros beyond the last row and column. */
template <typename T, typename Source>
static __device__ __forceinline__ void read_row(const QuantiseArgs &a, int64_t row, int column,
                                                int left, Raw *in) {
#pragma unroll
    for (int n = 0; n < Source::INPUTS; n++) {
        const char *from = (const char *)Source::input(a, n, row, column, sizeof(T));
        in[n] = {};
        if (left > 0) in[n].run[0] = *(const uint4 *)from;
        if (left > BLOCK / 2) in[n].run[1] = *(const uint4 *)(from + BLOCK / 2 * sizeof(T));
    }
}

struct Rows {
    static constexpr int INPUTS = 1, OUTPUTS = 1, BATCH = 4;
    static __device__ __forceinline__ const void *input(const QuantiseArgs &a, int, int64_t row,
                                                        int column, int unit) {
        return (const char *)a.in + (row * a.width + column) * unit;
    }
    template <typename T>
    static __device__ __forceinline__ void read(const QuantiseArgs &a, int64_t row, int column,
                                                int left, Raw *in) {
        read_row<T, Rows>(a, row, column, left, in);
    }
    template <typename T>
    static __device__ __forceinline__ void compute(const Raw *in, float, float (*out)[EACH]) {
        unpack<T>(in[0], out[0]);
    }
};

/* Rows that are e4m3 already: a run is 8 bytes, and behind the first one is the block's scale. */
struct Codes {
    static constexpr int INPUTS = 1, OUTPUTS = 1, BATCH = 4;
    template <typename T>
    static __device__ __forceinline__ void read(const QuantiseArgs &a, int64_t row, int column,
                                                int left, Raw *in) {
        const uint8_t *from = (const uint8_t *)a.in + row * a.width + column;
        in[0] = {};
        if (left <= 0) return;
        const uint2 first = *(const uint2 *)from;
        in[0].run[0].x = first.x, in[0].run[0].y = first.y;
        in[0].run[0].z = __float_as_uint(a.scales_in[column / BLOCK * a.pitch_in + row]);
        if (left <= BLOCK / 2) return;
        const uint2 second = *(const uint2 *)(from + BLOCK / 2);
        in[0].run[1].x = second.x, in[0].run[1].y = second.y;
    }
    template <typename T>
    static __device__ __forceinline__ void compute(const Raw *in, float, float (*out)[EACH]) {
        const uint32_t words[4] = {in[0].run[0].x, in[0].run[0].y, in[0].run[1].x, in[0].run[1].y};
        const float scale = __uint_as_float(in[0].run[0].z);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            out[0][i] = scale * value_of((uint8_t)(words[i / 4] >> i % 4 * 8));
    }
};

struct Activation {
    static constexpr int INPUTS = 2, OUTPUTS = 1, BATCH = 2;
    static __device__ __forceinline__ const void *input(const QuantiseArgs &a, int which,
                                                        int64_t row, int column, int unit) {
        return (const char *)a.in + ((2 * row + which) * a.width + column) * unit;
    }
    template <typename T>
    static __device__ __forceinline__ void read(const QuantiseArgs &a, int64_t row, int column,
                                                int left, Raw *in) {
        read_row<T, Activation>(a, row, column, left, in);
    }
    template <typename T>
    static __device__ __forceinline__ void compute(const Raw *in, float w, float (*out)[EACH]) {
        float up[EACH];
        unpack<T>(in[0], out[0]), unpack<T>(in[1], up);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            out[0][i] = w * (out[0][i] * sigmoid(out[0][i]) * up[i]);
    }
};

struct ActivationBackward {
    static constexpr int INPUTS = 3, OUTPUTS = 2, BATCH = 1;
    static __device__ __forceinline__ const void *input(const QuantiseArgs &a, int which,
                                                        int64_t row, int column, int unit) {
        if (which < 2) return Activation::input(a, which, row, column, unit);
        return (const char *)a.grad + (row * a.width + column) * unit;
    }
    template <typename T>
    static __device__ __forceinline__ void read(const QuantiseArgs &a, int64_t row, int column,
                                                int left, Raw *in) {
        read_row<T, ActivationBackward>(a, row, column, left, in);
    }
    template <typename T>
    static __device__ __forceinline__ void compute(const Raw *in, float w, float (*out)[EACH]) {
        float grad[EACH];
        unpack<T>(in[0], out[0]), unpack<T>(in[1], out[1]), unpack<T>(in[2], grad);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float gate = out[0][i], s = sigmoid(gate), given = w * grad[i];
            out[0][i] = given * out[1][i] * (s * (1 + gate * (1 - s)));
            out[1][i] = given * (gate * s);
        }
    }
};

/* ---- the kernel ---------------------------------------------------------------------------- */

/* The part of a row that is in the tile. Columns of an output follow those of the one before. A
 * half of the tile may be beyond the last column: rows end on 16 elements. */
template <typename T>
static __device__ __forceinline__ void store_row(const QuantiseArgs &a, int64_t row, int64_t at,
                                                 int64_t block, int left, float (&x)[EACH],
                                                 uint32_t *stash) {
    const Raw raw = pack<T>(x);
    float inverse;
    const float scale = scale_of(largest(x), a.power, &inverse);
    const uint32_t words[EACH / 2] = {raw.run[0].x, raw.run[0].y, raw.run[0].z, raw.run[0].w,
                                      raw.run[1].x, raw.run[1].y, raw.run[1].z, raw.run[1].w};
#pragma unroll
    for (int i = 0; i < EACH / 2; i++)
        stash[i % (RUN / 2) + i / (RUN / 2) * BLOCK / 4] = words[i];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (half * BLOCK / 2 >= left) continue;
        const int64_t to = at + half * BLOCK / 2;
        if (!a.codes) continue;
        if (a.plain) *(uint4 *)((T *)a.plain + to) = raw.run[half];
        *(uint2 *)(a.codes + to) =
            make_uint2(codes_of(x + half * RUN, inverse), codes_of(x + half * RUN + 4, inverse));
    }
    if (a.codes && left > 0 && threadIdx.x % TEAM == 0) a.scales[block * a.rows + row] = scale;
}

template <typename T, typename Source>
static __device__ __forceinline__ void store_rows(const QuantiseArgs &a, int64_t first_row,
                                                  int first_column, uint32_t *tile) {
    enum { TEAMS = THREADS / TEAM, BATCH = Source::BATCH };
    const int team = (int)threadIdx.x / TEAM, lane_column = (int)threadIdx.x % TEAM * RUN;
    const int column = first_column + lane_column;
    const int inside = (int)min((int64_t)BLOCK, a.width - first_column) - lane_column;
    const int64_t width = Source::OUTPUTS * a.width;
    for (int i = team; i < BLOCK; i += BATCH * TEAMS) {
        Raw in[BATCH][Source::INPUTS];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int64_t row = first_row + i + b * TEAMS;
            Source::template read<T>(a, row, column, row < a.rows ? inside : 0, in[b]);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int64_t row = first_row + i + b * TEAMS;
            const int left = row < a.rows ? inside : 0;
            float x[Source::OUTPUTS][EACH];
            Source::template compute<T>(in[b], a.w && left > 0 ? a.w[row] : 1, x);
#pragma unroll
            for (int o = 0; o < Source::OUTPUTS; o++)
                store_row<T>(a, row, row * width + o * a.width + column,
                             (o * a.width + first_column) / BLOCK, left, x[o],
                             tile + (o * BLOCK + i + b * TEAMS) * PITCH + lane_column / 2);
        }
    }
}

/* Columns of an output in the tile, which sums over rows take as rows. */
template <typename T>
static __device__ __forceinline__ void store_columns(const QuantiseArgs &a, int64_t row,
                                                     int64_t column, int64_t left, int64_t width,
                                                     const uint32_t *tile) {
    const int first = (int)threadIdx.x % TEAM * 4;
    for (int pair = (int)threadIdx.x / TEAM; pair < BLOCK / 2; pair += THREADS / TEAM) {
        float x[2][EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            T both[2];
            memcpy(both, tile + (i / 4 * 32 + first + i % 4) * PITCH + pair, sizeof(both));
            x[0][i] = load(both), x[1][i] = load(both + 1);
        }
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int64_t at = column + 2 * pair + c;
            float inverse;
            const float scale = scale_of(largest(x[c]), a.power, &inverse);
            if (2 * pair >= left) continue;
#pragma unroll
            for (int i = 0; i < EACH; i += 4) {
                const int64_t from = row + i * 8 + first;
                if (from < a.rows)
                    *(uint32_t *)(a.across + at * a.rows + from) = codes_of(x[c] + i, inverse);
            }
            if (first == 0) a.scales_across[row / BLOCK * width + at] = scale;
        }
    }
}

template <typename T, typename Source>
static __global__ void __launch_bounds__(THREADS, 3)
    quantise(const __grid_constant__ QuantiseArgs a) {
    extern __shared__ uint32_t tile[];
    const int64_t across = (a.width + BLOCK - 1) / BLOCK;
    const int64_t row = blockIdx.x / across * BLOCK, column = blockIdx.x % across * BLOCK;
    store_rows<T, Source>(a, row, (int)column, tile);
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

bool cuda_requantise(MoeDevice *d, EpQuant quant, EpType type, const Scaled *rows,
                     const Scaled *transposed) {
    QuantiseArgs args = {};
    args.in = rows->codes.data, args.scales_in = (const float *)rows->scales.data;
    args.pitch_in = rows->scales.shape[1];
    args.rows = transposed->codes.shape[1], args.width = rows->codes.shape[1];
    args.across = (uint8_t *)transposed->codes.data;
    args.scales_across = (float *)transposed->scales.data;
    args.power = quant == EP_QUANT_FP8_POW2;
    return launch_typed<Codes>(d, type, args, "transposing rows of e4m3");
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
