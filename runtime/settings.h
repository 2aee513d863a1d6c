/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_SETTINGS_H
#define EP_RUNTIME_SETTINGS_H

/**
 * All settings of libep, in one table. The parser, ep_settings, ep_info, docs/settings.md and the
 * warning about unknown LIBEP_ names use it. Settings are read only when a group is created.
 *
 * X(field, C type, name, type as users read it, default, one line of documentation)
 */

#include "ep/ep.h"
#include "runtime/log.h"

#define EP_SETTINGS_MAP(X)                                                                   \
    X(backend, EpBackend, "LIBEP_BACKEND", "choice: auto|host|cuda", "auto",                 \
      "backend of groups whose configuration says AUTO")                                     \
    X(timeout, double, "LIBEP_TIMEOUT", "seconds", "100",                                    \
      "deadline of every wait for another rank")                                             \
    X(stage_bytes, int64_t, "LIBEP_STAGE_BYTES", "bytes", "32M",                             \
      "staging memory per rank and group on the host backend; equal on all ranks")           \
    X(node_chunk, int64_t, "LIBEP_NODE_CHUNK", "bytes", "32M",                               \
      "cuda backend on several nodes: most that a rank sends at a time; equal on all ranks") \
    X(node_latency, int64_t, "LIBEP_NODE_LATENCY", "tokens", "128",                          \
      "several nodes: AUTO is latency mode where max_tokens is at most this; equal on all "  \
      "ranks")                                                                               \
    X(num_sms, int64_t, "LIBEP_NUM_SMS", "count", "auto",                                    \
      "multiprocessors that operations of the cuda backend may use; auto: all, on several "  \
      "nodes all but 32, or a quarter")                                                      \
    X(shared_bytes, int64_t, "LIBEP_SHARED_BYTES", "count", "auto",                          \
      "most shared memory of a block of the cuda backend; auto: all that the GPU has; to "   \
      "test smaller GPUs")                                                                   \
    X(weight_sms, int64_t, "LIBEP_WEIGHT_SMS", "count", "auto",                              \
      "most blocks of a kernel that moves weights on one node; auto: 64, of NCCL's 48, and " \
      "of kernels beside NCCL's the others; equal on all ranks")                             \
    X(bind, EpBind, "LIBEP_BIND", "choice: none|gpu", "none",                                \
      "gpu: bind each rank to the CPUs near its GPU when a group is created")                \
    X(check, EpCheck, "LIBEP_CHECK", "choice: none|rows|all", "rows",                        \
      "which tensors' memory the cuda backend validates before an operation")                \
    X(share_gpus, EpShareGpus, "LIBEP_SHARE_GPUS", "choice: no|yes", "no",                   \
      "yes: ranks in separate processes may share a GPU; for debugging, not for speed")      \
    X(peers, EpPeers, "LIBEP_PEERS", "choice: auto|none", "auto",                            \
      "none: GPUs count as if they did not reach each other's memory, so each is a node")    \
    X(lines, EpLines, "LIBEP_LINES", "choice: auto|whole|fenced", "auto",                    \
      "how rows of latency mode signal their arrival; auto: whole lines over NVLink")        \
    X(tuning, EpSettingText, "LIBEP_TUNING", "file", "",                                     \
      "cuda backend: constants of the division of blocks, as ep_tune writes them; a rank's " \
      "own; empty: the built-in table")                                                      \
    X(sums, EpSums, "LIBEP_SUMS", "choice: rank|entry", "rank",                              \
      "libnccl_ep: entry makes its groups add all of a token's rows on the token's rank")    \
    X(spin, int64_t, "LIBEP_SPIN", "count", "auto",                                          \
      "polls before a waiting rank yields its CPU; auto: 0 where ranks outnumber CPUs, and " \
      "sleep between polls where 16 ranks share each CPU")                                   \
    X(topology, EpSettingTopology, "LIBEP_TOPOLOGY", "nodes", "",                            \
      "pretended nodes (NVLink domains), equal on all ranks: 2 divides the ranks, 0,1,0,1 "  \
      "lists each one's node; /numa:2 core:4 pu:1 after it gives each node a machine "       \
      "(hwloc)")                                                                             \
    X(interface, EpSettingText, "LIBEP_INTERFACE", "text", "",                               \
      "network interface of libep's own messages between nodes, as eth0; empty: any")        \
    X(log_level, EpLogLevel, "LIBEP_LOG", "choice: warn|info|debug|trace", "warn",           \
      "how much to log")                                                                     \
    X(log_file, EpSettingText, "LIBEP_LOG_FILE", "text", "", "where to log; empty: stderr")

#define EP_COUNT_AUTO (-1)

/* These enumerations follow the order of the words in the table. */
typedef enum EpBind { EP_BIND_NONE, EP_BIND_GPU } EpBind;
typedef enum EpCheck { EP_CHECK_NONE, EP_CHECK_ROWS, EP_CHECK_ALL } EpCheck;
typedef enum EpShareGpus { EP_SHARE_GPUS_NO, EP_SHARE_GPUS_YES } EpShareGpus;

typedef enum EpPeers { EP_PEERS_AUTO, EP_PEERS_NONE } EpPeers;
typedef enum EpLines { EP_LINES_AUTO, EP_LINES_WHOLE, EP_LINES_FENCED } EpLines;

typedef struct EpSettingText {
    char text[256];
} EpSettingText;

typedef struct EpSettingTopology {
    int32_t nodes;  /**< pretended nodes that divide the ranks; 0: a list, or the real machine */
    int32_t listed; /**< ranks in the list; 0: none */
    int16_t node[EP_MAX_RANKS]; /**< of each rank in the list */
    char hwloc[256];            /**< synthetic topology of each node; "": the machine's own CPUs */
    uint64_t hash;              /**< of the value */
    char text[72];              /**< the start of the value, for sentences; "": the real machine */
} EpSettingTopology;

typedef struct EpSettings {
#define SETTING_FIELD(field, type, name, kind, standard, doc) type field;
    EP_SETTINGS_MAP(SETTING_FIELD)
#undef SETTING_FIELD
} EpSettings;

/** Read the environment. EP_ERR_SETTING if a value does not parse; unknown names are accepted. */
EpStatus ep_settings_load(EpSettings *out);

/** Returns the first LIBEP_ entry of the environment that is not a setting, or NULL. It is valid
 *  until the environment changes. Names that begin with LIBEP_TEST_ belong to the tests. */
const char *ep_settings_unknown(void);

#endif
