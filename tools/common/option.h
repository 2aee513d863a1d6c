/* SPDX-License-Identifier: Apache-2.0 */
#ifndef COMMON_OPTION_H
#define COMMON_OPTION_H

/** Command lines: one table feeds the parser and the help. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct Option Option;

/** Store `text` (NULL: no argument) in the tool's struct of values. False, with a message, if it
 *  does not parse. */
typedef bool (*OptionParser)(const Option *option, const char *text, void *values);

typedef struct Choice {
    const char *name;
    int64_t value;
} Choice;

struct Option {
    char letter; /**< 0: none */
    const char *name;
    const char *argument; /**< NULL: a flag; "[...]": optional */
    OptionParser parse;
    size_t offset; /**< of the value in the struct */
    int64_t low, high;
    const Choice *choices; /**< ends with the name NULL */
    const char *doc;
};

enum { OPTION_MAX = 64 };

typedef struct OptionTable {
    const char *usage;
    const Option *options;
    int count; /**< at most OPTION_MAX */
} OptionTable;

/** Parse the command line into `values`. False, with a message, if it is invalid. */
bool option_parse(const OptionTable *table, int argc, char **argv, void *values);

void option_print_help(const OptionTable *table, FILE *out);

/** Parsers of a bool, a text, a whole number from low to high, and one of the choices (int64_t). */
bool option_parse_flag(const Option *option, const char *text, void *values);
bool option_parse_text(const Option *option, const char *text, void *values);
bool option_parse_int(const Option *option, const char *text, void *values);
bool option_parse_choice(const Option *option, const char *text, void *values);

/** For parsers of a tool: where the value is, and a number from low to high. */
void *option_field(const Option *option, void *values);
bool option_read_real(const char *text, double low, double high, double *value);

/** Choices that tools share, and the name of a value. */
extern const Choice option_types[], option_backends[], option_quants[];
const char *option_choice_name(const Choice *choices, int64_t value);

#endif
