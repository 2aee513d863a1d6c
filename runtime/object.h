/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_OBJECT_H
#define EP_RUNTIME_OBJECT_H

/**
 * Objects that callers hold pointers to. A destroyed object frees all that it owns, but its struct
 * stays readable in a quarantine until 256 others have been destroyed. So a call on a destroyed
 * handle returns EP_ERR_DESTROYED instead of undefined behaviour.
 *
 * Memory order. ep_group_abort may look at an object while another thread destroys it, so `kind` is
 * atomic. Relaxed is enough: it only decides whether the call goes on. What the object holds is
 * ordered by its caller, who hands it to other threads, and by mutexes.
 */

#include "runtime/status.h"

typedef enum EpObjectKind {
    EP_OBJECT_GROUP = 0x67704531, /* arbitrary, unlikely in stray memory */
    EP_OBJECT_HANDLE = 0x68704531,
    EP_OBJECT_MESH_COMM = 0x6d704531,
    EP_OBJECT_WEIGHT = 0x77704531,
    EP_OBJECT_DEAD = 0x64704531
} EpObjectKind;

/** First member of every such object. */
typedef struct EpObject {
    EpObjectKind kind;
    struct EpObject *next_dead;
} EpObject;

/** Allocate a zeroed object of `bytes` bytes. Returns NULL when out of memory. */
void *ep_object_create(EpObjectKind kind, size_t bytes);

/** Mark an object as destroyed and put it into the quarantine, which frees it later. */
void ep_object_retire(EpObject *object);

/** Returns EP_OK if `object` is a live object of that kind. */
EpStatus ep_object_check(const EpCall *call, const char *argument, const void *object,
                         EpObjectKind kind);

/** Keep memory to the end of the process, since a message that was given up may still use it. A
 *  list tells leak checkers that this is meant. Entries are pushed with release, and nothing takes
 *  them. NULL is allowed. */
void ep_keep_memory(void *memory);

/**
 * The link of an object that dies with its owner: a handle with its group, a weight with its mesh's
 * communicator. Owners lie in lower layers than what they own, so they know it by this alone.
 */
typedef struct EpOwned {
    void *object;
    void (*destroy)(void *object); /**< calls ep_owned_remove, too */
    struct EpOwned *next, **link;  /**< the owner's next one; the pointer to this one */
} EpOwned;

void ep_owned_add(EpOwned **list, EpOwned *owned, void *object, void (*destroy)(void *object));
void ep_owned_remove(EpOwned *owned);

/** Destroy what the owner's list still has. */
void ep_owned_destroy_all(EpOwned **list);

#endif
