/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/emulator/fiber.h"

#include <stdint.h>

#ifdef __x86_64__

/* Push the callee-saved registers on the old stack and pop those of the new one. A kernel of a
 * thousand threads switches a million times: swapcontext, with a system call each, would be too
 * slow. */
__asm__(".text\n"
        ".globl emulated_switch\n"
        ".hidden emulated_switch\n"
        ".type emulated_switch, @function\n"
        "emulated_switch:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size emulated_switch, . - emulated_switch\n");

void fiber_init(Fiber *fiber, char *stack, size_t bytes, void (*begin)(void)) {
    uintptr_t *top = (uintptr_t *)(((uintptr_t)stack + bytes) & ~(uintptr_t)63);
    *--top = 0;                /* return address of `begin`, which does not return */
    *--top = (uintptr_t)begin; /* return address of the first switch */
    for (int i = 0; i < 6; i++)
        *--top = 0;
    fiber->stack_pointer = top;
}

#else

void fiber_init(Fiber *fiber, char *stack, size_t bytes, void (*begin)(void)) {
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stack;
    fiber->context.uc_stack.ss_size = bytes;
    fiber->context.uc_link = NULL;
    makecontext(&fiber->context, begin, 0);
}
#endif
