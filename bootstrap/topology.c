/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/topology.h"

#include <errno.h>
#include <hwloc.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "runtime/status.h"

/* ---- the machine as it is ------------------------------------------------------------------ */

/* hwloc would look at every core, which takes tens of milliseconds on a large machine, at each
 * creation of a group. What is asked for is in two places: the thread's CPUs, and a list of CPUs
 * for each NUMA node. */

static int read_list(const char *path, hwloc_bitmap_t out) {
    char text[4096];
    FILE *file = fopen(path, "r");
    int ok = file && fgets(text, sizeof(text), file);
    if (file) fclose(file);
    if (!ok) return 0;
    text[strcspn(text, "\n")] = 0;
    if (!text[0]) hwloc_bitmap_zero(out);
    return !text[0] || hwloc_bitmap_list_sscanf(out, text) == 0;
}

/* The CPUs that the calling thread may run on. The kernel refuses a set that is too small. */
static int thread_cpus(hwloc_bitmap_t out) {
    for (int count = CPU_SETSIZE; count <= 1 << 20; count *= 2) {
        size_t bytes = CPU_ALLOC_SIZE(count);
        cpu_set_t *set = CPU_ALLOC(count);
        int refused = set ? sched_getaffinity(0, bytes, set) : -1;
        int too_small = refused && errno == EINVAL;
        hwloc_bitmap_zero(out);
        for (int cpu = 0; !refused && cpu < count; cpu++)
            if (CPU_ISSET_S(cpu, bytes, set)) hwloc_bitmap_set(out, (unsigned)cpu);
        CPU_FREE(set);
        if (!too_small) return !refused;
    }
    return 0;
}

/* The one NUMA node that has any of the CPUs; -1 where several do, or none. */
static int32_t numa_with(hwloc_const_cpuset_t cpus, hwloc_bitmap_t nodes, hwloc_bitmap_t its) {
    int32_t numa = -1;
    unsigned node;
    if (!read_list("/sys/devices/system/node/online", nodes)) return 0; /* a kernel without any */
    hwloc_bitmap_foreach_begin(node, nodes) {
        char path[64];
        snprintf(path, sizeof(path), "/sys/devices/system/node/node%u/cpulist", node);
        if (!read_list(path, its) || !hwloc_bitmap_intersects(its, cpus)) continue;
        if (numa >= 0) return -1;
        numa = (int32_t)node;
    }
    hwloc_bitmap_foreach_end();
    return numa;
}

static void find_real(EpPlace *place) {
    hwloc_bitmap_t cpus = hwloc_bitmap_alloc(), nodes = hwloc_bitmap_alloc();
    hwloc_bitmap_t its = hwloc_bitmap_alloc();
    place->numa = -1;
    place->cpus = (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
    if (cpus && nodes && its && thread_cpus(cpus)) {
        place->numa = numa_with(cpus, nodes, its);
        place->cpus = hwloc_bitmap_weight(cpus);
    }
    hwloc_bitmap_free(cpus);
    hwloc_bitmap_free(nodes);
    hwloc_bitmap_free(its);
}

/* ---- a machine that hwloc makes up --------------------------------------------------------- */

static hwloc_topology_t load(const char *synthetic) {
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology)) return NULL;
    hwloc_topology_set_all_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_NONE);
    if (hwloc_topology_set_synthetic(topology, synthetic) || hwloc_topology_load(topology)) {
        hwloc_topology_destroy(topology);
        return NULL;
    }
    return topology;
}

static int32_t numa_of(hwloc_topology_t topology, hwloc_const_cpuset_t cpus) {
    hwloc_nodeset_t nodes = hwloc_bitmap_alloc();
    int32_t numa = -1;
    if (nodes && hwloc_cpuset_to_nodeset(topology, cpus, nodes) == 0 &&
        hwloc_bitmap_weight(nodes) == 1)
        numa = hwloc_bitmap_first(nodes);
    hwloc_bitmap_free(nodes);
    return numa;
}

/* As if the node's ranks were spread evenly over a machine that hwloc makes up. */
static int find_synthetic(const char *description, int32_t index, int32_t ranks, EpPlace *place) {
    hwloc_topology_t topology = load(description);
    if (!topology) return -1;
    int count = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_PU);
    int first = (int)((int64_t)count * index / ranks);
    int last = (int)((int64_t)count * (index + 1) / ranks) - 1;
    hwloc_cpuset_t cpus = hwloc_bitmap_alloc();
    if (cpus) {
        hwloc_bitmap_set_range(cpus, (unsigned)first, last < first ? first : last);
        place->numa = numa_of(topology, cpus);
        place->cpus = hwloc_bitmap_weight(cpus);
    }
    hwloc_bitmap_free(cpus);
    hwloc_topology_destroy(topology);
    return 0;
}

/* ---- places -------------------------------------------------------------------------------- */

static void name_machine(EpPlace *place) {
    char boot[37] = "";
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file) {
        if (!fgets(boot, sizeof(boot), file)) boot[0] = 0;
        fclose(file);
    }
    char host[26] = "";
    gethostname(host, sizeof(host) - 1);
    snprintf(place->machine, sizeof(place->machine), "%s %s", host, boot);
}

EpStatus ep_place_find(const EpSettingTopology *topology, int32_t rank, int32_t size,
                       EpPlace *out) {
    memset(out, 0, sizeof(*out));
    name_machine(out);
    if (!topology->nodes) {
        find_real(out);
        return EP_OK;
    }
    /* Blocks of ranks in order, as even as they can be; more nodes than ranks leave some empty. */
    int64_t nodes = topology->nodes, node = rank * nodes / size;
    int32_t first = (int32_t)((node * size + nodes - 1) / nodes);
    int32_t next = (int32_t)(((node + 1) * size + nodes - 1) / nodes);
    out->pretended = (int32_t)node;
    if (!topology->hwloc[0])
        find_real(out);
    else if (find_synthetic(topology->hwloc, rank - first, next - first, out))
        return ep_fail(
            EP_ERR_SETTING,
            "setting EP_TOPOLOGY: expected a synthetic topology of hwloc after the /, as "
            "in numa:2 core:4 pu:1, got '%s'",
            topology->hwloc);
    return EP_OK;
}

int ep_place_same_node(const EpPlace *a, const EpPlace *b) {
    return a->pretended == b->pretended && strcmp(a->machine, b->machine) == 0;
}
