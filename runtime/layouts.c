/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/layouts.h"

#include <stdio.h>
#include <string.h>

#define LAYOUT(symbol, ...) [symbol] = {#symbol, __VA_ARGS__}

static const EpLayoutFacts table[] = {
    LAYOUT(EP_LAYOUT_EXPERT_MAJOR, "expert-major", 0, NULL, NULL),
    LAYOUT(EP_LAYOUT_FLAT, "flat", EP_SLOTS_OF_ROWS, NULL, NULL),
    LAYOUT(EP_LAYOUT_BATCHED, "batched", EP_SLOTS_FIXED | EP_SLOTS_SIZED, "local experts",
           "rows_per_expert"),
    LAYOUT(EP_LAYOUT_RANK_MAJOR, "rank-major", EP_SLOTS_OF_ROWS | EP_SLOTS_FIXED | EP_SLOTS_WEIGHED,
           "ranks", "rows of a source"),
};

#define LAST ((int)(sizeof(table) / sizeof(table[0])) - 1)

const EpLayoutFacts *ep_layout_facts(EpLayout layout) {
    return (int)layout >= 1 && (int)layout <= LAST ? &table[layout] : NULL;
}

EpLayout ep_layout_last(void) {
    return (EpLayout)LAST;
}

/* ---- sentences ----------------------------------------------------------------------------- */

/* Append a name, with its value if that is not 0. */
static void append(EpLayoutList *list, const char *before, const char *name, int value) {
    size_t length = strlen(list->text), room = sizeof(list->text) - length;
    char *end = list->text + length;
    if (value)
        snprintf(end, room, "%s%d (%s)", before, value, name);
    else
        snprintf(end, room, "%s%s", before, name);
}

static EpLayoutList list_layouts(uint32_t bits, int with_values, const char *last) {
    EpLayoutList list = {""};
    int left = 0;
    for (int i = 1; i <= LAST; i++)
        left += (table[i].bits & bits) == bits;
    for (int i = 1; i <= LAST; i++) {
        if ((table[i].bits & bits) != bits) continue;
        const char *before = !list.text[0] ? "" : left > 1 ? ", " : last;
        append(&list, before, table[i].name, with_values ? i : 0);
        left--;
    }
    return list;
}

EpLayoutList ep_layout_names(uint32_t bits, const char *last) {
    return list_layouts(bits, 0, last);
}

EpLayoutList ep_layout_choices(void) {
    return list_layouts(0, 1, " or ");
}
