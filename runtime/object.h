/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_OBJECT_H
#define EP_RUNTIME_OBJECT_H

/**
 * Life and death of the objects that callers hold pointers to. A destroyed object gives up all it
 * owns, but its small shell stays readable in a quarantine until enough others have died, so that
 * a call on a destroyed handle gets EP_ERR_DESTROYED rather than undefined behaviour.
 */

#include "runtime/status.h"

typedef enum EpObjectKind {
    EP_OBJECT_GROUP = 0x67704531, /* arbitrary, unlikely in stray memory */
    EP_OBJECT_HANDLE = 0x68704531,
    EP_OBJECT_DEAD = 0x64704531
} EpObjectKind;

/** First member of every such object. */
typedef struct EpObject {
    EpObjectKind kind;
    struct EpObject *next_dead;
} EpObject;

/** Zeroed memory for an object of `bytes` bytes; NULL when out of memory. */
void *ep_object_create(EpObjectKind kind, size_t bytes);

/** Mark dead and hand the shell to the quarantine, which frees it later. */
void ep_object_retire(EpObject *object);

/** EP_OK if `object` is a live object of that kind. */
EpStatus ep_object_check(const EpCall *call, const char *argument, const void *object,
                         EpObjectKind kind);

#endif
