/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_DEVICE_H
#define MOE_DEVICE_H

/**
 * Where the layer computes. Communication is libep's; all arithmetic of the layer is behind this
 * table of functions. One device per rank. Tensors are in the device's memory, groups in the
 * host's.
 */

#include <stdbool.h>
#include <stdint.h>

#include "tools/moe/inputs.h"

/** Slabs of rows: group g has rows first[g] .. first[g] + count[g] - 1. */
typedef struct Groups {
    int32_t num;
    const int32_t *first, *count;
    const int32_t *places; /**< [2, num] in the device's memory: first, then count. For products of
                                e4m3 alone */
} Groups;

/** e4m3 codes, and FP32 scales of blocks of 128 elements along the last dimension. */
typedef struct Scaled {
    EpTensor codes, scales;
    bool by_column; /**< the last two dimensions of the scales are swapped */
    bool tiles;     /**< 128 rows share a scale, too */
} Scaled;

static inline int64_t tensor_elements(const EpTensor *tensor) {
    int64_t count = 1;
    for (int d = 0; d < tensor->ndim; d++)
        count *= tensor->shape[d];
    return count;
}

static inline int64_t tensor_bytes(const EpTensor *tensor) {
    return tensor_elements(tensor) * (int64_t)ep_type_bytes(tensor->type);
}

/** Of two tensors: sums of squares, and elements that are not the same bits. */
typedef struct Difference {
    double squares, norm; /**< of got - want, of want */
    int64_t elements;
} Difference;

/** How the products of all groups are called, but for those of e4m3, which have one launch. */
typedef enum Grouping {
    GROUPING_AUTO = 1,   /**< in one call where groups are small, else on several streams */
    GROUPING_EACH = 2,   /**< each by itself */
    GROUPING_ONE = 3,    /**< in one call */
    GROUPING_STREAMS = 4 /**< each by itself, on several streams in turn: so that the last blocks of
                              one run beside the first ones of the next */
} Grouping;

typedef struct MoeDevice MoeDevice;

struct MoeDevice {
    const char *name;
    EpBackend backend;    /**< HOST or CUDA */
    char gemm[256];       /**< what multiplies matrices, for the report */
    int square;           /**< a size of matrices at which a GEMM runs at full rate */
    int multiprocessors;  /**< of the GPU; 0 on the host */
    int product_sms;      /**< of them, those that products take */
    bool multiplies_e4m3; /**< whether multiply_scaled and correlate_scaled work */
    EpStream stream;      /**< of all that runs, but for what is forked; NULL on the host */
    EpStream side; /**< a second stream; NULL on the host, where calls have finished when they
                        return */
    void *state;
    Grouping grouping;  /**< on GPUs */
    int64_t gemm_calls; /**< calls that multiply, counted since the device exists */
    double took_us;     /**< between the last start and stop */

    /** Memory of the device, zeroed; NULL with a message on failure. */
    void *(*alloc)(MoeDevice *d, size_t bytes, const char *what);
    void (*release)(MoeDevice *d, void *memory);
    /** Between the host's memory and the device's, complete on return. */
    bool (*upload)(MoeDevice *d, void *to, const void *from, size_t bytes);
    bool (*download)(MoeDevice *d, void *to, const void *from, size_t bytes);
    /** Bytes of memory that are free. */
    int64_t (*room)(MoeDevice *d);
    /** Within the device's memory. */
    bool (*copy)(MoeDevice *d, void *to, const void *from, size_t bytes);
    /** Set each byte. */
    bool (*set)(MoeDevice *d, void *to, int byte, size_t bytes);
    /** Contents of `part`, one line after the other. */
    bool (*fill)(MoeDevice *d, const Contents *contents, const Part *part, const EpTensor *out);
    /** Compare tensors of one shape and type. Complete on return. */
    bool (*differ)(MoeDevice *d, const EpTensor *got, const EpTensor *want, Difference *out);
    /** Wait for all that was queued on `stream`. */
    bool (*finish)(MoeDevice *d);
    /** What is queued on `side` after fork follows what was queued on `stream` before. What is
     *  queued on `stream` after join follows what was queued on `side` before. The host waits for
     *  neither. */
    bool (*fork)(MoeDevice *d);
    bool (*join)(MoeDevice *d);
    /** A point is what was queued on `stream`, or on `side`, when it was marked. What is queued on
     *  the other one after await follows it. Callers number points from 0 on. */
    bool (*mark)(MoeDevice *d, bool side, int point);
    bool (*await)(MoeDevice *d, bool side, int point);
    /** Time what is queued in between, by the device's own clock: on GPUs by events. stop waits for
     *  it, as finish does, and sets took_us. */
    bool (*start)(MoeDevice *d);
    bool (*stop)(MoeDevice *d);
    /** Capture what `queue` queues on `stream` as a graph, which lives as long as the device. NULL
     *  on the host. */
    bool (*capture)(MoeDevice *d, bool (*queue)(void *context), void *context, void **graph);
    bool (*replay)(MoeDevice *d, void *graph);
    /** Products leave the other multiprocessors to kernels of the second stream. */
    bool (*limit)(MoeDevice *d, int product_sms);
    /** Exchange `stream` and `side`: what is queued next runs on the other one. */
    void (*exchange)(MoeDevice *d);
    void (*destroy)(MoeDevice *d);

