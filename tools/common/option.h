/* SPDX-License-Identifier: Apache-2.0 */
#ifndef COMMON_OPTION_H
#define COMMON_OPTION_H

/** Command lines: one table feeds the defaults, the parser, the help, and the JSON's config. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "tools/common/report.h"

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
    const char *key;       /**< in the JSON's config; NULL: not there, or put by the tool */
    int64_t initial;       /**< the value without the option, if it is an int64_t */
    const char *doc;
};

enum { OPTION_MAX = 64 };

typedef struct OptionTable {
    const char *usage;
    const Option *options;
    int count; /**< at most OPTION_MAX */
} OptionTable;

/** Parse the command line into `values`, which is zero. False, with a message, if it is invalid. */
bool option_parse(const OptionTable *table, int argc, char **argv, void *values);

void option_print_help(const OptionTable *table, FILE *out);

/** Put the values whose options have a key. */
void option_put(const OptionTable *table, const void *values, Json *j);

/** The name of a choice's value, of the option of this name. */
const char *option_value_name(const OptionTable *table, const void *values, const char *name);

/** Parsers: a bool that is set; a text; a whole number from low to high; 0 or 1; a choice. Numbers
 *  and choices are int64_t. */
bool option_parse_flag(const Option *option, const char *text, void *values);
bool option_parse_text(const Option *option, const char *text, void *values);
bool option_parse_int(const Option *option, const char *text, void *values);
bool option_parse_switch(const Option *option, const char *text, void *values);
bool option_parse_choice(const Option *option, const char *text, void *values);

/** For parsers of a tool: where the value is, and a number from low to high. */
void *option_field(const Option *option, void *values);
bool option_read_real(const char *text, double low, double high, double *value);

/** Columns parse, offset, low, high and choices. A tool defines AT(member), the member's offset. */
#define OPTION_FLAG(member) option_parse_flag, AT(member), 0, 0, NULL
#define OPTION_TEXT(member) option_parse_text, AT(member), 0, 0, NULL
#define OPTION_SWITCH(member) option_parse_switch, AT(member), 0, 1, NULL
#define OPTION_INT(member, low, high) option_parse_int, AT(member), low, high, NULL
#define OPTION_CHOICE(member, choices) option_parse_choice, AT(member), 0, 0, choices

/** Choices that tools share, and the name of a value. */
extern const Choice option_types[], option_backends[], option_quants[];
const char *option_choice_name(const Choice *choices, int64_t value);

/* ---- what all tools have ------------------------------------------------------------------- */

typedef struct RunOptions {
    int64_t iterations, warmup;
    int64_t check, floor;
    int64_t seed;
    int64_t threads; /**< 0: ranks are MPI processes */
    const char *json_path;
    bool help, version;
} RunOptions;

/** Far above the size of any machine. Products of sizes still fit in 64 bits. */
#define OPTION_MAX_COUNT (1 << 24)

/* Rows of the table; the values begin with RunOptions run. */
#define OPTION_TIMING                                                        \
    {'n',                                                                    \
     "iterations",                                                           \
     "N",                                                                    \
     OPTION_INT(run.iterations, 1, 1000000),                                 \
     "iterations",                                                           \
     20,                                                                     \
     "timed iterations (default 20)"},                                       \
    {                                                                        \
        'w', "warmup", "N", OPTION_INT(run.warmup, 0, 1000000), "warmup", 3, \
            "untimed iterations before them (default 3)"                     \
    }
#define OPTION_JSON \
    { 'J', "json", "FILE", OPTION_TEXT(run.json_path), NULL, 0, "also write the results as JSON" }
#define OPTION_THREADS                                                        \
    {                                                                         \
        0, "threads", "N", OPTION_INT(run.threads, 1, EP_MAX_RANKS), NULL, 0, \
            "run N ranks as threads of this process, without mpirun"          \
    }
#define OPTION_HELP                                                                \
    {'h', "help", NULL, OPTION_FLAG(run.help), NULL, 0, "print this help"}, {      \
        0, "version", NULL, OPTION_FLAG(run.version), NULL, 0, "print the version" \
    }

/** Checks that tools share. False, with a message. */
bool option_check_threads(const RunOptions *options);
bool option_check_row(const char *name, int64_t elements, int64_t type);
bool option_check_alignment(int64_t alignment);

#endif
