/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_EMULATOR_BLOCK_H
#define TESTS_EMULATOR_BLOCK_H

/**
 * A block of a kernel: its threads are fibers of one OS thread, which change places only where they
 * meet, wait or look at memory that others write. Which one runs next is drawn by lot; so is when a
 * bulk copy that nobody has waited for yet is made: EMULATED_SEED chooses other lots.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EMULATED_SHARED_BYTES 232448 /* of a block, at most */

typedef struct EmulatedIndex {
    unsigned x;
} EmulatedIndex;

/* No initializers anywhere: C++ need not ask whether they have run. */
extern __thread EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;

/** The block's dynamic shared memory. */
void *emulated_shared(void);

/* ---- meeting ---- */

/** All lanes of the warp bring a value to the same instruction; returns all lanes' values. */
uint64_t *emulated_exchange(int instruction, uint64_t value);
/** The same of one bit. */
unsigned emulated_vote(int instruction, int is);

/** Until this many threads have come to the barrier of this number. */
void emulated_barrier(int id, int threads);
int emulated_barrier_and(int value);

/* ---- waiting ---- */

/** Others may run now: in every load of what other blocks write. */
void emulated_poll(void);
/** Others run until someone wakes those that wait for `key`. */
void emulated_wait_for(const void *key);
void emulated_wake(const void *key);
/** One in `n`. */
int emulated_one_in(unsigned n);
unsigned emulated_draw(unsigned n);

/* ---- bulk copies: see copies.c ---- */

void emulated_bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *barrier);
void emulated_bulk_store(void *to, const void *from, uint32_t bytes);
void emulated_bulk_commit(void);
/** All but the `youngest` groups of this thread are read, or written as well. */
void emulated_bulk_wait(int youngest, int written);
/** Make one of the copies that are due some time; returns whether there was one. */
int emulated_copy_something(void);
/** The block has ended. */
void emulated_copy_everything(void);

/* ---- mbarriers: see mbarrier.c ---- */

void emulated_mbarrier_init(uint64_t *barrier, uint32_t count);
void emulated_mbarrier_arrive(uint64_t *barrier, uint32_t expected_bytes);
void emulated_mbarrier_complete(uint64_t *barrier, uint32_t bytes);
int emulated_mbarrier_test(const uint64_t *barrier, uint32_t parity);

#ifdef __cplusplus
}
#endif

#endif
