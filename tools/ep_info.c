/* SPDX-License-Identifier: Apache-2.0 */

/**
 * ep_info prints the version of libep, the settings, the topology of the ranks, the backend of a
 * configuration with the reason, and its memory. It creates a group of all MPI ranks, or of one
 * rank without mpirun. With --mesh it describes a mesh instead (tools/info/mesh.h), with --plan it
 * computes what a group would take (tools/info/plan.h), and starts nothing.
 */

#include <mpi.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/common/layout.h"
#include "tools/common/tool.h"
#include "tools/common/util.h"
#include "tools/info/mesh.h"
#include "tools/info/plan.h"

const char *const bench_program = "ep_info";

/* ---- command line -------------------------------------------------------------------------- */

typedef struct Options {
    RunOptions run;
    int64_t ranks, hidden, top_k, experts, tokens, alignment, capacity;
    bool markdown;
    MeshOptions mesh;
    PlanOptions plan;
} Options;

enum { DEFAULT_TOKENS = 2048 };

#define AT(member) offsetof(Options, member)

static const Option specs[] = {
    {0, "ranks", "N", OPTION_INT(ranks, 1, PLAN_MAX_RANKS), NULL, 0,
     "ranks of the configuration (default: as started)"},
    {0, "hidden", "N", OPTION_INT(hidden, 1, EP_MAX_ROW_BYTES / 2), NULL, 7168,
     "elements per row, of 2 bytes (7168)"},
    {0, "top-k", "N", OPTION_INT(top_k, 1, EP_MAX_TOP_K), NULL, 8, "experts per token (8)"},
    {0, "experts", "N", OPTION_INT(experts, 1, 1 << 20), NULL, 256,
     "experts of all ranks together (256)"},
    {0, "tokens", "N", OPTION_INT(tokens, 1, OPTION_MAX_COUNT), NULL, 0,
     "most tokens per rank and step (2048; a plan: the trace's, or 128)"},
    {0, "align", "N", OPTION_INT(alignment, 1, 1 << 20), NULL, 128,
     "slabs are padded to multiples of this (128)"},
    {0, "capacity", "N", OPTION_INT(capacity, 0, INT32_MAX), NULL, 0,
     "static receive rows (0: exact sizing)"},
    {0, "mesh", "AXES", OPTION_TEXT(mesh.mesh), NULL, 0,
     "axes of a mesh, outermost first, as in data=2,fsdp=2,expert=4; no ranks are started"},
    {0, "spec", "SPEC", OPTION_TEXT(mesh.spec), NULL, 0,
     "axes that shard each dimension of a tensor, as in (fsdp,expert),_"},
    {0, "kind", "KIND", OPTION_TEXT(mesh.kind), NULL, 0,
     "the tensor: weight, expert-weight or activation (weight)"},
    {0, "shape", "SHAPE", OPTION_TEXT(mesh.shape), NULL, 0,
     "of the whole tensor, as in 256,7168,2048 (small shards)"},
    {0, "rank", "N", OPTION_TEXT(mesh.rank), NULL, 0, "whose groups are printed (0)"},
    {0, "plan", "ROUTING", OPTION_TEXT(plan.routing), NULL, 0,
     "compute what a group would take: uniform, zipf[:s] or a trace of ep_bench --save-routing; no "
     "ranks are started"},
    {0, "nodes", "N", OPTION_INT(plan.nodes, 1, PLAN_MAX_RANKS), NULL, 0,
     "of a plan, with equal numbers of ranks (1)"},
    {0, "network", "GB/s", OPTION_TEXT(plan.network), NULL, 0,
     "of a plan: what a rank sends to other nodes, or nvlink or sockets as measured (50)"},
    {0, "node-rows", "N", OPTION_INT(plan.node_rows, 1, OPTION_MAX_COUNT), NULL, 0,
     "of a plan: places of a message to another node (all, and what it proposes)"},
    {0, "sets", "N", OPTION_INT(plan.sets, 1, EP_MAX_LATENCY_SETS), NULL, 4,
     "of a plan: sets of buffers of latency mode (4)"},
    {0, "settings-markdown", NULL, OPTION_FLAG(markdown), NULL, 0,
     "print only the table of settings, for docs/settings.md"},
    OPTION_THREADS,
    OPTION_HELP,
};

static const OptionTable table = {
    "usage: [mpirun -n RANKS] ep_info [options]\n\n"
    "Version, settings, topology, backend, and the memory of a configuration; or a mesh, and what\n"
    "happens to a tensor there; or what a group of any size would take.\n\n",
    specs, sizeof(specs) / sizeof(specs[0])};

