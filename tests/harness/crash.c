/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A test that crashes says where. Criterion reports the signal's test alone, and a crash that comes
 * once in many thousand runs leaves nothing else behind. addr2line -e BINARY finds the lines of the
 * offsets that are printed.
 */
#include <execinfo.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/harness/check.h"

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

enum { MOST_FRAMES = 64 };

/* The signal is raised again and ends the process as this returns. What is called here may wait for
 * a lock that the crash left: the alarm ends that wait. Other threads that crash wait for the first
 * one. */
static void report(int signal, siginfo_t *info, void *context) {
    (void)context;
    void *frames[MOST_FRAMES];
    char line[512];
    static int reported;
    alarm(10);
    while (__atomic_exchange_n(&reported, 1, __ATOMIC_RELAXED))
        pause();
    sigaction(signal, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
    snprintf(line, sizeof(line), "\nsignal %d (%s) at address %p; %.200s; %.200s\n", signal,
             strsignal(signal), signal == SIGABRT ? NULL : info->si_addr, check_noted(),
             check_failure());
    if (write(STDERR_FILENO, line, strlen(line)) > 0)
        backtrace_symbols_fd(frames, backtrace(frames, MOST_FRAMES), STDERR_FILENO);
    raise(signal);
}

__attribute__((constructor)) static void report_crashes(void) {
    static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    struct sigaction action = {.sa_sigaction = report, .sa_flags = SA_SIGINFO};
    for (size_t i = 0; i < sizeof(signals) / sizeof(*signals); i++)
        sigaction(signals[i], &action, NULL);
}

#endif
