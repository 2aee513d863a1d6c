/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_CHOOSE_H
#define EP_BOOTSTRAP_CHOOSE_H

/**
 * Which backend serves a group: what the configuration asks for, as far as all ranks can have it.
 */

#include "bootstrap/gpus.h"
#include "runtime/group.h"

/**
 * Choose, together with all ranks, which have agreed on the configuration before. Unless the host
 * backend is asked for, ranks report their GPUs into reports[size]. EP_ERR_UNSUPPORTED, on every
 * rank, where the cuda backend is asked for and some rank cannot have it.
 */
EpStatus ep_backend_agree(const EpCall *call, const EpBootstrap *bootstrap,
                          const EpGroupConfig *config, const EpSettings *settings,
                          const int32_t *nodes, EpGpuReport *reports, EpChoice *out);

#endif
