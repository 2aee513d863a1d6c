/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/object.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define QUARANTINE_LENGTH 256

static pthread_mutex_t quarantine_mutex = PTHREAD_MUTEX_INITIALIZER;
static EpObject *oldest_dead, *newest_dead;
static int dead_count;

void *ep_object_create(EpObjectKind kind, size_t bytes) {
    EpObject *object = calloc(1, bytes);
    if (object) object->kind = kind;
    return object;
}

void ep_object_retire(EpObject *object) {
    EpObject *evicted = NULL;
    pthread_mutex_lock(&quarantine_mutex);
    /* atomic, like its load: see object.h */
    __atomic_store_n(&object->kind, EP_OBJECT_DEAD, __ATOMIC_RELAXED);
    object->next_dead = NULL;
    if (newest_dead)
        newest_dead->next_dead = object;
    else
        oldest_dead = object;
    newest_dead = object;
    if (++dead_count > QUARANTINE_LENGTH) {
        evicted = oldest_dead;
        oldest_dead = evicted->next_dead;
        dead_count--;
    }
    pthread_mutex_unlock(&quarantine_mutex);
    free(evicted);
}

EpStatus ep_object_check(const EpCall *call, const char *argument, const void *object,
                         EpObjectKind kind) {
    if (!object) return ep_refuse(call, EP_ERR_NULL, argument, "expected a pointer, got NULL");
    EpObjectKind got = __atomic_load_n(&((const EpObject *)object)->kind, __ATOMIC_RELAXED);
    if (got == kind) return EP_OK;
    if (got == EP_OBJECT_DEAD)
        return ep_refuse(call, EP_ERR_DESTROYED, argument,
                         "expected a live object, got one that was destroyed");
    return ep_refuse(call, EP_ERR_FOREIGN, argument,
                     "expected an object of libep, got other memory (0x%08x)", (unsigned)got);
}

typedef struct Kept {
    struct Kept *next;
    void *memory;
} Kept;

void ep_keep_memory(void *memory) {
    static _Atomic(Kept *) kept;
    Kept *entry = memory ? malloc(sizeof(*entry)) : NULL;
    if (!entry) return;
    *entry = (Kept){atomic_load_explicit(&kept, memory_order_relaxed), memory};
    while (!atomic_compare_exchange_weak_explicit(&kept, &entry->next, entry, memory_order_release,
                                                  memory_order_relaxed)) {
    }
}

void ep_owned_add(EpOwned **list, EpOwned *owned, void *object, void (*destroy)(void *object)) {
    *owned = (EpOwned){.object = object, .destroy = destroy, .next = *list, .link = list};
    if (owned->next) owned->next->link = &owned->next;
    *list = owned;
}

void ep_owned_remove(EpOwned *owned) {
    *owned->link = owned->next;
    if (owned->next) owned->next->link = owned->link;
}

void ep_owned_destroy_all(EpOwned **list) {
    while (*list)
        (*list)->destroy((*list)->object);
}
