/* SPDX-License-Identifier: Apache-2.0 */
/* Wrong arguments of ep_combine and ep_combine_backward: see refusals.def. */
#include "tests/cases/fixture.h"

RefusalsTest(combine_arguments, wrong_tensors, "combine", "");
RefusalsTest(combine_arguments, wrong_tensors_of_batched, "combine_batched", "layout=batched");
