/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/common/layout.h"

const Layout tool_layouts[] = {
    {EP_LAYOUT_EXPERT_MAJOR, "expert-major", "expert-major"},
    {EP_LAYOUT_FLAT, "flat", "flat", .has_rows = true},
    {EP_LAYOUT_BATCHED, "batched", "batched, per expert", .is_fixed = true, .is_sized = true},
    {EP_LAYOUT_RANK_MAJOR, "rank-major", "rank-major", .has_rows = true, .is_fixed = true},
    {0},
};

const Choice option_layouts[] = {{"expert", EP_LAYOUT_EXPERT_MAJOR},
                                 {"expert-major", EP_LAYOUT_EXPERT_MAJOR},
                                 {"flat", EP_LAYOUT_FLAT},
                                 {"batched", EP_LAYOUT_BATCHED},
                                 {"rank-major", EP_LAYOUT_RANK_MAJOR},
                                 {NULL, 0}};

const Layout *tool_layout(EpLayout layout) {
    const Layout *l = tool_layouts;
    while (l->name && l->layout != layout)
        l++;
    return l;
}
