/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_CASES_REFUSALS_H
#define TESTS_CASES_REFUSALS_H

/**
 * The refused calls of refusals.def, in groups, and one body for all of them: reset the arguments,
 * change one, call, check the status and the words, and that outputs are untouched.
 */

#include "tests/harness/check.h"
#include "tests/harness/text.h"

/** An argument that a change names. */
typedef struct Part {
    const TextField *fields;
    int num_fields;
    void *object;
    const void **given; /**< what calls pass: `object` or NULL; NULL where they always pass it */
    const char *said;   /**< its name in sentences, or NULL */
} Part;

/** A tensor that calls pass by `given`, or another struct. */
Part part_tensor(EpTensor *tensor, const EpTensor **given, const char *said);
#define PART(fields, object) ((Part){(fields), LENGTH(fields), (object), NULL, NULL})

/** An argument that lies in the context of a Subject: its name, "" where changes name none. */
typedef struct Member {
    const char *name;
    const TextField *fields; /**< NULL: of a tensor */
    int num_fields;
    size_t at, given_at; /**< of what calls pass, or 0 */
} Member;

#define MEMBER(name, fields, type, member) \
    { (name), (fields), LENGTH(fields), offsetof(type, member), 0 }
#define TENSOR(name, type, tensor, given) \
    { (name), NULL, 0, offsetof(type, tensor), offsetof(type, given) }

/** What the rows of a group are tried on. */
typedef struct Subject {
    /** The context is valid, and is restored before each row. No call may change it. */
    const Member *members;
    int num_members;
    size_t bytes;
    EpStatus (*call)(void *context, const char *call);
    /** Without members: make all arguments of a call valid, and poison its outputs; return the
     * argument of a name; check that outputs are untouched. */
    void (*reset)(void *context, const char *call);
    Part (*find)(void *context, const char *call, const char *name);
    void (*check)(void *context, const char *call);
    /** Whether there is such a call; NULL: always. */
    int (*has)(void *context, const char *call);
    /** The calls of rows that name none; ends with NULL. */
    const char *const *calls;
    /** Whether another rank's arguments are changed, and this rank's are not. */
    int is_bystander;
} Subject;

/** Check all rows of a group. */
void check_refusals(const char *group, const Subject *subject, void *context);

#endif
