/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/names.h"

#include <stdio.h>

#include "ep/ep_weight.h"
#include "runtime/dtype.h"
#include "runtime/layouts.h"
#include "runtime/quant.h"

typedef struct Enumerator {
    EpNames names;
    int value;
    const char *name;
} Enumerator;

#define ENUMERATOR(names, value) \
    { names, value, #value }

#define QUANT(name, ...) ENUMERATOR(EP_NAMES_QUANT, EP_QUANT_##name),
static const Enumerator enumerators[] = {ENUMERATOR(EP_NAMES_QUANT, EP_QUANT_NONE),
                                         ENUMERATOR(EP_NAMES_BLOCKS, EP_BLOCKS_ROWS),
                                         ENUMERATOR(EP_NAMES_BLOCKS, EP_BLOCKS_TILES),
                                         ENUMERATOR(EP_NAMES_BACKEND, EP_BACKEND_AUTO),
                                         ENUMERATOR(EP_NAMES_BACKEND, EP_BACKEND_HOST),
                                         ENUMERATOR(EP_NAMES_BACKEND, EP_BACKEND_CUDA),
                                         ENUMERATOR(EP_NAMES_MODE, EP_MODE_AUTO),
                                         ENUMERATOR(EP_NAMES_MODE, EP_MODE_THROUGHPUT),
                                         ENUMERATOR(EP_NAMES_MODE, EP_MODE_LATENCY),
                                         ENUMERATOR(EP_NAMES_OVERFLOW, EP_OVERFLOW_ERROR),
                                         ENUMERATOR(EP_NAMES_OVERFLOW, EP_OVERFLOW_DROP),
                                         ENUMERATOR(EP_NAMES_DUPLICATES, EP_DUPLICATES_KEEP),
                                         ENUMERATOR(EP_NAMES_DUPLICATES, EP_DUPLICATES_MERGE),
                                         ENUMERATOR(EP_NAMES_SUMS, EP_SUMS_BY_RANK),
                                         ENUMERATOR(EP_NAMES_SUMS, EP_SUMS_BY_ENTRY),
                                         ENUMERATOR(EP_NAMES_CHOICE, EP_CHOICE_NEAR),
                                         ENUMERATOR(EP_NAMES_CHOICE, EP_CHOICE_SPREAD),
                                         ENUMERATOR(EP_NAMES_TENSOR_KIND, EP_TENSOR_WEIGHT),
                                         ENUMERATOR(EP_NAMES_TENSOR_KIND, EP_TENSOR_EXPERT_WEIGHT),
                                         ENUMERATOR(EP_NAMES_AMAX, EP_AMAX_TENSOR),
                                         ENUMERATOR(EP_NAMES_AMAX, EP_AMAX_EXPERT),
                                         EP_QUANT_MAP(QUANT)};

static const char *find(EpNames names, int64_t value) {
    if (names == EP_NAMES_TYPE && ep_type_bytes((EpType)value)) return ep_type_name((EpType)value);
    const EpLayoutFacts *layout =
        names == EP_NAMES_LAYOUT ? ep_layout_facts((EpLayout)value) : NULL;
    if (layout) return layout->symbol;
    for (size_t i = 0; i < sizeof(enumerators) / sizeof(*enumerators); i++)
        if (enumerators[i].names == names && enumerators[i].value == value)
            return enumerators[i].name;
    return NULL;
}

static const char *name_form(int64_t code, char out[EP_NAME_BYTES]) {
    const char *quant = find(EP_NAMES_QUANT, code >> 3);
    const char *blocks = find(EP_NAMES_BLOCKS, 1 + (code >> 2 & 1));
    int is_quantised = code >> 3 != EP_QUANT_NONE;
    snprintf(out, EP_NAME_BYTES, "%s%s%s%s%s", quant ? quant : "?", is_quantised ? ", " : "",
             is_quantised ? blocks : "", code >> 1 & 1 ? ", transposed" : "",
             code & 1 ? ", by_rank" : "");
    return out;
}

const char *ep_name(EpNames names, int64_t value, char out[EP_NAME_BYTES]) {
    if (names == EP_NAMES_FORM) return name_form(value, out);
    const char *name = find(names, value);
    if (name)
        snprintf(out, EP_NAME_BYTES, "%s", name);
    else
        snprintf(out, EP_NAME_BYTES, "%lld", (long long)value);
    return out;
}
