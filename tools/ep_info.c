/* SPDX-License-Identifier: Apache-2.0 */

/**
 * ep_info prints the version of libep, the settings, the topology of the ranks, the backend of a
 * configuration with the reason, and its memory. It creates a group of all MPI ranks, or of one
 * rank without mpirun. With --mesh it describes a mesh instead (tools/info/mesh.h), and starts
 * nothing.
 */

#include <errno.h>
#include <getopt.h>
#include <mpi.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ep/ep.h"
#include "ep/ep_mpi.h"
#include "tools/common/layout.h"
#include "tools/info/mesh.h"

enum { EXIT_FAILED = 1, EXIT_USAGE = 2 };

/* ---- command line -------------------------------------------------------------------------- */

typedef struct Options {
    int64_t ranks, hidden, top_k, experts, tokens, alignment, capacity;
    bool markdown, help, version;
    MeshOptions mesh;
} Options;

typedef struct Number {
    const char *name;
    int64_t *value;
    int64_t low, high;
    const char *doc;
} Number;

enum { NUM_NUMBERS = 7, NUM_TEXTS = 5, KEY_TEXTS = 50, KEY_MARKDOWN = 100, KEY_VERSION };

/** An option about a mesh, and where its text goes. */
typedef struct Text {
    const char *name, **value, *doc;
} Text;

static void list_numbers(Options *o, Number *out) {
    const Number numbers[NUM_NUMBERS] = {
        {"ranks", &o->ranks, 1, EP_MAX_RANKS, "ranks of the configuration (default: as started)"},
        {"hidden", &o->hidden, 1, EP_MAX_ROW_BYTES / 2, "elements per row, of 2 bytes (7168)"},
        {"top-k", &o->top_k, 1, EP_MAX_TOP_K, "experts per token (8)"},
        {"experts", &o->experts, 1, 1 << 20, "experts of all ranks together (256)"},
        {"tokens", &o->tokens, 1, 1 << 24, "most tokens per rank and step (2048)"},
        {"align", &o->alignment, 1, 1 << 20, "slabs are padded to multiples of this (128)"},
        {"capacity", &o->capacity, 0, INT32_MAX, "static receive rows (0: exact sizing)"},
    };
    memcpy(out, numbers, sizeof(numbers));
}

static void list_texts(Options *o, Text *out) {
    MeshOptions *m = &o->mesh;
    const Text texts[NUM_TEXTS] = {
        {"mesh", &m->mesh, "axes, outermost first, as in data=2,fsdp=2,expert=4"},
        {"spec", &m->spec, "axes that shard each dimension of a tensor, as in (fsdp,expert),_"},
        {"kind", &m->kind, "the tensor: weight, expert-weight or activation (weight)"},
        {"shape", &m->shape, "of the whole tensor, as in 256,7168,2048 (small shards)"},
        {"rank", &m->rank, "whose groups are printed (0)"},
    };
    memcpy(out, texts, sizeof(texts));
}

static bool refuse(char *message, size_t bytes, const char *option, const char *expected,
                   const char *got) {
    snprintf(message, bytes, "%s: expected %s, got \"%s\"", option, expected, got);
    return false;
}

static bool read_number(const Number *number, const char *text, char *message, size_t bytes) {
    char *end, option[32], expected[96];
    errno = 0;
    long long value = strtoll(text, &end, 10);
    bool whole = end != text && !*end && !errno && text[0] != ' ' && text[0] != '+';
    *number->value = value;
    if (whole && value >= number->low && value <= number->high) return true;
    snprintf(option, sizeof(option), "--%s", number->name);
    snprintf(expected, sizeof(expected), "a whole number from %lld to %lld", (long long)number->low,
             (long long)number->high);
    return refuse(message, bytes, option, expected, text);
}

static void list_long_options(const Number *numbers, const Text *texts, struct option *longs) {
    for (int i = 0; i < NUM_NUMBERS; i++)
        *longs++ = (struct option){numbers[i].name, required_argument, NULL, i};
    for (int i = 0; i < NUM_TEXTS; i++)
        *longs++ = (struct option){texts[i].name, required_argument, NULL, KEY_TEXTS + i};
    *longs++ = (struct option){"settings-markdown", no_argument, NULL, KEY_MARKDOWN};
    *longs++ = (struct option){"help", no_argument, NULL, 'h'};
    *longs++ = (struct option){"version", no_argument, NULL, KEY_VERSION};
    *longs = (struct option){NULL, 0, NULL, 0};
}

