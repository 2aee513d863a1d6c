/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_SETTINGS_H
#define EP_RUNTIME_SETTINGS_H

/**
 * Every setting of libep, in one table: it feeds the parser, ep_settings, ep_info, the README and
 * the warning about unknown EP_ names. Settings are read when a group is created and never later.
 *
 * X(field, C type, name, type as users read it, default, one line of documentation)
 */

#include "ep/ep.h"
#include "runtime/log.h"

#define EP_SETTINGS_MAP(X)                                                                         \
    X(backend, EpBackend, "EP_BACKEND", "choice: auto|host|cuda", "auto",                          \
      "backend of groups whose configuration says AUTO")                                           \
    X(timeout, double, "EP_TIMEOUT", "seconds", "100", "deadline of every wait for another rank")  \
    X(stage_bytes, int64_t, "EP_STAGE_BYTES", "bytes", "32M",                                      \
      "staging memory per rank and group on the host backend; equal on all ranks")                 \
    X(num_sms, int64_t, "EP_NUM_SMS", "count", "auto",                                             \
      "multiprocessors that operations of the cuda backend may use; auto: all")                    \
    X(bind, EpBind, "EP_BIND", "choice: none|gpu", "none",                                         \
      "gpu: bind each rank to the CPUs near its GPU when a group is created")                      \
    X(check, EpCheck, "EP_CHECK", "choice: none|rows|all", "rows",                                 \
      "tensors whose memory the cuda backend looks up before an operation")                        \
    X(share_gpus, EpShareGpus, "EP_SHARE_GPUS", "choice: no|yes", "no",                            \
      "yes: ranks of which each is a process may share a GPU; to find mistakes, not for speed")    \
    X(lines, EpLines, "EP_LINES", "choice: auto|whole|fenced", "auto",                             \
      "how rows of latency mode tell that they are there; auto: whole lines over NVLink")          \
    X(spin, int64_t, "EP_SPIN", "count", "auto",                                                   \
      "polls before a waiting rank yields its CPU; auto: none where ranks outnumber CPUs")         \
    X(topology, EpSettingTopology, "EP_TOPOLOGY", "nodes", "",                                     \
      "pretend: NODES, or NODES/HWLOC as in 2/numa:2 core:4 pu:1 (hwloc synthetic, per node)")     \
    X(log_level, EpLogLevel, "EP_LOG", "choice: warn|info|debug|trace", "warn", "how much to log") \
    X(log_file, EpSettingText, "EP_LOG_FILE", "text", "", "where to log; empty: stderr")

#define EP_COUNT_AUTO (-1)

/* In the order of the words in the table. */
typedef enum EpBind { EP_BIND_NONE, EP_BIND_GPU } EpBind;
typedef enum EpCheck { EP_CHECK_NONE, EP_CHECK_ROWS, EP_CHECK_ALL } EpCheck;
typedef enum EpShareGpus { EP_SHARE_GPUS_NO, EP_SHARE_GPUS_YES } EpShareGpus;

typedef enum EpLines { EP_LINES_AUTO, EP_LINES_WHOLE, EP_LINES_FENCED } EpLines;

typedef struct EpSettingText {
    char text[256];
} EpSettingText;

/** nodes 0: the machine as it is. hwloc "": pretended nodes with the machine's own CPUs. */
typedef struct EpSettingTopology {
    int32_t nodes;
    char hwloc[252];
} EpSettingTopology;

typedef struct EpSettings {
#define SETTING_FIELD(field, type, name, kind, standard, doc) type field;
    EP_SETTINGS_MAP(SETTING_FIELD)
#undef SETTING_FIELD
} EpSettings;

/** Read the environment. A value that does not parse is EP_ERR_SETTING; unknown names are not. */
EpStatus ep_settings_load(EpSettings *out);

/** The first EP_ name in the environment that is no setting, or NULL; valid until it changes. */
const char *ep_settings_unknown(void);

#endif
