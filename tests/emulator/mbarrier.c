/* SPDX-License-Identifier: Apache-2.0 */
/* mbarriers: barriers in shared memory that count arrivals and bytes. */
#include <stdint.h>
#include <string.h>

#include "tests/emulator/block.h"
#include "tests/emulator/launch.h"

typedef struct Barrier {
    int32_t bytes;         /* outstanding in this phase */
    uint32_t count : 15;   /* arrivals of a phase */
    uint32_t pending : 15; /* outstanding arrivals */
    uint32_t phase : 2;    /* its lowest bit is the parity */
} Barrier;

_Static_assert(sizeof(Barrier) == sizeof(uint64_t), "as GPUs have it");

static Barrier *barrier_at(uint64_t *barrier) {
    if ((uintptr_t)barrier % 8) emulated_die("an mbarrier at %p", (void *)barrier);
    return (Barrier *)(void *)barrier;
}

void emulated_mbarrier_init(uint64_t *barrier, uint32_t count) {
    *barrier_at(barrier) = (Barrier){.count = count & 0x7fff, .pending = count & 0x7fff};
}

static void end_phase_if_complete(Barrier *b) {
    if (b->pending || b->bytes) return;
    b->phase++;
    b->pending = b->count;
    emulated_wake(b);
}

void emulated_mbarrier_arrive(uint64_t *barrier, uint32_t expected_bytes) {
    Barrier *b = barrier_at(barrier);
    if (!b->pending) emulated_die("more arrivals at an mbarrier than its phase has");
    b->bytes += (int32_t)expected_bytes;
    b->pending--;
    end_phase_if_complete(b);
}

void emulated_mbarrier_complete(uint64_t *barrier, uint32_t bytes) {
    Barrier *b = barrier_at(barrier);
    b->bytes -= (int32_t)bytes;
    if (b->bytes < 0 && !b->pending) emulated_die("an mbarrier gets bytes that it does not expect");
    end_phase_if_complete(b);
}

int emulated_mbarrier_test(const uint64_t *barrier, uint32_t parity) {
    const Barrier *b = (const Barrier *)(const void *)barrier;
    return (b->phase & 1) != parity;
}