    /**
     * Grouped GEMMs. Sums are in fp32 and rounded once to the type of `c`. On the host, operands
     * of other types become fp32 first.
     *
     * multiply   c[rows, n] = a[rows, k] * b_g[k, n], by groups of rows; `transposed`: b_g is
     *            [n, k]. The b_g follow one another.
     * accumulate as multiply, added to what is in c before it is rounded
     * correlate  c_g[m, n] = a[rows, m]^T * b[rows, n], over each group's rows
     */
    bool (*multiply)(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                     bool transposed, const EpTensor *c);
    bool (*accumulate)(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                       bool transposed, const EpTensor *c);
    bool (*correlate)(MoeDevice *d, const Groups *groups, const EpTensor *a, const EpTensor *b,
                      const EpTensor *c);

    /** A product of tall matrices with few columns, a[rows, k] and b[k, n], into FP32 c. */
    bool (*multiply_narrow)(MoeDevice *d, const EpTensor *a, const EpTensor *b, const EpTensor *c);

    /**
     * The same of e4m3, in one launch each. Both operands lie along the dimension that is summed
     * over, whose length is a multiple of 16.
     *
     * multiply_scaled   a [rows, k], b [groups, n, k]
     * correlate_scaled  a [m, rows], b [n, rows]: transposed rows, where slabs begin at multiples
     *                   of 128
     */
    bool (*multiply_scaled)(MoeDevice *d, const Groups *groups, const Scaled *a, const Scaled *b,
                            const EpTensor *c);
    bool (*correlate_scaled)(MoeDevice *d, const Groups *groups, const Scaled *a, const Scaled *b,
                             const EpTensor *c);

    /**
     * Router. `p` [T, E] FP32 holds logits and becomes their softmax. The K largest of each row, in
     * descending order, go to idx [T, K] INT32 and weights [T, K] FP32; of equal ones the lower
     * expert first.
     */
    bool (*choose)(MoeDevice *d, const EpTensor *p, const EpTensor *idx, const EpTensor *weights);
    /** grad [T, E], of the logits, from that of the weights; rounded to its type. */
    bool (*choose_backward)(MoeDevice *d, const EpTensor *p, const EpTensor *idx,
                            const EpTensor *grad_weights, const EpTensor *grad);

    /**
     * SwiGLU. z [rows, 2F] is gate and up: a = w * silu(gate) * up. w [rows] FP32 is NULL for 1.
     * Backward also gives grad_w [rows] FP32 if there is a w.
     */
    bool (*activate)(MoeDevice *d, const Groups *groups, const EpTensor *z, const EpTensor *w,
                     const EpTensor *a);
    bool (*activate_backward)(MoeDevice *d, const Groups *groups, const EpTensor *z,
                              const EpTensor *w, const EpTensor *grad_a, const EpTensor *grad_z,
                              const EpTensor *grad_w);

    /**
     * Rows to e4m3, of 16-bit types: all rows that `rows` has, and `transposed`, whose codes may
     * have no memory. On the host NULL. The activation, by itself or with its gradient, does it in
     * the same pass, where blocks divide F; what is not quantised goes to `a` or `grad_z`, unless
     * it is NULL.
     */
    bool (*quantise)(MoeDevice *d, EpQuant quant, const EpTensor *in, const Scaled *rows,
                     const Scaled *transposed);
    /** Rows that are e4m3 already: transposed, by way of `type`. */
    bool (*requantise)(MoeDevice *d, EpQuant quant, EpType type, const Scaled *rows,
                       const Scaled *transposed);
    bool (*activate_scaled)(MoeDevice *d, EpQuant quant, const EpTensor *z, const EpTensor *w,
                            const EpTensor *a, const Scaled *rows, const Scaled *transposed);
    bool (*activate_backward_scaled)(MoeDevice *d, EpQuant quant, const EpTensor *z,
                                     const EpTensor *grad_a, const EpTensor *grad_z,
                                     const Scaled *rows, const Scaled *transposed);

    /** Exchange the last two of three dimensions, of e4m3 in multiples of 16, or of FP32. */
    bool (*transpose)(MoeDevice *d, const EpTensor *in, const EpTensor *out);

    /** e4m3 with scales by blocks of `rows` x `columns` of the last two dimensions -> FP32. */
    bool (*dequantise)(MoeDevice *d, const EpTensor *q, const EpTensor *scales, int64_t rows,
                       int64_t columns, const EpTensor *out);
};

/** `threads` are those of the rank's GEMM. False, with a message. */
bool moe_host_create(MoeDevice *out, int threads);

/** The rank's GPU is selected. False, with a message. */
bool moe_cuda_create(MoeDevice *out, Grouping grouping);

#endif
