/* SPDX-License-Identifier: Apache-2.0 */
#include "bootstrap/bootstrap.h"

#include <errno.h>
#include <fcntl.h>
#include <hwloc.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- the machine as it is ------------------------------------------------------------------ */

/* hwloc would read every core at each creation of a group, which takes tens of milliseconds on a
 * large machine. Two sources suffice: the calling thread's CPUs, and each NUMA node's CPU list. */

/* Parse the first line of a file: a list of numbers, as in "0-27,56-83". Returns 0 on failure. */
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

/* Get the CPUs that the calling thread may run on. Returns 0 on failure. The kernel refuses a set
 * that is too small, so the size is doubled until it fits. */
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

/* Returns the only NUMA node that has any of the CPUs, or -1 if several have, or none. `nodes` and
 * `node_cpus` are scratch. */
static int32_t numa_with(hwloc_const_cpuset_t cpus, hwloc_bitmap_t nodes,
                         hwloc_bitmap_t node_cpus) {
    int32_t numa = -1;
    unsigned node;
    if (!read_list("/sys/devices/system/node/online", nodes)) return 0; /* a kernel without NUMA */
    hwloc_bitmap_foreach_begin(node, nodes) {
        char path[64];
        snprintf(path, sizeof(path), "/sys/devices/system/node/node%u/cpulist", node);
        if (!read_list(path, node_cpus) || !hwloc_bitmap_intersects(node_cpus, cpus)) continue;
        if (numa >= 0) return -1;
        numa = (int32_t)node;
    }
    hwloc_bitmap_foreach_end();
    return numa;
}

static void find_real(EpLocation *location) {
    hwloc_bitmap_t cpus = hwloc_bitmap_alloc(), nodes = hwloc_bitmap_alloc();
    hwloc_bitmap_t node_cpus = hwloc_bitmap_alloc();
    location->numa = -1;
    location->cpus = (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
    if (cpus && nodes && node_cpus && thread_cpus(cpus)) {
        location->numa = numa_with(cpus, nodes, node_cpus);
        location->cpus = hwloc_bitmap_weight(cpus);
    }
    hwloc_bitmap_free(cpus);
    hwloc_bitmap_free(nodes);
    hwloc_bitmap_free(node_cpus);
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

/* Describe rank `index` of `ranks` ranks that are spread evenly over a machine that hwloc makes up.
 * Returns -1 if the description is malformed. */
static int find_synthetic(const char *description, int32_t index, int32_t ranks,
                          EpLocation *location) {
    hwloc_topology_t topology = load(description);
    if (!topology) return -1;
    int count = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_PU);
    int first = (int)((int64_t)count * index / ranks);
    int last = (int)((int64_t)count * (index + 1) / ranks) - 1;
    hwloc_cpuset_t cpus = hwloc_bitmap_alloc();
    if (cpus) {
        hwloc_bitmap_set_range(cpus, (unsigned)first, last < first ? first : last);
        location->numa = numa_of(topology, cpus);
        location->cpus = hwloc_bitmap_weight(cpus);
    }
    hwloc_bitmap_free(cpus);
    hwloc_topology_destroy(topology);
    return 0;
}

/* ---- locations ----------------------------------------------------------------------------- */

#define BOOT_ID "/proc/sys/kernel/random/boot_id"
#define HOST_BYTES 65 /* Linux allows 64 characters */

/* Read the boot id, or leave `boot` empty where the kernel has none, which is so on every rank of
 * the machine. A rank that cannot read it for another reason must not go on: without it, it would
 * count as a machine of its own. Returns 0 or errno. */
static int read_boot_id(char *boot, size_t boot_bytes) {
    ssize_t got;
    boot[0] = 0;
    int fd = open(BOOT_ID, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT ? 0 : errno;
    do
        got = read(fd, boot, boot_bytes - 1);
    while (got < 0 && errno == EINTR);
    int error = got < 0 ? errno : 0;
    close(fd);
    boot[got < 0 ? 0 : got] = 0;
    boot[strcspn(boot, "\n")] = 0;
    return error;
}

static EpStatus name_machine(EpLocation *location, int32_t rank) {
    char boot[37], host[HOST_BYTES] = "";
    _Static_assert(sizeof(location->machine) >= sizeof(host) + sizeof(boot), "both fit, in full");
    int error = read_boot_id(boot, sizeof(boot));
    if (error)
        return ep_fail(EP_ERR_SYSTEM, "rank %d: ep_group_create: cannot read " BOOT_ID ": %s", rank,
                       strerror(error));
    if (gethostname(host, sizeof(host)))
        return ep_fail(EP_ERR_SYSTEM, "rank %d: ep_group_create: cannot get the host's name: %s",
                       rank, strerror(errno));
    snprintf(location->machine, sizeof(location->machine), "%s %s", host, boot);
    return EP_OK;
}

/* Returns the pretended node of a rank. Unless they are listed, each node gets consecutive ranks,
 * as evenly as possible; with more nodes than ranks, some nodes are empty. */
static int32_t pretended_node(const EpSettingTopology *topology, int32_t rank, int32_t size) {
    return topology->listed ? topology->node[rank]
                            : (int32_t)((int64_t)rank * topology->nodes / size);
}

EpStatus ep_location_find(const EpSettingTopology *topology, int32_t rank, int32_t size,
                          EpLocation *out) {
    memset(out, 0, sizeof(*out));
    EP_TRY(name_machine(out, rank));
    if (!topology->nodes && !topology->listed) {
        find_real(out);
        return EP_OK;
    }
    if (topology->listed && topology->listed != size)
        return ep_fail(EP_ERR_SETTING,
                       "setting LIBEP_TOPOLOGY: expected the node of each of the group's %d ranks, "
                       "got %d in '%s'",
                       size, topology->listed, topology->text);
    out->pretended = pretended_node(topology, rank, size);
    int32_t before = 0, ranks = 0; /* of this node */
    for (int32_t r = 0; r < size; r++) {
        int same = pretended_node(topology, r, size) == out->pretended;
        before += same && r < rank;
        ranks += same;
    }
    if (!topology->hwloc[0])
        find_real(out);
    else if (find_synthetic(topology->hwloc, before, ranks, out))
        return ep_fail(
            EP_ERR_SETTING,
            "setting LIBEP_TOPOLOGY: expected a synthetic topology of hwloc after the /, as "
            "in numa:2 core:4 pu:1, got '%s'",
            topology->hwloc);
    return EP_OK;
}

int ep_location_same_node(const EpLocation *a, const EpLocation *b) {
    return a->pretended == b->pretended && strcmp(a->machine, b->machine) == 0;
}