/* ---- version and settings ------------------------------------------------------------------ */

static void print_build(void) {
    printf("built against: ep.h %d.%d.%d, MPI %d.%d\n", EP_VERSION_MAJOR, EP_VERSION_MINOR,
           EP_VERSION_PATCH, MPI_VERSION, MPI_SUBVERSION);
#ifdef __clang__
    printf("compiler:      %s\n", __VERSION__);
#else
    printf("compiler:      gcc %s\n", __VERSION__);
#endif
}

static void print_setting(const EpSetting *setting, void *context) {
    (void)context;
    bool changed = strcmp(setting->value, setting->default_value) != 0;
    printf("%c %-17s %-16s default %-12s %s\n  %-17s %s\n", changed ? '*' : ' ', setting->name,
           setting->value[0] ? setting->value : "-",
           setting->default_value[0] ? setting->default_value : "-", setting->type, "",
           setting->doc);
}

/* Escape bars, which would end the table's cell. */
static void print_cell(const char *text) {
    for (; *text; text++)
        printf("%s%c", *text == '|' ? "\\" : "", *text);
}

static void print_markdown_row(const EpSetting *setting, void *context) {
    (void)context;
    printf("| `%s` | ", setting->name);
    print_cell(setting->type);
    if (setting->default_value[0])
        printf(" | `%s` | ", setting->default_value);
    else
        printf(" | | ");
    print_cell(setting->doc);
    printf(" |\n");
}

static bool print_settings_markdown(void) {
    printf("| setting | type | default | meaning |\n| --- | --- | --- | --- |\n");
    return bench_ok(ep_settings(print_markdown_row, NULL), "ep_settings");
}

/* ---- topology ------------------------------------------------------------------------------ */

#define MOST_NODES 64 /* of which rails are printed */

/** What one rank sends to the others about itself. */
typedef struct RankInfo {
    char host[64];
    EpGroupInfo info;
    int32_t relay[MOST_NODES]; /**< this rank's relay on each node, or -1 */
} RankInfo;

static EpGroupConfig configuration(const Options *o) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    config.num_experts = (int32_t)o->experts;
    config.max_tokens = (int32_t)(o->tokens ? o->tokens : DEFAULT_TOKENS);
    config.max_top_k = (int32_t)o->top_k;
    config.max_row_bytes = o->hidden * 2;
    config.alignment = (int32_t)o->alignment;
    config.max_recv_rows = o->capacity;
    return config;
}

/* The topology does not depend on the sizes of a group, so this creates a small one. */
static bool describe_rank(const EpBootstrap *boot, const Options *o, RankInfo *out) {
    EpGroupConfig config = EP_GROUP_CONFIG_INIT;
    EpGroup *group = NULL;
    config.num_experts = (int32_t)o->experts;
    config.max_tokens = 1, config.max_top_k = 1, config.max_row_bytes = 16;
    out->info = (EpGroupInfo)EP_GROUP_INFO_INIT;
    gethostname(out->host, sizeof(out->host) - 1);
    bool ok = bench_ok(ep_group_create(boot, &config, &group), "ep_group_create") &&
              bench_ok(ep_group_query(group, &out->info), "ep_group_query");
    for (int node = 0; node < MOST_NODES; node++)
        if (!ok || ep_group_relay(group, node, &out->relay[node]) != EP_OK) out->relay[node] = -1;
    ep_group_destroy(group);
    return ok;
}

static void print_rank(int rank, const RankInfo *rank_info) {
    const EpGroupInfo *info = &rank_info->info;
    char numa[16], experts[32], gpu[96] = "";
    snprintf(numa, sizeof(numa), info->numa_node < 0 ? "several" : "%d", info->numa_node);
    snprintf(experts, sizeof(experts), info->num_local_experts ? "%d-%d" : "none",
             info->first_expert, info->first_expert + info->num_local_experts - 1);
    if (info->device >= 0)
        snprintf(gpu, sizeof(gpu), "  %d: %s%s", info->device, info->gpu,
                 info->bound ? ", bound near it" : "");
    printf("%6d  %-20s %5d %8s %6d  %-9s%s\n", rank, rank_info->host, info->node, numa,
           info->num_cpus, experts, gpu);
}

