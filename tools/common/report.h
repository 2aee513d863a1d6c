/* SPDX-License-Identifier: Apache-2.0 */
#ifndef COMMON_REPORT_H
#define COMMON_REPORT_H

/** Results as text and as JSON, and the machine that they are of. */

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "ep/ep.h"

/** Where and when the run took place. */
typedef struct Machine {
    char hostname[256];
    char cpu[128];
    long cores;
    int64_t memory; /**< bytes */
    char date[32];  /**< ISO 8601, UTC */
} Machine;

void machine_describe(Machine *out);

/* ---- text ---------------------------------------------------------------------------------- */

/** The library's version for printf. */
#define VERSION_FORMAT "%d.%d.%d"
#define VERSION_NUMBERS ep_version() / 10000, ep_version() / 100 % 100, ep_version() % 100

/** The line about the machine. */
void report_machine(const Machine *machine);

/** A number in a column of its own; "-" unless it is positive. */
void report_number(double value, int width, int digits);

/** The last column: the wrong elements; negative: not checked. Ends the line. */
void report_wrong_cell(int64_t wrong);

/** The last line: the sum of that column. */
void report_wrong(bool checked, int64_t wrong);

/* ---- JSON ---------------------------------------------------------------------------------- */

/** A writer that keeps track of commas. The caller closes what it opens. */
typedef struct Json {
    FILE *out;
    bool comma;
} Json;

/** Begin an object with the name of its format, as "ep_bench 1", and the library's version; end it.
 */
Json json_open(FILE *out, const char *format);
void json_close(Json *j);

/** Open and close with '{' and '}', or '[' and ']'. Elements of lists have no key: NULL. */
void json_begin(Json *j, const char *key, char bracket);
void json_end(Json *j, char bracket);

void json_put_text(Json *j, const char *key, const char *value);
void json_put_int(Json *j, const char *key, int64_t value);
void json_put_bool(Json *j, const char *key, bool value);
/** Infinities become null. */
void json_put_real(Json *j, const char *key, double value);
/** A negative count is unknown: null. */
void json_put_count(Json *j, const char *key, int64_t value);

/** Numbers that are not known are left out: real ones that are negative, and those not positive. */
void json_put_known(Json *j, const char *key, double value);
void json_put_positive(Json *j, const char *key, double value);

/** How many ranks there are, and what they are. */
void json_put_ranks(Json *j, int ranks, bool threads);
void json_put_machine(Json *j, const Machine *machine);

#endif
