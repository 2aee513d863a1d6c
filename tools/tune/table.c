/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/tune/tune.h"

#include <stdlib.h>
#include <string.h>

/* Returns the value's first character, behind "NAME = " at the beginning of a line, or NULL. */
static const char *find(const Table *table, const char *name) {
    char line[96];
    int length = snprintf(line, sizeof(line), "\n%s = ", name);
    const char *at = strstr(table->text, line);
    if (at) return at + length;
    bench_fail("the table of this libep has no constant '%s'", name);
    return NULL;
}

bool table_get(const Table *table, const char *name, double *value) {
    const char *at = find(table, name);
    if (at) *value = strtod(at, NULL);
    return at != NULL;
}

bool table_set(Table *table, const char *name, double value) {
    const char *at = find(table, name);
    if (!at) return false;
    const Table before = *table;
    size_t head = (size_t)(at - table->text);
    const char *rest = before.text + head + strcspn(at, "\n");
    int length = snprintf(table->text + head, sizeof(table->text) - head, "%.6g%s", value, rest);
    return (size_t)length < sizeof(table->text) - head || bench_fail("the table is too long");
}

bool table_write(const Table *table, const char *path) {
    OutputFile file;
    if (!output_open(&file, path)) return false;
    fputs(table->text, file.stream);
    return output_commit(&file);
}
