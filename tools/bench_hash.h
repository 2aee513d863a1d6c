/* SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_HASH_H
#define BENCH_HASH_H

/** Everything random is a function of (seed, what, where), so that any rank can recompute it. */

#include <stdint.h>

/** splitmix64's finalizer: a good 64-bit hash of one word. */
static inline uint64_t hash_word(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static inline uint64_t hash_add(uint64_t hash, int64_t value) {
    return hash_word(hash ^ (uint64_t)value);
}

/** In [0, 1). */
static inline double hash_unit(uint64_t hash) {
    return (double)(hash >> 11) * 0x1p-53;
}

#endif
