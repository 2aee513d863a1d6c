/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_BOOTSTRAP_CUDA_LINKS_H
#define EP_BOOTSTRAP_CUDA_LINKS_H

/**
 * What connects the ranks' GPUs.
 */

#include "runtime/group.h"

/** Collective: set the group's whole_lines (runtime/lines.cuh), by the setting, or, where that says
 *  auto, by whether NVLink connects every two of the ranks' GPUs. */
EpStatus ep_cuda_choose_lines(EpGroup *group);

#endif
