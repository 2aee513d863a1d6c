/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_EMULATOR_FIBER_H
#define TESTS_EMULATOR_FIBER_H

/**
 * Stacks that an OS thread goes from one to another of.
 */

#include <stddef.h>
#include <ucontext.h>

typedef struct Fiber {
#ifdef __x86_64__
    void *stack_pointer;
#else
    ucontext_t context;
#endif
} Fiber;

/** `begin` never returns, and is called when somebody first goes to the fiber. */
void fiber_init(Fiber *fiber, char *stack, size_t bytes, void (*begin)(void));

/** Go on where `to` has left off; comes back when somebody goes to `from`. */
void fiber_switch(Fiber *from, Fiber *to);

#endif
