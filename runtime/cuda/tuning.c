/* SPDX-License-Identifier: Apache-2.0 */
/* The table of constants, and the choice of a group's. */
#include "runtime/cuda/tuning.h"

#include <stdio.h>
#include <string.h>

#define INITIAL(member, value, least, most, unit, how) .member = value,
const EpTuning ep_tuning_hopper = {EP_TUNING_MAP(INITIAL)};
#undef INITIAL

/* ---- rows ---------------------------------------------------------------------------------- */

typedef struct Row {
    int32_t capability;
    EpTuningLinks links;
    int32_t gpus;
    const EpTuning *constants;
} Row;

/* H100s and H200s were measured with 1, 2 and 4 GPUs. With 8 the division is good, but combine with
 * 32 multiprocessors is faster than with all: 1,612 us for 1,659, and 1,584 on the wire. */
static const Row rows[] = {{90, EP_LINKS_NONE, 1, &ep_tuning_hopper},
                           {90, EP_LINKS_NVLINK, 2, &ep_tuning_hopper},
                           {90, EP_LINKS_NVLINK, 4, &ep_tuning_hopper},
                           {90, EP_LINKS_NVLINK, 8, &ep_tuning_hopper}};

const EpTuning *ep_tuning_find(const EpTuningKey *key, int *known) {
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        if (rows[i].capability == key->capability && rows[i].links == key->links &&
            rows[i].gpus == key->gpus) {
            *known = 1;
            return rows[i].constants;
        }
    *known = 0;
    return &ep_tuning_hopper;
}

/* ---- a group's ----------------------------------------------------------------------------- */

/* The driver's name of the GPU is the part of `gpu` before the bus id. */
static EpTuningKey key_of(const EpGroup *group, EpTuningLinks links) {
    EpTuningKey key = {
        .capability = group->choice.sm, .gpus = group->nodes.sizes.ranks, .links = links};
    const char *comma = strrchr(group->choice.gpu, ',');
    int length = (int)(comma ? comma - group->choice.gpu : 0);
    snprintf(key.gpu, sizeof(key.gpu), "%.*s", length, group->choice.gpu);
    return key;
}

static void describe_key(const EpTuningKey *key, char *text, size_t bytes) {
    snprintf(text, bytes, "capability %d.%d, %d GPU%s%s", key->capability / 10,
             key->capability % 10, key->gpus, key->gpus == 1 ? "" : "s",
             key->links == EP_LINKS_NVLINK ? " over NVLink"
             : key->links == EP_LINKS_PEER ? " without NVLink"
                                           : "");
}

/* Each process says once that it guesses: most of its groups do. */
static void say_guess(const char *machine) {
    static int said;
    if (!__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED))
        EP_INFO("how blocks divide the work is a guess for %s: no table is known, so that of H100 "
                "and H200 is used; ep_tune measures one",
                machine);
}

EpStatus ep_tuning_open(const EpGroup *group, EpTuningLinks links, EpTuned *out) {
    const char *path = group->settings.tuning.text;
    char machine[64];
    int known, fits = 0;
    out->key = key_of(group, links);
    out->constants = *ep_tuning_find(&out->key, &known);
    describe_key(&out->key, machine, sizeof(machine));
    if (path[0]) EP_TRY(ep_tuning_read(path, &out->key, &out->constants, &fits));
    if (fits) {
        snprintf(out->source, sizeof(out->source), "the file %.110s", path);
        return EP_OK;
    }
    snprintf(out->source, sizeof(out->source), "%s%s%s", known ? "built in for " : "a guess for ",
             machine, path[0] ? ", which LIBEP_TUNING is not for" : "");
    if (path[0]) EP_INFO("LIBEP_TUNING: %s is not for %s, so it is not used here", path, machine);
    if (!known) say_guess(machine);
    return EP_OK;
}
