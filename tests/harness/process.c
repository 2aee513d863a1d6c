/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/harness/process.h"

#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <criterion/criterion.h>

extern char **environ;

/* With BXFI_MAP and the CRITERION_ variables the child would act as a Criterion worker. */
static void forget_criterion(void) {
    unsetenv("BXFI_MAP");
    for (int i = 0; environ[i];) {
        if (strncmp(environ[i], "CRITERION_", 10) != 0) {
            i++;
            continue;
        }
        char name[128];
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(environ[i], "="), environ[i]);
        unsetenv(name);
    }
}

static void child_exec(const char *const *argv, int out, int err) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    forget_criterion();
    /* MPI leaks memory; a sanitizer build would report that instead of the result. */
    setenv("ASAN_OPTIONS", "detect_leaks=0", 0);
    int empty = open("/dev/null", O_RDONLY);
    dup2(empty, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(err, STDERR_FILENO);
    execvp(argv[0], (char *const *)(uintptr_t)argv);
    dprintf(STDERR_FILENO, "cannot run %s\n", argv[0]);
    _exit(127);
}

/* Returns an unlinked file for output: unlike a pipe, it never fills up while nobody reads. */
static int scratch_file(void) {
    char path[] = "/tmp/ep_tests_XXXXXX";
    int fd = mkstemp(path);
    cr_assert(fd >= 0, "no temporary file in /tmp");
    unlink(path);
    return fd;
}

static char *read_back(int fd) {
    off_t bytes = lseek(fd, 0, SEEK_END);
    char *text = calloc(1, (size_t)bytes + 1);
    ssize_t got = pread(fd, text, (size_t)bytes, 0);
    cr_assert(got == bytes, "short read of a child's output");
    close(fd);
    return text;
}

ProcessResult process_run(const char *const *argv, int merge) {
    int out = scratch_file(), err = merge ? out : scratch_file();
    pid_t child = fork();
    cr_assert(child >= 0, "fork failed");
    if (child == 0) child_exec(argv, out, err);
    int status = 0;
    cr_assert(waitpid(child, &status, 0) == child, "waitpid failed");
    ProcessResult result = {.exit_status = WIFEXITED(status) ? WEXITSTATUS(status) : -1};
    if (!merge) result.err = read_back(err);
    result.out = read_back(out);
    return result;
}

ProcessResult mpirun_run(int ranks, int seconds, const char *const *arguments) {
    char count[16], limit[16];
    const char *argv[40] = {
        "mpirun", "--oversubscribe", "--bind-to", "none", "--timeout", limit, "-n", count};
    size_t used = 8, most = sizeof(argv) / sizeof(argv[0]) - 1;
    snprintf(count, sizeof(count), "%d", ranks);
    snprintf(limit, sizeof(limit), "%d", seconds);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    while (*arguments) {
        cr_assert(used < most, "too many arguments");
        argv[used++] = *arguments++;
    }
    return process_run(argv, 1);
}

void process_result_free(ProcessResult *result) {
    free(result->out);
    free(result->err);
}

const char *self_path(void) {
    static char path[4096];
    ssize_t bytes = readlink("/proc/self/exe", path, sizeof(path) - 1);
    cr_assert(bytes > 0, "cannot read /proc/self/exe");
    path[bytes] = 0;
    return path;
}

const char *build_path(const char *name) {
    static char path[8192];
    const char *build = getenv("LIBEP_TEST_BUILD");
    if (build) {
        snprintf(path, sizeof(path), "%s/%s", build, name);
        return path;
    }
    const char *self = self_path();
    int folder = (int)(strrchr(self, '/') - self);
    snprintf(path, sizeof(path), "%.*s/../%s", folder, self, name);
    return path;
}
