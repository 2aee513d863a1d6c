/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_EMULATOR_BLOCK_H
#define TESTS_EMULATOR_BLOCK_H

/**
 * A block of a kernel: its threads are fibers of one OS thread. They switch only at barriers, waits
 * and loads of memory that others write. Random numbers decide which warp runs next and for how
 * long, in which order its lanes run, and when a bulk copy is made that no thread has waited for
 * yet. EMULATED_SEED seeds the numbers.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EMULATED_SHARED_BYTES 232448 /* maximum of a block */

typedef struct EmulatedIndex {
    unsigned x;
} EmulatedIndex;

/* Without initializers C++ accesses these without a check whether they are initialised. */
extern __thread EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;

/** Returns the block's dynamic shared memory. */
void *emulated_shared(void);

/* ---- barriers ---- */

/** Exchange a value with all lanes of the warp, which must be at the same instruction. Returns all
 * lanes' values. */
uint64_t *emulated_exchange(int instruction, uint64_t value);
/** Exchange one bit with all lanes of the warp. Returns all lanes' bits. */
unsigned emulated_vote(int instruction, int is);

/** Wait until `threads` threads have arrived at barrier `id`. */
void emulated_barrier(int id, int threads);
int emulated_barrier_and(int value);

/* ---- waiting ---- */

/** Let other threads run, in every load of memory that other blocks write. */
void emulated_poll(void);
/** Say that the block gets on: it does not only poll. */
void emulated_progress(void);
/** Say what a load of such memory has found. If that is new, the block gets on. */
void emulated_saw(const void *word, uint64_t value);
/** Let other threads run until emulated_wake(key). */
void emulated_wait_for(const void *key);
void emulated_wake(const void *key);
/** Returns true with probability 1 / n. */
int emulated_one_in(unsigned n);
unsigned emulated_draw(unsigned n);

/* ---- capabilities: see device.c ---- */

/** Returns whether code has what capability 9.0 added. */
int emulated_has_bulk(void);
/** Stop if it has not. */
void emulated_need_bulk(const char *what);

/* ---- copies: see copies.c ---- */

/** Load 16 bytes for this thread. */
void emulated_async_load(void *to, const void *from);
/** Arrive once this thread's loads until now are made. */
void emulated_async_arrive(uint64_t *barrier);

void emulated_bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *barrier);
void emulated_bulk_store(void *to, const void *from, uint32_t bytes);
void emulated_bulk_commit(void);
/** Wait until all but the `youngest` groups of this thread are read, or, with `written`,
 * written. */
void emulated_bulk_wait(int youngest, int written);
/** Make one outstanding copy. Returns whether there was one. */
int emulated_copy_one(void);
/** Make all outstanding copies when the block has ended. */
void emulated_copy_all(void);

/* ---- mbarriers: see mbarrier.c ---- */

void emulated_mbarrier_init(uint64_t *barrier, uint32_t count);
void emulated_mbarrier_arrive(uint64_t *barrier, uint32_t expected_bytes);
void emulated_mbarrier_complete(uint64_t *barrier, uint32_t bytes);
int emulated_mbarrier_test(const uint64_t *barrier, uint32_t parity);

#ifdef __cplusplus
}
#endif

#endif
