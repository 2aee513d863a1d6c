/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/wait.h"

#include <sched.h>
#include <time.h>

/* Reading the clock costs as much as a few polls; yielding as much as a few clock reads. */
#define SPINS_PER_CLOCK_READ 4096
#define YIELDS_PER_CLOCK_READ 16
#define SECONDS_BEFORE_SLEEPING 0.01
#define SLEEP_NANOSECONDS 100000
#define SLEEP_NANOSECONDS_EACH 2000 /* in a crowd, for each rank of it */
#define MOST_SLEEP_NANOSECONDS 20000000

double ep_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void ep_wait_begin(EpWait *wait, double timeout, int64_t spins) {
    *wait = (EpWait){.timeout = timeout, .spins = spins, .sleeps = spins < 0};
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleep. In a crowd every waking costs the others: then the longer, the more they are, and for a
 * quarter of the time waited so far. */
static void sleep_briefly(const EpWait *wait, double now) {
    double quarter = (now - wait->start) * 1e9 / 4;
    long nanoseconds = SLEEP_NANOSECONDS;
    if (wait->spins < 0) {
        long least = -wait->spins * SLEEP_NANOSECONDS_EACH;
        if (least > nanoseconds) nanoseconds = least;
        if (quarter > (double)nanoseconds)
            nanoseconds = quarter < MOST_SLEEP_NANOSECONDS ? (long)quarter : MOST_SLEEP_NANOSECONDS;
    }
    nanosleep(&(struct timespec){.tv_nsec = nanoseconds}, NULL);
}

int ep_wait_pause(EpWait *wait) {
    int spins = wait->spins > 0;
    if (spins) {
        wait->spins--;
        relax();
    } else if (!wait->sleeps) {
        sched_yield();
    }
    ++wait->pauses;
    if (!wait->sleeps && wait->pauses % (spins ? SPINS_PER_CLOCK_READ : YIELDS_PER_CLOCK_READ))
        return 1;
    double now = ep_clock();
    if (wait->start == 0) wait->start = now;
    if (wait->sleeps) sleep_briefly(wait, now);
    if (!spins && now - wait->start > SECONDS_BEFORE_SLEEPING) wait->sleeps = 1;
    return now - wait->start < wait->timeout;
}
