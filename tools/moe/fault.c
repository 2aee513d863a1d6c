/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moe/fault.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/common/data.h"
#include "tools/common/util.h"
#include "tools/moe/phases.h"

int moe_fault_phase(void) {
    const char *name = getenv("LIBEP_TEST_MOE_FAULT");
    for (int p = 0; name && p < NUM_MOE_PHASES; p++)
        if (strcmp(name, moe_phase_name((MoePhase)p)) == 0) return p;
    return -1;
}

static float value_at(const EpTensor *t, int64_t i) {
    float value;
    data_to_float(t->type, (const char *)t->data + (size_t)i * ep_type_bytes(t->type), &value, 1);
    return value;
}

/* The largest element changes its sign: more than any bound allows. */
static void damage_number(const EpTensor *t) {
    int64_t at = 0;
    for (int64_t i = 1; i < tensor_elements(t); i++)
        if (fabsf(value_at(t, i)) > fabsf(value_at(t, at))) at = i;
    float value = -value_at(t, at);
    data_from_float(t->type, &value, (char *)t->data + (size_t)at * ep_type_bytes(t->type), 1);
}

static void damage_code(uint8_t *codes, int64_t count) {
    int64_t at = 0;
    for (int64_t i = 1; i < count; i++)
        if ((codes[i] & 0x7f) > (codes[at] & 0x7f)) at = i;
    codes[at] ^= 0x80;
}

static void damage(const EpTensor *tensor) {
    if (tensor->type == EP_TYPE_INT32)
        ((int32_t *)tensor->data)[0] ^= 1;
    else if (tensor->type == EP_TYPE_FP8_E4M3)
        damage_code(tensor->data, tensor_elements(tensor));
    else
        damage_number(tensor);
}

bool moe_fault_plant(Layer *layer, const EpTensor *tensor) {
    MoeDevice *d = &layer->device;
    if (!tensor || tensor_elements(tensor) == 0) return true;
    const size_t bytes = (size_t)tensor_bytes(tensor);
    EpTensor copy = *tensor;
    copy.data = bench_alloc(1, bytes, "a damaged tensor");
    bool ok = copy.data && d->download(d, copy.data, tensor->data, bytes);
    if (ok) damage(&copy);
    ok = ok && d->upload(d, tensor->data, copy.data, bytes);
    free(copy.data);
    return ok;
}