static bool parse(Options *o, int argc, char **argv, char *message, size_t bytes) {
    Number numbers[NUM_NUMBERS];
    Text texts[NUM_TEXTS];
    struct option longs[NUM_NUMBERS + NUM_TEXTS + 4];
    list_numbers(o, numbers);
    list_texts(o, texts);
    list_long_options(numbers, texts, longs);
    opterr = 0;
    for (;;) {
        int at = optind, key = getopt_long(argc, argv, "+:h", longs, NULL);
        if (key == -1) break;
        if (key == ':') return refuse(message, bytes, argv[at], "an argument", "");
        if (key == '?')
            return refuse(message, bytes, "arguments", "an option of ep_info (see --help)",
                          argv[at]);
        if (key < NUM_NUMBERS && !read_number(&numbers[key], optarg, message, bytes)) return false;
        if (key >= KEY_TEXTS && key < KEY_TEXTS + NUM_TEXTS) *texts[key - KEY_TEXTS].value = optarg;
        o->markdown = o->markdown || key == KEY_MARKDOWN;
        o->version = o->version || key == KEY_VERSION;
        o->help = o->help || key == 'h';
    }
    if (optind < argc) return refuse(message, bytes, "arguments", "options alone", argv[optind]);
    return true;
}

static void print_help(Options *o) {
    Number numbers[NUM_NUMBERS];
    Text texts[NUM_TEXTS];
    list_numbers(o, numbers);
    list_texts(o, texts);
    printf("usage: [mpirun -n RANKS] ep_info [options]\n\n"
           "Version, settings, topology, backend, and the memory of a configuration:\n\n");
    for (int i = 0; i < NUM_NUMBERS; i++)
        printf("      --%-18s %s\n", numbers[i].name, numbers[i].doc);
    printf("\nA mesh, and what happens to a tensor there; no ranks are started:\n\n");
    for (int i = 0; i < NUM_TEXTS; i++)
        printf("      --%-18s %s\n", texts[i].name, texts[i].doc);
    printf("\n      --settings-markdown  print only the table of settings, in Markdown\n"
           "      --version            print only the version\n"
           "  -h, --help               print this help\n");
}

/* ---- version and settings ------------------------------------------------------------------ */

static void print_version(void) {
    int v = ep_version();
    printf("libep %d.%d.%d\n", v / 10000, v / 100 % 100, v % 100);
}

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

static int print_settings_markdown(void) {
    printf("| setting | type | default | meaning |\n| --- | --- | --- | --- |\n");
    if (ep_settings(print_markdown_row, NULL) == EP_OK) return EXIT_SUCCESS;
    fprintf(stderr, "ep_info: %s\n", ep_last_error());
    return EXIT_FAILED;
}

/* ---- agreement ----------------------------------------------------------------------------- */

#define DEADLINE 100.0

/** The outcome of one rank. If one rank fails, all fail, and rank 0 prints the first failure. */
typedef struct RankStatus {
    int ok;
    char message[508];
} RankStatus;

