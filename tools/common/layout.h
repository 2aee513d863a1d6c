/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TOOLS_COMMON_LAYOUT_H
#define TOOLS_COMMON_LAYOUT_H

/** The layouts as the tools know them, apart from the library: one line each. */

#include <stdbool.h>

#include "ep/ep.h"
#include "tools/common/option.h"

typedef struct Layout {
    EpLayout layout;
    const char *name;
    const char *capacity; /**< what ep_max_recv_rows counts */
    bool has_rows;        /**< a row has one slot, in a block of its source; else each entry has
                               one, in a slab of its expert */
    bool is_fixed;        /**< blocks or slabs have a fixed number of slots */
    bool is_sized;        /**< that number is rows_per_expert, else max_tokens */
} Layout;

/** All layouts; the last has no name. */
extern const Layout tool_layouts[];

const Layout *tool_layout(EpLayout layout);

/** The choices of --layout. */
extern const Choice option_layouts[];
#define OPTION_LAYOUTS "expert[-major]|flat|batched|rank-major"

#endif
