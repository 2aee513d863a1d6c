/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_EMULATOR_FIBER_H
#define TESTS_EMULATOR_FIBER_H

/**
 * Fibers: stacks between which an OS thread switches.
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

#ifdef __x86_64__
void emulated_switch(void **from, void *to);
#endif

/** Make a fiber that calls `begin` at the first switch to it. `begin` never returns. */
void fiber_init(Fiber *fiber, char *stack, size_t bytes, void (*begin)(void));

/** Continue `to` where it was left. Returns at the next switch to `from`. */
static inline void fiber_switch(Fiber *from, Fiber *to) {
#ifdef __x86_64__
    emulated_switch(&from->stack_pointer, to->stack_pointer);
#else
    swapcontext(&from->context, &to->context);
#endif
}

/** Load what `fiber` has at the top of its stack into the cache. */
static inline void fiber_prefetch(const Fiber *fiber) {
#ifdef __x86_64__
    const char *stack = (const char *)fiber->stack_pointer;
    for (int i = 0; i < 4; i++)
        __builtin_prefetch(stack + 64 * i, 1);
#else
    (void)fiber;
#endif
}

#endif
