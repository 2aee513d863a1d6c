/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_HARNESS_RANDOM_H
#define TESTS_HARNESS_RANDOM_H

/**
 * Random numbers that are the same on every machine (splitmix64).
 */

#include <stdint.h>

typedef struct Random {
    uint64_t state;
} Random;

static inline uint64_t random_next(Random *random) {
    uint64_t z = random->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/** Returns a separate stream for each (seed, a, b). */
static inline Random random_stream(uint64_t seed, uint64_t a, uint64_t b) {
    Random random = {seed};
    random.state = random_next(&random) ^ (a * 0xd1342543de82ef95u);
    random.state = random_next(&random) ^ (b * 0xaf251af3b0f025b5u);
    return random;
}

/** Returns a number in 0 .. n - 1; n >= 1. */
static inline int64_t random_below(Random *random, int64_t n) {
    return (int64_t)(random_next(random) % (uint64_t)n);
}

/** Returns true in `percent` of 100 draws. */
static inline int random_percent(Random *random, int percent) {
    return random_below(random, 100) < percent;
}

/** Returns a number in -1 .. 1. */
static inline float random_unit(Random *random) {
    return (float)((double)(random_next(random) >> 40) / (double)(1 << 23) - 1.0);
}

#endif
