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

/** What the rows of a group are tried on. */
typedef struct Subject {
    /** Make all arguments of a call valid, and poison its outputs. */
    void (*reset)(void *context, const char *call);
    /** Returns the argument of a name; that of changes without one is "". */
    Part (*find)(void *context, const char *call, const char *name);
    EpStatus (*call)(void *context, const char *call);
    /** Check that outputs are untouched. */
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
