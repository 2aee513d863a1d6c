/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_FAULT_H
#define MOE_FAULT_H

/**
 * Planted faults, so that tests see the check find them. LIBEP_TEST_MOE_FAULT=PHASE damages one
 * element of what that phase writes on rank 0, each time that it runs.
 */

#include "tools/moe/layer.h"

/** The MoePhase that the environment names, or a negative number. */
int moe_fault_phase(void);

/** Damage an element. NULL is allowed, and does nothing. False, with a message. */
bool moe_fault_plant(Layer *layer, const EpTensor *tensor);

#endif