/* Say that GPUs of one machine are several nodes, and why, unless the nodes are pretended. */
static void print_apart(const RankInfo *all) {
    const EpGroupInfo *first = &all[0].info;
    const char *topology = getenv("LIBEP_TOPOLOGY"), *peers = getenv("LIBEP_PEERS");
    const char *disabled = getenv("NCCL_P2P_DISABLE");
    bool apart = false;
    bool forbidden = (peers && strcmp(peers, "none") == 0) || (disabled && atoi(disabled) != 0);
    for (int r = 1; r < first->size; r++)
        for (int s = 0; s < r; s++)
            apart |= all[r].info.node != all[s].info.node && !strcmp(all[r].host, all[s].host);
    if (!apart || first->backend != EP_BACKEND_CUDA || (topology && topology[0])) return;
    printf("  GPUs of one machine that do not reach each other's memory are nodes of their own%s\n",
           forbidden ? ": LIBEP_PEERS or NCCL_P2P_DISABLE forbids peer access" : "");
}

/* Print each node's ranks in a row: those of a column exchange what their nodes need of each other,
 * so they should share a rail of the network. */
static void print_nodes(const RankInfo *all) {
    const EpGroupInfo *first = &all[0].info;
    printf("\nnodes: %s within a node", first->within);
    if (first->num_nodes > 1) printf(", %s between nodes", first->between);
    printf("\n");
    print_apart(all);
    for (int node = 0; node < first->num_nodes && first->num_nodes > 1; node++) {
        printf("  node %d: rank", node);
        for (int r = 0; r < first->size; r++)
            if (all[r].info.node == node) printf(" %3d", r);
        printf("\n");
    }
    if (first->num_nodes == 1 || all[0].relay[0] < 0) return;
    printf("relays: for another node, a rank sends to one rank there\n  rank ");
    for (int node = 0; node < first->num_nodes && node < MOST_NODES; node++)
        printf("  node %d", node);
    for (int r = 0; r < first->size; r++) {
        printf("\n%6d ", r);
        for (int node = 0; node < first->num_nodes && node < MOST_NODES; node++)
            printf(node == all[r].info.node ? "       -" : "  %6d", all[r].relay[node]);
    }
    printf("\n");
}

/* Print whose constants divide the blocks: rank 0's, and those of ranks that have others. */
static void print_division(const RankInfo *all) {
    for (int r = 0; r < all[0].info.size && all[0].info.tuning[0]; r++)
        if (!r || strcmp(all[r].info.tuning, all[0].info.tuning) != 0)
            printf("%sdivision of blocks, rank %d: %s\n", r ? "" : "\n", r, all[r].info.tuning);
}

static bool print_topology(World *world, const Options *o, EpGroupInfo *info) {
    RankInfo mine = {.host = ""};
    RankInfo *all = bench_alloc((size_t)world->size, sizeof(RankInfo), "the ranks");
    bool ok = world_all(world, all && describe_rank(&world->boot, o, &mine)) &&
              world_allgather(world, &mine, all, sizeof(mine));
    if (ok && world->rank == 0) {
        printf("\ntopology: %d rank%s on %d node%s\n%6s  %-20s %5s %8s %6s  %-9s%s\n", world->size,
               world->size == 1 ? "" : "s", mine.info.num_nodes,
               mine.info.num_nodes == 1 ? "" : "s", "rank", "host", "node", "numa", "cpus",
               "experts", mine.info.backend == EP_BACKEND_CUDA ? "  gpu" : "");
        for (int r = 0; r < world->size; r++)
            print_rank(r, &all[r]);
        if (world->size > 1) print_nodes(all);
        print_division(all);
    }
    *info = mine.info;
    free(all);
    return ok;
}

/* ---- backend and memory -------------------------------------------------------------------- */

static void print_bytes(const char *what, int64_t bytes) {
    printf("  %-34s %15lld bytes  (%.1f MiB)\n", what, (long long)bytes, (double)bytes / (1 << 20));
}

static void print_rows(const EpGroupConfig *config, int ranks, EpLayout layout, const char *name) {
    int64_t rows, most = 0;
    for (int r = 0; r < ranks; r++) {
        if (ep_max_recv_rows(config, ranks, r, layout, 0, &rows) != EP_OK) {
            printf("  %-34s %s\n", name, ep_last_error());
            return;
        }
        most = rows > most ? rows : most;
    }
    printf("  %-34s %15lld rows\n", name, (long long)most);
}

/* `reason` may begin with the backend's name, which is then not repeated. If the configuration is
 * not feasible, the reason is printed later, as an error. */
