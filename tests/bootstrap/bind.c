/* SPDX-License-Identifier: Apache-2.0 */
/* Binding to the CPUs of a list, such as Linux has for every GPU. */
#include <sched.h>

#include "bootstrap/bootstrap.h"
#include "tests/cases/run.h"

static cpu_set_t allowed(void) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CHECK(sched_getaffinity(0, sizeof(cpus), &cpus) == 0, "sched_getaffinity");
    return cpus;
}

static int last_of(const cpu_set_t *cpus) {
    int cpu = CPU_SETSIZE - 1;
    while (cpu > 0 && !CPU_ISSET(cpu, cpus))
        cpu--;
    return cpu;
}

static int bind_to_text(const char *text, int whole_process, char *said, size_t bytes) {
    char path[] = "/tmp/ep_tests_cpus_XXXXXX";
    int file = mkstemp(path);
    CHECK(write(file, text, strlen(text)) == (ssize_t)strlen(text), "cannot write %s", path);
    close(file);
    int bound = ep_bind_to_list(path, whole_process, said, bytes);
    unlink(path);
    return bound;
}

static void check_bound(int whole_process) {
    char text[32], said[160];
    cpu_set_t before = allowed();
    int cpu = last_of(&before);
    snprintf(text, sizeof(text), "%d\n", cpu);
    CHECK(bind_to_text(text, whole_process, said, sizeof(said)), "not bound: %s", said);
    CHECK(strstr(said, "bound to CPUs"), "%s", said);
    cpu_set_t after = allowed();
    CHECK(CPU_COUNT(&after) == 1 && CPU_ISSET(cpu, &after), "%d CPUs, not CPU %d alone",
          CPU_COUNT(&after), cpu);
}

SoloCall(bootstrap_bind, thread, check_bound(0));
SoloCall(bootstrap_bind, process, check_bound(1));

/* A launcher's binding to one core near the GPU is kept. */
SoloTest(bootstrap_bind, narrower_bindings_stay) {
    char text[32], said[160];
    cpu_set_t all = allowed(), one;
    int cpu = last_of(&all);
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    CHECK(sched_setaffinity(0, sizeof(one), &one) == 0, "sched_setaffinity");
    snprintf(text, sizeof(text), "0-%d\n", cpu);
    CHECK(bind_to_text(text, 0, said, sizeof(said)), "not bound: %s", said);
    cpu_set_t after = allowed();
    CHECK(CPU_EQUAL(&after, &one), "%d CPUs", CPU_COUNT(&after));
}

SoloTest(bootstrap_bind, what_cannot_be_done_is_said) {
    char said[160];
    cpu_set_t before = allowed();
    CHECK(!ep_bind_to_list("/nowhere/local_cpulist", 0, said, sizeof(said)), "bound");
    CHECK(strstr(said, "/nowhere/local_cpulist") && strstr(said, "No such file"), "%s", said);
    CHECK(!bind_to_text("gibberish\n", 0, said, sizeof(said)), "bound");
    CHECK(strstr(said, "got 'gibberish'"), "%s", said);
    CHECK(!bind_to_text("", 0, said, sizeof(said)), "bound");
    CHECK(strstr(said, "got ''"), "%s", said);
    CHECK(!bind_to_text("500000-500001\n", 0, said, sizeof(said)), "bound");
    CHECK(strstr(said, "allowed some CPU"), "%s", said);
    cpu_set_t after = allowed();
    CHECK(CPU_EQUAL(&after, &before), "bound all the same");
}

SoloTest(bootstrap_bind, list_of_a_gpu) {
    char path[96];
    ep_bind_list_path("0000:AB:00.0", path, sizeof(path));
    CHECK(strcmp(path, "/sys/bus/pci/devices/0000:ab:00.0/local_cpulist") == 0, "%s", path);
}

/* On the host backend there is no GPU: the group logs a warning and works. */
ThreadTest(bootstrap_bind, asked_for_without_a_gpu, 1) {
    static char text[4096];
    const char *path = temporary_file();
    setenv("LIBEP_BIND", "gpu", 1);
    setenv("LIBEP_LOG_FILE", path, 1);
    EpGroupConfig config = group_config(1);
    config.backend = EP_BACKEND_HOST;
    EpGroup *group = open_group_with(bootstrap, &config);
    EpGroupInfo info = group_info(group);
    CHECK(info.bound == 0, "bound");
    ep_group_destroy(group);
    read_file(path, text, sizeof(text));
    unlink(path);
    CHECK(strstr(text, "LIBEP_BIND=gpu") && strstr(text, "got none"), "'%s'", text);
}
