/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A test that crashes says where, and one that takes too long says where each of its threads is.
 * Criterion reports the signal's test alone, and a crash that comes once in many thousand runs
 * leaves nothing else behind. addr2line -e BINARY finds the lines of the offsets that are printed.
 */
#include <dirent.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/syscall.h>

#include "tests/harness/check.h"

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

enum { MOST_FRAMES = 64 };

static void print_stack(const char *heading) {
    void *frames[MOST_FRAMES];
    if (write(STDERR_FILENO, heading, strlen(heading)) > 0)
        backtrace_symbols_fd(frames, backtrace(frames, MOST_FRAMES), STDERR_FILENO);
}

/* The signal is raised again and ends the process as this returns. What is called here may wait for
 * a lock that the crash left: the alarm ends that wait. Other threads that crash wait for the first
 * one. */
static void report(int signal, siginfo_t *info, void *context) {
    (void)context;
    char line[512];
    static int reported;
    alarm(10);
    while (__atomic_exchange_n(&reported, 1, __ATOMIC_RELAXED))
        pause();
    sigaction(signal, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
    snprintf(line, sizeof(line), "\nsignal %d (%s) at address %p; %.200s; %.200s\n", signal,
             strsignal(signal), signal == SIGABRT ? NULL : info->si_addr, check_noted(),
             check_failure());
    print_stack(line);
    raise(signal);
}

static int printed; /* threads that have printed their stack */

static void print_own_stack(int signal) {
    char line[1024];
    (void)signal;
    snprintf(line, sizeof(line), "\nthread %d; %.200s; %.200s\n", (int)gettid(), check_noted(),
             check_failure());
    print_stack(line);
    __atomic_add_fetch(&printed, 1, __ATOMIC_RELEASE);
}

/* Let a thread print its stack; wait for it, but not for one that blocks the signal. */
static void print_stack_of(int thread) {
    int before = __atomic_load_n(&printed, __ATOMIC_ACQUIRE);
    if (thread <= 0 || syscall(SYS_tgkill, getpid(), thread, SIGUSR2)) return;
    for (int i = 0; i < 100 && __atomic_load_n(&printed, __ATOMIC_ACQUIRE) == before; i++)
        usleep(1000);
}

/* If this takes long, the second alarm ends the process: the signal has its default action again.
 */
static void report_threads(int signal) {
    sigaction(signal, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
    sigaction(SIGUSR2, &(struct sigaction){.sa_handler = print_own_stack}, NULL);
    alarm(10);
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *entry; tasks && (entry = readdir(tasks)) != NULL;)
        print_stack_of(atoi(entry->d_name));
    raise(signal);
}

__attribute__((constructor)) static void report_crashes(void) {
    static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    sigaction(SIGALRM, &(struct sigaction){.sa_handler = report_threads}, NULL);
    struct sigaction action = {.sa_sigaction = report, .sa_flags = SA_SIGINFO};
    for (size_t i = 0; i < sizeof(signals) / sizeof(*signals); i++)
        sigaction(signals[i], &action, NULL);
}

#endif