static void print_backend(const EpGroupMemory *memory, const char *reason) {
    const char *name = memory->backend == EP_BACKEND_CUDA ? "cuda" : "host";
    size_t length = strlen(name);
    if (!memory->feasible)
        printf("\nbackend: %s\n", name);
    else if (strncmp(reason, name, length) == 0)
        printf("\nbackend: %s\n", reason);
    else
        printf("\nbackend: %s: %s\n", name, reason);
}

/* If the configuration has as many ranks as were started, its backend is theirs. */
static bool print_memory(const Options *o, int ranks, const EpGroupInfo *info) {
    EpGroupConfig config = configuration(o);
    EpGroupMemory memory = EP_GROUP_MEMORY_INIT;
    if (ranks == info->size) config.backend = info->backend;
    if (!bench_ok(ep_group_memory(&config, ranks, &memory), "ep_group_memory")) return false;
    print_backend(&memory, ranks == info->size ? info->reason : memory.reason);
    printf("\nmemory: ranks %d, experts %lld, tokens a rank %lld, top-k %lld, row bytes %lld%s\n",
           ranks, (long long)o->experts, (long long)config.max_tokens, (long long)o->top_k,
           (long long)config.max_row_bytes, memory.feasible ? "" : ": not feasible");
    if (!memory.feasible) return bench_fail("%s", memory.reason);
    print_bytes("shared with peers, per rank", memory.shared_bytes);
    print_bytes("private, per rank", memory.private_bytes);
    print_bytes("each handle, per rank", memory.handle_bytes);
    printf("most rows a rank can receive (distinct experts per token)\n");
    for (const Layout *l = tool_layouts; l->name; l++)
        print_rows(&config, ranks, l->layout, l->capacity);
    return true;
}

/* ---- everything ---------------------------------------------------------------------------- */

/* Bad settings are an error at the end, after all that can be printed without them. */
static bool print_all(World *world, const Options *o) {
    const int ranks = o->ranks ? (int)o->ranks : world->size;
    char message[BENCH_MESSAGE_BYTES] = "";
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    if (world->rank == 0) {
        printf("libep " VERSION_FORMAT "\n", VERSION_NUMBERS);
        print_build();
        printf("\nsettings (* changed)\n");
    }
    EpStatus status = ep_settings(world->rank == 0 ? print_setting : NULL, NULL);
    if (!world_all(world, bench_ok(status, "ep_settings")))
        snprintf(message, sizeof(message), "%s", bench_error_message());
    bool ok = print_topology(world, o, &info) &&
              world_all(world, world->rank != 0 || print_memory(o, ranks, &info));
    if (!message[0]) return ok;
    return bench_fail("%s", message);
}

static bool has_mesh(const MeshOptions *m) {
    return m->mesh || m->spec || m->kind || m->shape || m->rank;
}

static bool is_plan(const Options *o) {
    const PlanOptions *p = &o->plan;
    return p->routing || p->nodes || p->network || p->node_rows;
}

static bool run_plan(World *world, const Options *o) {
    PlanOptions plan = o->plan;
    if (!plan.routing)
        return bench_refuse("--nodes, --network and --node-rows: expected them with --plan");
    plan.ranks = o->ranks, plan.tokens = o->tokens, plan.top_k = o->top_k;
    plan.experts = o->experts, plan.row_bytes = o->hidden * 2, plan.capacity = o->capacity;
    return print_plan(world, &plan);
}

static bool run(World *world, const void *options) {
    const Options *o = options;
    bool ok = o->markdown || has_mesh(&o->mesh);
    if (is_plan(o)) return run_plan(world, o);
    if (o->ranks > EP_MAX_RANKS)
        return bench_refuse("--ranks: expected 1 .. %d without --plan, got %lld", EP_MAX_RANKS,
                            (long long)o->ranks);
    if (!ok && print_all(world, o)) return true;
    if (ok) ok = o->markdown ? print_settings_markdown() : print_mesh(&o->mesh);
    /* A wrong setting is not a wrong command line here. */
    if (!ok && !has_mesh(&o->mesh)) bench_error_set(BENCH_EXIT_WRONG, bench_error_message());
    return ok;
}

/* A single rank does not use MPI, so that ep_info starts quickly. */
static bool complete(void *options) {
    Options *o = options;
    bool starts = !o->markdown && !has_mesh(&o->mesh) && !is_plan(o);
    if (o->run.threads) return option_check_threads(&o->run);
    o->run.threads = world_launched() && starts ? 0 : 1;
    return true;
}

int main(int argc, char **argv) {
    static const Tool tool = {"libep", &table, complete, run};
    Options options = {.markdown = false};
    return tool_main(&tool, argc, argv, &options);
}