static bool agree(const EpBootstrap *boot, bool ok) {
    RankStatus mine = {.ok = ok};
    RankStatus *all = calloc((size_t)boot->size, sizeof(RankStatus));
    snprintf(mine.message, sizeof(mine.message), "%s", ep_last_error());
    if (!all || boot->allgather(boot->context, &mine, all, sizeof(mine), DEADLINE) != EP_OK) {
        fprintf(stderr, "ep_info: rank %d: %s\n", boot->rank, ep_last_error());
        free(all);
        return false;
    }
    ok = true;
    for (int r = 0; r < boot->size && ok; r++) {
        ok = all[r].ok;
        if (!ok && boot->rank == 0) fprintf(stderr, "ep_info: %s\n", all[r].message);
    }
    free(all);
    return ok;
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
    config.max_tokens = (int32_t)o->tokens;
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
    bool ok = ep_group_create(boot, &config, &group) == EP_OK &&
              ep_group_query(group, &out->info) == EP_OK;
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

/* Print each node's ranks in a row: those of a column exchange what their nodes need of each other,
 * so they should share a rail of the network. */
static void print_nodes(const RankInfo *all) {
    const EpGroupInfo *first = &all[0].info;
    printf("\nnodes: %s within a node", first->within);
    if (first->num_nodes > 1) printf(", %s between nodes", first->between);
    printf("\n");
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

static bool print_topology(const EpBootstrap *boot, const Options *o, EpGroupInfo *info) {
    RankInfo mine = {.host = ""};
    RankInfo *all = calloc((size_t)boot->size, sizeof(RankInfo));
    bool ok =
        agree(boot, all && describe_rank(boot, o, &mine)) &&
        agree(boot, boot->allgather(boot->context, &mine, all, sizeof(mine), DEADLINE) == EP_OK);
    if (ok && boot->rank == 0) {
        printf("\ntopology: %d rank%s on %d node%s\n%6s  %-20s %5s %8s %6s  %-9s%s\n", boot->size,
               boot->size == 1 ? "" : "s", mine.info.num_nodes, mine.info.num_nodes == 1 ? "" : "s",
               "rank", "host", "node", "numa", "cpus", "experts",
               mine.info.backend == EP_BACKEND_CUDA ? "  gpu" : "");
        for (int r = 0; r < boot->size; r++)
            print_rank(r, &all[r]);
        if (boot->size > 1) print_nodes(all);
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
    if (ep_group_memory(&config, ranks, &memory) != EP_OK) return false;
    print_backend(&memory, ranks == info->size ? info->reason : memory.reason);
    printf("\nmemory: ranks %d, experts %lld, tokens a rank %lld, top-k %lld, row bytes %lld%s\n",
           ranks, (long long)o->experts, (long long)o->tokens, (long long)o->top_k,
           (long long)config.max_row_bytes, memory.feasible ? "" : ": not feasible");
    if (!memory.feasible) return ep_set_last_error(EP_ERR_UNSUPPORTED, memory.reason) == EP_OK;
    print_bytes("shared with peers, per rank", memory.shared_bytes);
    print_bytes("private, per rank", memory.private_bytes);
    print_bytes("each handle, per rank", memory.handle_bytes);
    printf("most rows a rank can receive (distinct experts per token)\n");
    for (const Layout *l = tool_layouts; l->name; l++)
        print_rows(&config, ranks, l->layout, l->capacity);
    return true;
}

/* ---- everything ---------------------------------------------------------------------------- */

static bool print_settings(const EpBootstrap *boot) {
    if (boot->rank == 0) printf("\nsettings (* changed)\n");
    return ep_settings(boot->rank == 0 ? print_setting : NULL, NULL) == EP_OK;
}

static bool print_all(const EpBootstrap *boot, const Options *o) {
    int ranks = o->ranks ? (int)o->ranks : boot->size;
    if (boot->rank == 0) {
        print_version();
        print_build();
    }
    EpGroupInfo info = EP_GROUP_INFO_INIT;
    bool settings_ok = agree(boot, print_settings(boot));
    bool ok = print_topology(boot, o, &info) &&
              agree(boot, boot->rank != 0 || print_memory(o, ranks, &info));
    fflush(stdout);
    return settings_ok && ok;
}

/* A single rank does not use MPI, so that ep_info starts quickly. */
static int run(const Options *o) {
    EpBootstrap boot = EP_BOOTSTRAP_INIT;
    bool mpi = getenv("OMPI_COMM_WORLD_SIZE") || getenv("PMI_SIZE") || getenv("PMIX_RANK");
    if (mpi) MPI_Init(NULL, NULL);
    EpStatus status = mpi ? ep_bootstrap_mpi(MPI_COMM_WORLD, &boot) : ep_bootstrap_local(1, &boot);
    int result = EXIT_FAILED;
    if (status == EP_OK)
        result = print_all(&boot, o) ? EXIT_SUCCESS : EXIT_FAILED;
    else
        fprintf(stderr, "ep_info: %s\n", ep_last_error());
    ep_bootstrap_destroy(&boot);
    if (mpi) MPI_Finalize();
    return result;
}

static bool has_mesh(const MeshOptions *m) {
    return m->mesh || m->spec || m->kind || m->shape || m->rank;
}

static int run_command(Options *o) {
    if (o->help)
        print_help(o);
    else if (o->version)
        print_version();
    else if (o->markdown)
        return print_settings_markdown();
    else if (has_mesh(&o->mesh))
        return print_mesh(&o->mesh);
    else
        return run(o);
    return EXIT_SUCCESS;
}

int main(int argc, char **argv) {
    Options o = {.hidden = 7168, .top_k = 8, .experts = 256, .tokens = 2048, .alignment = 128};
    char message[256];
    if (!parse(&o, argc, argv, message, sizeof(message))) {
        fprintf(stderr, "ep_info: %s\n", message);
        return EXIT_USAGE;
    }
    int result = run_command(&o);
    if (fflush(stdout) == 0 && !ferror(stdout)) return result;
    fprintf(stderr, "ep_info: not everything could be written to standard output\n");
    return EXIT_FAILED;
}
