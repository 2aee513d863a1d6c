/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/machine.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* "model name : ..." on x86. Other processors may have no such line. */
static void read_cpu(char *out, size_t bytes) {
    char line[256];
    snprintf(out, bytes, "unknown");
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file && fgets(line, sizeof(line), file)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        colon[strcspn(colon, "\n")] = 0;
        snprintf(out, bytes, "%s", colon + 1 + strspn(colon + 1, " "));
        break;
    }
    if (file) fclose(file);
}

void machine_describe(Machine *out) {
    time_t now = time(NULL);
    struct tm utc;
    if (gethostname(out->hostname, sizeof(out->hostname)) != 0)
        snprintf(out->hostname, sizeof(out->hostname), "unknown");
    out->hostname[sizeof(out->hostname) - 1] = 0;
    read_cpu(out->cpu, sizeof(out->cpu));
    out->cores = sysconf(_SC_NPROCESSORS_ONLN);
    out->memory = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    strftime(out->date, sizeof(out->date), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
}
