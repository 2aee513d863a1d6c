/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/wait.h"

#include <sched.h>
#include <time.h>

/* Reading the clock costs as much as a few polls; yielding as much as a few clock reads. */
#define SPINS_PER_CLOCK_READ 4096
#define YIELDS_PER_CLOCK_READ 16
#define SECONDS_BEFORE_SLEEPING 0.2
#define SLEEP_NANOSECONDS 100000

double ep_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void ep_wait_begin(EpWait *wait, double timeout, int64_t spins) {
    *wait = (EpWait){.timeout = timeout, .spins = spins};
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int ep_wait_pause(EpWait *wait) {
    int spins = wait->spins > 0;
    if (spins) {
        wait->spins--;
        relax();
    } else {
        sched_yield();
    }
    if (++wait->pauses % (spins ? SPINS_PER_CLOCK_READ : YIELDS_PER_CLOCK_READ)) return 1;
    double now = ep_clock();
    if (wait->start == 0) wait->start = now;
    if (!spins && now - wait->start > SECONDS_BEFORE_SLEEPING)
        nanosleep(&(struct timespec){.tv_nsec = SLEEP_NANOSECONDS}, NULL);
    return now - wait->start < wait->timeout;
}
