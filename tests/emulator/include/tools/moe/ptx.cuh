/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_PTX_CUH
#define MOE_PTX_CUH

/**
 * Replaces tools/moe/ptx.cuh: the same instructions, emulated.
 */

#include <vector>

#include "runtime/cuda/ptx.cuh"

static inline uint32_t shared_address(const void *pointer) {
    return ep_smem(pointer);
}

/* ---- copies: made when the thread waits for them; until then their places hold NaN ---- */

struct EmulatedCopy {
    char *to;
    const void *from;
    uint32_t bytes, all;
};

/* The groups of each thread of the block, the oldest first. The last one is open. */
static thread_local std::vector<std::vector<EmulatedCopy>> emulated_copies[1024];

static inline std::vector<std::vector<EmulatedCopy>> &emulated_groups(void) {
    std::vector<std::vector<EmulatedCopy>> &groups = emulated_copies[threadIdx.x];
    if (groups.empty()) groups.emplace_back();
    return groups;
}

static inline void emulated_copy(uint32_t to, const void *from, uint32_t bytes, uint32_t all) {
    const EmulatedCopy copy = {(char *)emulated_generic(to), from, bytes, all};
    if (to % all || (uintptr_t)from % all) emulated_die("an unaligned copy of %u bytes", all);
    if (bytes && !emulated_reaches(from, bytes)) emulated_die("a copy reads out of reach");
    memset(copy.to, 0xff, all);
    emulated_groups().back().push_back(copy);
}

static inline void copy_16(uint32_t to, const void *from, uint32_t bytes) {
    emulated_copy(to, from, bytes, 16);
}

static inline void copy_4(uint32_t to, const void *from, uint32_t bytes) {
    emulated_copy(to, from, bytes, 4);
}

static inline void copies_commit(void) {
    emulated_groups().emplace_back();
}

template <int YOUNGEST> static inline void copies_wait(void) {
    std::vector<std::vector<EmulatedCopy>> &groups = emulated_groups();
    while (groups.size() > YOUNGEST + 1) {
        for (const EmulatedCopy &copy : groups.front()) {
            memset(copy.to, 0, copy.all);
            memcpy(copy.to, copy.from, copy.bytes);
        }
        groups.erase(groups.begin());
    }
}

static inline void fence_matrix_units(void) {}

static inline void arrival_init(uint64_t *arrival, uint32_t count) {
    emulated_mbarrier_init(arrival, count);
}

static inline void arrival_arrive(uint64_t *arrival) {
    emulated_mbarrier_arrive(arrival, 0);
}

static inline uint32_t arrival_test(uint64_t *arrival, uint32_t parity) {
    return ep_mbarrier_try_wait(arrival, parity);
}

template <int COUNT> static inline void registers_give(void) {}
template <int COUNT> static inline void registers_take(void) {}
static inline void products_begin(void) {}
static inline void products_commit(void) {}
static inline void products_wait(void) {}
static inline void keep_register(float &) {}

static inline float emulated_e4m3(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float magnitude = (code & 0x7f) == 0x7f ? NAN
                            : exponent            ? ldexpf((float)(8 + mantissa), exponent - 10)
                                                  : ldexpf((float)mantissa, -9);
    return code & 0x80 ? -magnitude : magnitude;
}

/* Column k of a row of a matrix as its descriptor says: rows of 128 bytes, eight of them together,
 * whose pieces of 16 bytes change places by the lowest bits of the row's address. */
static inline float emulated_element(uint64_t matrix, int row, int k) {
    if (matrix >> 62 != 1) emulated_die("a matrix without swizzled rows of 128 bytes");
    uint32_t at = (uint32_t)(matrix & 0x3fff) << 4;
    at += (uint32_t)(row / 8) * ((uint32_t)(matrix >> 32 & 0x3fff) << 4);
    at += (uint32_t)(row % 8) * 128 + (uint32_t)k;
    at ^= (at >> 7 & 7) << 4;
    static const struct Values {
        float of[256];
        Values() {
            for (int code = 0; code < 256; code++)
                of[code] = emulated_e4m3((uint8_t)code);
        }
    } values;
    return values.of[((const uint8_t *)emulated_shared())[at]];
}

/* Each thread computes its own elements. */
static inline void multiply_e4m3(float (&d)[64], uint64_t a, uint64_t b, int add) {
    const int thread = (int)threadIdx.x % 128, lane = thread % 32;
    float rows[2][32];
    for (int k = 0; k < 64; k++)
        rows[k / 32][k % 32] =
            emulated_element(a, thread / 32 * 16 + lane / 4 + k / 32 * 8, k % 32);
    for (int column = 0; column < 32; column++) {
        float sum[2] = {0, 0};
        for (int k = 0; k < 32; k++) {
            const float other = emulated_element(b, column / 2 * 8 + lane % 4 * 2 + column % 2, k);
            sum[0] += rows[0][k] * other, sum[1] += rows[1][k] * other;
        }
        for (int r = 0; r < 2; r++) {
            float &to = d[column / 2 * 4 + r * 2 + column % 2];
            to = add ? to + sum[r] : sum[r];
        }
    }
}

#endif
