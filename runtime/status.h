/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_RUNTIME_STATUS_H
#define EP_RUNTIME_STATUS_H

/**
 * The only way to report errors. The function that finds an error sets its sentence, once, by
 * ep_fail or ep_refuse; its callers only return the status.
 */

#include <stddef.h>

#include "ep/ep.h"

#define EP_SENTENCE_BYTES 512

/** The public call that runs, and its rank: the start of every sentence. */
typedef struct EpCall {
    const char *name; /**< "ep_dispatch" */
    int rank;         /**< -1 where no rank is known yet */
    EpGroup *group;   /**< whose ranks wait for each other in this call, once it is known: a refusal
                           is left with it. NULL: nobody waits for it */
} EpCall;

/** Store the sentence for ep_last_error() and return `status`. */
EpStatus ep_fail(EpStatus status, const char *format, ...)
    __attribute__((cold, format(printf, 2, 3)));

/** Like ep_fail, with the prefix "rank R: call: argument: " (no "rank R: " if it is unknown). See
 *  ep_group_refuse. */
EpStatus ep_refuse(const EpCall *call, EpStatus status, const char *argument, const char *format,
                   ...) __attribute__((cold, format(printf, 4, 5)));

/*
 * Structs of callers grow only at their end, so a program compiled for any earlier version passes
 * the start of today's struct. All sizes from the first version's to today's are accepted. No size
 * cuts a number in two: a struct that starts with a size_t has a multiple of 8 bytes, and numbers
 * of 8 bytes start on such a multiple.
 */

/** The size of a struct's first version, given its last field then. This field never changes. */
#define EP_FIRST_SIZE(type, last_field) \
    (offsetof(type, last_field) + sizeof(((type *)NULL)->last_field))

/** Check the leading struct_size of a caller's struct that never grows, and is read in place:
 *  EpTensor and EpBootstrap, of which callers have arrays. */
EpStatus ep_check_struct(const EpCall *call, const char *argument, const void *object,
                         size_t expected);

/** Check the leading struct_size of a caller's struct: `first` .. `today`. */
EpStatus ep_check_grown_struct(const EpCall *call, const char *argument, const void *object,
                               size_t first, size_t today);

/** Check a caller's struct and copy the fields that it has over those of `out`, which holds today's
 *  size and the defaults. */
EpStatus ep_read_struct(const EpCall *call, const char *argument, const void *given, size_t first,
                        void *out);

/** Copy those fields of `value` that a caller's struct has to it. The caller's struct_size, which
 *  ep_check_grown_struct has accepted, stays. */
void ep_write_struct(void *out, const void *value);

/** Returns how many sentences this thread has set so far. */
unsigned ep_sentences(void);

/** Returns whether a number is an EpStatus. */
int ep_is_status(int number);

/** Replace control characters of a text, which only a user can have written, by "\\n", "\\t" or
 *  "\\x1b". So a sentence is one line, whatever it quotes. The text is cut to `bytes`. */
void ep_escape(char *text, size_t bytes);

#define EP_TRY(expression)                                                     \
    do {                                                                       \
        EpStatus ep_try_status = (expression);                                 \
        if (__builtin_expect(ep_try_status != EP_OK, 0)) return ep_try_status; \
    } while (0)

#endif
