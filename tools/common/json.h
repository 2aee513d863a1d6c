/* SPDX-License-Identifier: Apache-2.0 */
#ifndef COMMON_JSON_H
#define COMMON_JSON_H

/** A writer of JSON that keeps track of commas. The caller closes what it opens. */

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "tools/common/machine.h"

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

void json_put_machine(Json *j, const Machine *machine);

#endif
