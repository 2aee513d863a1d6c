/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/kept.h"

#include <stdatomic.h>
#include <stdlib.h>

typedef struct Kept {
    struct Kept *next;
    void *memory;
} Kept;

void ep_keep_memory(void *memory) {
    static _Atomic(Kept *) kept;
    Kept *entry = memory ? malloc(sizeof(*entry)) : NULL;
    if (!entry) return;
    *entry = (Kept){atomic_load(&kept), memory};
    while (!atomic_compare_exchange_weak(&kept, &entry->next, entry)) {
    }
}
