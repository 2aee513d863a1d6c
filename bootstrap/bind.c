/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/bootstrap.h"

#include <ctype.h>
#include <errno.h>
#include <hwloc.h>
#include <stdio.h>
#include <string.h>

void ep_bind_list_path(const char *bus, char *path, size_t path_bytes) {
    char lower[32];
    size_t length = 0;
    for (; bus[length] && length + 1 < sizeof(lower); length++)
        lower[length] = (char)tolower((unsigned char)bus[length]);
    lower[length] = 0;
    snprintf(path, path_bytes, "/sys/bus/pci/devices/%s/local_cpulist", lower);
}

static int read_list(const char *path, hwloc_bitmap_t cpus, char *said, size_t bytes) {
    char text[1024] = "";
    FILE *file = fopen(path, "r");
    if (!file) {
        snprintf(said, bytes, "expected a list of CPUs in %s, got: %s", path, strerror(errno));
        return 0;
    }
    if (!fgets(text, sizeof(text), file)) text[0] = 0;
    fclose(file);
    text[strcspn(text, "\n")] = 0;
    if (text[0] && hwloc_bitmap_list_sscanf(cpus, text) == 0 && !hwloc_bitmap_iszero(cpus))
        return 1;
    snprintf(said, bytes, "expected a list of CPUs in %s, got '%s'", path, text);
    return 0;
}

/* Reduce the CPUs to those that the machine allows and, if the process or thread is already bound
 * to some of these, to those. Returns 0 if none is left. */
static int narrow(hwloc_topology_t topology, int flags, hwloc_bitmap_t cpus, char *said,
                  size_t bytes) {
    hwloc_bitmap_t now = hwloc_bitmap_alloc();
    if (!now) {
        snprintf(said, bytes, "out of memory");
        return 0;
    }
    hwloc_bitmap_and(cpus, cpus, hwloc_topology_get_allowed_cpuset(topology));
    int some = !hwloc_bitmap_iszero(cpus);
    if (hwloc_get_cpubind(topology, now, flags) == 0 && hwloc_bitmap_intersects(cpus, now))
        hwloc_bitmap_and(cpus, cpus, now);
    hwloc_bitmap_free(now);
    if (!some) snprintf(said, bytes, "expected to be allowed some CPU near the GPU, got none");
    return some;
}

static int bind_to(hwloc_topology_t topology, int flags, hwloc_bitmap_t cpus, char *said,
                   size_t bytes) {
    char list[128];
    if (!narrow(topology, flags, cpus, said, bytes)) return 0;
    hwloc_bitmap_list_snprintf(list, sizeof(list), cpus);
    if (hwloc_set_cpubind(topology, cpus, flags)) {
        snprintf(said, bytes, "cannot bind to CPUs %s: %s", list, strerror(errno));
        return 0;
    }
    snprintf(said, bytes, "bound to CPUs %s", list);
    return 1;
}

int ep_bind_to_list(const char *path, int whole_process, char *said, size_t said_bytes) {
    int flags = whole_process ? HWLOC_CPUBIND_PROCESS : HWLOC_CPUBIND_THREAD, bound = 0;
    hwloc_bitmap_t cpus = hwloc_bitmap_alloc();
    hwloc_topology_t topology = NULL;
    if (!cpus || hwloc_topology_init(&topology)) {
        snprintf(said, said_bytes, "out of memory");
    } else {
        hwloc_topology_set_all_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_NONE);
        if (hwloc_topology_load(topology))
            snprintf(said, said_bytes, "hwloc cannot read the machine's topology");
        else if (read_list(path, cpus, said, said_bytes))
            bound = bind_to(topology, flags, cpus, said, said_bytes);
        hwloc_topology_destroy(topology);
    }
    hwloc_bitmap_free(cpus);
    return bound;
}
